"""All methods by name, and what ``--method`` says: names with options, joined by a plus sign."""

from __future__ import annotations

import inspect
import types
import typing
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from importlib.metadata import entry_points
from typing import Any, Literal, TypeVar, get_args, get_origin

from torch import nn

from hesscond.errors import ConfigError
from hesscond.methods.base import Method

#: Packages that bring methods name modules that register them here.
GROUP = "hesscond.methods"

_REGISTRY: dict[str, type[Method]] = {}

MethodClass = TypeVar("MethodClass", bound=type[Method])


def register(method: MethodClass) -> MethodClass:
    """Make a method known by its name (a class decorator).

    Raises
    ------
    ConfigError
        The name is taken, or has a character that ``--method`` means something else by.
    """
    if method.name in _REGISTRY:
        raise ConfigError(f"a method named {method.name!r} is registered already")
    if not method.name or set(method.name) & set("+:,=/ "):
        raise ConfigError(f"{method.name!r} cannot name a method: use letters, digits and hyphens")
    _REGISTRY[method.name] = method
    return method


@cache
def load_installed() -> None:
    """Import the modules that other packages name as entry points.

    Raises
    ------
    ConfigError
        One cannot be imported.
    """
    for point in entry_points(group=GROUP):
        try:
            point.load()
        except Exception as error:
            raise ConfigError(f"the methods of {point.value} cannot be imported: {error}") from error


def method_class(name: str) -> type[Method]:
    """The method registered as ``name``.

    Raises
    ------
    ConfigError
        There is none.
    """
    if name not in _REGISTRY:
        load_installed()
    if name not in _REGISTRY:
        raise ConfigError(f"unknown method {name!r}: choose from {', '.join(sorted(_REGISTRY))}")
    return _REGISTRY[name]


def registered() -> Iterator[type[Method]]:
    """All methods, by name."""
    load_installed()
    return iter([_REGISTRY[name] for name in sorted(_REGISTRY)])


@dataclass(frozen=True)
class Spec:
    """What ``--method`` asked for: one method or several, with options.

    Attributes
    ----------
    text
        As given.
    parts
        Class and options of each.
    """

    text: str
    parts: tuple[tuple[type[Method], dict[str, Any]], ...]

    @property
    def plain(self) -> str:
        """The names without options."""
        return "+".join(method.name for method, _ in self.parts)

    @property
    def folder(self) -> str:
        """A name for a folder."""
        return "".join("-" if c in ":,=/" else c for c in self.text)

    def without(self, left_out: Callable[[type[Method]], bool]) -> Spec | None:
        """The methods that are not left out; None: there are none."""
        texts = self.text.split("+")
        kept = [(text, part) for text, part in zip(texts, self.parts, strict=True) if not left_out(part[0])]
        return Spec("+".join(text for text, _ in kept), tuple(part for _, part in kept)) if kept else None

    def create(self, model: nn.Module) -> Method:
        """The method at work on ``model``, which it may change.

        Raises
        ------
        ConfigError
            The methods do not fit the model, or each other.
        """
        if len(self.parts) == 1:
            method, options = self.parts[0]
            return method(model, **options)
        from hesscond.methods.composed import Composed

        return Composed(model, self)


def parse(text: str) -> Spec:
    """``NAME``, ``NAME:option=value,option=value`` or several of these joined by ``+``.

    Raises
    ------
    ConfigError
        No such method or option, a value of another kind, a method twice, or two that exclude each other.

    Examples
    --------
    >>> parse("bnp:rho=0.9").parts[0][1]
    {'rho': 0.9}
    """
    parts = []
    for part in text.split("+"):
        name, colon, rest = part.partition(":")
        method = method_class(name)
        given = dict(option_of(text, item) for item in rest.split(",")) if colon else {}
        parts.append((method, converted_options(method, given)))
    names = [method.name for method, _ in parts]
    if len(set(names)) < len(names):
        raise ConfigError(f"{text!r} has a method twice")
    both = [method.name for method, _ in parts if method.preconditions]
    if len(both) > 1:
        raise ConfigError(f"{' and '.join(both)} both precondition the gradient: choose one of them")
    computed = [method.name for method, _ in parts if method.reparametrizes]
    if len(computed) > 1:
        raise ConfigError(f"{' and '.join(computed)} both compute weights from other parameters: choose one of them")
    held = [method.name for method, _ in parts if method.constrains]
    if computed and held:
        raise ConfigError(f"{held[0]} constrains the weights, which {computed[0]} computes from others: choose one")
    if computed and both:
        raise ConfigError(
            f"{both[0]} preconditions the weights, which {computed[0]} computes from other parameters: choose one"
        )
    return Spec(text, tuple(parts))


def option_of(text: str, item: str) -> tuple[str, str]:
    """Name and value of ``option=value``."""
    name, equals, value = item.partition("=")
    if not equals or not name or not value:
        raise ConfigError(f"{text!r} is not of the form NAME:option=value,option=value")
    return name.strip(), value.strip()


def options(method: type[Method]) -> dict[str, inspect.Parameter]:
    """The options of a method: the keyword arguments of its constructor."""
    found = inspect.signature(method.__init__).parameters
    return {name: p for name, p in found.items() if p.kind is inspect.Parameter.KEYWORD_ONLY}


def converted_options(method: type[Method], given: dict[str, str]) -> dict[str, Any]:
    """Texts as what the constructor's annotations say."""
    known = options(method)
    kinds = typing.get_type_hints(method.__init__)
    values = {}
    for name, text in given.items():
        if name not in known:
            there = ", ".join(known) or "none"
            raise ConfigError(f"method {method.name!r} has no option {name!r}: it has {there}")
        values[name] = converted(f"option {name!r} of method {method.name!r}", text, kinds.get(name, str))
    return values


def converted(what: str, text: str, kind: Any) -> Any:
    """A text as a value of a type: bool, int, float, str, one of some words, several words, or none."""
    if get_origin(kind) in (types.UnionType, typing.Union):
        kinds = [k for k in get_args(kind) if k is not type(None)]
        if text == "none" and len(kinds) < len(get_args(kind)):
            return None
        kind = kinds[0]
    if get_origin(kind) is Literal:
        words = get_args(kind)
        if text not in words:
            raise ConfigError(f"{what} must be one of {', '.join(map(str, words))}, not {text!r}")
        return text
    if get_origin(kind) is tuple:
        return tuple(text.split("/"))
    if kind is bool:
        if text not in ("true", "false"):
            raise ConfigError(f"{what} must be true or false, not {text!r}")
        return text == "true"
    try:
        return kind(text)
    except ValueError:
        raise ConfigError(f"{what} must be of type {kind.__name__}, not {text!r}") from None
