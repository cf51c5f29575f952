"""Hessians of units and layers, captured on a batch or streamed over a data set, and the coordinates they are in.

Each is kept as its factor S^½Ĥ where there is one, and measured in plain or other `Coordinates`. Hessians of whole
networks are products: `HessianOperator`, `GGNOperator`.
"""

from typing import TYPE_CHECKING

from hesscond.lazy import attach

if TYPE_CHECKING:
    from hesscond.hessians.catalogue import role
    from hesscond.hessians.coordinates.base import (
        BlockHessian,
        Chart,
        Coordinates,
        HessianScaling,
        Preconditioner,
    )
    from hesscond.hessians.coordinates.charts import Reparametrized, SphereTangentOperator
    from hesscond.hessians.coordinates.from_hessian import Jacobi, OptimalDiagonal, OptimalKronecker
    from hesscond.hessians.coordinates.linear import (
        CentringScaling,
        DensePreconditioner,
        GroupedPreconditioner,
        Kronecker,
        Scaling,
    )
    from hesscond.hessians.coordinates.parameter_maps import ParameterMap
    from hesscond.hessians.network_operator import GGNOperator, HessianOperator
    from hesscond.hessians.null_space import NullDirections, network_null_directions
else:
    __getattr__, __dir__ = attach(__name__)

__all__ = [
    "BlockHessian",
    "CentringScaling",
    "Chart",
    "Coordinates",
    "DensePreconditioner",
    "GGNOperator",
    "GroupedPreconditioner",
    "HessianOperator",
    "HessianScaling",
    "Jacobi",
    "Kronecker",
    "NullDirections",
    "OptimalDiagonal",
    "OptimalKronecker",
    "ParameterMap",
    "Preconditioner",
    "Reparametrized",
    "Scaling",
    "SphereTangentOperator",
    "network_null_directions",
    "role",
]
