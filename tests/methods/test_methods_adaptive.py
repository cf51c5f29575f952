"""torch's adaptive optimizers against their formulas, and κ in M^½ against dense matrices."""

import math

import numpy as np
import pytest
import torch
from torch import nn

from hesscond.capture import eligible_layers
from hesscond.errors import ConfigError
from hesscond.hessians import Jacobi
from hesscond.methods import Adam, RMSProp, parse
from hesscond.probing.entry import probe
from tests.methods.contract import MethodContract, backward, build, digits, network


class TestVariants(MethodContract):
    specs = ("adam:start=first-gradient", "rmsprop:start=first-gradient")
    steps = {1: 150, 2: 100, 60: 40}  # noqa: RUF012


ADAM = {"b1": 0.8, "b2": 0.95, "eps": 1e-6}


def adam(g, t, s, start):
    """(M, averaged gradient) of Kingma and Ba's Algorithm 1, in numpy."""
    b1, b2, eps = ADAM.values()
    if start == "first-gradient" and t == 1:
        s["m"], s["v"] = g.copy(), g**2
    else:
        s["m"] = b1 * s.get("m", 0) + (1 - b1) * g
        s["v"] = b2 * s.get("v", 0) + (1 - b2) * g**2
    if start == "first-gradient":
        return 1 / (np.sqrt(s["v"]) + eps), s["m"]
    return 1 / (np.sqrt(s["v"] / (1 - b2**t)) + eps), s["m"] / (1 - b1**t)


def adagrad(g, t, s):
    s["v"] = s.get("v", 0) + g**2
    return 1 / (np.sqrt(s["v"]) + 1e-7), g


def rmsprop_average(g, t, s):
    """PREC's eq. (7): a sum over all gradients, without a recursion."""
    s.setdefault("squares", []).append(g**2)
    first, *others = s["squares"]
    v = 0.9 ** (t - 1) * first + sum(0.1 * 0.9 ** (t - i) * g2 for i, g2 in enumerate(others, 2))
    return 1 / (np.sqrt(v) + 1e-7), g


def rmsprop(g, t, s):
    s["v"] = 0.9 * s.get("v", 0) + 0.1 * g**2
    return 1 / (np.sqrt(s["v"]) + 1e-7), g


ADAM_OPTIONS = "beta_1=0.8,beta_2=0.95,epsilon=1e-6"
FORMULAS = {
    "adagrad:epsilon=1e-7": adagrad,
    "rmsprop:alpha=0.9,epsilon=1e-7": rmsprop,
    "rmsprop:alpha=0.9,epsilon=1e-7,start=first-gradient": rmsprop_average,
    f"adam:{ADAM_OPTIONS}": lambda *a: adam(*a, "corrected"),
    f"adam:{ADAM_OPTIONS},start=first-gradient": lambda *a: adam(*a, "first-gradient"),
    f"adamw:{ADAM_OPTIONS},weight_decay=0.3": lambda *a: adam(*a, "corrected"),
    f"adamw:{ADAM_OPTIONS},weight_decay=0.3,start=first-gradient": lambda *a: adam(*a, "first-gradient"),
}


def rows(layer, of):
    """(m, n̂) what ``of`` says of a layer's parameters, in the order [b_i, w_i]."""
    return np.concatenate([of(layer.bias)[:, None], of(layer.weight).reshape(len(layer.weight), -1)], 1)


def of_units(P, units, order):
    return np.stack([P.of_unit(unit).matrix(order).diagonal().numpy() for unit in range(units)])


@pytest.mark.share(3)
@pytest.mark.parametrize("kind", ["mlp", "cnn"])
@pytest.mark.parametrize("spec", FORMULAS)
def test_every_step_is_M_times_the_averaged_gradient_and_P_is_its_root(spec, kind):
    """20 steps with a learning rate that falls: p, and P before and after each, as the formulas say."""
    model, method = build(spec, kind)
    x, y = digits()
    optimizer = method.optimizer(0.01)
    decay = 0.3 if spec.startswith("adamw") else 0.0
    states = {p: {} for p in model.parameters()}
    for t in range(1, 21):
        lr = 0.01 / t
        optimizer.param_groups[0]["lr"] = lr
        part = slice(40 * t, 40 * t + 40)
        backward(model, method, x[part], y[part])
        M, expected = {}, {}
        for p, state in states.items():
            M[p], average = FORMULAS[spec](p.grad.numpy(), t, state)
            expected[p] = (1 - lr * decay) * p.detach().numpy() - lr * M[p] * average
        method.transform_gradients()
        for when in ("before the step", "after it"):
            for name, layer in eligible_layers(model).items():
                P = method.coordinates(name)
                root = rows(layer, lambda p, M=M: np.sqrt(M[p]))
                np.testing.assert_allclose(of_units(P, *root.shape), root, rtol=1e-12, err_msg=when)
            if when == "before the step":
                optimizer.step()
                method.after_step()
        for p, truth in expected.items():
            size = np.abs(truth).max()
            np.testing.assert_allclose(p.detach().numpy(), truth, rtol=1e-12, atol=1e-12 * size)


@pytest.mark.parametrize("alpha", [0.0, 0.5, 0.99])
@pytest.mark.parametrize(("momentum", "decay"), [(0.0, 0.0), (0.0, 0.1), (0.7, 0.1)])
def test_the_first_gradient_starts_rmsprop(alpha, momentum, decay):
    """The recursion in numpy, of one parameter, with the momentum and the weight decay of torch."""
    model = nn.Linear(2, 3, bias=False, dtype=torch.float64)
    optimizer = RMSProp(model, alpha=alpha, start="first-gradient").optimizer(
        0.01, momentum=momentum, weight_decay=decay
    )
    p = model.weight.detach().numpy().copy()
    generator = np.random.default_rng(0)
    v, buffer = np.zeros_like(p), 0.0
    for t in range(1, 13):
        g = generator.standard_normal(p.shape)
        model.weight.grad = torch.from_numpy(g)
        optimizer.step()
        g = g + decay * p
        v = alpha * v + (1 - alpha) * g**2 if t > 1 else g**2
        buffer = momentum * buffer + g / (np.sqrt(v) + 1e-8)
        p = p - 0.01 * buffer
        np.testing.assert_allclose(model.weight.detach().numpy(), p, rtol=1e-12)


def test_a_parameter_whose_gradient_comes_late_starts_then():
    """As torch counts the steps of every parameter by itself."""
    model = nn.Linear(2, 2, bias=True, dtype=torch.float64)
    method = Adam(model, beta_1=0.8, beta_2=0.95, epsilon=1e-6, start="first-gradient")
    optimizer = method.optimizer(0.1)
    states, first = {}, {model.weight: 1, model.bias: 3}
    for t in range(1, 6):
        before = {p: p.detach().numpy().copy() for p in model.parameters()}
        for p in model.parameters():
            p.grad = torch.full_like(p, 0.3 * t) if t >= first[p] else None
        optimizer.step()
        for p, begun in first.items():
            moved = p.detach().numpy() - before[p]
            if t < begun:
                assert not moved.any()
            else:
                M, average = adam(p.grad.numpy(), t - begun + 1, states.setdefault(p, {}), "first-gradient")
                np.testing.assert_allclose(moved, -0.1 * M * average, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("spec", ["adagrad", "adam", "adam:start=first-gradient", "adamw"])
def test_a_momentum_that_the_optimizer_has_not_is_refused(spec):
    with pytest.raises(ConfigError, match="has no momentum of its own"):
        parse(spec).create(network("mlp")).optimizer(0.1, momentum=0.9)


@pytest.mark.parametrize("spec", ["adagrad", "rmsprop", "adam", "adam:start=first-gradient"])
def test_coordinates_are_plain_before_the_first_step(spec):
    model, method = build(spec, "mlp")
    assert method.coordinates("fc2") is None
    method.optimizer(0.1)
    assert method.coordinates("fc2") is None
    x, y = digits()
    backward(model, method, x[:30], y[:30])
    assert method.coordinates("fc2") is None
    method.transform_gradients()
    assert method.coordinates("fc2") is not None


def test_what_takes_no_step_has_no_weight_in_M():
    model, method = build("adam", "mlp")
    model.fc2.bias.requires_grad_(False)
    model.fc3.requires_grad_(False)
    optimizer = method.optimizer(0.1)
    x, y = digits()
    backward(model, method, x[:30], y[:30])
    method.transform_gradients()
    optimizer.step()
    method.after_step()
    d = method.coordinates("fc2").d
    assert not d[:, 0].any()
    assert bool((d[:, 1:] > 0).all())
    assert method.coordinates("fc3") is None


def test_a_user_s_own_optimizer_is_read():
    model, twin = network("mlp"), network("mlp")
    x, y = digits()
    methods = [Adam(model), Adam(twin)]
    theirs = torch.optim.Adam([{"params": model.fc1.parameters()}, {"params": [*model.fc2.parameters()]}], lr=0.01)
    methods[0].attach(theirs)
    ours = methods[1].optimizer(0.01)
    twin.fc3.requires_grad_(False)
    for own, method, optimizer in zip((model, twin), methods, (theirs, ours), strict=True):
        backward(own, method, x[:30], y[:30])
        optimizer.step()
    assert torch.equal(methods[0].coordinates("fc2").d, methods[1].coordinates("fc2").d)
    assert methods[0].coordinates("fc3") is None
    with pytest.raises(ConfigError, match=r"reads the state of torch.optim.RMSprop, not that of Adam"):
        RMSProp(model).attach(theirs)
    with pytest.raises(ConfigError, match="reads the state"):
        parse("adam+l2").create(model).attach(torch.optim.SGD(model.parameters(), lr=0.1))


def test_a_zero_on_the_diagonal_is_left_as_it_is():
    model = network("mlp")
    x, y = digits()
    # unit 3 of fc2 is dead: column 4 of fc3's Hessians
    model.fc2.weight.data[3], model.fc2.bias.data[3] = 0, -1
    result = probe(model, nn.CrossEntropyLoss(), (x[:50], y[:50]), ["fc3"], method=Jacobi(), units=[0])["fc3"]
    diagonal = result.hessian(0).diagonal()
    assert diagonal[4] == 0
    assert math.isfinite(float(result.kappa[0]))
