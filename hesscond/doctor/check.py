"""What a check is, and how one is made from a function that may fail."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Literal

Status = Literal["ok", "warning", "failed"]


@dataclass(frozen=True)
class Check:
    """One thing that was looked at.

    Attributes
    ----------
    group, name
        Where it belongs, what it is.
    status
        ``"failed"``: hesscond cannot be used like this, or its numbers are wrong; ``"warning"``: slower or less exact
        than it could be.
    found
        What is there.
    advice
        One sentence; empty if there is nothing to do.
    seconds
        How long it took.
    """

    group: str
    name: str
    status: Status
    found: str
    advice: str = ""
    seconds: float = 0.0


def run(group: str, tests: Iterable[tuple[str, Callable[[], Check]]]) -> Iterator[Check]:
    """Each test by its name, timed; an exception is a failed check with its sentence."""
    for name, test in tests:
        start = time.perf_counter()
        try:
            found = test()
        except Exception as error:
            said = " ".join(str(error).split())
            found = Check(group, name, "failed", f"{type(error).__name__}: {said}", "this should not happen: report it")
        yield replace(found, group=group, name=name, seconds=round(time.perf_counter() - start, 4))


def ok(found: str, advice: str = "") -> Check:
    """All is well."""
    return Check("", "", "ok", found, advice)


def warning(found: str, advice: str) -> Check:
    """Slower or less exact than it could be."""
    return Check("", "", "warning", found, advice)


def failed(found: str, advice: str) -> Check:
    """Not usable like this."""
    return Check("", "", "failed", found, advice)
