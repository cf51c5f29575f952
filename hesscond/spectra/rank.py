"""Rank of a matrix: exact, by elimination modulo primes; bounded by its zeros; or up to the rounding of its entries."""

from __future__ import annotations

import math
from dataclasses import dataclass
from hashlib import blake2b
from numbers import Real
from typing import Literal

import numpy as np
import torch
from scipy.sparse import csr_array
from scipy.sparse.csgraph import structural_rank

from hesscond.errors import ConfigError, MatrixError
from hesscond.spectra import condition, matrices
from hesscond.spectra.solvers import base

#: Primes are drawn from (2**22, 2**23), of which there are this many: sums of 64 products are exact in doubles then.
LOW, HIGH, PRIMES = 2**22, 2**23, 268_216
BLOCK = 64
#: Exact ranks are found up to this product of the two orders and the smaller of them: order 1,000.
EXACT_WORK = 10**9
#: Bytes of a matrix from which on its rows are compared by their digests.
LARGE = 2**24
#: The probability with which the rank may be larger than what was found.
FAILURE = 1e-15


@dataclass(frozen=True, slots=True)
class ExactRank:
    """Rank of a matrix, by exact arithmetic, with its evidence. ``int(rank)`` is ``rank.value``.

    Attributes
    ----------
    value
        The rank: it is certainly no smaller.
    shape
        Shape of the matrix.
    primes
        The primes modulo which it was eliminated.
    failure
        A bound of the probability, over the draw of the primes, that the rank is larger.
    """

    value: int
    shape: tuple[int, int]
    primes: tuple[int, ...]
    failure: float

    def __int__(self) -> int:
        return self.value

    def __str__(self) -> str:
        m, n = self.shape
        if self.failure == 0:
            return f"rank {self.value} of a {m} × {n} matrix (certain)"
        return f"rank {self.value} of a {m} × {n} matrix (larger with a probability below {self.failure:.1g})"


def exact_rank(matrix: object, *, seed: int = 0) -> ExactRank:
    """Rank of a matrix in exact arithmetic, with every double taken as the rational number that it represents.

    Modulo a prime the rank is never larger, and smaller only if the prime divides every minor of full rank. By
    Hadamard's inequality such a minor has few divisors among the 268,216 primes of 23 bits; as many of these are drawn
    at random as bring the probability that all of them divide it below 1e-15: one if the rank is full, some seven of
    order 500 otherwise. Each elimination is about as expensive as a QR decomposition, whatever the order.

    Parameters
    ----------
    matrix : (m, n) array, tensor or sparse matrix
    seed
        Seed of the generator of the primes.

    Raises
    ------
    MatrixError
        Not a finite, non-empty real matrix whose entries are doubles.

    Examples
    --------
    >>> print(exact_rank([[1.0, 1.0], [1.0, 1.0 + 2.0**-50]]))
    rank 2 of a 2 × 2 matrix (certain)
    >>> int(exact_rank(np.outer([0.1, 0.2, 0.3], [1.0, 2.0, 4.0])))
    1
    """
    if isinstance(seed, bool) or not isinstance(seed, int) or seed < 0:
        raise ConfigError(f"seed must be a non-negative integer, not {seed!r}")
    given = matrices.as_matrix(matrices.dense(matrix))
    core = given[given.any(1)][:, given.any(0)]
    if core.size == 0:
        return ExactRank(0, given.shape, (), 0.0)
    if len(core) > core.shape[1]:
        core = core.T
    mantissas, exponents = dyadic(core)
    bits = minor_bits(mantissas, exponents)
    # the share of primes that can divide one nonzero minor
    share = min(bits / 22 / PRIMES, 0.5)
    generator = np.random.default_rng(seed)
    largest, failure, primes = 0, 1.0, []
    while failure > FAILURE and largest < len(core):
        p = random_prime(generator)
        primes.append(p)
        largest = max(largest, modular_rank(residues(mantissas, exponents, p), p))
        failure *= share
    return ExactRank(largest, given.shape, tuple(primes), 0.0 if largest == len(core) else failure)


def affordable_rank(core: np.ndarray) -> int | None:
    """Rank of a core by exact arithmetic; None if that takes longer than some seconds."""
    return exact_rank(core).value if core.size * min(core.shape) <= EXACT_WORK else None


def structural_rank_bound(matrix: np.ndarray) -> int:
    """Largest rank that a matrix with these zeros and these repeated rows and columns can have."""
    distinct = distinct_rows(distinct_rows(matrix).T)
    # without zeros all of the smaller side can be matched
    return min(distinct.shape) if distinct.all() else int(structural_rank(csr_array(distinct != 0)))


def distinct_rows(matrix: np.ndarray) -> np.ndarray:
    """Distinct rows, in the order of their first occurrence."""
    # of the two zeros one
    rows = np.add(matrix, 0.0, order="C")
    # all bytes of a large matrix would be another one
    key = (lambda row: blake2b(row.tobytes()).digest()) if rows.nbytes > LARGE else np.ndarray.tobytes
    places = {key(row): i for i, row in reversed(list(enumerate(rows)))}
    return rows if len(places) == len(rows) else rows[sorted(places.values())]


def dyadic(matrix: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Odd integers m (or 0) and exponents e, int64, with matrix = m·2^e exactly."""
    fractions, exponents = np.frexp(matrix)
    mantissas = (fractions * 2.0**53).astype(np.int64)
    trailing = np.where(mantissas == 0, 1, mantissas & -mantissas)
    shift = np.round(np.log2(trailing.astype(float))).astype(np.int64)
    return mantissas >> shift, np.where(mantissas == 0, 0, exponents - 53 + shift)


def minor_bits(mantissas: np.ndarray, exponents: np.ndarray) -> float:
    """Bound of the bits of a minor of full row rank, its rows and columns made integers by powers of two."""
    present = mantissas != 0
    # no power of two divides a prime: take out what whole columns and rows have in common
    e = exponents - np.where(present, exponents, np.iinfo(np.int64).max).min(0)
    e = e - np.where(present, e, np.iinfo(np.int64).max).min(1, keepdims=True)
    sizes = np.where(present, e + np.log2(np.where(present, np.abs(mantissas), 1)), 0.0)
    return float((sizes.max(1) + 0.5 * math.log2(mantissas.shape[1])).sum())


def residues(mantissas: np.ndarray, exponents: np.ndarray, p: int) -> np.ndarray:
    """Numbers m·2^e modulo p, as doubles."""
    distinct, where = np.unique(exponents, return_inverse=True)
    powers = np.array([pow(2, int(e), p) for e in distinct], dtype=np.int64)
    return (mantissas % p * powers[where.reshape(exponents.shape)] % p).astype(float)


def modular_rank(A: np.ndarray, p: int) -> int:
    """Rank modulo p of residues (m, n), by Gaussian elimination in blocks of columns, which overwrites them."""
    rows, pivots = len(A), 0
    for start in range(0, A.shape[1], BLOCK):
        rest = A[pivots:, start:]
        panel, trailing = rest[:, :BLOCK], rest[:, BLOCK:]
        L = np.zeros((len(rest), BLOCK))
        k = 0
        for j in range(panel.shape[1]):
            candidates = np.flatnonzero(panel[k:, j])
            if len(candidates) == 0:
                continue
            swapped = [k + int(candidates[0]), k]
            rest[[k, swapped[0]]], L[[k, swapped[0]]] = rest[swapped], L[swapped]
            L[k, k] = 1
            L[k + 1 :, k] = reduced(panel[k + 1 :, j] * pow(int(panel[k, j]), -1, p), p)
            panel[k + 1 :, j:] = reduced(panel[k + 1 :, j:] - np.outer(L[k + 1 :, k], panel[k, j:]), p)
            k += 1
            if pivots + k == rows:
                return rows
        for i in range(k):
            trailing[i] = reduced(trailing[i] - L[i, :i] @ trailing[:i], p)
        trailing[k:] = reduced(trailing[k:] - L[k:, :k] @ trailing[:k], p)
        pivots += k
    return pivots


def reduced(x: np.ndarray, p: int) -> np.ndarray:
    """Whole numbers below 2**53 in size modulo p; a rounded quotient may be one too large."""
    remainder = x - p * np.floor(x / p)
    remainder[remainder < 0] += p
    remainder[remainder >= p] -= p
    return remainder


def random_prime(generator: np.random.Generator) -> int:
    """Random prime of 23 bits, all equally likely."""
    while True:
        candidate = int(generator.integers(LOW, HIGH)) | 1
        if is_prime(candidate):
            return candidate


def is_prime(n: int) -> bool:
    """Whether an odd n > 1 is prime."""
    return all(n % divisor for divisor in range(3, math.isqrt(n) + 1, 2))


@dataclass(frozen=True, slots=True)
class Rank:
    """Numerical rank of a matrix, with its evidence. ``int(rank)`` is ``rank.value``.

    Attributes
    ----------
    value
        Number of singular values that are distinguished from zero.
    lower, upper
        Interval of the rank: every matrix within the error bound has at least rank ``lower``. If resolved,
        both are ``value``; else ``upper`` is what the zero pattern and repeated rows and columns allow.
    shape
        Shape of the matrix.
    cutoff
        The bound of the error of a singular value: those above count, and an optimizer that inverts may keep them.
    sigma_max, sigma_min
        Largest singular value, and smallest that counts (0 of a zero matrix).
    remainder
        Largest singular value that does not count; 0 if all do.
    gap
        ``sigma_min`` over the larger of ``cutoff`` and ``remainder``.
    resolved
        Whether the rank is decided.
    decision
        ``"structural"``: as many as the zero pattern and repeated rows and columns allow. ``"numerical"``: the others
        are of the size of rounding, 1e3 below the smallest that counts, and are taken for zeros. ``"unresolved"``.
    """

    value: int
    lower: int
    upper: int
    shape: tuple[int, int]
    cutoff: float
    sigma_max: float
    sigma_min: float
    remainder: float
    gap: float
    resolved: bool
    decision: Literal["structural", "numerical", "unresolved"]

    def __int__(self) -> int:
        return self.value

    def __str__(self) -> str:
        m, n = self.shape
        if not self.resolved:
            return (
                f"rank between {self.lower} and {self.upper} of a {m} × {n} matrix (unresolved: "
                f"σ = {self.remainder:.2g} is neither above {self.cutoff:.2g} nor rounding)"
            )
        if not self.remainder:
            return f"rank {self.value} of a {m} × {n} matrix ({self.decision})"
        return (
            f"rank {self.value} of a {m} × {n} matrix ({self.decision}, gap {self.gap:.2g}, cutoff {self.cutoff:.2g})"
        )


def rank(matrix: object, *, error: float | None = None) -> Rank:
    """Rank of a matrix up to its rounding: how many singular values are certainly not zero, and whether others may.

    The singular values of an array of doubles are known to c·eps·σ_max, c = max(16, √(mn)); what exceeds that counts.
    The rest are zeros if they are no more than 16 eps·σ_max, and 1e3 smaller than those that count. Values between
    leave the rank unresolved: any cutoff would be a guess. With the eps of the matrix's type, the rounding of its
    entries is covered as well, as in a sum of products of that precision.

    Parameters
    ----------
    matrix : (m, n) array, tensor or sparse matrix
        Symmetric or not; at most float64.
    error
        Absolute bound, in the 2-norm, of the error that is already in the matrix; None: the rounding of its type.

    Raises
    ------
    MatrixError
        Not a finite, non-empty real matrix whose entries are doubles; ``error`` is no number of at least 0.

    Notes
    -----
    `exact_rank` is that of the very doubles. Of a matrix with the planted rank r, rounded, it is usually full.

    Examples
    --------
    >>> F = np.random.default_rng(0).standard_normal((3, 8))
    >>> found = rank(F.T @ F)
    >>> int(found), found.decision, found.upper
    (3, 'numerical', 3)
    >>> print(rank(np.diag([1.0, 1e-13, 1e-15]) + 1e-17))
    rank between 2 and 3 of a 3 × 3 matrix (unresolved: σ = 1e-15 is neither above 3.6e-15 nor rounding)
    """
    if error is not None and not (isinstance(error, Real) and 0 <= error < math.inf):
        raise MatrixError(f"error={error!r} is not a finite number of at least 0")
    given = matrices.as_matrix(matrices.dense(matrix))
    shape, order = (given.shape[0], given.shape[1]), min(given.shape)
    core, scale, *_ = matrices.scaled_core(given)
    if core.size == 0:
        return Rank(0, 0, 0, shape, 0.0, 0.0, 0.0, 0.0, math.inf, True, "structural")
    # those of a symmetric matrix are |λ|, which are cheaper
    symmetric = core.shape[0] == core.shape[1] and np.array_equal(core, core.T)
    sigma = (base.eigenvalue_values(core, 0.0) if symmetric else base.svd_values(core)).magnitudes
    unit = (precision(matrix) if error is None else condition.EPS) * float(sigma[0])
    carried = 0.0 if error is None else float(np.ldexp(error, -scale))
    errors = np.full(len(sigma), condition.error_factor(*core.shape) * unit + carried)
    values = condition.Values(sigma, errors, np.full(len(sigma), condition.NOISE * unit + carried), 1, "SVD")
    limit = structural_rank_bound(core)
    conclusion = condition.conclude(values, order=order, limit=limit, scale=scale)
    assert conclusion.rank_decision in ("structural", "numerical", "unresolved")
    rest = float(sigma[conclusion.rank]) if conclusion.rank < limit else 0.0
    return Rank(
        conclusion.rank,
        conclusion.rank,
        conclusion.rank if conclusion.resolved else limit,
        shape,
        math.ldexp(float(errors[0]), scale),
        conclusion.lambda_max,
        conclusion.lambda_min,
        math.ldexp(rest, scale),
        conclusion.gap,
        conclusion.resolved,
        conclusion.rank_decision,
    )


def precision(matrix: object) -> float:
    """Machine epsilon of the type of the entries, at least that of doubles."""
    dtype = getattr(matrix, "dtype", None)
    if isinstance(dtype, torch.dtype):
        return max(condition.EPS, torch.finfo(dtype).eps) if dtype.is_floating_point else condition.EPS
    floating = isinstance(dtype, np.dtype) and dtype.kind == "f"
    return max(condition.EPS, float(np.finfo(dtype).eps)) if floating else condition.EPS
