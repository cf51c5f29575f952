"""The certified optimal diagonal of a layer's inputs: D against other diagonals, scipy and mpmath."""

import mpmath
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import minimize
from torch import nn

import hesscond
from hesscond.capture import capture
from hesscond.errors import ConfigError
from hesscond.methods import OptimalDiagonal, parse, registered
from hesscond.methods.optimal_diagonal import extended_factors
from tests.methods.first_layers import CASES, dense, rows_of
from tests.methods.first_layers import vectors as mixed


def vectors(samples):
    return mixed(samples, decades=4)


def extended(layer, x):
    """Ĥ of the first layer, (G, rows, n̂) numpy, by torch's unfold."""
    rows = rows_of(layer, x).transpose(0, 1)
    return (torch.cat([torch.ones_like(rows[..., :1]), rows], 2) if layer.bias is not None else rows).numpy()


def kappa(F):
    """κ⁺ of a matrix of full column rank, or with as many columns as live ones."""
    return np.linalg.cond(F)


def data_diagonal(model, x, **options):
    """D of each group of the first layer in the coordinates of the data, (G, n̂)."""
    inputs = capture(model, nn.MSELoss(), (x, torch.zeros_like(model(x))), ["0"])["0"].inputs
    statistics = OptimalDiagonal.data_statistics("0", inputs, **options)
    P = OptimalDiagonal.data_preconditioner(statistics, inputs.geometry)
    per_group = inputs.geometry.units // inputs.geometry.groups
    order = inputs.geometry.n_params
    return [P.of_unit(g * per_group).matrix(order).diagonal().numpy() for g in range(inputs.geometry.groups)]


def descended(F):
    """The smallest κ(FD) that scipy finds over log d from several starts."""
    n = F.shape[1]
    starts = [np.zeros(n), -np.log(np.linalg.norm(F, axis=0)), np.random.default_rng(0).normal(size=n)]
    found = []
    for start in starts:
        point = start
        for _ in range(2):
            point = minimize(lambda t: np.log(kappa(F * np.exp(t))), point, method="Powell").x
        found.append(kappa(F * np.exp(point)))
    return min(found)


@pytest.mark.parametrize("case", CASES)
def test_scipy_finds_nothing_better(case):
    make, data = CASES[case]
    model, (x, _) = make(), (vectors if data is mixed else data)(60)
    for H, d in zip(extended(model[0], x), data_diagonal(model, x), strict=True):
        assert (d > 0).all()
        best = descended(H) if H.shape[1] <= 6 else np.inf
        assert kappa(H * d) <= best * (1 + 1e-5)
        assert kappa(H * d) < kappa(H)
        # Powell is a local search: it comes near, from at least one of its starts
        if best < np.inf:
            assert best <= kappa(H * d) * 1.05


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 2**16),
    decades=st.floats(0, 6),
    exponents=st.lists(st.floats(-2, 2), min_size=6, max_size=6),
    size=st.sampled_from([1.0, 1e-1, 1e-3]),
)
def test_no_other_diagonal_is_better(seed, decades, exponents, size):
    """Neither any diagonal, nor a neighbour of the one found; and D⁻¹ follows the scales of the features."""
    generator = np.random.default_rng(seed)
    features = generator.normal(size=(30, 5)) @ generator.normal(size=(5, 5)) + generator.normal(size=5)
    features *= 10.0 ** generator.uniform(-decades / 2, decades / 2, 5)
    model = dense()
    (d,) = data_diagonal(model, torch.from_numpy(features))
    (H,) = extended(model[0], torch.from_numpy(features))
    other = 10.0 ** (size * np.array(exponents))
    reached = float(mp_cond(H * d))
    assert reached <= float(mp_cond(H * (d * other))) * (1 + 2e-6)
    assert reached <= float(mp_cond(H * other)) * (1 + 2e-6)


def mp_cond(F):
    """κ in 40 digits: the input, as it is, is exact."""
    with mpmath.workdps(40):
        G = mpmath.matrix(F.tolist())
        values = mpmath.eigsy(G.T * G, eigvals_only=True)
        return mpmath.sqrt(max(values) / min(values))


def test_its_factor_is_that_of_the_rows():
    x, _ = vectors(20)
    shifted = x + 1e3
    for bias in (True, False):
        model = dense(bias)
        inputs = capture(model, nn.MSELoss(), (shifted, torch.zeros(20, 3, dtype=torch.float64)), ["0"])["0"].inputs
        (F,) = extended_factors(OptimalDiagonal.data_statistics("0", inputs), bias=bias)
        (H,) = extended(model[0], shifted)
        np.testing.assert_allclose((F.T @ F).numpy(), H.T @ H / 20, rtol=1e-12)
        s = np.linalg.svd(F.numpy(), compute_uv=False)[: H.shape[1]]
        np.testing.assert_allclose(s, np.linalg.svd(H / 20**0.5, compute_uv=False), rtol=1e-9)


def test_dead_constant_and_collinear_features():
    """κ⁺ with them is at most that of D for what is left: they can be switched off, and never make it worse."""
    x, _ = vectors(40)
    zeros, constant = torch.zeros(40, 1, dtype=torch.float64), torch.full((40, 1), 0.1, dtype=torch.float64)
    collinear = x[:, :1] * 3 - x[:, 1:2]
    (plain,) = data_diagonal(dense(), x)
    small = kappa(extended(dense()[0], x)[0] * plain)
    wide = torch.cat([x, zeros, constant, collinear], 1)
    model = nn.Sequential(nn.Linear(8, 3)).double()
    (d,) = data_diagonal(model, wide)
    assert np.isfinite(d).all()
    assert (d > 0).all()
    assert d[6] == pytest.approx(np.delete(d, 6).max())
    s = np.linalg.svd(extended(model[0], wide)[0] * d, compute_uv=False)
    assert s[6] < 1e-12 * s[0]  # six columns are independent
    assert s[0] / s[5] <= small * (1 + 1e-5)


def test_probe_by_name_is_no_worse_than_any_diagonal_up_to_S():
    """For a quadratic loss S is a multiple of I, and κ(PᵀHP) = κ(ĤD)² itself; streamed or as one batch."""
    model, (x, _) = nn.Sequential(nn.Linear(5, 2)).double(), vectors(50)
    data = (x, torch.zeros(50, 2, dtype=torch.float64))
    (H,) = extended(model[0], x)
    truth = hesscond.optimal_diagonal_scaling(H, side="column")
    halves = [(data[0][:20], data[1][:20]), (data[0][20:], data[1][20:])]
    for points in (data, halves):
        found = hesscond.probe(model, nn.MSELoss(), points, method="optimal-diagonal")["0"]
        for value in map(float, found.kappa):
            assert truth.lower**2 * (1 - 1e-9) <= value <= truth.upper**2 * (1 + 3e-6)
    plain = [float(k) for k in hesscond.probe(model, nn.MSELoss(), data)["0"].kappa]
    assert value < plain[0] / 10


def test_wide_layers_are_refused_until_asked_for():
    model, x = nn.Sequential(nn.Linear(400, 3), nn.ReLU(), nn.Linear(3, 2)), torch.randn(4, 400)
    problem = (model, nn.CrossEntropyLoss(), (x, torch.zeros(4, dtype=torch.int64)))
    with pytest.raises(ConfigError, match="'0' has 401 parameters a unit, more than widest=300"):
        hesscond.probe(*problem, method="optimal-diagonal")
    assert hesscond.probe(*problem, ["2"], method="optimal-diagonal:widest=4,layers=2")["2"].kappa


def test_a_layer_that_sees_nothing_but_zeros_stays_as_it_is():
    (d,) = data_diagonal(nn.Sequential(nn.Linear(3, 2, bias=False)).double(), torch.zeros(4, 3, dtype=torch.float64))
    assert np.array_equal(d, np.ones(3))


def test_no_network_is_trained_with_it():
    with pytest.raises(ConfigError, match="is measured, not trained with"):
        parse("optimal-diagonal").create(dense())
    assert OptimalDiagonal not in registered()
