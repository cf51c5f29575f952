"""BNP: Hessians as products, algorithms as written out, and the step of the merged network."""

import numpy as np
import pytest
import torch

from hesscond.theorems import verify
from hesscond.theorems.base import discrepancy, equal
from hesscond.theorems.bnp_identities import nonnegative
from hesscond.theorems.networks import ACTIVATIONS, CRITERIA, random_network
from tests.theorems.verdicts import example_of

EPS = np.finfo(float).eps


def test_the_sign_of_the_curvature_is_not_decided_by_round_off():
    assert nonnegative(np.array([1.0, 0.0])).status == "holds"
    assert nonnegative(np.array([1.0, -1e-16])).status == "unresolved"
    assert nonnegative(np.array([1.0, -1e-3])).reason == "50 to 60 % of S negative"
    assert nonnegative(np.array([-1.0])).reason == "90 to 100 % of S negative"
    assert nonnegative(np.zeros(3)).status == "not-applicable"


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("criterion", CRITERIA)
def test_the_curvature_of_networks_is_that_of_the_whole_loss(activation, criterion):
    """S as a full Hessian in all samples' pre-activations: diagonal, and what is claimed."""
    network = random_network(np.random.default_rng(3), [4, 5, 3], 6, activation=activation, criterion=criterion)
    a = network.features(0) @ network.weights[0].T

    def loss(a_i):
        moved = torch.cat([a[:, :2], a_i[:, None], a[:, 3:]], 1)
        return CRITERIA[criterion](network.from_preactivation(0, moved), network.targets).mean()

    S = torch.func.hessian(loss)(a[:, 2])
    assert torch.allclose(S, torch.diag(network.curvature(0, 2)), rtol=1e-11, atol=1e-15)


def test_the_counterexample_to_the_gradient_through_the_statistics():
    w, v, y = example_of(verify("bnp-proposition-7", trials=1), "gradient through μ, σ").matrix[0]
    x = torch.tensor([-1.0, 1.0], dtype=torch.float64)
    for held in (False, True):
        weight = torch.tensor(float(w), dtype=torch.float64, requires_grad=True)
        h = weight * x
        mu, sigma = (h.mean(), h.std(correction=0)) if not held else (h.mean().detach(), h.std(correction=0).detach())
        loss = (v * (h - mu) / sigma - y).square().mean() / 2
        (gradient,) = torch.autograd.grad(loss, weight)
        assert bool(gradient.abs() > 1e-3) == held


def test_equality_up_to_round_off():
    one = np.array([1.0, 2.0])
    assert equal(one, one * (1 + 3 * EPS)).status == "holds"
    assert equal(one, one * (1 + 1e-11)).status == "unresolved"
    assert equal(one, one * (1 + 1e-6)).status == "violated"
    assert "1e-6" in equal(one, one * (1 + 2e-6)).reason
    assert equal(0 * one, 0 * one).status == "not-applicable"
    assert equal(one, one * np.inf).status == "unresolved"
    assert equal(one, one, 1e13).status == "unresolved"
    assert equal(one, np.array([1.0, 2.1]), np.array([1.0, 0.0])).status == "violated"
    assert float(discrepancy([1, 3], [1, 2])) == 1.5
