"""Hessians built from what was captured: an output unit or a whole layer, on a batch or streamed over a data set.

Each is kept as its factor S^½Ĥ where there is one, and measured in plain or preconditioned coordinates. Whole networks,
and what is too large for that, are known by their products: `HessianOperator`, `GGNOperator`.
"""

from hesscond.hessians.block import BlockHessian
from hesscond.hessians.build import layer_hessian, unit_conditions, unit_hessian, unit_hessians
from hesscond.hessians.charts import Chart, HessianMaker, Reparametrized
from hesscond.hessians.coordinates import LayerCoordinates, UnitCoordinates, coordinates_of
from hesscond.hessians.factored import FactoredHessian
from hesscond.hessians.formed import FormedHessian
from hesscond.hessians.grouped import GroupedPreconditioner, by_group
from hesscond.hessians.jacobi import Jacobi
from hesscond.hessians.kronecker import KroneckerInverse
from hesscond.hessians.layer import LayerHessian
from hesscond.hessians.network_hessian import NetworkHessian
from hesscond.hessians.network_inverse import BlockInverse, network_inverse
from hesscond.hessians.network_operator import GGNOperator, HessianOperator
from hesscond.hessians.null_directions import NullDirections, combined, network_null_directions
from hesscond.hessians.optimal_diagonal import OptimalDiagonal
from hesscond.hessians.penalized import Penalized
from hesscond.hessians.preconditioner import (
    CentringScaling,
    DensePreconditioner,
    Preconditioner,
    Scaling,
    UnitPreconditioner,
    UnitScaling,
    scaling_condition,
)
from hesscond.hessians.reduced import PulledInverse, remaining
from hesscond.hessians.sphere_chart import SphereChart
from hesscond.hessians.streaming import stream, stream_layers
from hesscond.hessians.tangent import SphereTangentOperator
from hesscond.hessians.whitening import whitening

__all__ = [
    "BlockHessian",
    "BlockInverse",
    "CentringScaling",
    "Chart",
    "DensePreconditioner",
    "FactoredHessian",
    "FormedHessian",
    "GGNOperator",
    "GroupedPreconditioner",
    "HessianMaker",
    "HessianOperator",
    "Jacobi",
    "KroneckerInverse",
    "LayerCoordinates",
    "LayerHessian",
    "NetworkHessian",
    "NullDirections",
    "OptimalDiagonal",
    "Penalized",
    "Preconditioner",
    "PulledInverse",
    "Reparametrized",
    "Scaling",
    "SphereChart",
    "SphereTangentOperator",
    "UnitCoordinates",
    "UnitPreconditioner",
    "UnitScaling",
    "by_group",
    "combined",
    "coordinates_of",
    "layer_hessian",
    "network_inverse",
    "network_null_directions",
    "remaining",
    "scaling_condition",
    "stream",
    "stream_layers",
    "unit_conditions",
    "unit_hessian",
    "unit_hessians",
    "whitening",
]
