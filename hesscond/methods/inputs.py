"""Base of the methods whose P comes from the inputs of each layer: it selects the layers and records the inputs."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, ClassVar, Generic, TypeVar

import torch
from torch import nn

from hesscond import capture
from hesscond.capture.kinds import is_turned, kind_of
from hesscond.errors import CaptureError, ConfigError
from hesscond.hessians import Coordinates, Preconditioner
from hesscond.hessians.coordinates.linear import by_group
from hesscond.methods import base, wrapping

State = TypeVar("State", bound="LayerState")


class LayerState(ABC):
    """A layer, and its inputs since the last step in the calls that a backward pass has reached."""

    q_squared: float = 1.0  # 1/q² multiplies P Pᵀ
    wanted: int = 0

    def __init__(self, module: capture.Layer) -> None:
        self.module, self.geometry = module, capture.Geometry.of(module)
        self.inputs: list[tuple[torch.Tensor, torch.Size]] = []  # input and output shape of each call
        # for each call the first gradients in its output, at most wanted of them
        self.gradients: list[list[torch.Tensor]] = []

    @abstractmethod
    def precondition(self) -> None:
        """Replace the gradient G of the layer by G P Pᵀ, in place."""

    def count(self) -> None:
        """Set q² from the N samples seen: max(n/N, 1); of a convolution with p output positions, max(n/N, √p)."""
        dims = self.geometry.dims
        shapes = [(shape[: len(shape) - dims - 1], shape[len(shape) - dims :]) for _, shape in self.inputs]
        calls = [(prod(leading), prod(positions)) for leading, positions in shapes]
        samples = sum(n for n, _ in calls)
        # of a dense layer p = 1
        floor = (sum(n * p for n, p in calls) / samples) ** 0.5
        self.q_squared = max(self.geometry.fan_in / samples, floor)

    def rows(self) -> torch.Tensor:
        """Rows (N, G n) that the weights multiply, one for each sample and position; of a convolution the patches."""
        parts = [self.rows_of(*call) for call in self.inputs]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def rows_of(self, h: torch.Tensor, shape: torch.Size) -> torch.Tensor:
        """Rows of one call: its inputs, or the patches of a convolution, with one row per sample and position."""
        windows = kind_of(self.module).windows(self.module, h, shape)
        return windows.reshape(-1, self.geometry.groups * self.geometry.fan_in)


class WholeState(LayerState):
    """A layer whose M mixes its units: it takes the gradient of [b, W] (m, n̂) in one piece."""

    def __init__(self, module: capture.Layer) -> None:
        super().__init__(module)
        if self.geometry.groups > 1:
            raise ConfigError("methods that mix units are not defined for grouped convolutions: name the other layers")

    @abstractmethod
    def moved(self, gradient: torch.Tensor) -> torch.Tensor:
        """M times the gradient of [b, W] (m, n̂), in its precision."""

    def extended(self, call: tuple[torch.Tensor, torch.Size], samples: int) -> torch.Tensor:
        """Ĥ (N, T, n̂) of one call, T the positions, float64."""
        H = self.rows_of(*call).to(torch.float64)
        if self.geometry.bias:
            H = torch.cat([H.new_ones(len(H), 1), H], 1)
        return H.view(samples, -1, H.shape[1])

    def by_position(self, gradient: torch.Tensor) -> torch.Tensor:
        """A gradient in the output of a call as (N, T, m), float64."""
        last = gradient.movedim(1, -1) if self.geometry.dims else gradient
        return last.reshape(len(gradient), -1, last.shape[-1]).to(torch.float64)

    def precondition(self) -> None:
        weight, bias = self.module.weight.grad, self.module.bias
        assert weight is not None
        rows = weight.flatten(1)
        if bias is not None:
            b = torch.zeros_like(rows[:, :1]) if bias.grad is None else bias.grad[:, None]
            rows = torch.cat([b, rows], 1)
        product = self.moved(rows)
        if bias is not None and bias.grad is not None:
            bias.grad.copy_(product[:, 0])
        weight.copy_(product[:, int(bias is not None) :].view_as(weight))


@dataclass(frozen=True)
class OfInputs:
    """Method that does not train the model; `resolved` computes its coordinates from the inputs of the layers."""

    part: type[base.Method]
    options: Mapping[str, Any]
    name: str

    def placed(self, model: nn.Module) -> OfInputs:
        """Coordinates with the names that the layers have in a model in which other methods have wrapped them."""
        options = dict(self.options)
        if options.get("layers") is not None:
            options["layers"] = tuple(wrapping.place_of(model, name) for name in options["layers"])
        return OfInputs(self.part, options, self.part.name)

    def collect(self, layer: str, inputs: capture.LayerInputs) -> Any:
        """Statistics of a layer's inputs that the method collects; None: the layer is not one of the method's."""
        chosen = self.options.get("layers")
        if chosen is not None and layer not in chosen:
            return None
        return self.part.data_statistics(layer, inputs, **self.options)

    def resolved(self, statistics: Any, geometry: capture.Geometry) -> Preconditioner | None:
        """P; None: the layer is not one of the method's."""
        return None if statistics is None else self.part.data_preconditioner(statistics, geometry, **self.options)


class LayerMethod(base.Method, Generic[State]):
    """A method with a P for each dense and convolutional layer, computed from the inputs of the layer.

    Only inputs of forward passes that a backward pass has reached count, so evaluating or probing the model does not
    change the statistics; the samples of several backward passes before one step (gradient accumulation) count
    together.
    """

    preconditions = True
    #: Class of a layer's state.
    state_class: ClassVar[Any]
    #: The tensors of a layer's state that a resumed run needs.
    kept: ClassVar[tuple[str, ...]]

    layers: tuple[str, ...] | None = base.option(None, "The layers to precondition; None: all.")

    def __init__(self, model: nn.Module, **options: Any) -> None:
        super().__init__(model, **options)
        self.steps = 0
        chosen = wrapping.layers_of(model, self.layers)
        self._refuse(chosen)
        self.states: dict[str, State] = {name: self.state_of(layer) for name, layer in chosen.items()}
        self.hooks += [s.module.register_forward_hook(self._watch(s), with_kwargs=True) for s in self.states.values()]

    def state_of(self, layer: capture.Layer) -> State:
        """State of a layer before the first step."""
        return self.state_class(layer)

    @abstractmethod
    def update(self, states: list[State]) -> None:
        """Take over the inputs of the layers of this step."""

    def _refuse(self, layers: Mapping[str, capture.Layer]) -> None:
        owners: dict[int, str] = {}
        for name, layer in layers.items():
            refuse_transposed(self.name, name, layer)
            weight = layer._parameters.get("weight")
            if weight is None:
                raise ConfigError(
                    f"method {self.name!r} cannot precondition layer {name!r}: its weight is computed from other "
                    "parameters; name the layers to precondition with the option layers"
                )
            first = owners.setdefault(id(weight), name)
            if first != name:
                raise ConfigError(
                    f"method {self.name!r} cannot precondition layers {first!r} and {name!r}: they share a weight, and "
                    "have inputs of their own; name the layers to precondition with the option layers"
                )

    @staticmethod
    def _watch(state: LayerState) -> Any:
        inputs, gradients = state.inputs, state.gradients

        def hook(module: capture.Layer, args: Any, kwargs: dict[str, Any], output: torch.Tensor) -> None:
            # a probe calls the module with other tensors in place of its parameters: not this training
            weight = module.weight
            if output.requires_grad and isinstance(weight, nn.Parameter) and weight.requires_grad:
                unseen = [(args[0] if args else kwargs["input"], output.shape)]
                deltas: list[torch.Tensor] = []

                def back(gradient: torch.Tensor) -> None:
                    # once, even if several backward passes reach the call: a penalty on the gradient takes another one
                    if unseen:
                        inputs.append(unseen.pop())
                        gradients.append(deltas)
                    if len(deltas) < state.wanted:
                        deltas.append(gradient.detach())

                output.register_hook(back)

        return hook

    @torch.no_grad()
    def transform_gradients(self) -> None:
        """Take over the inputs since the last step, and replace the gradient G of every layer by G P Pᵀ."""
        due = []
        for name, state in self.states.items():
            if state.module.weight.grad is None:
                continue
            if not state.inputs:
                raise CaptureError(f"{self.name}: layer {name!r} has a gradient, but no forward pass of it was seen")
            state.count()
            due.append(state)
        self.update(due)
        for state in due:
            state.precondition()
            state.inputs.clear()
            state.gradients.clear()
        self.steps += 1

    def probed(self, layer: str) -> Coordinates | None:
        if not self.known:
            raise base.no_step(self.whole.name)
        return super().probed(layer)

    def preconditioner(self, layer: str) -> Preconditioner | None:
        state = self.find(layer)
        return None if state is None else self.of_state(state)

    @abstractmethod
    def of_state(self, state: State) -> Preconditioner | None:
        """P of a layer as the last step used it."""

    @property
    def known(self) -> bool:
        """Whether the statistics come from any inputs."""
        return self.steps > 0

    def find(self, layer: str) -> State | None:
        """State of the layer that now has this name; None: it is not preconditioned, or its weight is frozen."""
        match = self.states.get(layer)
        if match is None:
            module = capture.chosen_layers(self.model, [layer])[layer]
            match = next((state for state in self.states.values() if state.module is module), None)
        return match if match is not None and trains(match.module) else None

    def state_dict(self) -> dict[str, Any]:
        layers = {
            name: {key: getattr(state, key).clone() for key in self.kept} | {"q_squared": state.q_squared}
            for name, state in self.states.items()
        }
        return {"layers": layers, "steps": self.steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        layers = state.get("layers", {})
        if set(layers) != set(self.states):
            names = ", ".join(self.states)
            raise ConfigError(f"{self.name}: the state has layers {', '.join(layers) or 'none'}, the model {names}")
        for name, layer_state in self.states.items():
            for key in self.kept:
                getattr(layer_state, key).copy_(layers[name][key])
            layer_state.q_squared = layers[name]["q_squared"]
        self.steps = state["steps"]


class InputMethod(LayerMethod[State]):
    """A `LayerMethod` that has a P for each unit, and whose P the data alone also define."""

    needs_statistics = True

    @abstractmethod
    def of_groups(self, state: State) -> Sequence[Preconditioner]:
        """P of each group of a layer, as the last step used it."""

    @classmethod
    @abstractmethod
    def of_data(cls, statistics: Any, geometry: capture.Geometry) -> Sequence[Preconditioner]:
        """P of each group of a layer, from its `data_statistics` alone: no damping, no factor q."""

    def of_state(self, state: State) -> Preconditioner:
        return self._by_group(state, self.of_groups(state))

    @staticmethod
    def _by_group(state: LayerState, parts: Sequence[Preconditioner]) -> Preconditioner:
        geometry, device = state.geometry, state.module.weight.device
        return by_group(parts, geometry.units, geometry.n_params, device=device)

    @classmethod
    def data_preconditioner(cls, statistics: Any, geometry: capture.Geometry, **options: Any) -> Preconditioner:
        parts = cls.of_data(statistics, geometry)
        return by_group(parts, geometry.units, geometry.n_params, device=statistics.device)


def trains(layer: capture.Layer) -> bool:
    """Whether the weight of a layer, or any parameter that it is computed from, is trained."""
    behind = [p for name, p in layer.named_parameters() if name != "bias"]
    return not behind or any(p.requires_grad for p in behind)


def refuse_transposed(method: str, name: str, layer: capture.Layer) -> None:
    """Raise a ConfigError for a transposed convolution, or another layer whose units are not rows of its weight."""
    if is_turned(layer):
        raise ConfigError(
            f"method {method!r} is not defined for transposed convolutions and other layers whose units are not rows "
            f"of their weight, and layer {name!r} is a {capture.Geometry.of(layer).kind}: name the other layers "
            "(option or argument layers)"
        )
