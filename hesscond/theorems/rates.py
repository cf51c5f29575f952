"""Linear rates of iterations near their fixed points, measured from the steps that they take, against predicted ones.

Rates are compared by their decay −ln(rate), so that 0.999 and 0.9999 are as far apart as they are in iterations.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor
from torch.func import hessian, jacrev

from hesscond.spectra import ConditionNumber
from hesscond.theorems import base
from hesscond.theorems.networks import Network, flat_loss

Function = Callable[[Tensor], Tensor]
#: Most steps to a minimum, and halvings of a step.
NEWTON_STEPS, HALVINGS = 60, 20
#: Eigenvalues below this share of the largest are directions in which no step is made.
FLAT = 1e-9
#: A step of this relative length is one of round-off, but for the square of it: one more is made.
CONVERGED = 1e-9
#: Networks that are drawn for one.
DRAWS = 3


@dataclass(frozen=True)
class Minimum:
    """A point where the gradient vanishes to round-off, and no curvature is negative but by round-off."""

    point: Tensor  # (d,)
    H: Tensor  # (d, d); the Hessian there, symmetric


def normal(rng: np.random.Generator, *shape: int) -> Tensor:
    """Standard normal numbers."""
    return torch.from_numpy(rng.standard_normal(shape))


def gradient(loss: Function, point: Tensor) -> Tensor:
    """∇L (d,)."""
    leaf = point.detach().requires_grad_()
    return torch.autograd.grad(loss(leaf), leaf)[0]


def second_order(loss: Function) -> Callable[[Tensor], tuple[Tensor, Tensor]]:
    """∇L and ∇²L as a function of the point."""
    return lambda point: (gradient(loss, point), hessian(loss)(point))


def newton(
    loss: Function,
    derivatives: Callable[[Tensor], tuple[Tensor, Tensor]],
    start: Tensor,
    retract: Function = torch.clone,
) -> Minimum | None:
    """Minimum by Newton's method with |λ| for the eigenvalues of the Hessian; None if it does not converge.

    On constraints, ``derivatives`` are the Riemannian ones, and ``retract`` brings a point back.
    """
    point, converged = start, False
    for _ in range(NEWTON_STEPS):
        g, H = derivatives(point)
        H = (H + H.T) / 2
        values, vectors = torch.linalg.eigh(H)
        steep = values.abs() > FLAT * values.abs().max()
        if converged:
            slope = (vectors[:, ~steep].T @ g).norm()
            downhill = bool((values[steep] < 0).any()) or bool(slope > CONVERGED * H.norm() * point.norm())
            return None if downhill else Minimum(point, H)
        values, vectors = values[steep], vectors[:, steep]
        step = vectors @ ((vectors.T @ g) / values.abs())
        converged = bool(step.norm() <= CONVERGED * point.norm())
        before, share = float(loss(point)), 1.0
        # so near that the loss is flat to round-off, the step itself is to be trusted
        while not converged and not float(loss(retract(point - share * step))) < before:
            share /= 2
            if share < 2.0**-HALVINGS:
                return None
        point = retract(point - share * step)
    return None


def taught(rng: np.random.Generator, sizes: Sequence[int], samples: int, activation: str, noise: float) -> Network:
    """A network with squared error, weights and Gaussian inputs of order one, whose targets are its outputs, and noise.

    It is near a minimum. Of several draws it is the one with the best conditioned Hessian, so that a few hundred steps
    distinguish the rate from 1.
    """
    drawn = []
    for _ in range(DRAWS):
        weights = tuple(
            torch.cat([0.5 * normal(rng, m, 1), (2 / n) ** 0.5 * normal(rng, m, n)], 1) for n, m in pairwise(sizes)
        )
        inputs = normal(rng, samples, sizes[0])
        network = Network(inputs, inputs.new_zeros(samples, sizes[-1]), weights, activation, "squared error")
        drawn.append(replace(network, targets=network.output()))
    network = min(drawn, key=spread)
    return replace(network, targets=network.targets + noise * normal(rng, *network.targets.shape))


def spread(network: Network) -> float:
    """κ of the Hessian, of eigenvalues that are not `FLAT`."""
    values = torch.linalg.eigvalsh(hessian(flat_loss(network))(network.parameters)).abs()
    return float(values.max() / values[values > FLAT * values.max()].min())


def preactivations(network: Network, theta: Tensor) -> Tensor:
    """Pre-activations (N, units) of all hidden units, with weights ``theta`` (d,)."""
    at = replace(network, weights=tuple(network.split(theta)))
    hidden = range(len(at.weights) - 1)
    return torch.cat([at.features(layer) @ at.weights[layer].T for layer in hidden], 1)


def distance_to_kink(network: Network) -> float:
    """How far the weights are, to first order, from where some pre-activation a changes its sign: min |a| / ‖∇a‖."""
    theta = network.parameters
    a = preactivations(network, theta)
    slopes = jacrev(lambda point: preactivations(network, point))(theta).norm(dim=-1)
    # one that no weight changes is on no kink, or stays there
    return float((a.abs() / slopes.clamp_min(torch.finfo(slopes.dtype).tiny)).min())


def dead_units(network: Network) -> int:
    """Hidden units that put out zero for all samples."""
    layers = range(1, len(network.weights))
    return sum(int((network.features(layer)[:, 1:] == 0).all(0).sum()) for layer in layers)


def rescaled(network: Network, factors: Tensor) -> Tensor:
    """D_t θ: what enters each hidden unit times t, what leaves it divided by t, for ``factors`` t (units,)."""
    weights = list(network.weights)
    for layer, t in enumerate(factors.split([len(weight) for weight in network.weights[:-1]])):
        weights[layer] = t[:, None] * weights[layer]
        weights[layer + 1] = weights[layer + 1] / torch.cat([torch.ones_like(t[:1]), t])
    return torch.cat([weight.flatten() for weight in weights])


def scaling_directions(network: Network) -> Tensor:
    """The tangents (d, units) of t ↦ D_t θ at t = 1."""
    units = sum(len(weight) for weight in network.weights[:-1])
    return jacrev(lambda factors: rescaled(network, factors))(network.parameters.new_ones(units))


EPS = float(torch.finfo(torch.float64).eps)
#: Decays are equal if they differ by no more than this share, and different above `APART` times that.
TOLERANCE, APART = 1e-3, 10.0
#: Most steps of a measurement, and fewest ratios of steps that it is made of.
STEPS, FEWEST = 300, 8
#: Windows in which the rate is measured, in the second half of the steps.
WINDOWS = 4
#: Steps count while they are this many times what round-off makes of them.
ABOVE = 1e4
#: Growth of the steps at which the iteration counts as divergent, and is not followed farther.
GROWN = 1e3
#: Nonlinearity at the start, as a share of what a step takes off.
BEND = 2e-4
#: A start is at most this share of the fixed point's norm away from it.
FAR = 1e-2
#: Radii that are tried, half a decade apart.
RADII = 16


@dataclass(frozen=True)
class Iteration:
    """x ↦ step(x) near a fixed point."""

    step: Callable[[Tensor], Tensor]  # maps (d,) tensors to (d,) tensors
    fixed: Tensor  # (d,); fixed point, to round-off
    root: Tensor  # (k, d); the iteration's Jacobian is symmetric in the coordinates root @ x
    reach: float  # in these coordinates, how far from the fixed point the iteration is still smooth

    def size(self, change: Tensor) -> float:
        """Norm in the coordinates in which the Jacobian is symmetric."""
        return float((self.root @ change).norm())

    @property
    def noise(self) -> float:
        """Size of a step that round-off alone makes."""
        scale = float(torch.linalg.matrix_norm(self.root, 2)) * float(self.fixed.norm())
        return self.size(self.step(self.fixed) - self.fixed) + EPS * scale

    def bend(self, offset: Tensor, along: Tensor) -> float:
        """‖(F(x + d + u) − F(x + d)) − (F(x + u) − F(x))‖/‖u‖: how much F' changes along u at a displacement d.

        u is as long as d, ``offset``, and has the direction of ``along``: shorter ones are lost in round-off.
        """
        u = self.size(offset) / self.size(along) * along
        far, near = (self.step(self.fixed + d + u) - self.step(self.fixed + d) for d in (offset, 0 * offset))
        return self.size(far - near) / self.size(u)

    def radius(self, direction: Tensor) -> float:
        """How far along ``direction`` (d,) a step is linear, to `BEND`, or else as nearly so as round-off admits."""
        unit = direction / self.size(direction)
        bends: list[tuple[float, float]] = []
        for number in range(RADII):
            radius = self.reach * 10 ** (-number / 2)
            bend = self.bend(radius * unit, unit)
            if bend <= BEND * abs(1 - self.size(self.step(self.fixed + radius * unit) - self.fixed) / radius):
                return radius
            bends.append((bend, radius))
        return min(bends)[1]


@dataclass(frozen=True)
class Decay:
    """Bounds ``lower`` and ``upper`` of −ln(rate), which is negative if the iteration does not converge."""

    lower: float
    upper: float

    @property
    def rate(self) -> float:
        """The rate in the middle of the bounds."""
        return math.exp(-(self.lower + self.upper) / 2)


def predicted(kappa: float) -> float:
    """−ln((κ − 1)/(κ + 1)), without cancellation."""
    return math.log1p(2 / (kappa - 1)) if kappa > 1 else math.inf


def measured(iteration: Iteration, direction: Tensor, radius: float) -> Decay | None:
    """Decay of the steps from a start along ``direction`` (d,); None if round-off is reached too soon to measure it.

    The start is at the distance ``radius`` from the fixed point.

    From windows in the second half of the steps, where what decays fast has done so; each of an even number of steps,
    for at the best step size the two ends of the spectrum alternate. The bounds contain all windows, the round-off of
    the steps at their ends, and what nonlinearity makes of the steps where they begin: of two, for it alternates too.
    """
    noise = iteration.noise
    points = [iteration.fixed + radius / iteration.size(direction) * direction]
    sizes: list[float] = []
    while len(sizes) <= STEPS:
        after = iteration.step(points[-1])
        size = iteration.size(after - points[-1])
        # not so for what diverges to NaN, either
        if not ABOVE * noise <= size <= (GROWN * sizes[0] if sizes else math.inf):
            break
        sizes.append(size)
        points.append(after)
    ratios = len(sizes) - 1
    if ratios < FEWEST:
        return None
    length = 2 * max(1, ratios // (4 * WINDOWS))
    lower, upper = [], []
    for end in range(ratios, ratios // 2 + length - 1, -length):
        decay = math.log(sizes[end - length] / sizes[end]) / length
        begin = points[end - length : end - length + 3]
        bend = max(iteration.bend(before - iteration.fixed, after - before) for before, after in pairwise(begin))
        # rounding of the four steps that define the bend
        bend += 4 * noise / iteration.size(begin[0] - iteration.fixed)
        error = 2 * noise / sizes[end] / length + bend * math.exp(decay)
        lower.append(decay - error)
        upper.append(decay + error)
    return Decay(min(lower), max(upper))


def decay_of_step(alpha: float, kappa: ConditionNumber) -> Decay:
    """−ln max(|1 − αλ_min|, |1 − αλ_max|): of gradient descent with the step size α, negative above 2/λ_max."""

    def decay(x: float) -> float:
        if x == 1:
            return math.inf
        return -(math.log1p(-x) if x < 1 else math.log1p(x - 2))

    top = decay(alpha * kappa.lambda_max)
    decays = [min(top, decay(alpha * kappa.lambda_max / ratio)) for ratio in (kappa.lower, kappa.upper)]
    return Decay(min(decays), max(decays))


def bounded(decay: Decay | None, kappa: ConditionNumber, expected: Decay | None = None) -> base.Outcome:
    """Whether the rate is at most that of a decay ``expected``, up to `TOLERANCE`; by default (κ − 1)/(κ + 1)."""

    def judge(actual: Decay, expected: Decay) -> base.Outcome:
        return base.decided(
            expected.lower / actual.upper if actual.upper > 0 else math.inf,
            expected.upper / actual.lower if actual.lower > 0 else math.inf,
            1 + TOLERANCE,
        )

    return judged(decay, kappa, expected, judge)


def no_faster(decay: Decay | None, kappa: ConditionNumber) -> base.Outcome:
    """Whether the rate is (κ − 1)/(κ + 1) at least, up to `TOLERANCE`."""

    def judge(actual: Decay, least: Decay) -> base.Outcome:
        return base.decided(actual.lower / least.upper, actual.upper / least.lower, 1 + TOLERANCE)

    return judged(decay, kappa, Decay(predicted(kappa.upper), predicted(kappa.lower)), judge)


def attained(decay: Decay | None, kappa: ConditionNumber, expected: Decay | None = None) -> base.Outcome:
    """Whether both decays agree to `TOLERANCE`; by default with that of the rate (κ − 1)/(κ + 1)."""

    def judge(actual: Decay, expected: Decay) -> base.Outcome:
        deviations = [a / b - 1 for a in (actual.lower, actual.upper) for b in (expected.lower, expected.upper)]
        low, high = min(deviations), max(deviations)
        farthest = max(abs(low), abs(high)) / TOLERANCE
        nearest = 0.0 if low <= 0 <= high else min(abs(low), abs(high)) / TOLERANCE
        if farthest <= 1:
            return base.Outcome("holds", farthest)
        if nearest > APART:
            return base.Outcome("violated", nearest)
        return base.Outcome("unresolved", nearest, "the rate is not measured sharply enough")

    return judged(decay, kappa, expected, judge)


def judged(
    decay: Decay | None, kappa: ConditionNumber, expected: Decay | None, judge: Callable[[Decay, Decay], base.Outcome]
) -> base.Outcome:
    """Outcome of ``judge``, if there are both a measured rate and a κ that predicts one."""
    if not kappa.resolved:
        return base.UNRESOLVED
    if kappa.rank < 2:
        return base.not_applicable("there is one nonzero eigenvalue only")
    if decay is None:
        return base.Outcome("unresolved", reason="round-off is reached before there is a rate")
    if expected is not None:
        return judge(decay, expected)
    outcome = judge(decay, Decay(predicted(kappa.upper), predicted(kappa.lower)))
    return replace(outcome, predicted=predicted(kappa.value), measured=(decay.lower + decay.upper) / 2)
