"""Condition numbers in exact rational arithmetic: bounds that are proofs."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

Rational = Sequence[Sequence[Fraction]]


def gram(A: Sequence[Sequence[int | Fraction]], weights: Sequence[Fraction] | None = None) -> list[list[Fraction]]:
    """Aᵀ diag(w) A."""
    w = [Fraction(1)] * len(A) if weights is None else weights
    n = len(A[0])
    return [[sum((w[k] * A[k][i] * A[k][j] for k in range(len(A))), Fraction(0)) for j in range(n)] for i in range(n)]


def below(M: Rational, x: Fraction, metric: Sequence[Fraction] | None = None) -> int:
    """How many eigenvalues of the symmetric M (of the pencil M − x diag(metric), metric > 0) are less than x.

    By Sylvester's law: the negative pivots of an exact LDLᵀ with symmetric pivoting, 2×2 pivots where all diagonal
    entries are zero.
    """
    n = len(M)
    A = [[M[i][j] - (x * (1 if metric is None else metric[i]) if i == j else 0) for j in range(n)] for i in range(n)]
    negative, left = 0, list(range(n))
    while left:
        p = next((i for i in left if A[i][i] != 0), None)
        if p is not None:
            negative += A[p][p] < 0
            left.remove(p)
            for i in left:
                factor = A[i][p] / A[p][p]
                for j in left:
                    A[i][j] -= factor * A[p][j]
            continue
        pair = next(((i, j) for i in left for j in left if i < j and A[i][j] != 0), None)
        if pair is None:  # all that is left is zero
            break
        # [[0, a], [a, 0]] has one negative eigenvalue
        p, q = pair
        negative += 1
        left.remove(p)
        left.remove(q)
        a = A[p][q]
        update = {(i, j): (A[i][p] * A[q][j] + A[i][q] * A[p][j]) / a for i in left for j in left}
        for (i, j), value in update.items():
            A[i][j] -= value
    return negative


def eigenvalue(M: Rational, index: int, *, metric: Sequence[Fraction] | None = None) -> tuple[Fraction, Fraction]:
    """An interval (low, high] around the eigenvalue number ``index`` (0: the smallest), by bisection.

    Relative width 10⁻¹², or less than 10⁻⁴⁸ where the eigenvalue is that close to zero.
    """
    scale = [Fraction(1)] * len(M) if metric is None else metric
    # Gershgorin's, of the symmetrized pencil
    bound = sum(abs(entry) for row in M for entry in row) / min(scale) + 1
    low, high = -bound, bound
    tolerance = Fraction(1, 10**12)
    while high - low > tolerance * max(abs(low), abs(high)) and high - low > tolerance**4:
        middle = (low + high) / 2
        if below(M, middle, metric) > index:
            high = middle
        else:
            low = middle
    return low, high


def kappa(M: Rational, metric: Sequence[Fraction] | None = None) -> tuple[Fraction, Fraction]:
    """Bounds of |λ|_max/|λ|_min of a symmetric M that is not singular (of the pencil with a metric), exactly."""
    negative, last = below(M, Fraction(0), metric), len(M) - 1
    # the ends of the spectrum, and what lies next to zero
    indices = {0, last, max(negative - 1, 0), min(negative, last)}
    ends = [eigenvalue(M, index, metric=metric) for index in indices]
    if any(low <= 0 <= high for low, high in ends):
        raise ValueError("an eigenvalue was not distinguished from zero")
    lows, highs = zip(*(sorted((abs(low), abs(high))) for low, high in ends), strict=True)
    return max(lows) / min(highs), max(highs) / min(lows)
