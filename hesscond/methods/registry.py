"""All methods by name."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TypeVar

from hesscond.errors import ConfigError, did_you_mean
from hesscond.lazy import load_installed
from hesscond.methods.base import Method

#: Packages that bring methods name modules that register them here.
GROUP = "hesscond.methods"

_REGISTRY: dict[str, type[Method]] = {}

MethodClass = TypeVar("MethodClass", bound=type[Method])


def register(method: MethodClass) -> MethodClass:
    """Make a method known by its name (a class decorator).

    A `ConfigError` if the name is taken, or has a character that ``--method`` means something else by.
    """
    if method.name in _REGISTRY:
        raise ConfigError(f"a method named {method.name!r} is registered already")
    if not method.name or set(method.name) & set("+:,=/ "):
        raise ConfigError(f"{method.name!r} cannot name a method: use letters, digits and hyphens")
    _REGISTRY[method.name] = method
    return method


def classes() -> dict[str, type[Method]]:
    """Registered methods by the names of their classes."""
    return {method.__name__: method for method in _REGISTRY.values()}


def method_class(name: str) -> type[Method]:
    """The method registered as ``name``; a `ConfigError` if there is none."""
    if name not in _REGISTRY:
        load_installed(GROUP)
    if name not in _REGISTRY:
        raise ConfigError(f"unknown method {name!r}: {did_you_mean(name, sorted(_REGISTRY))}")
    return _REGISTRY[name]


def registered() -> Iterator[type[Method]]:
    """All methods that a network can be trained with, by name."""
    load_installed(GROUP)
    return iter([_REGISTRY[name] for name in sorted(_REGISTRY) if _REGISTRY[name].trained])
