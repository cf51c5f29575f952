"""The README is executed: its Python runs and prints what it says, its commands and files exist."""

import contextlib
import copy
import io
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from truth import layer_truth, unit_truth

import hesscond

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def executed(tmp_path_factory):
    """What README's Python leaves behind: its names, what it printed, and the folder it ran in."""
    folder = tmp_path_factory.mktemp("readme")
    namespace: dict[str, object] = {}
    printed = io.StringIO()
    before = os.getcwd()
    os.chdir(folder)
    try:
        with contextlib.redirect_stdout(printed):
            for block in re.findall(r"```python\n(.*?)```", README, re.DOTALL):
                exec(compile(block, "README.md", "exec"), namespace)
    finally:
        os.chdir(before)
    return namespace, printed.getvalue().splitlines(), folder


def test_its_python_runs_and_prints_what_it_says(executed):
    _, printed, folder = executed
    promised = re.search(r"print\(result\[\"2\"\]\.kappa\[0\]\)\s+# (.*)", README)
    assert promised is not None
    assert printed[0] == promised.group(1)
    assert (folder / "kappa.json").is_file()


def test_its_numbers_are_those_of_double_backward(executed):
    """Every number that README's Python prints, against the model's own second derivatives and LAPACK."""
    names, printed, _ = executed
    model, batch = names["model"], names["batch"]
    double = copy.deepcopy(model).double()
    inputs, targets = batch[0].double(), batch[1]
    start = torch.cat([p.detach().flatten() for p in double.parameters()])

    def loss(theta):
        parts = theta.split([p.numel() for p in double.parameters()])
        named = {name: part.view(p.shape) for (name, p), part in zip(double.named_parameters(), parts, strict=True)}
        return nn.functional.cross_entropy(torch.func.functional_call(double, named, (inputs,)), targets)

    truth = torch.func.hessian(loss)(start)
    values = torch.linalg.eigvalsh(truth)
    sizes = values.abs().sort(descending=True).values
    nonzero = int((sizes > 1e-13 * sizes[0]).sum())

    def kappa(H, rank):
        found = torch.linalg.eigvalsh(H).abs().sort(descending=True).values
        return float(found[0] / found[rank - 1])

    result, whole, bnp = names["result"], names["whole"], names["bnp"]
    last = unit_truth(model, nn.CrossEntropyLoss(), batch, "2", 0)
    assert result["2"].kappa[0].value == pytest.approx(kappa(last, 17), rel=1e-8)
    unit = unit_truth(model, nn.CrossEntropyLoss(), batch, "0", 3)
    torch.testing.assert_close(result["0"].hessian(unit=3), unit, rtol=1e-10, atol=1e-16)
    eigenvalues = result["0"].eigenvalues(unit=3)
    torch.testing.assert_close(eigenvalues, torch.linalg.eigvalsh(unit).flip(0)[: len(eigenvalues)], rtol=1e-8, atol=0)
    assert result["0"].kappa[3].value == pytest.approx(kappa(unit, result["0"].kappa[3].rank), rel=1e-6)
    layer = layer_truth(model, nn.CrossEntropyLoss(), batch, "0")
    assert whole["0"].kappa.value == pytest.approx(kappa(layer, whole["0"].kappa.rank), rel=1e-4)
    # P = U D of the batch
    P = torch.eye(21, dtype=torch.float64)
    P[0, 1:] = -inputs.mean(0)
    P = P / torch.cat([torch.ones(1), inputs.std(0, correction=0)]).double()
    assert bnp["0"].kappa[3].value == pytest.approx(kappa(P.T @ unit @ P, bnp["0"].kappa[3].rank), rel=1e-6)
    singular = torch.linalg.svdvals(inputs)
    assert f"{float((singular[0] / singular[-1]) ** 2):.4g}" in " ".join(printed)
    network, H, top = names["network"].kappa, names["H"], names["top"]
    assert network.rank == nonzero
    assert network.negative == int((values < -1e-13 * sizes[0]).sum())
    assert network.value == pytest.approx(float(sizes[0] / sizes[nonzero - 1]), rel=1e-3)
    torch.testing.assert_close(H @ names["v"], truth @ names["v"], rtol=1e-10, atol=1e-14)
    trace = H.trace()
    assert abs(trace.value - float(truth.trace())) <= 5 * trace.error + 1e-12
    extremes = torch.cat([values[:2], values[-2:]])
    torch.testing.assert_close(top.eigenvalues.sort().values, extremes, rtol=1e-8, atol=1e-12)
    share = hesscond.density(H).expectation(lambda x: x < 0)
    assert abs(share.value - network.negative / len(values)) <= share.error + 1e-12


def test_its_links_exist():
    for target in re.findall(r"\]\(([^)#]+)\)", README):
        assert (ROOT / target).exists(), target


@pytest.mark.parametrize("target", sorted(set(re.findall(r"make ([a-z-]+)", README))))
def test_its_make_targets_exist(target):
    done = subprocess.run(["make", "-n", target], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_its_commands_exist():
    from hesscond.cli import app

    known = {c.name or c.callback.__name__ for c in app.registered_commands} | {g.name for g in app.registered_groups}
    used = set(re.findall(r"hesscond ([a-z]+)", README)) - {"computes"}
    assert {"study", "table", "export", "figure"} <= used
    assert used <= known


def test_its_model_file_is_probed_as_it_says(tmp_path):
    source = re.search(r"```python\n(# mymodel.py\n.*?)```", README, re.DOTALL)
    table = re.search(r"\n(layer kind .*?\n6 .*?)\n```", README, re.DOTALL)
    assert source is not None
    assert table is not None
    (tmp_path / "mymodel.py").write_text(source.group(1), encoding="utf-8")
    command = [sys.executable, "-m", "hesscond", "probe", "mymodel.py:digits", "--figure", "kappa.png"]
    environment = {**os.environ, "COLUMNS": "80"}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert table.group(1) in done.stdout
    assert (tmp_path / "kappa.png").stat().st_size > 10_000
