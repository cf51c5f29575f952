"""The numbers that README and docs/howto/from-python.md print, against second derivatives of the model and LAPACK."""

import contextlib
import copy
import io
from pathlib import Path

import pytest
import torch
from torch import nn

import hesscond
from tests import documented
from tests.truth import layer_truth, network_truth, unit_truth

ROOT = Path(__file__).parents[1]
LOSS = nn.CrossEntropyLoss()


def executed(page, folder):
    """What a page's Python leaves behind: its names, and what it printed."""
    names: dict[str, object] = {}
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.chdir(folder):
        for block in documented.blocks(page.read_text(encoding="utf-8")):
            if block.language == "python":
                exec(compile(block.text, page.name, "exec"), names)
    return names, printed.getvalue()


@pytest.fixture(scope="module")
def session(tmp_path_factory):
    folder = tmp_path_factory.mktemp("session")
    return *executed(ROOT / "docs" / "howto" / "from-python.md", folder), folder


def dense(model, batch):
    """The Hessian of all parameters."""
    return network_truth(copy.deepcopy(model).double(), LOSS, (batch[0].double(), batch[1]))


def ratio(H, rank):
    """|λ|max over the smallest of the ``rank`` largest |λ|."""
    found = torch.linalg.eigvalsh(H).abs().sort(descending=True).values
    return float(found[0] / found[rank - 1])


def nonzero(H):
    """How many |λ| are larger than the rounding of the largest."""
    sizes = torch.linalg.eigvalsh(H).abs()
    return int((sizes > 1e-13 * sizes.max()).sum())


def preconditioned(H, inputs):
    """PᵀHP of a unit with P = U D of the layer's inputs."""
    P = torch.eye(inputs.shape[1] + 1, dtype=torch.float64)
    P[0, 1:] = -inputs.mean(0)
    P = P / torch.cat([torch.ones(1), inputs.std(0, correction=0)]).double()
    return P.T @ H @ P


def test_every_number_of_the_readme(tmp_path):
    names, printed = executed(ROOT / "README.md", tmp_path)
    model, batch = names["model"], names["batch"]
    last = unit_truth(model, LOSS, batch, "2", 0)
    with torch.no_grad():
        hidden = model[:2](batch[0]).double()
    H = dense(model, batch)
    expected = [ratio(last, 17), ratio(preconditioned(last, hidden), 17), ratio(H, nonzero(H))]
    kappas = names["units"]["2"].kappa[0], names["bnp"]["2"].kappa[0], names["whole"]["network"].kappa
    for kappa, true, rtol, line in zip(kappas, expected, (1e-8, 1e-6, 1e-3), printed.splitlines(), strict=True):
        assert kappa.value == pytest.approx(true, rel=rtol)
        assert line.startswith(f"κ = {true:.4g} ")
    assert kappas[2].rank == nonzero(H)
    assert kappas[2].negative == int((torch.linalg.eigvalsh(H) < -1e-13 * H.norm()).sum())


def test_units_and_layers(session):
    names, _, _ = session
    model, batch, result = names["model"], names["batch"], names["result"]
    assert result["2"].kappa[0].value == pytest.approx(ratio(unit_truth(model, LOSS, batch, "2", 0), 17), rel=1e-8)
    unit = unit_truth(model, LOSS, batch, "0", 3)
    torch.testing.assert_close(result["0"].hessian(unit=3), unit, rtol=1e-10, atol=1e-16)
    eigenvalues = result["0"].eigenvalues(unit=3)
    torch.testing.assert_close(eigenvalues, torch.linalg.eigvalsh(unit).flip(0)[: len(eigenvalues)], rtol=1e-8, atol=0)
    assert result["0"].kappa[3].value == pytest.approx(ratio(unit, result["0"].kappa[3].rank), rel=1e-6)
    layer = names["whole"]["0"].kappa
    assert layer.value == pytest.approx(ratio(layer_truth(model, LOSS, batch, "0"), layer.rank), rel=1e-4)
    own = names["bnp"]["0"].kappa[3]
    assert own.value == pytest.approx(ratio(preconditioned(unit, batch[0].double()), own.rank), rel=1e-6)


def test_matrices_and_factors(session):
    names, printed, _ = session
    singular = torch.linalg.svdvals(names["batch"][0].double())
    assert f"{float((singular[0] / singular[-1]) ** 2):.4g}" in printed
    assert names["best"].lower <= names["best"].kappa


def test_the_network_and_its_operator(session):
    names, _, _ = session
    H, network, top, truth = names["H"], names["network"].kappa, names["top"], dense(names["model"], names["batch"])
    values = torch.linalg.eigvalsh(truth)
    assert network.rank == nonzero(truth)
    assert network.negative == int((values < -1e-13 * values.abs().max()).sum())
    assert network.value == pytest.approx(ratio(truth, network.rank), rel=1e-3)
    torch.testing.assert_close(H @ names["v"], truth @ names["v"], rtol=1e-10, atol=1e-14)
    trace = hesscond.operators.trace(H)
    assert abs(trace.value - float(truth.trace())) <= 5 * trace.error + 1e-12
    extremes = torch.cat([values[:2], values[-2:]])
    torch.testing.assert_close(top.eigenvalues.sort().values, extremes, rtol=1e-8, atol=1e-12)
    share = hesscond.density(H).negative
    assert abs(share.value - network.negative / len(values)) <= share.error + 1e-12
