"""Errors that users may meet, each with one sentence that says what is wrong, where, and how to mend it."""

from __future__ import annotations

import math
import re
import textwrap
import traceback
from collections.abc import Iterable
from difflib import get_close_matches
from numbers import Real

#: Bytes in the units of memory sizes.
BYTES = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "KI": 2**10, "MI": 2**20, "GI": 2**30, "TI": 2**40}

#: The largest integer that TOML, SQLite and torch have in common.
LARGEST = 2**63 - 1


class HesscondError(Exception):
    """Bad use or bad input. The command line prints the sentence and exits with code 2."""


class ConfigError(HesscondError):
    """A study, method, layer, unit or option that does not exist or does not fit."""


class DataNotFoundError(HesscondError):
    """A data set that is neither on disk nor obtainable."""


class CorruptDataError(HesscondError):
    """A data file whose checksum or layout is not the published one."""


class CaptureError(HesscondError):
    """A layer whose activations or curvature cannot be captured exactly."""


class NotFiniteError(CaptureError):
    """Activations or curvature that are NaN or infinite."""


class NoDerivativeError(CaptureError):
    """An operation for which torch has no second derivative, or a wrong one."""


class TooLargeError(CaptureError):
    """A layer whose curvature does not fit into the memory."""


class MatrixError(HesscondError):
    """A matrix whose condition number is not defined: not two-dimensional, empty, NaN or infinite."""


class RunError(HesscondError):
    """A run folder that is missing, damaged or already in use."""


class DivergedError(Exception):
    """The loss became NaN or infinite. The log is kept; the command line exits with code 1."""


def bytes_of(memory: object) -> float | None:
    """Number of bytes of a ``memory=`` argument: a number, or a size such as ``"2 GB"``; None stays None."""
    if isinstance(memory, str):
        match = re.fullmatch(r"\s*(\d+\.?\d*(?:E\+?\d+)?)\s*([KMGT]I?)?B?\s*", memory.upper(), re.ASCII)
        size = float(match[1]) * BYTES[match[2] or ""] if match else math.nan
    else:
        size = float(memory) if isinstance(memory, Real) and not isinstance(memory, bool) else math.nan
    if memory is None or 0 < size < math.inf:
        return None if memory is None else size
    raise ConfigError(f"memory must be a positive number of bytes, or a size such as '2 GB', not {memory!r}")


def readable(size: float) -> str:
    """Number of bytes in readable form, such as 1.5 GB."""
    for unit in ("B", "kB", "MB"):
        if size < 1000:
            return f"{size:.3g} {unit}"
        size /= 1000
    return f"{size:.3g} GB"


def counted(number: int, noun: str) -> str:
    """Number and noun, in the plural unless the number is 1."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def refuse_large(
    what: str, size: float, memory: float | None, advice: str, kind: type[HesscondError] = TooLargeError
) -> None:
    """Raise an error of a kind if something takes more bytes than the memory; ``what`` ends in "takes"."""
    if memory is not None and size > memory:
        raise kind(f"{what} {readable(size)}, more than memory={readable(memory)}: {advice}")


#: The ``least`` of options that may have any value of their kind: those of a user's function, which knows its ranges.
ANY = -math.inf


def unfit(value: object, like: object, least: float = 1) -> str | None:
    """Requirement that the value of an option misses, by the type of its default, in words; None: it fits."""
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    fits = isinstance(value, int) and number and value >= least
    expected = "an integer" if least == ANY else f"an integer from {least}"
    if like is None and least == ANY:
        return None
    if isinstance(like, tuple):
        entry = like[0] if like else 1
        fits = isinstance(value, (list, tuple)) and not any(unfit(v, entry, least) for v in value)
        expected = f"a list, each entry {unfit((), entry, least)}" if least == ANY else "a list of positive integers"
    elif isinstance(like, str):
        fits, expected = isinstance(value, str), "a word"
    elif isinstance(like, bool):
        fits, expected = isinstance(value, bool), "true or false"
    elif isinstance(like, float):
        fits = isinstance(value, (int, float)) and number and min(least, 0) <= value < math.inf and value != ANY
        expected = "a finite number" if least == ANY else "a number that is not negative"
    return None if fits else expected


#: Number of names that a sentence lists where there are many.
LISTED = 8
#: Other names of gradient descent without a method.
PLAIN = ("none", "sgd", "gd", "plain", "baseline")


def did_you_mean(given: str, known: Iterable[str], *, otherwise: str | None = None) -> str:
    """Suggestion for a misspelt name; without a close name, ``otherwise``, or the names if that is None."""
    names = list(known)
    if given.lower() in PLAIN and "vanilla" in names:
        return "gradient descent without a method is vanilla"
    close = get_close_matches(given, names, 1, 0.65) or [name for name in names if name.lower() == given.lower()]
    if close:
        return f"did you mean {close[0]}?"
    shown = names if len(names) <= 3 * LISTED else [*names[:LISTED], f"… ({len(names)} in all)"]
    return f"choose from {', '.join(shown)}" if otherwise is None else otherwise


def out_of_memory(error: BaseException) -> bool:
    """Whether an exception is due to too little memory, of a device or the host."""
    by_name = any(kind.__name__ in ("MemoryError", "OutOfMemoryError") for kind in type(error).__mro__)
    return by_name or "allocate memory" in str(error)


def one_line(error: BaseException) -> str:
    """Type and message of an exception on one line, the message cut if it is very long."""
    return textwrap.shorten("".join(traceback.format_exception_only(type(error), error)), 400, placeholder=" …")
