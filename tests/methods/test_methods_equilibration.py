"""Weight equilibration against its definition in numpy, and its Hessian in three readings against dense ones."""

from functools import partial

import numpy as np
import pytest
import torch
from torch import nn
from torch.func import functional_call
from torch.nn import functional as F

from hesscond.capture import capture, eligible_layers
from hesscond.capture.layers import unit_weights
from hesscond.errors import ConfigError
from hesscond.hessians import HessianOperator, Reparametrized
from hesscond.hessians.build import unit_hessian
from hesscond.methods import Equilibration, parse
from hesscond.models import build as build_network
from hesscond.probing.entry import probe
from tests.methods.contract import MethodContract, build, digits, network

READINGS = ["through W -> E(W) W", "at the point EW", "E frozen"]
LAYERS = {
    "dense": lambda: nn.Linear(5, 4),
    "square": lambda: nn.Linear(4, 4, bias=False),
    "conv1d": lambda: nn.Conv1d(3, 4, 2),
    "conv2d-groups": lambda: nn.Conv2d(4, 6, (2, 3), groups=2),
    "conv3d": lambda: nn.Conv3d(2, 3, 2, bias=False),
    "transposed2d-groups": lambda: nn.ConvTranspose2d(4, 6, (2, 3), groups=2),
}


class TestVariants(MethodContract):
    specs = (
        "equilibration:axis=column",
        "equilibration:axis=row-column,frozen=true",
        "batchnorm+equilibration",
        "equilibration:axis=column+layernorm",
    )


def seeded(kind, seed=3):
    torch.manual_seed(seed)
    return LAYERS[kind]().double()


def matrices(layer, weight):
    """The paper's inputs × outputs matrix of each group, as arrays."""
    rows = unit_weights(layer, weight.detach()[None])[0].numpy()
    return [part.T for part in np.split(rows, getattr(layer, "groups", 1))]


def equilibrated(W, axis):
    """E(W) W of an inputs × outputs matrix."""
    W = W.copy()
    if axis != "column":
        for j in range(W.shape[0]):
            norm = np.linalg.norm(W[j])
            W[j] /= norm if norm else 1
    if axis != "row":
        for i in range(W.shape[1]):
            norm = np.linalg.norm(W[:, i])
            W[:, i] /= norm if norm else 1
    return W


# -------------------------------------------------------------------------------------------------------- the weights


@pytest.mark.parametrize("axis", ["row", "column", "row-column"])
@pytest.mark.parametrize("kind", LAYERS)
def test_a_layer_multiplies_with_the_equilibrated_matrix(kind, axis):
    layer = seeded(kind)
    truth = [equilibrated(W, axis) for W in matrices(layer, layer.weight)]
    Equilibration(layer, axis=axis)
    for found, expected in zip(matrices(layer, layer.weight), truth, strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-13)


@pytest.mark.parametrize("axis", ["row", "column", "row-column"])
@pytest.mark.parametrize("frozen", [False, True])
def test_rows_of_zeros_stay_and_have_derivatives(axis, frozen):
    model = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3)).double()
    with torch.no_grad():
        model[0].weight[:, 1] = 0
        model[0].weight[2] = 0
    (W,) = matrices(model[0], model[0].weight)
    method = Equilibration(model, axis=axis, frozen=frozen, layers=("0",))
    np.testing.assert_allclose(model[0].weight.detach().numpy().T, equilibrated(W, axis), rtol=1e-13)
    batch = torch.randn(9, 5).double(), torch.randint(0, 3, (9,))
    F.cross_entropy(model(batch[0]), batch[1]).backward()
    assert all(p.grad.isfinite().all() for p in model.parameters())
    for name in ("0", "2"):
        found = probe(model, nn.CrossEntropyLoss(), batch, [name], method=method)[name]
        assert all(found.hessian(unit).isfinite().all() for unit in found.units)
    own = method.frozen_coordinates("0")
    e = own.of_unit(2).matrix(6).diagonal()
    assert e[0] == 1
    assert e[2] == 1
    if axis == "column":
        assert bool((e == 1).all())


def test_the_gradient_goes_through_E_or_takes_it_for_a_constant():
    """Through: orthogonal to every row whose scale does not matter. Frozen: E times the gradient in EW."""
    torch.manual_seed(0)
    x, C = torch.randn(7, 5).double(), torch.randn(7, 4).double()
    for axis, dim in (("row", 0), ("column", 1)):
        layer = seeded("dense")
        Equilibration(layer, axis=axis)
        (layer(x) * C).sin().sum().backward()
        W = layer.parametrizations.weight.original
        assert float((W.grad * W.detach()).sum(dim).abs().max()) < 1e-13 * float(W.grad.norm())
        frozen = seeded("dense")
        Equilibration(frozen, axis=axis, frozen=True)
        (frozen(x) * C).sin().sum().backward()
        effective = frozen.weight.detach().requires_grad_()
        (F.linear(x, effective, frozen.bias.detach()) * C).sin().sum().backward()
        W = frozen.parametrizations.weight.original
        truth = effective.grad / W.detach().norm(dim=dim, keepdim=True)
        assert torch.allclose(W.grad, truth, rtol=1e-12)


# ----------------------------------------------------------------------------------------- the Hessian, read three ways


@pytest.mark.parametrize("axis", ["row", "column", "row-column"])
@pytest.mark.parametrize("kind", ["square", "conv2d-groups"])
def test_with_E_frozen_it_is_what_finite_differences_of_the_loss_give(kind, axis):
    torch.manual_seed(1)
    shape = {"square": (6, 4), "conv2d-groups": (6, 4, 3, 4)}[kind]
    model = nn.Sequential(LAYERS[kind](), nn.Tanh(), nn.Flatten(), nn.LazyLinear(3)).double()
    x, y = torch.randn(shape).double(), torch.randint(0, 3, (6,))
    model(x)
    layer, loss_fn = model[0], nn.CrossEntropyLoss()
    theta = layer.weight.detach().clone()
    method = Equilibration(model, axis=axis, frozen=True, layers=("0",))
    # E as the definition has it, in the layer's own layout
    E = (layer.weight / theta).detach()
    unit = 2
    found = probe(model, loss_fn, (x, y), ["0"], units=[unit], method=method)["0"].hessian(unit)
    bias = layer.bias is not None
    order = bias + theta[0].numel()

    def loss(v):
        W, b = theta.clone(), layer.bias.detach().clone() if bias else None
        W[unit] += v[bias:].reshape(W[unit].shape)
        if bias:
            b[unit] += v[0]
        with torch.no_grad():
            z = F.linear(x, E * W) if kind == "square" else F.conv2d(x, E * W, b, groups=2)
            return float(loss_fn(model[3](torch.tanh(z).flatten(1)), y))

    h = 1e-3 * float(theta.abs().mean())
    steps = h * torch.eye(order).double()
    truth = torch.empty_like(found)
    for i, a in enumerate(steps):
        for j, b in enumerate(steps[: i + 1]):
            corners = loss(a + b) - loss(a - b) - loss(b - a) + loss(-a - b)
            truth[i, j] = truth[j, i] = corners / (4 * h * h)
    assert (found - truth).norm() < 1e-4 * truth.norm()


def test_readings_are_the_same_whichever_the_method_trains_with():
    """One through E(W), so that it is not that with E frozen; and training goes on as it was."""
    x, y = (part[:40] for part in digits())
    data = [(x[:25], y[:25]), (x[25:], y[25:])]
    found = {}
    for frozen in (False, True):
        model, method = build(f"equilibration:axis=column,frozen={str(frozen).lower()}", "mlp", activation="tanh")
        before = model(x).detach()
        (g,) = torch.autograd.grad(F.cross_entropy(model(x), y), model.fc2.parametrizations.weight.original)
        for name, own in method.readings("fc2").items():
            if isinstance(own, Reparametrized):
                # so little memory that a graph is built anew for each product
                make = partial(HessianOperator, model, nn.CrossEntropyLoss(), data, memory=1e4)
                found[frozen, name] = own.operator(make, "fc2", 3).to_dense()
            else:
                # as a study has it: of the weight that the layer multiplies with
                captured = capture(model, nn.CrossEntropyLoss(), (x, y), ["fc2"], units={"fc2": (3,)})
                found[frozen, name] = (
                    unit_hessian(captured["fc2"], 3, 10**9).in_coordinates(own and own.of_unit(3)).matrix()
                )
        (again,) = torch.autograd.grad(F.cross_entropy(model(x), y), model.fc2.parametrizations.weight.original)
        assert torch.equal(model(x), before)
        assert torch.equal(g, again)
        assert (float((g * model.fc2.parametrizations.weight.original.detach()).sum(1).abs().max()) > 1e-4) == frozen
    for name in READINGS:
        assert torch.allclose(found[False, name], found[True, name], rtol=1e-10, atol=1e-14), name
    assert not torch.allclose(found[True, READINGS[0]], found[True, READINGS[2]], rtol=1e-2)


# ----------------------------------------------------------------------------------------------- which layers, and how


def test_chosen_layers_only_first_and_last_as_the_paper_has_it():
    model = network("cnn")
    method = parse("equilibration:layers=0/6").create(model)
    assert isinstance(method.coordinates("0"), Reparametrized)
    assert method.coordinates("3") is None
    assert isinstance(method.coordinates("6"), Reparametrized)
    assert method.readings("3") == {}
    with pytest.raises(ConfigError, match="no layer '1'"):
        method.coordinates("1")


@pytest.mark.parametrize("spec", ["equilibration", "weightnorm"])
def test_the_network_is_probed_in_what_is_trained(spec):
    """All its layers are reparametrized: no parameter belongs to a layer any more."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3)).double()
    method = parse(spec).create(model)
    x, y = torch.randn(30, 6).double(), torch.randint(0, 3, (30,))
    named = [(name, p.detach()) for name, p in model.named_parameters()]

    def loss(v):
        parts = zip(named, v.split([p.numel() for _, p in named]), strict=True)
        return F.cross_entropy(functional_call(model, {name: part.view_as(p) for (name, p), part in parts}, (x,)), y)

    point = torch.cat([p.reshape(-1) for _, p in named])
    v = torch.randn(len(point), generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    truth = torch.func.jvp(torch.func.grad(loss), (point,), (v,))[1].detach()
    for how in (method, None):
        found = probe(model, nn.CrossEntropyLoss(), (x, y), level="network", method=how)["network"]
        assert torch.allclose(found.operator @ v, truth, rtol=1e-9, atol=1e-10 * float(truth.norm()))
    # what the network's κ needs is there, too
    values = torch.linalg.eigvalsh(found.hessian())
    assert float(found.block(None).condition_number().lambda_max) == pytest.approx(float(values.abs().max()), rel=1e-6)


def tied():
    model = nn.Sequential(nn.Embedding(7, 5), nn.Linear(5, 7)).double()
    model[1].weight = model[0].weight
    return model


@pytest.mark.parametrize(
    ("model", "spec", "sentence"),
    [
        (lambda: network("mlp"), "equilibration:axis=diagonal", "must be 'row', 'column' or 'row-column'"),
        (lambda: network("mlp"), "equilibration:layers=fc7", "no layer 'fc7' to choose"),
        (tied, "equilibration", "layer '1' shares its weight with '0'"),
        (lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(4, 3)), "equilibration", "other parameters already"),
        (lambda: network("mlp"), "equilibration+weightnorm", "both compute weights from other parameters"),
        (lambda: network("mlp"), "bnp+equilibration", "bnp preconditions the weights, which equilibration"),
        (lambda: nn.Sequential(nn.ReLU()), "equilibration", "no dense or convolutional layer"),
    ],
)
def test_what_cannot_be_equilibrated_is_refused(model, spec, sentence):
    with pytest.raises(ConfigError, match=sentence):
        parse(spec).create(model())


@pytest.mark.parametrize(
    ("name", "ends"), [("inception", ["stem.conv", "fc"]), ("densenet", ["conv1", "fc"]), ("mlp", ["fc1", "fc3"])]
)
@pytest.mark.parametrize("spec", ["equilibration", "weightnorm", "weightstandardization"])
def test_the_ends_are_the_first_and_the_last_layer(spec, name, ends):
    shape = (64,) if name == "mlp" else (3, 32, 32)
    model = build_network(name, input_shape=shape, outputs=10, generator=torch.Generator().manual_seed(0))
    method = parse(f"{spec}:layers=ends").create(model)
    assert [layer for layer in eligible_layers(model) if method.coordinates(layer) is not None] == ends
