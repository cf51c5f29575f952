"""The parameters of a module as coordinates: those behind a weight that is computed, or those of any module."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import nn

from hesscond.hessians.blocks import BlockLayout, Catalogue
from hesscond.hessians.coordinates import Chart, HessianMaker
from hesscond.operators import SymmetricOperator


class Reparametrized(Chart):
    """The parameters θ of a module of any kind, such as those behind a weight W(θ), and its bias.

    A unit's are its rows of every parameter of the module whose first dimension is that of the units: H in them has all
    of the dependence of the other units' weights on them. The order is bias first, then the parameters as the module
    lists them, unit by unit for a unit and one after another for the layer.

    Parameters
    ----------
    model
        The model.
    name
        Name of the coordinates in the log.
    """

    def __init__(self, model: nn.Module, name: str) -> None:
        self.model, self.name = model, name

    def chosen_units(self, model: nn.Module, layer: str, units: Sequence[int] | None) -> tuple[int, ...]:
        """The units that were asked for (None: all): those of a dense or convolutional layer, or rows of the first θ.

        Raises
        ------
        ConfigError
            A transposed convolution, whose rows are not units; no such unit, or no parameter of one unit alone.
        """
        return Catalogue(self.model).block(layer).chosen(units)

    def operator(self, hessian: HessianMaker, layer: str, unit: int | None) -> SymmetricOperator:
        """∇²L in the parameters of the layer, or its rows and columns of one unit.

        Raises
        ------
        ConfigError
            No such layer or unit; a transposed convolution, whose rows are not units; no parameter of the unit alone.
        """
        catalogue = Catalogue(self.model)
        block = catalogue.block(layer)
        H = hessian(parameters=block.parameters)
        if unit is None:
            return H
        block.chosen([unit])
        return H.restricted(BlockLayout([block.unit(unit)], catalogue.parameters))

    def network(self, hessian: HessianMaker) -> tuple[SymmetricOperator, Mapping[str, slice]]:
        """∇²L in all parameters."""
        H = hessian()
        return H, H.parts
