"""Spectra of H = FᵀF from the factor F, and from the squared matrix only if a bound shows that it suffices."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import cache, partial
from typing import NamedTuple

import numpy as np
import torch
from scipy.linalg import LinAlgWarning, eigh, lapack, lu_factor, lu_solve, solve_triangular

from hesscond.causes import SCALES, UNDERFLOW
from hesscond.spectra.condition import (
    GAP,
    NOISE,
    ConditionNumber,
    Values,
    conclude,
    is_good_enough,
    resolve,
    unresolved,
    zero_matrix,
)
from hesscond.spectra.matrices import as_array, as_matrix, scaled_core
from hesscond.spectra.rank import affordable_rank, structural_rank_bound
from hesscond.spectra.threads import ORDER, few_threads, one_thread

EPS = float(np.finfo(float).eps)

#: Gram matrices whose trace lies outside are near overflow or underflow, and are not used.
GRAM_RANGE = (1e-200, 1e200)

#: Relative excess of ‖Av‖ over σ_n, estimated and certified, up to which no Jacobi is needed.
SHARP = 1e-10

#: Steps of the equilibration in `graded_errors`; each halves the decades still to go.
EQUILIBRATION_STEPS = 12

#: Entries below this share of the largest may underflow when they are squared.
LEAST = 2.0**-500

#: The order of matrices in a stack is a multiple of this: LAPACK rounds one that does not begin at a boundary of vector
#: registers otherwise, and results would depend on the place in the stack.
ALIGNED = 4

#: Prefixes of the names of solvers that are accurate beyond normwise bounds.
FINE = ("Jacobi", "certified")

#: Below this relative width of κ's interval the Gram form is not tried, since it cannot reach it.
GRAM_RTOL = 1e-7

#: Limit for the Gram matrix of a dual, whose entries may be known to a few units of round-off.
DUAL_RTOL = 1e-9

#: Duals and formed operators up to this order are worth Jacobi's method, which has small values to more digits.
JACOBI_ORDER = 1000


def error_factor(m: int, n: int) -> float:
    """Constant c of the bounds c·eps·(norm): √(mn), the probabilistic growth of rounding errors.

    The worst-case constants of backward error analysis grow like m·n and are never seen; with independent
    rounding errors the growth is their square root (Higham and Mary, SIAM J. Sci. Comput. 41, 2019).
    """
    return max(16.0, math.sqrt(m * n))


def within_range(result: ConditionNumber, matrix: np.ndarray, core: np.ndarray) -> ConditionNumber:
    """Return ``result``, unresolved if entries that underflow when squared may have lowered its rank."""
    if not result.resolved or result.rank >= min(core.shape):
        return result
    magnitudes = np.abs(matrix)
    if magnitudes[magnitudes > 0].min() >= LEAST * magnitudes.max():
        return result
    return unresolved(result, UNDERFLOW)


def equilibrated_rank(core: np.ndarray) -> int:
    """Number of nonzero singular values after rows and columns are scaled to one size; 0 if they are already."""
    rows, columns = (np.abs(core).max(axis) for axis in (1, 0))
    if max(rows.max() / rows.min(), columns.max() / columns.min()) < GAP:
        return 0
    scaled = core
    for _ in range(2):
        scaled = np.ldexp(scaled, -np.frexp(np.abs(scaled).max(1))[1][:, None])
        scaled = np.ldexp(scaled, -np.frexp(np.abs(scaled).max(0))[1])
    values = svd_values(scaled)
    return int((values.magnitudes > values.errors).sum())


def uniform(magnitudes: np.ndarray, shape: tuple[int, int], unit: float, error: float) -> dict[str, np.ndarray]:
    """Return one error bound c·unit + ``error`` and one floor for all values, with unit eps times a norm."""
    bound, floor = error_factor(*shape) * unit + error, NOISE * unit
    return {"errors": np.full(len(magnitudes), bound), "floors": np.full(len(magnitudes), floor)}


def gram_values(core: np.ndarray, error: float = 0.0) -> Values:
    """Eigenvalues of coreᵀcore from the formed Gram matrix, with normwise error bounds."""
    return from_gram_eigenvalues(eigenvalues_of(core.T @ core), core.shape, error)


def eigenvalues_of(symmetric: np.ndarray) -> np.ndarray:
    """Ascending eigenvalues of one or a stack of symmetric matrices.

    Through torch, whose LAPACK is the faster one here and shares the threads of the training around it.
    """
    return torch.linalg.eigvalsh(torch.from_numpy(symmetric)).numpy()


def from_gram_eigenvalues(ascending: np.ndarray, shape: tuple[int, int], error: float = 0.0) -> Values:
    """Return the `Values` of a factor of this ``shape`` from the eigenvalues of its Gram matrix."""
    values = np.maximum(ascending[::-1], 0.0)
    top = float(values[0])
    carried = error * (2 * top**0.5 + error)
    return Values(values, **uniform(values, shape, EPS * top, carried), power=1, solver="Gram")


def svd_values(core: np.ndarray, error: float = 0.0, *, power: int = 2) -> Values:
    """Singular values of ``core`` with the normwise error bound c·eps·σ_max + ``error``."""
    with one_thread():
        values = torch.linalg.svdvals(torch.from_numpy(core)).numpy()
    return Values(values, **uniform(values, core.shape, EPS * float(values[0]), error), power=power, solver="SVD")


def svd_routes(
    core: np.ndarray,
    whole: float,
    error: float | np.ndarray,
    *,
    across_rows: bool = False,
    power: int = 2,
    jacobi: bool = True,
) -> list[Callable[[], Values]]:
    """Routes of `resolve`: `svd_values` and, if these do not decide, `finest_values`.

    ``whole`` is a bound of all the error in the core, in the 2-norm; the others are the arguments of `jacobi_values`.
    """
    normwise = cache(partial(svd_values, core, whole, power=power))
    return [normwise, partial(finest_values, normwise, core, error, across_rows=across_rows, jacobi=jacobi)]


def finest_values(
    normwise: Callable[[], Values], core: np.ndarray, error: float | np.ndarray, *, across_rows: bool, jacobi: bool
) -> Values:
    """Singular values of ``core``, the smallest one to the accuracy of rows and columns of any scale.

    They are those of ``normwise`` except for the smallest, which comes from `smallest_singular_value`: the others do
    not affect κ. If that is not `SHARP`, or not certified, as without full rank, all come from `jacobi_values`. Without
    ``jacobi``, ``normwise`` has to tell the smallest from zero.
    """
    found = normwise()
    if not jacobi and found.magnitudes[-1] <= found.errors[-1]:
        return found
    least = smallest_singular_value(core)
    if least is None or max(least.excess, least.upper / least.value - 1) > SHARP:
        if not jacobi:
            return found
        return jacobi_values(core, error, across_rows=across_rows, power=found.power, least=least)
    carried = float(felt(error, least.u[:, None], least.v[:, None], across_rows=across_rows)[0])
    # values that are not distinguished from zero are no smaller than the smallest
    unknown = found.magnitudes <= found.errors + least.value
    unknown[-1] = True
    values = np.where(unknown, least.value, found.magnitudes)
    below = np.where(unknown, least.value - least.lower + carried, found.errors)
    above = np.where(unknown, found.magnitudes + found.errors - least.value, found.errors)
    above[-1] = least.upper - least.value + carried
    return found._replace(magnitudes=values, errors=below, above=above, solver="certified SVD")


def jacobi_values(
    core: np.ndarray,
    error: float | np.ndarray = 0.0,
    *,
    across_rows: bool = False,
    power: int = 2,
    least: Smallest | None = None,
) -> Values:
    """Singular values of ``core`` (m, n) by one-sided Jacobi, with the bounds of `graded_errors`.

    ``error`` is a bound, in the 2-norm, of the error in the core, or bounds for its columns (its rows with
    ``across_rows``), which weigh on σ_k as its singular vector does, or for its entries (m, n), below which σ_k may be
    round-off. ``least`` is the `smallest_singular_value`, without which the smallest is not told from zero.
    """
    values, u, v = jacobi_svd(core)
    below, above = graded_errors(core, values, u, v, least)
    floors = NOISE * roundoff_of_entries(core, values, u, v)
    carried = felt(error, u, v, across_rows=across_rows)
    if np.ndim(error) == 2:
        floors = floors + carried
    return Values(values, below + carried, floors, power, "Jacobi SVD", above=above + carried)


def felt(error: float | np.ndarray, u: np.ndarray, v: np.ndarray, *, across_rows: bool) -> np.ndarray:
    """First-order change (k,) of σ_k by an ``error`` as in `jacobi_values`, for columns u_k, v_k."""
    if np.ndim(error) == 2:
        return weighted(np.asarray(error), u, v)
    if np.ndim(error) == 1:
        return np.asarray(np.abs(u if across_rows else v).T @ error)
    return np.full(u.shape[1], float(error))


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
    r"""Change eps·\|u_k\|ᵀ\|A\|\|v_k\| (n,) of every singular value by a relative change eps of each single entry.

    A σ_k of this size is round-off of the entries themselves.
    """
    return EPS * np.maximum(weighted(np.abs(core), u, v), values)


def weighted(entries: np.ndarray, u: np.ndarray, v: np.ndarray) -> np.ndarray:
    r"""Bounds \|u_k\|ᵀ·entries·\|v_k\| (n,) of the change of σ_k by errors of the entries."""
    found: np.ndarray = np.einsum("ik,ik->k", np.abs(u), entries @ np.abs(v))
    return found


def graded_errors(
    core: np.ndarray,
    values: np.ndarray,
    u: np.ndarray,
    v: np.ndarray,
    least: Smallest | None,
    error: np.ndarray | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    r"""Error bounds below and above, (n,) each, of singular values from `jacobi_svd`.

    Below the smallest one the bound is that of ``least``, which holds whatever Jacobi did; where there is none, the
    value is not told from zero. The others: 2000·eps·(\|u_k\|ᵀd₁)(d₂ᵀ\|v_k\|).

    Write A = D₁CD₂ with D = diag(d) such that the largest entry of every row and column of C is about 1: row-pivoted
    QR and Jacobi commit errors of the size eps·d₁ᵢd₂ⱼ in entry (i, j), also where the entry is smaller or zero, and
    they change σ_k = u_kᵀAv_k by their weighted sum. The constant is measured: the worst of 3·10⁴ graded, sparse and
    rank deficient matrices needed 1233, all but a few less than 32.

    ``least`` is the result of `smallest_singular_value` for A and ``error`` (m, n), bounds of errors already in the
    entries of A; weighted by the singular vectors of σ_k.

    Source of the form: Higham, BIT 40 (2000), 325-339, and Drmač and Veselić, as in `jacobi_svd`.
    """
    C = np.abs(core)
    rows, columns = np.ones(len(C)), np.ones(C.shape[1])
    for _ in range(EQUILIBRATION_STEPS):
        row, column = (np.sqrt(largest).clip(min=1e-300) for largest in (C.max(1), C.max(0)))
        C = C / row[:, None] / column
        rows, columns = rows * row, columns * column
    rows = rows * C.max(1)
    weights = (np.abs(u).T @ rows) * (np.abs(v).T @ columns)
    above = 2000 * EPS * np.maximum(weights, values)
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

    They hold for all matrices within ``error`` (m, n) of A, entry by entry.

    Above: ‖Av‖/‖v‖ for any v, here in extended precision where the machine has one. Below: any X with ‖(XA)⁻¹X‖ ≤ β
    gives σ_n ≥ 1/β. X is the left inverse from a row-sorted pivoted QR; with E = XA − I and \|E\| ≤ B (what was
    computed, plus γ_m \|X\|\|A\| for rounding) and Bs ≤ ρs for s = \|X\|e, ρ < 1, each row of (XA)⁻¹X − X is at
    most ρ/(1 − ρ) s_i in the 1-norm. Since B is bounded entry by entry, both ends stay sharp for rows and columns of
    any scale.
    """
    m, n = core.shape
    gamma = (m + 8) * EPS / (1 - (m + 8) * EPS)
    entries = np.abs(core)
    X = left_inverse(core)
    if X is None:
        return None
    size = np.abs(X)
    s = size.sum(1)
    given = 0.0 if error is None else error
    B = np.abs(X @ core - np.eye(n)) * (1 + EPS) + size @ (gamma * entries + given)
    with np.errstate(over="ignore", invalid="ignore"):
        rho = float((B @ s / s).max()) * (1 + 2 * n * EPS)
    if not rho < 0.5:
        return None
    # scaled, for entries whose squares overflow
    scale = float(s.max())
    X, s = X / scale, s / scale
    top, vectors = eigh(X @ X.T, subset_by_index=(n - 1, n - 1), check_finite=False)
    norm = math.sqrt(float(top[0]) * (1 + 2 * error_factor(m, n) * EPS))
    lower = 1 / (norm + rho / (1 - rho) * float(np.linalg.norm(s))) / scale * (1 - 8 * EPS)
    # a step of inverse iteration: v is accurate in norm only, which a large σ_1 would blow up
    u = X.T @ vectors[:, 0]
    v = X @ u
    largest = np.abs(v).max()
    v, reach = v / largest, size @ np.abs(u) / (scale * largest)
    unit = float(np.finfo(np.longdouble).eps)
    image = float(np.linalg.norm(core @ v.astype(np.longdouble)))
    length = float(np.linalg.norm(v))
    rounding = ((n + 8) * unit * entries + given) @ np.abs(v)
    upper = (image + float(np.linalg.norm(rounding))) / length * (1 + (2 * m + 8) * EPS)
    value = min(max(image / length, lower), upper)
    # errors of v stand at right angles to it, or nearly so
    with np.errstate(over="ignore"):
        excess = float(EPS * m**0.5 * np.linalg.norm(entries @ reach) / length / value) ** 2
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


@few_threads
def factor_condition(
    factor: object,
    *,
    rank_bound: Callable[[], int] | None = None,
    rtol: float = 1e-8,
    error: float | np.ndarray = 0.0,
    exact: bool = False,
    jacobi_order: float = math.inf,
) -> ConditionNumber:
    """κ of H = FᵀF from the factor F (m, n): κ(H) = κ(F)², so float64 resolves κ(H) to 1e30.

    Three routes, cheapest first; the search stops where the error bound of one resolves κ to ``rtol``: the Gram
    matrix (only if ``rtol`` ≥ 1e-7), the singular values of F, and these with the smallest one certified or, if F has
    not full rank, one-sided Jacobi. The bounds of the last are entry by entry and so survive any grading of rows and
    columns. ``error`` bounds that of F in the 2-norm, or in each column (n,) or entry (m, n). With ``exact``, the rank
    of this very F is found by `rank` where sizes do not decide it; otherwise values of the size of round-off are zeros.
    """
    matrix = as_matrix(factor)
    core, scale, columns, transposed = scaled_core(matrix)
    if core.size == 0:
        return zero_matrix(matrix.shape[1])
    errors = np.asarray(np.ldexp(error, -scale))
    whole = float(np.linalg.norm(errors))
    by_part: float | np.ndarray = whole
    if errors.ndim == 1:
        by_part = errors[columns]
    elif errors.ndim == 2:
        entries = errors[np.ix_((matrix != 0).any(1), columns)]
        by_part = entries.T if transposed else entries
    routes = svd_routes(core, whole, by_part, across_rows=transposed, jacobi=core.shape[1] <= jacobi_order)
    if rtol >= GRAM_RTOL:
        routes.insert(0, partial(gram_values, core, whole))

    known = [] if rank_bound is None else [rank_bound]
    found = resolve(
        routes,
        order=matrix.shape[1],
        bounds=[*known, partial(structural_rank_bound, core)],
        scale=2 * scale,
        rtol=rtol,
        exact=partial(affordable_rank, core) if exact else None,
    )
    if found.rank_decision == "numerical":
        # rows or columns that are small as a whole are no round-off, unless the errors given are as large
        bounds = np.asarray(by_part if errors.ndim else 0.0)
        above = np.abs(core) > (bounds[:, None] if bounds.ndim == 1 and transposed else bounds)
        if equilibrated_rank(core[np.ix_(above.any(1), above.any(0))]) > found.rank:
            found = unresolved(found, SCALES)
    return within_range(found, matrix, core)


def factor_conditions(
    factors: Sequence[object],
    *,
    rank_bounds: Sequence[Callable[[], int] | None],
    rtol: float = 1e-8,
    errors: Sequence[float | np.ndarray],
) -> list[ConditionNumber]:
    """κ of FᵀF for several factors, of one Hessian in several coordinates or of many Hessians.

    Where ``rtol`` allows the Gram form, those of factors with no fewer columns than rows are decomposed together, all
    of one order at a time; factors that they do not resolve are measured by `factor_condition`, as are all others. A
    result does not depend on the other factors.
    """
    matrices = [as_array(factor) for factor in factors]
    found: list[ConditionNumber | None] = [None] * len(matrices)
    wide: dict[int, list[int]] = {}
    if rtol >= GRAM_RTOL:
        for i, matrix in enumerate(matrices):
            if matrix.ndim == 2 and matrix.shape[1] >= len(matrix) > 0:
                wide.setdefault(len(matrix), []).append(i)
    for rows, members in wide.items():
        padding = -rows % ALIGNED
        grams = np.zeros((len(members), rows + padding, rows + padding))
        with np.errstate(over="ignore", invalid="ignore"):
            for gram, i in zip(grams, members, strict=True):
                np.matmul(matrices[i], matrices[i].T, out=gram[:rows, :rows])
        top = grams.diagonal(axis1=1, axis2=2).sum(1)
        # false for NaN too: `factor_condition` will say what is wrong
        fit = np.flatnonzero((top > GRAM_RANGE[0]) & (top < GRAM_RANGE[1]))
        if len(fit) == 0:
            continue
        with one_thread() if rows < ORDER else nullcontext():
            spectra = eigenvalues_of(grams[fit] if len(fit) < len(members) else grams)
        for k, ascending in zip(fit, spectra, strict=True):
            i = members[k]
            whole = float(np.linalg.norm(errors[i])) if np.ndim(errors[i]) else float(errors[i])
            # rows of zeros have added as many zeros
            values = from_gram_eigenvalues(ascending[padding:], matrices[i].shape, whole)
            result = conclude(values, order=matrices[i].shape[1], limit=rows, scale=0)
            if is_good_enough(result, rtol):
                found[i] = result
    return [
        factor_condition(matrix, rank_bound=bound, rtol=rtol, error=error) if done is None else done
        for matrix, bound, error, done in zip(matrices, rank_bounds, errors, found, strict=True)
    ]


def dual_condition(
    gram: Callable[[], tuple[torch.Tensor, float]],
    triangular: Callable[[], tuple[torch.Tensor, np.ndarray]],
    *,
    order: int,
    rank_bound: Callable[[], int],
    rtol: float = 1e-8,
) -> ConditionNumber:
    """κ of FᵀF for F (m, n), m ≤ n, whose n columns are too many to keep.

    ``gram`` returns FFᵀ (m, m) and a bound of its error in the 2-norm; ``triangular`` R (m, m) with RᵀR = FFᵀ and
    bounds of the error in each column, only where the Gram matrix does not resolve κ.
    """
    limit: int | None = None
    if rtol >= DUAL_RTOL:
        K, error = gram()
        top = float(K.diagonal().sum())
        if top == 0:
            return zero_matrix(order)
        if GRAM_RANGE[0] < top < GRAM_RANGE[1]:
            limit = rank_bound()
            found = gram_condition(K, error, order=order, limit=limit, rtol=rtol)
            if found is not None and is_good_enough(found, rtol):
                return found
    R, errors = triangular()
    # another Gram matrix would be no better
    finer = min(rtol, GRAM_RTOL / 2)
    bound = rank_bound if limit is None else partial(int, limit)
    found = factor_condition(R, rank_bound=bound, rtol=finer, error=errors, jacobi_order=JACOBI_ORDER)
    return replace(found, nullity=order - found.rank, solver=f"dual {found.solver}")


def least_refined(K: np.ndarray, found: Values, error: float) -> Values:
    """Eigenvalues of a positive definite K (n, n), the smallest one with an error of second order.

    ``found`` are its eigenvalues, descending, with normwise bounds; ``error`` bounds that of K in the 2-norm.

    With θ = vᵀKv/vᵀv and ρ = ‖Kv − θv‖/‖v‖, in extended precision where the machine has one, and β > θ below the other
    eigenvalues, θ − ρ²/(β − θ) ≤ λ_n ≤ θ (Kato and Temple); v is from two steps of inverse iteration.
    """
    n, values = len(K), found.magnitudes
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
        return found
    wide = v.astype(np.longdouble)
    image = K.astype(np.longdouble) @ wide
    theta = (wide @ image) / (wide @ wide)
    residual = float(np.linalg.norm(image - theta * wide))
    least, rounding = float(theta), (2 * n + 8) * float(np.finfo(np.longdouble).eps) * float(np.linalg.norm(K))
    apart = float(values[-2] - found.errors[-2]) - least - rounding if n > 1 else math.inf
    if not (apart > 0 and least > 0):
        return found
    half = rounding + error + EPS * least
    magnitudes, below = values.copy(), found.errors.copy()
    above = below.copy()
    magnitudes[-1], above[-1] = least, half
    below[-1] = half + (residual * (1 + 8 * EPS) + rounding) ** 2 / apart
    return found._replace(magnitudes=magnitudes, errors=below, above=above, solver="dual, refined")


def gram_condition(K: torch.Tensor, error: float, *, order: int, limit: int, rtol: float) -> ConditionNumber | None:
    """κ from a dual Gram matrix (m, m) with this error in the 2-norm; None if it clearly cannot resolve κ."""
    if rtol < GRAM_RTOL and (limit < len(K) or not 2 * error < rtol * above_smallest(K)):
        return None
    with one_thread():
        values = as_array(torch.linalg.eigvalsh(K)).astype(float)[::-1].clip(min=0.0)
    spread = uniform(values, (len(K), len(K)), EPS * float(values[0]), error)
    ends = Values(values, **spread, power=1, solver="dual Gram")
    found = conclude(ends, order=order, limit=limit, scale=0)
    if is_good_enough(found, rtol) or limit < len(K) or not 2 * error < rtol * values[-1]:
        return found
    return conclude(least_refined(as_array(K), ends, error), order=order, limit=limit, scale=0)


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


@few_threads
def factor_eigenvalues(factor: object, condition: ConditionNumber) -> np.ndarray:
    """Nonzero eigenvalues of FᵀF, descending, as many as ``condition`` found."""
    core, scale, *_ = scaled_core(as_matrix(factor))
    if condition.rank == 0:
        return np.zeros(0)
    values = (jacobi_values if condition.solver.startswith(FINE) else svd_values)(core).magnitudes
    return np.ldexp(values[: condition.rank] ** 2, 2 * scale)


@few_threads
def factor_eigenpairs(factor: object, condition: ConditionNumber) -> tuple[np.ndarray, np.ndarray]:
    """Nonzero eigenvalues (r,) of FᵀF, descending, and orthonormal eigenvectors (n, r)."""
    matrix = as_matrix(factor)
    core, scale, columns, transposed = scaled_core(matrix)
    rank = condition.rank
    vectors = np.zeros((matrix.shape[1], rank))
    if rank == 0:
        return np.zeros(0), vectors
    if condition.solver.startswith(FINE):
        values, u, v = jacobi_svd(core)
    else:
        u, values, vt = np.linalg.svd(core, full_matrices=False)
        v = vt.T
    vectors[columns] = (u if transposed else v)[:, :rank]
    return np.ldexp(values[:rank] ** 2, 2 * scale), vectors
