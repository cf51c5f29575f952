"""Spectra of indefinite H = Fᵀ J F with J = diag(±1), from F and the signs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from scipy.linalg import qr

from hesscond.causes import SCALES
from hesscond.spectra.condition import ConditionNumber, unresolved, zero_matrix
from hesscond.spectra.matrices import as_array, as_matrix
from hesscond.spectra.rank import structural_rank_bound
from hesscond.spectra.solvers.factored import eigenvalues_of, equilibrated_rank, error_factor
from hesscond.spectra.solvers.symmetric import Rounding, signed_jacobi, uncertain_condition
from hesscond.spectra.threads import few_threads


class SmallForm(NamedTuple):
    """Symmetric matrix (k, k) with the nonzero eigenvalues of FᵀJF, k the smaller dimension of F.

    ``matrix`` is FᵀJF, or RJRᵀ where F is wide, with Fᵀ = QR and ``basis`` Q (n, m); ``size`` (k, k): what a relative
    change of 1 in every product and in every entry of F changes its entries by, at most.
    """

    matrix: np.ndarray
    size: np.ndarray
    basis: np.ndarray | None


def small_form(factor: np.ndarray, signs: np.ndarray) -> SmallForm:
    """Form of the smaller order of F (m, n) with ``signs`` (m,) of ±1.

    Rows of Fᵀ are sorted by size and its columns pivoted, so that the QR commits errors of the size of each row: those
    of every entry stay relative to the scales of F's columns.
    """
    if factor.shape[0] >= factor.shape[1]:
        matrix, size = factor.T @ (factor * signs[:, None]), np.abs(factor).T @ np.abs(factor)
        return SmallForm((matrix + matrix.T) / 2, size, None)
    lengths = np.abs(factor).max(0)
    order = np.argsort(-lengths, kind="stable")
    sorted_basis, R, pivots = qr(factor.T[order], mode="economic", pivoting=True, check_finite=False)
    Q = np.empty_like(sorted_basis)
    Q[order] = sorted_basis
    matrix = (R * signs[pivots]) @ R.T
    return SmallForm((matrix + matrix.T) / 2, np.abs(R) @ np.abs(R.T) + carried(Q, np.outer(lengths, lengths)), Q)


def carried(basis: np.ndarray | None, bounds: np.ndarray) -> np.ndarray:
    """Convert bounds (n, n) of the entries of E to bounds of the entries of QᵀEQ."""
    return bounds if basis is None else np.abs(basis).T @ bounds @ np.abs(basis)


def prepared(factor: object, signs: object) -> tuple[np.ndarray, np.ndarray, int, np.ndarray, np.ndarray]:
    """Nonzero rows and columns of F scaled to size about 1, their signs, the power of two, and the columns kept."""
    matrix, sign = as_matrix(factor), np.ravel(as_array(signs)).astype(float)
    nonzero = matrix != 0
    rows, columns = nonzero.any(1), nonzero.any(0)
    matrix = matrix[np.ix_(rows, columns)]
    scale = int(np.frexp(np.abs(matrix).max())[1]) if matrix.size else 0
    return np.ldexp(matrix, -scale), sign[rows], scale, rows, columns


@few_threads
def signed_condition(
    factor: object,
    signs: object,
    *,
    rank_bound: Callable[[], int] | None = None,
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
    order = as_matrix(factor).shape[1]
    core, sign, scale, rows, columns = prepared(factor, signs)
    if core.size == 0:
        return zero_matrix(order)
    form = small_form(core, sign)
    per_column, whole = column_errors(error, rows, columns, scale)
    lengths = np.linalg.norm(core, axis=0)
    given = carried(form.basis, np.outer(lengths, per_column) + np.outer(per_column, lengths + per_column))
    norm, unit = spectral_norm(core), float(np.ldexp(noise, -2 * scale))
    size, total = form.size + unit, norm**2 + unit
    if spread is not None:
        d = np.ldexp(spread[columns], -scale)
        size, total = size + carried(form.basis, np.outer(d, d)), total + float(d @ d)
    found = uncertain_condition(
        form.matrix,
        Rounding(size, total, error_factor(len(core), 1), error_factor(*core.shape)),
        given=given,
        given_norm=whole * (2 * norm + whole),
        order=order,
        bounds=[*([] if rank_bound is None else [rank_bound]), partial(structural_rank_bound, core)],
        scale=2 * scale,
        rtol=rtol,
    )
    if found.rank_decision == "numerical" and spread is None and noise == 0 and equilibrated_rank(core) > found.rank:
        # rows or columns that are small as a whole are no round-off
        found = unresolved(found, SCALES)
    return found


def spectral_norm(core: np.ndarray) -> float:
    """‖F‖₂ of a matrix with entries of size about 1, from its smaller Gram matrix."""
    gram = core.T @ core if core.shape[0] >= core.shape[1] else core @ core.T
    return float(eigenvalues_of(gram)[-1]) ** 0.5


def dual_signed_condition(
    triangular: Callable[[], tuple[torch.Tensor, np.ndarray]],
    signs: torch.Tensor,
    *,
    order: int,
    rank_bound: Callable[[], int],
    rtol: float = 1e-8,
    noise: float = 0.0,
) -> ConditionNumber:
    """κ of Fᵀ diag(signs) F for F (m, n), m ≤ n, from R with RᵀR = FFᵀ.

    ``noise`` as in `signed_condition`; otherwise as `dual_condition`.
    """
    R, error = triangular()
    found = signed_condition(
        R.T, signs, rank_bound=rank_bound, rtol=rtol, error=float(np.linalg.norm(error)), noise=noise
    )
    return replace(found, nullity=order - found.rank, solver=f"dual {found.solver}")


def column_errors(
    error: float | np.ndarray, rows: np.ndarray, columns: np.ndarray, scale: int
) -> tuple[np.ndarray, float]:
    """Bounds, in the 2-norm, of the errors in the columns of the prepared F, and in all of it."""
    errors = np.asarray(np.ldexp(error, -scale))
    if errors.ndim == 2:
        errors = np.linalg.norm(errors[rows], axis=0)
    if errors.ndim == 1:
        return errors[columns], float(np.linalg.norm(errors))
    return np.full(int(columns.sum()), float(errors)), float(errors)


@few_threads
def signed_eigenvalues(factor: object, signs: object, condition: ConditionNumber) -> np.ndarray:
    """Nonzero eigenvalues of Fᵀ diag(signs) F, descending, as many as `signed_condition` found."""
    core, sign, scale, *_ = prepared(factor, signs)
    values = signed_pairs(core, sign, condition)[0]
    return np.ldexp(values, 2 * scale)


def signed_pairs(core: np.ndarray, signs: np.ndarray, condition: ConditionNumber) -> tuple[np.ndarray, np.ndarray]:
    """Nonzero eigenvalues of a prepared F, descending, and orthonormal eigenvectors; by Jacobi if it was used."""
    if condition.rank == 0:
        return np.zeros(0), np.zeros((core.shape[1], 0))
    form = small_form(core, signs)
    if "Jacobi" in condition.solver:
        magnitudes, sign, _, vectors = signed_jacobi(form.matrix)
        values = magnitudes * sign
    else:
        values, vectors = np.linalg.eigh(form.matrix)
    largest = np.argsort(-np.abs(values), kind="stable")[: condition.rank]
    kept = largest[np.argsort(-values[largest], kind="stable")]
    return values[kept], vectors[:, kept] if form.basis is None else form.basis @ vectors[:, kept]


@few_threads
def signed_eigenpairs(factor: object, signs: object, condition: ConditionNumber) -> tuple[np.ndarray, np.ndarray]:
    """Nonzero eigenvalues (r,) of Fᵀ diag(signs) F, descending, and orthonormal eigenvectors (n, r)."""
    core, sign, scale, _, columns = prepared(factor, signs)
    vectors = np.zeros((len(columns), condition.rank))
    values, vectors[columns] = signed_pairs(core, sign, condition)
    return np.ldexp(values, 2 * scale), vectors
