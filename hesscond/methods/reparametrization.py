"""Base of the methods that compute a layer's weight from other parameters."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, ClassVar

import torch
from torch import nn
from torch.nn.utils import parametrize

from hesscond import capture
from hesscond.capture.kinds import is_turned
from hesscond.errors import ConfigError
from hesscond.hessians import Coordinates, Reparametrized
from hesscond.methods import base
from hesscond.methods.wrapping import layers_of


class WeightParametrization(nn.Module):
    """Base of the modules that compute the weight of a layer; a subclass writes ``forward``."""

    def __init__(self, layer: capture.Layer) -> None:
        super().__init__()
        self.geometry = capture.Geometry.of(layer)
        self.transposed = is_turned(layer)

    def rows(self, weight: torch.Tensor) -> torch.Tensor:
        """The weight as one matrix a group with one row an output unit, (G, m/G, n): n is the fan-in."""
        grouped = weight.unflatten(0, (self.geometry.groups, -1))
        return (grouped.transpose(1, 2) if self.transposed else grouped).flatten(2)

    def from_rows(self, rows: torch.Tensor, shape: torch.Size) -> torch.Tensor:
        """The inverse of `rows`, for a weight of a shape."""
        if not self.transposed:
            return rows.reshape(shape)
        inputs = shape[0] // self.geometry.groups
        return rows.unflatten(2, (inputs, *shape[2:])).transpose(1, 2).reshape(shape)


class Reparametrization(base.Method):
    """A layer's weight W(θ), by `torch.nn.utils.parametrize`: what is trained, and saved, are the parameters θ.

    The Hessian that decides convergence is that in θ (`Reparametrized`); the bias stays as it is.
    """

    reparametrizes = True
    #: Whether the last layer counts, if none are named.
    with_output: ClassVar[bool] = True
    #: Name of the coordinates θ.
    coordinates_name: ClassVar[str]

    layers: tuple[str, ...] | None = base.option(
        None, "Layers whose weight is computed; ``ends``: the first and the last; None: all."
    )

    def __init__(self, model: nn.Module, **options: Any) -> None:
        super().__init__(model, **options)
        self.chart = Reparametrized(model, self.coordinates_name)
        self._own: set[WeightParametrization] = set()
        for name, layer in layers_of(model, self.layers, output=self.with_output or self.layers is not None).items():
            if "weight" not in layer._parameters:
                raise ConfigError(
                    f"{self.name}: the weight of layer {name!r} is computed from other parameters already"
                )
            for other, module in model.named_modules():
                if module is not layer and any(p is layer.weight for p in module._parameters.values()):
                    raise ConfigError(
                        f"{self.name}: layer {name!r} shares its weight with {other!r}: leave it out, naming others "
                        "with layers="
                    )
            parametrization = self.parametrization(name, layer)
            parametrize.register_parametrization(layer, "weight", parametrization)
            self._own.add(parametrization)

    @abstractmethod
    def parametrization(self, name: str, layer: capture.Layer) -> WeightParametrization:
        """W(θ) for a layer."""

    def coordinates(self, layer: str) -> Coordinates | None:
        """θ of a layer that was chosen, None (plain coordinates) of another."""
        return None if self.parametrization_of(layer) is None else self.chart

    def parametrization_of(self, layer: str) -> WeightParametrization | None:
        """W(θ) of a layer by its present name; None: it is none of those chosen."""
        module = capture.chosen_layers(self.model, [layer])[layer]
        inside = set(module.modules())
        return next((parametrization for parametrization in self._own if parametrization in inside), None)


def refuse_units(method: str, layer: str, refused: torch.Tensor, what: str) -> None:
    """Raise a ConfigError if a unit is among the ``refused`` (m,) ones."""
    if bool(refused.any()):
        unit = int(refused.int().argmax())
        raise ConfigError(
            f"{method}: unit {unit} of layer {layer!r} has {what}: initialize it otherwise, or leave the layer out, "
            "naming the others with layers="
        )
