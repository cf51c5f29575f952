"""Published statements, checked: one file per paper; each has hypotheses, claims, and random trials that bounds decide.

`verify` runs one. Importing a paper's module registers its statements; add yours to the list below.
"""

from hesscond.theorems import (
    bnp_algorithms,
    bnp_condition_numbers,
    bnp_identities,
    constrained_weights,
    curvature_structure,
    descent_rates,
    matrix_preconditioners,
    preconditioning,
    van_der_sluis,
    weight_conditioning,
)
from hesscond.theorems.base import (
    Claim,
    Counterexample,
    LayerStatement,
    Observation,
    Outcome,
    Statement,
    Tally,
    Verdict,
    observed_inputs,
    register,
    statement,
    statements,
    verify,
)
from hesscond.theorems.networks import LayerNetwork

__all__ = [
    "Claim",
    "Counterexample",
    "LayerNetwork",
    "LayerStatement",
    "Observation",
    "Outcome",
    "Statement",
    "Tally",
    "Verdict",
    "bnp_algorithms",
    "bnp_condition_numbers",
    "bnp_identities",
    "constrained_weights",
    "curvature_structure",
    "descent_rates",
    "matrix_preconditioners",
    "observed_inputs",
    "preconditioning",
    "register",
    "statement",
    "statements",
    "van_der_sluis",
    "verify",
    "weight_conditioning",
]
