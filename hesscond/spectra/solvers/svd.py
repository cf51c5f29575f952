"""Singular values from LAPACK, with normwise bounds."""

from __future__ import annotations

from hesscond.spectra.condition import Values
from hesscond.spectra.solvers.base import Form, SingularForm, Solver, register


@register
class SVD(Solver[SingularForm]):
    """Singular values of the core to c·eps·σ_max: κ(FᵀF) = κ(F)², so float64 resolves it to 1e30."""

    def fits(self, form: Form, rtol: float) -> bool:
        return isinstance(form, SingularForm)

    def cost(self, form: SingularForm) -> float:
        m, n = form.core.shape
        return 2 * m * n**2 + 2 * n**3

    def values(self, form: SingularForm, rtol: float) -> Values:
        return form.normwise
