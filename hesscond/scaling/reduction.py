"""Reductions that change no optimum: they remove zero rows and columns, their scales, and the null space."""

from __future__ import annotations

import numpy as np
from scipy.linalg import lapack
from scipy.sparse import csr_array
from scipy.sparse.csgraph import connected_components, maximum_bipartite_matching

from hesscond.errors import MatrixError

#: Sweeps over rows and columns; each about halves the decades still to go.
SWEEPS = 12


def powers(A: np.ndarray, *, columns: bool) -> tuple[np.ndarray, np.ndarray]:
    """Exponents p (m,), q (n,) with which the largest entries of the rows (and columns) of 2^p A 2^q are near 1."""
    # logarithms: the entries themselves could overflow on the way
    with np.errstate(divide="ignore"):
        size = np.log2(np.abs(A))
    p, q = np.zeros(len(A)), np.zeros(A.shape[1])
    for _ in range(SWEEPS if columns else 0):
        p = p - (size + p[:, None] + q).max(1) / 2
        q = q - (size + p[:, None] + q).max(0) / 2
    q = np.rint(q)
    with np.errstate(over="ignore", under="ignore"):
        exponents = np.frexp(A)[1] + q.astype(int)
    p = -np.where(A == 0, np.iinfo(int).min, exponents).max(1)
    return p.astype(int), q.astype(int)


def rescaled(A: np.ndarray, p: np.ndarray, q: np.ndarray) -> np.ndarray:
    """Exact product 2^p A 2^q."""
    shift = p[:, None] + q
    scaled = np.ldexp(A, shift)
    if not np.array_equal(np.ldexp(scaled, -shift), A):
        raise MatrixError(
            "the entries of a row span more than the range of double precision: no scaling of the rows brings them "
            "together; set the smallest to zero or rescale the columns"
        )
    return scaled


def diagonal_blocks(A: np.ndarray) -> tuple[list[tuple[np.ndarray, np.ndarray]], list[int]]:
    """Blocks (rows, columns) of the finest block triangular form of a nonsingular matrix, and a height for each.

    Entries outside the blocks couple the rows of a block only with the columns of lower ones. The blocks are the strong
    components of the columns once a matching has put nonzero entries on the diagonal (Dulmage and Mendelsohn).
    """
    matched = maximum_bipartite_matching(csr_array(A != 0), perm_type="row")
    number, label = connected_components(csr_array(A[matched] != 0), connection="strong")
    edges = np.zeros((number, number), bool)
    i, j = np.nonzero(A[matched])
    edges[label[i], label[j]] = True
    np.fill_diagonal(edges, False)
    height = np.zeros(number, int)
    for _ in range(number):
        higher = np.where(edges, height + 1, 0).max(1)
        if (higher == height).all():
            break
        height = higher
    columns = [np.flatnonzero(label == block) for block in range(number)]
    return [(matched[block], block) for block in columns], [int(h) for h in height]


def thin_factor(A: np.ndarray, rank: int) -> tuple[np.ndarray, np.ndarray]:
    """Factors L (m, r) and Q (n, r) with A ≈ LQᵀ and QᵀQ = I, for a matrix of rank r.

    QR of Aᵀ with its rows sorted by size and its columns pivoted, which keeps small columns of A accurate (Cox and
    Higham, in Numerical Analysis 1997, Longman, 57-73).
    """
    m, n = A.shape
    order = np.argsort(-np.abs(A).max(0), kind="stable")
    packed, pivots, tau, _, _ = lapack.dgeqp3(np.asfortranarray(A[:, order].T))
    R = np.triu(packed[:rank])
    L = np.empty((m, rank))
    L[pivots - 1] = R.T
    k = min(m, n)
    thin, _, _ = lapack.dorgqr(np.asfortranarray(packed[:, :k]), tau[:k])
    Q = np.empty((n, rank))
    Q[order] = thin[:, :rank]
    return L, Q
