"""Whitening: the step against explicit inverses, the data's own coordinates against orthogonality and numpy."""

import numpy as np
import pytest
import torch
from torch import nn

import hesscond
from hesscond.capture import RowFactor, capture, row_factor
from hesscond.errors import ConfigError
from hesscond.methods import Whitening, parse
from hesscond.probing.results import NETWORK
from tests.methods.contract import MethodContract, stacked_gradient
from tests.methods.first_layers import CASES, rows_of, vectors


class TestVariants(MethodContract):
    specs = ("whitening:update_every=3,epsilon=0.1", "whitening+layernorm")


@pytest.mark.parametrize("case", CASES)
def test_a_step_is_that_of_the_formula(case):
    """μ, C and the damped inverse of the first layer in numpy, over steps with and without a new decomposition."""
    make, data = CASES[case]
    model = make()
    method = parse("whitening:rho=0.7,epsilon=0.05,update_every=2").create(model)
    layer, bias = model[0], model[0].bias is not None
    groups, n = layer.weight.shape[0] // 2 if "groups" in case else 1, layer.weight[0].numel()
    mu, C = np.zeros((groups, n)), np.stack([np.eye(n)] * groups)
    for step, samples in enumerate((6, 1, 3, 9)):
        x, y = data(samples, step)
        model.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        raw = stacked_gradient(layer).numpy().reshape(groups, -1, n + bias)
        method.transform_gradients()
        H = rows_of(layer, x).numpy()
        for g in range(groups):
            mean = (H[:, g].mean(0) if len(H) > 1 else mu[g]) if bias else np.zeros(n)
            centred = H[:, g] - mean
            C[g] = 0.7 * C[g] + 0.3 * centred.T @ centred / len(H)
            mu[g] = (0.7 * mu[g] + 0.3 * H[:, g].mean(0)) if bias else 0
        if step % 2 == 0:
            damped = [np.linalg.inv(c + 0.05 * np.trace(c) / n * np.eye(n)) for c in C]
        q2 = max(n / samples, 1 if isinstance(layer, nn.Linear) else 4)
        found = stacked_gradient(layer).numpy().reshape(groups, -1, n + bias)
        for g in range(groups):
            w, b = raw[g][:, bias:], raw[g][:, :1]
            new = ((w - b * mu[g]) if bias else w) @ damped[g] / q2
            np.testing.assert_allclose(found[g][:, bias:], new, rtol=1e-9, atol=1e-11)
            if bias:
                np.testing.assert_allclose(found[g][:, 0], b[:, 0] / q2 - new @ mu[g], rtol=1e-9, atol=1e-10)
        P = method.coordinates("0")
        for unit in (0, layer.weight.shape[0] - 1):
            g = torch.from_numpy(raw.reshape(-1, n + bias)[unit])
            matrix = P.of_unit(unit).matrix(n + bias)
            truth = matrix @ (matrix.T @ g)
            assert torch.allclose(stacked_gradient(layer)[unit], truth, rtol=1e-9, atol=1e-11)


def captured(model, x, y):
    return capture(model, nn.CrossEntropyLoss(), (x, y), ["0"])["0"]


@pytest.mark.parametrize("samples", [3, 40])
@pytest.mark.parametrize("case", CASES)
def test_in_the_coordinates_of_the_data_the_columns_are_orthonormal(case, samples):
    make, data = CASES[case]
    own = captured(make(), *data(samples))
    geometry = own.inputs.geometry
    P = Whitening.data_preconditioner(row_factor(own.inputs), geometry)
    rows = own.inputs.slice(0, own.inputs.blocks).flatten(0, 1)
    for unit in range(geometry.units):
        H_hat = rows[:, geometry.group(unit)]
        whitened = P.of_unit(unit).right_multiply(H_hat)
        live = whitened[:, (whitened != 0).any(0)]
        truth = len(H_hat) * torch.eye(live.shape[1], dtype=torch.float64)
        assert torch.allclose(live.T @ live, truth, atol=1e-8 * len(H_hat))
        # nothing of the row space is left out: e, and the centred rows; without bias the rows
        assert live.shape[1] == np.linalg.matrix_rank(H_hat.numpy())


def test_dead_and_collinear_features_are_left_out():
    x, _ = vectors(30)
    h = torch.cat([x, x[:, :2] @ torch.tensor([[2.0], [1.0]], dtype=torch.float64), torch.full((30, 1), 3.0)], 1)
    model = nn.Sequential(nn.Linear(7, 3)).double()
    own = captured(model, h, torch.zeros(30, dtype=torch.int64))
    P = Whitening.data_preconditioner(row_factor(own.inputs), own.inputs.geometry)
    assert P.matrix(8).shape == (8, 6)
    assert not P.matrix(8)[7].any()
    # a feature of another scale is no reason to leave it out
    scaled = row_factor(
        captured(model, h * torch.logspace(-9, 9, 7, dtype=torch.float64), torch.zeros(30, dtype=torch.int64)).inputs
    )
    assert Whitening.data_preconditioner(scaled, own.inputs.geometry).matrix(8).shape == (8, 6)


@pytest.mark.parametrize("parts", [(30, 1, 9), (2, 2, 36), (20, 20)])
def test_merged_factors_are_those_of_all_rows(parts):
    """RᵀR = Σ (h − μ)(h − μ)ᵀ, with means far from zero."""
    rows = torch.randn(40, 2, 5, dtype=torch.float64) * torch.tensor([1, 1e-3, 1, 10, 1]) + 1e3
    found = None
    for part in rows.split(list(parts)):
        own = RowFactor.of(part)
        found = own if found is None else found.merged(own)
    for g in range(2):
        centred = (rows[:, g] - rows[:, g].mean(0)).numpy()
        R = found.R[g].numpy()
        size = np.outer(np.linalg.norm(centred, axis=0), np.linalg.norm(centred, axis=0))
        assert np.abs(R.T @ R - centred.T @ centred).max(where=size > 0, initial=0) <= 1e-9 * size.max()
        np.testing.assert_allclose(np.linalg.norm(R, axis=0), np.linalg.norm(centred, axis=0), rtol=1e-9)
    assert found.features.count == 40


@pytest.mark.share(3)
@pytest.mark.parametrize("case", CASES)
def test_probe_by_name_on_batch_stream_layer_and_network(case):
    make, data = CASES[case]
    model, (x, y) = make(), data(25)
    loss = nn.CrossEntropyLoss()
    own = captured(model, x, y)
    P = Whitening.data_preconditioner(row_factor(own.inputs), own.inputs.geometry)
    units, order = own.inputs.geometry.units, own.inputs.geometry.n_params
    stream = [(x[:4], y[:4]), (x[4:], y[4:])]
    plain = hesscond.probe(model, loss, (x, y), ["0"])["0"]
    batch = hesscond.probe(model, loss, (x, y), ["0"], method="whitening")["0"]
    streamed = hesscond.probe(model, loss, stream, ["0"], method="whitening")["0"]
    for unit in (0, units - 1):
        matrix = P.of_unit(unit).matrix(order)
        truth = matrix.T @ plain.hessian(unit) @ matrix
        assert torch.allclose(batch.hessian(unit), truth, atol=1e-9 * float(truth.norm()))
        # P is the same up to a rotation
        values = torch.linalg.eigvalsh(truth)
        assert torch.allclose(torch.linalg.eigvalsh(streamed.hessian(unit)), values, atol=1e-8 * float(values[-1]))
    whole = hesscond.probe(model, loss, (x, y), ["0"], level="layer")["0"].hessian()
    big = torch.block_diag(*(P.of_unit(unit).matrix(order) for unit in range(units)))
    values = torch.linalg.eigvalsh(big.T @ whole @ big)
    for points in ((x, y), stream):
        layer = hesscond.probe(model, loss, points, ["0"], level="layer", method="whitening")["0"].hessian()
        assert torch.allclose(torch.linalg.eigvalsh(layer), values, atol=1e-8 * float(values[-1]))
    network = hesscond.probe(model, loss, (x, y), ["0"], level="network", method="whitening")[NETWORK].hessian()
    assert torch.allclose(torch.linalg.eigvalsh(network), values, atol=1e-8 * float(values[-1]))


def test_a_layer_that_sees_nothing_but_zeros_stays_finite():
    model = nn.Sequential(nn.Linear(3, 2))
    method = parse("whitening:rho=0").create(model)
    model(torch.zeros(4, 3)).square().sum().backward()
    method.transform_gradients()
    assert all(torch.isfinite(p.grad).all() for p in model.parameters())


def test_diverged_statistics_end_in_a_diverged_loss_and_not_in_an_error():
    model = nn.Linear(3, 2)
    method = parse("whitening:update_every=1").create(model)
    for size in (1.0, torch.inf):
        loss = model(size * torch.ones(4, 3)).square().mean()
        loss.backward()
        method.transform_gradients()
    assert not loss.isfinite()
    assert not model.weight.grad.isfinite().any()


def test_transposed_convolutions_can_be_probed_but_not_trained():
    torch.manual_seed(0)
    model = nn.Sequential(nn.ConvTranspose2d(1, 2, 2)).double()
    with pytest.raises(ConfigError, match="not defined for transposed"):
        parse("whitening").create(model)
    x, loss = torch.randn(4, 1, 3, 3, dtype=torch.float64), nn.MSELoss()
    result = hesscond.probe(model, loss, (x, torch.zeros(4, 2, 4, 4, dtype=torch.float64)), method="whitening")["0"]
    # the loss is quadratic with the same S for all outputs: whitened, nothing is left to condition
    assert all(float(kappa) == pytest.approx(1, rel=1e-9) for kappa in result.kappa)
