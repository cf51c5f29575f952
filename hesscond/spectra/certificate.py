"""Bounds of the smallest singular value that hold whatever the solver did."""

from __future__ import annotations

import numpy as np
from scipy.linalg import lapack, solve_triangular

EPS = float(np.finfo(float).eps)


def smallest_singular_value(
    core: np.ndarray, v: np.ndarray, error: np.ndarray | None = None
) -> tuple[float, float] | None:
    r"""Lower and upper bound of σ_n of a tall matrix A of full column rank; None if that cannot be certified.

    Above: ‖Av‖/‖v‖ for any v. Below: any X with ‖(XA)⁻¹X‖ ≤ β gives σ_n ≥ 1/β. X is the left inverse from a
    row-sorted pivoted QR; with E = XA − I and \|E\| ≤ B (what was computed, plus γ_m \|X\|\|A\| for rounding) and
    Bs ≤ ρs for s = \|X\|e, ρ < 1, each row of (XA)⁻¹X − X is at most ρ/(1 − ρ) s_i in the 1-norm. Since B is
    bounded entry by entry, both ends stay sharp for rows and columns of any scale.

    Parameters
    ----------
    core : (m, n) array, m ≥ n
    v : (n,) array
        Approximates the singular vector of σ_n; only the sharpness of the upper bound depends on it.
    error : (m, n) array or None
        Bounds of the errors already in the entries of A: the ends hold for every matrix that close to it.
    """
    m, n = core.shape
    gamma = (m + 8) * EPS / (1 - (m + 8) * EPS)
    uncertain = gamma * np.abs(core) if error is None else gamma * np.abs(core) + error
    X = left_inverse(core)
    if X is None:
        return None
    size = np.abs(X)
    s = size.sum(1)
    B = np.abs(X @ core - np.eye(n)) * (1 + EPS) + size @ uncertain
    with np.errstate(over="ignore", invalid="ignore"):
        rho = float((B @ s / s).max()) * (1 + 2 * n * EPS)
    if not rho < 0.5:
        return None
    norm = float(np.linalg.norm(X, 2)) * (1 + max(16.0, np.sqrt(m * n)) * EPS)
    # scaled, for entries whose squares overflow
    length = float(s.max() * np.linalg.norm(s / s.max()))
    below = 1 / (norm + rho / (1 - rho) * length) * (1 - 4 * EPS)
    # a step of inverse iteration: v is accurate in norm only, which a large σ_1 would blow up
    v = X @ (X.T @ (v / norm))
    v = v / np.abs(v).max()
    image = np.linalg.norm(core @ v) + np.linalg.norm(uncertain @ np.abs(v))
    above = float(image / np.linalg.norm(v)) * (1 + (2 * m + 4) * EPS)
    return below, above


def left_inverse(core: np.ndarray) -> np.ndarray | None:
    """R⁻¹Qᵀ (n, m) of a tall matrix, rows sorted by size and columns pivoted; None if R is singular."""
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
