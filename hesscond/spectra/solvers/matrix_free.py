"""κ of an operator: dense where that is affordable, else from both ends of its spectrum by iteration."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial

import numpy as np
import torch
from scipy.linalg import lapack

from hesscond import causes
from hesscond.operators import Subspace
from hesscond.spectra import ConditionNumber, EigenResult, condition, forms, lanczos, smallest_nonzero
from hesscond.spectra.matrices import as_matrix
from hesscond.spectra.reductions import symmetric_condition
from hesscond.spectra.solvers import base
from hesscond.spectra.solvers.jacobi import EQUILIBRATION_STEPS, JACOBI_ORDER

#: Matrices of the order of a formed one that are held at a time for Jacobi's method, and for eigenvectors.
JACOBI, EIGENVECTORS = 12, 6
#: Rows of a matrix that are compared with its columns at a time.
ROWS = 64
#: Asymmetry of a formed matrix is rounding; this multiple of its size bounds the rounding in the matrix.
SAFETY = 16.0


@base.register
class Formed(base.Solver[forms.ProductForm]):
    """κ of the matrix of products, its asymmetry taken for their rounding."""

    def fits(self, form: forms.ProductForm, rtol: float) -> bool:
        return form.formed

    def cost(self, form: forms.ProductForm) -> float:
        return 10 * form.A.order**3

    def values(self, form: forms.ProductForm, rtol: float) -> ConditionNumber:
        A, null_space = form.A, form.null_space
        # that of float64 shows in the asymmetry, and costs products to measure
        rounding = 0.0 if A.dtype == torch.float64 else A.rounding
        jacobi = A.order <= JACOBI_ORDER and form.limits.holds(A.order, JACOBI)
        kappa = dense_condition(A.to_dense(), null_space, rounding, rtol, jacobi=jacobi, more=A.error)
        return replace(kappa, nullity=kappa.nullity + form.operator.order - A.order)


@base.register
class Iteration(base.Solver[forms.ProductForm]):
    """κ from both ends of the spectrum, by `lanczos` and `smallest_nonzero`."""

    def fits(self, form: forms.ProductForm, rtol: float) -> bool:
        return not form.formed

    def cost(self, form: forms.ProductForm) -> float:
        return 2 * form.limits.products * form.A.order**2

    def values(self, form: forms.ProductForm, rtol: float) -> ConditionNumber:
        A, null_space, limits, order = form.A, form.null_space, form.limits, form.operator.order
        # the eigenvalue's error is of the order of the square of the residual
        largest = lanczos(A, 1, "top" if A.psd else "magnitude", tol=rtol**0.5, memory=limits.memory, seed=limits.seed)
        norm = float(largest.eigenvalues.abs().max())
        if norm == 0:
            return condition.zero_matrix(order)
        bottom = smallest_nonzero(
            A,
            1,
            inverse=form.hints.inverse,
            null_space=null_space,
            tol=rtol,
            norm=norm,
            memory=limits.memory,
            seed=limits.seed,
            max_products=limits.products,
        )
        known_null = order - A.order + (0 if null_space is None else null_space.dimension)
        kappa = from_ends(order, largest, bottom, known_null, psd=A.psd)
        message = (bottom if not bottom.converged or largest.converged else largest).message.partition(" (")[0]
        formable = A.order <= limits.dense_order and not limits.holds(A.order)
        # half of the memory is for the graphs
        return kappa.because(
            causes.unconverged(message, A.order, 2 * 8 * forms.MATRICES * A.order**2 if formable else 0)
        )


def dense_condition(
    matrix: torch.Tensor, known: Subspace | None, rounding: float, rtol: float, *, jacobi: bool, more: float = 0.0
) -> ConditionNumber:
    """κ of a matrix of products, whose asymmetry is rounding; with Jacobi's method if it may be used and helps."""
    given = as_matrix(matrix)
    # squares of numbers that are far from 1 overflow or underflow
    largest = float(max(given.max(), -given.min())) or 1.0
    parts = []
    for start in range(0, len(given), ROWS):
        rows = given[start : start + ROWS] / largest
        parts.append((np.linalg.norm(rows - given[:, start : start + ROWS].T / largest), np.linalg.norm(rows)))
    asymmetry, scale = (largest * float(np.linalg.norm(norms)) for norms in zip(*parts, strict=True))
    # round-off of float64 at least; of the precision of the products if that is coarser
    coarse = rounding * scale if matrix.dtype != torch.float64 else 0.0
    error = max(SAFETY * asymmetry / 2, condition.NOISE * condition.EPS * scale, coarse)
    order = len(given)
    bound = None if known is None else order - known.dimension
    H = given + given.T
    H /= 2
    if jacobi:
        rank_bound = None if bound is None else partial(int, bound)
        kappa = symmetric_condition(H, rank_bound=rank_bound, rtol=rtol, error=error + more, floor=error)
    else:
        alive = H.any(1)
        if not alive.any():
            return condition.zero_matrix(order)
        if not alive.all():
            H = H[np.ix_(alive, alive)]
        exponent = int(np.frexp(max(H.max(), -H.min()))[1])
        values = base.eigenvalue_values(
            np.ldexp(H, -exponent, out=H), *(float(np.ldexp(size, -exponent)) for size in (error + more, error))
        )
        kappa = condition.conclude(values, order=order, limit=order if bound is None else bound, scale=exponent)
    del H
    if kappa.cause in (causes.BELOW_BOUND, causes.NONE_TOLD):
        return kappa.because(causes.BY_DIFFERENCES if more else causes.SUMMED)
    if kappa.rank_decision == "numerical" and equilibrated_rank(given) > kappa.rank:
        return condition.unresolved(kappa, causes.SCALES)
    return kappa


def equilibrated_rank(H: np.ndarray) -> int:
    """Number of nonzero eigenvalues after every parameter is scaled separately to one size, which changes no rank.

    0 if all are of one size already. Parameters of small features have eigenvalues below eps times the norm that are no
    round-off. Rows whose asymmetry is that of rounding alone are left out: a principal submatrix has no larger rank.
    """

    def sizes(matrix: np.ndarray) -> np.ndarray:
        return np.asarray(np.maximum(matrix.max(1), -matrix.min(1)))

    scaled = H + H.T
    scaled /= 2
    rows = sizes(scaled)
    alive = rows > 0
    if not alive.any() or rows.max() < condition.GAP * rows[alive].min():
        return 0
    error = H - H.T
    error /= 2
    for _ in range(EQUILIBRATION_STEPS):
        factors = np.where(alive, np.ldexp(1.0, -(np.frexp(sizes(scaled))[1] // 2)), 0.0)
        for part in (scaled, error):
            part *= factors[:, None]
            part *= factors
    # zeros change neither norms nor the eigenvalues that are counted
    left_out = ~(sizes(error) < sizes(scaled) / condition.GAP)
    for part in (scaled, error):
        part[left_out] = 0
        part[:, left_out] = 0
    noise = SAFETY * float(np.linalg.norm(error)) + condition.NOISE * condition.EPS * float(np.linalg.norm(scaled))
    del error, part
    return inertia(scaled, -noise)[0] + inertia(scaled, noise)[1]


def inertia(H: np.ndarray, shift: float) -> tuple[int, int]:
    """Numbers of positive and of negative eigenvalues of H + shift·I: those of D in its LDLᵀ, by Sylvester's law."""
    n = len(H)
    shifted = np.array(H, order="F")
    shifted[range(n), range(n)] += shift
    room, _ = lapack.dsytrf_lwork(n, lower=1)
    factor, pivots, _ = lapack.dsytrf(shifted, lower=1, lwork=int(room), overwrite_a=1)
    # a block of order two has an eigenvalue of each sign (Bunch and Kaufman 1977)
    single = pivots > 0
    values, pairs = factor.diagonal()[single], int((~single).sum()) // 2
    return int((values > 0).sum()) + pairs, int((values < 0).sum()) + pairs


def from_ends(order: int, ends: EigenResult, bottom: EigenResult, known: int, *, psd: bool) -> ConditionNumber:
    """κ from the eigenvalue of largest size and the smallest nonzero ones; ``psd``: none is negative."""
    largest = abs(float(ends.eigenvalues[0]))
    low, high = magnitude_interval(ends, 0)
    nullity = known + bottom.null
    # the smallest one that is certainly not zero, of all that were seen
    nonzero = [
        (size, result, i)
        for result in (bottom, ends)
        for i, size in enumerate(result.eigenvalues.abs().tolist())
        if magnitude_interval(result, i)[0] > 0
    ]
    solver = f"iteration, {ends.products + bottom.products} products"
    if not nonzero:
        zero = condition.zero_matrix(order)
        return replace(zero, lambda_max=largest, cutoff=high, solver=solver, rank_decision="unresolved")
    smallest, result, index = min(nonzero, key=lambda item: item[0])
    least, most = magnitude_interval(result, index)
    resolved = bottom.converged and ends.converged and result is bottom
    # the same eigenvalue may have been found from both ends
    reached = [magnitude_interval(bottom, i)[1] for i in range(len(bottom.eigenvalues))]
    distinct = max(reached, default=math.inf) < low
    counts = [int((side.upper < 0).sum()) for side in (ends, bottom)]
    seen_negative = sum(counts) if resolved and distinct else max(counts)
    uncertain = max(1.0, low / most)
    # the eigenvalues that were distinguished from zero, if not all were
    nonzeros = [sum(r is side for _, r, _ in nonzero) for side in (ends, bottom)]
    counted = sum(nonzeros) if distinct else max(nonzeros)
    rank = order - nullity if resolved else counted
    return ConditionNumber(
        value=largest / smallest if resolved else math.inf,
        lower=uncertain,
        upper=high / least if resolved else math.inf,
        lambda_max=largest,
        lambda_min=smallest,
        rank=rank,
        nullity=order - rank,
        negative=0 if psd else seen_negative,
        cutoff=most - smallest,
        gap=smallest / (most - smallest) if most > smallest else math.inf,
        resolved=resolved,
        solver=solver,
        rank_decision="iterative" if resolved else "unresolved",
        negative_counted=psd,
    )


def magnitude_interval(result: EigenResult, index: int) -> tuple[float, float]:
    """Bounds of |λ| of an eigenvalue; the lower one is 0 if its sign is not certain."""
    lower, upper = float(result.lower[index]), float(result.upper[index])
    return max(0.0, lower, -upper), max(abs(lower), abs(upper))
