"""The condition number of whatever is given: a dense or sparse matrix, a factor, or an operator."""

from __future__ import annotations

import math
from functools import partial
from numbers import Integral, Real

import numpy as np
from scipy.sparse import issparse

from hesscond.errors import MatrixError
from hesscond.operators import as_operator
from hesscond.spectra.condition import ConditionNumber
from hesscond.spectra.factored import factor_condition
from hesscond.spectra.matrices import as_matrix, dense
from hesscond.spectra.matrix_free import operator_condition
from hesscond.spectra.symmetric import general_condition, symmetric_condition


def condition_number(
    matrix: object | None = None,
    *,
    factor: object | None = None,
    rank_bound: int | None = None,
    rtol: float = 1e-12,
    error: float = 0.0,
) -> ConditionNumber:
    """κ of a matrix or an operator, or of FᵀF from its factor F.

    Parameters
    ----------
    matrix : (m, n) array, tensor or scipy sparse matrix, or an operator
        An exactly symmetric matrix is measured by |λ|, any other by its singular values. An operator (of ours, of
        curvlinops, a scipy ``LinearOperator``) must be symmetric: see `operator_condition`.
    factor : (m, n) array or tensor
        F; κ is that of FᵀF, computed from F.
    rank_bound
        An upper bound of the rank that is known from elsewhere.
    rtol
        Relative width of κ's interval at which the cheaper solver is accepted; larger is faster. Operators whose
        matrix is not formed are iterated on to 1e-8 at best.
    error
        Absolute bound, in the 2-norm, of the error already in the matrix or factor. With 0 it is taken as exact: if
        the size of its values does not decide how many are zero, its exact rank does (up to an order of about 1,000).

    Returns
    -------
    ConditionNumber

    Raises
    ------
    MatrixError
        Neither or both given; not a finite, non-empty real matrix of doubles; a sparse one too large to factor densely;
        ``rtol``, ``error`` or ``rank_bound`` is none.

    Examples
    --------
    >>> import numpy as np
    >>> kappa = condition_number(np.diag([4.0, -2.0, 1e-12, 0.0]))
    >>> kappa.value, kappa.rank, kappa.nullity, kappa.negative
    (4000000000000.0, 3, 1, 1)
    >>> print(condition_number(factor=np.array([[1.0, 0.0, 0.0], [0.0, 1e-9, 0.0]])))
    κ = 1e+18 (rank 2 of 3, 0 negative; Jacobi SVD)
    """
    if (matrix is None) == (factor is None):
        raise MatrixError("give either a matrix or factor=F, not both")
    for name, value in (("rtol", rtol), ("error", error)):
        if not isinstance(value, Real) or not 0 <= value < math.inf:
            raise MatrixError(f"{name}={value!r} is not a finite number of at least 0")
    if rank_bound is not None and (not isinstance(rank_bound, Integral) or rank_bound < 1):
        raise MatrixError(f"rank_bound={rank_bound!r} bounds the rank of no matrix but zero: give 1 or more, or None")
    if matrix is None:
        bound = None if rank_bound is None else partial(int, rank_bound)
        return factor_condition(dense(factor), rank_bound=bound, rtol=rtol, error=error, exact=error == 0)
    if is_operator(matrix):
        return operator_condition(as_operator(matrix), rtol=max(rtol, 1e-8))
    array = as_matrix(dense(matrix))
    symmetric = array.shape[0] == array.shape[1] and np.array_equal(array, array.T)
    return (symmetric_condition if symmetric else general_condition)(
        array, rank_bound=rank_bound, rtol=rtol, error=error, exact=error == 0
    )


def is_operator(matrix: object) -> bool:
    """Whether ``matrix`` is known by its products only."""
    entries = isinstance(matrix, (list, tuple)) or hasattr(matrix, "__array__") or issparse(matrix)
    return not entries and hasattr(matrix, "shape")
