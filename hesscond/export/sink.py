"""Where curves can go, and how they get there: once, or for as long as the runs are written."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from hesscond.export.scalars import Scalar, ScalarReader
from hesscond.study import StoredRun, open_run

#: Seconds between two looks at the logs of runs that are still written.
INTERVAL = 1.0


class Sink(Protocol):
    """Takes the points of one run."""

    def cursors(self) -> Mapping[str, int]:
        """Up to where the run has been taken before."""

    def write(self, points: Sequence[Scalar], cursors: Mapping[str, int]) -> None:
        """Take more points; with them the run is taken up to ``cursors``."""

    def close(self, run: StoredRun) -> None:
        """The end, with the run as it now stands."""


def transfer(
    runs: Sequence[StoredRun],
    sink_of: Callable[[StoredRun], Sink],
    *,
    follow: bool = False,
    wait: Callable[[float], None] = time.sleep,
) -> int:
    """Bring the curves of runs to a sink each.

    Parameters
    ----------
    runs
        In any state.
    sink_of
        Makes the sink of a run.
    follow
        Whether to go on until no run is being written any more.
    wait
        Called between two looks, with the seconds to wait.

    Returns
    -------
    int
        How many points were taken.

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
            # how the run stands before its rows: one that is over has no more after these
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
