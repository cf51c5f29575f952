"""Reading study files: the built-in ones by name, others by their path; each error with its line."""

from __future__ import annotations

import re
import tomllib
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from hesscond.errors import ConfigError
from hesscond.study.config import StudyConfig
from hesscond.study.listing import studies_folder
from hesscond.study.sections import first_problem
from hesscond.study.structure import Misfit, check_structure

SCALES = ("paper", "small")
#: Lines of a TOML file that begin a table, one of several tables, or the value of a key.
HEADER = re.compile(r"\s*(\[\[?)\s*([A-Za-z_][\w.-]*)\s*\]")
KEY = re.compile(r"\s*([A-Za-z_][\w.-]*)\s*=")


def built_in() -> Iterator[StudyConfig]:
    """The studies that come with hesscond, by name."""
    return (load_study(path) for path in sorted(studies_folder().glob("*.toml")))


def load_study(study: str | Path, scale: str | None = None) -> StudyConfig:
    """A built-in study by name, or the one in a TOML file.

    Parameters
    ----------
    study
        Name or path.
    scale
        ``"paper"`` or ``"small"``: with the changes of its table ``[small]``. None: as the study says.

    Returns
    -------
    StudyConfig
        With these changes made; ``small`` is empty.

    Raises
    ------
    ConfigError
        No such study, or it has no other scale; a file that is not TOML; a key that is unknown, missing or of the
        wrong kind, at either scale; parts of the study that do not fit each other.
    """
    path = Path(study)
    if path.suffix != ".toml":
        known = sorted(p.stem for p in studies_folder().glob("*.toml"))
        if str(study) not in known:
            raise ConfigError(f"unknown study {str(study)!r}: choose from {', '.join(known)}, or give a .toml file")
        path = studies_folder() / f"{study}.toml"
    if scale not in (None, *SCALES):
        raise ConfigError(f"--scale is one of {', '.join(SCALES)}, not {scale!r}")
    try:
        text = path.read_text(encoding="utf-8")
        content = tomllib.loads(text)
    except FileNotFoundError:
        raise ConfigError(f"no study file {path}") from None
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is not valid TOML: {error}") from None
    as_is = checked(path, text, content)
    wanted = scale or as_is.scale
    if "run" in content:
        if scale not in (None, as_is.scale):
            raise ConfigError(f"{path} is of a run at scale {as_is.scale!r}: take the study itself for another")
        return as_is
    if "small" not in content:
        if wanted == "small":
            raise ConfigError(f"{path} has no table [small]: there is no small version of the study")
        return as_is
    small = {key: value for key, value in content.items() if key != "small"}
    found = {
        "paper": as_is.model_copy(update={"scale": "paper", "small": {}}),
        "small": checked(path, text, merged(small, content["small"]) | {"scale": "small"}),
    }
    return found[wanted]


def merged(content: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """``content`` with the ``changes``, table by table; other values are replaced.

    Examples
    --------
    >>> merged({"a": {"b": 1, "c": [2]}, "d": 3}, {"a": {"c": [4, 5]}})
    {'a': {'b': 1, 'c': [4, 5]}, 'd': 3}
    """
    found = dict(content)
    for key, value in changes.items():
        before = found.get(key)
        found[key] = merged(before, value) if isinstance(before, dict) and isinstance(value, dict) else value
    return found


def checked(path: Path, text: str, content: dict[str, Any]) -> StudyConfig:
    """The study from the contents of a file, or of its small version.

    Raises
    ------
    ConfigError
        The first thing wrong, with the line of its key.
    """
    try:
        study = StudyConfig.model_validate(content)
        check_structure(study)
    except ValidationError as error:
        key, words = first_problem(error)
    except Misfit as error:
        key, words = error.key, str(error)
    else:
        return study
    line = line_of(text, key, small=content.get("scale") == "small" and "small" not in content)
    raise ConfigError(f"{path}{line}: {words}") from None


def line_of(text: str, key: tuple[str | int, ...], *, small: bool) -> str:
    """``", line 7"`` for a key, else for the innermost table that there is; nothing where the key is at the top."""
    lines = lines_of(text)
    for place in (("small", *key), key) if small else (key,):
        while place and place != ("small",):
            if place in lines:
                return f", line {lines[place]}"
            place = place[:-1]
    return ""


def lines_of(text: str) -> dict[tuple[str | int, ...], int]:
    r"""The line, from 1, on which each table and key first appears that stands at the beginning of a line.

    Examples
    --------
    >>> lines_of("[[a]]\nb = 1\n[[a]]\nb = [\n  2,\n]")
    {('a',): 1, ('a', 0): 1, ('a', 0, 'b'): 2, ('a', 1): 3, ('a', 1, 'b'): 4}
    """
    found: dict[tuple[str | int, ...], int] = {}
    table: tuple[str | int, ...] = ()
    tables: Counter[tuple[str | int, ...]] = Counter()
    for number, line in enumerate(text.splitlines(), 1):
        if header := HEADER.match(line):
            table = place = tuple(header[2].split("."))
            if header[1] == "[[":
                table = place = (*place, tables[place])
                tables[place[:-1]] += 1
        elif key := KEY.match(line):
            place = (*table, *key[1].split("."))
        else:
            continue
        for end in range(1, len(place) + 1):
            found.setdefault(place[:end], number)
    return found
