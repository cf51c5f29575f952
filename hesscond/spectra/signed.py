"""Spectra of indefinite H = Fᵀ J F with J = diag(±1), from F and the signs."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
from scipy.linalg import qr

from hesscond.spectra.condition import NOISE, ConditionNumber, resolve, zero_matrix
from hesscond.spectra.factored import EPS, as_array, as_matrix, error_factor
from hesscond.spectra.structure import rank_bound as structural_rank_bound
from hesscond.spectra.symmetric import eigenvalue_values


def small_form(factor: np.ndarray, signs: np.ndarray) -> tuple[np.ndarray, float]:
    """A symmetric matrix with the nonzero eigenvalues of FᵀJF, of the smaller of F's two orders, and its error.

    Parameters
    ----------
    factor : (m, n) array
    signs : (m,) array of ±1

    Returns
    -------
    matrix : (min(m, n), min(m, n)) array
        FᵀJF, or RJRᵀ with Fᵀ = QR where F is wide.
    error
        Bound, in the 2-norm, of the rounding committed: c·eps·‖F‖², which cancellation in the sum may leave
        large against the matrix itself.
    """
    error = error_factor(*factor.shape) * EPS * float(np.linalg.norm(factor, 2)) ** 2
    if factor.shape[0] < factor.shape[1]:
        (R,) = qr(factor.T, mode="r", check_finite=False)
        R = R[: len(signs)]
        matrix = (R * signs) @ R.T
    else:
        matrix = factor.T @ (factor * signs[:, None])
    return (matrix + matrix.T) / 2, error


def prepared(factor: object, signs: object) -> tuple[np.ndarray, np.ndarray, int]:
    """The nonzero rows and columns of F scaled to size about 1, the signs, and the power of two taken out."""
    matrix, sign = as_matrix(factor), np.ravel(as_array(signs)).astype(float)
    active = matrix.any(1)
    matrix, sign = matrix[active][:, matrix.any(0)], sign[active]
    scale = int(np.frexp(np.abs(matrix).max())[1]) if matrix.size else 0
    return np.ldexp(matrix, -scale), sign, scale


def signed_condition(
    factor: object,
    signs: object,
    *,
    rank_bound: Callable[[], int] | None = None,
    rtol: float = 1e-8,
    error: float = 0.0,
    noise: float = 0.0,
) -> ConditionNumber:
    """κ = |λ|_max / |λ|_min of H = Fᵀ diag(signs) F, with its number of negative eigenvalues.

    Indefinite, H has no factor to work on, so its smallest |λ| is known to c·eps·‖F‖² only: what lies below is
    unresolved.

    Parameters
    ----------
    factor : (m, n) array or tensor
    signs : (m,) array or tensor of ±1
    rank_bound
        Finds an upper bound of the rank, as in `factor_condition`.
    rtol
        Relative width of κ's interval that is good enough.
    error
        Absolute bound, in the 2-norm, of the error already in F.
    noise
        What a relative change eps of what H was made from changes it by, in the 2-norm.

    Raises
    ------
    MatrixError
        Not a finite, non-empty matrix.
    """
    order = as_matrix(factor).shape[1]
    core, sign, scale = prepared(factor, signs)
    if core.size == 0:
        return zero_matrix(order)
    matrix, rounding = small_form(core, sign)
    floor = rounding / error_factor(*core.shape) * NOISE
    given = float(np.ldexp(error, -scale))
    rounding += given * (2 * float(np.linalg.norm(core, 2)) + given)
    unit = float(np.ldexp(noise, -2 * scale))
    rounding += error_factor(*core.shape) * unit
    floor += NOISE * unit

    known = [] if rank_bound is None else [rank_bound]
    return resolve(
        # no other solver is better than the rounding that the small matrix has already
        [partial(eigenvalue_values, matrix, rounding, floor)],
        order=order,
        bounds=[*known, partial(structural_rank_bound, core)],
        scale=2 * scale,
        rtol=rtol,
    )


def signed_eigenvalues(factor: object, signs: object, rank: int) -> np.ndarray:
    """The ``rank`` eigenvalues of Fᵀ diag(signs) F of largest size, descending."""
    core, sign, scale = prepared(factor, signs)
    if rank == 0:
        return np.zeros(0)
    values = np.linalg.eigvalsh(small_form(core, sign)[0])
    largest = values[np.argsort(-np.abs(values), kind="stable")[:rank]]
    return np.ldexp(np.sort(largest)[::-1], 2 * scale)
