"""Hessians built from what was captured: an output unit or a whole layer, on a batch or streamed over a data set.

Each is kept as its factor S^½Ĥ where there is one, and measured in plain or preconditioned coordinates.
"""

from hesscond.hessians.block import BlockHessian
from hesscond.hessians.build import layer_hessian, unit_conditions, unit_hessian, unit_hessians
from hesscond.hessians.factored import FactoredHessian
from hesscond.hessians.formed import FormedHessian
from hesscond.hessians.layer import LayerHessian
from hesscond.hessians.preconditioner import (
    CentringScaling,
    DensePreconditioner,
    Preconditioner,
    scaling_condition,
)
from hesscond.hessians.streaming import stream, stream_layers

__all__ = [
    "BlockHessian",
    "CentringScaling",
    "DensePreconditioner",
    "FactoredHessian",
    "FormedHessian",
    "LayerHessian",
    "Preconditioner",
    "layer_hessian",
    "scaling_condition",
    "stream",
    "stream_layers",
    "unit_conditions",
    "unit_hessian",
    "unit_hessians",
]
