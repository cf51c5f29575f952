"""``hesscond follow``: runs in the terminal while other processes write them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer
from rich.live import Live

from hesscond.commands.exits import DIVERGED, INTERRUPTED
from hesscond.commands.live_view import line, rows
from hesscond.commands.printing import stdout
from hesscond.errors import ConfigError
from hesscond.runs import LOG, OVER, WatchedRun, run_folders


def follow(
    runs: Annotated[
        list[Path],
        typer.Argument(help="Run folders, or folders in which runs are or will be."),
    ],
    interval: Annotated[float, typer.Option(help="Seconds between two readings of the logs.")] = 1.0,
    wait: Annotated[
        float, typer.Option(help="Seconds to wait for the first run of a folder, and for another after the last.")
    ] = 5.0,
) -> None:
    """Watch runs in training: iteration, loss, accuracy, κ, speed and time left.

    The runs may be written by other processes, on this machine or on a shared file system; nothing is written to them.
    A pipe gets a line for each run whenever it has moved. follow ends when all runs have ended: exit code 0 if all
    finished, 1 if one diverged, failed, was killed or interrupted. Ctrl-C ends follow, not the runs.

    Example: hesscond follow runs/fc-digits-1
    """
    for option, value in (("--interval", interval), ("--wait", wait)):
        if not 0 <= value <= 86400:
            raise ConfigError(f"{option} must be from 0 to 86400 seconds, got {value}")
    watched: dict[Path, WatchedRun] = {}
    try:
        look(runs, watched, interval, wait)
    except KeyboardInterrupt:  # nothing was interrupted but the watching
        raise typer.Exit(INTERRUPTED) from None
    if not watched:
        raise ConfigError(f"no run in {', '.join(map(str, runs))} within {wait:g} seconds")
    if any(run.run.status != "finished" for run in watched.values()):
        raise typer.Exit(DIVERGED)


def look(runs: list[Path], watched: dict[Path, WatchedRun], interval: float, wait: float) -> None:
    """Show the runs until all are over; ``watched`` is filled with them."""
    with screen() as show:
        idle_since = time.monotonic()
        while True:
            for folder in found(runs):
                if folder not in watched:
                    watched[folder] = WatchedRun(folder)
            for run in watched.values():
                if run.run.status not in OVER:  # whatever else became of it, it may be resumed
                    run.update()
            show(list(watched.values()))
            if any(not run.over for run in watched.values()):
                idle_since = time.monotonic()
            patience = 0.0 if all(is_run(folder) for folder in runs) else wait
            if all(run.over for run in watched.values()) and time.monotonic() - idle_since >= patience:
                break
            time.sleep(max(interval, 0.01))


def is_run(folder: Path) -> bool:
    """Whether a folder is itself a run, and so will hold no others."""
    return (folder / LOG).exists()


def found(folders: list[Path]) -> Iterator[Path]:
    """Run folders that exist by now."""
    for folder in folders:
        if folder.is_file():
            raise ConfigError(f"{folder} is a file: give a run folder")
        if folder.is_dir():
            yield from run_folders(folder)


@contextmanager
def screen() -> Iterator[Callable[[list[WatchedRun]], None]]:
    """Function that shows the runs: as a table in a terminal, elsewhere a line for each run that has moved."""
    if stdout.is_terminal:
        with Live(console=stdout, auto_refresh=False, vertical_overflow="ellipsis") as live:
            yield lambda runs: live.update(rows(runs), refresh=True)
        return
    printed: dict[Path, tuple[int, str]] = {}

    def print_lines(runs: list[WatchedRun]) -> None:
        for watched in runs:
            state = (watched.iterations, watched.run.status)
            if printed.get(watched.run.folder) != state:
                printed[watched.run.folder] = state
                stdout.out(line(watched))

    yield print_lines
