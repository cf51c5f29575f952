"""Yardsticks, the coordinates that the Hessian itself defines: Jacobi, and the optimal diagonal scaling."""

import pytest
import torch
from torch import nn

from hesscond.errors import ConfigError
from hesscond.hessians import Jacobi, OptimalDiagonal, OptimalKronecker
from hesscond.hessians.coordinates.linear import DensePreconditioner, Kronecker, Scaling
from hesscond.probing.entry import probe
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


@pytest.mark.parametrize("level", ["unit", "layer", "network"])
def test_jacobi_has_a_unit_diagonal(case, level):
    layers, name = (None, "network") if level == "network" else (["0"], "0")
    plain, result = (probe(*case, layers, level=level, method=method)[name] for method in (None, Jacobi()))
    for unit in result.units if level == "unit" else [None]:
        H, found = plain.hessian(unit), result.hessian(unit)
        d = H.diagonal().abs().rsqrt()
        assert torch.allclose(found, d[:, None] * H * d, rtol=1e-9, atol=1e-9)
        assert torch.allclose(found.diagonal().abs(), torch.ones(len(d)).double(), atol=1e-12)
        if unit is not None:
            assert float(result.kappa[unit]) == pytest.approx(cond(found), rel=1e-7)


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


@pytest.mark.parametrize(
    ("method", "smooth", "asked", "message"),
    [
        (OptimalDiagonal(), True, {"layers": ["0"], "units": [0]}, "positive semidefinite"),
        (OptimalDiagonal(), False, {"level": "network"}, "Hessians of units and layers"),
        (OptimalKronecker(), False, {"layers": ["0"], "units": [0]}, "level='layer'"),
        (OptimalKronecker(), True, {"layers": ["0"], "level": "layer"}, "positive semidefinite"),
    ],
)
def test_what_has_no_optimum_is_refused(case, method, smooth, asked, message):
    model, loss, batch = case
    if smooth:
        model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3)).double()
    with pytest.raises(ConfigError, match=message):
        _ = probe(model, loss, batch, **asked, method=method)["0"].kappa


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


def test_the_optimal_kronecker_pair_of_a_layer(case):
    plain = probe(*case, level="layer")
    best = probe(*case, level="layer", method=OptimalKronecker())
    diagonal = probe(*case, level="layer", method=OptimalDiagonal())
    # the output layer has null vectors 1 ⊗ ĥ, the hidden one others: its pair is that of a local search
    for name, rank in (("0", 31), ("2", 12)):
        H = plain[name].hessian()
        P = OptimalKronecker().at(plain[name].block(None))
        dense = torch.kron(P.left, P.right.matrix(H.shape[0] // len(P.left)))
        values = torch.linalg.eigvalsh(dense.T @ H @ dense)
        assert best[name].kappa.rank == rank
        assert float(best[name].kappa) == pytest.approx(float(values[-1] / values[-rank]), rel=1e-6)
        assert float(best[name].kappa) < float(diagonal[name].kappa) < float(plain[name].kappa)


@pytest.mark.parametrize("size", [1e4, 1e8, 1e12, 1e16])
def test_a_null_direction_that_p_stretches_stays_one(case, size):
    """Round-off along 1 ⊗ ĥ, of a softmax's layer, times the size of P there is no eigenvalue."""
    Q = torch.linalg.qr(torch.cat([torch.ones(3, 1), torch.randn(3, 2)], 1).double())[0]
    L = Q @ torch.diag(torch.tensor([size, 1.0, 1.0]).double()) @ torch.linalg.qr(torch.randn(3, 3).double())[0]
    P = Kronecker(L, DensePreconditioner(torch.eye(6, dtype=torch.float64)))
    plain, found = (probe(*case, ["2"], level="layer", method=method)["2"].kappa for method in (None, P))
    assert plain.rank == 12
    # the column of Q is 1 up to round-off, which P stretches too
    assert not found.resolved or float(found) == pytest.approx(float(plain), rel=1e-6 + 1e-15 * size)
    assert not found.resolved or found.lower <= float(plain) <= found.upper
    assert found.resolved or size > 1e13


@pytest.mark.parametrize("normalization", [nn.BatchNorm1d(4), nn.GroupNorm(2, 4)])
@pytest.mark.parametrize("level", ["unit", "layer"])
def test_a_bias_in_front_of_a_normalization_is_left_alone(normalization, level):
    """Its diagonal entry is rounding, which Jacobi's scaling would make as large as the others."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), normalization, nn.SiLU(), nn.Linear(4, 2)).double()
    batch = torch.randn(6, 3, dtype=torch.float64), torch.randn(6, 2, dtype=torch.float64)
    found = probe(model, nn.MSELoss(), batch, ["0"], level, Jacobi())["0"]
    for unit, kappa in zip(found.units or [None], found.conditions, strict=True):
        H = probe(model, nn.MSELoss(), batch, ["0"], level)["0"].hessian(unit)
        size = H.diagonal().abs()
        d = size.where(size > 1e-13 * size.max(), 1.0).rsqrt()
        values = torch.linalg.eigvalsh(d[:, None] * H * d).abs().sort(descending=True).values
        rank = int((values > 1e-12 * values[0]).sum())
        assert (kappa.is_zero, kappa.rank) == (False, rank)
        assert kappa.value == pytest.approx(float(values[0] / values[rank - 1]), rel=1e-7)


def test_no_coordinates_make_a_hessian_zero():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2), nn.SiLU(), nn.Linear(2, 2)).double()
    batch = torch.randn(6, 3, dtype=torch.float64), torch.randn(6, 2, dtype=torch.float64)
    large = Scaling(torch.tensor([1e12, 1, 1, 1]))
    kappa = probe(model, nn.MSELoss(), batch, ["0"], "layer", large)["0"].kappa
    assert not kappa.resolved
    assert not kappa.is_zero
