"""The curves of a run: every number of its log under a name, with its iteration and the time it was logged."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from hesscond.study import StoredRun
from hesscond.study.store import FROM_THE_START, TABLES

#: The columns that say where a row was measured.
PLACE = ("iteration", "epoch", "data", "layer", "unit")
#: Columns that are the same at every iteration.
CONSTANT = ("samples", "n_params", "known")


@dataclass(frozen=True)
class Scalar:
    """One point of a curve.

    Attributes
    ----------
    name
        ``loss/train``, ``loss/test``, ``accuracy/test``, ``kappa/batch/fc3.3`` (quantity, data, layer.unit), in further
        coordinates ``kappa in COORDINATES/batch/fc3.3``, of a statement ``used by STATEMENT CLAIM/batch/fc3.3``.
    iteration
        Optimizer steps taken.
    time
        Seconds since 1970.
    value
        As logged; infinite where κ is unresolved.
    """

    name: str
    iteration: int
    time: float
    value: float


class ScalarReader:
    """What is new in a run's log each time it is looked at.

    Parameters
    ----------
    run
        May still be written.
    cursors
        Where to go on: of an earlier reader of the same run.
    """

    def __init__(self, run: StoredRun, cursors: Mapping[str, int] | None = None) -> None:
        self.run = run
        self.cursors = dict.fromkeys(TABLES, FROM_THE_START) | dict(cursors or {})

    def new(self) -> list[Scalar]:
        """The points logged since the last call, in the order of their iterations.

        Raises
        ------
        RunError
            The log is damaged.
        """
        # the clock first: whatever is read after it was logged at its last entry or later
        clock = Clock.of(self.run)
        points: list[Scalar] = []
        for table in TABLES:
            numbers, columns = self.run.rows(table, after=self.cursors[table])
            if numbers:
                self.cursors[table] = numbers[-1]
                points.extend(scalars(table, columns, clock))
        points.sort(key=lambda point: point.iteration)
        return points


@dataclass(frozen=True)
class Clock:
    """When an iteration was logged, between the entries of the log's clock by linear interpolation."""

    iterations: np.ndarray
    times: np.ndarray

    @classmethod
    def of(cls, run: StoredRun) -> Clock:
        """The clock of a run; of one whose log has no entry yet, the present."""
        _, clock = run.rows("clock")
        entries = [(n, t) for n, t in zip(clock["iterations"], clock["time"], strict=True) if n is not None and t]
        if not entries:
            entries = [(0, time.time())]
        iterations, times = np.array(sorted(entries), dtype=float).T
        return cls(iterations, times)

    def __call__(self, iterations: Sequence[int]) -> np.ndarray:
        """Seconds since 1970 at which so many steps had been taken."""
        return np.interp(np.asarray(iterations, dtype=float), self.iterations, self.times)


def scalars(table: str, columns: Mapping[str, list[Any]], clock: Clock) -> Iterator[Scalar]:
    """The points in rows of a table; a missing number is none."""
    moments = clock(columns["iteration"])
    quantities = [c for c, kind in TABLES[table].items() if kind != "TEXT" and c not in PLACE + CONSTANT]
    for k, iteration in enumerate(columns["iteration"]):
        for quantity in quantities:
            value = columns[quantity][k]
            if value is not None:
                row = {column: values[k] for column, values in columns.items()}
                yield Scalar(NAMES[table](quantity, row), iteration, float(moments[k]), float(value))


def measured(quantity: str, row: Mapping[str, Any]) -> str:
    """The name of a quantity measured at a unit."""
    return f"{quantity}/{row['data']}/{row['layer']}.{row['unit']}"


#: How the curves of each table are called.
NAMES: dict[str, Callable[[str, Mapping[str, Any]], str]] = {
    "training": lambda quantity, row: f"{quantity}/train",
    "evaluation": lambda quantity, row: f"{quantity.removeprefix('test_')}/test",
    "probe": measured,
    "readings": lambda quantity, row: measured(f"{quantity} in {row['coordinates']}", row),
    "statements": lambda quantity, row: measured(f"{quantity} by {row['statement']} {row['claim']}", row),
}
