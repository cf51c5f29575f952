"""Optimizers at work, and M = P Pᵀ as their state says it: one file of readers for each library.

A reader is a function of the `ParameterState` of one parameter; `reads` registers it under the names of the optimizers'
classes, so that no library is imported here.
"""

from hesscond.lazy import imported
from hesscond.methods.optimizers.at_work import (
    AtWork as AtWork,
    Given as Given,
    at_work as at_work,
    moves as moves,
    named as named,
)
from hesscond.methods.optimizers.reading import (
    ParameterState as ParameterState,
    UnknownOptimizerError as UnknownOptimizerError,
    as_map as as_map,
    held as held,
    known_optimizers as known_optimizers,
    reads as reads,
)

imported(__name__)
