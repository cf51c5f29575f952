"""Published statements, checked: one file per paper; each has hypotheses, claims, and random trials that bounds decide.

`verify` runs one. A paper's module registers its statements when it is imported, as all modules of this package are.
"""

from hesscond.lazy import imported
from hesscond.theorems.base import (
    Claim,
    Counterexample,
    LayerStatement,
    Observation,
    Outcome,
    Statement,
    Tally,
    Verdict,
    decided,
    not_applicable,
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
    "decided",
    "not_applicable",
    "register",
    "statement",
    "statements",
    "verify",
]

imported(__name__)
