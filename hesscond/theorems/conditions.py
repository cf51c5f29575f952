"""κ⁺ of rectangular matrices with bounds, and the diagonal scalings that the statements speak of."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from hesscond.spectra import FactorForm


@dataclass(frozen=True)
class Kappa:
    """Bounds of κ⁺(A) = σ_max / smallest nonzero σ; NaN if the rank is unresolved.

    Attributes
    ----------
    lower, upper
        κ⁺ lies between.
    rank
        Of the matrix.
    """

    lower: float
    upper: float
    rank: int

    def __truediv__(self, other: Kappa) -> tuple[float, float]:
        """Bounds of the quotient of two."""
        return self.lower / other.upper, self.upper / other.lower


def kappa(A: np.ndarray) -> Kappa:
    """κ⁺ of a matrix (m, n), from its singular values and their certified bounds."""
    # what is measured is rounded: values of the size of round-off are zeros
    found = FactorForm(A).condition(rtol=1e-12)
    if not found.resolved:
        return Kappa(math.nan, math.nan, found.rank)
    return Kappa(math.sqrt(found.lower), math.sqrt(found.upper), found.rank)


def row_norms(A: np.ndarray) -> np.ndarray:
    """(m,) 2-norms of the rows, 1 for rows of zeros, which equilibration leaves alone."""
    norms = np.linalg.norm(A, axis=1)
    return np.where(norms == 0, 1.0, norms)


def equilibrated(A: np.ndarray) -> np.ndarray:
    """EA: rows of norm 1, where they are not zero."""
    return A / row_norms(A)[:, None]
