"""The studies that come with hesscond, as their files describe them; nothing is checked."""

from __future__ import annotations

import tomllib
from pathlib import Path


def studies_folder() -> Path:
    """Where the built-in studies lie: inside the installed package, or beside it in a checkout."""
    package = Path(__file__).resolve().parents[1]
    inside = package / "studies"
    return inside if inside.is_dir() else package.parent / "studies"


def described() -> list[dict[str, str]]:
    """Name, data set and description of each."""
    contents = [tomllib.loads(path.read_text(encoding="utf-8")) for path in sorted(studies_folder().glob("*.toml"))]
    return [{"name": c["name"], "data": c["data"]["name"], "description": c["description"]} for c in contents]
