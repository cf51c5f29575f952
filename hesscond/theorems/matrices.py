"""Random matrices of many kinds, their κ⁺ with bounds, and the search for counterexamples among them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np

from hesscond.spectra.forms import FactorForm
from hesscond.theorems import base, exact

#: Sizes of matrices.
LEAST, MOST = 2, 100


def random_size(rng: np.random.Generator, most: int = MOST) -> int:
    """2 … ``most``, every one possible, small ones more often: log-uniform."""
    return min(most, int(np.exp(rng.uniform(np.log(LEAST), np.log(most + 1)))))


def random_matrix(rng: np.random.Generator, rows: int, columns: int) -> np.ndarray:
    """A Gaussian, graded, nearly dependent or integer matrix without rows or columns of zeros."""
    kind = rng.integers(6)
    A = rng.standard_normal((rows, columns))
    if kind in (1, 3):
        A *= 10.0 ** rng.uniform(-3, 3, (rows, 1))
    if kind in (2, 3):
        A *= 10.0 ** rng.uniform(-3, 3, (1, columns))
    if kind == 4:
        A = A[:, :1] @ rng.standard_normal((1, columns)) + 10.0 ** rng.uniform(-6, -1) * A
    if kind == 5:
        A = rng.integers(-3, 4, (rows, columns)).astype(float)
        A[~A.any(1), 0] = 1.0
        A[0, ~A.any(0)] = 1.0
    return A


def random_orthogonal(rng: np.random.Generator, size: int) -> np.ndarray:
    """A random orthogonal matrix, of determinant 1 or −1."""
    basis: np.ndarray = np.linalg.qr(rng.standard_normal((size, size)))[0]
    return basis


@dataclass(frozen=True)
class Kappa:
    """Bounds ``lower`` ≤ κ⁺(A) ≤ ``upper`` of κ⁺ = σ_max / smallest nonzero σ; NaN if the rank is unresolved."""

    lower: float
    upper: float
    rank: int

    def __truediv__(self, other: Kappa) -> tuple[float, float]:
        """Bounds of the quotient of two."""
        return self.lower / other.upper, self.upper / other.lower

    def exceeds(self, other: Kappa) -> bool:
        """Whether it is larger by so much that it is worth certifying."""
        return self.lower > CLEAR * other.upper


def kappa(A: np.ndarray) -> Kappa:
    """κ⁺ of a matrix (m, n), from its singular values and their certified bounds."""
    # what is measured is rounded: values of the size of round-off are zeros
    condition = FactorForm(A).condition(rtol=1e-12)
    if not condition.resolved:
        return Kappa(math.nan, math.nan, condition.rank)
    return Kappa(math.sqrt(condition.lower), math.sqrt(condition.upper), condition.rank)


def row_norms(A: np.ndarray) -> np.ndarray:
    """(m,) 2-norms of the rows, 1 for rows of zeros, which equilibration leaves alone."""
    norms = np.linalg.norm(A, axis=1)
    return np.where(norms == 0, 1.0, norms)


def equilibrated(A: np.ndarray) -> np.ndarray:
    """EA: rows of norm 1, where they are not zero."""
    return A / row_norms(A)[:, None]


#: Factors below this are not worth certifying.
CLEAR = 1.01
#: Matrices that are tried before the search gives up, and the largest entries that it begins and ends with.
TRIES, SMALLEST, LARGEST = 3000, 2, 9


def integer_matrices(seed: int, rows: int, columns: int) -> Iterator[np.ndarray]:
    """Random integer matrices of full rank without rows or columns of zeros, of ever larger entries."""
    rng = np.random.default_rng(seed)
    for bound in range(SMALLEST, LARGEST + 1):
        for _ in range(TRIES // (LARGEST - SMALLEST + 1)):
            A = rng.integers(-bound, bound + 1, (rows, columns))
            if A.any(1).all() and A.any(0).all() and np.linalg.matrix_rank(A) == min(rows, columns):
                yield A


#: A matrix in floating-point numbers, by which a search is guided, and the rational pencil of its Gram matrix.
Compared = tuple[np.ndarray, exact.Rational, Sequence[Fraction] | None]


def larger(
    claim: str, A: np.ndarray, transformed: Compared, other: Compared, left: str, right: str
) -> base.Counterexample | None:
    """Counterexample A, if κ of one matrix that is made of it, ``left``, certainly exceeds that of the other."""
    if not kappa(transformed[0]).exceeds(kappa(other[0])):
        return None
    low, high = exact.kappa(*transformed[1:])[0], exact.kappa(*other[1:])[1]
    if low <= high:
        return None
    text = f"{left} ≥ {float(low) ** 0.5:.6f} > {float(high) ** 0.5:.6f} ≥ {right}"
    return base.Counterexample(claim, A.tolist(), text, float(low / high) ** 0.5)


def first(examples: Iterable[base.Counterexample | None]) -> base.Counterexample:
    """The first counterexample of a search."""
    return next(filter(None, examples))
