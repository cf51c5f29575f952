"""The progress bar of a run in the terminal."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

from hesscond.study import Progress


def kappa_text(value: float | None, resolved: bool = True) -> str:
    """κ in three digits, ``unresolved`` where it is."""
    if value is None or value != value:
        return "–"
    return f"{value:.2e}" if resolved else "unresolved"


@contextmanager
def progress_bar(console: Console, label: str) -> Iterator[Callable[[Progress], None] | None]:
    """A callback for `hesscond.study.run` that draws a bar; None where nobody watches."""
    if not console.is_terminal:
        yield None
        return
    columns = (
        TextColumn("{task.description}", style="bold", markup=False),
        BarColumn(bar_width=18),
        MofNCompleteColumn(),
        TextColumn("loss {task.fields[loss]}  κ(H) {task.fields[kappa]}"),
        TextColumn("κ(PᵀHP) {task.fields[preconditioned]}  κ(D) {task.fields[kappa_D]}"),
        TextColumn("{task.fields[speed]} it/s"),
        TimeRemainingColumn(),
    )
    with Bar(*columns, console=console, refresh_per_second=8) as bar:
        task = bar.add_task(label, total=None, loss="–", kappa="–", preconditioned="–", kappa_D="–", speed="–")

        def show(progress: Progress) -> None:
            row = progress.row or {}
            speed = bar.tasks[0].speed
            bar.update(
                task,
                total=progress.iterations,
                completed=progress.iteration,
                loss=f"{progress.loss:.3f}",
                kappa=kappa_text(row.get("kappa"), bool(row.get("resolved", True))),
                preconditioned=kappa_text(
                    row.get("kappa_preconditioned"), bool(row.get("resolved_preconditioned", True))
                ),
                kappa_D=kappa_text(row.get("kappa_D")),
                speed="–" if speed is None else f"{speed:.0f}",
            )

        yield show
