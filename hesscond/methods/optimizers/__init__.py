"""Optimizers at work, and M = P Pᵀ as their state says it: one file of readers for each library.

A reader is a function of a `Look` at one parameter; `reads` registers it under the names of the optimizers' classes, so
that no library is imported here.
"""

from hesscond.lazy import imported
from hesscond.methods.optimizers.at_work import AtWork, Given, at_work, moves, named
from hesscond.methods.optimizers.reading import Look, UnknownOptimizerError, as_map, held, known_optimizers, reads

__all__ = [
    "AtWork",
    "Given",
    "Look",
    "UnknownOptimizerError",
    "as_map",
    "at_work",
    "held",
    "known_optimizers",
    "moves",
    "named",
    "reads",
]

imported(__name__)
