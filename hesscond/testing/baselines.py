"""Baselines: files with condition numbers, their bounds and how they came about, to compare later ones with."""

from __future__ import annotations

import json
import math
import os
import platform
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from hesscond.errors import ConfigError
from hesscond.spectra import ConditionNumber
from hesscond.testing.measured import Place, where

#: Of the file; a later version reads the earlier ones.
FORMAT = 1


@dataclass(frozen=True)
class Stored:
    """κ as it was: the attributes are those of `hesscond.ConditionNumber`."""

    value: float
    lower: float
    upper: float
    rank: int
    nullity: int
    negative: int | None
    solver: str

    @property
    def resolved(self) -> bool:
        """Whether it was."""
        return math.isfinite(self.upper)


@dataclass(frozen=True)
class Baseline:
    """A file's contents.

    Attributes
    ----------
    level, method
        What was measured, and in which coordinates.
    versions
        Of what measured it.
    kappas
        By layer and unit.
    """

    level: str
    method: str
    versions: dict[str, str]
    kappas: dict[Place, Stored]


def write_baseline(path: Path, level: str, method: str, kappas: Mapping[Place, ConditionNumber]) -> None:
    """Write a baseline, all at once: a reader sees the old file or the new one.

    Raises
    ------
    ConfigError
        It cannot be written.
    """
    blocks = [
        {
            "layer": layer,
            "unit": unit,
            "kappa": finite(kappa.value),
            "lower": kappa.lower,
            "upper": finite(kappa.upper),
            "rank": kappa.rank,
            "nullity": kappa.nullity,
            "negative": kappa.counted_negative,
            "solver": kappa.solver,
        }
        for (layer, unit), kappa in kappas.items()
    ]
    versions = {"hesscond": version("hesscond"), "torch": version("torch"), "python": platform.python_version()}
    # a line for each Hessian, so that a difference between two versions can be read
    lines = ",\n".join(f"  {json.dumps(block, ensure_ascii=False)}" for block in blocks)
    head = json.dumps({"format": FORMAT, "level": level, "method": method, "versions": versions}, ensure_ascii=False)
    text = f'{head[:-1]}, "blocks": [\n{lines}\n]}}\n'
    partial = ""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, partial = tempfile.mkstemp(dir=path.parent, prefix=f".{path.stem[:40]}-", suffix=".partial")
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        # mkstemp's are for the owner only
        Path(partial).chmod(0o644)
        Path(partial).replace(path)
    except OSError as error:
        Path(partial).unlink(missing_ok=True) if partial else None
        raise ConfigError(f"the baseline {path} cannot be written: {error.strerror}") from None


def finite(value: float) -> float | None:
    """None where it is infinite."""
    return value if math.isfinite(value) else None


def read_baseline(path: Path) -> Baseline:
    """Read a baseline.

    Raises
    ------
    ConfigError
        It cannot be read, or is none, or is of a later version of hesscond.
    """
    try:
        contents = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"the baseline {path} cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"the baseline {path} is damaged: {error}") from None
    try:
        if contents["format"] != FORMAT:
            raise ConfigError(
                f"the baseline {path} is of format {contents['format']!r}, and this hesscond reads {FORMAT}: "
                "write it anew"
            )
        kappas = {place_of(block): stored(block) for block in contents["blocks"]}
        versions = {str(name): str(number) for name, number in contents["versions"].items()}
        return Baseline(str(contents["level"]), str(contents["method"]), versions, kappas)
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        missing = f"it has no {error}" if isinstance(error, KeyError) else str(error)
        raise ConfigError(f"the baseline {path} is damaged: {missing}") from None


def place_of(block: Mapping[str, Any]) -> Place:
    """Layer and unit."""
    return str(block["layer"]), None if block["unit"] is None else int(block["unit"])


def stored(block: Mapping[str, Any]) -> Stored:
    """κ of a block.

    Raises
    ------
    KeyError, TypeError, ValueError
        It is damaged.
    """
    found = Stored(
        value=number(block["kappa"]),
        lower=float(block["lower"]),
        upper=number(block["upper"]),
        rank=int(block["rank"]),
        nullity=int(block["nullity"]),
        negative=None if block["negative"] is None else int(block["negative"]),
        solver=str(block["solver"]),
    )
    if not 1 <= found.lower <= found.upper:
        raise ValueError(f"the bounds of {where(place_of(block))} are not in order")
    return found


def number(value: float | None) -> float:
    """Infinite where it is null, as JSON has no such number."""
    return math.inf if value is None else float(value)
