"""Bases of the methods that have a P for each parameter, weights and biases separately, as optimizers do."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import nn

from hesscond import hessians
from hesscond.capture import layers
from hesscond.errors import ConfigError
from hesscond.hessians.coordinates import parameter_maps
from hesscond.methods import base
from hesscond.methods.inputs import refuse_transposed

#: State of a parameter.
State = dict[str, torch.Tensor]


class ByParameter(base.Method):
    """A method whose M = P Pᵀ is known for each parameter, in a layer or not, and 0 for one that takes no steps."""

    preconditions = True

    @abstractmethod
    def map_of(self, parameter: nn.Parameter) -> hessians.ParameterMap | None:
        """P of a parameter; None: it takes no step, or has not yet."""

    @property
    def coordinates_name(self) -> str:
        """Name of the coordinates in logs."""
        return f"{self.name}, M^1/2"

    def multiple_of_identity(self) -> float | None:
        """The c of M = c I, the same for all parameters of the model; None: M is no such matrix."""
        root: float | None = None
        for parameter in self.model.parameters():
            P = self.map_of(parameter)
            if P is None or not P.diagonal or not P.v.numel():
                return None
            low, high = map(float, P.v.aminmax())
            if not low == high > 0 or root not in (None, low):
                return None
            root = low
        return None if root is None else root**2

    def maps(self, parameters: Iterable[nn.Parameter]) -> list[hessians.ParameterMap] | None:
        """P of each parameter; None: none of them has moved."""
        tensors = list(parameters)
        maps = [self.map_of(parameter) for parameter in tensors]
        if all(P is None for P in maps):
            return None
        return [hessians.ParameterMap.still(p) if P is None else P for p, P in zip(tensors, maps, strict=True)]

    def preconditioner(self, layer: str) -> hessians.Preconditioner | None:
        module = layers.chosen_layers(self.model, [layer])[layer]
        tensors = [p for p in (module.weight, module.bias) if p is not None]
        parameters = [p for p in tensors if isinstance(p, nn.Parameter)]
        if len(parameters) < len(tensors):
            raise ConfigError(
                f"method {self.name!r} steps in the parameters that the weight of layer {layer!r} is computed from"
            )
        maps = self.maps(parameters)
        return None if maps is None else parameter_maps.layer_map(module, *maps[:2], name=self.coordinates_name)

    def holds(self, parameter: nn.Parameter) -> bool:
        """Whether the optimizer has the parameter, in a group with a learning rate that is not 0."""
        return True

    def unmoved(self, names: Sequence[str]) -> dict[str, str]:
        parameters, why = dict(self.model.named_parameters(remove_duplicate=False)), {}
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
                why[name] = f"is not trained by {self.name}: give the optimizer that trains it too, or {plain}"
            elif parameter.requires_grad:
                why[name] = f"has had no gradient in a step of {self.name}: probe after one that moves it, or {plain}"
            else:
                why[name] = f"requires no gradient, so that {self.name} does not move it: {plain}"
        return why

    def refuse_no_step(self) -> None:
        """Raise a ConfigError if no parameter has a P yet."""
        if all(self.map_of(parameter) is None for parameter in self.model.parameters()):
            raise base.no_step(self.whole.name)

    def probed(self, layer: str) -> hessians.Coordinates | None:
        """P of the last step, in the parameters that it moves alone."""
        self.refuse_no_step()
        coordinates, module = super().probed(layer), layers.chosen_layers(self.model, [layer])[layer]
        if coordinates is None:
            ids = {id(p) for p in layers.own_parameters(module)}
            names = [name for name, p in self.model.named_parameters(remove_duplicate=False) if id(p) in ids]
            raise ConfigError(f"layer {layer!r} {self.unmoved(names)[names[0]]}")
        maps = [self.map_of(p) for p in layers.own_parameters(module)]
        return coordinates if all(maps) else parameter_maps.layer_map(module, *maps, name=self.coordinates_name)

    def of_parameters(self, block: str, names: Sequence[str]) -> parameter_maps.ParameterMaps:
        """P of the last step, whatever the parameters belong to."""
        self.refuse_no_step()
        parameters = dict(self.model.named_parameters(remove_duplicate=False))
        maps = {name: self.map_of(parameters[name]) or hessians.ParameterMap.still(parameters[name]) for name in names}
        return parameter_maps.ParameterMaps(maps, self.coordinates_name)

    def preconditioned(self, gradients: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """M g at every parameter, those outside of layers too; as it is before the first step."""
        parameters = dict(self.model.named_parameters())
        maps = self.maps(parameters[name] for name in gradients)
        if maps is None:
            return dict(gradients)
        return {name: P.applied(g) for (name, g), P in zip(gradients.items(), maps, strict=True)}


class Learned(ByParameter):
    """G ← M U for every parameter, U its gradient or an average of them, and M = P Pᵀ learnt from them in float64."""

    #: Whether M has a factor for each side of a weight.
    sided: ClassVar[bool] = True

    def __init__(self, model: nn.Module, **options: Any) -> None:
        super().__init__(model, **options)
        if self.sided:
            for name, layer in layers.eligible_layers(model).items():
                refuse_transposed(self.name, name, layer)
        self._states: dict[str, State] = {}
        #: Separate generator, so that the method does not change the random numbers of the training.
        self.generator = torch.Generator().manual_seed(0)

    @abstractmethod
    def begun(self, g: torch.Tensor) -> State:
        """State of a parameter before its first gradient ``g`` (m, n) or (m,), without the number of steps."""

    def state_at(self, name: str, g: torch.Tensor) -> State:
        """State of a parameter, begun if ``g`` is its first gradient."""
        if name not in self._states:
            self._states[name] = {"step": torch.zeros((), device="cpu")} | self.begun(g)
        return self._states[name]

    @abstractmethod
    def learn(self, state: State, g: torch.Tensor) -> torch.Tensor:
        """Update the state with a gradient, and return U."""

    @abstractmethod
    def read(self, state: State) -> hessians.ParameterMap | None:
        """P as the last step used it; None: there was no step."""

    @torch.no_grad()
    def transform_gradients(self) -> None:
        """Learn from the gradients, and replace each by M U."""
        for name, parameter in self.model.named_parameters():
            # a run that diverges says so by its loss
            if parameter.grad is None or not bool(torch.isfinite(parameter.grad).all()):
                continue
            g = as_matrix(parameter.grad).to(torch.float64)
            state = self.state_at(name, g)
            U = self.learn(state, g)
            P = self.read(state)
            parameter.grad.copy_((torch.zeros_like(U) if P is None else P.applied(U)).view_as(parameter))

    def map_of(self, parameter: nn.Parameter) -> hessians.ParameterMap | None:
        name = next((name for name, p in self.model.named_parameters() if p is parameter), None)
        return None if name not in self._states else self.read(self._states[name])

    def state_dict(self) -> dict[str, Any]:
        """States of all parameters, and the random state under the empty name."""
        states = {name: {key: value.clone() for key, value in state.items()} for name, state in self._states.items()}
        return states | {"": {"generator": self.generator.get_state()}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        known_names = {"": None, **dict(self.model.named_parameters())}
        if odd := [name for name in state if name not in known_names]:
            raise ConfigError(f"{self.name}: the state has a parameter {odd[0]!r}, which the model has not")
        states = {name: {key: value.clone() for key, value in tensors.items()} for name, tensors in state.items()}
        if drawn := states.pop("", None):
            self.generator.set_state(drawn["generator"])
        self._states = states


def as_matrix(tensor: torch.Tensor) -> torch.Tensor:
    """A weight (m, n), or a vector (m,)."""
    return tensor.detach().flatten(1) if tensor.ndim > 1 else tensor.detach().reshape(-1)


def counted(state: State) -> int:
    """Increase the number of steps, and return it: t = 1, 2, …"""
    state["step"] += 1
    return int(state["step"])


def sides(g: torch.Tensor) -> list[torch.Tensor]:
    """GGᵀ and GᵀG, or ggᵀ."""
    return [g @ g.T, g.T @ g] if g.ndim == 2 else [torch.outer(g, g)]
