"""Diagonal and Kronecker scalings with the smallest condition number, up to a certified gap.

Nothing here knows of networks: arrays in, frozen results out. The search may be inexact, since the bound of
`certificate` holds for any result; only the room `spectra` decides ranks and condition numbers.
"""

from hesscond.scaling.kronecker import OptimalKronecker, optimal_kronecker_scaling
from hesscond.scaling.optimal import Certificate, OptimalScaling, optimal_diagonal_scaling

__all__ = [
    "Certificate",
    "OptimalKronecker",
    "OptimalScaling",
    "optimal_diagonal_scaling",
    "optimal_kronecker_scaling",
]
