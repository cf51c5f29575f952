"""BNP: Hessians as products, algorithms as written out, and the step of the merged network."""

from typing import ClassVar

import numpy as np
import pytest
import torch

from hesscond.theorems import verify
from hesscond.theorems.base import discrepancy, equal
from hesscond.theorems.bnp_algorithms import BNPAlgorithm2, BNPAlgorithm3
from hesscond.theorems.bnp_identities import (
    BNPMerging,
    BNPProposition2,
    BNPProposition7,
    BNPProposition9,
    BNPTheorem3,
    nonnegative,
)
from hesscond.theorems.networks import ACTIVATIONS, CRITERIA, random_network
from tests.theorems.verdicts import check_broken, check_known, example_of, tallies

EPS = np.finfo(float).eps


@pytest.mark.slow
def test_proposition_2():
    verdict = check_known("bnp-proposition-2", trials=100, least=0.1)
    found = tallies(verdict)
    assert found["Hessian"].holds > 85
    assert found["Hessian"].worst < 1
    assert found["linear regression"].holds == found["logistic regression"].holds == 100
    # mixed signs, and shares of many sizes
    assert sum("% of S negative" in reason for reason in found["S ≥ 0, smooth"].reasons) >= 4


def test_the_counterexample_to_the_sign_of_the_curvature():
    v, y, p, q = example_of(verify("bnp-proposition-2", trials=1), "S ≥ 0, smooth").matrix[0]
    a = torch.tensor(np.arctanh(p / q), requires_grad=True)
    loss = (v * torch.tanh(a) - y).square() / 2
    (slope,) = torch.autograd.grad(loss, a, create_graph=True)
    assert torch.autograd.grad(slope, a)[0] < 0


@pytest.mark.slow
@pytest.mark.share(2)
def test_without_the_curvature_of_the_activations_the_hessian_is_another():
    """Gauss and Newton's S = Jᵀ ∇²ℓ J leaves out what the second derivative of a smooth activation adds."""

    class GaussNewton(BNPProposition2):
        def curvature(self, network, layer, unit):
            def output(a_i, a):
                return network.from_preactivation(layer, torch.cat([a[:unit], a_i[None], a[unit + 1 :]]))

            a = network.features(layer) @ network.weights[layer].T
            z, J = torch.func.vmap(
                lambda a_i, a: torch.func.jvp(lambda t: output(t, a), (a_i,), (torch.ones_like(a_i),))
            )(a[:, unit], a)
            inner = torch.func.vmap(torch.func.hessian(CRITERIA[network.criterion]))(z, network.targets)
            return torch.einsum("ja,jab,jb->j", J, inner, J) / len(a)

    check_broken(GaussNewton(), "Hessian")


@pytest.mark.slow
@pytest.mark.share(2)
def test_a_curvature_with_the_wrong_sign_is_violated():
    class Negative(BNPProposition2):
        def curvature(self, network, layer, unit):
            return -super().curvature(network, layer, unit)

    check_broken(Negative(), "S ≥ 0, piecewise linear", trials=20)


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


@pytest.mark.slow
def test_theorem_3():
    verdict = check_known("bnp-theorem-3", trials=100)
    assert verdict.worst < 1


@pytest.mark.slow
def test_without_centring_the_preconditioned_hessian_is_another():
    class Scaled(BNPTheorem3):
        def normalized(self, H):
            return torch.cat([torch.ones_like(H[:, :1]), H / H.std(0, correction=0)], 1)

    class Unbiased(BNPTheorem3):
        def normalized(self, H):
            return torch.cat([torch.ones_like(H[:, :1]), (H - H.mean(0)) / H.std(0)], 1)

    for claim in ("normalized inputs", "constant statistics"):
        check_broken(Scaled(), claim, trials=10)
        check_broken(Unbiased(), claim, trials=10)


@pytest.mark.slow
@pytest.mark.share(2)
def test_other_curvatures_of_regression():
    class Unweighted(BNPProposition2):
        regressions: ClassVar = dict.fromkeys(BNPProposition2.regressions, torch.ones_like)

    class Deviation(BNPProposition2):
        regressions: ClassVar = dict.fromkeys(BNPProposition2.regressions, lambda y: (y * (1 - y)).abs().sqrt())

    check_broken(Unweighted(), "logistic regression", trials=5)
    check_broken(Deviation(), "logistic regression", trials=5)
    check_broken(Deviation(), "linear regression", trials=5)


@pytest.mark.slow
def test_proposition_9():
    verdict = check_known("bnp-proposition-9", trials=100)
    assert tallies(verdict)["diagonal S"].reasons.get("S is diagonal", 0) < 20


@pytest.mark.slow
@pytest.mark.share(2)
def test_with_the_diagonal_alone_the_hessian_of_a_channel_is_another():
    class Diagonal(BNPProposition9):
        def blocks(self, layer, channel):
            return torch.diag_embed(super().blocks(layer, channel).diagonal(dim1=1, dim2=2))

    check_broken(Diagonal(), "block diagonal S", trials=20)


@pytest.mark.parametrize("id", ["bnp-algorithm-2", "bnp-algorithm-3"])
def test_algorithms(id):
    verdict = check_known(id, trials=100, least=0.3)
    found = tallies(verdict)
    assert found["with the updated G_w"].holds == 100
    assert found["with the raw G_w"].violated > 90
    assert set(found["1/q² on all of step 5"].reasons) > {"q = 1"}


@pytest.mark.parametrize("algorithm", [BNPAlgorithm2, BNPAlgorithm3])
def test_broken_algorithms(algorithm):
    class Raw(algorithm):
        def readings(self, G_w, *rest):
            updated, raw, whole = super().readings(G_w, *rest)
            return [raw, updated, whole]

    class Deviation(algorithm):
        def step_4(self, G_w, G_b, mu, variance, q2):
            return super().step_4(G_w, G_b, mu, variance**0.5, q2)

    for broken in (Raw(), Deviation()):
        check_broken(broken, "with the updated G_w", trials=10)


def test_the_counterexample_to_the_raw_gradient():
    verdict = verify("bnp-algorithm-2", trials=1)
    (G_w, G_b, mu, variance, q2) = example_of(verdict, "with the raw G_w").matrix[0]
    new = (G_w - G_b * mu) / (q2 * variance)
    P = np.array([[1, -mu], [0, 1]]) @ np.diag([1, variance**-0.5]) / q2**0.5
    expected = P @ P.T @ [G_b, G_w]
    assert expected == pytest.approx([G_b / q2 - new * mu, new], rel=1e-12)
    assert abs(expected[0] - (G_b / q2 - G_w * mu)) > 0.1


def test_proposition_7():
    verdict = check_known("bnp-proposition-7", trials=100, least=0.4)
    found = tallies(verdict)
    assert found["dense"].holds > 90
    assert found["convolution, border of μ"].holds > 90
    assert found["convolution, border of 0"].reasons["a 1×1 kernel has no border"] > 10


def test_a_step_that_centres_with_the_raw_gradient_is_not_that_of_batch_normalization():
    class Raw(BNPProposition7):
        def step(self, gradient, mu, sigma):
            right = super().step(gradient, mu, sigma)
            return torch.cat([gradient[:, :1] - (gradient[:, 1:] @ mu)[:, None], right[:, 1:]], 1)

    check_broken(Raw(), "dense", trials=5)
    check_broken(Raw(), "convolution, border of μ", trials=5)


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


def test_merging():
    verdict = check_known("bnp-merging", trials=60)
    assert tallies(verdict)["gradients"].holds > 50


def test_broken_mergers():
    class Shift(BNPMerging):
        """β as if it came behind the layer."""

        def merge(self, weight, gamma, beta):
            W = weight[:, 1:]
            return torch.cat([weight[:, :1] + W.sum(1, keepdim=True) * beta.mean(), W * gamma], 1)

    class Transposed(BNPMerging):
        def chain_rule(self, weight, gamma, beta, G_hat):
            in_weight, in_gamma, in_beta = super().chain_rule(weight, gamma, beta, G_hat)
            return in_weight, in_beta, in_gamma

    check_broken(Shift(), "function", trials=5)
    check_broken(Transposed(), "gradients", trials=5)


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


@pytest.mark.share(8)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("id", "trials"),
    [
        ("bnp-proposition-2", 10_000),
        ("bnp-theorem-3", 3000),
        ("bnp-algorithm-2", 10_000),
        ("bnp-algorithm-3", 10_000),
        ("bnp-proposition-7", 10_000),
        ("bnp-proposition-9", 3000),
        ("bnp-merging", 3000),
    ],
)
def test_many_trials(id, trials):
    assert verify(id, trials=trials, seed=7, counterexamples=False).ok
