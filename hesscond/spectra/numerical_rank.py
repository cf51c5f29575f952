"""Numerical rank of a matrix with rounded entries: decided with its evidence, or unresolved."""

from __future__ import annotations

import math
from dataclasses import dataclass
from numbers import Real
from typing import Literal

import numpy as np
import torch

from hesscond.errors import MatrixError
from hesscond.spectra.condition import EPS, NOISE, Values, conclude, error_factor
from hesscond.spectra.matrices import as_matrix, dense, scaled_core
from hesscond.spectra.rank import structural_rank_bound
from hesscond.spectra.solvers.eigenvalues import eigenvalue_values
from hesscond.spectra.threads import one_thread


@dataclass(frozen=True, slots=True)
class Rank:
    """Numerical rank of a matrix, with its evidence. ``int(rank)`` is ``rank.value``.

    Attributes
    ----------
    value
        Number of singular values that are distinguished from zero.
    lower, upper
        Interval of the rank: every matrix within the error bound has at least rank ``lower``. If resolved,
        both are ``value``; else ``upper`` is what the zero pattern and repeated rows and columns allow.
    shape
        Shape of the matrix.
    cutoff
        The bound of the error of a singular value: those above count, and an optimizer that inverts may keep them.
    sigma_max, sigma_min
        Largest singular value, and smallest that counts (0 of a zero matrix).
    remainder
        Largest singular value that does not count; 0 if all do.
    gap
        ``sigma_min`` over the larger of ``cutoff`` and ``remainder``.
    resolved
        Whether the rank is decided.
    decision
        ``"structural"``: as many as the zero pattern and repeated rows and columns allow. ``"numerical"``: the others
        are of the size of rounding, 1e3 below the smallest that counts, and are taken for zeros. ``"unresolved"``.
    """

    value: int
    lower: int
    upper: int
    shape: tuple[int, int]
    cutoff: float
    sigma_max: float
    sigma_min: float
    remainder: float
    gap: float
    resolved: bool
    decision: Literal["structural", "numerical", "unresolved"]

    def __int__(self) -> int:
        return self.value

    def __str__(self) -> str:
        m, n = self.shape
        if not self.resolved:
            return (
                f"rank between {self.lower} and {self.upper} of a {m} × {n} matrix (unresolved: "
                f"σ = {self.remainder:.2g} is neither above {self.cutoff:.2g} nor rounding)"
            )
        if not self.remainder:
            return f"rank {self.value} of a {m} × {n} matrix ({self.decision})"
        return (
            f"rank {self.value} of a {m} × {n} matrix ({self.decision}, gap {self.gap:.2g}, cutoff {self.cutoff:.2g})"
        )


def rank(matrix: object, *, error: float | None = None) -> Rank:
    """Rank of a matrix up to its rounding: how many singular values are certainly not zero, and whether others may.

    The singular values of an array of doubles are known to c·eps·σ_max, c = max(16, √(mn)); what exceeds that counts.
    The rest are zeros if they are no more than 16 eps·σ_max, and 1e3 smaller than those that count. Values between
    leave the rank unresolved: any cutoff would be a guess. With the eps of the matrix's type, the rounding of its
    entries is covered as well, as in a sum of products of that precision.

    Parameters
    ----------
    matrix : (m, n) array, tensor or sparse matrix
        Symmetric or not; at most float64.
    error
        Absolute bound, in the 2-norm, of the error that is already in the matrix; None: the rounding of its type.

    Returns
    -------
    Rank

    Raises
    ------
    MatrixError
        Not a finite, non-empty real matrix whose entries are doubles; ``error`` is no number of at least 0.

    Notes
    -----
    `exact_rank` is that of the very doubles. Of a matrix with the planted rank r, rounded, it is usually full.

    Examples
    --------
    >>> F = np.random.default_rng(0).standard_normal((3, 8))
    >>> found = rank(F.T @ F)
    >>> int(found), found.decision, found.upper
    (3, 'numerical', 3)
    >>> print(rank(np.diag([1.0, 1e-13, 1e-15]) + 1e-17))
    rank between 2 and 3 of a 3 × 3 matrix (unresolved: σ = 1e-15 is neither above 3.6e-15 nor rounding)
    """
    if error is not None and not (isinstance(error, Real) and 0 <= error < math.inf):
        raise MatrixError(f"error={error!r} is not a finite number of at least 0")
    given = as_matrix(dense(matrix))
    shape, order = (given.shape[0], given.shape[1]), min(given.shape)
    core, scale, *_ = scaled_core(given)
    if core.size == 0:
        return Rank(0, 0, 0, shape, 0.0, 0.0, 0.0, 0.0, math.inf, True, "structural")
    sigma = singular_values(core)
    unit = (precision(matrix) if error is None else EPS) * float(sigma[0])
    carried = 0.0 if error is None else float(np.ldexp(error, -scale))
    errors = np.full(len(sigma), error_factor(*core.shape) * unit + carried)
    values = Values(sigma, errors, np.full(len(sigma), NOISE * unit + carried), 1, "SVD")
    limit = structural_rank_bound(core)
    found = conclude(values, order=order, limit=limit, scale=scale)
    assert found.rank_decision in ("structural", "numerical", "unresolved")
    rest = float(sigma[found.rank]) if found.rank < limit else 0.0
    return Rank(
        found.rank,
        found.rank,
        found.rank if found.resolved else limit,
        shape,
        math.ldexp(float(errors[0]), scale),
        found.lambda_max,
        found.lambda_min,
        math.ldexp(rest, scale),
        found.gap,
        found.resolved,
        found.rank_decision,
    )


def singular_values(core: np.ndarray) -> np.ndarray:
    """Singular values, descending; for a symmetric matrix |λ|, which are cheaper."""
    if core.shape[0] == core.shape[1] and np.array_equal(core, core.T):
        return eigenvalue_values(core, 0.0).magnitudes
    with one_thread():
        return torch.linalg.svdvals(torch.from_numpy(core)).numpy()


def precision(matrix: object) -> float:
    """Machine epsilon of the type of the entries, at least that of doubles."""
    dtype = getattr(matrix, "dtype", None)
    if isinstance(dtype, torch.dtype):
        return max(EPS, torch.finfo(dtype).eps) if dtype.is_floating_point else EPS
    floating = isinstance(dtype, np.dtype) and dtype.kind == "f"
    return max(EPS, float(np.finfo(dtype).eps)) if floating else EPS
