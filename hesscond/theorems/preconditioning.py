"""PREC: L2 and gradient regularization, and adaptive methods, as preconditioners."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from math import isqrt
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor
from torch.func import grad, hessian

from hesscond.scaling import optimal_diagonal_scaling
from hesscond.theorems import base, exact, matrices
from hesscond.theorems.networks import random_network

Function = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Problem:
    """A loss, coordinates p = P z, and a step of gradient descent in z."""

    loss: Function  # loss as a function of p
    P: Tensor  # (d, d); matrix of full rank
    z: Tensor  # (d,); start of the step
    alpha: float  # step size, and the factor λ of the penalty
    penalty: float

    @property
    def p(self) -> Tensor:
        """P z."""
        return self.P @ self.z

    def of_z(self, z: Tensor) -> Tensor:
        """The loss as a function of z."""
        return self.loss(self.P @ z)

    def in_z(self, p: Tensor) -> Tensor:
        """P x for x = Pᵀ p: M p, M = P Pᵀ."""
        return self.P @ (self.P.T @ p)

    @property
    def step(self) -> Tensor:
        """M ∇L, the plain step."""
        return self.in_z(grad(self.loss)(self.p))


def random_loss(rng: np.random.Generator) -> tuple[Function, int]:
    """A positive definite quadratic, or the loss of a small network, and its number of parameters."""
    if rng.random() < 0.5:
        size = int(rng.integers(2, 101))
        root = torch.from_numpy(rng.standard_normal((size, size)))
        A, b = root @ root.T / size + torch.eye(size, device="cpu"), torch.from_numpy(rng.standard_normal(size))
        return lambda p: p @ A @ p / 2 - b @ p, size
    sizes = rng.integers(2, 5, 3).tolist()
    network = random_network(rng, sizes, 10, activation=str(rng.choice(["tanh", "sigmoid", "gelu"])))
    return lambda p: network.loss(network.split(p)), len(network.parameters)


def random_problem(rng: np.random.Generator) -> Problem:
    """A random loss in random coordinates, graded over two decades."""
    loss, size = random_loss(rng)
    P = torch.from_numpy(rng.standard_normal((size, size)) * 10.0 ** rng.uniform(-1, 1, size)) / size**0.5
    alpha, penalty = 10.0 ** rng.uniform(-2, 0, 2)
    return Problem(loss, P, torch.from_numpy(rng.standard_normal(size)), float(alpha), float(penalty))


class UpdateFormula(base.Statement):
    """The step of gradient descent on a penalized loss in z, written in p."""

    hypotheses: ClassVar[tuple[str, ...]] = ("P has full rank and is held fixed in the step",)

    @abstractmethod
    def updates(self, problem: Problem) -> list[tuple[Problem, Function, Tensor, Tensor]]:
        """Problem, penalized loss of z, and both terms of the step of p (M ∇L, and the penalty's) of each claim."""

    def trial(self, rng: np.random.Generator) -> Sequence[base.Outcome]:
        outcomes = []
        for problem, objective, *terms in self.updates(random_problem(rng)):
            stepped = problem.P @ (problem.z - problem.alpha * grad(objective)(problem.z))
            predicted = problem.p - problem.alpha * (terms[0] + terms[1])
            # every term is of the size of a product with P and Pᵀ
            sizes = [problem.P.abs() @ problem.z.abs(), *(problem.alpha * term.abs() for term in terms)]
            outcomes.append(base.equal(predicted.numpy(), stepped.numpy(), float(torch.stack(sizes).max())))
        return outcomes


@base.register
class L2InZ(UpdateFormula):
    """L2 regularization of the preconditioned variable."""

    id = "prec-l2-z"
    title = "L2 regularization in z"
    source = "PREC, L2 regularization"
    text = (
        "A gradient step on L(Pz) + λ‖z‖² is p ← p − α (M ∇L + 2λ p) in p = P z, M = P Pᵀ: weight decay that is not "
        "preconditioned. True. For M = diag(1/r) it is the decay of the penalty λ‖p√r‖², adjusted to the scale of the "
        "gradients: p ← p − α M ∇(L + λ‖p√r‖²). True."
    )
    claims = (
        base.Claim("update", "p ← p − α (M ∇L + 2λ p)", True),
        base.Claim("scale-adjusted", "p ← p − α M ∇(L + λ‖p√r‖²), M = diag(1/r)", True),
    )

    def penalty_weights(self, problem: Problem) -> Tensor:
        """√r for M = diag(1/r)."""
        return 1 / problem.P.diagonal()

    def updates(self, problem: Problem) -> list[tuple[Problem, Function, Tensor, Tensor]]:
        """Any P, and P = diag(r)^−½ for the second claim."""

        def objective(instance: Problem) -> Function:
            return lambda z: instance.of_z(z) + instance.penalty * z @ z

        scaled = replace(problem, P=torch.diag(problem.P.norm(dim=1)))
        root = self.penalty_weights(scaled)
        penalized = grad(lambda p: problem.penalty * (p * root).square().sum())(scaled.p)
        return [
            (problem, objective(problem), problem.step, 2 * problem.penalty * problem.p),
            (scaled, objective(scaled), scaled.step, scaled.in_z(penalized)),
        ]


@base.register
class L2InP(UpdateFormula):
    """L2 regularization of the parameter."""

    id = "prec-l2-p"
    title = "L2 regularization in p"
    source = "PREC, L2 regularization"
    text = (
        "A gradient step in z on L(Pz) + λ‖Pz‖² is p ← p − α M (∇L + 2λ p). True with the plus; the minus of the "
        "text is an error of sign. For M = I it is weight decay; for M ≠ I it is none, for any λ', unless M = cI."
    )
    claims = (
        base.Claim("plus", "p ← p − α M (∇L + 2λ p)", True),
        base.Claim("minus", "p ← p − α M (∇L − 2λ p), as printed", False),
        base.Claim("decay", "p ← p − α (M ∇L + 2λ' p) for some λ', M ≠ I", False, published=False),
        base.Claim("decay, M = I", "p ← p − α (∇L + 2λ p)", True),
    )

    def updates(self, problem: Problem) -> list[tuple[Problem, Function, Tensor, Tensor]]:
        """M (∇L ± 2λ p), M ∇L + 2λ' p for the best λ', and M = I."""
        plain, p = replace(problem, P=torch.diag(torch.ones_like(problem.z))), problem.p

        def objective(case: Problem) -> Function:
            return lambda z: case.of_z(z) + case.penalty * (case.P @ z).square().sum()

        decay = 2 * problem.penalty * problem.in_z(p)
        terms = (decay, -decay, (p @ decay) / (p @ p) * p, 2 * plain.penalty * plain.p)
        cases = zip((problem, problem, problem, plain), terms, strict=True)
        return [(case, objective(case), case.step, term) for case, term in cases]

    def counterexamples(self, seed: int) -> Iterator[base.Counterexample]:
        """A linear loss gᵀp and diagonal P, with α = λ = 1: all integers."""
        g, z, d = np.random.default_rng(seed).integers(1, 6, (3, 2))
        d[1] += d[1] >= d[0]
        p, M = d * z, d**2
        # ∇_z (gᵀDz + zᵀD²z) = D g + 2 D² z
        right = d * (z - d * g - 2 * d**2 * z)
        wrong = p - M * (g - 2 * p)
        text = f"p = {p.tolist()} becomes {right.tolist()}, with the minus {wrong.tolist()}: [g, z, diagonal of P]"
        far = float(base.discrepancy(wrong.tolist(), right.tolist()))
        yield base.Counterexample(self.claims[1].name, [g.tolist(), z.tolist(), d.tolist()], text, far)
        text = f"M p = {(M * p).tolist()} is no multiple of p = {p.tolist()}: [g, z, diagonal of P]"
        far = float(base.discrepancy([int(M[0])], [int(M[1])]))
        yield base.Counterexample(self.claims[2].name, [g.tolist(), z.tolist(), d.tolist()], text, far)


@base.register
class GradientRegularization(UpdateFormula):
    """A penalty on the gradient."""

    id = "prec-gradient-regularization"
    title = "regularization of the gradient's norm"
    source = "PREC, gradient regularization"
    text = (
        "As we read it: a gradient step in z on L + λ‖∇_z L‖² is p ← p − α M (∇L + 2λ ∇²L M ∇L), and on L + λ‖∇_p L‖² "
        "it is p ← p − α M (∇L + 2λ ∇²L ∇L), with the gradients and Hessians in p on the right. True."
    )
    hypotheses = ("P has full rank and is held fixed in the step", "the loss is twice differentiable")
    claims = (
        base.Claim("penalty in z", "p ← p − α M (∇L + 2λ ∇²L M ∇L)", True),
        base.Claim("penalty in p", "p ← p − α M (∇L + 2λ ∇²L ∇L)", True),
    )

    def updates(self, problem: Problem) -> list[tuple[Problem, Function, Tensor, Tensor]]:
        """L + λ‖∇_z L‖², L + λ‖∇_p L‖²."""
        in_p, H = grad(problem.loss), hessian(problem.loss)(problem.p)

        def objective(gradient: Function) -> Function:
            return lambda z: problem.of_z(z) + problem.penalty * gradient(z).square().sum()

        def penalized(direction: Tensor) -> Tensor:
            return 2 * problem.penalty * problem.in_z(H @ direction)

        return [
            (problem, objective(grad(problem.of_z)), problem.step, penalized(problem.step)),
            (problem, objective(lambda z: in_p(problem.P @ z)), problem.step, penalized(in_p(problem.p))),
        ]


#: Largest entries of the matrices that the search looks at.
LARGEST = 200
#: Draws of which the mean stands for the expectation, and the standard errors that it may be off.
DRAWS, ERRORS = 2000, 7.0


@base.register
class AdaptivePreconditioning(base.Statement):
    """Diagonal preconditioners that equilibrate the Hessian."""

    id = "prec-adaptive"
    title = "what the diagonal of adaptive methods does to κ"
    source = "PREC, AdaGrad, RMSProp and Adam"
    text = (
        "AdaGrad, RMSProp and Adam are gradient descent preconditioned by a diagonal M, as if they equilibrated the "
        "rows of the Hessian. Row equilibration bounds κ(MH), which is no rate: the rate is that of κ(M^½HM^½), the "
        "ratio of the eigenvalues of MH, which may exceed √n times its minimum over diagonal M. The right statement, "
        "for positive definite H, is Van der Sluis's for a factor of H: with D = diag(H)^−½, κ(DHD) ≤ n times the "
        "minimum over diagonal scalings from both sides. That gradients stand for the rows is true on average for "
        "isotropic p − p*: near a minimum |g_i| is ‖h_i‖ ‖p − p*‖ |cos|, and E|g_i| = √(2/π) s ‖h_i‖ for Gaussian "
        "p − p* of standard deviation s. Along an iteration p − p* is not isotropic: nothing is claimed there."
    )
    hypotheses = ("H is positive definite (first two claims)", "p − p* is Gaussian and isotropic (third claim)")
    claims = (
        base.Claim("Jacobi", "κ(DHD) ≤ n · min over diagonal of κ, D = diag(H)^−½", True),
        base.Claim(
            "row equilibration", "κ(M^½HM^½) ≤ √n · min over diagonal of κ, M = diag(1/‖h_i‖)", False, published=False
        ),
        base.Claim("isotropic", "E|g_i| = √(2/π) s ‖h_i‖ for p − p* ~ N(0, s² I)", True),
    )
    trials = 80

    def row_sizes(self, H: np.ndarray) -> np.ndarray:
        """Norms of the rows of H, to which E|g_i| is claimed to be proportional."""
        return np.linalg.norm(H, axis=1)

    def isotropic(self, rng: np.random.Generator, H: np.ndarray) -> base.Outcome:
        """The means over many draws, in standard errors of what is claimed."""
        s = 10.0 ** rng.uniform(-2, 1)
        means = np.abs(s * rng.standard_normal((DRAWS, len(H))) @ H.T).mean(0)
        expected = (2 / np.pi) ** 0.5 * s * self.row_sizes(H)
        # of |x|, x Gaussian of mean |x| = expected
        error = (np.pi / 2 - 1) ** 0.5 * expected / DRAWS**0.5
        worst = float((np.abs(means - expected) / error).max())
        return base.decided(worst, worst, ERRORS)

    def jacobi(self, diagonal: np.ndarray) -> np.ndarray:
        """diag(H)^−½ from diag(H)."""
        return diagonal**-0.5

    def trial(self, rng: np.random.Generator) -> Sequence[base.Outcome]:
        """H = FᵀF with a random square factor, so that κ(DHD) = κ(FD)²."""
        n = matrices.random_size(rng, 60)
        F = matrices.random_matrix(rng, n, n)
        optimum = optimal_diagonal_scaling(F, side="column")
        H = F.T @ F
        by_row = matrices.kappa(F * np.linalg.norm(H, axis=1) ** -0.5)
        isotropic = self.isotropic(rng, H)
        if by_row.rank < n:
            return [*[base.not_applicable("H is not certainly positive definite")] * 2, isotropic]
        return [
            compared(matrices.kappa(F * self.jacobi((F**2).sum(0))), optimum.lower, optimum.upper, n**0.5),
            compared(by_row, optimum.lower, optimum.upper, n**0.25),
            isotropic,
        ]

    def counterexamples(self, seed: int) -> Iterator[base.Counterexample]:
        """A 2×2 matrix of integers whose rows have integer norms: κ(M^½HM^½) is that of the pencil (H, M⁻¹)."""
        rng = np.random.default_rng(seed)
        while True:
            b = int(rng.integers(2, LARGEST))
            legs = [a for a in range(1, b * b // 2 + 1) if isqrt(a * a + b * b) ** 2 == a * a + b * b]
            if len(legs) < 2:
                continue
            a, c = sorted(int(leg) for leg in rng.choice(legs, 2, replace=False))
            if a * c <= b * b:
                continue
            H = [[Fraction(a), Fraction(b)], [Fraction(b), Fraction(c)]]
            norms = [Fraction(isqrt(x * x + b * b)) for x in (a, c)]
            low = exact.kappa(H, metric=norms)[0]
            # Jacobi's scaling is one of those that the minimum is taken over
            high = exact.kappa(H, metric=[H[0][0], H[1][1]])[1]
            if low**2 > 2 * high**2 * Fraction(matrices.CLEAR) ** 2:
                text = f"κ(M^½HM^½) ≥ {float(low):.6f} > √2 · {float(high):.6f} ≥ √2 κ(DHD), D = diag(H)^−½"
                yield base.Counterexample(self.claims[1].name, [[a, b], [b, c]], text, float(low / high) / 2**0.5)
                return


def compared(root: matrices.Kappa, lowest: float, reached: float, allowed: float) -> base.Outcome:
    """κ(DHD) = ``root``² over the minimum, which is between ``lowest``² and ``reached``²."""
    return base.decided((root.lower / reached) ** 2, (root.upper / lowest) ** 2, allowed**2)


@base.register
class Averages(base.Statement):
    """Averages of the adaptive methods, and their first step."""

    id = "prec-averages"
    title = "what AdaGrad, RMSProp and Adam average"
    source = "PREC, AdaGrad, RMSProp and Adam"
    text = (
        "AdaGrad's √r_t is √t times the root mean square of the gradients. RMSProp's r ← ρr + (1 − ρ)g², started at r₁ "
        "= g₁², is an average: ρ^(t−1) g₁² + (1 − ρ^(t−1)) times the mean of g_2², …, g_t² with the weights ρ^(t−i). "
        "Started at 0 it is 1 − ρᵗ times the mean of all with those weights, which is what the bias correction of Adam "
        "divides by. After one gradient all of them take M = diag(1/|g|): a step of sign descent, which knows nothing "
        "of the rows of H. True."
    )
    hypotheses = ("no entry of a gradient is zero (first step)", "0 < ρ < 1, t ≥ 2", "no ε in the denominator")
    claims = (
        base.Claim("AdaGrad", "√r_t = √t · rms(g_1, …, g_t)", True),
        base.Claim(
            "from the first gradient", "r_t = ρ^(t−1) g₁² + (1 − ρ^(t−1)) Σ ρ^(t−i) g_i² / Σ ρ^(t−i), i ≥ 2", True
        ),
        base.Claim("from zero", "r_t = (1 − ρᵗ) Σ ρ^(t−i) g_i² / Σ ρ^(t−i), i ≥ 1", True),
        base.Claim("first step", "M g = sign(g), M = diag(1/√r₁) with r₁ = g₁²", True),
    )
    trials = 100

    def accumulate(self, r: np.ndarray, g: np.ndarray, rho: float) -> np.ndarray:
        """RMSProp's r after one more gradient."""
        return rho * r + (1 - rho) * g**2

    def first(self, g: np.ndarray) -> np.ndarray:
        """r₁."""
        return g**2

    def trial(self, rng: np.random.Generator) -> Sequence[base.Outcome]:
        """Gradients of many scales."""
        t, rho = 1 + matrices.random_size(rng, 200), 1 - 10.0 ** rng.uniform(-3, -0.3)
        g = matrices.random_matrix(rng, t, matrices.random_size(rng, 20))
        g[g == 0] = 1.0
        total, averaged, from_zero = np.zeros_like(g[0]), self.first(g[0]), self.accumulate(0 * g[0], g[0], rho)
        for number, row in enumerate(g):
            total = total + row**2
            if number:
                averaged, from_zero = (self.accumulate(r, row, rho) for r in (averaged, from_zero))
        weights = rho ** np.arange(t - 1, -1, -1.0)
        later, mean = (np.average(g[skip:] ** 2, axis=0, weights=weights[skip:]) for skip in (1, 0))
        share = weights[0]
        return [
            base.equal(np.sqrt(total), t**0.5 * np.sqrt((g**2).mean(0))),
            base.equal(averaged, share * g[0] ** 2 + (1 - share) * later),
            base.equal(from_zero, (1 - rho**t) * mean),
            base.equal(g[0] / np.sqrt(self.first(g[0])), np.sign(g[0])),
        ]
