"""What was run: configurations as TOML, where they differ, and the environment."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import tomli_w
from markupsafe import Markup

from hesscond.report.html.embedding import data_url
from hesscond.report.html.naming import NamedRun
from hesscond.report.html.text import listed

#: What a configuration does not set.
MISSING = "–"


@dataclass(frozen=True)
class Configuration:
    """A run's configuration.

    Attributes
    ----------
    name, file
        Of the run, and of the file to save it as.
    lines
        Of TOML, each with whether another run's differs in it.
    download
        The same as a data URL.
    """

    name: str
    file: str
    lines: tuple[tuple[str, bool], ...]
    download: Markup


@dataclass(frozen=True)
class Setting:
    """A key of the configurations with the value in each run."""

    key: str
    values: tuple[str, ...]


def configurations(runs: Sequence[NamedRun]) -> list[Configuration]:
    """One for each run."""
    texts = [tomli_w.dumps(one.run.config) for one in runs]
    placed = [lines_in_tables(text) for text in texts]
    common = set(placed[0]).intersection(*placed[1:])
    return [
        Configuration(
            one.name,
            f"{one.file}.toml",
            tuple((line, (table, line) not in common) for table, line in lines),
            data_url("application/toml", text.encode("utf-8", "surrogatepass")),
        )
        for one, text, lines in zip(runs, texts, placed, strict=True)
    ]


def lines_in_tables(text: str) -> list[tuple[str, str]]:
    """Each line of TOML with the header of the table that it is in."""
    found, table = [], ""
    for line in text.rstrip("\n").split("\n"):
        table = line if line.startswith("[") else table
        found.append((table, line))
    return found


def differences(runs: Sequence[NamedRun]) -> list[Setting]:
    """The keys whose values are not the same in all runs, in the order of the first that has them."""
    flat = [flattened(one.run.config) for one in runs]
    keys = dict.fromkeys(key for settings in flat for key in settings)
    rows = [Setting(key, tuple(settings.get(key, MISSING) for settings in flat)) for key in keys]
    return [row for row in rows if len(set(row.values)) > 1]


def flattened(config: dict[str, Any], above: str = "") -> dict[str, str]:
    """Values as TOML writes them, by dotted key.

    Examples
    --------
    >>> flattened({"run": {"seed": 0, "method": "bnp"}})
    {'run.seed': '0', 'run.method': '"bnp"'}
    """
    found: dict[str, str] = {}
    for key, value in config.items():
        if isinstance(value, dict):
            found |= flattened(value, f"{above}{key}.")
        else:
            found[f"{above}{key}"] = " ".join(tomli_w.dumps({"v": value}).partition("=")[2].split())
    return found


@dataclass(frozen=True)
class Fact:
    """Something about the environment: each value with the runs that have it."""

    name: str
    values: tuple[tuple[str, str], ...]


def environment(runs: Sequence[NamedRun]) -> list[Fact]:
    """Versions, device and source of the data."""
    described = []
    for one in runs:
        own = one.run.config["run"]
        versions = own.get("versions")
        facts = {"device": own.get("device", MISSING), "data source": own.get("data_source", MISSING)}
        described.append((versions if isinstance(versions, dict) else {}) | facts)
    found = []
    for name in dict.fromkeys(name for facts in described for name in facts):
        whose: dict[str, list[str]] = {}
        for one, facts in zip(runs, described, strict=True):
            whose.setdefault(str(facts.get(name, MISSING)), []).append(one.name)
        everywhere = len(whose) == 1
        found.append(Fact(str(name), tuple((v, "" if everywhere else listed(names)) for v, names in whose.items())))
    return found
