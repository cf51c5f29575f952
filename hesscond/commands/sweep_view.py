"""What a sweep shows while it works: a live table in a terminal, plain lines elsewhere."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

from rich import box
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from hesscond.progress import kappa_text
from hesscond.study.worker import Outcome, State, Task, read_state

#: Seconds between redraws in a terminal, and between lines about what is in flight elsewhere.
REDRAW, REPEAT = 0.5, 60.0
#: Runs in flight that are shown, each on a line.
SHOWN = 16


class View:
    """Counts, and says in a line how each run ended.

    Parameters
    ----------
    console
        Where to.
    states
        The folder with the states of the runs.
    total, done
        Runs of the sweep, and how many of them were over before.
    """

    interval = REPEAT

    def __init__(self, console: Console, states: Path, total: int, done: int) -> None:
        self.console, self.states, self.total, self.over = console, states, total, done
        self.flying: list[str] = []
        self.bad = 0
        self.seconds: list[float] = []
        self.began_at = self.drawn = time.monotonic()

    def began(self, task: Task) -> None:
        """Runs were handed over."""
        self.flying += task.names

    def ended(self, outcome: Outcome) -> None:
        """A run is over."""
        if outcome.name in self.flying:
            self.flying.remove(outcome.name)
        if outcome.status == "interrupted":
            return
        self.over += 1
        state = read_state(self.states, outcome.name)
        if outcome.status in ("finished", "diverged"):
            self.seconds.append(state.seconds)
        self.bad += outcome.status in ("diverged", "failed")
        self.line(f"[{self.over}/{self.total}] {outcome.name}: {how(outcome, state)}")

    def broke(self, task: Task, reason: str) -> None:
        """A worker broke down; its runs are begun again, each by itself."""
        first, *others = task.names
        self.flying = [name for name in self.flying if name not in task.names]
        goes_on = f"it and {len(others)} more go on, each by itself" if others else "it is gone on with"
        self.line(f"{first}: its worker broke down ({reason}), {goes_on}")

    def tick(self) -> None:
        """Time has gone by."""
        if time.monotonic() - self.drawn > self.interval:
            self.drawn = time.monotonic()
            self.draw()

    def draw(self) -> None:
        """A line about what is in flight."""
        shown = ", ".join(f"{name} {place(state)}" for name, state in self.running()[:SHOWN])
        self.line(f"{self.over}/{self.total} over after {clock(time.monotonic() - self.began_at)}; at work: {shown}")

    def line(self, text: str) -> None:
        """Print a line."""
        self.console.print(text, soft_wrap=True)

    def running(self) -> list[tuple[str, State]]:
        """The runs in flight that have begun."""
        states = [(name, read_state(self.states, name)) for name in self.flying]
        return [(name, state) for name, state in states if state.status == "running"]

    def remaining(self, running: list[tuple[str, State]]) -> float | None:
        """Seconds until all is done, as it looks; None before the first run is over."""
        if not self.seconds or not running:
            return None
        each = sum(self.seconds) / len(self.seconds)
        begun = sum(left(state) or 0.0 for _, state in running)
        return (begun + each * (self.total - self.over - len(running))) / len(running)


class LiveView(View):
    """The same with a table that is redrawn; lines only of what went wrong."""

    interval = REDRAW

    def __init__(self, console: Console, states: Path, total: int, done: int, live: Live) -> None:
        super().__init__(console, states, total, done)
        self.live = live
        self.losses: dict[str, float] = {}

    def ended(self, outcome: Outcome) -> None:
        """A run is over; what went well is counted."""
        super().ended(outcome)
        self.draw()

    def line(self, text: str) -> None:
        """Print above the table what went wrong."""
        if not text.startswith("[") or ": finished" not in text:
            super().line(text)

    def draw(self) -> None:
        """The table anew."""
        running = self.running()
        bad = f", {self.bad} diverged or failed" if self.bad else ""
        rest = self.remaining(running)
        head = f"{self.over} of {self.total} runs over{bad} · {clock(time.monotonic() - self.began_at)}"
        head += "" if rest is None else f" · about {clock(rest)} to go"
        table = Table(box=box.SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0))
        table.add_column("run", no_wrap=True, overflow="ellipsis", ratio=1)
        for name in ("iteration", "loss", "κ(H)", "it/s", "to go"):
            table.add_column(name, justify="right", no_wrap=True)
        for name, state in running[:SHOWN]:
            seconds = left(state)
            table.add_row(
                Text(name),
                place(state),
                "–" if state.loss is None else f"{state.loss:.3f}",
                kappa_text(state.kappa, state.resolved, 1),
                "–" if state.rate is None else f"{state.rate:.0f}" if state.rate >= 10 else f"{state.rate:.1f}",
                "–" if seconds is None else clock(seconds),
            )
        more = len(running) - SHOWN
        waiting = self.total - self.over - len(running)
        foot = (f"… and {more} more at work; " if more > 0 else "") + f"{waiting} waiting"
        self.live.update(Group(Text(head, style="bold"), table, Text(foot, style="dim")), refresh=True)


@contextmanager
def view(console: Console, states: Path, total: int, done: int) -> Iterator[View]:
    """A view that fits the console."""
    if not console.is_terminal:
        yield View(console, states, total, done)
        return
    with Live(console=console, auto_refresh=False, transient=True) as live:
        shown = LiveView(console, states, total, done, live)
        shown.draw()
        yield shown


def how(outcome: Outcome, state: State) -> str:
    """How a run ended, in words."""
    if outcome.status != "finished":
        return f"{outcome.status}: {outcome.message}" if outcome.message else outcome.status
    loss = "" if state.loss is None else f", loss {state.loss:.4g}"
    kappa = "" if state.kappa is None else f", κ(H) {kappa_text(state.kappa, state.resolved)}"
    return f"finished, {state.iteration} iterations{loss}{kappa}, {state.seconds:.1f} s"


def place(state: State) -> str:
    """Where a run is."""
    return f"{state.iteration}/{state.iterations}" if state.iterations else "starting"


def left(state: State) -> float | None:
    """Seconds that a run needs to its end, as it looks."""
    return (state.iterations - state.iteration) / state.rate if state.rate else None


def clock(seconds: float) -> str:
    """A time as H:MM:SS."""
    return str(timedelta(seconds=round(seconds)))
