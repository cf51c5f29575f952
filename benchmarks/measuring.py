"""How the benchmarks measure: interleaved medians, time limits, peak memory, tables."""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import os
import platform
import signal
import statistics
import textwrap
import time
import traceback
from collections import Counter
from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from cases import CPU, Row

from hesscond import ConditionNumber


class TimeUp(BaseException):
    """A time limit is over; no handler for errors should take it for one."""


@contextlib.contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raise `TimeUp` in the main thread after that time, as soon as Python code runs again."""
    expired = False

    def stop(*_: object) -> None:
        nonlocal expired
        expired = True
        raise TimeUp

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, max(seconds, 1e-3))
    try:
        yield
    except Exception as error:
        # compiled code turns what is raised below it into an error of its own
        if expired:
            raise TimeUp from error
        raise
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def attempt(run: Callable[[], Any], limit: float) -> tuple[Any, str | None]:
    """The result of a call and None, or None and why there is none: the traceback, or that the time was up."""
    try:
        with time_limit(limit):
            return run(), None
    except TimeUp:
        return None, f"no answer in {limit:.0f} s"
    except Exception:
        return None, traceback.format_exc()


def seconds_of(run: Callable[[], Any], device: torch.device) -> tuple[float, Any]:
    """Wall time of a call, the device's work included, and what it returned."""
    wait = partial(torch.cuda.synchronize, device) if device.type == "cuda" else lambda: None
    wait()
    start = time.perf_counter()
    result = run()
    wait()
    return time.perf_counter() - start, result


def processor(run: Callable[[], Any]) -> tuple[float, Any]:
    """Seconds of the processor, best with one thread where others work, and what the call returned."""
    begin = time.process_time()
    result = run()
    return time.process_time() - begin, result


@dataclass
class Outcome:
    """What a row took and found."""

    what: str
    #: Seconds of the first call, which the median does not count.
    first: float | None = None
    times: list[float] = field(default_factory=list)
    #: Median κ, relative width of the widest interval and the most frequent solver, as a table has them.
    found: list[str] = field(default_factory=lambda: ["", "", ""])
    #: The traceback of a failure, or that the time was up.
    error: str | None = None
    peak_bytes: int | None = None
    #: How often the row is still to be run.
    repeats: int = 0

    @property
    def median(self) -> float | None:
        """Median time in seconds; of the only call, if it was too slow to repeat."""
        return statistics.median(self.times) if self.times else self.first


def interleaved(
    rows: Sequence[Row], device: torch.device, *, seconds: float, rounds: int, limit: float = 300.0
) -> list[Outcome]:
    """Every row ``rounds`` times, or as often as fits into its ``seconds``, by turns: noise disturbs all of them alike.

    A row that fails, or whose calls take longer than ``limit`` seconds, is reported and does not stop the others.
    """
    outcomes = [Outcome(row.what) for row in rows]

    def begin(row: Row, outcome: Outcome) -> None:
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
            held = torch.cuda.memory_allocated(device)
        outcome.first, result = seconds_of(row.run, device)
        if device.type == "cuda":
            outcome.peak_bytes = torch.cuda.max_memory_allocated(device) - held
        if isinstance(result, list):
            outcome.found = summary(result)
        warm = seconds_of(row.run, device)[0] if outcome.first < seconds else outcome.first
        outcome.repeats = min(rounds, int(seconds / warm))

    for row, outcome in zip(rows, outcomes, strict=True):
        _, outcome.error = attempt(partial(begin, row, outcome), limit)
    for turn in range(rounds):
        for row, outcome in zip(rows, outcomes, strict=True):
            if outcome.error is None and turn < outcome.repeats:
                timed, outcome.error = attempt(partial(seconds_of, row.run, device), limit)
                outcome.times += [timed[0]] if timed else []
    return outcomes


def summary(conditions: Sequence[ConditionNumber]) -> list[str]:
    """Cells on many condition numbers: their median, the widest interval, the solver."""
    resolved = [kappa for kappa in conditions if kappa.resolved]
    median = f"{statistics.median(kappa.value for kappa in resolved):.3g}" if resolved else "–"
    widest = f"{max(kappa.width for kappa in resolved):.0e}" if resolved else "–"
    ((solver, often),) = Counter(kappa.solver for kappa in conditions).most_common(1)
    solver += f" ({often})" if often < len(conditions) else ""
    solver += f"; {len(conditions) - len(resolved)} unresolved" if len(resolved) < len(conditions) else ""
    return [median, widest, solver]


def environment(device: torch.device) -> dict[str, Any]:
    """The machine and the versions of what matters here."""
    facts = {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU",
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "platform": platform.platform(terse=True),
        "torch": torch.__version__,
    }
    for name in ("numpy", "scipy", "curvlinops-for-pytorch", "pyhessian", "hessian-eigenthings"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            facts[name] = importlib.metadata.version(name)
    return {**facts, "cuda": torch.version.cuda} if device.type == "cuda" else facts


def table(headings: Sequence[str], rows: Sequence[Sequence[str]], left: Sequence[int] = (0, -1)) -> str:
    """An aligned Markdown table; the columns ``left`` to the left, the others to the right."""
    widths = [max(len(cell) for cell in column) for column in zip(headings, *rows, strict=True)]
    to_the_left = {i % len(widths) for i in left}

    def line(cells: Sequence[str]) -> str:
        aligned = [
            cell.ljust(width) if i in to_the_left else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(cells, widths, strict=True))
        ]
        return f"| {' | '.join(aligned)} |"

    rule = ["-" * (width + 2) if i in to_the_left else "-" * (width + 1) + ":" for i, width in enumerate(widths)]
    return "\n".join([line(headings), f"|{'|'.join(rule)}|", *map(line, rows)])


def show(headings: Sequence[str], rows: Sequence[Sequence[str]], left: Sequence[int] = (0,), title: str = "") -> None:
    """Print a table after an empty line, and a title above it."""
    print("\n" + title + "\n\n" * bool(title) + table(headings, rows, left), flush=True)


def in_units(outcome: Outcome, unit: Outcome) -> float | None:
    """Median over the turns of a row's time in that of ``unit`` at the same turn, so that slow moments count alike."""
    pairs = list(zip(outcome.times, unit.times, strict=False))
    if pairs:
        return statistics.median(seconds / reference for seconds, reference in pairs)
    return outcome.first / unit.median if outcome.first and unit.median else None


def why_not(error: str | None) -> str:
    """What a table says of a row without a time."""
    reason = (error or "not run").strip().splitlines()[-1]
    if reason.startswith(("ModuleNotFoundError", "ImportError")):
        return "not installed"
    return reason if reason.startswith("no answer") else f"FAILED: {reason}"[:70]


def milliseconds(seconds: float) -> str:
    """A time in a table."""
    ms = 1e3 * seconds
    return f"{ms:,.0f}" if ms >= 1000 else f"{ms:.3g}"


def timing_table(outcomes: Sequence[Outcome]) -> str:
    """Times of rows, in SGD steps too where the first row is one, and what they found."""
    step = outcomes[0].median if outcomes[0].what == "SGD step" else None
    lines = []
    for outcome in outcomes:
        if outcome.error is not None or outcome.median is None:
            lines.append([outcome.what, "–", "–", "–", "–", why_not(outcome.error)])
            continue
        steps = outcome.median / step if step else 0.0
        ratio = (f"{steps:.1f}" if steps < 100 else f"{steps:,.0f}") if step else ""
        lines.append([outcome.what, milliseconds(outcome.median), ratio, *outcome.found])
    return table(("", "ms", "SGD steps", "κ median", "widest", "solver"), lines)


def run_sections(
    text: str | None, sections: dict[str, Callable[[argparse.Namespace], None]], large: Container[str] = (), **more: Any
) -> None:
    """Parse the command line, with ``more`` options, and print the sections named, or all but the ``large`` ones."""
    parser = argparse.ArgumentParser(description=text, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="everything tiny, seconds in all: whether it runs")
    parser.add_argument("--only", action="append", choices=sections, help="a section; may be repeated")
    parser.add_argument("--threads", type=int, default=2)
    for name, facts in more.items():
        parser.add_argument(f"--{name}", **facts)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    print(textwrap.fill(", ".join(f"{key} {value}" for key, value in environment(CPU).items()), 100), flush=True)
    for name in given.only or [name for name in sections if given.quick or name not in large]:
        sections[name](given)
