"""Forms of a symmetric matrix, a factor, summed entries or products alone, and κ by the solver that suits each.

`conditions` measures several forms, and decomposes together those of one shape.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from numbers import Integral, Real
from typing import overload

import numpy as np
import torch
from scipy.sparse import issparse

from hesscond.causes import NOTHING, Cause
from hesscond.errors import MatrixError
from hesscond.operators import SymmetricOperator, as_operator
from hesscond.spectra.condition import ConditionNumber, unresolved, zero_matrix
from hesscond.spectra.matrices import as_array, as_matrix, dense
from hesscond.spectra.solvers.batched import scaled_gram_conditions, stacked_conditions
from hesscond.spectra.solvers.factored import (
    dual_condition,
    factor_condition,
    factor_conditions,
    factor_eigenpairs,
    factor_eigenvalues,
)
from hesscond.spectra.solvers.matrix_free import SolverHints, SolverLimits, operator_condition
from hesscond.spectra.solvers.signed import (
    dual_signed_condition,
    signed_condition,
    signed_eigenpairs,
    signed_eigenvalues,
)
from hesscond.spectra.solvers.symmetric import general_condition, rounded_condition, symmetric_condition

RankBound = Callable[[], int]
#: A matrix is zero if its eigenvalues are this many times below the bound of its rounding; unresolved if nearer.
SURE = 4.0


class Form(ABC):
    """Symmetric matrix H as far as it is known.

    Attributes
    ----------
    least_rank
        Function that finds the rank that H has unless entries were lost to underflow: with a smaller rank, κ is
        unresolved. None: no entries can have been lost.
    lost
        Cause of lost entries.
    """

    least_rank: RankBound | None = None
    lost: Cause = NOTHING

    @abstractmethod
    def _measured(self, rtol: float) -> ConditionNumber:
        """κ(H) by the solver that suits the form, with no entry lost."""

    def condition(self, *, rtol: float = 1e-8) -> ConditionNumber:
        """Return κ(H), with an interval no wider than ``rtol`` if a more expensive solver can achieve it."""
        return self.doubted(self._measured(rtol))

    def doubted(self, found: ConditionNumber) -> ConditionNumber:
        """Return ``found``; unresolved if zeros may be underflow, zero if all values are of the size of rounding."""
        decided = found.resolved or found.rank == 0
        lost = self.least_rank is not None and decided and found.rank < self.least_rank()
        if lost:
            return unresolved(found, self.lost)
        return zero_if_rounding(found.because(found.cause.joined(self.lost)))


def zero_if_rounding(found: ConditionNumber) -> ConditionNumber:
    """Return ``found``, or zero if no eigenvalue exceeds the rounding of the terms that were summed up."""
    if found.rank or SURE * found.lambda_max > found.cutoff > 0:
        return found
    return replace(zero_matrix(found.nullity), cutoff=found.cutoff)


@dataclass(frozen=True, eq=False)
class FactorForm(Form):
    """Form of H = FᵀF, or Fᵀ diag(signs) F."""

    factor: object  # F (m, n), array or tensor
    signs: object | None = None  # (m,) of ±1; None: H ≥ 0, and as accurate as F
    #: bound of the error in F in the 2-norm, or in each column (n,) or entry (m, n)
    error: float | np.ndarray = 0.0
    rank_bound: RankBound | None = None  # returns an upper bound of the rank, if it is needed
    #: with ``signs``: d (n,) such that a relative change eps of the terms of H changes entry (k, l) by eps·d_k·d_l
    spread: np.ndarray | None = None
    least_rank: RankBound | None = None
    lost: Cause = NOTHING

    def _measured(self, rtol: float) -> ConditionNumber:
        if self.signs is None:
            return factor_conditions([self.factor], rank_bounds=[self.rank_bound], rtol=rtol, errors=[self.error])[0]
        if self.spread is None and (as_array(self.signs) < 0).all():
            # −H ≥ 0 is known as accurately as F
            found = replace(self, signs=None)._measured(rtol)
            return replace(found, negative=found.rank)
        return signed_condition(
            self.factor, self.signs, rank_bound=self.rank_bound, rtol=rtol, error=self.error, spread=self.spread
        )

    def eigenvalues(self, condition: ConditionNumber) -> np.ndarray:
        """Nonzero eigenvalues (r,), descending, as many as ``condition`` of this form found."""
        if self.signs is None:
            return factor_eigenvalues(self.factor, condition)
        return signed_eigenvalues(self.factor, self.signs, condition)

    def eigenpairs(self, condition: ConditionNumber) -> tuple[np.ndarray, np.ndarray]:
        """Nonzero eigenvalues (r,), descending, and orthonormal eigenvectors (n, r)."""
        if self.signs is None:
            return factor_eigenpairs(self.factor, condition)
        return signed_eigenpairs(self.factor, self.signs, condition)


class FactorStack(Sequence[FactorForm]):
    """Forms H_i = F_iᵀF_i of one shape on one device, which are decomposed in batches.

    ``rows`` are the F_i (u, m, n), or with ``roots`` (m, u) a common Ĥ (m, n) for F_i = diag(root_i) Ĥ. ``singly``
    measures a form that the batch does not resolve, if more is known of it.
    """

    def __init__(
        self,
        rows: torch.Tensor,
        roots: torch.Tensor | None = None,
        *,
        errors: Sequence[float | np.ndarray] | None = None,
        rank_bounds: Sequence[RankBound | None] | None = None,
        singly: Callable[[int], ConditionNumber] | None = None,
    ) -> None:
        self.rows, self.roots, self.errors, self.rank_bounds = rows, roots, errors, rank_bounds
        self.singly = singly

    def __len__(self) -> int:
        return len(self.rows) if self.roots is None else self.roots.shape[1]

    @overload
    def __getitem__(self, index: int) -> FactorForm: ...
    @overload
    def __getitem__(self, index: slice) -> list[FactorForm]: ...
    def __getitem__(self, index: int | slice) -> FactorForm | list[FactorForm]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        if not -len(self) <= index < len(self):
            raise IndexError(index)
        return FactorForm(
            self.rows[index] if self.roots is None else self.rows * self.roots[:, index, None],
            error=0.0 if self.errors is None else self.errors[index],
            rank_bound=None if self.rank_bounds is None else self.rank_bounds[index],
        )

    def conditions(self, rtol: float) -> list[ConditionNumber]:
        """κ of each form, decomposed in batches."""
        if self.roots is None:
            return stacked_conditions(
                self.rows, rtol=rtol, rank_bounds=self.rank_bounds, errors=self.errors, singly=self.singly
            )
        return scaled_gram_conditions(
            self.rows, self.roots, rtol=rtol, rank_bounds=self.rank_bounds, errors=self.errors
        )


@dataclass(frozen=True, eq=False)
class DualForm(Form):
    """Form of H = Fᵀ diag(signs) F for F (m, n), m ≤ n, with too many columns to keep."""

    #: returns FFᵀ (m, m) and a bound of its error in the 2-norm
    gram: Callable[[], tuple[torch.Tensor, float]]
    #: returns R (m, m) with RᵀR = FFᵀ and bounds of the error in each column in the 2-norm
    triangular: Callable[[], tuple[torch.Tensor, np.ndarray]]
    order: int  # n
    rank_bound: RankBound
    signs: torch.Tensor | None = None  # (m,) of ±1; None: H ≥ 0
    #: with ``signs``: change of H by a relative change eps of its terms, divided by eps, in the 2-norm
    noise: float = 0.0
    least_rank: RankBound | None = None
    lost: Cause = NOTHING
    #: returns F itself, if it fits, where the dual does not resolve κ: its errors are bounded column by column
    factor: Callable[[], FactorForm] | None = None

    def _measured(self, rtol: float) -> ConditionNumber:
        found = self._dual(rtol)
        if found.resolved or self.factor is None:
            return found
        finer = self.factor().condition(rtol=rtol)
        return finer if finer.resolved else found

    def _dual(self, rtol: float) -> ConditionNumber:
        if self.signs is None:
            return dual_condition(self.gram, self.triangular, order=self.order, rank_bound=self.rank_bound, rtol=rtol)
        return dual_signed_condition(
            self.triangular, self.signs, order=self.order, rank_bound=self.rank_bound, rtol=rtol, noise=self.noise
        )


@dataclass(frozen=True, eq=False)
class SummedForm(Form):
    """Form of H itself, with each entry the sum of ``terms`` products."""

    matrix: object  # H (n, n), array or tensor
    #: d (n,) such that a relative change eps of the products changes entry (i, j) by eps·d_i·d_j
    spread: object
    terms: int  # number of products summed up for an entry
    least_rank: RankBound | None = None
    lost: Cause = NOTHING
    graded: bool = True  # whether there is memory for Jacobi's method

    def _measured(self, rtol: float) -> ConditionNumber:
        return rounded_condition(
            as_matrix(self.matrix), as_array(self.spread), terms=self.terms, rtol=rtol, graded=self.graded
        )


@dataclass(frozen=True, eq=False)
class ProductForm(Form):
    """Form of an operator, known by its products."""

    operator: SymmetricOperator
    known: Callable[[], SolverHints] = field(default_factory=lambda: SolverHints)
    limits: SolverLimits | None = None

    def _measured(self, rtol: float) -> ConditionNumber:
        return operator_condition(self.operator, known=self.known, rtol=rtol, limits=self.limits)

    def doubted(self, found: ConditionNumber) -> ConditionNumber:
        """Return ``found``, unresolved if it has rank 0: the asymmetry of products does not measure their terms."""
        return found if found.rank or found.is_zero else unresolved(found, found.cause)


def conditions(forms: Sequence[Form], *, rtol: float = 1e-8) -> list[ConditionNumber]:
    """κ of several forms, as by `Form.condition`; factors of one shape without signs are decomposed together.

    Examples
    --------
    >>> F = np.array([[1.0, 0.0, 0.0], [0.0, 1e-3, 0.0]])
    >>> [round(kappa.value) for kappa in conditions([FactorForm(F), FactorForm(F, signs=[1.0, -1.0])])]
    [1000000, 1000000]
    """
    if isinstance(forms, FactorStack):
        return [zero_if_rounding(found) for found in forms.conditions(rtol)]
    together = {k: form for k, form in enumerate(forms) if isinstance(form, FactorForm) and form.signs is None}
    found = factor_conditions(
        [form.factor for form in together.values()],
        rank_bounds=[form.rank_bound for form in together.values()],
        rtol=rtol,
        errors=[form.error for form in together.values()],
    )
    measured = dict(zip(together, found, strict=True))
    return [
        together[k].doubted(measured[k]) if k in together else form.condition(rtol=rtol) for k, form in enumerate(forms)
    ]


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
        Known upper bound of the rank.
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
    κ = 1e+18 (rank 2 of 3, 0 negative; certified SVD)
    """
    if (matrix is None) == (factor is None):
        raise MatrixError("give either a matrix or factor=F, not both")
    for name, value in (("rtol", rtol), ("error", error)):
        if not isinstance(value, Real) or not 0 <= value < math.inf:
            raise MatrixError(f"{name}={value!r} is not a finite number of at least 0")
    if rank_bound is not None and (not isinstance(rank_bound, Integral) or rank_bound < 1):
        raise MatrixError(f"rank_bound={rank_bound!r} bounds the rank of no matrix but zero: give 1 or more, or None")
    bound = None if rank_bound is None else partial(int, rank_bound)
    if matrix is None:
        return factor_condition(dense(factor), rank_bound=bound, rtol=rtol, error=error, exact=error == 0)
    if is_operator(matrix):
        return operator_condition(as_operator(matrix), rtol=max(rtol, 1e-8))
    array = as_matrix(dense(matrix))
    symmetric = array.shape[0] == array.shape[1] and np.array_equal(array, array.T)
    return (symmetric_condition if symmetric else general_condition)(
        array, rank_bound=bound, rtol=rtol, error=error, exact=error == 0
    )


def is_operator(matrix: object) -> bool:
    """Whether ``matrix`` is known by its products only."""
    entries = isinstance(matrix, (list, tuple)) or hasattr(matrix, "__array__") or issparse(matrix)
    return not entries and hasattr(matrix, "shape")
