"""Spectra of H = FᵀF from the factor F, never from the squared matrix unless a bound says that suffices."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
import torch
from scipy.linalg import lapack

from hesscond.errors import MatrixError
from hesscond.spectra.condition import ConditionNumber, Values, resolve, zero_matrix
from hesscond.spectra.structure import rank_bound as structural_rank_bound

EPS = float(np.finfo(float).eps)

#: Below this relative width of κ's interval the Gram form is not tried: it would not be reached.
GRAM_RTOL = 1e-7


def error_factor(m: int, n: int) -> float:
    """The constant c of the bounds c·eps·(norm): √(mn), the probabilistic growth of rounding errors.

    The worst-case constants of backward error analysis grow like m·n and are never seen; with independent
    rounding errors the growth is their square root (Higham and Mary, SIAM J. Sci. Comput. 41, 2019).
    """
    return max(16.0, float(np.sqrt(m * n)))


def as_matrix(matrix: object) -> np.ndarray:
    """A finite, non-empty, two-dimensional float64 array of ``matrix`` (a torch tensor is copied to the host).

    Raises
    ------
    MatrixError
        Not two-dimensional, empty, complex, or with NaN or infinite entries.
    """
    if hasattr(matrix, "detach"):
        matrix = matrix.detach().to("cpu").numpy()
    array = np.asarray(matrix)
    if np.iscomplexobj(array):
        raise MatrixError("complex matrices are not supported: give a real matrix")
    try:
        array = np.asarray(array, dtype=float)
    except (TypeError, ValueError):
        raise MatrixError(f"expected a matrix of real numbers, got {type(matrix).__name__}") from None
    if array.ndim != 2 or 0 in array.shape:
        raise MatrixError(f"expected a non-empty matrix with two dimensions, got shape {array.shape}")
    if not np.isfinite(array).all():
        raise MatrixError("the matrix has NaN or infinite entries: its condition number is not defined")
    return array


def scaled_core(factor: np.ndarray) -> tuple[np.ndarray, int]:
    """The factor without zero rows and columns, tall, divided by 2**scale so that its largest entry is near 1.

    Zero rows and columns change no nonzero singular value; the division is exact.

    Returns
    -------
    core : (m, n) array in Fortran order, m ≥ n; (0, 0) for a zero factor
    scale : int
    """
    largest = np.abs(factor).max()
    if largest == 0:
        return np.zeros((0, 0)), 0
    scale = int(np.frexp(largest)[1])
    nonzero = factor != 0
    rows, columns = nonzero.any(1), nonzero.any(0)
    if not (rows.all() and columns.all()):
        factor = factor[np.ix_(rows, columns)]
    if factor.shape[0] < factor.shape[1]:
        factor = factor.T
    return np.asfortranarray(np.ldexp(factor, -scale)), scale


def gram_values(core: np.ndarray, error: float = 0.0) -> Values:
    """Eigenvalues of coreᵀcore from the formed Gram matrix, with normwise error bounds.

    Through torch: its LAPACK is the faster one here, and shares the threads of the training around it.
    """
    tall = torch.from_numpy(core)
    values = torch.linalg.eigvalsh(tall.T @ tall).flip(0).clamp_min_(0).numpy()
    bound = error_factor(*core.shape) * EPS * values[0] + error * (2 * values[0] ** 0.5 + error)
    return Values(values, np.full(len(values), bound), 1, "Gram")


def svd_values(core: np.ndarray, error: float = 0.0, *, power: int = 2) -> Values:
    """Singular values of ``core`` with the normwise error bound c·eps·σ_max + ``error``."""
    _, values, _, info = lapack.dgesdd(core, compute_uv=0)
    if info != 0:
        raise np.linalg.LinAlgError("dgesdd did not converge")
    bound = error_factor(*core.shape) * EPS * values[0] + error
    return Values(values, np.full(len(values), bound), power, "SVD")


def jacobi_values(core: np.ndarray, error: float = 0.0, *, power: int = 2) -> Values:
    """Singular values of ``core`` by one-sided Jacobi, with the bounds of `entrywise_errors`."""
    values, u, v = jacobi_svd(core)
    return Values(values, entrywise_errors(core, values, u, v) + error, power, "Jacobi SVD")


def jacobi_svd(core: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Singular values (descending) and vectors (columns of u (m, n) and v (n, n)) of a tall core by dgejsv.

    Source: Drmač and Veselić, SIAM J. Matrix Anal. Appl. 29 (2008), 1322-1362; rows pivoted (JOBA = 'F').
    """
    sva, u, v, work, _, info = lapack.dgejsv(core, joba=2, jobu=0, jobv=0, jobr=0, jobt=0, jobp=0)
    if info != 0:
        raise np.linalg.LinAlgError("dgejsv did not converge")
    values = sva * (work[0] / work[1])
    order = np.argsort(-values, kind="stable")
    return values[order], u[:, : core.shape[1]][:, order], v[:, order]


def entrywise_errors(core: np.ndarray, values: np.ndarray, u: np.ndarray, v: np.ndarray) -> np.ndarray:
    r"""Error bounds (n,) of the singular values of a graded matrix, as sharp as its entries determine them.

    Jacobi computes every σ_k = u_kᵀ A v_k about as accurately as a relative perturbation eps of each single
    entry changes it, to first order eps·\|u_k\|ᵀ\|A\|\|v_k\|: that, times a constant, is the bound. It is 1e-15
    relative for D₁CD₂ with well-conditioned C, however far D₁ and D₂ spread; and a σ_k below it is round-off of
    the entries themselves.
    """
    weights = np.einsum("ik,ik->k", np.abs(u), np.abs(core) @ np.abs(v))
    return error_factor(*core.shape) * EPS * np.maximum(weights, values)


def factor_condition(
    factor: object,
    *,
    rank_bound: int | Callable[[], int] | None = None,
    rtol: float = 1e-8,
    error: float = 0.0,
) -> ConditionNumber:
    """κ of H = FᵀF from the factor F: κ(H) = κ(F)², so float64 resolves κ(H) to 1e30.

    Three routes, cheapest first; the search stops where the error bound of one resolves κ to ``rtol``: the Gram
    matrix (only if ``rtol`` ≥ 1e-7), the singular values of F, and one-sided Jacobi, whose bounds are entry by
    entry and so survive any grading of rows and columns.

    Parameters
    ----------
    factor : (m, n) array or tensor
        F. H has order n.
    rank_bound
        An upper bound of the rank known from elsewhere, or a function that finds one (called only if the
        cheaper routes do not reach the smaller side of F). The pattern of F is used too.
    rtol
        Relative width of κ's interval that is good enough.
    error
        Absolute bound, in the 2-norm, of the error already in F (a triangular factor of a longer matrix, say).

    Raises
    ------
    MatrixError
        Not a finite, non-empty matrix.
    """
    matrix = as_matrix(factor)
    core, scale = scaled_core(matrix)
    if core.size == 0:
        return zero_matrix(matrix.shape[1])
    error = float(np.ldexp(error, -scale))
    limit = core.shape[1]
    if isinstance(rank_bound, int):
        limit = min(limit, rank_bound)
    routes = [partial(svd_values, core, error), partial(jacobi_values, core, error)]
    if rtol >= GRAM_RTOL:
        routes.insert(0, partial(gram_values, core, error))

    def sharpen() -> int:
        bound = structural_rank_bound(core)
        return min(bound, rank_bound()) if callable(rank_bound) else bound

    return resolve(routes, order=matrix.shape[1], limit=limit, sharpen=sharpen, scale=2 * scale, rtol=rtol)


def factor_eigenvalues(factor: object, condition: ConditionNumber) -> np.ndarray:
    """The nonzero eigenvalues of FᵀF, descending: as many as ``condition`` found.

    Parameters
    ----------
    factor : (m, n) array or tensor
    condition
        What `factor_condition` returned for this factor; its rank is taken over, and Jacobi is used if it was.
    """
    core, scale = scaled_core(as_matrix(factor))
    if condition.rank == 0:
        return np.zeros(0)
    values = (jacobi_values if condition.solver.startswith("Jacobi") else svd_values)(core).magnitudes
    return np.ldexp(values[: condition.rank] ** 2, 2 * scale)
