"""Curves of runs: every number of a log under a name, written once or as they are logged."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from hesscond.runs import FROM_THE_START, PLACE, TABLES, open_run, place_name

if TYPE_CHECKING:
    from hesscond.runs import StoredRun

#: Columns that are the same at every iteration.
CONSTANT = ("samples", "n_params", "known")
#: Seconds between two looks at the logs of runs that are still written.
INTERVAL = 1.0


@dataclass(frozen=True)
class Scalar:
    """One point of a curve: a name, the number of optimizer steps taken, seconds since 1970, the value as logged.

    Names are ``loss/train``, ``accuracy/test``, ``kappa/batch/fc3.3`` (quantity, data, layer.unit; a whole block has no
    unit), in further coordinates ``kappa in COORDINATES/batch/fc3.3``, for a statement ``used by STATEMENT
    CLAIM/batch/fc3.3``. An unresolved κ is infinite.
    """

    name: str
    iteration: int
    time: float
    value: float


class CurveWriter(Protocol):
    """Writer of the curves of one run."""

    def write(self, points: Sequence[Scalar]) -> None:
        """Write more points."""

    def close(self, run: StoredRun) -> None:
        """Finish, with the run as it now stands."""


class ScalarReader:
    """Reader of the points that the log of a run, which may still be written, has gained since the last call."""

    def __init__(self, run: StoredRun) -> None:
        self.run = run
        self.cursors = dict.fromkeys(TABLES, FROM_THE_START)

    def new(self) -> list[Scalar]:
        """The points logged since the last call, in the order of their iterations."""
        # the clock first: whatever is read after it was logged at its last entry or later
        clock = self.run.rows("clock")[1]
        points: list[Scalar] = []
        for table in TABLES:
            numbers, columns = self.run.rows(table, after=self.cursors[table])
            if numbers:
                self.cursors[table] = numbers[-1]
                points.extend(scalars(table, columns, times_of(clock, columns["iteration"])))
        points.sort(key=lambda point: point.iteration)
        return points


def times_of(clock: Mapping[str, list[Any]], iterations: Sequence[int]) -> np.ndarray:
    """Seconds since 1970 at which iterations were logged, interpolated between the entries of the log's clock."""
    entries = sorted((n, t) for n, t in zip(clock["iterations"], clock["time"], strict=True) if n is not None and t)
    known, times = np.array(entries or [(0, time.time())], dtype=float).T
    return np.interp(np.asarray(iterations, dtype=float), known, times)


def scalars(table: str, columns: Mapping[str, list[Any]], times: np.ndarray) -> Iterator[Scalar]:
    """Points in rows of a table; a missing number gives none."""
    quantities = [c for c, kind in TABLES[table].items() if kind != "TEXT" and c not in (*PLACE, *CONSTANT)]
    for k, iteration in enumerate(columns["iteration"]):
        row = {column: values[k] for column, values in columns.items()}
        for quantity in quantities:
            if row[quantity] is not None:
                yield Scalar(NAMES[table](quantity, row), iteration, float(times[k]), float(row[quantity]))


def measured(quantity: str, row: Mapping[str, Any]) -> str:
    """Name of a quantity measured at a unit or a whole block."""
    return f"{quantity}/{row['data']}/{place_name(row['layer'], row['unit'])}"


#: Names of the curves of each table.
NAMES: dict[str, Callable[[str, Mapping[str, Any]], str]] = {
    "training": lambda quantity, row: f"{quantity}/train",
    "evaluation": lambda quantity, row: f"{quantity.removeprefix('test_')}/test",
    "probe": measured,
    "readings": lambda quantity, row: measured(f"{quantity} in {row['coordinates']}", row),
    "statements": lambda quantity, row: measured(f"{quantity} by {row['statement']} {row['claim']}", row),
}


def transfer(
    runs: Sequence[StoredRun],
    writer_of: Callable[[StoredRun], CurveWriter],
    *,
    follow: bool = False,
    wait: Callable[[float], None] = time.sleep,
) -> int:
    """Write the curves of runs, each to the writer that ``writer_of`` makes; return the number of points.

    With ``follow`` it goes on until no run is being written any more, and calls ``wait`` with the seconds between two
    looks.
    """
    points = 0
    open_ones = [(ScalarReader(run), writer_of(run)) for run in runs]
    while open_ones:
        remaining = []
        for reader, writer in open_ones:
            # the run's status before its rows: a run that is over has no more rows after these
            now = open_run(reader.run.folder)
            new = reader.new()
            points += len(new)
            writer.write(new)
            if follow and now.status == "running":
                remaining.append((reader, writer))
            else:
                writer.close(now)
        open_ones = remaining
        if open_ones:
            wait(INTERVAL)
    return points
