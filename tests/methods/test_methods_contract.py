"""What every registered method must do; a new one is tested here by being registered."""

import pytest
import torch
from torch import nn

from hesscond.capture import MEMORY, capture
from hesscond.data import load
from hesscond.errors import ConfigError
from hesscond.hessians import unit_hessian
from hesscond.methods import Method, method_class, register, registered
from hesscond.models import MLP
from hesscond.probe import probe

METHODS = [m.name for m in registered()]


@pytest.fixture(scope="module")
def digits():
    data = load("digits")
    return data.train_inputs.flatten(1), data.train_targets


def trained(name, digits, *, batch, dtype, steps, probing=False, lr=0.02):
    x, y = digits[0].to(dtype), digits[1]
    model = MLP(64, [20, 20], 10, generator=torch.Generator().manual_seed(0)).to(dtype)
    method = method_class(name)(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        part = torch.randint(0, len(y), (batch,), generator=generator)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x[part]), y[part]).backward()
        method.transform_gradients()
        if probing:
            probe(model, nn.CrossEntropyLoss(), (x[part], y[part]), ["fc2"], units=[0], method=method)
        optimizer.step()
    loss = nn.functional.cross_entropy(model(x), y).item()
    return model, method, loss


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("batch", "steps"), [(1, 400), (2, 300), (60, 150)])
def test_it_trains(name, dtype, batch, steps, digits):
    start = trained(name, digits, batch=batch, dtype=dtype, steps=0)[2]
    lr = 0.02 if batch > 2 else 0.1
    assert trained(name, digits, batch=batch, dtype=dtype, steps=steps, lr=lr)[2] < 0.9 * start


@pytest.mark.parametrize("name", METHODS)
def test_probing_leaves_training_bit_identical(name, digits):
    with_probe = trained(name, digits, batch=16, dtype=torch.float32, steps=10, probing=True)[0]
    without = trained(name, digits, batch=16, dtype=torch.float32, steps=10)[0]
    assert all(torch.equal(a, b) for a, b in zip(with_probe.parameters(), without.parameters(), strict=True))


@pytest.mark.parametrize("name", METHODS)
def test_its_hessian_is_the_dense_one_in_its_coordinates(name, digits):
    model, method, _ = trained(name, digits, batch=30, dtype=torch.float64, steps=5)
    x, y = digits[0][:40].double(), digits[1][:40]
    P = method.preconditioner("fc2")
    result = probe(model, nn.CrossEntropyLoss(), (x, y), ["fc2"], method=method)["fc2"]
    plain = unit_hessian(capture(model, nn.CrossEntropyLoss(), (x, y), ["fc2"])["fc2"], 2, MEMORY).matrix()
    dense = torch.eye(21, dtype=torch.float64) if P is None else P.matrix(21)
    truth = dense.T @ plain @ dense
    assert torch.allclose(result.hessian(2), truth, rtol=1e-10, atol=1e-12 * float(truth.norm()))


@pytest.mark.parametrize("name", METHODS)
def test_its_state_saves_and_loads(name, digits):
    model, method, _ = trained(name, digits, batch=8, dtype=torch.float64, steps=3)
    twin = method_class(name)(model)
    twin.load_state_dict(method.state_dict())
    own, other = method.preconditioner("fc1"), twin.preconditioner("fc1")
    assert (own is None and other is None) or torch.equal(own.matrix(65), other.matrix(65))
    method.detach()
    twin.detach()
    assert not any(m._forward_hooks for m in model.modules())


@pytest.mark.parametrize("name", METHODS)
def test_it_says_what_it_is(name):
    method = method_class(name)
    assert method.summary
    assert method.source
    assert issubclass(method, Method)


def test_a_name_is_registered_once():
    class Again(method_class("vanilla")):
        name = "bnp"

    with pytest.raises(ConfigError, match="registered already"):
        register(Again)
