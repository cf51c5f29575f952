"""Options of a data set, checked against the kinds of their defaults."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from hesscond.errors import ConfigError


def checked(given: Mapping[str, Any], known: Mapping[str, Any]) -> dict[str, Any]:
    """All options: the given ones, and the defaults of the others.

    Raises
    ------
    ConfigError
        An option that is not there, or a value of another kind.
    """
    for option, value in given.items():
        if option not in known:
            raise ConfigError(f"there is no option {option!r}: choose from {', '.join(known)}.")
        if expected := misfit(option, value, known[option]):
            raise ConfigError(f"{option} must be {expected}, not {value!r}.")
    return {**known, **given}


def misfit(option: str, value: Any, like: Any) -> str | None:
    """What the value of an option must be, if it is not: words, numbers from 0, integers from 1 (a seed: from 0)."""
    if isinstance(like, str):
        return None if isinstance(value, str) else "a word"
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if isinstance(like, float):
        return None if number and 0 <= value < math.inf else "a number that is not negative"
    least = 0 if option == "seed" else 1
    return None if number and isinstance(value, int) and value >= least else f"an integer from {least}"
