"""Singular values and eigenvalues with normwise bounds, from LAPACK, or cheaper from Gram matrices, which square κ."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hesscond.operators.threads import few_threads
from hesscond.spectra import condition
from hesscond.spectra.forms import FactorForm, FactorStack
from hesscond.spectra.matrices import as_array
from hesscond.spectra.solvers import base


@base.register
class SVD(base.Solver[base.SingularForm]):
    """Singular values of the core to c·eps·σ_max: κ(FᵀF) = κ(F)², so float64 resolves it to 1e30."""

    def cost(self, form: base.SingularForm) -> float:
        m, n = form.core.shape
        return 2 * m * n**2 + 2 * n**3

    def values(self, form: base.SingularForm, rtol: float) -> condition.Values:
        return form.normwise


@base.register
class Eigenvalues(base.Solver[base.EigenvalueForm]):
    """Eigenvalues of the core to c·eps·|λ|_max."""

    def cost(self, form: base.EigenvalueForm) -> float:
        return 4 / 3 * len(form.core) ** 3

    def values(self, form: base.EigenvalueForm, rtol: float) -> condition.Values:
        return base.eigenvalue_values(form.core, form.error, form.floor)


#: Below this relative width of κ's interval the Gram form is not tried, since it cannot reach it.
GRAM_RTOL = 1e-7

#: The order of matrices in a stack is a multiple of this: LAPACK rounds one that does not begin at a boundary of vector
#: registers otherwise, and results would depend on the place in the stack.
ALIGNED = 4


@base.register
class Gram(base.Solver[base.SingularForm]):
    """Eigenvalues of the formed Gram matrix of a core."""

    def fits(self, form: base.SingularForm, rtol: float) -> bool:
        return form.power == 2 and rtol >= GRAM_RTOL

    def cost(self, form: base.SingularForm) -> float:
        m, n = form.core.shape
        return m * n**2 + 4 / 3 * n**3

    def values(self, form: base.SingularForm, rtol: float) -> condition.Values:
        return from_gram_eigenvalues(base.eigenvalues_of(form.core.T @ form.core), form.core.shape, form.whole)


@base.register
class RowGrams(base.StackSolver):
    """Gram matrices of the rows of factors with no fewer columns than rows, all of one order at a time.

    A result does not depend on the other factors.
    """

    def conditions(self, forms: Sequence[base.Form], rtol: float) -> dict[int, condition.ConditionNumber]:
        wide: dict[int, dict[int, tuple[FactorForm, np.ndarray]]] = {}
        if rtol >= GRAM_RTOL and not isinstance(forms, FactorStack):
            for i, form in enumerate(forms):
                if isinstance(form, FactorForm) and form.signs is None:
                    matrix = as_array(form.factor)
                    if matrix.ndim == 2 and matrix.shape[1] >= len(matrix) > 0:
                        wide.setdefault(len(matrix), {})[i] = form, matrix
        kappas = {}
        for members in wide.values():
            values = gram_values_of([(matrix, form.error) for form, matrix in members.values()])
            for (i, (form, matrix)), spectrum in zip(members.items(), values, strict=True):
                if spectrum is not None:
                    result = condition.conclude(spectrum, order=matrix.shape[1], limit=len(matrix), scale=0)
                    if base.is_good_enough(result, rtol):
                        kappas[i] = form.doubted(result)
        return kappas


def gram_values_of(factors: Sequence[tuple[np.ndarray, float | np.ndarray]]) -> list[condition.Values | None]:
    """Values of factors with as many rows, and errors, from their Gram matrices; None near over- or underflow."""
    rows = len(factors[0][0])
    padding = -rows % ALIGNED
    grams = np.zeros((len(factors), rows + padding, rows + padding))
    with np.errstate(over="ignore", invalid="ignore"):
        for gram, (matrix, _) in zip(grams, factors, strict=True):
            np.matmul(matrix, matrix.T, out=gram[:rows, :rows])
    top = grams.diagonal(axis1=1, axis2=2).sum(1)
    # false for NaN too: the next solver will say what is wrong
    fit = np.flatnonzero((top > base.GRAM_RANGE[0]) & (top < base.GRAM_RANGE[1]))
    values: list[condition.Values | None] = [None] * len(factors)
    if len(fit):
        with few_threads(factors[0][0]):
            spectra = base.eigenvalues_of(grams[fit] if len(fit) < len(factors) else grams)
        for i, ascending in zip(fit.tolist(), spectra, strict=True):
            matrix, error = factors[i]
            whole = float(np.linalg.norm(error)) if np.ndim(error) else float(error)
            # rows of zeros have added as many zeros
            values[i] = from_gram_eigenvalues(ascending[padding:], matrix.shape, whole)
    return values


def from_gram_eigenvalues(ascending: np.ndarray, shape: tuple[int, int], error: float = 0.0) -> condition.Values:
    """Return the `Values` of a factor of this ``shape`` from the eigenvalues of its Gram matrix."""
    values = np.maximum(ascending[::-1], 0.0)
    carried = error * (2 * float(values[0]) ** 0.5 + error)
    return condition.Values.normwise(values, shape, carried, power=1, solver="Gram")
