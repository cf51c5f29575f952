"""Parameters of a module as coordinates: those behind a weight that is computed, or those of any module."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext

from torch import nn

from hesscond.hessians.catalogue import Catalogue
from hesscond.hessians.coordinates.base import Chart, HessianMaker
from hesscond.hessians.parameters import BlockLayout
from hesscond.operators import SymmetricOperator


class Reparametrized(Chart):
    """Parameters θ of a module of any kind, such as those behind a weight W(θ), and its bias.

    Those of a unit are its rows of every parameter whose first dimension is the number of units; H includes the
    dependence of other units' weights on them. The bias comes first, then the parameters as the module lists them.

    Parameters
    ----------
    model
        The model.
    name
        Name of the coordinates in the log.
    within
        Context in which the Hessians of the model are defined.
    """

    def __init__(
        self, model: nn.Module, name: str, within: Callable[[], AbstractContextManager[None]] = nullcontext
    ) -> None:
        self.model, self.name, self._within = model, name, within

    def chosen_units(self, model: nn.Module, layer: str, units: Sequence[int] | None) -> tuple[int, ...]:
        """Units to measure (None: all); a ConfigError if the rows of θ are no units."""
        return Catalogue(self.model).block(layer).chosen(units)

    def operator(self, hessian: HessianMaker, layer: str, unit: int | None) -> SymmetricOperator:
        """∇²L in the parameters of the layer, or in those of one unit."""
        catalogue = Catalogue(self.model)
        block = catalogue.block(layer)
        with self._within():
            H = hessian(parameters=block.parameters)
        if unit is None:
            return H
        block.chosen([unit])
        return H.restricted(BlockLayout([block.unit(unit)], catalogue.parameters))

    def network(self, hessian: HessianMaker) -> tuple[SymmetricOperator, Mapping[str, slice]]:
        """∇²L in all parameters."""
        with self._within():
            H = hessian()
        return H, H.parts
