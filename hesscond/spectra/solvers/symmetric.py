"""Condition numbers of given matrices: symmetric (by |λ|) or not (by σ)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np

from hesscond.causes import ALL_ROUNDING, BELOW_BOUND, SUMMED
from hesscond.spectra.condition import NOISE, ConditionNumber, Values, resolve, zero_matrix
from hesscond.spectra.matrices import scaled_core
from hesscond.spectra.rank import affordable_rank, structural_rank_bound
from hesscond.spectra.solvers.factored import (
    EPS,
    error_factor,
    graded_errors,
    jacobi_svd,
    roundoff_of_entries,
    smallest_singular_value,
    svd_routes,
    uniform,
    weighted,
    within_range,
)
from hesscond.spectra.threads import few_threads

#: Jacobi is tried on a matrix known up to rounding if that of one diagonal entry is this much larger than another's.
GRADED = 100.0


@few_threads
def general_condition(
    matrix: np.ndarray,
    *,
    rank_bound: Callable[[], int] | None = None,
    rtol: float = 1e-8,
    error: float = 0.0,
    exact: bool = False,
) -> ConditionNumber:
    """κ = σ_max / smallest nonzero σ of a finite (m, n) array; rank and nullity add up to min(m, n).

    ``exact`` as for `factor_condition`.
    """
    core, scale, *_ = scaled_core(matrix)
    if core.size == 0:
        return zero_matrix(min(matrix.shape))
    error = float(np.ldexp(error, -scale))
    found = resolve(
        svd_routes(core, error, error, power=1),
        order=min(matrix.shape),
        bounds=rank_bounds(core, rank_bound),
        scale=scale,
        rtol=rtol,
        exact=partial(affordable_rank, core) if exact else None,
    )
    return within_range(found, matrix, core)


@few_threads
def symmetric_condition(
    matrix: np.ndarray,
    *,
    rank_bound: Callable[[], int] | None = None,
    rtol: float = 1e-8,
    error: float = 0.0,
    floor: float = 0.0,
    exact: bool = False,
) -> ConditionNumber:
    """κ = |λ|_max / smallest nonzero |λ| of a finite symmetric (n, n) array, with its inertia.

    The eigenvalues by LAPACK dsyevd if their normwise bound c·eps·|λ|_max decides; otherwise the singular
    values of the graded matrix by one-sided Jacobi, the sign of each λ_k that of u_kᵀv_k.

    ``error`` and ``floor``: bound and typical size, in the 2-norm, of the error already in the matrix; ``exact`` as for
    `factor_condition`.
    """
    core, scale, *_ = scaled_core(matrix)
    if core.size == 0:
        return zero_matrix(len(matrix))
    error, floor = float(np.ldexp(error, -scale)), float(np.ldexp(floor, -scale))
    routes = [partial(eigenvalue_values, core, error, floor)]
    # Jacobi is no better than an error that is larger than that of the eigenvalues
    if error <= error_factor(*core.shape) * EPS * float(np.linalg.norm(core)) / len(core) ** 0.5:
        routes.append(partial(signed_jacobi_values, core, error, floor))
    found = resolve(
        routes,
        order=len(matrix),
        bounds=rank_bounds(core, rank_bound),
        scale=scale,
        rtol=rtol,
        exact=partial(affordable_rank, core) if exact else None,
    )
    return within_range(found, matrix, core)


def rank_bounds(core: np.ndarray, known: Callable[[], int] | None) -> list[Callable[[], int]]:
    """Given bound of the rank, if any, and the structural one."""
    structural = partial(structural_rank_bound, core)
    return [structural] if known is None else [known, structural]


def eigenvalue_values(core: np.ndarray, error: float, floor: float = 0.0) -> Values:
    """Eigenvalues of a symmetric matrix by size, with the normwise error bound.

    ``error`` and ``floor``: bound and typical size of the error already in the matrix.
    """
    # scipy's dsyevd takes the least workspace, with which large matrices are not reduced in blocks
    eigenvalues = np.linalg.eigvalsh(core)
    eigenvalues = eigenvalues[np.argsort(-np.abs(eigenvalues), kind="stable")]
    magnitudes = np.abs(eigenvalues)
    spread = uniform(magnitudes, core.shape, EPS * float(magnitudes[0]), error)
    spread["floors"] += floor
    return Values(magnitudes, **spread, power=1, solver="eigenvalues", negative=eigenvalues < 0)


def signed_jacobi(core: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """|λ| of a symmetric matrix, descending, signs of λ, and the singular vectors u and v, by one-sided Jacobi.

    Where λ and −λ are both eigenvalues their singular vectors mix, u_kᵀv_k is far from ±1, and the count of
    negative ones is that of the Rayleigh quotient on the common invariant subspace, whose eigenvectors replace v.
    """
    values, u, v = jacobi_svd(core)
    vectors = v.copy()
    signs = np.einsum("ik,ik->k", u, v)
    start = 0
    while start < len(values):
        stop = start + 1
        while stop < len(values) and values[stop] > values[start] * (1 - 1e-6):
            stop += 1
        if np.abs(signs[start:stop]).min() < 0.9:
            block = v[:, start:stop]
            signs[start:stop], inner = np.linalg.eigh(block.T @ core @ block)
            vectors[:, start:stop] = block @ inner
        start = stop
    return values, np.where(signs < 0, -1.0, 1.0), u, vectors


def signed_jacobi_values(core: np.ndarray, error: float, floor: float = 0.0) -> Values:
    """|λ| of a symmetric matrix by one-sided Jacobi, with the signs and entry-by-entry error bounds."""
    values, signs, u, v = signed_jacobi(core)
    below, above = graded_errors(core, values, u, v, smallest_singular_value(core))
    floors = NOISE * roundoff_of_entries(core, values, u, v) + floor
    return Values(values, below + error, floors, 1, "Jacobi SVD", signs < 0, above + error)


class Rounding(NamedTuple):
    """Rounding of a symmetric matrix (k, k) that was summed up.

    ``size`` (k, k): a relative change eps of the terms changes entry (i, j) by eps·size_ij (None: only the norm is
    used); ``norm``: and the whole, in the 2-norm, by eps·norm; ``growth`` and ``norm_growth``: the constants by which
    errors may exceed these.
    """

    size: np.ndarray | None
    norm: float
    growth: float
    norm_growth: float


@few_threads
def uncertain_condition(
    matrix: np.ndarray,
    rounding: Rounding,
    *,
    given: np.ndarray | float,
    given_norm: float,
    order: int,
    bounds: Sequence[Callable[[], int]],
    scale: int,
    rtol: float,
) -> ConditionNumber:
    """κ of a symmetric matrix (k, k) that is known up to rounding of its entries.

    It is computed from eigenvalues if the normwise bound resolves κ, and by one-sided Jacobi if the rounding of some
    rows is much smaller than that of others, so that the small eigenvalues of these rows are known better.
    """
    unit = EPS * rounding.norm
    routes = [partial(eigenvalue_values, matrix, rounding.norm_growth * unit + given_norm, NOISE * unit)]
    if rounding.size is not None and rounding.size.diagonal().max() > GRADED * rounding.size.diagonal().min():
        routes.append(partial(uncertain_values, matrix, rounding, rounding.size, given))
    found = resolve(routes, order=order, bounds=bounds, scale=scale, rtol=rtol)
    if found.rank == 0:
        return found.because(ALL_ROUNDING)
    return found.because(SUMMED) if found.cause == BELOW_BOUND else found


def uncertain_values(matrix: np.ndarray, rounding: Rounding, size: np.ndarray, given: np.ndarray | float) -> Values:
    """|λ| by one-sided Jacobi, with bounds that hold for every matrix within the errors of the entries."""
    values, signs, u, v = signed_jacobi(matrix)
    error = EPS * rounding.growth * size + given
    below, above = graded_errors(matrix, values, u, v, smallest_singular_value(matrix, error), error)
    floors = weighted(NOISE * EPS * size + given, u, v)
    return Values(values, below, floors, 1, "Jacobi SVD", signs < 0, above)


@few_threads
def rounded_condition(
    matrix: np.ndarray, spread: np.ndarray, *, terms: int, rtol: float, graded: bool = True
) -> ConditionNumber:
    """κ of a symmetric (n, n) array whose entries are sums of ``terms`` products, known up to rounding of these.

    ``spread`` (n,): d such that a relative change eps of the terms changes entry (i, j) by eps·d_i·d_j. ``graded``:
    whether there is memory for Jacobi's method, which takes three times as many matrices as eigenvalues.
    """
    core, scale, kept, _ = scaled_core(matrix)
    if core.size == 0:
        return zero_matrix(len(matrix))
    # exactly: d d may overflow where the entries do not
    d = np.ldexp(spread[kept], -(scale // 2)) * (2.0**-0.5 if scale % 2 else 1.0)
    size = np.outer(d, d) if graded and (d * d).max() > GRADED * (d * d).min() else None
    rounding = Rounding(size, float(d @ d), error_factor(terms, 1), error_factor(terms, len(matrix)))
    return uncertain_condition(
        core,
        rounding,
        given=0.0,
        given_norm=0.0,
        order=len(matrix),
        bounds=[partial(structural_rank_bound, core)],
        scale=scale,
        rtol=rtol,
    )
