"""Weight normalization, centred or not, and standardization: definitions, Hessians, critical points."""

import numpy as np
import pytest
import torch
from torch import nn
from torch.func import functional_call
from torch.nn import functional as F
from torch.nn.utils import parametrizations

from hesscond.capture.layers import unit_weights
from hesscond.errors import ConfigError
from hesscond.hessians import HessianOperator, Reparametrized, SphereTangentOperator
from hesscond.methods import parse
from hesscond.probing.entry import probe
from tests.methods.contract import MethodContract, build, digits, network

LAYERS = {
    "dense": lambda: nn.Linear(5, 4),
    "conv1d": lambda: nn.Conv1d(3, 4, 2, bias=False),
    "conv2d-groups": lambda: nn.Conv2d(4, 6, (2, 3), groups=2),
    "transposed2d-groups": lambda: nn.ConvTranspose2d(4, 6, (2, 3), groups=2),
}


class TestVariants(MethodContract):
    specs = ("weightstandardization:epsilon=0",)


def seeded(kind, seed=3):
    torch.manual_seed(seed)
    return LAYERS[kind]().double()


def unit_rows(layer, weight):
    """(m, n), one row a unit."""
    return unit_weights(layer, weight.detach()[None])[0].numpy()


@pytest.mark.parametrize("kind", LAYERS)
@pytest.mark.parametrize("spec", ["weightnorm", "centred-weightnorm"])
def test_a_unit_has_a_norm_and_a_direction_and_starts_where_it_was(kind, spec):
    layer = seeded(kind)
    V = unit_rows(layer, layer.weight)
    shifted = V - V.mean(1, keepdims=True) if spec == "centred-weightnorm" else V
    parse(spec).create(layer)
    np.testing.assert_allclose(unit_rows(layer, layer.weight), shifted, rtol=1e-12, atol=1e-15)
    own = layer.parametrizations.weight
    with torch.no_grad():
        g = own.original0.copy_(torch.randn_like(own.original0)).flatten().numpy()
    truth = g[:, None] * shifted / np.linalg.norm(shifted, axis=1, keepdims=True)
    np.testing.assert_allclose(unit_rows(layer, layer.weight), truth, rtol=1e-12, atol=1e-15)
    np.testing.assert_array_equal(unit_rows(layer, own.original1), V)


@pytest.mark.parametrize("kind", LAYERS)
@pytest.mark.parametrize("epsilon", [0.0, 0.3])
def test_a_unit_has_mean_zero_and_variance_one(kind, epsilon):
    layer = seeded(kind)
    V = unit_rows(layer, layer.weight)
    truth = (V - V.mean(1, keepdims=True)) / np.sqrt(V.var(1, keepdims=True) + epsilon)
    # the output layer is left alone unless it is named, and here there is no other
    parse(f"weightstandardization:epsilon={epsilon},layers=model").create(layer)
    np.testing.assert_allclose(unit_rows(layer, layer.weight), truth, rtol=1e-12)
    if epsilon == 0:
        np.testing.assert_allclose(unit_rows(layer, layer.weight).std(1), 1, rtol=1e-12)


def test_standardization_leaves_the_output_layer_alone_unless_it_is_named():
    for spec, kinds in (
        ("weightstandardization", [Reparametrized, Reparametrized, type(None)]),
        ("weightstandardization:layers=fc3", [type(None), type(None), Reparametrized]),
        ("weightnorm", [Reparametrized] * 3),
    ):
        method = parse(spec).create(network("mlp"))
        assert [type(method.coordinates(name)) for name in ("fc1", "fc2", "fc3")] == kinds


@pytest.mark.parametrize("kind", ["dense", "conv2d-groups"])
def test_weightnorm_is_the_one_of_torch_but_for_its_second_derivatives(kind):
    """Values, gradients and the names and shapes of what is saved."""
    layer, peer = seeded(kind), parametrizations.weight_norm(seeded(kind))
    parse("weightnorm").create(layer)
    with torch.no_grad():
        peer.parametrizations.weight.original0.mul_(1.7)
    layer.load_state_dict(peer.state_dict())
    x = torch.randn(3, 5).double() if kind == "dense" else torch.randn(3, 4, 5, 6).double()
    for module in (layer, peer):
        module(x).sin().sum().backward()
    assert torch.allclose(layer.weight, peer.weight, rtol=1e-14)
    for own, other in zip(layer.parameters(), peer.parameters(), strict=True):
        assert torch.allclose(own.grad, other.grad, rtol=1e-11, atol=1e-13)


def test_the_loss_changes_neither_with_the_scale_nor_with_the_mean_of_standardized_weights():
    """H w_i = −∇_i L and H (1, …, 1) = 0 in the Hessian of a unit, ε = 0."""
    model, method = build("weightstandardization:epsilon=0", "mlp", activation="tanh")
    x, y = (part[:40] for part in digits())
    F.cross_entropy(model(x), y).backward()
    H = probe(model, nn.CrossEntropyLoss(), (x, y), ["fc2"], units=[4], method=method)["fc2"].hessian(4)[:, 1:]
    W = model.fc2.parametrizations.weight.original
    expected = torch.cat([torch.zeros(1).double(), -W.grad[4]])
    size = float(H.norm())
    assert float((H @ W.detach()[4] - expected).norm()) < 1e-11 * size
    assert float((H @ torch.ones(20).double()).norm()) < 1e-11 * size
    assert float(expected.norm()) > 1e-5 * size


# ---------------------------------------------------------------------------------------------------- critical points


def critical_point(spec, seed):
    """A network at a critical point of its loss in all that is trained, and the data, float64."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 2), nn.Tanh(), nn.Linear(2, 1)).double()
    with torch.no_grad():
        # two units that differ make the targets, so that there is a good minimum near by
        model[0].weight.copy_(torch.tensor([[1.0, -0.4, 0.2, 0.1], [-0.3, 0.2, 0.9, -0.6]]))
        model[2].weight.copy_(torch.tensor([[1.0, 1.5]]))
    method = parse(f"{spec}:layers=0").create(model)
    x = torch.randn(60, 4).double()
    y = (model(x) + 0.1 * torch.randn(60, 1).double()).detach()
    named = dict(model.named_parameters())
    sizes = [p.numel() for p in named.values()]
    with torch.no_grad():
        # g = ‖v‖ is where it starts: not there
        model[0].parametrizations.weight.original1.mul_(2.5)

    def loss(v):
        parts = {name: part.view_as(p) for (name, p), part in zip(named.items(), v.split(sizes), strict=True)}
        return F.mse_loss(functional_call(model, parts, (x,)), y)

    v = torch.cat([p.detach().reshape(-1) for p in named.values()]).requires_grad_()
    optimizer = torch.optim.LBFGS([v], max_iter=400, tolerance_grad=1e-9, line_search_fn="strong_wolfe")

    def closure():
        optimizer.zero_grad()
        value = loss(v)
        value.backward()
        return value

    optimizer.step(closure)
    v = v.detach()
    for _ in range(6):
        # along v_i and, if it is centred, (1, …, 1), nothing changes
        g, H = torch.func.grad(loss)(v), torch.func.hessian(loss)(v)
        v = v - torch.linalg.pinv(H, rtol=1e-8, hermitian=True) @ g
    assert float(torch.func.grad(loss)(v).norm()) < 1e-10
    with torch.no_grad():
        for p, part in zip(named.values(), v.split(sizes), strict=True):
            p.copy_(part.view_as(p))
    return model, method, (x, y)


def nonzero(A):
    """Nonzero eigenvalues of a symmetric matrix."""
    values = torch.linalg.eigvalsh(A)
    return values[values.abs() > 1e-8 * values.abs().max()]


@pytest.mark.parametrize(("spec", "normals"), [("weightnorm", 1), ("centred-weightnorm", 2)])
def test_the_hessian_at_a_critical_point_is_that_of_the_tangent_space(spec, normals):
    """In v_i, up to (g/‖v‖)². In all of [g_i, v_i] it is not, but at g = ‖v‖ that of the plain weights."""
    model, method, data = critical_point(spec, 0)
    plain = nn.Sequential(nn.Linear(4, 2), nn.Tanh(), nn.Linear(2, 1)).double()
    with torch.no_grad():
        for number in (0, 2):
            plain[number].weight.copy_(model[number].weight)
            plain[number].bias.copy_(model[number].bias)
    own, loss_fn = model[0].parametrizations.weight, nn.MSELoss()
    for unit in (0, 1):
        g, v = float(own.original0.detach()[unit]), own.original1.detach()[unit]
        direction = v if normals == 1 else v - v.mean()
        squared = (g / float(direction.norm())) ** 2
        assert not 0.9 < squared < 1.1
        H = probe(model, loss_fn, data, ["0"], units=[unit], method=method)["0"].hessian(unit)
        # the order is b, g, v
        in_v = H[2:, 2:]
        plain_H = HessianOperator(plain, loss_fn, data, layers="0", unit=unit)
        tangent = SphereTangentOperator(plain_H, centred=normals == 2).to_dense()[1:, 1:]
        truth = nonzero(tangent)
        assert len(truth) == 4 - normals
        assert torch.allclose(nonzero(in_v), squared * truth, rtol=1e-6)
        # the whole of it is JᵀHJ, J the derivative of w in g and v: another spectrum than that of the tangent space
        u = direction / direction.norm()
        Q = torch.eye(4).double() - torch.outer(u, u)
        if normals == 2:
            Q -= 0.25
        ambient = plain_H.to_dense()[1:, 1:]
        J = torch.cat([u[:, None], squared**0.5 * np.sign(g) * Q], 1)
        assert torch.allclose(H[1:, 1:], J.T @ ambient @ J, rtol=1e-6, atol=1e-8 * float(H.norm()))
        assert len(nonzero(H[1:, 1:])) == len(truth) + 1
        if normals == 1:
            # at g = ‖v‖ (the network is the same) the nonzero spectrum of [g, v] is the plain one
            at_g = torch.cat([u[:, None], Q], 1)
            assert torch.allclose(nonzero(at_g.T @ ambient @ at_g), nonzero(ambient), rtol=1e-9)


def test_off_a_critical_point_the_hessian_is_not_that_of_the_tangent_space():
    """H_v has the term of the gradient along the sphere too, as the docstring of the method writes it out."""
    model, method = build("weightnorm", "mlp", activation="tanh")
    plain = network("mlp", activation="tanh")
    x, y = (part[:30] for part in digits())
    F.cross_entropy(plain(x), y).backward()
    unit, loss_fn = 3, nn.CrossEntropyLoss()
    with torch.no_grad():
        model.fc2.parametrizations.weight.original1.mul_(0.4)
    H = probe(model, loss_fn, (x, y), ["fc2"], units=[unit], method=method)["fc2"].hessian(unit)[2:, 2:]
    w, q = plain.fc2.weight.detach()[unit], plain.fc2.weight.grad[unit]
    ambient = probe(plain, loss_fn, (x, y), ["fc2"], units=[unit])["fc2"].hessian(unit)[1:, 1:]
    u, factor = w / w.norm(), 1 / 0.4
    Q = torch.eye(20).double() - torch.outer(u, u)
    on_sphere = factor**2 * (Q @ ambient @ Q - (w @ q) / (w @ w) * Q)
    across = torch.outer(u, Q @ q) + torch.outer(Q @ q, u)
    size = float(H.norm())
    assert float((H - on_sphere + factor**2 / w.norm() * across).norm()) < 1e-10 * size
    assert float((H - on_sphere).norm()) > 0.01 * size


# ----------------------------------------------------------------------------------------------------------- refusals


def with_weight(weight):
    model = nn.Sequential(nn.Linear(len(weight[0]), len(weight)))
    with torch.no_grad():
        model[0].weight.copy_(torch.tensor(weight))
    return model


@pytest.mark.parametrize(
    ("model", "spec", "sentence"),
    [
        (lambda: with_weight([[1.0, 2.0], [0.0, 0.0]]), "weightnorm", "unit 1 of layer '0' has only zero weights"),
        (lambda: with_weight([[0.1] * 3, [0.0, 0.1, 0.2]]), "centred-weightnorm", "unit 0 of layer '0'.* all equal"),
        (lambda: with_weight([[0.0]]), "weightstandardization:layers=0", "one weight each"),
        (lambda: with_weight([[0.3, 0.3]]), "weightstandardization:layers=0,epsilon=0", "all equal"),
        (lambda: network("mlp"), "weightstandardization:epsilon=-1", "must not be negative"),
        (lambda: with_weight([[0.0, 1.0]]), "weightstandardization", "no dense or convolutional layer"),
    ],
)
def test_weights_of_which_nothing_is_left_are_refused(model, spec, sentence):
    with pytest.raises(ConfigError, match=sentence):
        parse(spec).create(model())
