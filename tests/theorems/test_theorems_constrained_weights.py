"""CWO: variances, means, standardized weights, and the step as decay and gradient."""

import numpy as np
import pytest
import torch

from hesscond.theorems import Observation, statement, verify
from hesscond.theorems.constrained_weights import (
    StandardizedGradient,
    symmetric_law,
)
from tests.theorems.verdicts import example_of


def test_a_product_of_matrices_by_drawing():
    rng = np.random.default_rng(1)
    weight, x = symmetric_law(rng, 1), symmetric_law(rng, 2)
    law = x.independent(2).rectified().through(weight.independent(4), 2)
    W = rng.choice(weight.values[:, 0], (200_000, 2, 2), p=weight.shares)
    h = np.maximum(rng.choice(x.values[:, 0], (200_000, 2), p=x.shares), 0)
    assert law.variance() == pytest.approx(np.einsum("koi,ki->ko", W, h).var(), rel=0.02)


def test_the_counterexamples_of_variances():
    verdict = verify("cwo-variance", trials=1)
    pairs = np.array(example_of(verdict, "centred, on the sphere").matrix, dtype=float)
    after = np.maximum(pairs, 0) @ [1.0, -1.0]
    assert (after**2).mean() < pairs[:, 0].var()


def observed(W, means):
    return Observation(np.empty((0, 1)), means, means, 1, W, None, None, means=means)


def test_the_mean_of_a_layer_in_training():
    rng = np.random.default_rng(0)
    W, means = rng.standard_normal((3, 6)), rng.standard_normal(6) + 2
    free = statement("cwo-mean").observe(observed(W, means))
    assert {(outcome.status, outcome.reason) for outcome in free} == {
        ("not-applicable", "1ᵀw ≠ 0: the layer is not constrained")
    }
    single = (W - W.mean(1, keepdims=True)).astype(np.float32).astype(float)
    assert [outcome.status for outcome in statement("cwo-mean").observe(observed(single, means))] == ["holds"]


def test_the_gradient_by_torchs_own_norm():
    """Of L = gᵀŵ, with ŵ by layer normalization."""
    g, w = torch.randn(2, 3, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    leaf = w.clone().requires_grad_()
    w_hat = torch.nn.functional.layer_norm(leaf, (7,), eps=0.0)
    (g * w_hat).sum().backward()
    assert torch.allclose(StandardizedGradient().formula(w, g, w_hat.detach()), leaf.grad, rtol=1e-12)
