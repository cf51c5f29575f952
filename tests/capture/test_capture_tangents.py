"""Hessians of units by forward derivatives through batch normalization, compared with double backward."""

from functools import partial
from unittest.mock import patch

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import hesscond
from hesscond.capture import tangents
from hesscond.capture.double_backward import TANGENT_ROUTE
from tests.catalogue.parts import Net
from tests.truth import unit_truth


def residual(m, x):
    """A skip connection, a strided and perhaps grouped convolution, and pooling."""
    x = m.act(m.norm1(m.conv1(x)))
    x = m.act(m.norm2(m.conv2(x)) + x)
    x = F.max_pool2d(x + x, 2)
    return m.head(m.act(m.norm3(m.conv3(x))).mean((2, 3)))


def network(act=nn.ReLU, groups=1, last=nn.Conv2d, norm=nn.BatchNorm2d):
    layers = {"conv1": nn.Conv2d(3, 4, 3, padding=1), "conv2": nn.Conv2d(4, 4, 3, padding=1, groups=groups)}
    layers |= {
        "conv3": last(4, 6, 3, stride=2),
        "norm1": nn.BatchNorm2d(4),
        "norm2": norm(4),
        "norm3": nn.BatchNorm2d(6, affine=False),
    }
    return Net(residual, **layers, head=nn.Linear(6, 3), act=act())


def dense():
    return nn.Sequential(
        nn.Linear(3, 5), nn.BatchNorm1d(5), nn.SiLU(), nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Flatten()
    )


def excitation():
    """A factor for each image and channel, which is expanded to its positions, before a batch normalization."""
    parts = {"first": nn.Linear(3, 4), "second": nn.Linear(4, 3), "norm": nn.BatchNorm2d(3), "head": nn.Linear(3, 3)}

    def excited(m, x):
        factor = m.second(F.relu(m.first(x.mean((2, 3)))))[:, :, None, None]
        return m.head(F.relu(m.norm(x * factor)).mean((2, 3)))

    return Net(excited, **parts)


def squares(output, target):
    return (output - 1).square().mean()


@pytest.mark.parametrize(
    ("make", "loss_fn", "shape"),
    [
        (network, nn.CrossEntropyLoss(), (6, 3, 8, 8)),
        (partial(network, nn.Tanh), squares, (6, 3, 8, 8)),
        (partial(network, groups=2, norm=nn.InstanceNorm2d), squares, (6, 3, 8, 8)),
        (partial(network, last=nn.ConvTranspose2d), nn.CrossEntropyLoss(), (6, 3, 8, 8)),
        (dense, nn.CrossEntropyLoss(), (40, 3)),
        (excitation, nn.CrossEntropyLoss(), (6, 3, 5, 5)),
    ],
    ids=["residual", "tanh", "groups and instances", "transposed", "dense", "expanded"],
)
def test_units_behind_batch_statistics_are_those_of_double_backward(make, loss_fn, shape):
    torch.manual_seed(0)
    model, x = make().double().train(), torch.randn(shape, dtype=torch.float64)
    batch = x, torch.randint(3, (len(x),))
    result = hesscond.probe(model, loss_fn, batch)
    measured = [name for name in result if result[name].route == TANGENT_ROUTE]
    assert len(measured) >= 2
    for name in measured:
        for unit in (0, result[name].units[-1]):
            truth, found = unit_truth(model, loss_fn, batch, name, unit), result[name].hessian(unit=unit)
            torch.testing.assert_close(found, truth, rtol=1e-11, atol=1e-13 * float(truth.abs().max()))


@pytest.mark.parametrize("reason", ["memory", "wrong", "unknown"])
def test_other_units_behind_batch_statistics_are_taken_by_double_backward(reason):
    torch.manual_seed(0)
    model = network(nn.GELU if reason == "unknown" else nn.ReLU).double().train()
    batch = torch.randn(6, 3, 8, 8, dtype=torch.float64), torch.randint(3, (6,))
    options = {"memory": 2_000_000} if reason == "memory" else {}
    normalize, factor = tangents.normalize, 2 if reason == "wrong" else 1
    with patch.object(tangents, "normalize", lambda *own: (factor * (found := normalize(*own))[0], found[1])):
        found = hesscond.probe(model, nn.CrossEntropyLoss(), batch, layers=["conv2"], **options)["conv2"]
    assert found.route != TANGENT_ROUTE
    truth = unit_truth(model, nn.CrossEntropyLoss(), batch, "conv2", 1)
    torch.testing.assert_close(found.hessian(unit=1), truth, rtol=1e-11, atol=1e-13 * float(truth.abs().max()))


@pytest.mark.parametrize(("make", "shape"), [(network, (6, 3, 8, 8)), (dense, (40, 3))], ids=["residual", "dense"])
def test_single_precision_behind_batch_statistics_is_taken_by_double_backward(make, shape):
    torch.manual_seed(0)
    model, x = make().train(), torch.randn(shape)
    batch, exact = (x, torch.randint(3, (len(x),))), (x.double(),)
    found = hesscond.probe(model, nn.CrossEntropyLoss(), batch, dtype=None)
    for name in found:
        truth = unit_truth(model.double(), nn.CrossEntropyLoss(), (*exact, batch[1]), name, 0)
        torch.testing.assert_close(found[name].hessian(unit=0), truth, rtol=0, atol=1e-4 * float(truth.abs().max()))
