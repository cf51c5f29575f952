"""Runs in training: lines about a sweep, and a bar for a study in a terminal."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import Progress as Bar
from rich.progress import TextColumn, TimeRemainingColumn

from hesscond.commands.runs import clock_time
from hesscond.errors import RunError
from hesscond.runs import open_run, printable

if TYPE_CHECKING:
    from hesscond.study import Progress
    from hesscond.study.sweep import Outcome

#: Seconds between two lines about the runs of a sweep that are in training, and the most of them that are named.
REPEAT, SHOWN = 30.0, 16


class SweepView:
    """Lines about a sweep: one for each run that ends, and one from time to time about those in training."""

    def __init__(self, console: Console, folders: Sequence[Path], total: int) -> None:
        self.console, self.total = console, total
        self.left = {folder.name: folder for folder in folders}
        self.bad = 0
        self.began_at = self.said_at = time.monotonic()

    def ended(self, outcome: Outcome) -> None:
        """Report that a run is over."""
        folder = self.left.pop(outcome.name)
        self.bad += outcome.status != "finished"
        how = f"{outcome.status}: {outcome.message}" if outcome.message else outcome.status
        if outcome.status == "finished":
            run = open_run(folder)
            how += f", {run.iterations} iterations, loss {run.last_loss:.4g}, {run.seconds:.1f} s"
        self.say(f"[{self.total - len(self.left)}/{self.total}] {outcome.name}: {how}")

    def broke(self, name: str, reason: str) -> None:
        """Report that the worker of a run broke down and that the run is resumed."""
        self.say(f"{name}: its worker broke down ({reason}), it is resumed")

    def tick(self) -> None:
        """Report which runs are in training, if it is time."""
        if time.monotonic() - self.said_at > REPEAT:
            self.said_at = time.monotonic()
            running = []
            for folder in self.left.values():
                # a log that is being made has no tables yet
                with suppress(RunError):
                    run = open_run(folder)
                    if run.status == "running":
                        running.append(f"{folder.name} {run.iterations}/{'?' if run.total is None else run.total}")
            over, bad = self.total - len(self.left), f", {self.bad} not finished" if self.bad else ""
            since = clock_time(time.monotonic() - self.began_at)
            self.say(f"{over} of {self.total} runs over{bad} · {since}; in training: {', '.join(running[:SHOWN])}")

    def say(self, text: str) -> None:
        """Print a line."""
        self.console.print(printable(text), soft_wrap=True)


def kappa_text(value: float | None, resolved: bool = True) -> str:
    """Return κ with one digit, or ``unresolved``."""
    if value is None or value != value:
        return "–"
    return f"{value:.0e}" if resolved else "unresolved"


@contextmanager
def progress_bar(console: Console, label: str) -> Iterator[Callable[[Progress], None] | None]:
    """Yield a callback for `hesscond.study.run` that draws a bar; None if the console is no terminal."""
    if not console.is_terminal:
        yield None
        return
    columns = (
        TextColumn("{task.description}", style="bold", markup=False),
        TextColumn("{task.completed:.0f}/{task.total:.0f}"),
        TextColumn("loss {task.fields[loss]} κ(H) {task.fields[kappa]}"),
        TextColumn("κ own {task.fields[own]} κ(D) {task.fields[kappa_D]}"),
        TimeRemainingColumn(compact=True),
    )
    with Bar(*columns, console=console, refresh_per_second=8) as bar:
        task = bar.add_task(label, total=0, loss="–", kappa="–", own="–", kappa_D="–")

        def show(progress: Progress) -> None:
            row = progress.row or {}
            bar.update(
                task,
                total=progress.iterations,
                completed=progress.iteration,
                loss=f"{progress.loss:.3f}",
                kappa=kappa_text(row.get("kappa"), bool(row.get("resolved", True))),
                own=kappa_text(row.get("kappa_own"), bool(row.get("resolved_own", True))),
                kappa_D=kappa_text(row.get("kappa_D")),
            )

        yield show
