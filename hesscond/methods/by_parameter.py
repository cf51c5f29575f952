"""What the methods share whose P is that of single parameters, weights apart from biases, as optimizers have it."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import nn

from hesscond.capture import chosen_layers
from hesscond.errors import ConfigError
from hesscond.hessians import Coordinates, LinearCoordinates, ParameterCoordinates, ParameterMap, layer_map
from hesscond.methods.base import Method, no_step


class ByParameter(Method):
    """A method whose M = P Pᵀ is known for each parameter, in a layer or not. Subclasses write `map_of`.

    Parameters that take no steps have M = 0.
    """

    preconditions = True

    @abstractmethod
    def map_of(self, parameter: nn.Parameter) -> ParameterMap | None:
        """P of a parameter; None: it takes no step, or has not yet."""

    @property
    def coordinates_name(self) -> str:
        """What the log calls them."""
        return f"{self.name}, M^1/2"

    def maps(self, parameters: Iterable[nn.Parameter]) -> list[ParameterMap] | None:
        """P of each parameter; None: none of them has moved."""
        own = list(parameters)
        found = [self.map_of(parameter) for parameter in own]
        if all(P is None for P in found):
            return None
        return [ParameterMap.still(p) if P is None else P for p, P in zip(own, found, strict=True)]

    def preconditioner(self, layer: str) -> LinearCoordinates | None:
        """P of the layer's units.

        Raises
        ------
        ConfigError
            No such layer; one whose weight is computed from other parameters, in which the steps are taken.
        """
        module = chosen_layers(self.model, [layer])[layer]
        there = [p for p in (module.weight, module.bias) if p is not None]
        own = [p for p in there if isinstance(p, nn.Parameter)]
        if len(own) < len(there):
            raise ConfigError(
                f"method {self.name!r} steps in the parameters that the weight of layer {layer!r} is computed from"
            )
        maps = self.maps(own)
        if maps is None:
            return None
        return layer_map(module, maps[0], maps[1] if len(maps) == 2 else None, self.coordinates_name)

    def refuse_no_step(self) -> None:
        """Raise a ConfigError if no parameter has a P yet."""
        if all(self.map_of(parameter) is None for parameter in self.model.parameters()):
            raise no_step(self.whole.name)

    def probed(self, layer: str) -> Coordinates | None:
        """P of the last step.

        Raises
        ------
        ConfigError
            No such layer; there was no step yet.
        """
        self.refuse_no_step()
        return super().probed(layer)

    def of_parameters(self, block: str, names: Sequence[str]) -> ParameterCoordinates:
        """P of the last step, whatever the parameters belong to.

        Raises
        ------
        ConfigError
            There was no step yet.
        """
        self.refuse_no_step()
        parameters = dict(self.model.named_parameters(remove_duplicate=False))
        found = {name: self.map_of(parameters[name]) or ParameterMap.still(parameters[name]) for name in names}
        return ParameterCoordinates(found, self.coordinates_name)

    def preconditioned(self, gradients: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """M g at every parameter, those outside of layers too; as it is before the first step."""
        parameters = dict(self.model.named_parameters())
        maps = self.maps(parameters[name] for name in gradients)
        if maps is None:
            return dict(gradients)
        return {name: P.applied(g) for (name, g), P in zip(gradients.items(), maps, strict=True)}
