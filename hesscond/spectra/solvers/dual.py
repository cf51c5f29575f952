"""κ of FᵀF from FFᵀ or its triangular factor, for F with too many columns to keep."""

from __future__ import annotations

import math
import warnings
from dataclasses import replace

import numpy as np
import torch
from scipy.linalg import LinAlgWarning, lu_factor, lu_solve

from hesscond.operators.threads import one_thread
from hesscond.spectra import ConditionNumber, condition, reductions
from hesscond.spectra.forms import DualForm
from hesscond.spectra.matrices import as_array
from hesscond.spectra.solvers import base
from hesscond.spectra.solvers.jacobi import JACOBI_ORDER
from hesscond.spectra.solvers.normwise import GRAM_RTOL

#: Relative width of an interval from the Gram matrix that is good enough where the triangular factor takes more than
#: this number of operations, some minutes.
WIDE, MINUTES = 1e-3, 2e12
#: Limit for the Gram matrix of a dual, whose entries may be known to a few units of round-off.
DUAL_RTOL = 1e-9


@base.register
class DualGram(base.Solver[DualForm]):
    """Eigenvalues of FFᵀ, the smallest one refined if that suffices."""

    def fits(self, form: DualForm, rtol: float) -> bool:
        return form.signs is None and rtol >= DUAL_RTOL

    def cost(self, form: DualForm) -> float:
        return 2 * form.order**3

    def values(self, form: DualForm, rtol: float) -> ConditionNumber | None:
        rtol = rtol if form.work <= MINUTES else max(rtol, WIDE)
        K, error = form.gram()
        top = float(K.diagonal().sum())
        if top == 0:
            return condition.zero_matrix(form.order)
        if not base.GRAM_RANGE[0] < top < base.GRAM_RANGE[1]:
            return None
        kappa = gram_condition(K, error, order=form.order, limit=form.rank_bound(), rtol=rtol)
        return kappa if kappa is not None and base.is_good_enough(kappa, rtol) else None


@base.register
class DualTriangular(base.Solver[DualForm]):
    """κ of R, or of R diag(signs) Rᵀ, with RᵀR = FFᵀ."""

    def cost(self, form: DualForm) -> float:
        return 40 * form.order**3

    def values(self, form: DualForm, rtol: float) -> ConditionNumber:
        R, error = form.triangular()
        if form.signs is None:
            # another Gram matrix would be no better
            finer = min(rtol, GRAM_RTOL / 2)
            kappa = reductions.factor_condition(
                R, rank_bound=form.rank_bound, rtol=finer, error=error, jacobi_order=JACOBI_ORDER
            )
        else:
            whole = float(np.linalg.norm(error))
            kappa = reductions.signed_condition(
                R.T, form.signs, rank_bound=form.rank_bound, rtol=rtol, error=whole, noise=form.noise
            )
        return replace(kappa, nullity=form.order - kappa.rank, solver=f"dual {kappa.solver}")


@base.register
class WholeFactor(base.Solver[DualForm]):
    """κ of F itself, if it fits: its errors are bounded column by column."""

    def fits(self, form: DualForm, rtol: float) -> bool:
        return form.factor is not None

    def cost(self, form: DualForm) -> float:
        return 50 * form.order**3

    def values(self, form: DualForm, rtol: float) -> ConditionNumber:
        assert form.factor is not None
        return form.factor().condition(rtol=rtol)


def gram_condition(K: torch.Tensor, error: float, *, order: int, limit: int, rtol: float) -> ConditionNumber | None:
    """κ from a dual Gram matrix (m, m) with this error in the 2-norm; None if it clearly cannot resolve κ."""
    if rtol < GRAM_RTOL and (limit < len(K) or not 2 * error < rtol * above_smallest(K)):
        return None
    with one_thread():
        values = as_array(torch.linalg.eigvalsh(K)).astype(float)[::-1].clip(min=0.0)
    ends = condition.Values.normwise(values, (len(K), len(K)), error, power=1, solver="dual Gram")
    kappa = condition.conclude(ends, order=order, limit=limit, scale=0)
    if base.is_good_enough(kappa, rtol) or limit < len(K) or not 2 * error < rtol * values[-1]:
        return kappa
    return condition.conclude(least_refined(as_array(K), ends, error), order=order, limit=limit, scale=0)


def least_refined(K: np.ndarray, estimates: condition.Values, error: float) -> condition.Values:
    """Eigenvalues of a positive definite K (n, n), the smallest one with an error of second order.

    ``estimates`` are its eigenvalues, descending, with normwise bounds; ``error`` bounds that of K in the 2-norm.

    With θ = vᵀKv/vᵀv and ρ = ‖Kv − θv‖/‖v‖, in extended precision where the machine has one, and β > θ below the other
    eigenvalues, θ − ρ²/(β − θ) ≤ λ_n ≤ θ (Kato and Temple); v is from two steps of inverse iteration.
    """
    n, values = len(K), estimates.magnitudes
    v = np.random.default_rng(0).standard_normal(n)
    with warnings.catch_warnings():
        # the shift may be an eigenvalue to the last digit
        warnings.simplefilter("ignore", LinAlgWarning)
        factors = lu_factor(K - values[-1] * np.eye(n), check_finite=False)
    with np.errstate(all="ignore"):
        for _ in range(2):
            v = lu_solve(factors, v, check_finite=False)
            v = v / np.linalg.norm(v)
    if not np.isfinite(v).all():
        return estimates
    wide = v.astype(np.longdouble)
    image = K.astype(np.longdouble) @ wide
    theta = (wide @ image) / (wide @ wide)
    residual = float(np.linalg.norm(image - theta * wide))
    least, rounding = float(theta), (2 * n + 8) * float(np.finfo(np.longdouble).eps) * float(np.linalg.norm(K))
    apart = float(values[-2] - estimates.errors[-2]) - least - rounding if n > 1 else math.inf
    if not (apart > 0 and least > 0):
        return estimates
    half = rounding + error + condition.EPS * least
    magnitudes, below = values.copy(), estimates.errors.copy()
    above = below.copy()
    magnitudes[-1], above[-1] = least, half
    below[-1] = half + (residual * (1 + 8 * condition.EPS) + rounding) ** 2 / apart
    return estimates._replace(magnitudes=magnitudes, errors=below, above=above, solver="dual, refined")


def above_smallest(K: torch.Tensor) -> float:
    """Upper bound of the smallest eigenvalue of K > 0, usually near it, from a Cholesky factor; 0 without a factor."""
    L, info = torch.linalg.cholesky_ex(K)
    if int(info):
        return 0.0
    x = torch.linspace(1, 2, len(K), dtype=K.dtype, device=K.device)[:, None]
    for _ in range(3):
        x = x / torch.linalg.vector_norm(x)
        x = torch.cholesky_solve(x, L)
    return 1 / float(torch.linalg.vector_norm(x))
