"""The benchmarks run, small: their figures come from the machine, what they say and how they fail is tested here."""

import json
import os
import re
import resource
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import hesscond

ROOT = Path(hesscond.__file__).parents[1]
BENCHMARKS = ROOT / "benchmarks"
#: What a plain checkout on a GPU machine need not have.
MISSING = [
    "pandas", "pydantic", "typer", "rich", "matplotlib", "pooch", "sklearn", "tomli_w", "tqdm", "pytest", "hypothesis",
    "curvlinops", "pyhessian", "hessian_eigenthings",
]  # fmt: skip


def run(script, *arguments, cwd, blocked=()):
    """A benchmark in another process, in which some packages cannot be imported."""
    (cwd / "sitecustomize.py").write_text(f"import sys\nsys.modules.update(dict.fromkeys({list(blocked)!r}))\n")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(cwd), str(ROOT)])}
    command = [sys.executable, str(BENCHMARKS / script), *map(str, arguments)]
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, check=False)


#: benchmarks/gpu.py on an accelerator made of the CPU.
ON_A_DEVICE = """
from gpu import main
from tests.pretend_device import pretend_device
with pretend_device():
    raise SystemExit(main())
"""


@pytest.mark.slow
def test_gpu_on_a_device(tmp_path):
    """Comparisons and timings on a device, so that nothing is broken where there is a GPU."""
    path = {**os.environ, "PYTHONPATH": os.pathsep.join([str(BENCHMARKS), str(ROOT)])}
    command = [sys.executable, "-c", ON_A_DEVICE, "--device", "pretend", "--out", str(tmp_path / "report.md")]
    done = subprocess.run(command, env=path, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, (tmp_path / "report.md").read_text(encoding="utf-8")[:8000]


@pytest.mark.share(3)
@pytest.mark.slow
def test_gpu_on_a_machine_without_one(tmp_path):
    before = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
    done = run("gpu.py", "--device", "cpu", "--out", "report.md", cwd=tmp_path, blocked=MISSING)
    seconds = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime - before
    assert done.returncode == 0, done.stdout + done.stderr
    assert "No GPU on this machine" in done.stdout
    report = (tmp_path / "report.md").read_text(encoding="utf-8")
    assert "No GPU on this machine" in report
    assert "## No failures" in report
    assert f"- torch: {torch.__version__}" in report
    for row in (
        "SGD step",
        "Hessian product",
        "all curvatures",
        "all 28 units, 1e-6",
        "whole layer 1, 1e-6",
        "4 channels",
        "the same",
    ):
        assert f"| {row}" in report or f"{row} " in report
    numbers = json.loads(re.search(r"```json\n(.*?)\n```", report, re.DOTALL)[1])
    assert len(numbers["checks"]) >= 24
    assert all(check["passed"] and check["blocks"] for check in numbers["checks"])
    for rows in numbers["timings"].values():
        assert all(row["median_s"] > 0 and row["error"] is None for row in rows)
    # of the processor: the clock's depend on what else the machine does
    assert seconds < 60


@pytest.mark.share(3)
@pytest.mark.slow
def test_engine_quick(tmp_path):
    arguments = "--quick", "--threads", 1, "--json", "numbers.json"
    done = run("engine.py", *arguments, cwd=tmp_path, blocked=(*MISSING, "backpack"))
    assert done.returncode == 0, done.stdout + done.stderr
    # tools on layer 2, on a block of the GPT, on the network; products
    assert done.stdout.count("not installed") == 8 + 7 + 5 + 3 * 4
    assert "FAILED" not in done.stdout
    numbers = json.loads((tmp_path / "numbers.json").read_text(encoding="utf-8"))
    units = {row["key"]: row for row in numbers["float64"]}["units"]
    assert units["hessians"] == 28
    assert units["widest"] <= 1e-6
    answers = {(a["tool"], a["block"]): a["says"] for a in [*numbers["peers"], *numbers["blocks"]]}
    blocks = "4 output units", "12 units of layer 2", "1 unit of layer 1", "whole layer 2", "layer normalization"
    for block in blocks:
        assert "ranks and bounds right" in answers["hesscond", block]
    assert "told the rank" in answers["torch.func.hessian", "1 unit of layer 1"]
    assert "layer normalization: 32 of 32 eigenvalues nonzero" in done.stdout
    for network in numbers["products"].values():
        for rows in network.values():
            assert all(row["median_s"] > 0 for row in rows if "curvlinops" not in row["what"])
    tops = {a["tool"]: a["says"] for a in numbers["top"]}
    for tool in ("hesscond, tol 1e-04", "hesscond, tol 1e-08", "hesscond's operator, eigsh"):
        assert float(tops[tool].split()[1]) < 1e-6
    assert re.search(r"^GPT: 207 units, 207 resolved, \S+e-1\d from the model's own", done.stdout, re.MULTILINE)


@pytest.mark.share(3)
@pytest.mark.slow
def test_everyday_quick(tmp_path):
    done = run("everyday.py", "--quick", "--threads", "1", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    tasks, waits, growth, checks = done.stdout.split("\n\n")[1:5]
    # ten where CIFAR-10 is at hand
    assert [float(line.split("|")[2]) > 0 for line in tasks.splitlines()[2:]] in ([True] * 9, [True] * 10)
    assert waits.splitlines()[2:]
    assert [line.split()[1] for line in growth.splitlines()[2:]] == ["width", "batch", "depth", "classes", "positions"]
    assert [line.split("|")[2].strip() for line in checks.splitlines()[2:]] == ["unit", "layer", "network"] * 2
