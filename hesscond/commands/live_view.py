"""Runs in training, in the terminal and in a pipe: a table for follow and sweep, lines of text, and a bar for study."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar
from rich.table import Table
from rich.text import Text

from hesscond.commands.runs import clock_time
from hesscond.errors import RunError
from hesscond.runs import LOG, UnitCurves, WatchedRun, open_run, printable

if TYPE_CHECKING:
    from hesscond.study import Progress
    from hesscond.study.sweep import Outcome

COLOURS = {
    "finished": "green",
    "diverged": "red",
    "failed": "red",
    "killed": "red",
    "interrupted": "yellow",
    "silent": "yellow",
}
#: The cells of a run's row, by their headlines; κ is that of the first probed unit.
CELLS: dict[str, Callable[[WatchedRun], str | Text]] = {
    "run": lambda w: printable(w.run.folder.name),
    "iteration": lambda w: counted(w),
    "loss": lambda w: last(w.losses, ".3g"),
    "acc.": lambda w: percent(w.accuracy),
    "κ(H)": lambda w: last(first_unit(w).kappa, ".1e"),
    "κ own": lambda w: last(first_unit(w).kappa_own, ".1e"),
    "it/s": lambda w: "–" if math.isnan(w.speed) else f"{w.speed:.3g}",
    "status": lambda w: status(w),
}


def rows(runs: Sequence[WatchedRun]) -> Table:
    """Table with a row for each run; where there is no room, names end in an ellipsis."""
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style="bold", expand=True)
    for name in CELLS:
        justify, ratio = ("left", 1) if name == "run" else ("right", None)
        table.add_column(name, justify=justify, no_wrap=True, ratio=ratio)  # type: ignore[arg-type]
    for watched in runs:
        table.add_row(*(cell(watched) for cell in CELLS.values()))
    return table


def first_unit(watched: WatchedRun) -> UnitCurves:
    """κ curves of the first probed unit of a run; empty if no unit was probed."""
    return next(iter(watched.units.values()), UnitCurves())


def status(watched: WatchedRun) -> Text:
    """Time left of a running run, if it can be estimated, else the status."""
    if not watched.over and not math.isnan(watched.remaining):
        return Text(f"{clock_time(watched.remaining)} left")
    return Text(watched.run.status, style=COLOURS.get(watched.run.status, ""))


def line(watched: WatchedRun) -> str:
    """A run in one line of text, with κ of all probed units."""
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
    for (layer, unit), curves in watched.units.items():
        values = (last(curve, ".2e") for curve in (curves.kappa, curves.kappa_own))
        parts.append(printable(f"{layer}.{unit} ") + "κ(H) {} κ own {}".format(*values))
    if watched.over and not math.isnan(watched.run.seconds):
        parts.append(f"took {clock_time(watched.run.seconds)}")
    elif not watched.over and not math.isnan(watched.remaining):
        parts.append(f"{watched.speed:.3g} it/s  {clock_time(watched.remaining)} left")
    return " · ".join(parts)


def counted(watched: WatchedRun) -> str:
    """Iterations done, out of the total."""
    total = watched.run.total
    return f"{watched.iterations}/{'?' if total is None else total}"


def percent(share: float) -> str:
    """Share in percent as text; a dash for NaN."""
    return "–" if math.isnan(share) else f"{100 * share:.1f} %"


def last(values: Sequence[float], form: str) -> str:
    """Last of some values as text; a dash if there is none, ``unres.`` if it is infinite."""
    if not values or math.isnan(values[-1]):
        return "–"
    return "unres." if values[-1] == math.inf else format(values[-1], form)


#: Seconds between two drawings of a sweep in a terminal, and between two lines about its runs elsewhere.
REDRAW, REPEAT = 0.5, 60.0
#: Largest number of runs of a sweep that are shown.
SHOWN = 16


class SweepView:
    """View of a sweep: in a terminal (``live``) the table of the runs in training, elsewhere a line per ended run.

    ``folders`` are the runs that are left to do, and ``total`` counts those that were over before too.
    """

    def __init__(self, console: Console, folders: Sequence[Path], total: int, live: Live | None) -> None:
        self.console, self.total, self.live = console, total, live
        self.left = {folder.name: folder for folder in folders}
        self.watched: dict[str, WatchedRun] = {}
        self.bad = 0
        self.began_at = self.drawn = time.monotonic()

    def ended(self, outcome: Outcome) -> None:
        """Report that a run is over."""
        folder = self.left.pop(outcome.name)
        self.watched.pop(outcome.name, None)
        self.bad += outcome.status != "finished"
        how = f"{outcome.status}: {outcome.message}" if outcome.message else outcome.status
        if outcome.status == "finished":
            run = open_run(folder)
            how += f", {run.iterations} iterations, loss {run.last_loss:.4g}, {run.seconds:.1f} s"
        # in a terminal, finished runs are only counted
        if self.live is None or outcome.status != "finished":
            self.say(f"[{self.total - len(self.left)}/{self.total}] {outcome.name}: {how}")
        self.draw()

    def broke(self, name: str, reason: str) -> None:
        """Report that the worker of a run broke down and that the run is resumed."""
        self.say(f"{name}: its worker broke down ({reason}), it is resumed")

    def tick(self) -> None:
        """Draw the runs in training, or print a line about them, if it is time."""
        if time.monotonic() - self.drawn > (REPEAT if self.live is None else REDRAW):
            self.drawn = time.monotonic()
            if self.live is None:
                shown = ", ".join(f"{run.run.folder.name} {counted(run)}" for run in self.running()[:SHOWN])
                self.say(f"{self.progress()}; in training: {shown}")
            self.draw()

    def say(self, text: str) -> None:
        """Print a line, in a terminal above the table."""
        self.console.print(printable(text), soft_wrap=True)

    def progress(self) -> str:
        """Number of runs that are over, and the time since the sweep began, as text."""
        bad = f", {self.bad} not finished" if self.bad else ""
        since = clock_time(time.monotonic() - self.began_at)
        return f"{self.total - len(self.left)} of {self.total} runs over{bad} · {since}"

    def running(self) -> list[WatchedRun]:
        """Runs in training, according to their logs."""
        for name, folder in self.left.items():
            # a log that is being made has no tables yet
            with suppress(RunError):
                if name in self.watched:
                    self.watched[name].update()
                elif (folder / LOG).exists():
                    self.watched[name] = WatchedRun(folder)
        return [watched for watched in self.watched.values() if not watched.over]

    def draw(self) -> None:
        """Draw the runs in training, if there is a terminal."""
        if self.live is not None:
            running = self.running()
            foot = Text(f"{len(self.left) - len(running[:SHOWN])} more to do", style="dim")
            self.live.update(Group(Text(self.progress(), style="bold"), rows(running[:SHOWN]), foot), refresh=True)


@contextmanager
def sweep_view(console: Console, folders: Sequence[Path], total: int) -> Iterator[SweepView]:
    """View of a sweep that fits the console."""
    if not console.is_terminal:
        yield SweepView(console, folders, total, None)
        return
    with Live(console=console, auto_refresh=False, transient=True) as live:
        yield SweepView(console, folders, total, live)


#: Columns of a terminal in which everything fits on one line; a narrower one gets no bar and shorter numbers.
WIDE = 118


def kappa_text(value: float | None, resolved: bool = True, digits: int = 2) -> str:
    """Return κ with ``digits`` decimals, or ``unresolved``."""
    if value is None or value != value:
        return "–"
    return f"{value:.{digits}e}" if resolved else "unresolved"


@contextmanager
def progress_bar(console: Console, label: str) -> Iterator[Callable[[Progress], None] | None]:
    """Yield a callback for `hesscond.study.run` that draws a bar; None if the console is no terminal."""
    if not console.is_terminal:
        yield None
        return
    wide = console.width >= WIDE
    columns = (
        TextColumn("{task.description}", style="bold", markup=False),
        *([BarColumn(bar_width=18)] if wide else []),
        TextColumn("{task.completed:.0f}/{task.total:.0f}"),
        TextColumn("loss {task.fields[loss]} κ(H) {task.fields[kappa]}"),
        TextColumn("κ own {task.fields[own]} κ(D) {task.fields[kappa_D]}"),
        *([TextColumn("{task.fields[speed]} it/s")] if wide else []),
        TimeRemainingColumn(compact=True),
    )
    digits = 2 if wide else 0
    with Bar(*columns, console=console, refresh_per_second=8) as bar:
        task = bar.add_task(label, total=0, loss="–", kappa="–", own="–", kappa_D="–", speed="–")

        def show(progress: Progress) -> None:
            row = progress.row or {}
            speed = bar.tasks[0].speed
            bar.update(
                task,
                total=progress.iterations,
                completed=progress.iteration,
                loss=f"{progress.loss:.3f}",
                kappa=kappa_text(row.get("kappa"), bool(row.get("resolved", True)), digits),
                own=kappa_text(row.get("kappa_own"), bool(row.get("resolved_own", True)), digits),
                kappa_D=kappa_text(row.get("kappa_D"), True, digits),
                speed="–" if speed is None else f"{speed:.0f}",
            )

        yield show
