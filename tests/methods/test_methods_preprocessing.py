"""Standardized and min-max normalized inputs, and the Hessian of the first layer."""

import copy

import numpy as np
import pytest
import torch
from torch import nn

from hesscond.errors import ConfigError
from hesscond.hessians import HessianOperator
from hesscond.methods import MinMax, Standardization, parse
from hesscond.models import MLP
from hesscond.probing.entry import probe
from tests.methods.contract import MethodContract, build, digits, network


class TestVariants(MethodContract):
    specs = ("standardize+bnp",)
    steps = {1: 150, 2: 100, 60: 40}  # noqa: RUF012


def images(samples=50, seed=0):
    """(N, 2, 3, 3) of different scales, with a constant pixel."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((samples, 2, 3, 3)) * rng.uniform(0.1, 30, (2, 3, 3)) + rng.uniform(-5, 5, (2, 3, 3))
    x[:, 1, 2, 0] = 0.3
    return x


def transformed(method, x):
    """By hand, in numpy."""
    shift = x.mean(0) if method == "standardize" else x.min(0)
    scale = x.std(0) if method == "standardize" else x.max(0) - shift
    constant = x.max(0) == x.min(0)
    assert constant.sum() == 1
    return (x - shift) / np.where(constant, 1, scale)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("samples", [50, 5000])
@pytest.mark.parametrize("name", ["standardize", "minmax"])
def test_the_model_sees_transformed_inputs(name, samples, dtype):
    x = torch.from_numpy(images(samples)).to(dtype)
    model = nn.Sequential(nn.Flatten()).to(dtype)
    method = parse(name).create(model)
    method.fit(x)
    truth = transformed(name, x.double().numpy())
    found = model(x).double().numpy()
    tolerance = 1e-12 if dtype == torch.float64 else 2e-5
    np.testing.assert_allclose(found, truth.reshape(samples, -1), rtol=tolerance, atol=tolerance)
    if name == "minmax":
        assert found.max() <= 1 + 1e-6
    # other data are transformed by the statistics of these
    assert not torch.allclose(model(x + 1), model(x))
    method.detach()
    assert torch.equal(model(x), x.flatten(1))


def test_a_feature_of_range_one_is_not_constant():
    x = torch.tensor([[0.0, 2.0], [1.0, 2.0]])
    method = MinMax(nn.Linear(2, 2))
    method.fit(x)
    assert method.model.input_scale.tolist() == [1.0, 1.0]


def test_it_is_in_the_state_of_the_model():
    x, _ = digits()
    model, _ = build("standardize", "mlp")
    twin = network("mlp")
    other = Standardization(twin)
    other.fit(2 * x + 1)
    assert not torch.allclose(model(x[:5]), twin(x[:5]))
    twin.load_state_dict(model.state_dict())
    assert torch.equal(model(x[:5]), twin(x[:5]))
    assert torch.equal(copy.deepcopy(model)(x[:5]), model(x[:5]))


def merged(model, method):
    """A network of raw inputs with the same function: its first layer by hand."""
    plain = copy.deepcopy(model)
    plain._forward_pre_hooks.clear()
    shift, scale = (getattr(model, name).flatten() for name in ("input_shift", "input_scale"))
    with torch.no_grad():
        plain.fc1.weight /= scale
        plain.fc1.bias -= plain.fc1.weight @ shift
    return plain


@pytest.mark.parametrize("name", ["standardize", "minmax"])
def test_its_hessian_is_that_of_the_merged_network_in_P(name):
    """H' = PᵀHP for every unit of the first layer, and H for the others."""
    x, y = digits()
    model = MLP(64, [6, 5], 10, activation="tanh", generator=torch.Generator().manual_seed(0)).double()
    method = parse(name).create(model)
    method.fit(x)
    plain = merged(model, method)
    batch = x[:150], y[:150]
    assert torch.allclose(model(batch[0]), plain(batch[0]), rtol=1e-12, atol=1e-12)
    P = torch.eye(65, dtype=torch.float64)
    shift, scale = (getattr(model, at).flatten() for at in ("input_shift", "input_scale"))
    P[0, 1:] = -shift / scale
    P[1:, 1:] = torch.diag(1 / scale)
    same = torch.eye(7, dtype=torch.float64)
    for layer, unit, own_P in (("fc1", 0, P), ("fc1", 3, P), ("fc2", 0, same), ("fc2", 1, same)):
        own = HessianOperator(model, nn.CrossEntropyLoss(), batch, layers=[layer], unit=unit).to_dense()
        H = HessianOperator(plain, nn.CrossEntropyLoss(), batch, layers=[layer], unit=unit).to_dense()
        truth = own_P.T @ H @ own_P
        assert torch.allclose(own, truth, rtol=1e-10, atol=1e-10 * float(truth.norm()))
        probed = probe(model, nn.CrossEntropyLoss(), batch, [layer], units=[unit])[layer].hessian(unit)
        assert torch.allclose(probed, truth, rtol=1e-10, atol=1e-10 * float(truth.norm()))


def test_what_cannot_be_is_refused():
    x, _ = digits()
    model = network("mlp")
    method = parse("standardize").create(model)
    with pytest.raises(ConfigError, match="call fit first"):
        model(x[:5])
    with pytest.raises(ConfigError, match="transformed already"):
        MinMax(model)
    with pytest.raises(ConfigError, match="transformed already"):
        parse("standardize+minmax").create(network("mlp"))
    for bad in (x.flatten(1)[:0], torch.zeros(5), torch.zeros(5, 2, dtype=torch.int64)):
        with pytest.raises(ConfigError, match="is fitted to inputs"):
            method.fit(bad)
    spoilt = x.clone()
    spoilt[3, 0, 2, 2] = float("nan")
    with pytest.raises(ConfigError, match="NaN or infinite"):
        method.fit(spoilt)
    method.fit(x)
    with pytest.raises(ConfigError, match="first positional argument"):
        model(x=x[:5])
