"""An optimizer at work on a model, as a method that a probe measures in."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from hesscond.errors import ConfigError
from hesscond.hessians import ParameterMap
from hesscond.methods.by_parameter import ByParameter
from hesscond.methods.optimizers.reading import Known, Look, held, reader_of


class AtWork(ByParameter):
    """Optimizers that train a model together: M = P Pᵀ of their last step, for a step −η M g.

    η (`rate`) is the largest learning rate of all parameter groups, so that rates that differ belong to M, as do
    corrections of averages; momentum and weight decay are left out, and so M is what the averaged gradient is
    multiplied with. Parameters that no optimizer holds, or that had no gradient yet, are not moved: M = 0.

    Parameters
    ----------
    model
        The model that they train.
    optimizers
        One or several; the wrappers of Accelerate and Lightning are looked into.
    """

    source = "-"

    def __init__(self, model: nn.Module, optimizers: Sequence[Optimizer]) -> None:
        super().__init__(model)
        optimizers = [held(one) for one in optimizers]
        self.name = " and ".join(dict.fromkeys(type(one).__name__ for one in optimizers))  # type: ignore[misc]
        self.summary = f"the state of {self.name}"  # type: ignore[misc]
        self._held: dict[int, tuple[Known, Optimizer, dict[str, Any]]] = {}
        own = {id(p) for p in model.parameters()}
        for optimizer in optimizers:
            known = reader_of(optimizer)
            for group in optimizer.param_groups:
                if group.get("maximize") or getattr(optimizer, "maximize", False):
                    raise ConfigError(f"{known.name} maximizes: its step goes along +M g, and κ is that of descent")
                self._held |= {id(p): (known, optimizer, group) for p in group["params"]}
            if not own & {id(p) for group in optimizer.param_groups for p in group["params"]}:
                raise ConfigError(f"{known.name} is at work on another model than the one to probe")
        self.rate = max(rate_of(known, group) for known, _, group in self._held.values())  # type: ignore[misc]
        if not self.rate > 0:
            raise ConfigError(f"the learning rates of {self.name} are all 0: it takes no steps")

    def map_of(self, parameter: nn.Parameter) -> ParameterMap | None:
        if id(parameter) not in self._held:
            return None
        known, optimizer, group = self._held[id(parameter)]
        if not rate_of(known, group):
            return None
        state = optimizer.state.get(parameter, {})
        if not (state or known.stateless):
            return None
        for key, value in state.items():
            # counts stay on the host
            if isinstance(value, torch.Tensor) and value.ndim and value.device != parameter.device:
                raise ConfigError(
                    f"the state {key!r} of {known.name} is on {value.device}, and its parameter on {parameter.device}: "
                    "move both to one device (optimizer.load_state_dict does)"
                )
        found = known.read(Look(optimizer, group, parameter, state))
        return None if found is None else found.scaled(rate_of(known, group) / self.rate)

    def holds(self, parameter: nn.Parameter) -> bool:
        return id(parameter) in self._held and rate_of(*self._held[id(parameter)][::2]) != 0

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

    def refuse_no_step(self) -> None:
        if all(self.map_of(parameter) is None for parameter in self.model.parameters()):
            raise ConfigError(
                f"{self.name} has taken no step with these parameters: M is read from what its steps leave behind, so "
                "probe after the first one"
            )


def rate_of(known: Known, group: dict[str, Any]) -> float:
    """The learning rate of a parameter group."""
    try:
        return float(group["lr"])
    except (TypeError, ValueError, KeyError):
        raise ConfigError(
            f"the learning rate of a parameter group of {known.name} is {group.get('lr')!r}, not a number"
        ) from None
