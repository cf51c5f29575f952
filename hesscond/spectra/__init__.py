"""Spectra of matrices, factors and operators: κ with its rank decision and bounds, eigenvalues, densities.

Nothing here knows of networks: dense arrays and tensors go to LAPACK on the host, the vectors of an iteration stay on
the operator's device. Results are frozen. Every tolerance is relative.
"""

from hesscond.spectra.bounded import Bounded, bounded_condition
from hesscond.spectra.condition import ConditionNumber
from hesscond.spectra.density import Density, density
from hesscond.spectra.eigen import EigenResult
from hesscond.spectra.forms import condition_number
from hesscond.spectra.lanczos import lanczos
from hesscond.spectra.rank import ExactRank, Rank, exact_rank, rank
from hesscond.spectra.smallest import smallest_nonzero

__all__ = [
    "Bounded",
    "ConditionNumber",
    "Density",
    "EigenResult",
    "ExactRank",
    "Rank",
    "bounded_condition",
    "condition_number",
    "density",
    "exact_rank",
    "lanczos",
    "rank",
    "smallest_nonzero",
]
