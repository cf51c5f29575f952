"""Eigenvalues with their eigenvectors, of H = FᵀF or FᵀJF from F."""

from __future__ import annotations

import numpy as np
from scipy.linalg import qr

from hesscond.spectra.condition import ConditionNumber
from hesscond.spectra.factored import as_array, as_matrix, jacobi_svd, scaled_core
from hesscond.spectra.signed import small_form


def factor_eigenpairs(factor: object, condition: ConditionNumber) -> tuple[np.ndarray, np.ndarray]:
    """The nonzero eigenvalues (r,) of FᵀF, descending, and orthonormal eigenvectors (n, r).

    Parameters
    ----------
    factor : (m, n) array or tensor
    condition
        What `factor_condition` returned for this factor; its rank is taken over, and Jacobi is used if it was.
    """
    matrix = as_matrix(factor)
    core, scale, columns, transposed = scaled_core(matrix)
    rank = condition.rank
    vectors = np.zeros((matrix.shape[1], rank))
    if rank == 0:
        return np.zeros(0), vectors
    if condition.solver.startswith("Jacobi"):
        values, u, v = jacobi_svd(core)
    else:
        u, values, vt = np.linalg.svd(core, full_matrices=False)
        v = vt.T
    vectors[columns] = (u if transposed else v)[:, :rank]
    return np.ldexp(values[:rank] ** 2, 2 * scale), vectors


def signed_eigenpairs(factor: object, signs: object, rank: int) -> tuple[np.ndarray, np.ndarray]:
    """The ``rank`` eigenvalues of Fᵀ diag(signs) F of largest size, descending, and orthonormal eigenvectors.

    Parameters
    ----------
    factor : (m, n) array or tensor
    signs : (m,) array or tensor of ±1
    rank
        How many.
    """
    matrix, sign = as_matrix(factor), np.ravel(as_array(signs)).astype(float)
    vectors = np.zeros((matrix.shape[1], rank))
    if rank == 0:
        return np.zeros(0), vectors
    rows, columns = matrix.any(1), matrix.any(0)
    core, sign = matrix[rows][:, columns], sign[rows]
    scale = int(np.frexp(np.abs(core).max())[1])
    core = np.ldexp(core, -scale)
    small, _ = small_form(core, sign)
    values, inner = np.linalg.eigh(small)
    largest = np.argsort(-np.abs(values), kind="stable")[:rank]
    kept = largest[np.argsort(-values[largest], kind="stable")]
    if core.shape[0] < core.shape[1]:
        inner = qr(core.T, mode="economic", check_finite=False)[0] @ inner
    vectors[columns] = inner[:, kept]
    return np.ldexp(values[kept], 2 * scale), vectors
