"""Unit Hessians of convolutions: how many rows their factors have."""

import pytest
import torch
from torch import nn

import hesscond
from hesscond.capture import capture
from hesscond.hessians import build
from hesscond.hessians.build import unit_conditions, unit_hessians
from hesscond.hessians.formed import UnitMatrices
from hesscond.problem import MEMORY
from tests.catalogue.parts import Net
from tests.truth import layer_truth, unit_truth


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


def attending(features, positions):
    """A dense layer between features, of 8 numbers, and an attention, whose curvature couples positions.

    With its loss, and inputs that differ little along most directions.
    """

    def forward(m, x):
        h = nn.functional.gelu(m.fc1(m.features(x)))
        scores = m.fc2(h) @ m.fc2(h).transpose(1, 2)
        return m.head(torch.tanh(m.fc2(torch.softmax(scores, -1) @ h)).mean(1))

    torch.manual_seed(1)
    parts = {"fc1": nn.Linear(8, 6), "fc2": nn.Linear(6, 5), "head": nn.Linear(5, 4)}
    model = Net(forward, features=features, **parts).double()
    if isinstance(features, nn.LayerNorm):
        nn.init.uniform_(features.weight, 0.5, 2.0)
        nn.init.normal_(features.bias)
    x = 1e-4 * torch.randn(12, positions, 8) + torch.randn(12, positions, 1) * torch.randn(8) + torch.randn(8)
    return model, nn.CrossEntropyLoss(), (x.double(), torch.randint(0, 4, (12,)))


@pytest.mark.parametrize("positions", [5, 20])
def test_normalized_features_depend_on_each_other_whatever_the_rounding_of_the_curvature(positions, monkeypatch):
    """Σ_i (h_i − β_i)/γ_i = 0 behind a layer normalization: the rank of Ĥ decides that of H where no gap does."""
    problem = attending(nn.LayerNorm(8), positions)
    norm = problem[0].features
    null = torch.cat([-(norm.bias / norm.weight).sum()[None], 1 / norm.weight]).detach()
    complement = torch.linalg.qr(torch.cat([null[:, None], torch.eye(9, dtype=null.dtype)], 1)).Q[:, 1:]
    found = hesscond.probe(*problem, ["fc1"])["fc1"].kappa
    monkeypatch.setattr(build, "feature_rank", lambda *captured: None)
    alone = hesscond.probe(*problem, ["fc1"])["fc1"].kappa
    assert not all(kappa.resolved for kappa in alone)
    for unit, (kappa, before) in enumerate(zip(found, alone, strict=True)):
        H = unit_truth(*problem, "fc1", unit)
        assert (H @ null).norm() <= 1e-14 * H.norm() * null.norm()
        values = torch.linalg.eigvalsh(complement.T @ H @ complement).abs()
        assert (kappa.rank, kappa.rank_decision) == (8, "numerical")
        assert kappa.lower * (1 - 1e-4) <= values.max() / values.min() <= kappa.upper * (1 + 1e-4)
        assert kappa.width < 2
        assert kappa == before or not before.resolved


def test_the_rank_of_features_that_lost_digits_decides_nothing():
    model, loss_fn, (x, y) = attending(nn.Tanh(), 5)
    x = torch.cat([19 + x[..., :1] / 10, x[..., 1:] / 10], 2)
    kappa = hesscond.probe(model, loss_fn, (x, y), ["fc1"])["fc1"].kappa
    assert not any(own.resolved for own in kappa)
    assert all("different features" in own.cause.reason for own in kappa)


def test_the_rank_of_normalized_features_bounds_that_of_a_layer():
    problem = attending(nn.LayerNorm(8), 5)
    kappa = hesscond.probe(*problem, ["fc1"], level="layer")["fc1"].kappa
    values = torch.linalg.eigvalsh(layer_truth(*problem, "fc1")).abs().sort().values
    assert kappa.rank == 48
    assert values[5] < 1e-16 * values[-1] < values[6]
    assert kappa.lower * (1 - 1e-4) <= values[-1] / values[6] <= kappa.upper * (1 + 1e-4)


class Exact:
    """Products of a block diagonal matrix, without rounding."""

    def __init__(self, H):
        self.H, self.point = torch.block_diag(*H), torch.zeros(2 * len(H), dtype=torch.float64)

    def __matmul__(self, v):
        return self.H @ v


@pytest.mark.parametrize("wrong", [0.0, 1e-6])
def test_products_that_agree_by_chance_leave_the_rounding_of_the_entries(wrong):
    H = torch.tensor([[[4.0, 2.0], [2.0, 1.0]], [[16.0, 4.0], [4.0, 1.0]]], dtype=torch.float64)
    spread = torch.tensor([[32.0, 16.0], [64.0, 16.0]], dtype=torch.float64)
    # a difference in a unit that is not the largest shows too
    changed = H + wrong * torch.eye(2, dtype=torch.float64) * torch.tensor([1.0, 0.0])[:, None, None]
    found = UnitMatrices(H, spread, [1, 1]).confirmed(Exact(changed), torch.tensor([[0, 1], [2, 3]]))
    if wrong:
        assert found is None
        return
    assert (found.spread[..., None] * found.spread[:, None] >= H).all()
    assert (found.spread < spread / 4).all()
