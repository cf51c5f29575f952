"""All methods by name."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TypeVar

from hesscond.errors import ConfigError
from hesscond.lazy import Registry, subclass_of
from hesscond.methods.base import Method

#: All methods by name; packages that bring some name modules that register them as entry points of the group.
_REGISTRY: Registry[type[Method]] = Registry("method", "hesscond.methods", subclass_of(Method))

MethodClass = TypeVar("MethodClass", bound=type[Method])


def register(method: MethodClass) -> MethodClass:
    """Make a method known by its name (a class decorator).

    A `ConfigError` if the name is taken, or has a character that ``--method`` means something else by.
    """
    if not method.name or set(method.name) & set("+:,=/ "):
        raise ConfigError(f"{method.name!r} cannot name a method: use letters, digits and hyphens")
    _REGISTRY.add(method.name, method)
    return method


def classes() -> dict[str, type[Method]]:
    """Registered methods by the names of their classes."""
    return {method.__name__: method for method in _REGISTRY.values()}


def method_class(name: str) -> type[Method]:
    """The method registered as ``name``; a `ConfigError` if there is none."""
    return _REGISTRY.find(name)


def registered() -> Iterator[type[Method]]:
    """All methods, by name."""
    return iter(_REGISTRY.installed())
