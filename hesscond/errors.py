"""The errors a user can cause or must know about, each with one sentence that says what, where and how to mend it."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


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


class MatrixError(HesscondError):
    """A matrix whose condition number is not defined: not two-dimensional, empty, NaN or infinite."""


class RunError(HesscondError):
    """A run folder that is missing, damaged or already in use."""


class DivergedError(Exception):
    """The loss became NaN or infinite. The log is kept; the command line exits with code 1."""


def did_you_mean(given: str, known: Iterable[str], *, otherwise: str | None = None) -> str:
    """A suggestion for a misspelt name; ``otherwise``: what to say without one, else all names.

    Examples
    --------
    >>> did_you_mean("vanila", ["bnp", "vanilla"]), did_you_mean("x", ["bnp", "vanilla"])
    ('did you mean vanilla?', 'choose from bnp, vanilla')
    """
    names = list(known)
    close = get_close_matches(given, names, 1, 0.65) or [name for name in names if name.lower() == given.lower()]
    if close:
        return f"did you mean {close[0]}?"
    return f"choose from {', '.join(names)}" if otherwise is None else otherwise
