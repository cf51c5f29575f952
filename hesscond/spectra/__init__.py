"""Numbers from operators: κ with its rank decision and bounds, from factors or matrices.

Nothing here knows of networks: it takes arrays (or torch tensors, which LAPACK sees on the host) and returns
frozen results. Every tolerance is relative.
"""

from hesscond.spectra.batched import scaled_gram_conditions, stacked_conditions
from hesscond.spectra.condition import ConditionNumber
from hesscond.spectra.dual import dual_condition, dual_signed_condition
from hesscond.spectra.factored import factor_condition, factor_conditions, factor_eigenvalues
from hesscond.spectra.pairs import factor_eigenpairs, signed_eigenpairs
from hesscond.spectra.signed import signed_condition, signed_eigenvalues
from hesscond.spectra.symmetric import condition_number

__all__ = [
    "ConditionNumber",
    "condition_number",
    "dual_condition",
    "dual_signed_condition",
    "factor_condition",
    "factor_conditions",
    "factor_eigenpairs",
    "factor_eigenvalues",
    "scaled_gram_conditions",
    "signed_condition",
    "signed_eigenpairs",
    "signed_eigenvalues",
    "stacked_conditions",
]
