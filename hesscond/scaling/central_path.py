r"""Smallest condition number over diagonal scalings, by Newton's method on the central path.

With M = LᵀWL, W = diag(w), X = diag(x) (X = I where only the rows are scaled), κ(W^½LX^−½)² ≤ 1/λ says λX ≼ M ≼ X. The
barrier

    f = −τ log λ − log det(M − λX) − log det(X − M) − Σ log w_i

is minimized for growing τ; a step costs O((m + r)³). The corrected inverses Y = S₁⁻¹(S₁ − dS₁)S₁⁻¹ of S₁ = M − λX and
likewise Z satisfy the dual constraints up to rounding as soon as Newton's decrement is below 1
(docs/concepts/bounds.md).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch
from scipy.linalg import LinAlgError, cho_factor, cho_solve, lapack

from hesscond.spectra.solvers.jacobi import jacobi_svd

#: τ grows by this factor once Newton's decrement is small; larger ones take more steps in all.
GROWTH = 5.0

#: Steps after which the search ends with what it has, in all (40 to 90 are usual) and for one τ (up to 20).
STEPS = 600
STEPS_EACH = 150

#: Relative error of M − λX that the singular values may cause before a more accurate decomposition is used.
BLUR = 1e-5

#: Largest number of rows that the search takes all at once. With many more, most weights tend to zero.
DIRECT = 1000

#: Largest number of rows at a time (a step takes a second), whatever the gap.
LARGEST = 4000

#: Rounds of adding rows; four to eight are usual.
ROUNDS = 30


class PathPoint(NamedTuple):
    """Strictly feasible point: weights w (m,), inverse squares x (r,) of column scales, λ, and U, σ, V of W^½LX^−½."""

    w: np.ndarray
    x: np.ndarray
    level: float
    U: np.ndarray
    s: np.ndarray
    V: np.ndarray

    @property
    def kappa(self) -> float:
        """Condition number of W^½LX^−½."""
        return float(self.s[0] / self.s[-1])


class Optimum(NamedTuple):
    """Best scaling of a search, diagonals ``rows`` (m,) and ``columns`` (r,), with its ``kappa``.

    ``lower`` is the bound that the dual factors ``Y_factor``, ``Z_factor`` (r, r) prove, without rounding;
    ``combination`` (m, r) is C with Y_factor ≈ LᵀC.
    """

    rows: np.ndarray
    columns: np.ndarray
    kappa: float
    lower: float
    Y_factor: np.ndarray
    Z_factor: np.ndarray
    combination: np.ndarray
    steps: int


class Newton(NamedTuple):
    """Newton step (p, q, e), relative changes of M − λX and X − M, squared decrement, and weights of the fixed mean."""

    p: np.ndarray
    q: np.ndarray
    e: float
    lower_change: np.ndarray
    upper_change: np.ndarray
    decrement: float
    pin: np.ndarray


def optimum(L: np.ndarray, *, both: bool, rtol: float) -> Optimum:
    """Search for the scaling of the rows of L (m, r), or of rows and columns, with the smallest κ."""
    best: Optimum | None = None
    kappa, rows, columns = np.inf, np.ones(len(L)), np.ones(L.shape[1])
    steps = 0
    for point, newton in path(L, both=both, rtol=rtol):
        steps += 1
        if point.kappa < kappa:
            kappa, rows, columns = point.kappa, np.sqrt(point.w), 1 / np.sqrt(point.x)
        dual = dual_pair(point, newton, both=both) if newton.decrement < 1 else None
        if dual is not None and (best is None or dual.lower > best.lower):
            best = dual
        if best is not None and kappa <= max(best.lower, 1.0) * (1 + rtol):
            break
    if best is None:
        r = L.shape[1]
        best = Optimum(rows, columns, kappa, 1.0, np.zeros((r, r)), np.eye(r), np.zeros(L.shape), 0)
    return best._replace(rows=rows, columns=columns, kappa=kappa, steps=steps)


def path(L: np.ndarray, *, both: bool, rtol: float) -> Iterator[tuple[PathPoint, Newton]]:
    """Yield points along the central path with their Newton steps, until the gap is closed or rounding stops it."""
    m, r = L.shape
    degree = m + 2 * r + (r if both else 0)
    point = start(L)
    s2 = point.s**2
    tau = float((point.level / (s2 - point.level)).sum())
    pin = held(point, tau, degree) if both else np.zeros(r)
    since = 0
    for _ in range(STEPS):
        since += 1
        step = newton_step(point, tau, pin, both=both, degree=degree)
        if step is None:
            return
        yield point, step
        if step.decrement < 0.5:
            # the gap that is left at this τ is degree / (2τ)
            if degree / tau < rtol / 10:
                return
            tau *= GROWTH
            pin = held(point, tau, degree) if both else pin
            since = 0
            continue
        if since > STEPS_EACH:
            return
        following = advance(L, point, step, tau, both=both, degree=degree)
        if following is None:
            return
        point = following


def start(L: np.ndarray) -> PathPoint:
    """First point: rows of norm 1, λ = σ_min²/2 and ‖M‖ = ½."""
    rows = 1 / np.linalg.norm(L, axis=1)
    U, s, V = decomposition(rows[:, None] * L, np.inf, 1.0)
    shrink = 1 / (s[0] * np.sqrt(2.0))
    s = s * shrink
    return PathPoint((rows * shrink) ** 2, np.ones(L.shape[1]), 0.5 * float(s[-1]) ** 2, U, s, V)


def decomposition(B: np.ndarray, kappa: float, sharpness: float) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Factors U, σ (descending), V of a tall B = UΣVᵀ with κ near ``kappa``, by the cheapest accurate route."""
    eps = 8 * float(np.finfo(float).eps)
    if kappa**2 * sharpness * eps < BLUR:
        squares, V = torch.linalg.eigh(torch.from_numpy(B.T @ B))
        s = np.sqrt(squares.numpy()[::-1].clip(min=0.0))
        if s[-1] > 0:
            V = V.numpy()[:, ::-1]
            return (B @ V) / s, s, V
    if kappa * sharpness * eps < BLUR:
        U, s, Vh = torch.linalg.svd(torch.from_numpy(B), full_matrices=False)
        return U.numpy(), s.numpy(), Vh.numpy().T
    s, U, V = jacobi_svd(np.asfortranarray(B))
    return U, s, V


def held(point: PathPoint, tau: float, degree: int) -> np.ndarray:
    """Weights (r,) of the mean of log x that is fixed, since f decreases along the free scale."""
    share = point.V**2 @ (1 / (point.s**2 - point.level))
    return (share / share.sum() * tau + degree / len(share)) / (tau + degree)


def newton_step(point: PathPoint, tau: float, pin: np.ndarray, *, both: bool, degree: int) -> Newton | None:
    """Newton step for f + degree · Σ pin_j log x_j; None if rounding leaves no descent direction."""
    U, s, V, level = point.U, point.s, point.V, point.level
    m, r = len(point.w), len(point.x)
    s2 = s**2
    d1, d2 = 1 / (s2 - level), 1 / (1 - s2)
    U2, V2 = U**2, V**2
    size = m + 1 + (r if both else 0)
    H, g = np.empty((size, size)), np.empty(size)
    g[:m] = U2 @ (s2 * (d2 - d1)) - 1
    g[-1] = level * d1.sum() - tau
    H[:m, :m] = ((U * (s2 * d1)) @ U.T) ** 2 + ((U * (s2 * d2)) @ U.T) ** 2
    H[range(m), range(m)] += 1
    H[:m, -1] = H[-1, :m] = -level * (U2 @ (s2 * d1**2))
    H[-1, -1] = level**2 * (d1**2).sum() + tau
    if both:
        columns = slice(m, m + r)
        share = level * (V2 @ d1)
        g[columns] = share - V2 @ d2 - 1 + degree * pin
        H[:m, columns] = -level * ((U * (s * d1)) @ V.T) ** 2 - ((U * (s * d2)) @ V.T) ** 2
        H[columns, :m] = H[:m, columns].T
        H[columns, columns] = level**2 * ((V * d1) @ V.T) ** 2 + ((V * d2) @ V.T) ** 2
        H[columns, -1] = H[-1, columns] = level**2 * (V2 @ d1**2) + share
        # x and λ move in logarithms: the second derivatives of exp, and none of log λ
        H[range(m, m + r), range(m, m + r)] += share - V2 @ d2
        H[-1, -1] += share.sum() - tau
        H[columns, columns] += 10 * np.trace(H) / size * np.outer(pin, pin)
    solution = descent(H, g)
    if solution is None:
        return None
    p, q, e = solution[:m], solution[m:-1] if both else np.zeros(r), float(solution[-1])
    change = s[:, None] * ((U.T * p) @ U) * s
    turned = (V.T * q) @ V
    lower = np.sqrt(d1)[:, None] * (change - level * turned - level * e * np.eye(r)) * np.sqrt(d1)
    upper = np.sqrt(d2)[:, None] * (turned - change) * np.sqrt(d2)
    return Newton(p, q, e, (lower + lower.T) / 2, (upper + upper.T) / 2, float(-g @ solution), pin)


def descent(H: np.ndarray, g: np.ndarray) -> np.ndarray | None:
    """Solution −H⁻¹g, with a multiple of the diagonal added until H is positive definite; None: too much is needed."""
    diagonal = H.diagonal().copy()
    for shift in (0.0, 1e-14, 1e-12, 1e-10, 1e-8, 1e-6, 1e-4, 1e-2, 1.0, 10.0):
        H[range(len(g)), range(len(g))] = diagonal + shift * np.abs(diagonal)
        try:
            solution = -cho_solve(cho_factor(H, lower=True, check_finite=False), g, check_finite=False)
        except LinAlgError:
            continue
        if np.isfinite(solution).all() and g @ solution < 0:
            return solution
    return None


def advance(L: np.ndarray, point: PathPoint, step: Newton, tau: float, *, both: bool, degree: int) -> PathPoint | None:
    """Next point along the step; None if no step can be taken."""
    rates = np.concatenate([eigenvalues(step.lower_change), eigenvalues(step.upper_change), step.p, step.q])
    drift = degree * float(step.pin @ step.q)
    length = line_minimum(rates, step.e, tau, drift)
    before = barrier(point, tau) if both else np.inf
    for _ in range(40):
        w = point.w * (1 + length * step.p)
        if both:
            x, level = point.x * np.exp(length * step.q), point.level * float(np.exp(length * step.e))
        else:
            x, level = point.x, point.level * (1 + length * step.e)
        if level > 0 and w.min() > 0:
            new = PathPoint(w, x, level, *decomposition(np.sqrt(w)[:, None] * L / np.sqrt(x), 1 / np.sqrt(level), tau))
            if new.s[0] < 1 and new.s[-1] ** 2 > level:
                fall = length * step.decrement / 10
                if not both or barrier(new, tau) + drift * length <= before - fall + 1e-9 * abs(before):
                    return new
        length /= 2
    return None


def barrier(point: PathPoint, tau: float) -> float:
    """Barrier f for scalings of both sides."""
    s2 = point.s**2
    inside = np.log(s2 - point.level).sum() + np.log(1 - s2).sum() + 3 * np.log(point.x).sum() + np.log(point.w).sum()
    return -tau * float(np.log(point.level)) - float(inside)


def eigenvalues(symmetric: np.ndarray) -> np.ndarray:
    """Eigenvalues of a symmetric matrix, ascending, by LAPACK."""
    return torch.linalg.eigvalsh(torch.from_numpy(symmetric)).numpy()


def line_minimum(rates: np.ndarray, e: float, tau: float, drift: float) -> float:
    """Minimizer t > 0 of −Σ log(1 + t ρ_k) − τ log(1 + t e) + drift · t, by bisection."""
    fall = -min(float(rates.min()), e)
    end = min(0.999 / fall if fall > 0 else np.inf, 10.0)

    def slope(t: float) -> float:
        return -float((rates / (1 + t * rates)).sum()) - tau * e / (1 + t * e) + drift

    low, high = 0.0, end
    if slope(high) < 0:
        return high
    for _ in range(30):
        middle = (low + high) / 2
        low, high = (middle, high) if slope(middle) < 0 else (low, middle)
    return high


def dual_pair(point: PathPoint, step: Newton, *, both: bool) -> Optimum | None:
    """Corrected inverses as factors, with their bound; None if rounding leaves them indefinite."""
    s2 = point.s**2
    identity = np.eye(len(s2))
    try:
        K1 = np.linalg.cholesky(identity - step.lower_change) / np.sqrt(s2 - point.level)[:, None]
        K2 = np.linalg.cholesky(identity - step.upper_change) / np.sqrt(1 - s2)[:, None]
    except np.linalg.LinAlgError:
        return None
    V = point.V / np.sqrt(point.x)[:, None]
    Y, Z = V @ K1, V @ K2
    # σUᵀ = VᵀLᵀW^½ at X = I: rows of L times Y without the cancellation of the product
    ratio = float(
        (
            np.linalg.norm(point.U @ (point.s[:, None] * K2), axis=1)
            / np.linalg.norm(point.U @ (point.s[:, None] * K1), axis=1)
        ).min()
    )
    if both:
        ends = float((np.linalg.norm(Y, axis=1) / np.linalg.norm(Z, axis=1)).min())
    else:
        ends = float(np.linalg.norm(Y) / np.linalg.norm(Z))
    combination = np.sqrt(point.w)[:, None] * (point.U @ (K1 / point.s[:, None]))
    return Optimum(np.sqrt(point.w), 1 / np.sqrt(point.x), point.kappa, ratio * ends, Y, Z, combination, 0)


def optimum_of_many(L: np.ndarray, *, both: bool, rtol: float) -> Optimum:
    """Search as in `optimum` on a subset of the rows of a tall L, to which rows with violated constraints are added.

    The other rows get weights so small that together they raise ‖M‖ by at most a part ``rtol`` / 2; they cannot lower
    its smallest eigenvalue.
    """
    m, r = L.shape
    if m <= max(DIRECT, 4 * r):
        return optimum(L, both=both, rtol=rtol)
    chosen = independent_rows(L)
    tolerance, steps = 1e-2, 0
    primal = dual = None
    for _ in range(ROUNDS):
        solution = optimum(L[chosen], both=both, rtol=tolerance)
        steps += solution.steps
        with np.errstate(divide="ignore"):
            ratios = np.linalg.norm(L @ solution.Z_factor, axis=1) / np.linalg.norm(L @ solution.Y_factor, axis=1)
        inside = ratios[chosen].min()
        # the pair is scaled down until it is feasible for all rows
        solution = solution._replace(lower=solution.lower * min(1.0, float(ratios.min() / inside)))
        if primal is None or solution.kappa < primal.kappa:
            primal = completed(L, chosen, solution, rtol)
        if dual is None or solution.lower > dual.lower:
            combination = np.zeros(L.shape)
            combination[chosen] = solution.combination
            dual = solution._replace(combination=combination)
        if primal.kappa <= max(1.0, dual.lower) * (1 + rtol):
            break
        violated = np.flatnonzero((ratios < inside * (1 - rtol / 4)) & ~chosen)
        # doubling: where nearly all rows count, as for Gaussian matrices, little is lost to the first rounds
        if len(violated) > 0.5 * (m - chosen.sum()) and m <= LARGEST:
            chosen[:] = True
            tolerance = rtol / 4
            continue
        room = min(max(2 * r, int(chosen.sum())), LARGEST - int(chosen.sum()))
        if len(violated) < r or room <= 0:
            if tolerance <= rtol / 4 and (len(violated) == 0 or room <= 0):
                break
            tolerance = max(tolerance / 30, rtol / 4)
        chosen[violated[np.argsort(ratios[violated])[: max(room, 0)]]] = True
    if primal is None or dual is None:
        raise ValueError("no round")
    return dual._replace(rows=primal.rows, columns=primal.columns, kappa=primal.kappa, steps=steps)


def independent_rows(L: np.ndarray) -> np.ndarray:
    """Mask (m,) of the first rows: r independent ones, and twice the same among the others."""
    directions = L / np.linalg.norm(L, axis=1)[:, None]
    chosen = np.zeros(len(L), bool)
    for _ in range(3):
        left = np.flatnonzero(~chosen)
        _, pivots, *_ = lapack.dgeqp3(np.asfortranarray(directions[left].T))
        chosen[left[pivots[: L.shape[1]] - 1]] = True
    return chosen


def completed(L: np.ndarray, chosen: np.ndarray, solution: Optimum, rtol: float) -> Optimum:
    """Scaling of the chosen rows, with small weights for all others."""
    if chosen.all():
        return solution
    # in the search ‖M‖ < 1, so that the others add up to at most rtol / 2 of it
    scaled = L[~chosen] * solution.columns
    rows = np.empty(len(L))
    rows[chosen] = solution.rows
    norm = np.linalg.norm((L[chosen] * solution.columns) * solution.rows[:, None], 2)
    rows[~chosen] = norm * np.sqrt(rtol / 2) / np.linalg.norm(scaled)
    return solution._replace(rows=rows)
