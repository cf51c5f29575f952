"""The studies that come with hesscond, as their files describe them; nothing is checked."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any


def studies_folder() -> Path:
    """Where the built-in studies lie: inside the installed package, or beside it in a checkout."""
    package = Path(__file__).resolve().parents[1]
    inside = package / "studies"
    return inside if inside.is_dir() else package.parent / "studies"


def contents() -> Iterator[dict[str, Any]]:
    """The contents of each file, by name."""
    return (tomllib.loads(path.read_text(encoding="utf-8")) for path in sorted(studies_folder().glob("*.toml")))


@lru_cache(maxsize=1)
def aliases() -> dict[str, str]:
    """Names that studies had before, and what each stands for: ``NAME`` or ``NAME/PANEL``."""
    found = {}
    for content in contents():
        for alias, panel in content.get("aliases", {}).items():
            found[alias] = f"{content['name']}/{panel}" if panel else content["name"]
    return found


def described() -> list[dict[str, str]]:
    """Name, data set and description of each, every panel of one that has some, and names that they had before."""
    rows = []
    for content in contents():
        for panel in content.get("panels", [{}]):
            name = f"{content['name']}/{panel['name']}" if panel else content["name"]
            data = panel.get("data", {}).get("name") or content["data"]["name"]
            rows.append({"name": name, "data": data, "description": panel.get("title") or content["description"]})
    data = {row["name"]: row["data"] for row in rows}
    for alias, name in sorted(aliases().items()):
        rows.append({"name": alias, "data": data[name], "description": f"another name of {name}"})
    return rows
