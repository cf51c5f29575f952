"""Expansion of a search space by preconditioned residuals, or by solutions of a correction equation."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import NamedTuple

import torch

from hesscond.operators import ApproximateInverse
from hesscond.spectra.search_space import CountedProducts, Excluded

#: Inner iterations reduce the residual by the first factor, then by increasing ones up to the second …
REDUCTION, LEAST = 0.1, 0.02
#: … within this many steps at first, twice as many each time that they do not suffice.
STEPS = 50
#: A residual this small relative to |θ| makes θ a better shift than zero.
NEAR = 0.1

Function = Callable[[torch.Tensor], torch.Tensor]


class Pair(NamedTuple):
    """Approximate eigenpair: θ, r (1, n), M⁻¹r (1, n) if there is an M, and the vectors (j, n) found up to it."""

    value: float
    residual: torch.Tensor
    solved: torch.Tensor | None
    vectors: torch.Tensor


class Expansion(ABC):
    """Method to find the next direction, given up after ``patience`` expansions without progress."""

    name: str
    patience: int

    @abstractmethod
    def direction(self, pair: Pair, allowance: int) -> torch.Tensor:
        """Return a direction (1, n) that improves the pair, from at most ``allowance`` products."""


class PreconditionedResidual(Expansion):
    """Expansion by M⁻¹r: generalized Davidson (Morgan and Scott 1986)."""

    name, patience = "generalized Davidson", 60

    def direction(self, pair: Pair, allowance: int) -> torch.Tensor:
        return pair.residual if pair.solved is None else pair.solved


class Correction(Expansion):
    r"""Expansion by t with (I − QQᵀ)(A − σ)(I − QQᵀ) t = −r for the vectors Q found so far, by MINRES.

    The correction equation of Jacobi and Davidson (Sleijpen and Van der Vorst 1996, SIAM J. Matrix Anal. Appl. 17).
    σ = θ near an eigenvalue and 0 before, so that it begins as inverse iteration. MINRES is preconditioned by
    M⁻¹ − M⁻¹Q(QᵀM⁻¹Q)⁻¹QᵀM⁻¹, the inverse of M on the complement of Q, where M⁻¹ is given. How exact a solution is
    never enters a result: the outer residual decides.
    """

    patience = 8

    def __init__(self, products: CountedProducts, excluded: Excluded, inverse: ApproximateInverse | None) -> None:
        self.products, self.excluded, self.inverse = products, excluded, inverse
        self.name = "correction equation, " + ("MINRES" if inverse is None else "preconditioned MINRES")
        self._steps, self._rtol = STEPS, REDUCTION

    def direction(self, pair: Pair, allowance: int) -> torch.Tensor:
        """Return an approximate solution, or the residual itself if the preconditioner is not positive."""
        near = float(torch.linalg.vector_norm(pair.residual)) <= NEAR * abs(pair.value)
        shift = pair.value if near else 0.0
        Q = torch.linalg.qr(pair.vectors.T).Q.T
        solved = None if self.inverse is None else self.inverse.solve(Q.T).T.to(Q)

        def projected(row: torch.Tensor) -> torch.Tensor:
            row = self.excluded.remove(row)
            return row - (row @ Q.T) @ Q

        def multiply(v: torch.Tensor) -> torch.Tensor:
            row = v[None]
            return projected(self.products.rows(row).sub_(row, alpha=shift))[0]

        def precondition(v: torch.Tensor) -> torch.Tensor:
            if self.inverse is None or solved is None:
                return v
            row = self.inverse.solve(v[:, None]).T.to(v)
            weights = torch.linalg.lstsq(Q @ solved.T, Q @ row.T).solution
            return projected(row - weights.T @ solved)[0]

        right = projected(-pair.residual)[0]
        found = minres(
            multiply,
            right,
            precondition=precondition,
            rtol=self._rtol,
            steps=max(1, min(self._steps, allowance, 2 * self.products.order)),
        )
        if found.reduction > self._rtol:
            self._steps *= 2
        self._rtol = max(LEAST, self._rtol / 2)
        return found.solution[None] if found.steps and found.definite else pair.residual


def expansions(products: CountedProducts, excluded: Excluded, inverse: ApproximateInverse | None) -> list[Expansion]:
    """Methods of expansion, to be tried one after the other as each stagnates."""
    plain = Correction(products, excluded, None)
    if inverse is None:
        return [plain]
    return [PreconditionedResidual(), Correction(products, excluded, inverse), plain]


class Solved(NamedTuple):
    """Approximate solution of a symmetric system.

    ``solution`` (n,); ``steps``: products made; ``reduction``: the residual norm over that of the right side, in the
    norm of the preconditioner, as the recurrence has it; ``definite``: whether the preconditioner proved positive.
    """

    solution: torch.Tensor
    steps: int
    reduction: float
    definite: bool


def minres(multiply: Function, right: torch.Tensor, *, precondition: Function, rtol: float, steps: int) -> Solved:
    """Minimize the residual of A x = b over Krylov spaces (Paige and Saunders 1975), preconditioned."""
    solution = torch.zeros_like(right)
    before, current = torch.zeros_like(right), right
    image = precondition(current)
    square = float(current @ image)
    if not square > 0:
        return Solved(solution, 0, 1.0, square == 0)
    beta = first = rest = math.sqrt(square)
    older, cosine, sine, epsilon, delta_bar = 0.0, -1.0, 0.0, 0.0, 0.0
    direction, previous = torch.zeros_like(right), torch.zeros_like(right)
    definite, step = True, 0
    for step in range(1, steps + 1):
        v = image / beta
        product = multiply(v)
        if step > 1:
            product = product - (beta / older) * before
        alpha = float(v @ product)
        product = product - (alpha / beta) * current
        before, current = current, product
        image = precondition(current)
        older, square = beta, float(current @ image)
        # rounding of a residual that is done with, or an indefinite preconditioner
        definite = square >= -1e-12 * float(torch.linalg.vector_norm(current) * torch.linalg.vector_norm(image))
        beta = math.sqrt(max(square, 0.0))
        # the QR factorization of the tridiagonal matrix, one more rotation
        epsilon_old, delta = epsilon, cosine * delta_bar + sine * alpha
        gamma_bar = sine * delta_bar - cosine * alpha
        epsilon, delta_bar = sine * beta, -cosine * beta
        gamma = math.hypot(gamma_bar, beta)
        if gamma == 0:
            break
        cosine, sine = gamma_bar / gamma, beta / gamma
        previous, direction = direction, (v - epsilon_old * previous - delta * direction) / gamma
        solution = solution + (cosine * rest) * direction
        rest *= sine
        if not definite or beta == 0 or abs(rest) <= rtol * first:
            break
    return Solved(solution, step, abs(rest) / first, definite)
