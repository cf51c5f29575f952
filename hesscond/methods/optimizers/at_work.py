"""Optimizers at work on a model, and M given as a function, as methods that a probe measures in."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from hesscond.errors import ConfigError
from hesscond.hessians import ParameterMap
from hesscond.methods.by_parameter import ByParameter
from hesscond.methods.optimizers import reading


class AtWork(ByParameter):
    """Optimizers that train a model together: M = P Pᵀ of their last step, for a step −η M g.

    η (`rate`) is the largest learning rate of all parameter groups, so that rates that differ belong to M, as do
    corrections of averages; momentum and weight decay are left out. Parameters that no optimizer holds, or that had no
    gradient yet, are not moved: M = 0. Of wrappers M is that of the optimizer that they hold; the name says so.
    """

    source = "-"

    def __init__(self, model: nn.Module, optimizers: Sequence[Optimizer]) -> None:
        super().__init__(model)
        self.name = " and ".join(dict.fromkeys(map(named, optimizers)))  # type: ignore[misc]
        self.summary = f"the state of {self.name}"  # type: ignore[misc]
        self._held: dict[int, tuple[reading.RegisteredReader, Optimizer, dict[str, Any]]] = {}
        ids = {id(p) for p in model.parameters()}
        for optimizer in map(reading.held, optimizers):
            reader = reading.reader_of(optimizer)
            for group in optimizer.param_groups:
                if group.get("maximize") or getattr(optimizer, "maximize", False):
                    raise ConfigError(f"{reader.name} maximizes: its step goes along +M g, and κ is that of descent")
                self._held |= {id(p): (reader, optimizer, group) for p in group["params"]}
            if not ids & {id(p) for group in optimizer.param_groups for p in group["params"]}:
                raise ConfigError(f"{reader.name} is at work on another model than the one to probe")
        self.rate = max(rate_of(reader, group) for reader, _, group in self._held.values())  # type: ignore[misc]
        if not self.rate > 0:
            raise ConfigError(f"the learning rates of {self.name} are all 0: it takes no steps")

    def map_of(self, parameter: nn.Parameter) -> ParameterMap | None:
        if id(parameter) not in self._held:
            return None
        reader, optimizer, group = self._held[id(parameter)]
        if not rate_of(reader, group):
            return None
        state = optimizer.state.get(parameter, {})
        if not (state or (reader.stateless and parameter.requires_grad)):
            return None
        for key, value in state.items():
            # counts stay on the host
            if isinstance(value, torch.Tensor) and value.ndim and value.device != parameter.device:
                raise ConfigError(
                    f"the state {key!r} of {reader.name} is on {value.device}, and its parameter on {parameter.device}"
                    ": move both to one device (optimizer.load_state_dict does)"
                )
        P = reader.map(reading.ParameterState(optimizer, group, parameter, state))
        return None if P is None else P.scaled(rate_of(reader, group) / self.rate)

    def holds(self, parameter: nn.Parameter) -> bool:
        return id(parameter) in self._held and rate_of(*self._held[id(parameter)][::2]) != 0

    def refuse_no_step(self) -> None:
        if all(self.map_of(parameter) is None for parameter in self.model.parameters()):
            raise ConfigError(
                f"{self.name} has taken no step with these parameters: M is read from what its steps leave behind, so "
                "probe after the first one"
            )


class Given(ByParameter):
    """M of a step −M g, learning rates included, as a function of a parameter; see `as_map` for what it returns."""

    source = "-"
    rate = 1.0

    def __init__(self, model: nn.Module, function: Callable[[nn.Parameter], Any]) -> None:
        super().__init__(model)
        self.name = getattr(function, "__name__", type(function).__name__)  # type: ignore[misc]
        self.summary = f"M = {self.name}(p)"  # type: ignore[misc]
        self._function = function
        self._maps: dict[int, ParameterMap | None] = {}

    def map_of(self, parameter: nn.Parameter) -> ParameterMap | None:
        if id(parameter) not in self._maps:
            M = self._function(parameter)
            self._maps[id(parameter)] = reading.as_map(M, parameter, f"what {self.name} returns")
        return self._maps[id(parameter)]

    def holds(self, parameter: nn.Parameter) -> bool:
        return self.map_of(parameter) is not None

    def refuse_no_step(self) -> None:
        if all(self.map_of(parameter) is None for parameter in self.model.parameters()):
            raise ConfigError(f"{self.name} gives no parameter an M: it returns None for each of them")


def moves(given: Any) -> bool:
    """Whether something is meant as what moves the parameters: optimizers, or M as a function of one."""
    if isinstance(given, (type, nn.Module)):
        return False
    return (isinstance(given, (list, tuple)) and bool(given)) or callable(given) or callable(getattr(given, "step", 0))


def at_work(model: nn.Module, given: Any) -> AtWork | Given:
    """Coordinates of one or several optimizers, or of M as a function of a parameter.

    An `UnknownOptimizerError` if M of one of them is not known, a `ConfigError` for what is no optimizer.
    """
    several = given if isinstance(given, (list, tuple)) else [given]
    for candidate in several:
        if isinstance(reading.held(candidate), Optimizer):
            continue
        if candidate is given and moves(candidate) and not hasattr(candidate, "step"):
            return Given(model, candidate)
        if moves(candidate) and hasattr(candidate, "step"):
            reading.reader_of(candidate)
        among = "a list with " if candidate is not given else ""
        raise ConfigError(
            "the optimizer must be one of torch.optim.Optimizer, a list of these, or a function of a parameter that "
            f"returns M, not {among}{type(candidate).__name__}"
        )
    return AtWork(model, several)


def named(optimizer: Any) -> str:
    """Name of an optimizer, and of the wrapper that holds it."""
    inside = reading.held(optimizer)
    name = type(inside).__name__
    return name if inside is optimizer else f"{name} in {type(optimizer).__name__}"


def rate_of(reader: reading.RegisteredReader, group: dict[str, Any]) -> float:
    """The learning rate of a parameter group."""
    try:
        return float(group["lr"])
    except (TypeError, ValueError, KeyError):
        raise ConfigError(
            f"the learning rate of a parameter group of {reader.name} is {group.get('lr')!r}, not a number"
        ) from None
