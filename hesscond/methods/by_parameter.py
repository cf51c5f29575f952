"""Base of the methods that have a P for each parameter, weights and biases separately, as optimizers do."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import nn

from hesscond.capture import chosen_layers
from hesscond.capture.layers import own_parameters
from hesscond.errors import ConfigError
from hesscond.hessians import Coordinates, LinearCoordinates, ParameterMap
from hesscond.hessians.coordinates.parameter_maps import ParameterMaps, layer_map
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
        """Name of the coordinates in logs."""
        return f"{self.name}, M^1/2"

    def multiple_of_identity(self) -> float | None:
        """The c of M = c I, the same for all parameters of the model; None: M is no such matrix."""
        found: float | None = None
        for parameter in self.model.parameters():
            own = self.map_of(parameter)
            if own is None or not own.diagonal or not own.v.numel():
                return None
            low, high = map(float, own.v.aminmax())
            if not low == high > 0 or found not in (None, low):
                return None
            found = low
        return None if found is None else found**2

    def maps(self, parameters: Iterable[nn.Parameter]) -> list[ParameterMap] | None:
        """P of each parameter; None: none of them has moved."""
        own = list(parameters)
        found = [self.map_of(parameter) for parameter in own]
        if all(P is None for P in found):
            return None
        return [ParameterMap.still(p) if P is None else P for p, P in zip(own, found, strict=True)]

    def preconditioner(self, layer: str) -> LinearCoordinates | None:
        module = chosen_layers(self.model, [layer])[layer]
        there = [p for p in (module.weight, module.bias) if p is not None]
        own = [p for p in there if isinstance(p, nn.Parameter)]
        if len(own) < len(there):
            raise ConfigError(
                f"method {self.name!r} steps in the parameters that the weight of layer {layer!r} is computed from"
            )
        maps = self.maps(own)
        return None if maps is None else layer_map(module, *maps[:2], name=self.coordinates_name)

    def holds(self, parameter: nn.Parameter) -> bool:
        """Whether the optimizer has the parameter, in a group with a learning rate that is not 0."""
        return True

    def unmoved(self, names: Sequence[str]) -> dict[str, str]:
        parameters, found = dict(self.model.named_parameters(remove_duplicate=False)), {}
        for name in names:
            parameter = parameters[name]
            try:
                if self.map_of(parameter) is not None:
                    continue
            except ConfigError:
                # it moves, and why its M cannot be read is said where it is measured
                continue
            plain = "leave method= out to measure it in plain coordinates"
            if not self.holds(parameter):
                found[name] = f"is not held by {self.name}: give the optimizer that trains it too, or {plain}"
            elif parameter.requires_grad:
                found[name] = f"has had no gradient in a step of {self.name}: probe after one that moves it, or {plain}"
            else:
                found[name] = f"requires no gradient, so that {self.name} does not move it: {plain}"
        return found

    def refuse_no_step(self) -> None:
        """Raise a ConfigError if no parameter has a P yet."""
        if all(self.map_of(parameter) is None for parameter in self.model.parameters()):
            raise no_step(self.whole.name)

    def probed(self, layer: str) -> Coordinates | None:
        """P of the last step, in the parameters that it moves alone."""
        self.refuse_no_step()
        found, module = super().probed(layer), chosen_layers(self.model, [layer])[layer]
        if found is None:
            own = {id(p) for p in own_parameters(module)}
            names = [name for name, p in self.model.named_parameters(remove_duplicate=False) if id(p) in own]
            raise ConfigError(f"layer {layer!r} {self.unmoved(names)[names[0]]}")
        maps = [self.map_of(p) for p in own_parameters(module)]
        return found if all(maps) else layer_map(module, *maps, name=self.coordinates_name)

    def of_parameters(self, block: str, names: Sequence[str]) -> ParameterMaps:
        """P of the last step, whatever the parameters belong to."""
        self.refuse_no_step()
        parameters = dict(self.model.named_parameters(remove_duplicate=False))
        found = {name: self.map_of(parameters[name]) or ParameterMap.still(parameters[name]) for name in names}
        return ParameterMaps(found, self.coordinates_name)

    def preconditioned(self, gradients: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """M g at every parameter, those outside of layers too; as it is before the first step."""
        parameters = dict(self.model.named_parameters())
        maps = self.maps(parameters[name] for name in gradients)
        if maps is None:
            return dict(gradients)
        return {name: P.applied(g) for (name, g), P in zip(gradients.items(), maps, strict=True)}
