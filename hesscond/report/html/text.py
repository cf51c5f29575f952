"""Text from a run as a page may show it: nothing invisible, nothing that turns the lines around it."""

from __future__ import annotations

import unicodedata
from typing import Any

from markupsafe import Markup

#: Control, format (bidirectional overrides among them), surrogate, private and unassigned characters, separators.
INVISIBLE = ("Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp")

#: A page shows no more characters than this of one text.
LONGEST = 4000


def visible(text: Any) -> str:
    r"""The text with every character that has no look of its own written out; long ones are cut.

    Parameters
    ----------
    text
        Anything; what is marked as safe stays as it is.

    Examples
    --------
    >>> visible("study\u202e\x00")
    'study⟨U+202E⟩⟨U+0000⟩'
    """
    if isinstance(text, Markup):
        return text
    text = str(text)
    rest = len(text) - LONGEST
    shown = "".join(
        f"⟨U+{ord(c):04X}⟩" if unicodedata.category(c) in INVISIBLE else c for c in " ".join(text[:LONGEST].split("\n"))
    )
    return f"{shown} … ({rest} more characters)" if rest > 0 else shown


def shortened(text: str, length: int = 60) -> str:
    """A name that fits into a legend."""
    return text if len(text) <= length else f"{text[: length - 1]}…"


def all_visible(value: Any) -> Any:
    """The same for every text in lists and dictionaries."""
    if isinstance(value, dict):
        return {visible(key): all_visible(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [all_visible(item) for item in value]
    return visible(value) if isinstance(value, str) else value


def count(number: int, noun: str) -> str:
    """A number of things.

    Examples
    --------
    >>> count(1, "run"), count(2, "run")
    ('1 run', '2 runs')
    """
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def listed(items: list[str], most: int = 6) -> str:
    """Items in a sentence, the first few of many.

    Examples
    --------
    >>> listed(["a", "b", "c"], most=2)
    'a, b and 1 more'
    """
    if len(items) <= most:
        return ", ".join(items)
    return f"{', '.join(items[:most])} and {len(items) - most} more"
