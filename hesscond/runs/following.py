"""A run while it is written, known from its log alone: its iteration, its speed, and its curves so far."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path

from hesscond.runs.store import FROM_THE_START, StoredRun, open_run

#: Seconds back over which the speed is taken.
RECENT = 60.0


@dataclass
class UnitCurves:
    """κ of a probed unit along the run, plain and in the method's own coordinates; infinite: unresolved.

    The values are those of mini-batches if any was probed, else those of the training set.
    """

    kappa: list[float] = field(default_factory=list)
    kappa_own: list[float] = field(default_factory=list)


class WatchedRun:
    """State of a run while it is written; `update` reads what its log has gained.

    ``accuracy``, ``test_loss`` and ``bits`` (per character of a text) are the last on the test set, ``speed`` is in
    iterations per second over the last minute; NaN: the log does not say.
    """

    def __init__(self, folder: Path) -> None:
        self.run: StoredRun = open_run(folder)
        self.losses: list[float] = []
        self.accuracy = self.test_loss = self.bits = self.speed = math.nan
        self._curves: dict[str, dict[tuple[str, int], UnitCurves]] = {"batch": {}, "train": {}}
        self._cursors = dict.fromkeys(("training", "evaluation", "probe", "clock"), FROM_THE_START)
        self._clock: list[tuple[int, float, int]] = []
        self.update()

    def update(self) -> None:
        """Read what the log has gained since the last time."""
        # its status before its rows: a run that is over has no more after these
        self.run = open_run(self.run.folder)
        self.losses.extend(number(loss) for loss in self._new("training")["loss"])
        evaluation = self._new("evaluation")
        if evaluation["iteration"]:
            self.accuracy, self.test_loss, self.bits = (
                number(evaluation[name][-1]) for name in ("test_accuracy", "test_loss", "test_bits_per_character")
            )
        self._probed(self._new("probe"))
        clock = self._new("clock")
        self._clock.extend(zip(clock["session"], clock["time"], clock["iterations"], strict=True))
        if self._clock:
            session, latest, _ = self._clock[-1]
            self._clock = [entry for entry in self._clock if entry[0] == session and latest - entry[1] <= RECENT]
            (_, begin, first), (_, end, last) = self._clock[0], self._clock[-1]
            self.speed = (last - first) / (end - begin) if end > begin else math.nan

    def _new(self, table: str) -> dict[str, list]:
        numbers, columns = self.run.rows(table, after=self._cursors[table])
        if numbers:
            self._cursors[table] = numbers[-1]
        return columns

    def _probed(self, rows: dict[str, list]) -> None:
        for k, data in enumerate(rows["data"]):
            curves = self._curves.setdefault(data, {}).setdefault((rows["layer"][k], rows["unit"][k]), UnitCurves())
            curves.kappa.append(number(rows["kappa"][k]))
            curves.kappa_own.append(number(rows["kappa_own"][k]))

    @property
    def iterations(self) -> int:
        """Number of iterations in the log."""
        return len(self.losses)

    @property
    def units(self) -> dict[tuple[str, int], UnitCurves]:
        """κ by layer and unit."""
        return self._curves["batch"] or self._curves["train"]

    @property
    def over(self) -> bool:
        """Whether the run is no longer being written."""
        return self.run.status != "running"

    @property
    def remaining(self) -> float:
        """Seconds until the end, at the present speed; NaN if it cannot be estimated."""
        total = self.run.total
        if self.over or total is None or not self.speed > 0:
            return math.nan
        return max(0, total - self.iterations) / self.speed


def number(value: float | None) -> float:
    """A number of the log, NaN where it is missing."""
    return math.nan if value is None else float(value)
