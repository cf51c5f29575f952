"""The coordinates that no diagonal change of variables can beat."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from hesscond.errors import ConfigError
from hesscond.hessians.block import BlockHessian
from hesscond.hessians.charts import Chart, HessianMaker
from hesscond.hessians.factored import FactoredHessian
from hesscond.hessians.jacobi import diagonal
from hesscond.hessians.layer import LayerHessian
from hesscond.hessians.preconditioner import Scaling, UnitScaling
from hesscond.operators import SymmetricOperator
from hesscond.scaling import optimal_diagonal_scaling


class OptimalDiagonal(Chart):
    """ŵ = D z with the diagonal D > 0 for which κ(DHD) is smallest, to a certified gap: a yardstick for every other D.

    From the factor of H = FᵀF, whose columns D scales: κ(DHD) = κ(FD)². The Hessian must be positive semidefinite, as
    behind piecewise linear layers and a convex loss; `hesscond.optimal_diagonal_scaling` gives the bounds.
    """

    name = "optimal diagonal"
    local = True

    def at(self, hessian: BlockHessian) -> Scaling | UnitScaling:
        """D for the Hessian of a unit or a layer; 1 where it is zero, as that of a dead unit is.

        Raises
        ------
        ConfigError
            It has negative eigenvalues, or no factor is known.
        """
        factored = hessian.dense() if isinstance(hessian, LayerHessian) else hessian
        if not isinstance(factored, FactoredHessian) or factored.sign is not None:
            raise ConfigError(
                "the optimal diagonal scaling is defined for positive semidefinite Hessians that come as a factor: "
                "behind this layer there is something smooth, or the loss is not convex"
            )
        factor = factored.factor()
        if not factor.any():
            return diagonal(torch.ones_like(factor[0]), factored.units, self.name)
        best = optimal_diagonal_scaling(factor, side="column")
        return diagonal(torch.from_numpy(best.column).to(factored.rows.device), factored.units, self.name)

    def operator(self, hessian: HessianMaker, layer: str, unit: int | None) -> SymmetricOperator:
        """Not defined: products do not give the factor.

        Raises
        ------
        ConfigError
            Always.
        """
        raise ConfigError("the optimal diagonal scaling needs the factor of a unit or a layer, not products")

    def network(self, hessian: HessianMaker) -> tuple[SymmetricOperator, Mapping[str, slice]]:
        """Not defined.

        Raises
        ------
        ConfigError
            Always.
        """
        raise ConfigError("the optimal diagonal scaling is known for a unit or a layer, not for a whole network")
