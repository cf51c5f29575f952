"""Hessians of units whose weight a model multiplies samples with several times, compared with double backward."""

from unittest.mock import patch

import pytest
import torch
from torch import nn

import hesscond
from hesscond.capture.double_backward import SecondDerivatives
from tests.catalogue.inside import forces, laplacian, pinn_loss
from tests.catalogue.parts import Net
from tests.truth import unit_truth


def turned(m, x):
    """The Laplacian, and other products of the same weight: with samples in columns, and with the weight turned."""
    (u, second), h, W = laplacian(m, x), torch.tanh(m.net[0](x)), m.net[2].weight
    return u + (W @ h.mT).sin().mean(0), second + (torch.tanh(h @ W.mT) @ W).cos().mean(1)


def coupled(output, target):
    return pinn_loss(output, target) + output[0].var()


@pytest.mark.parametrize(
    ("forward", "bias", "loss_fn"),
    [
        (laplacian, True, pinn_loss),
        (laplacian, False, pinn_loss),
        (turned, True, pinn_loss),
        (laplacian, True, coupled),
    ],
    ids=["bias", "no bias", "other products", "coupled samples"],
)
def test_units_of_a_layer_that_a_model_differentiates_share_directions(forward, bias, loss_fn):
    torch.manual_seed(0)
    layers = nn.Linear(2, 6), nn.Tanh(), nn.Linear(6, 12, bias=bias), nn.Softplus(), nn.Linear(12, 1)
    model, batch = (
        Net(forward, net=nn.Sequential(*layers)).double(),
        (torch.randn(7, 2).double(), torch.randn(7).double()),
    )
    one_by_one = SecondDerivatives.one_by_one
    with patch.object(SecondDerivatives, "one_by_one", autospec=True, side_effect=one_by_one) as direct:
        result = hesscond.probe(model, loss_fn, batch, layers=["net.2"])["net.2"]
    assert direct.called == (loss_fn is coupled)
    for unit in (0, 5, 11):
        truth = unit_truth(model, loss_fn, batch, "net.2", unit)
        torch.testing.assert_close(result.hessian(unit=unit), truth, rtol=1e-11, atol=1e-13 * float(truth.abs().max()))


def test_a_layer_that_only_a_derivative_depends_on_has_units():
    torch.manual_seed(0)
    model = Net(forces, first=nn.Linear(3, 4), out=nn.Linear(4, 1, bias=False)).double()
    batch = torch.randn(20, 3).double(), torch.randn(20, 3).double()
    found = hesscond.probe(model, nn.MSELoss(), batch, layers=["out"])["out"].hessian(unit=0)
    torch.testing.assert_close(found, unit_truth(model, nn.MSELoss(), batch, "out", 0), rtol=1e-11, atol=1e-14)
