"""Singular values and eigenvalues of graded matrices, each to the accuracy of rows and columns of any scale.

One-sided Jacobi, and a certificate of the smallest singular value by a left inverse.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from scipy.linalg import eigh, lapack, solve_triangular

from hesscond.spectra import condition
from hesscond.spectra.solvers import base

#: Relative excess of ‖Av‖ over σ_n, estimated and certified, up to which no Jacobi is needed.
SHARP = 1e-10

#: Steps of the equilibration in `graded_errors`; each halves the decades still to go.
EQUILIBRATION_STEPS = 12

#: Duals and formed operators up to this order are worth Jacobi's method, which has small values to more digits.
JACOBI_ORDER = 1000


@base.register
class GradedSVD(base.Solver[base.SingularForm]):
    """Singular values of the core, the smallest one certified, or all by Jacobi's method.

    They are the normwise ones except for the smallest, which comes from `smallest_singular_value`: the others do not
    affect κ. If that is not `SHARP`, or not certified, as without full rank, all come from `jacobi_values`. Where the
    order is too large for that, the normwise values have to tell the smallest from zero.
    """

    def cost(self, form: base.SingularForm) -> float:
        m, n = form.core.shape
        return 10 * m * n**2 + 30 * n**3

    def values(self, form: base.SingularForm, rtol: float) -> condition.Values:
        core, normwise = form.core, form.normwise
        jacobi = core.shape[1] <= form.jacobi_order
        if not jacobi and normwise.magnitudes[-1] <= normwise.errors[-1]:
            return normwise
        least = smallest_singular_value(core)
        if least is None or max(least.excess, least.upper / least.value - 1) > SHARP:
            if not jacobi:
                return normwise
            return jacobi_values(core, form.error, across_rows=form.across_rows, power=form.power, least=least)
        carried = float(felt(form.error, least.u[:, None], least.v[:, None], across_rows=form.across_rows)[0])
        # values that are not distinguished from zero are no smaller than the smallest
        unknown = normwise.magnitudes <= normwise.errors + least.value
        unknown[-1] = True
        values = np.where(unknown, least.value, normwise.magnitudes)
        below = np.where(unknown, least.value - least.lower + carried, normwise.errors)
        above = np.where(unknown, normwise.magnitudes + normwise.errors - least.value, normwise.errors)
        above[-1] = least.upper - least.value + carried
        return normwise._replace(magnitudes=values, errors=below, above=above, solver="certified SVD")


@base.register
class SignedJacobi(base.Solver[base.EigenvalueForm]):
    """|λ| of the core from its singular values by one-sided Jacobi, with the signs and entry-by-entry error bounds."""

    def fits(self, form: base.EigenvalueForm, rtol: float) -> bool:
        return form.graded

    def cost(self, form: base.EigenvalueForm) -> float:
        return 40 * len(form.core) ** 3

    def values(self, form: base.EigenvalueForm, rtol: float) -> condition.Values:
        core = form.core
        values, signs, u, v = signed_jacobi(core)
        if form.entries is not None:
            error, typical = form.entries
            below, above = graded_errors(core, values, u, v, smallest_singular_value(core, error), error)
            return condition.Values(values, below, weighted(typical, u, v), 1, "Jacobi SVD", signs < 0, above)
        below, above = graded_errors(core, values, u, v, smallest_singular_value(core))
        floors = condition.NOISE * roundoff_of_entries(core, values, u, v) + form.floor
        return condition.Values(values, below + form.error, floors, 1, "Jacobi SVD", signs < 0, above + form.error)


def jacobi_values(
    core: np.ndarray,
    error: float | np.ndarray = 0.0,
    *,
    across_rows: bool = False,
    power: int = 2,
    least: Smallest | None = None,
) -> condition.Values:
    """Singular values of ``core`` (m, n) by one-sided Jacobi, with errors as in `SingularForm`; ``least`` or None."""
    values, u, v = jacobi_svd(core)
    below, above = graded_errors(core, values, u, v, least)
    floors = condition.NOISE * roundoff_of_entries(core, values, u, v)
    carried = felt(error, u, v, across_rows=across_rows)
    if np.ndim(error) == 2:
        floors = floors + carried
    return condition.Values(values, below + carried, floors, power, "Jacobi SVD", above=above + carried)


def felt(error: float | np.ndarray, u: np.ndarray, v: np.ndarray, *, across_rows: bool) -> np.ndarray:
    """First-order change (k,) of σ_k by an ``error`` as in `jacobi_values`, for columns u_k, v_k."""
    if np.ndim(error) == 2:
        return weighted(np.asarray(error), u, v)
    if np.ndim(error) == 1:
        return np.asarray(np.abs(u if across_rows else v).T @ error)
    return np.full(u.shape[1], float(error))


def signed_jacobi(core: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """|λ| of a symmetric matrix, descending, signs of λ, and the singular vectors u and v, by one-sided Jacobi.

    Where λ and −λ are both eigenvalues their singular vectors mix, u_kᵀv_k is far from ±1, and the count of
    negative ones is that of the Rayleigh quotient on the common invariant subspace, whose eigenvectors replace v.
    """
    values, u, v = jacobi_svd(core)
    vectors = v.copy()
    signs = np.einsum("ik,ik->k", u, v)
    start = 0
    while start < len(values):
        stop = start + 1
        while stop < len(values) and values[stop] > values[start] * (1 - 1e-6):
            stop += 1
        if np.abs(signs[start:stop]).min() < 0.9:
            block = v[:, start:stop]
            signs[start:stop], inner = np.linalg.eigh(block.T @ core @ block)
            vectors[:, start:stop] = block @ inner
        start = stop
    return values, np.where(signs < 0, -1.0, 1.0), u, vectors


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


def roundoff_of_entries(core: np.ndarray, values: np.ndarray, u: np.ndarray, v: np.ndarray) -> np.ndarray:
    r"""Change eps·\|u_k\|ᵀ\|A\|\|v_k\| (n,) of every singular value by a relative change eps of each single entry."""
    return condition.EPS * np.maximum(weighted(np.abs(core), u, v), values)


def weighted(entries: np.ndarray, u: np.ndarray, v: np.ndarray) -> np.ndarray:
    r"""Bounds \|u_k\|ᵀ·entries·\|v_k\| (n,) of the change of σ_k by errors of the entries."""
    bounds: np.ndarray = np.einsum("ik,ik->k", np.abs(u), entries @ np.abs(v))
    return bounds


def graded_errors(
    core: np.ndarray,
    values: np.ndarray,
    u: np.ndarray,
    v: np.ndarray,
    least: Smallest | None,
    error: np.ndarray | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    r"""Error bounds below and above, (n,) each, of singular values from `jacobi_svd`.

    Below the smallest one the bound is that of ``least``, the `smallest_singular_value`, which holds whatever Jacobi
    did; where there is none, the value is not distinguished from zero. The others: 2000·eps·(\|u_k\|ᵀd₁)(d₂ᵀ\|v_k\|)
    for A = D₁CD₂ with entries of C of about 1 (docs/concepts/bounds.md), plus ``error`` (m, n), bounds of errors
    already in the entries of A, weighted by the singular vectors of σ_k.
    """
    C = np.abs(core)
    rows, columns = np.ones(len(C)), np.ones(C.shape[1])
    for _ in range(EQUILIBRATION_STEPS):
        row, column = (np.sqrt(largest).clip(min=1e-300) for largest in (C.max(1), C.max(0)))
        C = C / row[:, None] / column
        rows, columns = rows * row, columns * column
    rows = rows * C.max(1)
    weights = (np.abs(u).T @ rows) * (np.abs(v).T @ columns)
    above = 2000 * condition.EPS * np.maximum(weights, values)
    if error is not None:
        above += weighted(error, u, v)
    below = above.copy()
    smallest = float(values[-1])
    if least is None:
        below[-1] = max(below[-1], smallest)
    else:
        below[-1] = max(smallest - least.lower, 0.0)
        # no other value is smaller than the smallest
        below = np.minimum(below, np.maximum(values - least.lower, 0.0))
        above[-1] = max(min(above[-1], least.upper - smallest), 0.0)
    return below, above


class Smallest(NamedTuple):
    """Smallest singular value with rigorous bounds, and unit vectors u (m,), v (n,) near its singular vectors.

    ``value`` is ‖Av‖, and ``excess`` an estimate of the relative increase of it by the rounding of v.
    """

    value: float
    lower: float
    upper: float
    excess: float
    u: np.ndarray
    v: np.ndarray


def smallest_singular_value(core: np.ndarray, error: np.ndarray | None = None) -> Smallest | None:
    r"""Bounds of σ_n of a tall matrix A of full column rank; None if they cannot be certified.

    They hold for all matrices within ``error`` (m, n) of A, entry by entry (docs/concepts/bounds.md); ‖Av‖/‖v‖ is
    computed in extended precision where the machine has one.
    """
    m, n = core.shape
    gamma = (m + 8) * condition.EPS / (1 - (m + 8) * condition.EPS)
    entries = np.abs(core)
    X = left_inverse(core)
    if X is None:
        return None
    size = np.abs(X)
    s = size.sum(1)
    given = 0.0 if error is None else error
    B = np.abs(X @ core - np.eye(n)) * (1 + condition.EPS) + size @ (gamma * entries + given)
    with np.errstate(over="ignore", invalid="ignore"):
        rho = float((B @ s / s).max()) * (1 + 2 * n * condition.EPS)
    if not rho < 0.5:
        return None
    # scaled, for entries whose squares overflow
    scale = float(s.max())
    X, s = X / scale, s / scale
    top, vectors = eigh(X @ X.T, subset_by_index=(n - 1, n - 1), check_finite=False)
    norm = math.sqrt(float(top[0]) * (1 + 2 * condition.error_factor(m, n) * condition.EPS))
    lower = 1 / (norm + rho / (1 - rho) * float(np.linalg.norm(s))) / scale * (1 - 8 * condition.EPS)
    # a step of inverse iteration: v is accurate in norm only, which a large σ_1 would blow up
    u = X.T @ vectors[:, 0]
    v = X @ u
    largest = np.abs(v).max()
    v, reach = v / largest, size @ np.abs(u) / (scale * largest)
    unit = float(np.finfo(np.longdouble).eps)
    image = float(np.linalg.norm(core @ v.astype(np.longdouble)))
    length = float(np.linalg.norm(v))
    rounding = ((n + 8) * unit * entries + given) @ np.abs(v)
    upper = (image + float(np.linalg.norm(rounding))) / length * (1 + (2 * m + 8) * condition.EPS)
    value = min(max(image / length, lower), upper)
    # errors of v stand at right angles to it, or nearly so
    with np.errstate(over="ignore"):
        excess = float(condition.EPS * m**0.5 * np.linalg.norm(entries @ reach) / length / value) ** 2
    return Smallest(value, lower, upper, excess, u / np.linalg.norm(u), v / length)


def left_inverse(core: np.ndarray) -> np.ndarray | None:
    """Left inverse R⁻¹Qᵀ (n, m) of a tall matrix, rows sorted by size and columns pivoted; None if R is singular."""
    m, n = core.shape
    order = np.argsort(-np.abs(core).max(1), kind="stable")
    packed, pivots, tau, _, info = lapack.dgeqp3(core[order])
    R = np.triu(packed[:n])
    diagonal = np.abs(R.diagonal())
    if info != 0 or diagonal.min() < 1e-290:
        return None
    Q, _, info = lapack.dorgqr(packed, tau)
    with np.errstate(over="ignore", invalid="ignore"):
        inverse = solve_triangular(R, Q[:, :n].T, check_finite=False)
    if info != 0 or not np.isfinite(inverse).all():
        return None
    X = np.empty((n, m))
    X[np.ix_(pivots - 1, order)] = inverse
    return X
