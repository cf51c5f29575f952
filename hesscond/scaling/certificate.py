"""Lower bounds of κ⁺ over all scalings from any pair of factors, with bounds of every rounding."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

EPS = float(np.finfo(float).eps)

#: Largest error of products and squares by underflow, if the largest entry of the product AF is near 1.
TINY = 1e-150

#: Products in extended precision are used up to this many multiplications (a second or so).
EXTENDED_LIMIT = 10**8


@dataclass(frozen=True, slots=True, eq=False)
class Certificate:
    """Pair of positive semidefinite matrices that bounds κ⁺ of every scaled matrix from below.

    With Y = FFᵀ, Z = GGᵀ and a_i the rows of A (its columns if ``transposed``), a_iᵀYa_i ≤ a_iᵀZa_i for every i.

    One side, D scaling the a_i: with P the projection on the span of the a_i and M = AᵀD²A, tr ZM ≤ λ_max tr Z and
    λ_min⁺ tr PYP ≤ tr YM ≤ tr ZM, so κ⁺(DA)² ≥ tr PYP / tr Z. (P = I where the a_i span everything.)

    Both sides, the a_i spanning everything: with x_j the inverse squares of the scaling of column j and
    λ diag(x) ≼ M ≼ μ diag(x), λ Σ x_j Y_jj ≤ tr YM ≤ tr ZM ≤ μ Σ x_j Z_jj, so κ(D₁AD₂)² ≥ min_j Y_jj / Z_jj.

    Attributes
    ----------
    Y_factor, Z_factor : (n, k) arrays
        F and G, as exact numbers; row j belongs to column j of A (row j if ``transposed``).
    transposed
        Whether the bound is derived for Aᵀ.
    lower
        Bound of κ⁺ that follows, reduced by the rounding of its evaluation.
    """

    Y_factor: np.ndarray
    Z_factor: np.ndarray
    transposed: bool
    lower: float


class Certified(NamedTuple):
    """Pair that was made feasible (see `Certificate`); ``lower`` bounds κ⁺."""

    Y_factor: np.ndarray
    Z_factor: np.ndarray
    lower: float


def certify_trace(
    A: np.ndarray, Y_factor: np.ndarray, Z_factor: np.ndarray, combination: np.ndarray | None
) -> Certified:
    """Make a pair feasible and bound κ⁺(DA) for all D, with A (m, n) without rows of zeros and entries of at most 1."""
    F, G = feasible(A, Y_factor, Z_factor)
    outside = 0.0
    if combination is not None:
        # the combination of the rescaled factor: F and Y_factor differ by one number and by rounding
        C = combination * (np.linalg.norm(F) / np.linalg.norm(Y_factor))
        image, error = product(A.T, C, extended(A, F))
        outside = float(np.linalg.norm(np.abs(image - F) + error + EPS * (np.abs(F) + np.abs(image))))
    slack = (F.size + 16) * EPS
    top = float(np.linalg.norm(F)) * (1 - slack) - outside * (1 + slack)
    return Certified(F, G, max(1.0, top / (float(np.linalg.norm(G)) * (1 + slack)) * (1 - 4 * EPS)))


def certify_ratio(A: np.ndarray, Y_factor: np.ndarray, Z_factor: np.ndarray) -> Certified:
    """Make a pair feasible and bound κ(D₁AD₂) for all D₁, D₂; A as in `certify_trace`, of rank n."""
    F, G = feasible(A, Y_factor, Z_factor)
    slack = (F.shape[1] + 16) * EPS
    ratios = np.linalg.norm(F, axis=1) * (1 - slack) / (np.linalg.norm(G, axis=1) * (1 + slack))
    return Certified(F, G, max(1.0, float(ratios.min()) * (1 - 4 * EPS)))


def feasible(A: np.ndarray, F: np.ndarray, G: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Multiples of F and G with ‖a_iᵀF‖ ≤ ‖a_iᵀG‖ for every row a_i of A, proved with the bounds of `row_norms`."""
    F, G = normalized(A, F), normalized(A, G)
    kind: type[np.floating] = np.float64
    low, high = row_norms(A, F, kind)
    if (high > low * (1 + 1e-8)).any():
        kind = extended(A, F)
        high = row_norms(A, F, kind)[1]
    allowed = row_norms(A, G, kind)[0]
    factor = float((allowed / high).min())
    if not factor > 0:
        return np.zeros_like(F), G
    for slack in (1e-15, 1e-14, 1e-13, 1e-12, 1e-10, 1e-8, 1e-6):
        # the rescaled factor is rounded, and that may count: it is the one that is checked
        scaled = F * (factor * (1 - slack))
        if (row_norms(A, scaled, kind)[1] <= allowed).all():
            return scaled, G
    return np.zeros_like(F), G


def normalized(A: np.ndarray, F: np.ndarray) -> np.ndarray:
    """Product of F and a power of two such that the largest entry of AF is near 1 and no square underflows."""
    largest = float(np.abs(A @ F).max())
    if not (np.isfinite(largest) and largest > 0):
        return np.zeros_like(F)
    return np.ldexp(F, -int(np.frexp(largest)[1]))


def row_norms(A: np.ndarray, F: np.ndarray, kind: type[np.floating]) -> tuple[np.ndarray, np.ndarray]:
    """Lower and upper bounds of the 2-norms of the rows of AF, computed in the precision ``kind``."""
    image, error = product(A, F, kind)
    slack = (F.shape[1] + 16) * EPS
    norm, off = np.linalg.norm(image, axis=1), np.linalg.norm(error, axis=1)
    return norm * (1 - slack) - off * (1 + slack) - TINY, (norm + off) * (1 + slack) + TINY


def extended(A: np.ndarray, F: np.ndarray) -> type[np.floating]:
    """Most precise type of number in which AF takes about a second at most."""
    return np.longdouble if A.size * F.shape[1] <= EXTENDED_LIMIT else np.float64


def product(A: np.ndarray, F: np.ndarray, kind: type[np.floating]) -> tuple[np.ndarray, np.ndarray]:
    """Product AF and an entrywise bound of its error, γ_n |A||F| for any order of summation.

    Source: Higham, Accuracy and Stability of Numerical Algorithms (2nd ed., 2002), section 3.5.
    """
    n = A.shape[1]
    unit = max(float(np.finfo(kind).eps), 2.0**-100)
    gamma = (n + 2) * unit / (1 - (n + 2) * unit)
    image = np.asarray(A.astype(kind) @ F.astype(kind), dtype=float)
    bound = gamma * (np.abs(A) @ np.abs(F)) * (1 + 2 * (n + 4) * EPS)
    if kind is not np.float64:
        bound = bound + EPS * np.abs(image)
    return image, bound
