"""The lower bound, proved again in rational arithmetic from the floats that are returned."""

from fractions import Fraction

import mpmath
import numpy as np
import pytest

from hesscond import optimal_diagonal_scaling


def rational(A):
    return [[Fraction(float(x)) for x in row] for row in A]


def dot(a, b):
    return sum((x * y for x, y in zip(a, b, strict=True)), Fraction(0))


def quadratic(a, F):
    """aᵀFFᵀa."""
    return sum((dot(a, column) ** 2 for column in zip(*F, strict=True)), Fraction(0))


def projected_trace(F, A):
    """tr PFFᵀP with P the projection on the span of the rows of A, by Gram-Schmidt without square roots."""
    basis = []
    for row in A:
        left = list(row)
        for b in basis:
            c = dot(left, b) / dot(b, b)
            left = [x - c * y for x, y in zip(left, b, strict=True)]
        if any(left):
            basis.append(left)
    return sum((quadratic(b, F) / dot(b, b) for b in basis), Fraction(0))


def matrices():
    rng = np.random.default_rng(5)
    yield "square", rng.standard_normal((5, 5))
    yield "wide", rng.standard_normal((3, 6))
    yield "tall", rng.standard_normal((8, 3))
    yield "integer of rank 2", rng.integers(-4, 5, (5, 2)) @ rng.integers(-4, 5, (2, 4))
    yield "graded rows", rng.standard_normal((4, 4)) * 10.0 ** rng.uniform(-20, 20, (4, 1))
    yield "moderately graded rows", rng.standard_normal((5, 4)) * 10.0 ** rng.uniform(-4, 4, (5, 1))
    yield "graded columns", rng.standard_normal((4, 4)) * 10.0 ** np.array([0, -7, 3, -12])
    yield "nearly dependent", np.outer(rng.standard_normal(5), np.ones(5)) + 1e-7 * rng.standard_normal((5, 5))
    yield "nearly dependent, wide", np.ones((3, 5)) + 1e-6 * rng.standard_normal((3, 5))
    yield "Hilbert", 1 / (np.arange(6)[:, None] + np.arange(6) + 1)
    yield "zero rows", np.array([[1, 2, 0], [0, 0, 0], [3, -1, 0], [1, 1, 0]])


def exact_bound_squared(best, A):
    """The square of the bound that the certificate proves, once its inequalities were checked."""
    certificate = best.certificate
    A = rational(A.T if certificate.transposed else A)
    F, G = rational(certificate.Y_factor), rational(certificate.Z_factor)
    for a in A:
        assert quadratic(a, F) <= quadratic(a, G)
    if best.side == "both":
        rows = [(dot(f, f), dot(g, g)) for f, g in zip(F, G, strict=True)]
        squared = min(f / g for f, g in rows if g)
    else:
        squared = projected_trace(F, A) / sum(dot(g, g) for g in G)
    return max(squared, Fraction(1))


@pytest.mark.parametrize("side", ["row", "column", "both"])
@pytest.mark.parametrize(("name", "A"), list(matrices()), ids=lambda x: x if isinstance(x, str) else "")
def test_the_certificate_in_exact_arithmetic(name, A, side):
    best = optimal_diagonal_scaling(A, side=side)
    if side == "both" and "rank 2" in name:
        assert best.certificate is None
        assert best.lower == 1
        return
    squared, lower = exact_bound_squared(best, A), Fraction(best.lower)
    # what is taken off for rounding is little
    assert lower**2 <= squared <= lower**2 * (1 + Fraction(1, 10**4))
    assert best.gap < 1.0001


def difficult(rng):
    """A matrix of order up to 5, with rows and columns over many decades, dependent lines, zeros and integers."""
    m, n = rng.integers(2, 6, 2)
    A = rng.standard_normal((m, n))
    kind = rng.integers(5)
    if kind == 0:
        A = np.round(3 * A)
    elif kind == 1:
        A = A * (rng.random((m, n)) < 0.6)
    elif kind == 2:
        A[:, 0] = A[:, -1] + 10.0 ** rng.uniform(-17, 0) * A[:, 0]
    elif kind == 3:
        A = A * 10.0 ** rng.uniform(-12, 0, (m, n))
    if rng.random() < 0.5:
        A = A * 10.0 ** rng.uniform(-25, 25, (m, 1))
    if rng.random() < 0.3:
        A = A * 10.0 ** rng.uniform(-8, 8, n)
    return A


@pytest.mark.parametrize("trials", [15, pytest.param(1500, marks=pytest.mark.slow)])
def test_difficult_matrices_in_exact_arithmetic(trials):
    rng = np.random.default_rng(trials)
    sharp = 0
    for trial in range(trials):
        A = difficult(rng)
        if not A.any():
            continue
        best = optimal_diagonal_scaling(A, side=("row", "column", "both")[trial % 3])
        sharp += best.gap < 1.001
        if best.certificate is not None:
            assert Fraction(best.lower) ** 2 <= exact_bound_squared(best, A)
        if best.resolved and best.rank == min(A.shape):
            with mpmath.workdps(120):
                B = mpmath.diag(best.row.tolist()) * mpmath.matrix(A.tolist()) * mpmath.diag(best.column.tolist())
                # all singular values are nonzero, on the smaller side
                squares = mpmath.eigsy(B.T * B if A.shape[0] >= A.shape[1] else B * B.T, eigvals_only=True)
                truth = mpmath.sqrt(max(squares) / min(squares))
                assert best.lower <= truth <= best.upper
    assert sharp > trials / 2
