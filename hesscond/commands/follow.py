"""``hesscond follow``: runs in the terminal while other processes write them."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer
from rich.live import Live

from hesscond.commands.exits import DIVERGED, INTERRUPTED
from hesscond.commands.live_view import blocks, line, rows
from hesscond.commands.printing import stdout
from hesscond.errors import ConfigError
from hesscond.runs import LOG, OVER, WatchedRun, run_folders


def follow(
    runs: Annotated[
        list[Path],
        typer.Argument(help="Run folders, or folders in which runs are or will be."),
    ],
    interval: Annotated[float, typer.Option(help="Seconds between two looks.")] = 1.0,
    wait: Annotated[
        float, typer.Option(help="Seconds to wait for the first run of a folder, and for another after the last.")
    ] = 5.0,
) -> None:
    """Watch runs while they are trained: loss, accuracy, κ with their curves so far, speed and time left.

    Reads only; any number of runs that other processes write, on this machine or a shared file system. In a pipe: a
    line for each run whenever it has moved. Ends with the runs: exit code 0 if all finished, 1 if one diverged, failed,
    was killed or interrupted. Ctrl-C ends the watching, not the runs.

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


class Screen:
    """View of runs in a terminal: everything where it fits, else a row for each run."""

    def __init__(self, live: Live) -> None:
        self.live = live

    def __call__(self, runs: list[WatchedRun]) -> None:
        """Draw the runs anew."""
        lines = sum(3 + len(run.units) for run in runs)
        fits = lines < self.live.console.height
        self.live.update(blocks(runs, self.live.console.width) if fits else rows(runs), refresh=True)


class Lines:
    """View of runs as lines of text: one for each run that has moved."""

    def __init__(self) -> None:
        self.printed: dict[Path, tuple[int, str]] = {}

    def __call__(self, runs: list[WatchedRun]) -> None:
        """Print a line for each run that has moved since the last call."""
        for watched in runs:
            state = (watched.iterations, watched.run.status)
            if self.printed.get(watched.run.folder) != state:
                self.printed[watched.run.folder] = state
                stdout.out(line(watched))


@contextmanager
def screen() -> Iterator[Screen | Lines]:
    """View of the runs: a live display in a terminal, lines elsewhere."""
    if not stdout.is_terminal:
        yield Lines()
        return
    with Live(console=stdout, auto_refresh=False, vertical_overflow="ellipsis") as live:
        yield Screen(live)
