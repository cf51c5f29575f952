"""The progress bar of a run in the terminal."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

from hesscond.study import Progress

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
