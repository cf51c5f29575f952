"""Statements that are wrong by one formula come out violated: the trials tell a claim from its neighbours."""

import numpy as np
import pytest
import torch

from hesscond.methods.sphere import projected
from hesscond.theorems.base import decided
from hesscond.theorems.bnp_algorithms import (
    BNPAlgorithm2,
    BNPAlgorithm3,
    BNPProposition5,
    BNPProposition6,
    BNPProposition10,
)
from hesscond.theorems.bnp_condition_numbers import (
    BNPGain,
    BNPPropertyA,
    BNPProposition11,
    BNPTheorem4,
    PRECInputScaling,
    VanDerSluis,
    centred,
    normalized,
)
from hesscond.theorems.bnp_identities import (
    BNPMerging,
    BNPNormalizationLayers,
    BNPProposition2,
    BNPProposition7,
    BNPProposition9,
    BNPTheorem3,
    drawn_unit,
    under,
)
from hesscond.theorems.constrained_weights import (
    IgnoredMean,
    KeptVariance,
    Law,
    ProjectedRate,
    ProjectedStep,
    StandardizedGradient,
    projected_step,
)
from hesscond.theorems.curvature_structure import MuonRowBlocks, SoftmaxRowBlocks
from hesscond.theorems.descent_rates import BNPTheorem1, PreconditionedRate
from hesscond.theorems.matrices import kappa
from hesscond.theorems.networks import CRITERIA, ConvolutionLayer, Network
from hesscond.theorems.preconditioning import AdaptivePreconditioning, Averages, GradientRegularization, L2InP, L2InZ
from hesscond.theorems.rates import Decay, predicted, scaling_directions
from hesscond.theorems.weight_conditioning import (
    QuadraticDescent,
    WeightConditioningProposition1,
    WeightConditioningTheorem1,
    WeightConditioningTheorem2,
)
from tests.theorems.verdicts import check_broken


def ones(H):
    return np.ones((len(H), 1)) if isinstance(H, np.ndarray) else torch.ones_like(H[:, :1])


def extended(H):
    return np.hstack([ones(H), H]) if isinstance(H, np.ndarray) else torch.cat([ones(H), H], 1)


def without_second_derivatives(network, layer, unit):
    """Gauss and Newton's S = Jᵀ ∇²ℓ J leaves out what the second derivative of a smooth activation adds."""

    def output(a_i, a):
        return network.from_preactivation(layer, torch.cat([a[:unit], a_i[None], a[unit + 1 :]]))

    a = network.features(layer) @ network.weights[layer].T
    z, J = torch.func.vmap(lambda a_i, a: torch.func.jvp(lambda t: output(t, a), (a_i,), (torch.ones_like(a_i),)))(
        a[:, unit], a
    )
    inner = torch.func.vmap(torch.func.hessian(CRITERIA[network.criterion]))(z, network.targets)
    return torch.einsum("ja,jab,jb->j", J, inner, J) / len(a)


def shifted_merge(weight, gamma, beta):
    """β as if it came behind the layer."""
    W = weight[:, 1:]
    return torch.cat([weight[:, :1] + W.sum(1, keepdim=True) * beta.mean(), W * gamma], 1)


def raw_gradient(self, gradient, mu, sigma):
    right = BNPProposition7.step(self, gradient, mu, sigma)
    return torch.cat([gradient[:, :1] - (gradient[:, 1:] @ mu)[:, None], right[:, 1:]], 1)


def scaled_only(H):
    """Graded by four decades after normalization."""
    G = normalized(H)
    return np.hstack([G[:, :1], G[:, 1:] * np.geomspace(1, 1e4, H.shape[1])])


def by_variance(H):
    moved = centred(H)
    moved[:, 1:] /= H.var(0) ** 2
    return moved


def by_row(W):
    return W / np.linalg.norm(W, axis=1)[:, None]


def centred_elsewhere(H):
    return centred(H) + np.hstack([np.zeros((len(H), 1)), np.ones_like(H) * 50 * H.std(0)])


def reversed_scaling(self, side, A, scaled=None):
    """κ of another scaling by κ of the equilibrated matrix."""
    return decided(*(kappa(A if scaled is None else scaled) / kappa(by_row(A))))


def improved_by_inverse(self, W):
    bounds = kappa(W) / kappa(by_row(W))
    return [decided(*bounds), decided(*bounds, len(W) ** 0.5), *WeightConditioningProposition1.check(self, W)[2:]]


def graded_again(self, W):
    A = by_row(W)
    scaled = A / np.linalg.norm(A, axis=0) * np.geomspace(1, 1e-6, W.shape[1])
    bounds = kappa(scaled) / kappa(W)
    return [*WeightConditioningProposition1.check(self, W)[:4], decided(*bounds, W.size**0.5)]


def norms_with_epsilon(self, W, dims):
    for dim in dims:
        W = W / (W.norm(dim=dim, keepdim=True) + 0.1)
    return W


def uncurved(self, found):
    return found.to_dense() + found.curvature * found.null_space.remove(torch.eye(found.order).double())


def best_only(alpha, kappa):
    """(κ − 1)/(κ + 1) whatever the step size."""
    return Decay(predicted(kappa.upper), predicted(kappa.lower))


def uncentred(self, w, g, along):
    inner = g - (along * g).sum(1, keepdim=True) * along / w.shape[1]
    return inner / w.std(1, correction=0, keepdim=True)


def forgotten(of):
    """An update without the factor 2 of the derivative of a square."""
    return lambda self, problem: [(*others, penalty / 2) for *others, penalty in of.updates(self, problem)]


def wrong_layers(plain, name, **options):
    """Batch for layer normalization, two groups for one, and renormalization that is clipped."""
    options |= {"groups": 2} if "groups" in options else {}
    return under(plain, name.replace("layer", "batch"), **{"clip": True} if "clip" in options else options)


UPDATED = ["with the updated G_w"]
#: Statement, name of the method or function that is replaced and what by, violated claims, trials.
QUICK = [
    (BNPProposition5, "q", lambda s, n, N: 1.0, ["bounded fourth moments"], 150),
    (BNPProposition6, "printed", lambda s, n, N, m: (4 * n * N + 3 * n * m, 28 * n * N), ["BNP", "BN"], 10),
    (BNPProposition10, "bound", lambda s, p, r, S: BNPProposition10.bound(s, p, r, r), ["attained"], 40),
    (BNPProposition10, "bound", lambda s, *a: BNPProposition10.bound(s, *a) / 8, ["bound"], 100),
    *(
        (own, "step_5", lambda s, new, G_b, mu, q2, own=own: own.step_5(s, new, G_b, mu, 1) / q2, UPDATED, 10)
        for own in (BNPAlgorithm2, BNPAlgorithm3)
    ),
    (BNPAlgorithm2, "step_5", lambda s, new, G_b, mu, q2: G_b / q2 + new @ mu, UPDATED, 10),
    (BNPProposition7, "step", raw_gradient, ["dense", "convolution, border of μ"], 5),
    (BNPNormalizationLayers, "NEGLIGIBLE", 1.0, ["scale"], 3),
    (BNPNormalizationLayers, "under", wrong_layers, ["one group", "renormalization", "other samples"], 3),
    (BNPProposition2, "drawn_unit", lambda rng, samples=0: drawn_unit(rng, 2 * samples), ["one sample"], 5),
    (BNPMerging, "affine_merged", shifted_merge, ["function"], 5),
    (BNPMerging, "chain_rule", lambda s, *a: [BNPMerging.chain_rule(s, *a)[k] for k in (0, 2, 1)], ["gradients"], 5),
    (BNPPropertyA, "normalized", lambda H: extended((H - H.mean(0)) / H.var(0)), ["D optimal"], 10),
    (PRECInputScaling, "standardize", lambda s, H: (H - H.mean(0)) / H.std(0, ddof=1), ["standardization"], 5),
    (PRECInputScaling, "minmax", lambda s, H: 4 * PRECInputScaling.minmax(s, H), ["min-max", "min-max variance"], 5),
    (
        KeptVariance,
        "kept",
        lambda s, before, n, v: n * v * before.variance(),
        ["independent weights", "several layers", "on the sphere"],
        3,
    ),
    (IgnoredMean, "centre", lambda s, w: w - 0.9 * w.mean(1, keepdims=True), ["inputs of a sample"], 40),
    (KeptVariance, "Law.variance", lambda law, of=Law.variance: 2 * of(law), ["whitened inputs"], 3),
    (StandardizedGradient, "formula", uncentred, ["gradient", "steps on the sphere"], 5),
    (StandardizedGradient, "sphere.projected", lambda w, k, c: projected(w, k, c) / c**0.5, ["steps on the sphere"], 5),
    (ProjectedStep, "projected_step", lambda w, g, alpha, c: w - alpha * (g - g.mean()), ["decay"], 5),
    (ProjectedStep, "projected_step", lambda *a: -projected_step(*a), ["nearest"], 10),
    (SoftmaxRowBlocks, "on_diagonal", lambda s, p: p**2, ["(3.6)"], 5),
    (MuonRowBlocks, "exponent", lambda s: -0.25, ["rows", "κ(E)"], 40),
    (L2InZ, "penalty_weights", lambda s, problem: L2InZ.penalty_weights(s, problem) ** 2, ["scale-adjusted"], 5),
    (Averages, "accumulate", lambda s, r, g, rho: rho * r + g**2, ["from the first gradient", "from zero"], 5),
    (Averages, "first", lambda s, g: g**4, ["from the first gradient", "first step"], 5),
    (AdaptivePreconditioning, "row_sizes", lambda s, H: np.diagonal(H), ["isotropic"], 5),
    (QuadraticDescent, "factors", lambda s, eta, sigma: 1 - eta * sigma / 2, ["per direction", "preconditioned"], 3),
    (QuadraticDescent, "longest", lambda s, sigma: 2.5 / sigma.max(), ["step size"], 20),
    (WeightConditioningTheorem1, "equal_sums", lambda s, A: by_row(A), ["κ_∞"], 20),
    (WeightConditioningTheorem1, "compare", reversed_scaling, ["two rows"], 10),
    (WeightConditioningProposition1, "check", improved_by_inverse, ["within √m"], 60),
    (WeightConditioningProposition1, "check", graded_again, ["row-column within √(mn)"], 40),
]
SLOW = [
    (BNPProposition11, "factor", lambda s, B, H: B.T @ B.T @ H, ["S > 0"], 60),
    (BNPGain, "normalized", scaled_only, ["κ afterwards", "tight", "second inequality"], 20),
    (BNPGain, "normalized", lambda H: np.linalg.qr(normalized(H))[0], ["gain of scaling", "√n attained"], 40),
    (BNPProposition2, "networks.Network.curvature", without_second_derivatives, ["Hessian"], 40),
    (
        BNPProposition2,
        "networks.Network.curvature",
        lambda *a, S=Network.curvature: -S(*a),
        ["S ≥ 0, piecewise linear"],
        20,
    ),
    (
        BNPProposition2,
        "regressions",
        dict.fromkeys(BNPProposition2.regressions, lambda y: (y * (1 - y)).abs().sqrt()),
        ["linear regression", "logistic regression"],
        5,
    ),
    (
        BNPTheorem3,
        "normalized",
        lambda s, H: extended((H - H.mean(0)) / H.std(0)),
        ["normalized inputs", "constant statistics"],
        10,
    ),
    (
        BNPProposition9,
        "networks.ConvolutionLayer.curvature",
        lambda *a, S=ConvolutionLayer.curvature: torch.diag_embed(S(*a).diagonal(dim1=1, dim2=2)),
        ["block diagonal S"],
        20,
    ),
    (BNPTheorem4, "normalized", by_variance, ["scaling"], 40),
    (BNPTheorem4, "centred", centred_elsewhere, ["centring", "strict"], 25),
    (WeightConditioningTheorem2, "equilibrated", norms_with_epsilon, ["scale identity", "nullity"], 10),
    (VanDerSluis, "matrices.equilibrated", lambda A: A / np.abs(A).sum(0)[None, :], ["rows"], 10),
    (AdaptivePreconditioning, "jacobi", lambda s, diagonal: 1 / diagonal, ["Jacobi"], 30),
    (PreconditionedRate, "curvature", lambda s, H, P: P @ P.T @ H @ P @ P.T, ["attained"], 10),
    (BNPTheorem1, "best_step", lambda kappa: 1 / kappa.lambda_max, ["bound", "attained"], 10),
    (BNPTheorem1, "rates.scaling_directions", lambda network: scaling_directions(network).abs(), ["null space"], 5),
    *(
        (own, "rates.decay_of_step", best_only, ["bound, any α", "attained, any α", "diverges"], 10)
        for own in (PreconditionedRate, BNPTheorem1)
    ),
    (ProjectedRate, "riemannian", uncurved, ["Jacobian", "attained"], 10),
    *(
        (own, "updates", forgotten(own), [claim.name for claim in own.claims if claim.true], 5)
        for own in (L2InZ, L2InP, GradientRegularization)
    ),
]


def broken(monkeypatch, statement, name, change):
    """The statement with another method, or with another function of its module."""
    if hasattr(statement, name):
        return type("Broken", (statement,), {name: change})()
    monkeypatch.setattr(f"{statement.__module__}.{name}", change)
    return statement()


def test_what_the_slow_cases_replace_is_there(monkeypatch):
    """The names of all of them, of which a run takes a share."""
    for statement, name, change, *_ in SLOW:
        broken(monkeypatch, statement, name, change)


CASES = [pytest.param(*own, marks=pytest.mark.share(3)) for own in QUICK]
CASES += [pytest.param(*own, marks=[pytest.mark.slow, pytest.mark.share(2)]) for own in SLOW]


@pytest.mark.parametrize(("statement", "name", "change", "claims", "trials"), CASES)
def test_it_is_violated(monkeypatch, statement, name, change, claims, trials):
    check_broken(broken(monkeypatch, statement, name, change), claims, trials=trials)
