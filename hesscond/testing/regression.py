"""The assertion that condition numbers have not become worse than a stored baseline."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Any

from torch import nn

import _hesscond_pytest
from hesscond.capture import Batch, LossFunction
from hesscond.errors import ConfigError
from hesscond.expectations.intervals import Interval, less_equal, shown
from hesscond.spectra import ConditionNumber
from hesscond.testing.baselines import Baseline, Stored, read_baseline, write_baseline
from hesscond.testing.conditions import decided, width_of
from hesscond.testing.decisions import (
    Assertion,
    BaselineError,
    Finding,
    checked_share,
    conclude,
    policy_of,
    record,
)
from hesscond.testing.measured import Measure, Place, cells_of, measured, name_of, said_of, told, where


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
    """Assert κ ≤ (1 + rel) κ₀ of every Hessian named, κ₀ being what the baseline has.

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
        How much larger κ may be, relatively. It must cover what differs between machines.
    layer, unit, share, unresolved, **options
        As for `assert_condition_number`.
    create
        Write the baseline if there is none.

    Returns
    -------
    Assertion
        With what was found of every Hessian; of outcome ``"written"`` if the baseline was written.

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
    checked_share(share)
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
        summary = f"{path.name} written, {len(found)} {said_of(level, name)}"
        record("written", claim, summary)
        return Assertion(claim, (), share, said_of(level, name), "written")
    stored = read_baseline(path)
    refuse_another(path, stored, level, name, found)
    findings = tuple(compared(place, kappa, stored.kappas[place], rel) for place, kappa in found.items())
    return conclude(Assertion(f"{claim} of {path.name}", findings, share, said_of(level, name)), policy)


def refuse_another(
    path: Path, stored: Baseline, level: str, method: str, found: Mapping[Place, ConditionNumber]
) -> None:
    """Fail if the baseline is not one of these Hessians.

    Raises
    ------
    BaselineError
        It is not.
    """
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
    """One κ beside the one of the baseline."""
    now, before = Interval.between(kappa.lower, kappa.upper), Interval.between(was.lower, was.upper)
    limit = before * (Interval.point(1.0) + Interval.point(rel))
    change = now / before
    times = shown(float(change.lower), float(change.upper))
    cells = {
        **cells_of(place),
        "κ now": told(kappa),
        "κ₀": "zero Hessian" if was.rank == 0 else shown(was.lower, was.upper),
        "κ/κ₀": times,
        "width": width_of(change),
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
    """What it was and is, or is."""
    return str(now) if was == now else f"{was} → {now}"
