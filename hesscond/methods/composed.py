"""Several methods on one model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from hesscond.errors import ConfigError
from hesscond.hessians import Coordinates, LinearCoordinates
from hesscond.hessians.coordinates.parameter_maps import ParameterMaps
from hesscond.methods.base import Method
from hesscond.methods.regularization import Penalized


class Composed(Method):
    """Methods one after another: they build the network, transform the gradient and follow the step in this order.

    Not registered: ``--method bnp+groupnorm`` makes one. At most one of them preconditions, and at most one has
    coordinates other than the plain ones at a layer.

    Parameters
    ----------
    model
        The model.
    name
        Text of ``--method``.
    parts
        The methods and their options.
    """

    source = "-"

    def __init__(self, model: nn.Module, name: str, parts: Sequence[tuple[type[Method], dict[str, Any]]]) -> None:
        super().__init__(model)
        self.name, self.summary = name, " and ".join(method.summary for method, _ in parts)  # type: ignore[misc]
        optimizers = [m.name for m, _ in parts if m.optimizer is not Method.optimizer]
        if len(optimizers) > 1:
            raise ConfigError(f"{' and '.join(optimizers)} both choose the optimizer: take one of them")
        self.parts = [method(model, **options) for method, options in parts]
        for part in self.parts:
            part.whole = self

    def fit(self, inputs: torch.Tensor) -> None:
        for part in self.parts:
            part.fit(inputs)

    @property
    def reads_all_inputs(self) -> bool:
        return any(part.reads_all_inputs for part in self.parts)

    def check_batch(self, samples: int) -> None:
        for part in self.parts:
            part.check_batch(samples)

    def optimizer(self, lr: float, **options: Any) -> torch.optim.Optimizer:
        """Optimizer of the part that is itself an optimizer, otherwise the one that is asked for."""
        own = [part for part in self.parts if type(part).optimizer is not Method.optimizer]
        found = (own[0].optimizer if own else super().optimizer)(lr, **options)
        self.follow(found)
        return found

    def without_decay(self) -> set[int]:
        return set().union(*(part.without_decay() for part in self.parts))

    def follow(self, optimizer: torch.optim.Optimizer) -> None:
        for part in self.parts:
            part.follow(optimizer)

    def observe(self, loss: torch.Tensor) -> None:
        for part in self.parts:
            part.observe(loss)

    def penalty(self, loss: torch.Tensor) -> torch.Tensor | None:
        found = [p for part in self.parts if (p := part.penalty(loss)) is not None]
        return torch.stack(found).sum() if found else None

    def transform_gradients(self) -> None:
        for part in self.parts:
            part.transform_gradients()

    def after_step(self) -> None:
        for part in self.parts:
            part.after_step()

    def preconditioner(self, layer: str) -> LinearCoordinates | None:
        """Preconditioner of the layer, if its `coordinates` are linear; otherwise None."""
        own = self.coordinates(layer)
        return own if isinstance(own, LinearCoordinates) else None

    def coordinates(self, layer: str) -> Coordinates | None:
        """Coordinates of the one part that has coordinates other than the plain ones; None: no part has."""
        found = [(part.name, own) for part in self.parts if (own := part.coordinates(layer)) is not None]
        if len(found) > 1:
            raise ConfigError(
                f"{' and '.join(name for name, _ in found)} both have coordinates of layer {layer!r}: which decide "
                "together is not known; probe it with one of them"
            )
        return found[0][1] if found else None

    def probed(self, layer: str) -> Coordinates | None:
        """Coordinates of the part that adds a penalty, which include those of the others; otherwise `coordinates`."""
        found = [part.probed(layer) for part in self.parts]
        return next((own for own in found if isinstance(own, Penalized)), self.coordinates(layer))

    def of_parameters(self, block: str, names: Sequence[str]) -> ParameterMaps | None:
        """Coordinates of the first part that has coordinates for these parameters; None: no part has."""
        found = [part.of_parameters(block, names) for part in self.parts]
        return next((own for own in found if own is not None), None)

    def unmoved(self, names: Sequence[str]) -> dict[str, str]:
        return {name: why for part in self.parts for name, why in part.unmoved(names).items()}

    def check_network(self) -> None:
        for part in self.parts:
            part.check_network()

    def preconditioned(self, gradients: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """M g by the part that preconditions; if there is none, as in `Method`."""
        own = [part for part in self.parts if part.preconditions]
        return own[0].preconditioned(gradients) if own else super().preconditioned(gradients)

    def readings(self, layer: str) -> Mapping[str, Coordinates | None]:
        return {name: own for part in self.parts for name, own in part.readings(layer).items()}

    def diagnostics(self, layer: str) -> dict[str, float]:
        return {column: value for part in self.parts for column, value in part.diagnostics(layer).items()}

    def detach(self) -> None:
        for part in self.parts:
            part.detach()

    def state_dict(self) -> dict[str, Any]:
        return {part.name: part.state_dict() for part in self.parts}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if set(state) != {part.name for part in self.parts}:
            raise ConfigError(f"the state is of {', '.join(state)}, not of {self.name}")
        for part in self.parts:
            part.load_state_dict(state[part.name])
