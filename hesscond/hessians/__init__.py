"""Hessians built from what was captured: one output unit of a layer, on a batch or streamed over a data set.

Each is kept as its factor S^½Ĥ and measured in plain or preconditioned coordinates.
"""

from hesscond.hessians.preconditioner import (
    CentringScaling,
    DensePreconditioner,
    Preconditioner,
    scaling_condition,
)
from hesscond.hessians.streaming import stream
from hesscond.hessians.unit import UnitHessian

__all__ = ["CentringScaling", "DensePreconditioner", "Preconditioner", "UnitHessian", "scaling_condition", "stream"]
