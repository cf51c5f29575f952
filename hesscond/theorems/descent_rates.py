"""Linear rates of gradient descent: PREC, Theorem 1, with a preconditioner; BNP, Theorem 1, with null directions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from hesscond.spectra import ConditionNumber
from hesscond.theorems import base, matrices, networks, rates

#: A start is at most this share of the distance to a kink away; one nearer than `NEAR` ‖θ‖ leaves no room for it.
CLEARANCE, NEAR = 0.25, 1e-6
#: Noise in the targets of networks, so that residuals are part of the Hessian; little, for few kinks on the way.
NOISE = 0.01
#: Share of ReLU networks with a unit that never is active, and how far it is from that.
DEAD, DEPTH = 0.05, 6.0


def best_step(kappa: ConditionNumber) -> float:
    """α = 2/(λ_max + λ_min⁺)."""
    return 2 / (kappa.lambda_max + kappa.lambda_min)


#: Ranges of step sizes, as shares of 2/λ_max: where descent converges, and where it does not.
SHORT, LONG = (0.1, 0.95), (1.05, 1.4)
#: Claims for any step size.
ANY_STEP = (
    base.Claim("bound, any α", "rate ≤ max(|1 − αλ_min|, |1 − αλ_max|) for α < 2/λ_max", True),
    base.Claim("attained, any α", "rate = max(|1 − αλ_min|, |1 − αλ_max|) from the eigenvector of that end", True),
    base.Claim("best α", "rate ≥ (κ − 1)/(κ + 1) for any α, from the eigenvector of that end", True),
    base.Claim("diverges", "the steps grow by αλ_max − 1 from the top eigenvector for α > 2/λ_max", True),
)


def at_steps(
    rng: np.random.Generator, descent: Callable[[float], rates.Iteration], kappa: ConditionNumber, range_: Tensor
) -> list[base.Outcome]:
    """Bound and attained at the best α, and the claims `ANY_STEP` for a random α below 2/λ_max, and one above.

    ``range_`` (d, rank): directions of the eigenvectors, that of the smallest nonzero eigenvalue first.
    """
    best, bottom = descent(best_step(kappa)), range_[:, 0]
    radius = best.radius(bottom)
    random = rates.measured(best, range_ @ rates.normal(rng, range_.shape[1]), radius)
    at_best = [rates.bounded(random, kappa), rates.attained(rates.measured(best, bottom, radius), kappa)]
    short, long = (2 * rng.uniform(*share) / kappa.lambda_max for share in (SHORT, LONG))
    near, far = descent(short), descent(long)
    slowest, top = range_[:, 0 if short < best_step(kappa) else -1], range_[:, -1]
    radius = near.radius(slowest)
    anywhere, slow = (
        rates.measured(near, start, radius) for start in (range_ @ rates.normal(rng, range_.shape[1]), slowest)
    )
    # the steps that are measured stay where the iteration is linear
    growing = rates.measured(far, top, far.radius(top) / rates.GROWN)
    return [
        *at_best,
        rates.bounded(anywhere, kappa, rates.decay_of_step(short, kappa)),
        rates.attained(slow, kappa, rates.decay_of_step(short, kappa)),
        rates.no_faster(slow, kappa),
        rates.attained(growing, kappa, rates.decay_of_step(long, kappa)),
    ]


@base.register
class PreconditionedRate(base.Statement):
    """Preconditioned gradient descent converges at the rate of κ(MH)."""

    id = "prec-theorem-1"
    title = "the rate of gradient descent, preconditioned or not"
    source = "PREC, Theorem 1"
    text = (
        "Near a minimum with Hessian H, p ← p − α M ∇L, M = P Pᵀ (plain gradient descent for P = I), converges at the "
        "rate r = max(|1 − αλ_min|, |1 − αλ_max|), λ of PᵀHP or MH, the smallest nonzero one. r is least, "
        "(κ − 1)/(κ + 1) with κ = κ(PᵀHP) = λ_max/λ_min, at α = 2/(λ_max + λ_min). True: it is gradient descent in z, "
        "p = P z. The paper prints it for any α and all k; the restriction to α < 2/λ_max is ours: above it the "
        "iteration leaves the neighbourhood. For singular H it may fail: on x²/2 + y⁴/4, y falls like 1/√k. Checked on "
        "steps from a minimum found to machine precision, moved: along a random direction of the range, and along the "
        "eigenvector of the smallest eigenvalue. Rates count as equal if −ln(rate) agrees to 3 digits."
    )
    hypotheses = (
        "P has full rank and is held fixed; L is smooth near a minimum",
        "H is positive definite, as the paper assumes, or L is constant along its null space (ours)",
        "α = 2/(λ_max + λ_min), unless said otherwise",
    )
    claims = (
        base.Claim("bound", "rate ≤ (κ − 1)/(κ + 1), κ = κ(PᵀHP)", True),
        base.Claim("attained", "rate = (κ − 1)/(κ + 1) from the bottom eigenvector", True),
        *ANY_STEP,
    )
    trials = 30

    def curvature(self, H: Tensor, P: Tensor) -> Tensor:
        """Matrix whose κ predicts the rate."""
        return P.T @ H @ P

    def trial(self, rng: np.random.Generator) -> Sequence[base.Outcome]:
        """A quadratic function or a small network at a minimum, in random coordinates."""
        loss, minimum = random_minimum(rng)
        if minimum is None:
            return [base.not_applicable("no minimum was found")] * len(self.claims)
        P = random_coordinates(rng, minimum.H)
        in_z = self.curvature(minimum.H, P)
        kappa = networks.hessian_kappa(in_z)
        if kappa.negative or not kappa.resolved:
            return [base.not_applicable("the point is no minimum, or its rank is unresolved")] * len(self.claims)
        vectors = torch.linalg.eigh((in_z + in_z.T) / 2).eigenvectors[:, kappa.nullity :]
        root, point = torch.linalg.inv(P), minimum.point

        def descent(alpha: float) -> rates.Iteration:
            reach = rates.FAR * float((root @ point).norm())
            return rates.Iteration(lambda p: p - alpha * (P @ (P.T @ rates.gradient(loss, p))), point, root, reach)

        return at_steps(rng, descent, kappa, P @ vectors)


def random_coordinates(rng: np.random.Generator, H: Tensor) -> Tensor:
    """Rough preconditioner P, as methods have it: a power of H between −0.4 and −0.5, skewed and turned at random."""
    values, vectors = torch.linalg.eigh(H)
    values = torch.where(values > networks.ROUND_OFF * values[-1], values, values[-1])
    skew = torch.from_numpy(10.0 ** rng.uniform(-0.3, 0.3, len(H)))
    power = vectors * values ** -rng.uniform(0.4, 0.5)
    return skew[:, None] * power @ torch.from_numpy(matrices.random_orthogonal(rng, len(H)))


def random_minimum(rng: np.random.Generator) -> tuple[rates.Function, rates.Minimum | None]:
    """A convex quadratic function with a null space or without, or the loss of a network that is smooth."""
    if rng.random() < 0.5:
        size = int(rng.integers(3, 21))
        spectrum = 10.0 ** rng.uniform(0, rng.uniform(0.3, 2), size)
        spectrum[2:][rng.random(size - 2) < rng.choice([0.0, 0.2])] = 0.0
        Q, point = torch.from_numpy(matrices.random_orthogonal(rng, size)), rates.normal(rng, size)
        H = (Q * torch.from_numpy(spectrum)) @ Q.T
        return lambda p: (p - point) @ H @ (p - point) / 2, rates.Minimum(point, H)
    sizes = rng.integers(2, 4, 3).tolist()
    network = rates.taught(rng, sizes, 60, str(rng.choice(["tanh", "gelu"])), NOISE)
    loss = networks.flat_loss(network)
    return loss, rates.newton(loss, rates.second_order(loss), network.parameters)


@base.register
class BNPTheorem1(base.Statement):
    """Gradient descent converges at the rate of the nonzero eigenvalues, if the null space is that of rescaling."""

    id = "bnp-theorem-1"
    title = "the rate of gradient descent with null directions"
    source = "BNP, Theorem 1"
    text = (
        "The loss of a ReLU network does not change under D_t: what enters a hidden unit times t, what leaves it "
        "divided by t. If the null space of the Hessian at a minimum θ is Col(D_tθ), the tangents of these, gradient "
        "descent converges to the set of minima at the rate r = max(|1 − αλ*_min|, |1 − αλ_max|) with the smallest "
        "nonzero eigenvalue, (κ* − 1)/(κ* + 1), κ* = λ_max/λ*_min, at the best α = 2/(λ_max + λ*_min). True; but the "
        "assumption fails in many small ReLU networks: units that are never active add null directions, and so do two "
        "that always are. The paper prints it for any α and all k; the restriction to α < 2/λ_max is ours: above it "
        "the iteration leaves the neighbourhood. Checked on steps from a minimum found to machine precision, moved by "
        "less than the distance of a kink: along a random direction of the range, and along the eigenvector of "
        "λ*_min. Rates count as equal if −ln(rate) agrees to 3 digits."
    )
    hypotheses = (
        "θ is a minimum at which no pre-activation is zero",
        "the null space of the Hessian is Col(D_tθ) (rates)",
        "α = 2/(λ_max + λ*_min), unless said otherwise",
    )
    claims = (
        base.Claim("null space", "H d = 0 for the tangents d of D_tθ", True),
        base.Claim("bound", "rate ≤ (κ* − 1)/(κ* + 1)", True),
        base.Claim("attained", "rate = (κ* − 1)/(κ* + 1) from the bottom eigenvector", True),
        *ANY_STEP,
    )
    trials = 30

    def trial(self, rng: np.random.Generator) -> Sequence[base.Outcome]:
        """A network with one or two hidden layers, at a minimum near those weights that its targets are made with."""
        hidden = rng.integers(2, 4, rng.choice([1, 2], p=[0.8, 0.2])).tolist()
        network = rates.taught(rng, [int(rng.integers(2, 4)), *hidden, int(rng.integers(1, 3))], 60, "relu", NOISE)
        if rng.random() < DEAD:
            network.weights[0][0, 0] = -DEPTH * network.weights[0][0].norm()
            network = replace(network, targets=network.output() + NOISE * rates.normal(rng, *network.targets.shape))
        loss = networks.flat_loss(network)
        minimum = rates.newton(loss, rates.second_order(loss), network.parameters)
        if minimum is None:
            return [base.not_applicable("no minimum was found where no pre-activation is zero")] * len(self.claims)
        return self.check(rng, replace(network, weights=tuple(network.split(minimum.point))), minimum.H)

    def check(self, rng: np.random.Generator, network: networks.Network, H: Tensor) -> Sequence[base.Outcome]:
        """All claims at a minimum."""
        theta, kink = network.parameters, rates.distance_to_kink(network)
        if kink <= NEAR * float(theta.norm()):
            return [base.not_applicable("the minimum is too near a kink")] * len(self.claims)
        kappa, directions = networks.hessian_kappa(H), rates.scaling_directions(network)
        if kappa.negative or not kappa.resolved:
            return [base.not_applicable("the point is no minimum, or its nullity is unresolved")] * len(self.claims)
        # orthonormal, and no more of them than are independent
        U, sigma, _ = torch.linalg.svd(directions, full_matrices=False)
        tangents = U[:, sigma > networks.ROUND_OFF * sigma[0]]
        outside = torch.eye(len(H), dtype=H.dtype, device="cpu") - tangents @ tangents.T
        null = base.equal((outside @ H @ outside).numpy(), H.numpy())
        if kappa.nullity != tangents.shape[1]:
            reason = f"nullity {kappa.nullity}, of which rescaling explains {tangents.shape[1]}"
            dead = rates.dead_units(network)
            reason += f" ({dead} unit{'s'[: dead != 1]} never active)" if dead else ""
            return [null, *[base.not_applicable(reason)] * (len(self.claims) - 1)]
        loss, reach = networks.flat_loss(network), min(rates.FAR * float(theta.norm()), CLEARANCE * kink)

        def descent(alpha: float) -> rates.Iteration:
            plain = torch.eye(len(theta), dtype=theta.dtype, device="cpu")
            return rates.Iteration(lambda point: point - alpha * rates.gradient(loss, point), theta, plain, reach)

        vectors = torch.linalg.eigh(H).eigenvectors[:, kappa.nullity :]
        return [null, *at_steps(rng, descent, kappa, vectors)]
