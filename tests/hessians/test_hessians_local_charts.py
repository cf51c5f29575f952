"""Coordinates that the Hessian itself tells: Jacobi, and the optimal diagonal scaling."""

import pytest
import torch
from torch import nn

from hesscond.errors import ConfigError
from hesscond.hessians import Jacobi, OptimalDiagonal, UnitScaling
from hesscond.probing import probe
from hesscond.scaling import optimal_diagonal_scaling


@pytest.fixture(scope="module")
def case():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3)).double()
    x = torch.randn(60, 6, dtype=torch.float64) * torch.logspace(-2, 2, 6, dtype=torch.float64)
    return model, nn.CrossEntropyLoss(), (x, torch.randint(0, 3, (60,)))


def cond(H):
    values = torch.linalg.eigvalsh(H)
    return float(values[-1] / values[0])


def test_jacobi_has_a_unit_diagonal(case):
    result = probe(*case, ["0"], method=Jacobi())["0"]
    plain = probe(*case, ["0"])["0"]
    for unit in range(5):
        H = plain.hessian(unit)
        d = H.diagonal().rsqrt()
        assert torch.allclose(result.hessian(unit), d[:, None] * H * d, rtol=1e-11, atol=1e-13)
        assert torch.allclose(result.hessian(unit).diagonal(), torch.ones(7).double(), atol=1e-12)
        assert float(result.kappa[unit]) == pytest.approx(cond(result.hessian(unit)), rel=1e-7)


@pytest.mark.parametrize("stream", [False, True])
def test_no_other_diagonal_is_better_than_the_optimal_one(case, stream):
    model, loss, (x, y) = case
    data = [(x[:25], y[:25]), (x[25:], y[25:])] if stream else (x, y)
    best = probe(model, loss, data, ["0"], method=OptimalDiagonal())["0"]
    jacobi = probe(model, loss, data, ["0"], method=Jacobi())["0"]
    plain = probe(model, loss, data, ["0"])["0"]
    for unit in range(5):
        H = plain.hessian(unit)
        F = torch.linalg.cholesky(H / H.diagonal().max()).T
        lower = optimal_diagonal_scaling(F, side="column").lower
        kappa = float(best.kappa[unit])
        assert lower**2 * (1 - 1e-6) <= kappa <= float(jacobi.kappa[unit]) * (1 + 1e-9)
        assert kappa == pytest.approx(lower**2, rel=1e-3)
        generator = torch.Generator().manual_seed(unit)
        for _ in range(20):
            d = H.diagonal().rsqrt() * torch.exp(0.3 * torch.randn(7, generator=generator, dtype=torch.float64))
            assert cond(d[:, None] * H * d) >= kappa * (1 - 1e-6)


def test_at_the_level_of_a_layer(case):
    plain = probe(*case, ["0"], level="layer")["0"]
    best = probe(*case, ["0"], level="layer", method=OptimalDiagonal())["0"]
    assert float(best.kappa) < float(plain.kappa)
    assert isinstance(OptimalDiagonal().at(plain.block(None)), UnitScaling)


def test_what_has_no_optimum_is_refused(case):
    model, loss, batch = case
    smooth = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3)).double()
    with pytest.raises(ConfigError, match="positive semidefinite"):
        float(probe(smooth, loss, batch, ["0"], units=[0], method=OptimalDiagonal())["0"].kappa[0])
    with pytest.raises(ConfigError, match="not for a whole network"):
        probe(model, loss, batch, level="network", method=OptimalDiagonal())


def test_a_dead_unit_does_not_keep_the_others_from_their_optimal_diagonal():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3)).double()
    data = torch.randn(20, 4).double(), torch.randint(0, 3, (20,))
    with torch.no_grad():
        model[0].bias[2] = -100.0
        model[2].weight[:, 2] = 0.0
    found = probe(model, nn.CrossEntropyLoss(), data, ["0"], method=OptimalDiagonal())["0"].kappa
    assert [kappa.rank for kappa in found] == [5, 5, 0, 5, 5]
    assert found[2].solver == "zero matrix"
    plain = probe(model, nn.CrossEntropyLoss(), data, ["0"])["0"].kappa
    for best, other in zip(found, plain, strict=True):
        assert not other.resolved or best.value <= other.value * (1 + 1e-6)
