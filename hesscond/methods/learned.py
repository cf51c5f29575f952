"""Base of the methods that learn M from the gradients of each parameter; a weight counts as a matrix (m, n)."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, ClassVar

import torch
from torch import nn

from hesscond.capture import eligible_layers
from hesscond.errors import ConfigError
from hesscond.hessians import ParameterMap
from hesscond.methods.by_parameter import ByParameter
from hesscond.methods.inputs import refuse_transposed

#: State of a parameter.
State = dict[str, torch.Tensor]


class Learned(ByParameter):
    """G ← M U for every parameter, U its gradient or an average of them, and M = P Pᵀ learnt from them.

    A convolution's weight is the matrix of its filters, one a row. States and M are computed in float64. Subclasses
    write `begun`, `learn` and `read`.
    """

    #: Whether M has a factor for each side of a weight.
    sided: ClassVar[bool] = True

    def __init__(self, model: nn.Module, **options: Any) -> None:
        super().__init__(model, **options)
        if self.sided:
            for name, layer in eligible_layers(model).items():
                refuse_transposed(self.name, name, layer)
        self._states: dict[str, State] = {}
        #: Separate generator, so that the method does not change the random numbers of the training.
        self.generator = torch.Generator().manual_seed(0)

    @abstractmethod
    def begun(self, g: torch.Tensor) -> State:
        """State of a parameter before its first gradient ``g`` (m, n) or (m,)."""

    @abstractmethod
    def learn(self, state: State, g: torch.Tensor) -> torch.Tensor:
        """Update the state with a gradient, and return U."""

    @abstractmethod
    def read(self, state: State) -> ParameterMap | None:
        """P as the last step used it; None: there was no step."""

    @torch.no_grad()
    def transform_gradients(self) -> None:
        """Learn from the gradients, and replace each by M U."""
        for name, parameter in self.model.named_parameters():
            # a run that diverges says so by its loss
            if parameter.grad is None or not bool(torch.isfinite(parameter.grad).all()):
                continue
            g = as_matrix(parameter.grad).to(torch.float64)
            if name not in self._states:
                self._states[name] = self.begun(g)
            U = self.learn(self._states[name], g)
            P = self.read(self._states[name])
            parameter.grad.copy_((torch.zeros_like(U) if P is None else P.applied(U)).view_as(parameter))

    def map_of(self, parameter: nn.Parameter) -> ParameterMap | None:
        name = next((name for name, p in self.model.named_parameters() if p is parameter), None)
        return None if name not in self._states else self.read(self._states[name])

    def state_dict(self) -> dict[str, Any]:
        """States of all parameters, and the random state under the empty name."""
        own = {name: {key: value.clone() for key, value in state.items()} for name, state in self._states.items()}
        return own | {"": {"generator": self.generator.get_state()}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        there = {"": None, **dict(self.model.named_parameters())}
        if odd := [name for name in state if name not in there]:
            raise ConfigError(f"{self.name}: the state has a parameter {odd[0]!r}, which the model has not")
        found = {name: {key: value.clone() for key, value in own.items()} for name, own in state.items()}
        if drawn := found.pop("", None):
            self.generator.set_state(drawn["generator"])
        self._states = found


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
