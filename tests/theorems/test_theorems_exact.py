"""Exact eigenvalue bounds against numpy and sympy."""

from fractions import Fraction

import numpy as np
import pytest
import scipy.linalg
import sympy
from hypothesis import given, settings, strategies as st

from hesscond.theorems import exact
from tests.theorems.verdicts import kappa


def fractions(A):
    return [[Fraction(int(entry)) for entry in row] for row in A]


matrices = st.integers(1, 5).flatmap(
    lambda n: st.lists(st.lists(st.integers(-3, 3), min_size=n, max_size=n), min_size=n, max_size=n)
)


@settings(max_examples=25, deadline=None)
@given(matrices, st.integers(-4, 4))
def test_the_number_of_eigenvalues_below(rows, x):
    """Against the roots of the characteristic polynomial, zero diagonals and multiple eigenvalues too."""
    A = np.array(rows)
    M = sympy.Matrix(A + A.T)
    roots = sympy.Poly(M.charpoly().as_expr()).real_roots()
    assert exact.below(fractions(A + A.T), Fraction(x)) == sum(bool(root < x) for root in roots)


@settings(max_examples=15, deadline=None)
@given(matrices, st.integers(0, 10**6))
def test_intervals_hold_the_eigenvalues_also_of_pencils(rows, seed):
    A = np.array(rows)
    M, n = A + A.T, len(A)
    metric = np.random.default_rng(seed).integers(1, 6, n)
    for chosen in (None, metric):
        values = scipy.linalg.eigh(M.astype(float), None if chosen is None else np.diag(chosen), eigvals_only=True)
        weights = None if chosen is None else [Fraction(int(m)) for m in chosen]
        for index, value in enumerate(values):
            low, high = exact.eigenvalue(fractions(M), index, metric=weights)
            assert float(low) - 1e-9 <= value <= float(high) + 1e-9
            assert high - low <= Fraction(1, 10**12) * max(abs(low), abs(high), Fraction(1))


def test_kappa():
    """Against LAPACK; indefinite, definite, with a diagonal of zeros; a singular one is refused."""
    M = [[2, 1, 0], [1, -1, 2], [0, 2, 3]]
    for A in (M, [[2, 1], [1, 2]], [[-2, 1], [1, -2]], [[0, 1], [1, 0]]):
        low, high = exact.kappa(A)
        assert float(low) * (1 - 1e-9) <= kappa(A) <= float(high) * (1 + 1e-9)
        assert high / low < 1 + 1e-9
    with pytest.raises(ValueError, match="not distinguished from zero"):
        exact.kappa([[1, 1], [1, 1]])
