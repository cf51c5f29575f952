"""The benchmarks run, small: their figures come from the machine, what they say and how they fail is tested here."""

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
    assert "FAILED" not in report
    assert f"torch {torch.__version__}" in report
    assert int(re.search(r"(\d+) of \1 comparisons", report)[1]) >= 24
    for row in (
        "SGD step",
        "Hessian product",
        "forward pass, all curvatures",
        "all 28 units, 1e-6",
        "whole layer 1, 1e-6",
        "4 channels",
        "4 output units, the same",
    ):
        assert re.search(rf"^\| {row}.*\| +[\d.,]+ \|", report, re.MULTILINE), row
    # of the processor: the clock's depend on what else the machine does
    assert seconds < 60


@pytest.mark.share(3)
@pytest.mark.slow
def test_engine_quick(tmp_path):
    done = run("engine.py", "--quick", "--threads", 1, cwd=tmp_path, blocked=MISSING[-3:])
    assert done.returncode == 0, done.stdout + done.stderr
    # tools on layer 2, on a block of the GPT; products
    assert done.stdout.count("not installed") == 8 + 7 + 3 * 4
    assert "FAILED" not in done.stdout
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in done.stdout.splitlines() if "|" in line]
    units = next(row for row in rows if row[0] == "all 28 units, 1e-6")
    assert float(units[4]) <= 1e-6
    says = {(row[0], row[1]): row[-1] for row in rows}
    blocks = "4 output units", "12 units of layer 2", "1 unit of layer 1", "whole layer 2", "layer normalization"
    for block in blocks:
        assert "ranks and bounds right" in says[block, "hesscond"]
    assert "told the rank" in says["1 unit of layer 1", "torch.func.hessian"]
    assert "layer normalization: 32 of 32 eigenvalues nonzero" in done.stdout
    assert sum(row[0] == "hesscond, Gauss-Newton" and float(row[2]) > 0 for row in rows) == 3
    assert re.search(r"^GPT: 207 units, 207 resolved, \S+e-1\d from the model's own", done.stdout, re.MULTILINE)
    assert [row[0] for row in rows if row[0].startswith("4 × 4")] == [
        "4 × 4, trained, damped",
        "4 × 4, trained",
        "4 × 4, random",
    ]
    assert "60 products (" in done.stdout


@pytest.mark.share(3)
@pytest.mark.slow
def test_everyday_quick(tmp_path):
    done = run("everyday.py", "--quick", "--threads", "1", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    tasks, waits, beside, peaks, growth, checks, _, study, watch = done.stdout.strip().split("\n\n")[1:]
    # ten where CIFAR-10 is at hand
    assert [float(line.split("|")[2]) > 0 for line in tasks.splitlines()[2:]] in ([True] * 9, [True] * 10)
    assert waits.splitlines()[2:]
    # of a unit, a unit, and a network, by two tools each
    offs = re.findall(r"largest (\S+) off", beside)
    assert len(offs) == 6
    assert max(map(float, offs)) < 1e-12
    assert [float(line.split("|")[4]) < 1.2 for line in peaks.splitlines()[2:]] == [True] * 4
    assert [line.split()[1] for line in growth.splitlines()[2:]] == ["width", "batch", "depth", "classes", "positions"]
    assert [line.split("|")[2].strip() for line in checks.splitlines()[2:]] == ["unit", "layer", "network"] * 2
    assert [line.split()[1] for line in study.splitlines()[2:]] == ["vanilla", "bnp"]
    assert len(watch.splitlines()) == 2 + 3
