"""The parameters of a module as coordinates: those behind a weight that is computed, or those of any module."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import nn

from hesscond.capture.layers import ELIGIBLE, TRANSPOSED, Geometry, chosen_modules
from hesscond.errors import ConfigError
from hesscond.hessians.coordinates import Chart, HessianMaker
from hesscond.operators import Congruence, LinearOperator, SymmetricOperator


class Selection(LinearOperator):
    """The columns of the identity (n, k) that ``index`` (k,) names: AᵀHA is a principal submatrix of H."""

    def __init__(self, order: int, index: torch.Tensor, *, dtype: torch.dtype) -> None:
        super().__init__((order, len(index)), dtype, index.device)
        self.index = index

    def multiply(self, vectors: torch.Tensor) -> torch.Tensor:
        return vectors.new_zeros(self.shape[0], vectors.shape[1]).index_copy_(0, self.index, vectors)

    def multiply_adjoint(self, vectors: torch.Tensor) -> torch.Tensor:
        return vectors.index_select(0, self.index)


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
        What the log calls them.
    """

    def __init__(self, model: nn.Module, name: str) -> None:
        self.model, self.name = model, name

    def parameters(self, layer: str) -> dict[str, nn.Parameter]:
        """θ of a module, by their names in the model, biases first.

        Raises
        ------
        ConfigError
            No such module, or one without parameters.
        """
        module = chosen_modules(self.model, [layer])[layer]
        prefix = "" if module is self.model else f"{layer}."
        found = {f"{prefix}{name}": p for name, p in module.named_parameters()}
        # False sorts first
        return {name: found[name] for name in sorted(found, key=lambda name: not name.endswith("bias"))}

    def chosen_units(self, model: nn.Module, layer: str, units: Sequence[int] | None) -> tuple[int, ...]:
        """The units that were asked for (None: all): those of a dense or convolutional layer, or rows of the first θ.

        Raises
        ------
        ConfigError
            A transposed convolution, whose rows are not units; no such unit.
        """
        module = chosen_modules(self.model, [layer])[layer]
        if isinstance(module, TRANSPOSED):
            raise ConfigError(
                f"layer {layer!r} is a transposed convolution whose weight is computed: its units are not rows of its "
                "parameters, use level='layer'"
            )
        count = self._count(layer)
        chosen = tuple(range(count)) if units is None else tuple(units)
        for unit in chosen:
            if not 0 <= unit < count:
                raise ConfigError(f"unit {unit} is out of range: layer {layer!r} has units 0 to {count - 1}")
        return chosen

    def _count(self, layer: str) -> int:
        module = chosen_modules(self.model, [layer])[layer]
        if isinstance(module, ELIGIBLE):
            return Geometry.of(module).units
        own = [p for p in module.parameters(recurse=False) if p.ndim]
        if not own:
            raise ConfigError(
                f"layer {layer!r}, a {type(module).__name__}, has no parameters of its own to split into units: use "
                "level='layer'"
            )
        return len(own[0])

    def operator(self, hessian: HessianMaker, layer: str, unit: int | None) -> SymmetricOperator:
        """∇²L in the parameters of the layer, or its rows and columns of one unit.

        Raises
        ------
        ConfigError
            No such layer or unit; a transposed convolution, whose rows are not units; no parameter of the unit alone.
        """
        parameters = self.parameters(layer)
        H = hessian(parameters=list(parameters))
        if unit is None:
            return H
        self.chosen_units(self.model, layer, [unit])
        count, chosen = self._count(layer), []
        for name, parameter in parameters.items():
            where = torch.arange(H.parts[name].start, H.parts[name].stop, device=H.device)
            if parameter.ndim and len(parameter) == count:
                chosen.append(where.view(count, -1)[unit])
        if not chosen:
            raise ConfigError(f"no parameter of layer {layer!r} belongs to one unit: use level='layer'")
        return Congruence(H, Selection(H.order, torch.cat(chosen), dtype=H.dtype))

    def network(self, hessian: HessianMaker) -> tuple[SymmetricOperator, Mapping[str, slice]]:
        """∇²L in all parameters."""
        H = hessian()
        return H, H.parts
