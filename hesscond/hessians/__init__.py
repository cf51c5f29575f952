"""Hessians of units and layers, captured on a batch or streamed over a data set, and the coordinates they are in.

Each is kept as its factor S^½Ĥ where there is one, and measured in plain or other `Coordinates`. Hessians of whole
networks are products: `HessianOperator`, `GGNOperator`.
"""

from typing import TYPE_CHECKING

from hesscond.lazy import attach

if TYPE_CHECKING:
    from hesscond.hessians.catalogue import role as role
    from hesscond.hessians.coordinates.base import (
        BlockHessian as BlockHessian,
        Chart as Chart,
        Coordinates as Coordinates,
        HessianScaling as HessianScaling,
        Preconditioner as Preconditioner,
    )
    from hesscond.hessians.coordinates.charts import (
        Reparametrized as Reparametrized,
        SphereTangentOperator as SphereTangentOperator,
    )
    from hesscond.hessians.coordinates.from_hessian import (
        Jacobi as Jacobi,
        OptimalDiagonal as OptimalDiagonal,
        OptimalKronecker as OptimalKronecker,
    )
    from hesscond.hessians.coordinates.linear import (
        CentringScaling as CentringScaling,
        DensePreconditioner as DensePreconditioner,
        GroupedPreconditioner as GroupedPreconditioner,
        Kronecker as Kronecker,
        Scaling as Scaling,
    )
    from hesscond.hessians.coordinates.parameter_maps import ParameterMap as ParameterMap
    from hesscond.hessians.network_operator import GGNOperator as GGNOperator, HessianOperator as HessianOperator
    from hesscond.hessians.null_space import (
        NullDirections as NullDirections,
        network_null_directions as network_null_directions,
    )
else:
    __getattr__, __dir__, __all__ = attach(__name__)
