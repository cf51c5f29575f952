"""Exact ranks against constructions and rational arithmetic."""

import math
import time
from fractions import Fraction

import numpy as np
import pytest
import torch
from scipy.linalg import hilbert
from scipy.sparse import csr_array

import hesscond
from hesscond.errors import ConfigError
from hesscond.spectra.rank import is_prime, modular_rank, random_prime, reduced, structural_rank_bound


def rational_rank(A):
    """Gaussian elimination in fractions."""
    rows = [[Fraction(float(x)) for x in row] for row in A]
    rank = 0
    for column in range(len(rows[0])):
        pivot = next((i for i in range(rank, len(rows)) if rows[i][column]), None)
        if pivot is None:
            continue
        rows[rank], rows[pivot] = rows[pivot], rows[rank]
        for i in range(rank + 1, len(rows)):
            factor = rows[i][column] / rows[rank][column]
            rows[i] = [a - factor * b for a, b in zip(rows[i], rows[rank], strict=True)]
        rank += 1
    return rank


def test_random_matrices_of_doubles_of_any_scale():
    rng = np.random.default_rng(0)
    for _ in range(60):
        m, n = rng.integers(1, 12, 2)
        A = rng.standard_normal((m, n)) * 10.0 ** rng.uniform(-150, 150, (m, n)) * (rng.random((m, n)) < 0.5)
        if rng.random() < 0.7:  # exactly dependent rows and columns
            A = np.vstack([A, A[rng.integers(m)] * 2.0 ** rng.integers(-60, 60)])
            A = np.column_stack([A, -A[:, 0]])
        assert int(hesscond.rank(A)) == rational_rank(A)


def test_one_last_digit_is_enough():
    for A, rank in (
        ([[1, 1], [1, 1 + 2.0**-52]], 2),
        ([[1, 2], [3, 6]], 1),
        ([[0.1, 0.3], [0.2, 0.6]], 1),
        # 3 · 0.1 is not 0.3
        ([[0.1, 0.3], [1.0, 3.0]], 2),
        (np.full((3, 5), 1e-300), 1),
        ([[5e-324, 0], [0, 1.7e308]], 2),
        (np.zeros((2, 3)), 0),
        (hilbert(12), 12),
    ):
        assert hesscond.rank(A).value == rank
        assert rational_rank(np.array(A)) == rank


@pytest.mark.parametrize(("m", "n", "r"), [(70, 200, 65), (200, 130, 129), (129, 129, 64), (300, 300, 299)])
def test_blocks_of_columns(m, n, r):
    rng = np.random.default_rng(1)
    A = rng.integers(-30, 31, (m, r)) @ rng.integers(-30, 31, (r, n))
    # columns that depend on those before them, and zeros in between
    A[:, 5:9] = A[:, :4] * 2
    expected = np.linalg.matrix_rank(A.astype(float))
    found = hesscond.rank(A)
    assert found.value == expected
    assert 0 <= found.failure < 1e-15
    assert hesscond.rank(csr_array(A)).value == hesscond.rank(torch.from_numpy(A)).value == expected


def test_full_rank_is_certain_and_a_prime_that_divides_a_minor_is_outvoted():
    found = hesscond.rank(np.random.default_rng(2).standard_normal((50, 80)))
    assert (found.value, found.failure) == (50, 0.0)
    assert "certain" in str(found)
    p = found.primes[0]
    # the determinant is the very prime that is drawn first
    found = hesscond.rank([[float(p), 0.0], [0.0, 1.0]])
    assert found.primes[0] == p
    assert (found.value, len(found.primes)) == (2, 2)


def test_arithmetic_modulo_a_prime():
    rng = np.random.default_rng(3)
    p = random_prime(rng)
    x = rng.integers(-(2**53), 2**53, 1000)
    edges = np.array([0, p, -p, p - 1, 1 - p, (2**53 // p) * p, -(2**53 // p) * p, (2**53 // p) * p - 1])
    for whole in (x, edges):
        assert np.array_equal(reduced(whole.astype(float), p), (whole % p).astype(float))
    assert modular_rank(np.array([[1.0, 2.0, 3.0], [2.0, 4.0, 6.0]]), p) == 1
    assert sum(is_prime(n) for n in range(3, 1000, 2)) == 167
    assert math.gcd(p, 2 * 3 * 5 * 7 * 11 * 13) == 1


def test_some_hundred_columns_take_well_under_a_second():
    A = np.random.default_rng(4).standard_normal((300, 300))
    A[:, 0] = A[:, 1]
    start = time.process_time()
    assert hesscond.rank(A).value == 299
    assert time.process_time() - start < 3


@pytest.mark.parametrize("seed", [-1, 0.5, True, None])
def test_a_seed_that_is_none_is_refused(seed):
    with pytest.raises(ConfigError, match="seed"):
        hesscond.rank(np.eye(2), seed=seed)


def test_rows_that_differ_in_the_sign_of_a_zero_are_the_same():
    assert structural_rank_bound(np.array([[0.0, 1.0, 3.0], [-0.0, 1.0, 3.0]])) == 1
    assert structural_rank_bound(np.array([[1.0, 0.0, 1.0], [2.0, -0.0, 2.0], [0.0, 5.0, -0.0]])) == 2
