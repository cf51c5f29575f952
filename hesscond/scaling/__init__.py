"""The diagonal and Kronecker scalings with the smallest condition number, found to a gap that is certified.

Nothing here knows of networks: arrays in, frozen results out. The search may be as inexact as it likes, since the bound
of `certificate` holds whatever it did; only the room `spectra` decides ranks and condition numbers.
"""

from hesscond.scaling.certificate import Certificate
from hesscond.scaling.kronecker import OptimalKronecker, optimal_kronecker_scaling
from hesscond.scaling.optimal import OptimalScaling, optimal_diagonal_scaling

__all__ = [
    "Certificate",
    "OptimalKronecker",
    "OptimalScaling",
    "optimal_diagonal_scaling",
    "optimal_kronecker_scaling",
]
