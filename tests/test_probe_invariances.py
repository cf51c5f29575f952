"""What a probe's numbers must not depend on."""

import numpy as np
import pytest
import torch
from torch import nn

import hesscond
from hesscond.hessians import Jacobi
from tests.catalogue import case
from tests.catalogue.dense import mlp
from tests.truth import layer_truth

#: One of each kind: dense, convolution, sequence, shared, coupled, indefinite.
KINDS = [
    "relu-ce-lambda", "tanh-ce", "relu-mse", "relu-nonconvex", "repeated-tanh", "train-batchnorm-tanh-mse",
    "tokens-mean", "attention-by-hand", "conv2d", "conv2d-tanh-mse", "transposed1d", "conv2d-one-sample",
]  # fmt: skip


def same(one, other, *, scale=1.0, rtol=1e-8):
    """Two tables agree, up to the scale of the Hessian."""
    for column in ("layer", "n_params", "rank", "nullity", "negative", "resolved"):
        assert one[column].equals(other[column]), column
    np.testing.assert_allclose(other["kappa"], one["kappa"], rtol=rtol)
    np.testing.assert_allclose(other["lambda_max"], scale * one["lambda_max"], rtol=1e-10)


@pytest.mark.share(8)
@pytest.mark.parametrize("level", ["unit", "layer"])
@pytest.mark.parametrize("scale", [1e-30, 3.0, 1e30])
@pytest.mark.parametrize("name", KINDS)
def test_kappa_does_not_depend_on_the_scale_of_the_loss(name, scale, level):
    model, loss_fn, batch = case(name).make()
    plain = hesscond.probe(model, loss_fn, batch, level=level)
    scaled = hesscond.probe(model, lambda o, t: scale * loss_fn(o, t), batch, level=level)
    same(plain.to_frame(), scaled.to_frame(), scale=scale)


@pytest.mark.share(2)
@pytest.mark.parametrize("level", ["unit", "layer"])
@pytest.mark.parametrize("name", ["tanh-ce", "conv2d", "attention-sdpa"])
def test_frozen_parameters_are_measured_alike(name, level):
    model, loss_fn, batch = case(name).make()
    plain = hesscond.probe(model, loss_fn, batch, level=level).to_frame()
    for number, parameter in enumerate(model.parameters()):
        parameter.requires_grad_(number % 2 == 1)
    assert hesscond.probe(model, loss_fn, batch, level=level).to_frame().equals(plain)
    model.requires_grad_(False)
    with torch.no_grad():
        assert hesscond.probe(model, loss_fn, batch, level=level).to_frame().equals(plain)
    assert not any(p.requires_grad for p in model.parameters())


def test_dropout_is_measured_with_the_mask_of_the_next_forward_pass():
    model, loss_fn, batch = case("train-dropout").make()
    torch.manual_seed(11)
    first = hesscond.probe(model, loss_fn, batch, level="layer")
    again = hesscond.probe(model, loss_fn, batch, level="layer")
    assert again.to_frame().equals(first.to_frame())
    for name, layer in first.items():
        truth = layer_truth(model, loss_fn, batch, name)
        assert (layer.hessian() - truth).norm() <= 1e-10 * truth.norm()
    torch.manual_seed(12)
    other = hesscond.probe(model, loss_fn, batch, level="layer")
    assert (other["4"].hessian() - first["4"].hessian()).norm() > 1e-3 * first["4"].hessian().norm()


@pytest.mark.share(3)
@pytest.mark.parametrize("level", ["unit", "layer", "network"])
@pytest.mark.parametrize("method", [None, Jacobi()], ids=["plain", "jacobi"])
@pytest.mark.parametrize("parametrized", [True, False])
def test_what_was_probed_stays_when_the_model_goes_on(level, method, parametrized):
    """All of it is measured in the call, and none when it is read."""
    torch.manual_seed(0)
    model = mlp(nn.Tanh()).double()
    if parametrized and method is None:
        nn.utils.parametrizations.orthogonal(model[2], orthogonal_map="cayley")
    batch = torch.randn(7, 5, dtype=torch.float64), torch.randint(0, 3, (7,))

    def read(result):
        return [
            layer.hessian(unit) for layer in result.values() for unit in (layer.units if level == "unit" else [None])
        ]

    at_once = read(hesscond.probe(model, nn.CrossEntropyLoss(), batch, level=level, method=method))
    later = hesscond.probe(model, nn.CrossEntropyLoss(), batch, level=level, method=method)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.5)
    assert all(torch.equal(one, other) for one, other in zip(at_once, read(later), strict=True))


@pytest.mark.parametrize("activation", [nn.ReLU(), nn.Tanh()], ids=["relu", "tanh"])
@pytest.mark.parametrize("position", ["one", "several"])
def test_a_unit_whose_curvature_cancels_has_no_kappa_from_round_off(activation, position):
    """It moves all logits alike, which softmax does not see: its Hessian (ReLU), or S up to round-off, is zero."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 4), activation, nn.Linear(4, 3)).double()
    with torch.no_grad():
        model[2].weight[:, 1] = 0.37
    x = torch.randn(20, 5, dtype=torch.float64) if position == "one" else torch.randn(20, 3, 5, dtype=torch.float64)
    targets = torch.randint(0, 3, (20,))

    def loss_fn(output, target):
        return nn.functional.cross_entropy(output if output.ndim == 2 else output.mean(1), target)

    kappa = hesscond.probe(model, loss_fn, (x, targets), ["0"])["0"].kappa
    assert not kappa[1].resolved
    assert all(other.resolved for unit, other in enumerate(kappa) if unit != 1)
