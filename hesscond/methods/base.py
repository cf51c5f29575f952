"""What a method is, and the registry of all methods."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any, ClassVar, TypeVar

import torch
from torch import nn

from hesscond.capture import FeatureStatistics
from hesscond.errors import ConfigError
from hesscond.hessians import Preconditioner


class Method(ABC):
    """A normalization or preconditioning scheme at work on one model.

    A method says how the gradient is transformed and in which coordinates ŵ = P z its Hessian must be measured.
    A new one is a subclass in its own file under ``hesscond/methods`` with the `register` decorator, and one
    line in ``hesscond/methods/__init__.py``.

    Parameters
    ----------
    model
        The model that will be trained. Hooks may be put on it; `detach` takes them off.
    """

    #: Name on the command line.
    name: ClassVar[str]
    #: One line for ``hesscond methods``.
    summary: ClassVar[str]
    #: Paper and equation.
    source: ClassVar[str]

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    @abstractmethod
    def transform_gradients(self) -> None:
        """Replace the gradients in ``.grad`` by the method's direction; call between backward and step."""

    @abstractmethod
    def preconditioner(self, layer: str) -> Preconditioner | None:
        """P of the layer's units as the last step used it; None: plain coordinates (P = I)."""

    #: Whether the method has coordinates that the data alone define, for a model that it does not train.
    needs_statistics: ClassVar[bool] = False

    @classmethod
    def data_preconditioner(cls, statistics: FeatureStatistics, *, bias: bool) -> Preconditioner | None:
        """P from the statistics of a dense layer's inputs alone, if the method ``needs_statistics``; else None."""
        return None

    def diagnostics(self, layer: str) -> dict[str, float]:
        """Further columns of the study's probe table that only this method knows (see ``study/store.py``)."""
        return {}

    def attach(self, optimizer: torch.optim.Optimizer) -> None:
        """Transform the gradients at the start of every ``optimizer.step()``; any torch optimizer will do."""
        optimizer.register_step_pre_hook(lambda *_: self.transform_gradients())

    def detach(self) -> None:
        """Take everything off the model that the method put on it."""
        return

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what `state_dict` gave.

        Raises
        ------
        ConfigError
            The state is that of another method or model.
        """
        if state:
            raise ConfigError(f"method {self.name!r} has no state, but was given {', '.join(state)}")


_REGISTRY: dict[str, type[Method]] = {}

MethodClass = TypeVar("MethodClass", bound=type[Method])


def register(method: MethodClass) -> MethodClass:
    """Make a method known by its name (a class decorator).

    Raises
    ------
    ConfigError
        The name is taken.
    """
    if method.name in _REGISTRY:
        raise ConfigError(f"a method named {method.name!r} is registered already")
    _REGISTRY[method.name] = method
    return method


def method_class(name: str) -> type[Method]:
    """The method registered as ``name``.

    Raises
    ------
    ConfigError
        There is none.
    """
    if name not in _REGISTRY:
        raise ConfigError(f"unknown method {name!r}: choose from {', '.join(sorted(_REGISTRY))}")
    return _REGISTRY[name]


def registered() -> Iterator[type[Method]]:
    """All methods, by name."""
    return iter([_REGISTRY[name] for name in sorted(_REGISTRY)])
