"""Gauss–Newton as a method: G by double backward, M and its root in numpy."""

import numpy as np
import pytest
import torch
from torch import nn

import hesscond
from hesscond.errors import ConfigError
from hesscond.hessians.coordinates.linear import UnitCoordinates
from hesscond.methods import parse
from tests.catalogue.parts import Net
from tests.methods.contract import MethodContract
from tests.methods.test_methods_factored import inverse_root


@pytest.mark.slow
class TestSlowVariants(MethodContract):
    specs = ("gauss-newton:damping=0.1",)


def twice():
    """A layer that is called twice."""
    return Net(lambda m, x: m.outer(m.inner(torch.tanh(m.inner(x)))), inner=nn.Linear(4, 4), outer=nn.Linear(4, 3))


def dense():
    return nn.Sequential(nn.Linear(5, 4), nn.ReLU(inplace=True), nn.Linear(4, 3))


def convolutional():
    return nn.Sequential(nn.Conv2d(2, 3, 2, padding=1, bias=False), nn.Tanh(), nn.Flatten(), nn.Linear(48, 3))


def tokens():
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3), nn.Flatten())


#: Model, shape of an input, samples (fewer and more rows than parameters), the layer.
NETWORKS = {
    "dense": (dense, (5,), 4, "0"),
    "dense, many samples": (dense, (5,), 40, "0"),
    "convolution": (convolutional, (2, 3, 3), 3, "0"),
    "convolution, many samples": (convolutional, (2, 3, 3), 30, "0"),
    "behind it": (convolutional, (2, 3, 3), 6, "3"),
    "a layer called twice": (twice, (4,), 5, "inner"),
    "several positions": (tokens, (2, 4), 3, "0"),
}
WEIGHTS = torch.tensor([0.5, 2.0, 1.0], dtype=torch.float64)
LOSSES = {
    "cross-entropy": (nn.CrossEntropyLoss(), lambda z: torch.arange(len(z)) % 3),
    "weighted": (nn.CrossEntropyLoss(weight=WEIGHTS), lambda z: torch.arange(len(z)) % 3),
    "squared error": (nn.MSELoss(), lambda z: torch.zeros_like(z)),
    "logistic": (nn.BCEWithLogitsLoss(), lambda z: (torch.arange(z.numel()).view_as(z) % 2).to(z)),
    "no curvature": (nn.L1Loss(), lambda z: torch.full_like(z, 5.0)),
}


def made(network, samples=None):
    make, shape, count, layer = NETWORKS[network]
    torch.manual_seed(0)
    model = make().double()
    return model, torch.randn(samples or count, *shape, dtype=torch.float64), layer


def stacked(layer, tensors):
    """[b, W] (m, n̂) of a pair for weight and bias."""
    weight = tensors[0].flatten(1)
    return weight if layer.bias is None else torch.cat([tensors[1][:, None], weight], 1)


def gauss_newton(model, name, x, loss):
    """Σ JᵀSJ (m n̂, m n̂) with S and J of all outputs together, one backward pass each."""
    layer, z = model.get_submodule(name), model(x)
    parameters = [p for p in (layer.weight, layer.bias) if p is not None]
    S = torch.autograd.functional.hessian(lambda v: loss(v.view_as(z)), z.detach().flatten())
    rows = [
        stacked(layer, torch.autograd.grad(z, parameters, e.view_as(z), retain_graph=True)).flatten()
        for e in torch.eye(z.numel(), dtype=z.dtype)
    ]
    J = torch.stack(rows)
    return (J.T @ S @ J).detach().numpy()


def stepped(method, model, name, x, loss):
    """The gradient [b, W] of a layer before the method has seen it and after, flattened."""
    model.zero_grad()
    value = loss(model(x))
    method.observe(value)
    value.backward()
    layer = model.get_submodule(name)
    grads = [p.grad for p in (layer.weight, layer.bias) if p is not None]
    raw = stacked(layer, grads).flatten().numpy().copy()
    method.transform_gradients()
    return raw, stacked(layer, grads).flatten().numpy()


def P_of(method, model, name):
    layer = model.get_submodule(name)
    units, order = len(layer.weight), layer.weight[0].numel() + (layer.bias is not None)
    return UnitCoordinates(method.coordinates(name), range(units), order).to_dense().numpy()


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("network", NETWORKS)
def test_M_is_the_damped_inverse_of_G_and_the_step_along_it(network, loss):
    model, x, name = made(network)
    function, targets = LOSSES[loss]
    with torch.no_grad():
        y = targets(model(x))
    if network == "several positions" and loss in ("cross-entropy", "weighted"):
        y = torch.arange(len(x)) % 6
        function = nn.CrossEntropyLoss(weight=None if loss == "cross-entropy" else torch.cat([WEIGHTS, WEIGHTS]))

    def value(z):
        return function(z, y)

    G = gauss_newton(model, name, x, value)
    damped = G + 0.03 * np.eye(len(G))
    method = parse("gauss-newton:damping=0.03").create(model)
    layer = model.get_submodule(name)
    before = stacked(layer, [p.detach().clone() for p in (layer.weight, layer.bias) if p is not None]).flatten().numpy()
    optimizer = method.optimizer(0.25)
    raw, moved = stepped(method, model, name, x, value)
    truth = np.linalg.solve(damped, raw)
    assert np.allclose(moved, truth, rtol=1e-9, atol=1e-11 * np.abs(truth).max())
    P = P_of(method, model, name)
    assert np.allclose(P, inverse_root(damped), rtol=1e-8, atol=1e-10)
    unit, width = 1, len(G) // len(layer.weight)
    own = slice(unit * width, (unit + 1) * width)
    P_unit = method.coordinates(name).of_unit(unit).matrix(width).numpy()
    assert np.allclose(P_unit @ P_unit.T, np.linalg.inv(damped)[own, own], rtol=1e-9, atol=1e-10)
    optimizer.step()
    after = stacked(layer, [p.detach() for p in (layer.weight, layer.bias) if p is not None]).flatten().numpy()
    assert np.allclose(after - before, -0.25 * truth, rtol=1e-9, atol=1e-11 * np.abs(truth).max())


def test_several_losses_before_a_step_are_one():
    """As gradients that are accumulated."""
    model, x, _ = made("dense", 12)
    y = torch.arange(12) % 3
    found = []
    for parts in ([slice(0, 12)], [slice(0, 4), slice(4, 12)]):
        method = parse("gauss-newton").create(model)
        model.zero_grad()
        for part in parts:
            loss = nn.functional.cross_entropy(model(x[part]), y[part], reduction="sum") / 12
            method.observe(loss)
            loss.backward()
        method.transform_gradients()
        found.append([p.grad.clone() for p in model.parameters()])
        method.detach()
    assert all(torch.allclose(a, b, rtol=1e-10) for a, b in zip(*found, strict=True))


@pytest.mark.parametrize("network", ["dense", "convolution, many samples"])
def test_bounds_that_go_with_P(network):
    model, x, name = made(network)
    method = parse("gauss-newton:damping=0.1").create(model)
    stepped(method, model, name, x, lambda z: z.square().mean())
    P, own = P_of(method, model, name), method.coordinates(name)
    units, rows = len(model.get_submodule(name).weight), torch.rand(6, len(P), dtype=torch.float64)
    exact = rows.numpy() @ np.abs(P)
    carried = own.carried(rows, units).numpy()
    assert (carried >= exact * (1 - 1e-12)).all()
    assert (carried <= 30 * exact).all()
    assert own.scaled_norm(rows[0], units) == pytest.approx(np.sum((rows[0].numpy()[:, None] * P) ** 2), rel=1e-10)
    with pytest.raises(ConfigError, match="acts across units"):
        own @ own


def test_behind_relu_the_whole_layer_is_whitened():
    """There G is the Hessian itself, so that PᵀHP has the eigenvalues λ/(λ + γ)."""
    model, x, _ = made("dense", 30)
    problem = (model, nn.CrossEntropyLoss(), (x, torch.arange(30) % 3))
    values = hesscond.probe(*problem, ["0"], level="layer")["0"].eigenvalues()
    found = hesscond.probe(*problem, ["0"], level="layer", method="gauss-newton:damping=0.02")["0"].eigenvalues()
    assert torch.allclose(found, (values / (values + 0.02))[: len(found)], rtol=1e-7)


BATCHWISE = Net(lambda m, x: x - x.mean(0))


@pytest.mark.parametrize(
    ("model", "loss", "words"),
    [
        (
            nn.Sequential(nn.Linear(3, 3), BATCHWISE),
            lambda z: z.square().mean(),
            "do not pass layer '0' one by one",
        ),
        (nn.Linear(3, 2), lambda z: z.mean(0).square().sum(), "samples are coupled"),
        (nn.Linear(3, 2), lambda z: (z[:2] - z[2:]).square().sum(), "samples are coupled"),
        (nn.Linear(3, 2), lambda z: -z.square().mean(), "not convex in the outputs"),
        (nn.Linear(3, 2), lambda z: torch.ones((), requires_grad=True), "does not depend on the output"),
        (nn.Sequential(nn.Linear(3, 3), nn.LSTM(3, 2)), lambda z: z[0].mean(), "its output is a tuple"),
    ],
)
def test_what_has_no_such_rows(model, loss, words):
    method = parse("gauss-newton").create(model)
    with pytest.raises(ConfigError, match=words):
        method.observe(loss(model(torch.randn(4, 3))))


def test_of_two_passes_that_one_loss_is_made_of_only_the_latest_is_seen():
    model = nn.Linear(3, 2)
    method = parse("gauss-newton").create(model)
    first, second = model(torch.ones(4, 3)), model(2 * torch.ones(4, 3))
    loss = (first + second).square().mean()
    method.observe(loss)
    loss.backward()
    with pytest.raises(ConfigError, match=r"call method\.observe\(loss\) before"):
        method.transform_gradients()


def test_large_batches_are_refused_until_asked_for():
    model, x, name = made("dense", 40)
    y = torch.arange(40) % 3
    for widest, refused in ((23, True), (24, False)):
        method = parse(f"gauss-newton:widest={widest},layers=0").create(model)
        if refused:
            with pytest.raises(ConfigError, match="samples times outputs are 80, more than widest=23"):
                stepped(method, model, name, x, lambda z: nn.functional.cross_entropy(z, y))
        else:
            stepped(method, model, name, x, lambda z: nn.functional.cross_entropy(z, y))
        method.detach()
    method = parse("gauss-newton:damping=1e-30").create(model)
    with pytest.raises(ConfigError, match="below the rounding"):
        stepped(method, model, name, torch.ones_like(x), lambda z: nn.functional.cross_entropy(z, y))


def test_a_loaded_state_has_no_coordinates_before_its_next_step():
    model, x, name = made("dense")
    method = parse("gauss-newton").create(model)
    stepped(method, model, name, x, lambda z: z.square().mean())
    other = parse("gauss-newton").create(model)
    other.load_state_dict(method.state_dict())
    assert other.steps == 1
    with pytest.raises(ConfigError, match="it has taken none"):
        other.probed(name)


def test_a_saturated_softmax_is_none_of_these():
    """In float32 its curvature is rounding: a run that has learnt everything goes on."""
    torch.manual_seed(0)
    model, x = nn.Linear(3, 3), torch.randn(20, 3)
    method = parse("gauss-newton").create(model)
    for scale in (1.0, 200.0, 1e38):
        model.zero_grad()
        with torch.no_grad():
            model.weight.copy_(scale * torch.eye(3))
        loss = nn.functional.cross_entropy(model(x), x.argmax(1))
        method.observe(loss)
        loss.backward()
        method.transform_gradients()
        assert torch.isfinite(model.weight.grad).all()


# -- by name in a probe ------------------------------------------------------------------------------------------------


def test_a_probe_by_name_has_the_factors_of_its_batch():
    """κ(PᵀHP) with P written out in numpy from the samples' own gradients; also of a float32 model, in float64."""
    model, x, _ = made("dense", 30)
    y = torch.arange(30) % 3
    h = torch.relu(model[0](x)).detach()
    delta = (model(x).detach().softmax(1) - nn.functional.one_hot(y, 3)).numpy()
    H_hat = torch.cat([torch.ones_like(h[:, :1]), h], 1).numpy()
    A, G = H_hat.T @ H_hat / 30, delta.T @ delta / 30
    pi = np.sqrt(np.trace(A) / 5 / (np.trace(G) / 3))
    P = np.kron(inverse_root(G + 0.3 / pi * np.eye(3)), inverse_root(A + 0.3 * pi * np.eye(5)))
    problem = (model, nn.CrossEntropyLoss(), (x, y))
    H = hesscond.probe(*problem, ["2"], level="layer")["2"].hessian().numpy()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    found = hesscond.probe(*problem, ["2"], level="layer", method="kfac:damping=0.09")
    assert np.allclose(found["2"].hessian().numpy(), P.T @ H @ P, rtol=1e-9, atol=1e-12)
    assert found.coordinates == "coordinates: kfac, M^1/2, of a first step on the data"
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())
    assert not any(module._forward_hooks for module in model.modules())
    narrow = model.float()
    exact = hesscond.probe(narrow.double(), *problem[1:], ["2"], level="layer", method="kfac")["2"].kappa
    found = hesscond.probe(narrow.float(), nn.CrossEntropyLoss(), (x.float(), y), ["2"], level="layer", method="kfac")
    assert float(found["2"].kappa) == pytest.approx(float(exact), rel=1e-5)


def test_a_frozen_model_takes_no_first_step():
    model = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2)).requires_grad_(False)
    with pytest.raises(ConfigError, match="no parameter of the model requires a gradient"):
        hesscond.probe(
            model, nn.CrossEntropyLoss(), (torch.randn(9, 4), torch.arange(9) % 2), level="layer", method="kfac"
        )


def test_a_stream_has_no_first_step():
    model, x, _ = made("dense", 8)
    y = torch.arange(8) % 3
    with pytest.raises(ConfigError, match="first step on one batch"):
        hesscond.probe(model, nn.CrossEntropyLoss(), [(x[:4], y[:4]), (x[4:], y[4:])], method="ekfac")
