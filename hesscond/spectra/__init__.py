"""Numbers from matrices, factors and operators: κ with its rank decision and bounds, eigenvalues, densities.

Nothing here knows of networks: dense arrays and tensors go to LAPACK on the host, the vectors of an iteration stay on
the operator's device. Results are frozen. Every tolerance is relative.
"""

from hesscond.spectra.batched import scaled_gram_conditions, stacked_conditions
from hesscond.spectra.condition import ConditionNumber
from hesscond.spectra.density import Density, density
from hesscond.spectra.eigen import EigenResult
from hesscond.spectra.factored import (
    dual_condition,
    factor_condition,
    factor_conditions,
    factor_eigenpairs,
    factor_eigenvalues,
)
from hesscond.spectra.given import condition_number
from hesscond.spectra.lanczos import lanczos
from hesscond.spectra.matrix_free import Effort, Known, operator_condition
from hesscond.spectra.rank import Rank, rank
from hesscond.spectra.signed import dual_signed_condition, signed_condition, signed_eigenpairs, signed_eigenvalues
from hesscond.spectra.smallest import smallest_nonzero

__all__ = [
    "ConditionNumber",
    "Density",
    "Effort",
    "EigenResult",
    "Known",
    "Rank",
    "condition_number",
    "density",
    "dual_condition",
    "dual_signed_condition",
    "factor_condition",
    "factor_conditions",
    "factor_eigenpairs",
    "factor_eigenvalues",
    "lanczos",
    "operator_condition",
    "rank",
    "scaled_gram_conditions",
    "signed_condition",
    "signed_eigenpairs",
    "signed_eigenvalues",
    "smallest_nonzero",
    "stacked_conditions",
]
