"""Curves of runs: every number of a log under a name, transferred to a sink once or as they are logged."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from hesscond.runs import FROM_THE_START, TABLES, open_run, place_name

if TYPE_CHECKING:
    from hesscond.runs import StoredRun

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
        ``loss/train``, ``loss/test``, ``accuracy/test``, ``kappa/batch/fc3.3`` (quantity, data, layer.unit; a whole
        block has no unit), in further coordinates ``kappa in COORDINATES/batch/fc3.3``, for a statement
        ``used by STATEMENT CLAIM/batch/fc3.3``.
    iteration
        Number of optimizer steps taken.
    time
        Seconds since 1970.
    value
        Value as logged; infinite where κ is unresolved.
    """

    name: str
    iteration: int
    time: float
    value: float


class ScalarReader:
    """Reader of the points that a run's log has gained since the last call.

    Parameters
    ----------
    run
        The run, which may still be written.
    cursors
        Positions from which to go on: the cursors of an earlier reader of the same run.
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
    """Times at which iterations were logged, interpolated linearly between the entries of the log's clock."""

    iterations: np.ndarray
    times: np.ndarray

    @classmethod
    def of(cls, run: StoredRun) -> Clock:
        """The clock of a run; it shows the present time if the log has no entry yet."""
        _, clock = run.rows("clock")
        entries = [(n, t) for n, t in zip(clock["iterations"], clock["time"], strict=True) if n is not None and t]
        if not entries:
            entries = [(0, time.time())]
        iterations, times = np.array(sorted(entries), dtype=float).T
        return cls(iterations, times)

    def __call__(self, iterations: Sequence[int]) -> np.ndarray:
        """Seconds since 1970 at which the given numbers of steps had been taken."""
        return np.interp(np.asarray(iterations, dtype=float), self.iterations, self.times)


def scalars(table: str, columns: Mapping[str, list[Any]], clock: Clock) -> Iterator[Scalar]:
    """Points in rows of a table; a missing number gives none."""
    moments = clock(columns["iteration"])
    quantities = [c for c, kind in TABLES[table].items() if kind != "TEXT" and c not in PLACE + CONSTANT]
    for k, iteration in enumerate(columns["iteration"]):
        for quantity in quantities:
            value = columns[quantity][k]
            if value is not None:
                row = {column: values[k] for column, values in columns.items()}
                yield Scalar(NAMES[table](quantity, row), iteration, float(moments[k]), float(value))


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


#: Seconds between two looks at the logs of runs that are still written.
INTERVAL = 1.0


class Sink(Protocol):
    """Receiver of the points of one run."""

    def cursors(self) -> Mapping[str, int]:
        """Positions up to which the run has been taken before."""

    def write(self, points: Sequence[Scalar], cursors: Mapping[str, int]) -> None:
        """Take more points; with them the run has been taken up to ``cursors``."""

    def close(self, run: StoredRun) -> None:
        """Finish, with the run as it now stands."""


def transfer(
    runs: Sequence[StoredRun],
    sink_of: Callable[[StoredRun], Sink],
    *,
    follow: bool = False,
    wait: Callable[[float], None] = time.sleep,
) -> int:
    """Transfer the curves of runs, each to its sink.

    Parameters
    ----------
    runs
        Runs in any state.
    sink_of
        Makes the sink of a run.
    follow
        Whether to go on until no run is being written any more.
    wait
        Called between two looks, with the seconds to wait.

    Returns
    -------
    int
        Number of points taken.

    Raises
    ------
    RunError
        A log is damaged.
    """
    points = 0
    pairs = [(run, sink_of(run)) for run in runs]
    readers = {id(sink): ScalarReader(run, sink.cursors()) for run, sink in pairs}
    while pairs:
        remaining = []
        for run, sink in pairs:
            # the run's status before its rows: a run that is over has no more rows after these
            now = open_run(run.folder)
            reader = readers[id(sink)]
            new = reader.new()
            points += len(new)
            sink.write(new, reader.cursors)
            if follow and now.status == "running":
                remaining.append((run, sink))
            else:
                sink.close(now)
        pairs = remaining
        if pairs:
            wait(INTERVAL)
    return points


def flat(config: Mapping[str, Any]) -> dict[str, str | int | float | bool]:
    """Dotted names with values that are numbers or texts; other values as JSON.

    Examples
    --------
    >>> flat({"name": "mine", "model": {"hidden": [8, 8]}})
    {'name': 'mine', 'model.hidden': '[8, 8]'}
    """
    found: dict[str, str | int | float | bool] = {}
    for key, value in config.items():
        if isinstance(value, Mapping):
            found |= {f"{key}.{name}": own for name, own in flat(value).items()}
        elif isinstance(value, (str, int, float)):
            found[key] = value
        else:
            found[key] = json.dumps(value, ensure_ascii=False, default=str)
    return found
