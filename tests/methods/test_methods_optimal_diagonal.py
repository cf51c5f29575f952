"""The certified optimal diagonal of a layer's inputs: D against other diagonals, scipy and mpmath."""

import numpy as np
import pytest
import torch
from torch import nn

import hesscond
from hesscond.capture import capture
from hesscond.errors import ConfigError
from hesscond.methods import OptimalDiagonal, parse, registered
from hesscond.methods.optimal_diagonal import extended_factors
from tests.methods.first_layers import dense, rows_of
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
