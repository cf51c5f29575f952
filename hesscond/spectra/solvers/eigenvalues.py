"""Singular values, and eigenvalues of symmetric matrices, from LAPACK, with normwise bounds."""

from __future__ import annotations

import numpy as np

from hesscond.spectra.condition import Values
from hesscond.spectra.solvers import base


@base.register
class SVD(base.Solver[base.SingularForm]):
    """Singular values of the core to c·eps·σ_max: κ(FᵀF) = κ(F)², so float64 resolves it to 1e30."""

    def fits(self, form: base.Form, rtol: float) -> bool:
        return isinstance(form, base.SingularForm)

    def cost(self, form: base.SingularForm) -> float:
        m, n = form.core.shape
        return 2 * m * n**2 + 2 * n**3

    def values(self, form: base.SingularForm, rtol: float) -> Values:
        return form.normwise


@base.register
class Eigenvalues(base.Solver[base.EigenvalueForm]):
    """Eigenvalues of the core to c·eps·|λ|_max."""

    def fits(self, form: base.Form, rtol: float) -> bool:
        return isinstance(form, base.EigenvalueForm)

    def cost(self, form: base.EigenvalueForm) -> float:
        return 4 / 3 * len(form.core) ** 3

    def values(self, form: base.EigenvalueForm, rtol: float) -> Values:
        return eigenvalue_values(form.core, form.error, form.floor)


def eigenvalue_values(core: np.ndarray, error: float, floor: float = 0.0) -> Values:
    """Eigenvalues of a symmetric matrix by size, with the normwise error bound."""
    # scipy's dsyevd takes the least workspace, with which large matrices are not reduced in blocks
    eigenvalues = np.linalg.eigvalsh(core)
    eigenvalues = eigenvalues[np.argsort(-np.abs(eigenvalues), kind="stable")]
    magnitudes = np.abs(eigenvalues)
    found = Values.normwise(magnitudes, core.shape, error, power=1, solver="eigenvalues")
    return found._replace(floors=found.floors + floor, negative=eigenvalues < 0)
