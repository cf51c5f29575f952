"""The assertion that condition numbers are no worse than a baseline, a file with them and their bounds."""

from __future__ import annotations

import json
import math
import os
import platform
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from os import PathLike
from pathlib import Path
from typing import Any

from torch import nn

import _hesscond_pytest
from hesscond.capture import Batch, LossFunction
from hesscond.errors import ConfigError
from hesscond.expectations.intervals import Interval, less_equal, shown
from hesscond.spectra import ConditionNumber
from hesscond.testing.assertions import Assertion, BaselineError, Finding, conclude, policy_of, record, refuse_share
from hesscond.testing.conditions import (
    Measure,
    Place,
    cells_of,
    decided,
    interval,
    measured,
    name_of,
    said_of,
    told,
    where,
    width,
)

#: Version of the file's format; a later version reads the earlier ones.
FORMAT = 1


@dataclass(frozen=True)
class Stored:
    """κ as stored in a baseline: the attributes are those of `hesscond.ConditionNumber`."""

    value: float
    lower: float
    upper: float
    rank: int
    nullity: int
    negative: int | None
    solver: str

    @property
    def resolved(self) -> bool:
        """Whether κ had an upper bound."""
        return math.isfinite(self.upper)


@dataclass(frozen=True)
class Baseline:
    """Contents of a baseline file: κ by layer and unit, their level and coordinates, and the versions used."""

    level: str
    method: str
    versions: dict[str, str]
    kappas: dict[Place, Stored]


def assert_no_regression(
    model: nn.Module,
    loss_fn: LossFunction,
    batch: Batch | Iterable[Batch],
    *,
    baseline: str | PathLike[str],
    rel: float = 0.05,
    layer: str | Sequence[str] | None = None,
    unit: int | Sequence[int] | None = None,
    level: str = "unit",
    method: Measure = None,
    share: float = 1.0,
    create: bool = False,
    unresolved: str | None = None,
    **options: Any,
) -> Assertion:
    """Assert κ ≤ (1 + rel) κ₀ for every Hessian named, where κ₀ is the value in the baseline.

    Both have bounds: it passes only if the upper bound of κ is within the limit that the lower bound of κ₀ sets, and
    fails only if the lower bound of κ exceeds the one that the upper bound of κ₀ sets.

    Parameters
    ----------
    model, loss_fn, batch, level, method
        As for `hesscond.probe`; ``method`` may be a dense (n, n) tensor P, too.
    baseline
        A JSON file. It is written if pytest is run with ``--hesscond-update-baselines``, and by ``create`` if it is
        not there; nothing is compared then. Keep it under version control.
    rel
        Largest relative increase of κ that passes. It must cover differences between machines.
    layer, unit, share, unresolved, **options
        As for `assert_condition_number`.
    create
        Write the baseline if there is none.

    Returns
    -------
    Assertion
        Assertion with the finding for every Hessian; its outcome is ``"written"`` if the baseline was written.

    Raises
    ------
    ConditionNumberError
        The bounds decide against it.
    UnresolvedError
        They do not decide, and the policy is to fail.
    BaselineError
        There is no baseline, or it is one of other Hessians. All three are an ``AssertionError``.
    ConfigError
        Bad use; the baseline is damaged or cannot be written.
    """
    __tracebackhide__ = True
    if not 0 <= rel < math.inf:
        raise ConfigError(f"rel must be zero or positive, and finite, not {rel}")
    refuse_share(share)
    policy, path, name = policy_of(unresolved), Path(baseline), name_of(method)
    update = _hesscond_pytest.running is not None and _hesscond_pytest.running.update
    if not update and not create and not path.exists():
        raise BaselineError(
            f"there is no baseline {path}: create it with pytest --hesscond-update-baselines, or with create=True"
        )
    found = measured(model, loss_fn, batch, layer, unit, level, method, options)
    claim = f"κ ≤ {1 + rel:g} κ₀"
    if update or not path.exists():
        write_baseline(path, level, name, found)
        written = Assertion(f"{claim} of {path.name}", (), share, f"{len(found)} {said_of(level, name)}", "written")
        record(written)
        return written
    stored = read_baseline(path)
    refuse_another(path, stored, level, name, found)
    findings = tuple(compared(place, kappa, stored.kappas[place], rel) for place, kappa in found.items())
    return conclude(Assertion(f"{claim} of {path.name}", findings, share, said_of(level, name)), policy)


def refuse_another(
    path: Path, stored: Baseline, level: str, method: str, found: Mapping[Place, ConditionNumber]
) -> None:
    """Raise an error if the baseline is not one of these Hessians."""
    __tracebackhide__ = True
    again = "write it anew with pytest --hesscond-update-baselines if that is meant"
    for what, was, now in (("level", stored.level, level), ("method", stored.method, method)):
        if was != now:
            raise BaselineError(f"the baseline {path} is of {what} {was!r}, and this is {now!r}: {again}")
    missing = [where(place) for place in found if place not in stored.kappas]
    if missing:
        more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
        raise BaselineError(f"the baseline {path} has no {'; '.join(missing[:3])}{more}: {again}")
    for place, kappa in found.items():
        order, was_order = kappa.rank + kappa.nullity, stored.kappas[place].rank + stored.kappas[place].nullity
        if order != was_order:
            raise BaselineError(
                f"the baseline {path} has {was_order} parameters at {where(place)}, and now it has {order}: {again}"
            )


def compared(place: Place, kappa: ConditionNumber, was: Stored, rel: float) -> Finding:
    """Finding that compares one κ with that of the baseline."""
    now, before = interval(kappa), Interval.between(was.lower, was.upper)
    limit = before * (Interval.point(1.0) + Interval.point(rel))
    change = now / before
    times = shown(float(change.lower), float(change.upper))
    cells = {
        **cells_of(place),
        "κ now": told(kappa),
        "κ₀": "zero Hessian" if was.rank == 0 else shown(was.lower, was.upper),
        "κ/κ₀": times,
        "width": width(change),
        "rank": changed(was.rank, kappa.rank),
        "negative": changed(was.negative, kappa.counted_negative) if was.negative or kappa.negative else "",
        "cutoff": f"{kappa.cutoff:.2g}",
        "gap": f"{kappa.gap:.2g}",
        "solver": changed(was.solver, kappa.solver),
    }
    holds = decided([less_equal(now, limit)], min(kappa.rank, was.rank))
    margin = float(limit.lower) / kappa.upper
    return Finding(holds, margin, cells, where(place), f"κ = {told(kappa)}, {times} times κ₀")


def changed(was: object, now: object) -> str:
    """Old and new value of a cell, or one value if they are equal."""
    return str(now) if was == now else f"{was} → {now}"


def write_baseline(path: Path, level: str, method: str, kappas: Mapping[Place, ConditionNumber]) -> None:
    """Write a baseline atomically: a reader sees the old file or the new one."""
    blocks = [
        {
            "layer": layer,
            "unit": unit,
            # JSON has no infinite numbers
            "kappa": kappa.value if math.isfinite(kappa.value) else None,
            "lower": kappa.lower,
            "upper": kappa.upper if math.isfinite(kappa.upper) else None,
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
        # files of mkstemp can be read by the owner only
        Path(partial).chmod(0o644)
        Path(partial).replace(path)
    except OSError as error:
        Path(partial).unlink(missing_ok=True) if partial else None
        raise ConfigError(f"the baseline {path} cannot be written: {error.strerror}") from None


def read_baseline(path: Path) -> Baseline:
    """Read a baseline."""
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
        kappas = dict(stored(block) for block in contents["blocks"])
        versions = {str(name): str(number) for name, number in contents["versions"].items()}
        return Baseline(str(contents["level"]), str(contents["method"]), versions, kappas)
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        missing = f"it has no {error}" if isinstance(error, KeyError) else str(error)
        raise ConfigError(f"the baseline {path} is damaged: {missing}") from None


def stored(block: Mapping[str, Any]) -> tuple[Place, Stored]:
    """Place of a block, and its κ."""
    place = str(block["layer"]), None if block["unit"] is None else int(block["unit"])
    found = Stored(
        value=math.inf if block["kappa"] is None else float(block["kappa"]),
        lower=float(block["lower"]),
        upper=math.inf if block["upper"] is None else float(block["upper"]),
        rank=int(block["rank"]),
        nullity=int(block["nullity"]),
        negative=None if block["negative"] is None else int(block["negative"]),
        solver=str(block["solver"]),
    )
    if not 1 <= found.lower <= found.upper:
        raise ValueError(f"the bounds of {where(place)} are not in order")
    return place, found
