"""κ of given matrices and factors, by reduction to a core whose singular values or eigenvalues are computed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import numpy as np
from scipy.linalg import qr

from hesscond import causes
from hesscond.operators.threads import few_threads
from hesscond.spectra import matrices
from hesscond.spectra.condition import EPS, GAP, NOISE, ConditionNumber, conclude, error_factor, unresolved, zero_matrix
from hesscond.spectra.rank import affordable_rank, structural_rank_bound
from hesscond.spectra.solvers import base, jacobi

#: Entries below this share of the largest may underflow when they are squared.
LEAST = 2.0**-500

#: Prefixes of the names of solvers that are accurate beyond normwise bounds.
FINE = ("Jacobi", "certified")


def factor_condition(
    factor: object,
    *,
    rank_bound: base.RankBound | None = None,
    rtol: float = 1e-8,
    error: float | np.ndarray = 0.0,
    exact: bool = False,
    jacobi_order: float = math.inf,
    power: int = 2,
) -> ConditionNumber:
    """κ of H = FᵀF from the factor F (m, n): κ(H) = κ(F)², so float64 resolves κ(H) to 1e30.

    ``error`` bounds that of F in the 2-norm, or in each column (n,) or entry (m, n). With ``exact``, the rank of this
    very F is found by `exact_rank` where sizes do not decide it; otherwise values of the size of round-off are zeros.
    Jacobi is left out beyond ``jacobi_order`` rows or columns. With ``power`` 1, κ is that of the matrix F itself, and
    rank and nullity add up to min(m, n).
    """
    matrix = matrices.as_matrix(factor)
    order = matrix.shape[1] if power == 2 else min(matrix.shape)
    core, scale, columns, transposed = matrices.scaled_core(matrix)
    if core.size == 0:
        return zero_matrix(order)
    errors = np.asarray(np.ldexp(error, -scale))
    whole = float(np.linalg.norm(errors))
    by_part: float | np.ndarray = whole
    if errors.ndim == 1:
        by_part = errors[columns]
    elif errors.ndim == 2:
        entries = errors[np.ix_((matrix != 0).any(1), columns)]
        by_part = entries.T if transposed else entries
    form = base.SingularForm(
        core,
        order,
        power * scale,
        bounds_of(core, rank_bound),
        partial(affordable_rank, core) if exact else None,
        error=by_part,
        whole=whole,
        across_rows=transposed,
        power=power,
        jacobi_order=jacobi_order,
    )
    with few_threads(matrix):
        kappa = form.measured(rtol)
    scalable = not exact and (errors.ndim == 1 or (errors.ndim == 0 and not whole))
    if kappa.cause == causes.BELOW_BOUND and scalable and is_numerical_rank(form, kappa.rank):
        # those that are zero in any scale may exceed the round-off of the few small entries that they touch
        known = replace(form, bounds=[partial(int, kappa.rank)])
        with few_threads(matrix):
            kappa = replace(known.measured(rtol), rank_decision="numerical")
    if kappa.rank_decision == "numerical" and power == 2:
        # rows or columns that are small as a whole are no round-off, unless the errors given are as large
        bounds = np.asarray(by_part if errors.ndim else 0.0)
        above = np.abs(core) > (bounds[:, None] if bounds.ndim == 1 and transposed else bounds)
        if equilibrated_rank(core[np.ix_(above.any(1), above.any(0))]) > kappa.rank:
            kappa = unresolved(kappa, causes.SCALES)
    return within_range(kappa, matrix, core)


def bounds_of(core: np.ndarray, known: base.RankBound | None) -> list[base.RankBound]:
    """Given bound of the rank, if any, and the structural one."""
    structural = partial(structural_rank_bound, core)
    return [structural] if known is None else [known, structural]


def within_range(result: ConditionNumber, matrix: np.ndarray, core: np.ndarray) -> ConditionNumber:
    """Return ``result``, unresolved if entries that underflow when squared may have lowered its rank."""
    if not result.resolved or result.rank >= min(core.shape):
        return result
    magnitudes = np.abs(matrix)
    if magnitudes[magnitudes > 0].min() >= LEAST * magnitudes.max():
        return result
    return unresolved(result, causes.UNDERFLOW)


def equilibrated_rank(core: np.ndarray) -> int:
    """Number of nonzero singular values after rows and columns are scaled to one size; 0 if they are already."""
    rows, columns = (np.abs(core).max(axis) for axis in (1, 0))
    if max(rows.max() / rows.min(), columns.max() / columns.min()) < GAP:
        return 0
    values = base.svd_values(equilibrated(core))
    return int((values.magnitudes > values.errors).sum())


def equilibrated(core: np.ndarray) -> np.ndarray:
    """Rows and columns of a core scaled to one size by powers of two."""
    scaled = core
    for _ in range(2):
        scaled = np.ldexp(scaled, -np.frexp(np.abs(scaled).max(1))[1][:, None])
        scaled = np.ldexp(scaled, -np.frexp(np.abs(scaled).max(0))[1])
    return scaled


def is_numerical_rank(form: base.SingularForm, rank: int) -> bool:
    """Whether this is the rank up to round-off once rows and columns, or those with an error, have one size."""
    core, error, columns = form.core, form.error, form.core.shape[1]
    if np.ndim(error) == 0:
        values = base.svd_values(equilibrated(core))
    else:
        exponents = np.frexp(np.abs(core).max(int(form.across_rows)))[1]
        scaled = np.ldexp(core, -exponents[:, None] if form.across_rows else -exponents)
        values = base.svd_values(scaled, float(np.linalg.norm(np.ldexp(error, -exponents))))
    found = conclude(values, order=columns, limit=columns, scale=0)
    return found.rank_decision == "numerical" and found.rank == rank


def symmetric_condition(
    matrix: np.ndarray,
    *,
    rank_bound: base.RankBound | None = None,
    rtol: float = 1e-8,
    error: float = 0.0,
    floor: float = 0.0,
    exact: bool = False,
) -> ConditionNumber:
    r"""κ = \|λ\|_max / smallest nonzero \|λ\| of a finite symmetric (n, n) array, with its inertia.

    ``error`` and ``floor``: bound and typical size, in the 2-norm, of the error already in the matrix; ``exact`` as for
    `factor_condition`.
    """
    core, scale, *_ = matrices.scaled_core(matrix)
    if core.size == 0:
        return zero_matrix(len(matrix))
    error, floor = float(np.ldexp(error, -scale)), float(np.ldexp(floor, -scale))
    rank = partial(affordable_rank, core) if exact else None
    with few_threads(matrix):
        # Jacobi is no better than an error that is larger than that of the eigenvalues
        graded = error <= error_factor(*core.shape) * EPS * float(np.linalg.norm(core)) / len(core) ** 0.5
        form = base.EigenvalueForm(core, len(matrix), scale, bounds_of(core, rank_bound), rank, error, floor, graded)
        return within_range(form.measured(rtol), matrix, core)


def uncertain_condition(
    matrix: np.ndarray,
    size: np.ndarray | None,
    norm: float,
    shape: tuple[int, int],
    *,
    given: np.ndarray | float = 0.0,
    given_norm: float = 0.0,
    order: int,
    bounds: Sequence[base.RankBound],
    scale: int,
    rtol: float,
) -> ConditionNumber:
    """κ of a symmetric matrix (k, k) that is known up to rounding of its entries.

    A relative change eps of the terms that were summed up changes entry (i, j) by eps·size_ij (None: only the norm is
    used), and the whole, in the 2-norm, by eps·norm; ``shape``: the number of terms, and the order before a reduction,
    by which errors may grow. ``given`` and ``given_norm`` are bounds of other errors.
    """
    unit, entries = EPS * norm, None
    if size is not None and size.diagonal().max() > base.GRADED * size.diagonal().min():
        entries = EPS * error_factor(shape[0], 1) * size + given, NOISE * EPS * size + given
    error, graded = error_factor(*shape) * unit + given_norm, entries is not None
    form = base.EigenvalueForm(matrix, order, scale, bounds, None, error, NOISE * unit, graded, entries)
    with few_threads(matrix):
        kappa = form.measured(rtol)
    if kappa.rank == 0:
        return kappa.because(causes.ALL_ROUNDING)
    return kappa.because(causes.SUMMED) if kappa.cause == causes.BELOW_BOUND else kappa


def rounded_condition(
    matrix: np.ndarray,
    spread: np.ndarray,
    rank_bound: base.RankBound | None = None,
    *,
    terms: int,
    rtol: float,
    graded: bool = True,
) -> ConditionNumber:
    """κ of a symmetric (n, n) array whose entries are sums of ``terms`` products, known up to rounding of these.

    ``spread`` (n,): d such that a relative change eps of the terms changes entry (i, j) by eps·d_i·d_j. ``graded``:
    whether there is memory for Jacobi's method, which takes three times as many matrices as eigenvalues.
    """
    core, scale, kept, _ = matrices.scaled_core(matrix)
    if core.size == 0:
        return zero_matrix(len(matrix))
    # exactly: d d may overflow where the entries do not
    d = np.ldexp(spread[kept], -(scale // 2)) * (2.0**-0.5 if scale % 2 else 1.0)
    size = np.outer(d, d) if graded and (d * d).max() > base.GRADED * (d * d).min() else None
    bounds, shape = bounds_of(core, rank_bound), (terms, len(matrix))
    return uncertain_condition(
        core, size, float(d @ d), shape, order=len(matrix), bounds=bounds, scale=scale, rtol=rtol
    )


def small_form(factor: np.ndarray, signs: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
    """Symmetric matrix (k, k) with the nonzero eigenvalues of FᵀJF, for F (m, n), ``signs`` J (m,) and k = min(m, n).

    It is FᵀJF, or RJRᵀ where F is wide, with Fᵀ = QR. Returned too: what a relative change of 1 in every product and in
    every entry of F changes its entries by, at most (k, k), and the basis Q (n, m), if there is one.
    Rows of Fᵀ are sorted by size and its columns pivoted, so that the QR commits errors of the size of each row: those
    of every entry stay relative to the scales of F's columns.
    """
    if factor.shape[0] >= factor.shape[1]:
        matrix, size = factor.T @ (factor * signs[:, None]), np.abs(factor).T @ np.abs(factor)
        return (matrix + matrix.T) / 2, size, None
    lengths = np.abs(factor).max(0)
    order = np.argsort(-lengths, kind="stable")
    sorted_basis, R, pivots = qr(factor.T[order], mode="economic", pivoting=True, check_finite=False)
    Q = np.empty_like(sorted_basis)
    Q[order] = sorted_basis
    matrix = (R * signs[pivots]) @ R.T
    return (matrix + matrix.T) / 2, np.abs(R) @ np.abs(R.T) + carried(Q, lengths, lengths), Q


def carried(basis: np.ndarray | None, left: np.ndarray, right: np.ndarray) -> np.ndarray:
    """Bounds |Q|ᵀ a bᵀ |Q| of the entries of QᵀEQ, from those of E, the products a_k·b_l of two vectors (n,)."""
    return np.outer(left, right) if basis is None else np.outer(left @ np.abs(basis), right @ np.abs(basis))


def prepared(factor: object, signs: object) -> tuple[np.ndarray, np.ndarray, int, np.ndarray, np.ndarray]:
    """Nonzero rows and columns of F scaled to size about 1, their signs, the power of two, and the columns kept."""
    matrix, sign = matrices.as_matrix(factor), np.ravel(matrices.as_array(signs)).astype(float)
    nonzero = matrix != 0
    rows, columns = nonzero.any(1), nonzero.any(0)
    matrix = matrix[np.ix_(rows, columns)]
    scale = int(np.frexp(np.abs(matrix).max())[1]) if matrix.size else 0
    return np.ldexp(matrix, -scale), sign[rows], scale, rows, columns


def signed_condition(
    factor: object,
    signs: object,
    *,
    rank_bound: base.RankBound | None = None,
    rtol: float = 1e-8,
    error: float | np.ndarray = 0.0,
    noise: float = 0.0,
    spread: np.ndarray | None = None,
) -> ConditionNumber:
    r"""κ = \|λ\|_max / \|λ\|_min of H = Fᵀ diag(signs) F, with its number of negative eigenvalues.

    Rounding changes entry (k, l) of H by c·eps·(\|F\|ᵀ\|F\|)_kl only, so that eigenvalues are known relative to the
    scales of F's columns. ``error`` is as in `factor_condition`; ``noise`` is the change of H by a relative change eps
    of its terms, divided by eps, in the 2-norm, and ``spread`` d (n,) that of entry (k, l) by eps·d_k·d_l.
    """
    core, sign, scale, rows, columns = prepared(factor, signs)
    order = len(columns)
    if core.size == 0:
        return zero_matrix(order)
    matrix, size, basis = small_form(core, sign)
    errors = np.asarray(np.ldexp(error, -scale))
    if errors.ndim == 2:
        errors = np.linalg.norm(errors[rows], axis=0)
    whole = float(np.linalg.norm(errors)) if errors.ndim else float(errors)
    # bounds, in the 2-norm, of the errors in the columns
    per_column = errors[columns] if errors.ndim else np.full(int(columns.sum()), whole)
    lengths = np.linalg.norm(core, axis=0)
    given: np.ndarray | float = 0.0
    if whole:
        given = carried(basis, lengths, per_column) + carried(basis, per_column, lengths + per_column)
    # ‖F‖₂ is that of the smaller Gram matrix
    gram = core.T @ core if core.shape[0] >= core.shape[1] else core @ core.T
    norm, unit = float(base.eigenvalues_of(gram)[-1]) ** 0.5, float(np.ldexp(noise, -2 * scale))
    size, total = size + unit, norm**2 + unit
    if spread is not None:
        d = np.ldexp(spread[columns], -scale)
        size, total = size + carried(basis, d, d), total + float(d @ d)
    kappa = uncertain_condition(
        *(matrix, size, total, core.shape),
        given=given,
        given_norm=whole * (2 * norm + whole),
        order=order,
        bounds=bounds_of(core, rank_bound),
        scale=2 * scale,
        rtol=rtol,
    )
    if kappa.rank_decision == "numerical" and spread is None and noise == 0 and equilibrated_rank(core) > kappa.rank:
        # rows or columns that are small as a whole are no round-off
        kappa = unresolved(kappa, causes.SCALES)
    return kappa


def factor_eigenvalues(factor: object, condition: ConditionNumber) -> np.ndarray:
    """Nonzero eigenvalues of FᵀF, descending, as many as ``condition`` found."""
    core, scale, *_ = matrices.scaled_core(matrices.as_matrix(factor))
    if condition.rank == 0:
        return np.zeros(0)
    values = (jacobi.jacobi_values if condition.solver.startswith(FINE) else base.svd_values)(core).magnitudes
    return np.ldexp(values[: condition.rank] ** 2, 2 * scale)


def factor_eigenpairs(factor: object, condition: ConditionNumber) -> tuple[np.ndarray, np.ndarray]:
    """Nonzero eigenvalues (r,) of FᵀF, descending, and orthonormal eigenvectors (n, r)."""
    matrix = matrices.as_matrix(factor)
    core, scale, columns, transposed = matrices.scaled_core(matrix)
    rank = condition.rank
    vectors = np.zeros((matrix.shape[1], rank))
    if rank == 0:
        return np.zeros(0), vectors
    if condition.solver.startswith(FINE):
        values, u, v = jacobi.jacobi_svd(core)
    else:
        u, values, vt = np.linalg.svd(core, full_matrices=False)
        v = vt.T
    vectors[columns] = (u if transposed else v)[:, :rank]
    return np.ldexp(values[:rank] ** 2, 2 * scale), vectors


def signed_eigenpairs(factor: object, signs: object, condition: ConditionNumber) -> tuple[np.ndarray, np.ndarray]:
    """Nonzero eigenvalues (r,) of Fᵀ diag(signs) F, descending, and orthonormal eigenvectors (n, r), as κ was found."""
    core, sign, scale, _, columns = prepared(factor, signs)
    eigenvectors = np.zeros((len(columns), condition.rank))
    if condition.rank == 0:
        return np.zeros(0), eigenvectors
    matrix, _, basis = small_form(core, sign)
    if "Jacobi" in condition.solver:
        magnitudes, sign, _, vectors = jacobi.signed_jacobi(matrix)
        values = magnitudes * sign
    else:
        values, vectors = np.linalg.eigh(matrix)
    largest = np.argsort(-np.abs(values), kind="stable")[: condition.rank]
    kept = largest[np.argsort(-values[largest], kind="stable")]
    eigenvectors[columns] = vectors[:, kept] if basis is None else basis @ vectors[:, kept]
    return np.ldexp(values[kept], 2 * scale), eigenvectors
