"""Weight normalization, centred or not, and standardization: definitions, Hessians, critical points."""

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

import hesscond
from hesscond.capture.layers import unit_weights
from hesscond.errors import ConfigError
from hesscond.hessians import Reparametrized
from hesscond.methods import parse
from tests.methods.contract import MethodContract, network
from tests.methods.test_methods_equilibration import LAYERS, seeded


class TestVariants(MethodContract):
    specs = ("weightstandardization:epsilon=0",)


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


@pytest.mark.parametrize("activation", [nn.ReLU(), nn.Tanh()])
def test_the_mean_of_centred_weights_is_the_only_null_direction(activation):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 5), activation, nn.Linear(5, 3)).double()
    parse("centred-weightnorm").create(model)
    batch = torch.randn(40, 6).double(), torch.arange(40) % 3
    for result in hesscond.probe(model, nn.CrossEntropyLoss(), batch).values():
        for unit, kappa in zip(result.units, result.kappa, strict=True):
            sizes = torch.linalg.eigvalsh(result.hessian(unit)).abs().sort().values
            assert sizes[0] < 1e-14 * sizes[-1]
            assert kappa.resolved
            assert (kappa.rank, kappa.value) == (len(sizes) - 1, pytest.approx(float(sizes[-1] / sizes[1]), rel=1e-9))


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
        (lambda: with_weight([[0.0, 1.0]]), "weightstandardization", "no dense or convolutional layer"),
    ],
)
def test_weights_of_which_nothing_is_left_are_refused(model, spec, sentence):
    with pytest.raises(ConfigError, match=sentence):
        parse(spec).create(model())
