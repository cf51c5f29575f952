"""The studies that come with hesscond, as their files describe them; nothing is checked."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any


def studies_folder() -> Path:
    """Folder of the built-in studies: inside the installed package, or next to it in a checkout."""
    package = Path(__file__).resolve().parents[1]
    inside = package / "studies"
    return inside if inside.is_dir() else package.parent / "studies"


def contents() -> Iterator[dict[str, Any]]:
    """Contents of each built-in study file, sorted by name."""
    return (tomllib.loads(path.read_text(encoding="utf-8")) for path in sorted(studies_folder().glob("*.toml")))


@lru_cache(maxsize=1)
def aliases() -> dict[str, str]:
    """Names that studies had before, and what each stands for: ``NAME`` or ``NAME/PANEL``."""
    names = {}
    for content in contents():
        for alias, panel in content.get("aliases", {}).items():
            names[alias] = f"{content['name']}/{panel}" if panel else content["name"]
    return names


def described() -> list[dict[str, str]]:
    """Name, data sets, number of panels and description of each study, and the names that studies had before."""
    rows = []
    for content in contents():
        panels = content.get("panels", [])
        tables = [content.get("data"), *(panel.get("data") for panel in panels)]
        data = dict.fromkeys(table["name"] for table in tables if table and "name" in table)
        count = f"{len(panels)}" if panels else ""
        rows.append(
            {"name": content["name"], "data": ", ".join(data), "panels": count, "description": content["description"]}
        )
    by_name = {row["name"]: row for row in rows}
    for alias, name in sorted(aliases().items()):
        data = by_name[name.partition("/")[0]]["data"]
        rows.append({"name": alias, "data": data, "panels": "", "description": f"another name of {name}"})
    return rows


def panels_of(name: str) -> list[dict[str, str]]:
    """Name, data set and title of each panel of a study, or of the study itself if it has no panels."""
    rows = []
    for content in contents():
        if content["name"] == aliases().get(name, name).partition("/")[0]:
            for panel in content.get("panels", [{}]):
                full_name = f"{content['name']}/{panel['name']}" if panel else content["name"]
                data = panel.get("data", {}).get("name") or content["data"]["name"]
                methods = panel.get("methods", content.get("methods", []))
                names = ", ".join(entry if isinstance(entry, str) else entry["name"] for entry in methods)
                title = panel.get("title") or content["description"]
                rows.append({"name": full_name, "data": data, "shows": title, "methods": names})
    return rows
