"""Rank of a matrix: exactly, by elimination modulo primes, or bounded by its zeros and repetitions."""

from __future__ import annotations

import math
from dataclasses import dataclass
from hashlib import blake2b

import numpy as np
from scipy.sparse import csr_array
from scipy.sparse.csgraph import structural_rank

from hesscond.errors import ConfigError
from hesscond.spectra.matrices import as_matrix, dense

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

    Returns
    -------
    ExactRank

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
    given = as_matrix(dense(matrix))
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
    found, failure, primes = 0, 1.0, []
    while failure > FAILURE and found < len(core):
        p = random_prime(generator)
        primes.append(p)
        found = max(found, modular_rank(residues(mantissas, exponents, p), p))
        failure *= share
    return ExactRank(found, given.shape, tuple(primes), 0.0 if found == len(core) else failure)


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
    rows, found = len(A), 0
    for start in range(0, A.shape[1], BLOCK):
        rest = A[found:, start:]
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
            if found + k == rows:
                return rows
        for i in range(k):
            trailing[i] = reduced(trailing[i] - L[i, :i] @ trailing[:i], p)
        trailing[k:] = reduced(trailing[k:] - L[k:, :k] @ trailing[:k], p)
        found += k
    return found


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
