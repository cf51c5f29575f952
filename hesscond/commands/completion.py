"""Shell completion of names of studies, methods and statements, words of a list, and run folders.

A completion takes what is typed so far and returns what it may become. None of them reads a file.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

from hesscond.runs import LOG
from hesscond.study.listing import studies_folder


def among(names: Iterable[str]) -> Callable[[str], list[str]]:
    """Completion that offers the given words."""
    words = list(names)

    def complete(incomplete: str) -> list[str]:
        return [word for word in words if word.startswith(incomplete)]

    return complete


def studies(incomplete: str) -> list[str]:
    """Complete the names of built-in studies, and TOML files."""
    built_in = among(path.stem for path in sorted(studies_folder().glob("*.toml")))
    return built_in(incomplete) + [path for path in paths(incomplete) if path.endswith((".toml", "/"))]


def methods(incomplete: str) -> list[str]:
    """Complete methods; after a plus sign, those that are not named yet."""
    from hesscond.methods import registered

    before, plus, last = incomplete.rpartition("+")
    there = before.split("+")
    return [before + plus + m.name for m in registered() if m.name.startswith(last) and m.name not in there]


def statement_ids(incomplete: str) -> list[str]:
    """Complete statements, by any of their ids."""
    from hesscond.theorems.base import ids

    return among(ids())(incomplete)


def runs(incomplete: str) -> list[str]:
    """Complete run folders; other folders end in a slash, since run folders may lie in them."""
    found = [Path(path) for path in paths(incomplete) if path.endswith("/")]
    return [str(folder) if (folder / LOG).is_file() else f"{folder}/" for folder in found]


def paths(incomplete: str) -> list[str]:
    """Files and folders that begin as typed, folders with a slash at the end; hidden ones only if a dot is typed."""
    folder, slash, begun = incomplete.rpartition("/")
    shown = folder + slash
    try:
        there = sorted(Path(shown or ".").expanduser().iterdir())
    except OSError:
        return []
    named = (path for path in there if path.name.startswith(begun) and (begun or not path.name.startswith(".")))
    return [f"{shown}{path.name}{'/' if path.is_dir() else ''}" for path in named]
