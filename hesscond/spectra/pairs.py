"""Eigenvalues with their eigenvectors, of H = FᵀF or FᵀJF from F."""

from __future__ import annotations

import numpy as np

from hesscond.spectra.condition import ConditionNumber
from hesscond.spectra.factored import as_matrix, jacobi_svd, scaled_core
from hesscond.spectra.signed import prepared, signed_pairs


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


def signed_eigenpairs(factor: object, signs: object, condition: ConditionNumber) -> tuple[np.ndarray, np.ndarray]:
    """The nonzero eigenvalues (r,) of Fᵀ diag(signs) F, descending, and orthonormal eigenvectors (n, r).

    Parameters
    ----------
    factor : (m, n) array or tensor
    signs : (m,) array or tensor of ±1
    condition
        What `signed_condition` returned for them; its rank is taken over, and Jacobi is used if it was.
    """
    core, sign, scale, _, columns = prepared(factor, signs)
    vectors = np.zeros((len(columns), condition.rank))
    values, vectors[columns] = signed_pairs(core, sign, condition)
    return np.ldexp(values, 2 * scale), vectors
