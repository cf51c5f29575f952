"""Numbers from operators: κ with its rank decision and bounds, from factors or matrices.

Nothing here knows of networks: it takes arrays (or torch tensors, which LAPACK sees on the host) and returns
frozen results. Every tolerance is relative.
"""

from hesscond.spectra.condition import ConditionNumber
from hesscond.spectra.factored import factor_condition, factor_conditions, factor_eigenvalues
from hesscond.spectra.signed import signed_condition
from hesscond.spectra.symmetric import condition_number

__all__ = [
    "ConditionNumber",
    "condition_number",
    "factor_condition",
    "factor_conditions",
    "factor_eigenvalues",
    "signed_condition",
]
