"""Versions of hesscond, of Python and of what hesscond needs; optional extras."""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterator
from importlib.metadata import PackageNotFoundError, requires, version

from packaging.requirements import Requirement

import hesscond
from hesscond.doctor.check import Check, failed, ok, warning

#: Extras that only those need who work on hesscond itself.
INTERNAL = ("dev", "docs", "bench")


def tests() -> Iterator[tuple[str, Callable[[], Check]]]:
    """Name and test of each."""
    yield "hesscond", lambda: ok(f"{hesscond.__version__}, Python {platform.python_version()}, {platform.platform()}")
    try:
        stated = [Requirement(text) for text in requires("hesscond") or []]
    except PackageNotFoundError:
        text = "install it (pip install .) so that its dependencies are known and can be compared"
        yield "packages", lambda: warning("hesscond runs from its source folder, not installed", text)
        return
    yield "packages", lambda: required([r for r in stated if r.marker is None or r.marker.evaluate({"extra": ""})])
    for extra in extras(stated):
        yield f"extra {extra}", lambda extra=extra: optional(extra, wanted(stated, extra))  # type: ignore[misc]


def extras(stated: list[Requirement]) -> list[str]:
    """Names of the extras for users, by what the requirements' markers say."""
    markers = " ".join(str(r.marker) for r in stated if r.marker is not None)
    names = {part.split('"')[1] for part in markers.split("extra ==")[1:]}
    return sorted(names - set(INTERNAL))


def wanted(stated: list[Requirement], extra: str) -> list[Requirement]:
    """What an extra asks for in addition."""
    return [
        r for r in stated if r.marker and r.marker.evaluate({"extra": extra}) and not r.marker.evaluate({"extra": ""})
    ]


def lacking(needed: list[Requirement]) -> list[str]:
    """Which are missing or of another version."""
    found = []
    for one in needed:
        try:
            there = version(one.name)
        except PackageNotFoundError:
            found.append(f"{one.name} is missing")
            continue
        if not one.specifier.contains(there, prereleases=True):
            found.append(f"{one.name} {there} is not {one.specifier}")
    return found


def required(needed: list[Requirement]) -> Check:
    """All packages that hesscond needs."""
    problems = lacking(needed)
    if problems:
        return failed("; ".join(problems), "install hesscond again: pip install --upgrade hesscond")
    shown = ("torch", "numpy", "scipy")
    others = len(needed) - len(shown)
    return ok(", ".join(f"{name} {version(name)}" for name in shown) + f" and {others} more, all as required")


def optional(extra: str, needed: list[Requirement]) -> Check:
    """The packages of an extra."""
    problems = lacking(needed)
    names = ", ".join(f"{r.name} {version(r.name)}" for r in needed) if not problems else "; ".join(problems)
    return ok(names, f'pip install "hesscond[{extra}]" gets it' if problems else "")
