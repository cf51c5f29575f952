"""How the benchmarks measure: interleaved medians, time limits, peak memory, tables."""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import platform
import resource
import signal
import statistics
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from cases import Row

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


def seconds_of(run: Callable[[], Any], device: torch.device) -> tuple[float, Any]:
    """Wall time of a call, the device's work included, and what it returned."""
    finish(device)
    start = time.perf_counter()
    result = run()
    finish(device)
    return time.perf_counter() - start, result


def finish(device: torch.device) -> None:
    """Wait for the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@dataclass
class Outcome:
    """What a row took and found."""

    key: str
    what: str
    #: Seconds of the first call, which the median does not count.
    first: float | None = None
    times: list[float] = field(default_factory=list)
    found: dict[str, Any] = field(default_factory=dict)
    #: The traceback of a failure, or that the time was up.
    error: str | None = None
    peak_bytes: int | None = None

    @property
    def median(self) -> float | None:
        """Median time in seconds; of the only call, if it was too slow to repeat."""
        return statistics.median(self.times) if self.times else self.first

    def as_dict(self) -> dict[str, Any]:
        """All of it, for JSON."""
        return {
            "key": self.key,
            "what": self.what,
            "median_s": self.median,
            "least_s": min(self.times, default=self.first),
            "first_s": self.first,
            "repeats": len(self.times),
            "peak_bytes": self.peak_bytes,
            "error": self.error,
            **self.found,
        }


def interleaved(
    rows: Sequence[Row], device: torch.device, *, seconds: float, rounds: int, limit: float = 300.0
) -> list[Outcome]:
    """Every row ``rounds`` times, or as often as fits into its ``seconds``, by turns: noise disturbs all of them alike.

    A row that fails, or whose calls take longer than ``limit`` seconds, is reported and does not stop the others.
    """
    outcomes = [Outcome(row.key, row.what) for row in rows]
    repeats = {}
    for row, outcome in zip(rows, outcomes, strict=True):
        with caught(outcome, limit):
            if device.type == "cuda":
                torch.cuda.reset_peak_memory_stats(device)
                held = torch.cuda.memory_allocated(device)
            outcome.first, found = seconds_of(row.run, device)
            if device.type == "cuda":
                outcome.peak_bytes = torch.cuda.max_memory_allocated(device) - held
            outcome.found = summary(found) if isinstance(found, list) else {}
            warm = outcome.first
            if warm < seconds:
                warm, _ = seconds_of(row.run, device)
            repeats[row.key] = min(rounds, int(seconds / warm))
    for turn in range(max(repeats.values(), default=0)):
        for row, outcome in zip(rows, outcomes, strict=True):
            if outcome.error is None and turn < repeats[row.key]:
                with caught(outcome, limit):
                    outcome.times.append(seconds_of(row.run, device)[0])
    return outcomes


@contextlib.contextmanager
def caught(outcome: Outcome, limit: float) -> Iterator[None]:
    """Keep a failure, or that the time is up, in ``outcome.error``."""
    try:
        with time_limit(limit):
            yield
    except TimeUp:
        outcome.error = f"broken off after {limit:.0f} s"
    except Exception:
        outcome.error = traceback.format_exc()


def summary(conditions: Sequence[ConditionNumber]) -> dict[str, Any]:
    """What a table says of many condition numbers."""
    resolved = sorted(kappa.value for kappa in conditions if kappa.resolved)
    return {
        "hessians": len(conditions),
        "unresolved": len(conditions) - len(resolved),
        "kappa_median": statistics.median(resolved) if resolved else None,
        "kappa_max": resolved[-1] if resolved else None,
        "widest": max((kappa.width for kappa in conditions if kappa.resolved), default=None),
        "rank_median": statistics.median(kappa.rank for kappa in conditions),
        "solvers": dict(Counter(kappa.solver for kappa in conditions).most_common()),
    }


def resident(kind: str) -> int:
    """Bytes of this process in memory: now (``"VmRSS"``) or at most so far (``"VmHWM"``).

    A child inherits its parent's peak in `resource.getrusage`, so the kernel's own count goes first.
    """
    status = Path("/proc/self/status")
    if status.exists():
        line = next(line for line in status.read_text().splitlines() if line.startswith(kind + ":"))
        return int(line.split()[1]) * 1024
    unit = 1 if platform.system() == "Darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def environment(device: torch.device) -> dict[str, Any]:
    """The machine and the versions of what matters here."""
    names = ("torch", "numpy", "scipy", "curvlinops-for-pytorch", "pyhessian", "hessian-eigenthings")
    versions = {}
    for name in names:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    found = {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU",
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "platform": platform.platform(terse=True),
        **versions,
        "torch": torch.__version__,
    }
    return {**found, "cuda": torch.version.cuda} if device.type == "cuda" else found


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


def in_units(outcome: Outcome, unit: Outcome) -> float | None:
    """Median over the turns of a row's time in that of ``unit`` at the same turn, so that slow moments count alike."""
    pairs = list(zip(outcome.times, unit.times, strict=False))
    if pairs:
        return statistics.median(seconds / one for seconds, one in pairs)
    return outcome.first / unit.median if outcome.first and unit.median else None


def why_not(error: str | None) -> str:
    """What a table says of a row without a time."""
    reason = (error or "not run").strip().splitlines()[-1]
    return "not installed" if reason.startswith(("ModuleNotFoundError", "ImportError")) else f"FAILED: {reason}"[:50]


def milliseconds(seconds: float) -> str:
    """A time in a table."""
    ms = 1e3 * seconds
    return f"{ms:,.0f}" if ms >= 1000 else f"{ms:.3g}"


HEADINGS = ("", "ms", "SGD steps", "κ median", "widest", "solver")


def timing_table(outcomes: Sequence[Outcome]) -> str:
    """Times of rows, in SGD steps too where the first row is one, and what they found."""
    step = outcomes[0].median if outcomes[0].key == "step" else None
    return table(HEADINGS, [timing_line(outcome, step) for outcome in outcomes])


def timing_line(outcome: Outcome, step: float | None) -> list[str]:
    """One line of `timing_table`."""
    if outcome.error is not None or outcome.median is None:
        return [outcome.what, "–", "–", "–", "–", why_not(outcome.error)]
    found = outcome.found
    kappa, widest, solver = "", "", ""
    if found:
        kappa = "–" if found["kappa_median"] is None else f"{found['kappa_median']:.3g}"
        widest = "–" if found["widest"] is None else f"{found['widest']:.0e}"
        solver, often = next(iter(found["solvers"].items()))
        solver += f" ({often})" if often < found["hessians"] else ""
        solver += f"; {found['unresolved']} unresolved" if found["unresolved"] else ""
    steps = outcome.median / step if step else 0.0
    ratio = (f"{steps:.1f}" if steps < 100 else f"{steps:,.0f}") if step else ""
    return [outcome.what, milliseconds(outcome.median), ratio, kappa, widest, solver]


def after_forward(outcomes: Sequence[Outcome]) -> str:
    """What a stream's probe took beyond the forward passes, in words; empty if it was not measured."""
    medians = {outcome.key: outcome.median for outcome in outcomes if outcome.error is None}
    if None in (total := [medians.get("stream"), medians.get("stream-forward")]):
        return ""
    return f"after the forward passes: {total[0] - total[1]:.2f} s"
