"""Options of a method, each declared once: its type, default, range and meaning."""

from __future__ import annotations

import inspect
import math
import re
import sys
import textwrap
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args, get_origin

from hesscond.errors import ConfigError


@dataclass(frozen=True)
class Option:
    """Declaration of an option by `option`; ``owner`` and ``attribute`` say where it was found."""

    default: Any
    about: str
    name: str
    ranges: tuple[tuple[str, float, Callable[[Any, Any], bool]], ...]
    owner: type = object
    attribute: str = ""

    @property
    def kind(self) -> Any:
        """Type of its values, as annotated."""
        found = self.owner.__annotations__[self.attribute]
        return eval(found, vars(sys.modules[self.owner.__module__])) if isinstance(found, str) else found

    def checked(self, method: str, value: Any) -> Any:
        """The value, or a ConfigError if it is out of the range, or none of the words that are allowed."""
        if get_origin(self.kind) is Literal and value not in get_args(self.kind):
            words = ", ".join(map(str, get_args(self.kind)))
            raise ConfigError(f"method {method!r}: {self.name} must be one of {words}, not {value!r}")
        if value is None or not self.ranges:
            return value
        infinite = math.isinf(value) and not any(bound == value for _, bound, _ in self.ranges)
        if infinite or not all(holds(value, bound) for _, bound, holds in self.ranges):
            words = " and ".join(f"{word} {bound:g}" for word, bound, _ in self.ranges if not math.isinf(bound))
            words += " and finite" if infinite else ""
            raise ConfigError(f"method {method!r}: {self.name} must be {words}, not {value}")
        return value


def option(
    default: Any,
    about: str = "",
    *,
    name: str = "",
    above: float | None = None,
    least: float | None = None,
    below: float | None = None,
    most: float | None = None,
) -> Any:
    """Declare an option in the body of a method: ``epsilon: float = option(1e-8, "ε.", above=0)``.

    Parameters
    ----------
    default
        Value if none is given.
    about
        Meaning, for the method's page; empty: that and the range of the option of this name in the base class.
    name
        Name on the command line, where the attribute has another one.
    above, least, below, most
        Ends of the range; a number with a range must be finite, unless an end is infinite.
    """
    ends: list[tuple[str, float | None, Callable[[Any, Any], bool]]] = [
        ("above", above, lambda value, bound: value > bound),
        ("at least", least, lambda value, bound: value >= bound),
        ("below", below, lambda value, bound: value < bound),
        ("at most", most, lambda value, bound: value <= bound),
    ]
    return Option(default, about, name, tuple((word, end, holds) for word, end, holds in ends if end is not None))


def declared(method: type) -> dict[str, Option]:
    """Options that a method declares, by name: its own first, then those of its base classes."""
    found: dict[str, Option] = {}
    for owner in method.__mro__:
        for attribute, one in vars(owner).items():
            if not isinstance(one, Option):
                continue
            name = one.name or attribute
            if name not in found:
                found[name] = replace(one, name=name, owner=owner, attribute=attribute)
            elif not found[name].about:
                found[name] = replace(found[name], about=one.about, ranges=one.ranges)
    return found


def documented(method: type) -> None:
    """Give a class that declares options its signature, and their meanings in its docstring."""
    own = declared(method)
    if not own or not method.__doc__:
        return
    text = inspect.cleandoc(method.__doc__)
    body = "".join(f"\n{name}\n{textwrap.indent(textwrap.fill(one.about, 110), ' ' * 4)}" for name, one in own.items())
    head, *tail = re.split(r"\n\n(?=(?:Notes|Examples)\n---)", text, maxsplit=1)
    method.__doc__ = "\n\n".join([head, f"Parameters\n----------{body}", *tail])
    keyword = inspect.Parameter.KEYWORD_ONLY
    known = [inspect.Parameter(n, keyword, default=o.default, annotation=o.kind) for n, o in own.items()]
    model = inspect.Parameter("model", inspect.Parameter.POSITIONAL_OR_KEYWORD)
    method.__signature__ = inspect.Signature([model, *known])  # type: ignore[attr-defined]
