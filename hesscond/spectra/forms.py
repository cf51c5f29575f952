"""Forms of a symmetric matrix: a matrix, a factor, its dual, summed entries, or products alone."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from numbers import Real

import numpy as np
import torch
from scipy.sparse import issparse

from hesscond.errors import MatrixError
from hesscond.operators import (
    ApproximateInverse,
    Congruence,
    LinearOperator,
    Subspace,
    SymmetricOperator,
    as_operator,
)
from hesscond.operators.threads import few_threads
from hesscond.spectra import reductions
from hesscond.spectra.condition import ConditionNumber, unresolved, zero_matrix
from hesscond.spectra.matrices import as_array, as_matrix, dense
from hesscond.spectra.solvers import base

#: Operators up to this order are formed: as many products, and an eigendecomposition of up to two minutes.
DENSE_ORDER = 12_000
#: The same where an iteration can be expected to be quicker: positive semidefinite, with an approximate inverse.
QUICK_ORDER = 1000
#: Matrices of the order of a formed one that are held at a time for its eigenvalues, itself included.
MATRICES = 3


@dataclass(frozen=True, eq=False)
class FactorForm(base.Form):
    """Form of H = FᵀF, or Fᵀ diag(signs) F."""

    factor: object  # F (m, n), array or tensor
    signs: object | None = None  # (m,) of ±1; None: H ≥ 0, and as accurate as F
    #: bound of the error in F in the 2-norm, or in each column (n,) or entry (m, n)
    error: float | np.ndarray = 0.0
    rank_bound: base.RankBound | None = None  # returns an upper bound of the rank, if it is needed
    #: with ``signs``: d (n,) such that a relative change eps of the terms of H changes entry (k, l) by eps·d_k·d_l
    spread: np.ndarray | None = None

    def measured(self, rtol: float) -> ConditionNumber:
        if self.signs is None:
            return reductions.factor_condition(self.factor, rank_bound=self.rank_bound, rtol=rtol, error=self.error)
        signs = as_array(self.signs)
        if self.spread is None and ((signs < 0).all() or (signs > 0).all()):
            # ±H ≥ 0 is known as accurately as F
            kappa = replace(self, signs=None, least_rank=None).condition(rtol=rtol)
            return replace(kappa, negative=kappa.rank if (signs < 0).all() else 0)
        return reductions.signed_condition(
            self.factor, self.signs, rank_bound=self.rank_bound, rtol=rtol, error=self.error, spread=self.spread
        )

    def eigenvalues(self, condition: ConditionNumber) -> np.ndarray:
        """Nonzero eigenvalues (r,), descending, as many as ``condition`` of this form found."""
        if self.signs is not None:
            return self.eigenpairs(condition)[0]
        with few_threads(self.factor):
            return reductions.factor_eigenvalues(self.factor, condition)

    def eigenpairs(self, condition: ConditionNumber) -> tuple[np.ndarray, np.ndarray]:
        """Nonzero eigenvalues (r,), descending, and orthonormal eigenvectors (n, r)."""
        with few_threads(self.factor):
            if self.signs is None:
                return reductions.factor_eigenpairs(self.factor, condition)
            return reductions.signed_eigenpairs(self.factor, self.signs, condition)


@dataclass(frozen=True, eq=False)
class FactorStack(Sequence[FactorForm]):
    """Forms H_i = F_iᵀF_i of one shape on one device, which are decomposed in batches.

    ``rows`` are the F_i (u, m, n), or with ``roots`` (m, u) a common Ĥ (m, n) for F_i = diag(root_i) Ĥ. With ``signs``
    (m, u) of the roots, H_i = F_iᵀ diag(sign_i) F_i, and ``noises`` (u,) are as `FactorForm.spread`, ‖d_i‖². ``singly``
    measures a form that the batch does not resolve, if more is known of it.
    """

    rows: torch.Tensor
    roots: torch.Tensor | None = None
    signs: torch.Tensor | None = None
    noises: torch.Tensor | None = None
    errors: Sequence[float | np.ndarray] | None = None
    rank_bounds: Sequence[base.RankBound | None] | None = None
    singly: Callable[[int], ConditionNumber] | None = None

    def __len__(self) -> int:
        return len(self.rows) if self.roots is None else self.roots.shape[1]

    def __getitem__(self, index: int) -> FactorForm:  # type: ignore[override]
        if not 0 <= index < len(self):
            raise IndexError(index)
        return FactorForm(
            self.rows[index] if self.roots is None else self.rows * self.roots[:, index, None],
            signs=None if self.signs is None else self.signs[:, index],
            error=0.0 if self.errors is None else self.errors[index],
            rank_bound=None if self.rank_bounds is None else self.rank_bounds[index],
        )


@dataclass(frozen=True, eq=False)
class DualForm(base.Form):
    """Form of H = Fᵀ diag(signs) F for F (m, n), m ≤ n, with too many columns to keep."""

    #: returns FFᵀ (m, m) and a bound of its error in the 2-norm
    gram: Callable[[], tuple[torch.Tensor, float]]
    #: returns R (m, m) with RᵀR = FFᵀ and bounds of the error in each column in the 2-norm
    triangular: Callable[[], tuple[torch.Tensor, np.ndarray]]
    order: int  # n
    rank_bound: base.RankBound
    signs: torch.Tensor | None = None  # (m,) of ±1; None: H ≥ 0
    #: with ``signs``: change of H by a relative change eps of its terms, divided by eps, in the 2-norm
    noise: float = 0.0
    #: returns F itself, if it fits, where the dual does not resolve κ: its errors are bounded column by column
    factor: Callable[[], FactorForm] | None = None
    work: float = 0.0  # floating-point operations of ``triangular``, if they may be many


@dataclass(frozen=True, eq=False)
class SummedForm(base.Form):
    """Form of H itself, with each entry the sum of ``terms`` products."""

    matrix: object  # H (n, n), array or tensor
    #: d (n,) such that a relative change eps of the products changes entry (i, j) by eps·d_i·d_j
    spread: object
    terms: int  # number of products summed up for an entry
    graded: bool = True  # whether there is memory for Jacobi's method
    rank_bound: base.RankBound | None = None

    def measured(self, rtol: float) -> ConditionNumber:
        H, spread = as_matrix(self.matrix), as_array(self.spread)
        return reductions.rounded_condition(H, spread, self.rank_bound, terms=self.terms, rtol=rtol, graded=self.graded)


@dataclass(frozen=True)
class SolverLimits:
    """Limits of an iteration."""

    products: int = 2000  # for the smallest nonzero eigenvalue
    memory: int | None = None  # bytes for its vectors
    #: operators up to these orders are formed, up to the second where an iteration is expected to be quicker
    dense_order: int = DENSE_ORDER
    quick_order: int = QUICK_ORDER
    seed: int = 0
    #: products that bound κ from below; None: both ends are computed
    bounding: int | None = None

    def forms(self, order: int) -> bool:
        """Whether the matrix of an operator is formed."""
        return order <= self.dense_order and self.holds(order)

    def holds(self, order: int, matrices: int = MATRICES) -> bool:
        """Whether the memory holds this number of matrices, by default that of a dense decomposition."""
        return self.memory is None or 8 * matrices * order**2 <= self.memory


@dataclass(frozen=True)
class SolverHints:
    """Null space, preconditioner and coordinates that a solver uses where they are known."""

    null_space: Subspace | None = None  # None: ``operator.null_space``
    inverse: ApproximateInverse | None = None  # for the smallest eigenvalue
    #: Z (n, k) with orthonormal columns, whose complement is null too; the other facts are then in its coordinates
    coordinates: LinearOperator | None = None


@dataclass(frozen=True, eq=False)
class ProductForm(base.Form):
    """Form of an operator, known by its products.

    Up to ``limits.dense_order`` the matrix is formed and measured as any other, its asymmetry taken for the rounding
    of the products. Beyond, λ_max comes from `lanczos` and λ_min⁺ from `smallest_nonzero`; the ``rank_decision`` is
    then ``"iterative"``. If the iteration does not converge, κ is unresolved, with a lower bound from the smallest
    eigenvalue that was distinguished from zero, and ``rank`` counts the eigenvalues that were.
    """

    operator: SymmetricOperator
    known: Callable[[], SolverHints] = field(default_factory=lambda: SolverHints)
    limits: SolverLimits = field(default_factory=SolverLimits)

    @cached_property
    def hints(self) -> SolverHints:
        """Null space and preconditioner of the operator, as far as they are known beforehand."""
        return self.known()

    @cached_property
    def A(self) -> SymmetricOperator:
        """Operator in the coordinates of the hints."""
        Z = self.hints.coordinates
        return self.operator if Z is None else Congruence(self.operator, Z)

    @cached_property
    def null_space(self) -> Subspace | None:
        """Known null space of A."""
        return self.A.null_space if self.hints.null_space is None else self.hints.null_space

    @cached_property
    def formed(self) -> bool:
        """Whether the matrix of A is formed."""
        quick = self.A.psd and self.hints.inverse is not None
        limit = self.limits.quick_order if quick else self.limits.dense_order
        return self.A.order <= limit and self.limits.holds(self.A.order)

    def measured(self, rtol: float) -> ConditionNumber:
        if self.null_space is not None and self.null_space.dimension == self.A.order:
            return zero_matrix(self.operator.order)
        return super().measured(rtol)

    def doubted(self, kappa: ConditionNumber) -> ConditionNumber:
        """Return ``kappa``, unresolved if it has rank 0: the asymmetry of products does not measure their terms."""
        return kappa if kappa.rank or kappa.is_zero else unresolved(kappa, kappa.cause)


def condition_number(
    matrix: object | None = None,
    *,
    factor: object | None = None,
    rtol: float = 1e-12,
    error: float = 0.0,
) -> ConditionNumber:
    """κ of a matrix or an operator, or of FᵀF from its factor F.

    Parameters
    ----------
    matrix : (m, n) array, tensor or scipy sparse matrix, or an operator
        An exactly symmetric matrix is measured by |λ|, any other by its singular values. An operator (of ours, of
        curvlinops, a scipy ``LinearOperator``) must be symmetric.
    factor : (m, n) array or tensor
        F; κ is that of FᵀF, computed from F.
    rtol
        Relative width of κ's interval at which the cheaper solver is accepted; larger is faster. Operators whose
        matrix is not formed are iterated on to 1e-8 at best.
    error
        Absolute bound, in the 2-norm, of the error already in the matrix or factor. With 0 it is taken as exact: if
        the size of its values does not decide how many are zero, its exact rank does (up to an order of about 1,000).

    Raises
    ------
    MatrixError
        Neither or both given; not a finite, non-empty real matrix of doubles; a sparse one too large to factor densely;
        ``rtol`` or ``error`` is none.

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
        raise MatrixError("give a matrix or factor=F, and not both")
    for name, value in (("rtol", rtol), ("error", error)):
        if not isinstance(value, Real) or not 0 <= value < math.inf:
            raise MatrixError(f"{name}={value!r} is not a finite number of at least 0")
    if matrix is None:
        return reductions.factor_condition(dense(factor), rtol=rtol, error=error, exact=error == 0)
    entries = isinstance(matrix, (list, tuple)) or hasattr(matrix, "__array__") or issparse(matrix)
    if not entries and hasattr(matrix, "shape"):
        return ProductForm(as_operator(matrix)).measured(max(rtol, 1e-8))
    array = as_matrix(dense(matrix))
    symmetric = array.shape[0] == array.shape[1] and np.array_equal(array, array.T)
    measure = reductions.symmetric_condition if symmetric else partial(reductions.factor_condition, power=1)
    return measure(array, rtol=rtol, error=error, exact=error == 0)
