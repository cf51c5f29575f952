"""Unit Hessians of convolutions: how many rows their factors have."""

import pytest
import torch
from torch import nn

from hesscond.capture import capture
from hesscond.hessians.build import unit_conditions, unit_hessians
from hesscond.problem import MEMORY
from tests.truth import unit_truth


def problem(pooling, size=6):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(2, 5, 3), nn.ReLU(), pooling, nn.Flatten(), nn.LazyLinear(4)).double()
    x = torch.randn(9, 2, size, size, dtype=torch.float64)
    with torch.no_grad():
        model[0].bias[4] = -100  # a dead channel
        model(x)
    return model, nn.CrossEntropyLoss(), (x, torch.randint(0, 4, (9,)))


@pytest.mark.parametrize(
    ("pooling", "size", "rows"),
    # with many positions the inner products of terms are off by far more than the terms
    [(nn.AdaptiveAvgPool2d(1), 6, 9), (nn.AdaptiveAvgPool2d(1), 40, 9), (nn.AvgPool2d(2), 6, 27)],
)
def test_terms_behind_a_mean_over_all_positions_are_merged(pooling, size, rows):
    """A channel that is averaged feeds the loss one number a sample: its S has rank 1 in each, not classes − 1."""
    model, loss_fn, batch = problem(pooling, size)
    captured = capture(model, loss_fn, batch, ["0"])["0"]
    assert captured.curvature.B.shape[0] == 3
    hessians = unit_hessians(captured, range(5), MEMORY)
    for unit, hessian in enumerate(hessians):
        assert len(hessian.rows) == rows
        truth = unit_truth(model, loss_fn, batch, "0", unit)
        assert (hessian.matrix() - truth).norm() <= 1e-13 * truth.norm()
    conditions = unit_conditions(captured, None, rtol=1e-6, memory=MEMORY)
    assert [kappa.rank for kappa in conditions] == [min(rows, 19)] * 4 + [0]
    assert all(kappa.rank_decision == "structural" for kappa in conditions[:4])
