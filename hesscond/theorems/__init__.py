"""Published statements, checked: one file per paper; each has hypotheses, claims, and random trials that bounds decide.

`verify` runs one. A paper's module registers its statements when it is imported, as all modules of this package are.
"""

from typing import TYPE_CHECKING

from hesscond.lazy import attach, imported

if TYPE_CHECKING:
    from hesscond.theorems.base import (
        Claim as Claim,
        Counterexample as Counterexample,
        LayerStatement as LayerStatement,
        Observation as Observation,
        Outcome as Outcome,
        Statement as Statement,
        Tally as Tally,
        Verdict as Verdict,
        decided as decided,
        not_applicable as not_applicable,
        register as register,
        statement as statement,
        statements as statements,
        verify as verify,
    )
    from hesscond.theorems.networks import LayerNetwork as LayerNetwork
else:
    __getattr__, __dir__, __all__ = attach(__name__)

imported(__name__)
