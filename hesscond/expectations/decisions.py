"""Decisions on expectations of stored runs: met, failed or left open by the bounds, with the row that decides."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from numbers import Integral
from typing import Any, Literal

import numpy as np

from hesscond.errors import ConfigError, did_you_mean
from hesscond.expectations.evaluation import Evaluation, Log, RowValues, keys
from hesscond.expectations.intervals import Interval, Truth, shown
from hesscond.expectations.parser import Node, methods_of, parse_expectation
from hesscond.runs import OVER, StoredRun

Status = Literal["met", "failed", "unresolved"]


@dataclass(frozen=True)
class Expectation:
    """An expression that runs are expected to fulfil.

    Attributes
    ----------
    text
        The expression as it was written.
    node
        Tree of the expression.
    """

    text: str
    node: Node

    @classmethod
    def of(cls, text: str) -> Expectation:
        """Read an expression; a ConfigError if it cannot be read."""
        text = text.strip()
        return cls(text, parse_expectation(text))

    @property
    def methods(self) -> tuple[str, ...]:
        """Methods that it compares; empty if it is about one run at a time."""
        return methods_of(self.node)

    def check_methods(self, known: Sequence[str]) -> None:
        """Refuse a method that is not in ``known``, those of the runs."""
        for method in self.methods:
            if method not in known:
                names = list(dict.fromkeys(known))
                hint = did_you_mean(method, names, otherwise=f"they are of {', '.join(names)}")
                raise ConfigError(f'expectation "{self.text}": none of the runs is of method {method!r}: {hint}')


@dataclass(frozen=True)
class Decision:
    """Result of one expectation for one run, or for the runs of one seed.

    Attributes
    ----------
    expectation
        Text of the expectation.
    runs
        The runs' folders or METHOD-seedS, shown together.
    status
        met and failed only where bounds decide; unresolved where they do not, or the run is not finished.
    reason
        One sentence.
    rows, met, failed, unresolved
        Number of rows examined, and numbers of them by result. An expectation without rows (of medians, say) counts as
        one.
    unmatched
        Number of rows left out because the other side has no such row.
    worst
        The row that decides: iteration, data, layer, unit, as far as there are.
    values
        Bounds of the values that were compared there, by name.
    """

    expectation: str
    runs: str
    status: Status
    reason: str
    rows: int = 0
    met: int = 0
    failed: int = 0
    unresolved: int = 0
    unmatched: int = 0
    worst: dict[str, Any] = field(default_factory=dict)
    values: dict[str, tuple[float, float]] = field(default_factory=dict)


def decisions(expectations: Sequence[Expectation], runs: Sequence[StoredRun]) -> list[Decision]:
    """Decide every expectation for every run; one that names methods is decided for every seed.

    Parameters
    ----------
    expectations
        A comparison of columns that is not inside ``any``, ``share`` or a function of all rows must hold in all rows.
    runs
        Runs of any methods and seeds. A run that diverged fails; one that is not finished is unresolved.

    Raises
    ------
    ConfigError
        A method, a seed or rows are missing.
    RunError
        A log is damaged.
    """
    logs = [Log(run) for run in runs]
    found = []
    for expectation in expectations:
        expectation.check_methods([run.method for run in runs])
        found += [decision(expectation, label, group) for label, group in groups(expectation, logs)]
    return found


def groups(expectation: Expectation, logs: Sequence[Log]) -> Iterator[tuple[str, dict[str | None, Log]]]:
    """Groups of runs on which an expectation is decided, each with a label."""
    methods = expectation.methods
    if not methods:
        labels = [log.run.label for log in logs]
        for log, label in zip(logs, labels, strict=True):
            yield (label if labels.count(label) == 1 else str(log.run.folder)), {None: log}
        return
    by_seed: dict[int, dict[str | None, Log]] = {}
    for log in logs:
        if log.run.method in methods:
            group = by_seed.setdefault(log.run.seed, {})
            if log.run.method in group:
                other = group[log.run.method].run.folder
                raise ConfigError(f"{other} and {log.run.folder} are both {log.run.label}: give one run of each seed")
            group[log.run.method] = log
    for seed, group in sorted(by_seed.items()):
        for method in methods:
            if method not in group:
                raise ConfigError(
                    f'expectation "{expectation.text}": there is no run of {method!r} with seed {seed}, as there is '
                    f"of {', '.join(str(other) for other in group)}"
                )
        yield f"{', '.join(methods)} seed {seed}", group


def decision(expectation: Expectation, label: str, group: dict[str | None, Log]) -> Decision:
    """Decision on an expectation for one group of runs."""
    for log in group.values():
        if log.run.status == "diverged":
            why = log.run.facts.get("message") or "its loss became NaN or infinite"
            return Decision(expectation.text, label, "failed", f"{log.run.label} diverged: {why}")
    for log in group.values():
        if log.run.status not in OVER:
            why = f"{log.run.label} is not finished ({log.run.status})"
            return Decision(expectation.text, label, "unresolved", why)
    parts = [of_part(expectation.text, part, label, group) for part in conjuncts(expectation.node)]
    return min(parts, key=lambda part: ("failed", "unresolved", "met").index(part.status))


def conjuncts(node: Node) -> Iterator[Node]:
    """Parts of an expectation that must all hold, in all rows."""
    if node.kind in ("and", "all"):
        for part in node.parts:
            yield from conjuncts(part)
    else:
        yield node


def of_part(text: str, node: Node, label: str, group: dict[str | None, Log]) -> Decision:
    """Decision on one part of an expectation."""
    evaluation = Evaluation(text, group)
    truth = evaluation.truth(node)
    certain, possible = np.atleast_1d(truth.values.certain), np.atleast_1d(truth.values.possible)
    met, failed = int(certain.sum()), int((~possible).sum())
    rows = len(certain)
    status: Status = "failed" if failed else "met" if met == rows else "unresolved"
    # false before open before true, and where the margin is least among these
    worst = np.lexsort((np.atleast_1d(truth.values.margin), certain.astype(int) + possible))[0]
    place = {} if truth.rows is None else {name: plain(truth.rows[name].iloc[worst]) for name in truth.rows}
    values = {name: value for name, one in evaluation.named.items() if (value := at_place(one, place)) is not None}
    unmatched = max([truth.unmatched, *(one.unmatched for one in evaluation.named.values())])
    counts = (rows, met, failed, rows - met - failed, unmatched)
    return Decision(text, label, status, sentence(status, counts, place, values), *counts, place, values)


def at_place(found: RowValues, place: dict[str, Any]) -> tuple[float, float] | None:
    """A value in a row, as an interval: true is 1, false 0."""
    where = 0
    if found.rows is not None:
        names = [name for name in found.rows if name in place]
        row = {name: [place[name]] for name in names}
        where = int(keys(found.rows, names).get_indexer_for(keys(type(found.rows)(row), names))[0])
        if where < 0:
            return None
    values = found.values
    assert isinstance(values, (Interval, Truth))
    low, high = (values.lower, values.upper) if isinstance(values, Interval) else (values.certain, values.possible)
    return float(np.atleast_1d(low)[where]), float(np.atleast_1d(high)[where])


def plain(cell: Any) -> Any:
    """A cell of a table as a Python value; None where it is missing."""
    import pandas as pd

    return None if pd.isna(cell) else cell.item() if hasattr(cell, "item") else cell


def sentence(
    status: Status, counts: tuple[int, ...], place: dict[str, Any], values: dict[str, tuple[float, float]]
) -> str:
    """Sentence on what was found, and in which row."""
    rows, met, failed, unresolved, unmatched = counts
    there = ", ".join(f"{name} = {shown(*value)}" for name, value in values.items())
    if rows == 1:
        counted = {"met": "holds", "failed": "does not hold", "unresolved": "the bounds do not decide"}[status]
    else:
        more = f" ({unresolved} more are undecided)" if unresolved else ""
        counted = {
            "met": f"holds in all {rows} rows, most narrowly",
            "failed": f"fails in {failed} of {rows} rows{more}, worst",
            "unresolved": f"undecided in {unresolved} of {rows} rows (holds in {met}), as",
        }[status]
    notes = f"; {unmatched} of the rows without a partner left out" if unmatched else ""
    at = f" at {described(place)}" if place else ""
    return f"{counted}{at}: {there}{notes}"


def described(place: dict[str, Any]) -> str:
    """A row in words.

    Examples
    --------
    >>> described({"iteration": 40, "data": "batch", "layer": "fc3", "unit": 3})
    'iteration 40, batch, layer fc3, unit 3'
    """
    # a whole block has no unit
    there = {name: cell for name, cell in place.items() if name != "unit" or isinstance(cell, Integral)}
    return ", ".join(f"{cell}" if name == "data" else f"{name} {cell}" for name, cell in there.items())
