"""Views of runs in training: blocks with sparklines, a row for each where there are many, lines in a pipe."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from hesscond.commands.runs import clock_time
from hesscond.errors import RunError
from hesscond.runs import LOG, UnitCurves, WatchedRun, open_run, place_name, printable

if TYPE_CHECKING:
    from hesscond.study.sweep import Outcome

BARS = "▁▂▃▄▅▆▇█"
#: Characters of a sparkline where κ is unresolved, and where nothing was measured.
UNRESOLVED, NOTHING = "?", "·"
#: Fewest and most columns of a sparkline, and the columns of the text next to two of them.
NARROWEST, WIDEST, BESIDE = 6, 40, 38

COLOURS = {
    "running": "cyan",
    "finished": "green",
    "diverged": "red",
    "failed": "red",
    "killed": "red",
    "interrupted": "yellow",
    "silent": "yellow",
}


def sparkline(values: Sequence[float], width: int, *, logarithmic: bool = False) -> str:
    """A curve in one line: the median of each of ``width`` stretches, between the smallest and the largest of them.

    Parameters
    ----------
    values
        NaN: not measured; infinite: unresolved.
    width
        Largest number of columns.
    logarithmic
        Whether the scale is logarithmic; values that are not positive are then left out.

    Examples
    --------
    >>> sparkline([1, 2, 3, 4], 9), sparkline([1, 10, float("inf"), 1000], 9, logarithmic=True)
    ('▁▃▆█', '▁▃?█')
    """
    stretches = min(width, len(values))
    heights: list[float] = []
    for k in range(stretches):
        part = values[k * len(values) // stretches : (k + 1) * len(values) // stretches]
        usable = sorted(v for v in part if math.isfinite(v) and (v > 0 or not logarithmic))
        there = [math.log(v) for v in usable] if logarithmic else usable
        heights.append(there[len(there) // 2] if there else math.inf if math.inf in part else math.nan)
    finite = [height for height in heights if math.isfinite(height)]
    low, high = (min(finite), max(finite)) if finite else (0.0, 0.0)
    scale = (len(BARS) - 1) / (high - low) if high > low else 0.0
    return "".join(
        BARS[round((height - low) * scale)] if math.isfinite(height) else UNRESOLVED if height == math.inf else NOTHING
        for height in heights
    )


def blocks(runs: Sequence[WatchedRun], width: int) -> RenderableType:
    """Each run with its curves, ``width`` columns wide."""
    names = [len(place_name(layer, unit)) for run in runs for layer, unit in run.units]
    spark = min(WIDEST, max(NARROWEST, (width - BESIDE - max(names, default=0)) // 2))
    return Group(
        *(part for run in runs for part in (headline(run), Padding(curves(run, spark), (0, 0, 1, 2), expand=False)))
    )


def headline(watched: WatchedRun) -> Text:
    """Headline of a run: its name, status, progress and speed."""
    status = watched.run.status
    text = Text(printable(watched.run.label), style="bold")
    text.append(f"  {status}", style=COLOURS.get(status, ""))
    text.append(f"  {progress(watched)}", style="not bold")
    text.append(f"  {tempo(watched)}", style="not bold dim")
    return text


def curves(watched: WatchedRun, spark: int) -> Table:
    """Table of the loss and of the κ's of each unit, with sparklines of ``spark`` columns."""
    table = Table.grid(padding=(0, 1))
    for justify in ("left", "left", "right", "left", "left", "right", "left"):
        table.add_column(justify=justify, no_wrap=True)
    if not math.isnan(watched.bits):
        tested = "bits/char.", last([watched.bits], "#.4g")
    elif not math.isnan(watched.accuracy):
        tested = "acc.", percent(watched.accuracy)
    else:
        tested = "test", last([watched.test_loss], "#.4g")
    table.add_row("", "loss", last(watched.losses, "#.4g"), sparkline(watched.losses, spark), *tested, "")
    for (layer, unit), unit_curves in watched.units.items():
        table.add_row(
            printable(place_name(layer, unit)),
            "κ(H)",
            *kappa(unit_curves.kappa, spark),
            "κ own",
            *kappa(unit_curves.kappa_own, spark),
        )
    return table


def kappa(values: Sequence[float], spark: int) -> tuple[str, str]:
    """Last κ as text, and the sparkline of all."""
    return last(values, ".2e"), sparkline(values, spark, logarithmic=True)


#: The cells of a run's row, by their headlines; κ's are those of its first unit.
CELLS: dict[str, Callable[[WatchedRun], str | Text]] = {
    "run": lambda w: printable(w.run.label),
    "folder": lambda w: printable(w.run.folder.name),
    "status": lambda w: Text(w.run.status, style=COLOURS.get(w.run.status, "")),
    "iteration": lambda w: counted(w),
    "loss": lambda w: last(w.losses, ".3g"),
    "acc.": lambda w: percent(w.accuracy),
    "κ(H)": lambda w: last(first_unit(w).kappa, ".1e"),
    "κ own": lambda w: last(first_unit(w).kappa_own, ".1e"),
    "it/s": lambda w: "–" if math.isnan(w.speed) else f"{w.speed:.3g}",
    "left": lambda w: duration(w.remaining),
}
FOLLOWED = ("run", "status", "iteration", "loss", "acc.", "κ(H)", "κ own", "left")
#: Runs of a sweep differ in more than method and seed, which the name of the folder says.
SWEPT = ("folder", "iteration", "loss", "κ(H)", "κ own", "it/s", "left")


def rows(runs: Sequence[WatchedRun], columns: Sequence[str] = FOLLOWED) -> Table:
    """A row for each run; where there is no room a name ends in an ellipsis."""
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style="bold", expand=True)
    for name in columns:
        justify, ratio = ("left", 1) if name in ("run", "folder") else ("right", None)
        table.add_column(name, justify=justify, no_wrap=True, ratio=ratio)  # type: ignore[arg-type]
    for watched in runs:
        table.add_row(*(CELLS[name](watched) for name in columns))
    return table


def first_unit(watched: WatchedRun) -> UnitCurves:
    """κ curves of the first probed unit of a run; empty if no unit was probed."""
    return next(iter(watched.units.values()), UnitCurves())


def line(watched: WatchedRun) -> str:
    """A run in one line of text."""
    parts = [
        printable(str(watched.run.folder)),
        watched.run.status,
        counted(watched),
        f"loss {last(watched.losses, '#.4g')}",
    ]
    if not math.isnan(watched.accuracy):
        parts.append(f"accuracy {percent(watched.accuracy)}")
    if not math.isnan(watched.bits):
        parts.append(f"{watched.bits:.4g} bits per character")
    for (layer, unit), unit_curves in watched.units.items():
        values = (last(c, ".2e") for c in (unit_curves.kappa, unit_curves.kappa_own))
        parts.append(printable(f"{layer}.{unit} ") + "κ(H) {} κ own {}".format(*values))
    return " · ".join([*parts, tempo(watched)] if tempo(watched) else parts)


def counted(watched: WatchedRun) -> str:
    """Iterations done, out of the total."""
    total = watched.run.total
    return f"{watched.iterations}/{'?' if total is None else total}"


def progress(watched: WatchedRun) -> str:
    """Iterations done, out of the total, and their share."""
    total = watched.run.total
    return counted(watched) if not total else f"{counted(watched)} ({100 * watched.iterations // total} %)"


def tempo(watched: WatchedRun) -> str:
    """Speed and time left of a run that goes on, or time taken by one that is over."""
    if watched.over:
        seconds = watched.run.seconds
        return "" if math.isnan(seconds) else f"took {clock_time(seconds)}"
    speed = "" if math.isnan(watched.speed) else f"{watched.speed:.3g} it/s"
    left = "" if math.isnan(watched.remaining) else f"{duration(watched.remaining)} left"
    return "  ".join(part for part in (speed, left) if part)


def duration(seconds: float) -> str:
    """Time as text; a dash for NaN."""
    return "–" if math.isnan(seconds) else clock_time(seconds)


def percent(share: float) -> str:
    """Share in percent as text; a dash for NaN."""
    return "–" if math.isnan(share) else f"{100 * share:.1f} %"


def last(values: Sequence[float], form: str) -> str:
    """Last of some values as text; a dash if there is none, ``unres.`` if it is infinite."""
    if not values or math.isnan(values[-1]):
        return "–"
    return "unres." if values[-1] == math.inf else format(values[-1], form)


#: Seconds between two drawings of a sweep in a terminal, and between two lines about the runs at work elsewhere.
REDRAW, REPEAT = 0.5, 60.0
#: Runs at work that are shown, each on a line.
SHOWN = 16


class SweepView:
    """View of a sweep at work: in a terminal the runs at work, elsewhere a line for each run that is over.

    Parameters
    ----------
    console
        Console to print on.
    folders
        Folders of the runs that are left to do.
    total
        Number of runs of the sweep, including those that were over before.
    live
        Live display in a terminal; None elsewhere.
    """

    def __init__(self, console: Console, folders: Sequence[Path], total: int, live: Live | None) -> None:
        self.console, self.total, self.live = console, total, live
        self.left = {folder.name: folder for folder in folders}
        self.watched: dict[str, WatchedRun] = {}
        self.bad = 0
        self.seconds: list[float] = []
        self.began_at = self.drawn = time.monotonic()

    @property
    def over(self) -> int:
        """Number of runs that are over."""
        return self.total - len(self.left)

    def ended(self, outcome: Outcome) -> None:
        """Report that a run is over."""
        folder = self.left.pop(outcome.name)
        self.watched.pop(outcome.name, None)
        self.bad += outcome.status != "finished"
        how = f"{outcome.status}: {outcome.message}" if outcome.message else outcome.status
        if outcome.status in ("finished", "diverged"):
            run = open_run(folder)
            self.seconds.append(run.seconds)
            if outcome.status == "finished":
                how += f", {run.iterations} iterations, loss {run.last_loss:.4g}, {run.seconds:.1f} s"
        # in a terminal, finished runs are only counted
        if self.live is None or outcome.status != "finished":
            self.line(f"[{self.over}/{self.total}] {outcome.name}: {how}")
        if self.live is not None:
            self.draw(self.live)

    def broke(self, name: str, reason: str) -> None:
        """Report that the worker of a run broke down and that the run is resumed."""
        self.line(f"{name}: its worker broke down ({reason}), it is gone on with")

    def tick(self) -> None:
        """Draw the runs at work, or print a line about them, if it is time."""
        if time.monotonic() - self.drawn > (REPEAT if self.live is None else REDRAW):
            self.drawn = time.monotonic()
            if self.live is not None:
                self.draw(self.live)
                return
            shown = ", ".join(f"{run.run.folder.name} {counted(run)}" for run in self.running()[:SHOWN])
            self.line(f"{self.over}/{self.total} over after {self.clock()}; at work: {shown}")

    def line(self, text: str) -> None:
        """Print a line, in a terminal above the rest."""
        self.console.print(printable(text), soft_wrap=True)

    def clock(self) -> str:
        """Time for which the sweep has worked, as text."""
        return clock_time(time.monotonic() - self.began_at)

    def running(self) -> list[WatchedRun]:
        """Runs at work, according to their logs."""
        for name, folder in self.left.items():
            # a log that is being made has no tables yet
            with suppress(RunError):
                if name in self.watched:
                    self.watched[name].update()
                elif (folder / LOG).exists():
                    self.watched[name] = WatchedRun(folder)
        return [watched for watched in self.watched.values() if not watched.over]

    def remaining(self, running: Sequence[WatchedRun]) -> float:
        """Estimated seconds until all runs are done; NaN before the first run is over."""
        if not self.seconds or not running:
            return math.nan
        begun = sum(0.0 if math.isnan(watched.remaining) else watched.remaining for watched in running)
        each = sum(self.seconds) / len(self.seconds)
        return (begun + each * (len(self.left) - len(running))) / len(running)

    def draw(self, live: Live) -> None:
        """Draw the runs at work in the terminal."""
        running = self.running()
        rest = self.remaining(running)
        head = f"{self.over} of {self.total} runs over" + (f", {self.bad} not finished" if self.bad else "")
        head += f" · {self.clock()}" + ("" if math.isnan(rest) else f" · about {clock_time(rest)} to go")
        more = f"… and {len(running) - SHOWN} more at work; " if len(running) > SHOWN else ""
        foot = Text(f"{more}{len(self.left) - len(running)} waiting", style="dim")
        live.update(Group(Text(head, style="bold"), rows(running[:SHOWN], SWEPT), foot), refresh=True)


@contextmanager
def sweep_view(console: Console, folders: Sequence[Path], total: int) -> Iterator[SweepView]:
    """The view of a sweep that fits the console."""
    if not console.is_terminal:
        yield SweepView(console, folders, total, None)
        return
    with Live(console=console, auto_refresh=False, transient=True) as live:
        yield SweepView(console, folders, total, live)
