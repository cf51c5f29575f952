"""CWO: descent on spheres of weights, its projection, and its rate by the Hessian on the tangent space."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import partial

import numpy as np
import torch
from scipy.optimize import brentq
from torch import Tensor, nn
from torch.func import functional_call, grad, jacrev

from hesscond.hessians import HessianOperator, SphereTangentOperator
from hesscond.methods.sphere import Constraint, Sphere, projected
from hesscond.spectra import ConditionNumber
from hesscond.theorems.base import Claim, Counterexample, Outcome, Statement, discrepancy, equal, register
from hesscond.theorems.matrices import random_matrix, random_size
from hesscond.theorems.networks import hessian_kappa
from hesscond.theorems.rates import (
    FAR,
    Iteration,
    Minimum,
    attained,
    bounded,
    gradient,
    measured,
    newton,
    normal,
    not_applicable,
)

#: Feasible points that must not be nearer.
RIVALS = 20


def projected_step(w: np.ndarray, gradient: np.ndarray, alpha: float, c: float) -> np.ndarray:
    """Eq. (11): √c (w − α Pg)/‖w − α Pg‖, Pg = g − mean(g) 1."""
    moved = w - alpha * (gradient - gradient.mean())
    return c**0.5 * moved / np.linalg.norm(moved)


@register
class ProjectedStep(Statement):
    """The projected gradient step is the feasible point next to the plain one."""

    id = "cwo-projection"
    title = "eq. (11) is the nearest feasible point"
    source = "CWO, eqs. (9), (11), (13), (14), and Algorithm 1"
    text = (
        "√c (w − α Pg)/‖w − α Pg‖ with the centred gradient Pg = g − mean(g) 1 is the point of {‖w‖² = c, 1ᵀw = 0} "
        "nearest to w − αg. True if 1ᵀw = 0, so initial weights must be centred, and w ≠ α Pg, where every feasible "
        "point is as near. Eqs. (13) and (14) lack the factor √c, which Algorithm 1 has: their point is not feasible "
        "unless c = 1. Checked by the conditions that make a feasible point the nearest one (w − αg = μ1 + ν w⁺, "
        "ν ≥ 0), and against random feasible points."
    )
    hypotheses = ("1ᵀw = 0 at the start", "w − α Pg ≠ 0", "c ≠ 1 (second claim)")
    claims = (
        Claim("nearest", "w⁺ solves (9)", True),
        Claim("without √c", "(w − α Pg)/‖w − α Pg‖ solves (9)", False, published=False),
        Claim("any start", "w⁺ solves (9) although 1ᵀw ≠ 0", False, published=False),
    )

    def step(self, w: np.ndarray, gradient: np.ndarray, alpha: float, c: float) -> np.ndarray:
        """w⁺ of eq. (11)."""
        return projected_step(w, gradient, alpha, c)

    def trial(self, rng: np.random.Generator) -> Sequence[Outcome]:
        """A random feasible point and gradient."""
        n, c, alpha = 1 + random_size(rng), float(10.0 ** rng.uniform(-1, 1)), float(10.0 ** rng.uniform(-2, 1))
        anywhere = rng.standard_normal(n)
        w = feasible(anywhere, c)
        gradient = random_matrix(rng, 1, n)[0]
        off = w + rng.choice([-1.0, 1.0]) * rng.uniform(0.1, 1.0)
        found = self.step(w, gradient, alpha, c)
        return [
            nearest(rng, found, w - alpha * gradient, c),
            nearest(rng, found / c**0.5, w - alpha * gradient, c),
            nearest(rng, self.step(off, gradient, alpha, c), off - alpha * gradient, c),
        ]

    def counterexamples(self, seed: int) -> Iterator[Counterexample]:
        """Two weights, all integers: the feasible set is two points."""
        size, shift, alpha = (int(i) for i in np.random.default_rng(seed).integers(2, 7, 3))
        # c = 2 size², and the gradient leads outwards: w⁺ = w
        w, gradient = [size, -size], [-1, 1]
        text = f"‖w⁺‖² = 1, not c = {2 * size**2}, for α = {alpha}: [w, g]"
        yield Counterexample(self.claims[1].name, [w, gradient], text, float(discrepancy([1], [2 * size**2])))
        off = [size + shift, -size + shift]
        moved = [off[0] + alpha, off[1] - alpha]
        far = Fraction(abs(sum(moved)), abs(moved[0]) + abs(moved[1]))
        text = f"1ᵀw⁺ ≠ 0: w⁺ is a multiple of {moved} for α = {alpha}: [w, g]"
        yield Counterexample(self.claims[2].name, [off, gradient], text, float(1 + far))


def feasible(w: np.ndarray, c: float) -> np.ndarray:
    """The point of {‖w‖² = c, 1ᵀw = 0} next to w."""
    w = w - w.mean()
    return c**0.5 * w / np.linalg.norm(w)


def nearest(rng: np.random.Generator, found: np.ndarray, target: np.ndarray, c: float) -> Outcome:
    """Whether ``found`` is the nearest feasible point: ‖w‖² = c, 1ᵀw = 0, target = μ1 + ν w with ν ≥ 0.

    These suffice: for feasible w, ‖target − w‖² = ‖target‖² + c − 2 targetᵀw, and targetᵀw = ν foundᵀw ≤ ν c.
    """
    centred = target - target.mean()
    if np.linalg.norm(centred) <= 1e-8 * np.abs(target).max():
        return Outcome("not-applicable", reason="the step goes to zero, from where all feasible points are as near")
    nu = centred @ found / c
    left = np.array([found @ found / c, found.sum() / c**0.5, *(nu * found / np.linalg.norm(centred))])
    right = np.array([1.0, 0.0, *(centred / np.linalg.norm(centred))])
    outcome = equal(left, right, float(np.abs(target).max() / np.linalg.norm(centred)) * len(target) ** 0.5 + 1.0)
    if outcome.status != "holds":
        return outcome
    rivals = [feasible(rng.standard_normal(len(found)), c) for _ in range(RIVALS)]
    nearer = min(float(np.linalg.norm(target - rival)) for rival in rivals) < np.linalg.norm(target - found)
    if nu < 0 or nearer:
        return Outcome("violated", 2.0, "another feasible point is nearer")
    return outcome


#: Samples, and noise in the targets.
SAMPLES, NOISE = 60, 0.1
#: Round-off of the Jacobian of a step, and of what is predicted for it from the Riemannian Hessian.
JACOBIAN = 1e-10
#: Step sizes are searched up to this many times 1/λ_max.
LONGEST = 1e3


@dataclass(frozen=True)
class ConstrainedLoss:
    """The loss of a network whose first layer is constrained, as a function of all its parameters that may change.

    Attributes
    ----------
    method
        With the network, whose first module is a dense layer.
    inputs : (N, n)
    targets : (N, c)
    """

    method: Sphere
    inputs: Tensor
    targets: Tensor

    @property
    def weights(self) -> tuple[int, int]:
        """Shape of the constrained weights; they are the first of the parameters."""
        units, width = self.method.constrained[0].weight.shape
        return units, width

    def value(self, point: Tensor) -> Tensor:
        """Mean squared error with the parameters ``point`` (d,)."""
        units, width = self.weights
        changed = {"0.weight": point[: units * width].view(units, width)}
        if self.free:
            changed["0.bias"] = point[units * width :]
        return nn.functional.mse_loss(functional_call(self.method.model, changed, (self.inputs,)), self.targets)

    @property
    def free(self) -> bool:
        """Whether there are parameters without a constraint."""
        return self.method.constrained[0].bias is not None

    def retract(self, point: Tensor) -> Tensor:
        """The weights brought back onto the constraints."""
        units, width = self.weights
        rows = projected(point[: units * width].view(units, width), self.method.constraint, self.method.c)
        return torch.cat([rows.flatten(), point[units * width :]])

    @property
    def point(self) -> Tensor:
        """The parameters of the model."""
        layer = self.method.constrained[0]
        return nn.utils.parameters_to_vector(layer.parameters()).detach()

    def tangent(self, point: Tensor) -> SphereTangentOperator:
        """The Riemannian Hessian at ``point``, to which the parameters of the model are set."""
        nn.utils.vector_to_parameters(point, self.method.constrained[0].parameters())
        found, _ = self.method.chart.network(
            lambda **given: HessianOperator(
                self.method.model, nn.functional.mse_loss, (self.inputs, self.targets), **given
            )
        )
        assert isinstance(found, SphereTangentOperator)
        return found

    def minimum(self) -> Minimum | None:
        """Near the parameters of the model, by Newton's method on the manifold."""

        def derivatives(point: Tensor) -> tuple[Tensor, Tensor]:
            found = self.tangent(point)
            return found.null_space.remove(found.operator.gradient[:, None])[:, 0], found.to_dense()

        return newton(self.value, derivatives, self.point, self.retract)


def random_problem(rng: np.random.Generator) -> ConstrainedLoss:
    """Least squares in the units of a dense layer, or behind tanh and a fixed layer; the targets are of other norms."""
    width, units = int(rng.integers(4, 7)), 1 if rng.random() < 0.5 else int(rng.integers(2, 4))
    # without torch's own random numbers, which are not ours to draw
    linear = partial(nn.utils.skip_init, nn.Linear, dtype=torch.float64)
    layer = linear(width, units, bias=rng.random() < 0.3)
    model = nn.Sequential(layer)
    if rng.random() < 0.5:
        model.extend([nn.Tanh(), linear(units, 2).requires_grad_(False)])
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(normal(rng, *parameter.shape))
    c = float(2 * 10.0 ** rng.uniform(-0.3, 0.3))
    constraint: Constraint = "sphere" if rng.random() < 0.5 else "both"
    method = Sphere(model, constraint=constraint, c=c, affine=False, output=True, layers=("0",))
    inputs = normal(rng, SAMPLES, width) * torch.from_numpy(10.0 ** rng.uniform(-0.4, 0.4, width)) + 0.3
    scaled = {"0.weight": layer.weight.detach() * torch.from_numpy(rng.uniform(0.6, 1.6, (units, 1)))}
    output = functional_call(model, scaled, (inputs,)).detach()
    return ConstrainedLoss(method, inputs, output + NOISE * normal(rng, *output.shape))


@dataclass(frozen=True)
class Linearization:
    """x ↦ retract(x − α∇L) at a minimum, in the tangent space.

    Attributes
    ----------
    basis : (d, k)
        Orthonormal, of the tangent space.
    Hess : (d, d)
        What is taken for the Riemannian Hessian.
    multipliers : (d,)
        λ_i = ⟨w_i, ∇_i L⟩/c at the weights of unit i, 0 at free parameters.
    """

    basis: Tensor
    Hess: Tensor
    multipliers: Tensor

    def root(self, alpha: float) -> Tensor:
        """(1 − αλ_i)^−½ (d,)."""
        return (1 - alpha * self.multipliers).rsqrt()

    def symmetric(self, alpha: float) -> Tensor:
        """What (1 − αλ_i)⁻¹ Hess is similar to (k, k): the factor is constant on the tangent space of each unit."""
        scaled = self.root(alpha)[:, None] * self.Hess * self.root(alpha)
        return self.basis.T @ scaled @ self.basis

    def best_step(self) -> float | None:
        """The α at which α μ_max + α μ_min = 2 for the eigenvalues μ(α) of (1 − αλ_i)⁻¹ Hess; None if there is none.

        α/(1 − αλ_i) increases with α, and so do both ends.
        """
        most = float(self.multipliers.max())
        longest = LONGEST / float(torch.linalg.matrix_norm(self.Hess, 2))
        longest = min(longest, (1 - 1e-6) / most) if most > 0 else longest

        def excess(alpha: float) -> float:
            values = torch.linalg.eigvalsh(self.symmetric(alpha))
            return alpha * float(values[0] + values[-1]) - 2

        return float(brentq(excess, 0.0, longest, xtol=1e-14 * longest, rtol=1e-14)) if excess(longest) > 0 else None


@register
class ProjectedRate(Statement):
    """Projected gradient descent converges at the rate of the Riemannian Hessian on the tangent spaces."""

    id = "cwo-rate"
    title = "the rate of projected gradient descent"
    source = "CWO, Algorithm 1, with Absil, Mahony and Sepulchre (2008), sec. 5.3-5.4"
    text = (
        "The step w ↦ projection of w − α∇L on spheres ‖w_i‖² = c (and 1ᵀw_i = 0) has at a stationary point the "
        "Jacobian I − α (1 − αλ_i)⁻¹ Hess_R on the product of the tangent spaces, λ_i = ⟨w_i, ∇_i L⟩/c and Hess_R = "
        "Proj ∇²L − λ_i the Riemannian Hessian. At the best α it converges at the rate (κ − 1)/(κ + 1), κ that of "
        "(1 − αλ_i)⁻¹ Hess_R, which is κ(Hess_R) where all λ_i are equal, as with one unit. True. Neither the ambient "
        "∇²L nor its projection without the curvature term −λ_i gives the rate, nor does Hess_R alone where the λ_i "
        "differ. Checked on the steps from a minimum found to machine precision, moved along a random tangent, and "
        "along the bottom eigenvector. Rates count as equal if −ln(rate) agrees to 3 digits."
    )
    hypotheses = (
        "a minimum, with Hess_R positive definite on the tangent space",
        "αλ_i < 1, α the best step size",
        "one unit, all parameters constrained (claim: one unit), or otherwise (claim: several units)",
    )
    claims = (
        Claim("Jacobian", "it is I − α (1 − αλ_i)⁻¹ Hess_R", True),
        Claim("bound", "rate ≤ (κ − 1)/(κ + 1), κ of (1 − αλ_i)⁻¹ Hess_R", True),
        Claim("attained", "rate = (κ − 1)/(κ + 1) from the bottom eigenvector", True),
        Claim("one unit", "rate = (κ − 1)/(κ + 1), κ = κ(Hess_R)", True),
        Claim("several units", "rate = (κ − 1)/(κ + 1), κ = κ(Hess_R)", False, published=False),
        Claim("ambient", "rate = (κ − 1)/(κ + 1), κ = κ(∇²L)", False, published=False),
        Claim("without curvature", "rate = (κ − 1)/(κ + 1), κ = κ(Proj ∇²L Proj)", False, published=False),
    )
    trials = 30

    def riemannian(self, found: SphereTangentOperator) -> Tensor:
        """Hess_R (d, d), zero on the normals."""
        return found.to_dense()

    def trial(self, rng: np.random.Generator) -> Sequence[Outcome]:
        """A small network at a minimum on spheres."""
        problem = random_problem(rng)
        minimum = problem.minimum()
        if minimum is None:
            return not_applicable(7, "no minimum was found")
        at = problem.tangent(minimum.point)
        ambient, Hess = at.operator.to_dense(), self.riemannian(at)
        Hess = (Hess + Hess.T) / 2
        normals = at.null_space.dimension
        tangent = at.null_space.remove(torch.eye(at.order, dtype=at.dtype))
        basis = torch.linalg.eigh(tangent).eigenvectors[:, normals:]
        linear = Linearization(basis, Hess, at.curvature[:, 0])
        alpha = linear.best_step()
        if alpha is None:
            return not_applicable(7, "no step size is the best one")
        values, vectors = torch.linalg.eigh(linear.symmetric(alpha))
        kappa = hessian_kappa(linear.symmetric(alpha))
        if kappa.nullity or kappa.negative:
            return not_applicable(7, "the Riemannian Hessian is not positive definite")

        def step(point: Tensor) -> Tensor:
            return problem.retract(point - alpha * gradient(problem.value, point))

        root, point = linear.root(alpha), minimum.point
        iteration = Iteration(step, point, basis.T / root, FAR * float((point / root).norm()))
        bottom = root * (basis @ vectors[:, 0])
        radius = iteration.radius(bottom)
        random = root * (basis @ normal(rng, len(values)))
        slow = measured(iteration, bottom, radius)
        plain = hessian_kappa(basis.T @ Hess @ basis)
        alone = attained(slow, plain)
        one = len(problem.method.constrained[0].weight) == 1 and not problem.free
        return [
            self.jacobian(problem, point, alpha, linear, tangent),
            bounded(measured(iteration, random, radius), kappa),
            attained(slow, kappa),
            alone if one else Outcome("not-applicable", reason="λ_i differ"),
            alone if not one else Outcome("not-applicable", reason="all λ_i are equal"),
            with_inertia(attained(slow, hessian_kappa(ambient)), hessian_kappa(ambient)),
            attained(slow, hessian_kappa(basis.T @ ambient @ basis)),
        ]

    def jacobian(
        self, problem: ConstrainedLoss, point: Tensor, alpha: float, linear: Linearization, tangent: Tensor
    ) -> Outcome:
        """That of the step by automatic differentiation, on the tangent space."""
        found = jacrev(lambda x: problem.retract(x - alpha * grad(problem.value)(x)))(point)
        expected = tangent - alpha * linear.root(alpha)[:, None] ** 2 * linear.Hess
        return equal((found @ tangent).detach().numpy(), expected.numpy(), allowed=JACOBIAN)

    def counterexamples(self, seed: int) -> Iterator[Counterexample]:
        """½ wᵀAw + βᵀw with diagonal A on unit spheres, at coordinate vectors: J_ii = (1 − αa_i)/(1 − αλ)."""
        rng = np.random.default_rng(seed)
        first, last, along, depth = (int(i) for i in rng.integers(1, 7, 4))
        last += first
        # at e_3, with λ = −depth
        alpha = Fraction(2, first + last)
        rate = slowest([first, last], [-depth, -depth], alpha)
        for name, values in {"ambient": [first, last, along], "without curvature": [first, last]}.items():
            text = "w = e_3 of the unit sphere: diagonal of A, β = (0, 0, ·)"
            yield self.exact(name, [[first, last, along], [-depth - along]], rate, values, text)
        # two circles at e_2, at α = 1/q with J = ± p/q, λ = (−q, 0)
        p, q = sorted(int(i) for i in rng.choice(np.arange(2, 12), 2, replace=False))
        a, multipliers = [2 * (q - p) - q, q + p], [-q, 0]
        rate = slowest(a, multipliers, Fraction(1, q))
        curvatures = [value - multiplier for value, multiplier in zip(a, multipliers, strict=True)]
        text = "w = e_2 of two unit circles: tangential diagonal of A, β = (0, ·) of each"
        yield self.exact("several units", [a, multipliers], rate, curvatures, text)

    def exact(self, name: str, matrix: list[list[int]], rate: Fraction, values: list[int], text: str) -> Counterexample:
        """From the rate at the best step, and the eigenvalues whose κ does not give it."""
        sizes = sorted(abs(value) for value in values)
        right, wrong = (1 + rate) / (1 - rate), Fraction(sizes[-1], sizes[0])
        text = f"the rate is {rate} = (κ − 1)/(κ + 1) with κ = {right}, not {wrong}; {text}"
        return Counterexample(name, matrix, text, float(max(right / wrong, wrong / right)))


def with_inertia(outcome: Outcome, kappa: ConditionNumber) -> Outcome:
    """With the signs of a Hessian's eigenvalues as the reason."""
    signs = "indefinite" if 0 < kappa.negative < kappa.rank else "semidefinite"
    return replace(outcome, reason=f"{outcome.reason or outcome.status}: ∇²L {signs}")


def slowest(values: Sequence[int], multipliers: Sequence[int], alpha: Fraction) -> Fraction:
    """The largest |J_ii|."""
    return max(abs(1 - alpha * a) / (1 - alpha * m) for a, m in zip(values, multipliers, strict=True))
