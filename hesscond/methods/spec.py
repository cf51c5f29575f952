"""Parser of ``--method``: names of methods with options, joined by a plus sign."""

from __future__ import annotations

import inspect
import types
import typing
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, get_args, get_origin

from torch import nn

from hesscond.errors import GONE, ConfigError
from hesscond.methods.base import Method
from hesscond.methods.composed import Composed
from hesscond.methods.registry import method_class


@dataclass(frozen=True)
class Spec:
    """Choice of ``--method``: one method or several, with options.

    Attributes
    ----------
    text
        Text of ``--method``, as given.
    parts
        Class and options of each method.
    """

    text: str
    parts: tuple[tuple[type[Method], dict[str, Any]], ...]

    @property
    def plain(self) -> str:
        """The names without options."""
        return "+".join(method.name for method, _ in self.parts)

    @property
    def rate(self) -> float:
        """The learning rate if none is given: the smallest of all.

        Examples
        --------
        >>> parse("vanilla").rate, parse("adam+groupnorm").rate
        (0.1, 0.001)
        """
        return min(method.rate for method, _ in self.parts)

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
        """The method at work on ``model``, which it may change; a `ConfigError` if it does not fit the model."""
        if len(self.parts) == 1:
            method, options = self.parts[0]
            return method(model, **options)
        return Composed(model, self.text, self.parts)


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
            there = f"it is gone, {GONE[name]}" if name in GONE else f"it has {', '.join(known) or 'none'}"
            raise ConfigError(f"method {method.name!r} has no option {name!r}: {there}")
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


def shown_options(method: type[Method]) -> str:
    """The options of a method with their defaults, as they are given."""
    defaults = {name: option.default for name, option in options(method).items()}
    return ", ".join(f"{name}={as_given(value)}" for name, value in defaults.items())


def as_given(value: Any) -> str:
    """An option's value as ``--method`` takes it."""
    if isinstance(value, tuple):
        return "/".join(value)
    return str(value).lower() if value is None or isinstance(value, bool) else str(value)
