"""Hessians built from what was captured: an output unit or a whole layer, on a batch or streamed over a data set.

Each is kept as its factor S^½Ĥ where there is one, and measured in plain or other `Coordinates`. Whole networks,
and what is too large for that, are known by their products: `HessianOperator`, `GGNOperator`.
"""

from hesscond.hessians.blocks import Block, BlockLayout, Catalogue, Choice, role
from hesscond.hessians.build import layer_hessian, unit_conditions, unit_hessian, unit_hessians
from hesscond.hessians.coordinates import (
    BlockHessian,
    Chart,
    Coordinates,
    DensePreconditioner,
    HessianMaker,
    HessianScaling,
    Kronecker,
    LayerCoordinates,
    LinearCoordinates,
    Preconditioner,
    Product,
    Scaling,
    Source,
    UnitCoordinates,
    UnitPreconditioner,
    UnitScaling,
    coordinates_of,
    unit_layout,
)
from hesscond.hessians.factored import FactoredHessian, conditions_of, forms_of, traces_of
from hesscond.hessians.formed import FormedHessian
from hesscond.hessians.hessian_scalings import Jacobi, OptimalDiagonal, OptimalKronecker
from hesscond.hessians.kronecker import KroneckerInverse
from hesscond.hessians.layer import LayerHessian
from hesscond.hessians.network_hessian import NetworkHessian, ZeroPaddedHessian
from hesscond.hessians.network_inverse import BlockInverse, network_inverse
from hesscond.hessians.network_operator import GGNOperator, HessianOperator
from hesscond.hessians.null_directions import NullDirections, combined, network_null_directions
from hesscond.hessians.parameter_maps import ParameterCoordinates, ParameterMap, layer_map
from hesscond.hessians.preconditioner import (
    CentringScaling,
    GroupedPreconditioner,
    by_group,
    scaling_condition,
    scaling_conditions,
)
from hesscond.hessians.reduced import PulledInverse, remaining
from hesscond.hessians.reparametrized import Reparametrized
from hesscond.hessians.source import BlockSource
from hesscond.hessians.streaming import stream, stream_layers
from hesscond.hessians.tangent import SphereTangentOperator

__all__ = [
    "Block",
    "BlockHessian",
    "BlockInverse",
    "BlockLayout",
    "BlockSource",
    "Catalogue",
    "CentringScaling",
    "Chart",
    "Choice",
    "Coordinates",
    "DensePreconditioner",
    "FactoredHessian",
    "FormedHessian",
    "GGNOperator",
    "GroupedPreconditioner",
    "HessianMaker",
    "HessianOperator",
    "HessianScaling",
    "Jacobi",
    "Kronecker",
    "KroneckerInverse",
    "LayerCoordinates",
    "LayerHessian",
    "LinearCoordinates",
    "NetworkHessian",
    "NullDirections",
    "OptimalDiagonal",
    "OptimalKronecker",
    "ParameterCoordinates",
    "ParameterMap",
    "Preconditioner",
    "Product",
    "PulledInverse",
    "Reparametrized",
    "Scaling",
    "Source",
    "SphereTangentOperator",
    "UnitCoordinates",
    "UnitPreconditioner",
    "UnitScaling",
    "ZeroPaddedHessian",
    "by_group",
    "combined",
    "conditions_of",
    "coordinates_of",
    "forms_of",
    "layer_hessian",
    "layer_map",
    "network_inverse",
    "network_null_directions",
    "remaining",
    "role",
    "scaling_condition",
    "scaling_conditions",
    "stream",
    "stream_layers",
    "traces_of",
    "unit_conditions",
    "unit_hessian",
    "unit_hessians",
    "unit_layout",
]
