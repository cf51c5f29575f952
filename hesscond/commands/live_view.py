"""How runs look while they are followed: blocks with sparklines, a row each where there are many, lines in a pipe."""

from __future__ import annotations

import math
from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from hesscond.commands.runs import clock_time
from hesscond.study.reading import printable
from hesscond.study.watching import UnitCurves, WatchedRun

BARS = "▁▂▃▄▅▆▇█"
#: In a sparkline where κ is unresolved, and where nothing was measured.
UNRESOLVED, NOTHING = "?", "·"
#: Fewest and most columns of a sparkline, and those of what stands beside two of them.
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
        Most columns.
    logarithmic
        Whether equal ratios are equally high; the values are then positive.

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
    """Each run with its curves, in so many columns."""
    names = [len(f"{layer}.{unit}") for run in runs for layer, unit in run.units]
    spark = min(WIDEST, max(NARROWEST, (width - BESIDE - max(names, default=0)) // 2))
    return Group(
        *(part for run in runs for part in (headline(run), Padding(curves(run, spark), (0, 0, 1, 2), expand=False)))
    )


def headline(watched: WatchedRun) -> Text:
    """Name, state, progress."""
    status = watched.run.status
    text = Text(printable(watched.run.label), style="bold")
    text.append(f"  {status}", style=COLOURS.get(status, ""))
    text.append(f"  {progress(watched)}", style="not bold")
    text.append(f"  {tempo(watched)}", style="not bold dim")
    return text


def curves(watched: WatchedRun, spark: int) -> Table:
    """The loss, and κ's of each unit, with sparklines of so many columns."""
    table = Table.grid(padding=(0, 1))
    for justify in ("left", "left", "right", "left", "left", "right", "left"):
        table.add_column(justify=justify, no_wrap=True)
    accuracy = watched.accuracy
    table.add_row(
        "",
        "loss",
        last(watched.losses, "#.4g"),
        sparkline(watched.losses, spark),
        "acc." if not math.isnan(accuracy) else "test",
        percent(accuracy) if not math.isnan(accuracy) else last([watched.test_loss], "#.4g"),
        "",
    )
    for (layer, unit), unit_curves in watched.units.items():
        table.add_row(
            printable(f"{layer}.{unit}"),
            "κ(H)",
            *kappa(unit_curves.kappa, spark),
            "κ own",
            *kappa(unit_curves.kappa_own, spark),
        )
    return table


def kappa(values: Sequence[float], spark: int) -> tuple[str, str]:
    """The last κ, and its curve."""
    return last(values, ".2e"), sparkline(values, spark, logarithmic=True)


def rows(runs: Sequence[WatchedRun]) -> Table:
    """A row for each run, with the first of its units."""
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style="bold")
    for name in ("run", "status", "iteration", "loss", "acc.", "κ(H)", "κ own", "left"):
        table.add_column(name, justify="left" if name in ("run", "status") else "right", no_wrap=name != "run")
    for watched in runs:
        first = next(iter(watched.units.values()), UnitCurves())
        table.add_row(
            printable(watched.run.label),
            Text(watched.run.status, style=COLOURS.get(watched.run.status, "")),
            counted(watched),
            last(watched.losses, ".3g"),
            percent(watched.accuracy),
            last(first.kappa, ".1e"),
            last(first.kappa_own, ".1e"),
            duration(watched.remaining),
        )
    return table


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
    for (layer, unit), unit_curves in watched.units.items():
        values = (last(c, ".2e") for c in (unit_curves.kappa, unit_curves.kappa_own))
        parts.append(printable(f"{layer}.{unit} ") + "κ(H) {} κ own {}".format(*values))
    return " · ".join([*parts, tempo(watched)] if tempo(watched) else parts)


def counted(watched: WatchedRun) -> str:
    """Iterations of all that there will be."""
    total = watched.run.total
    return f"{watched.iterations}/{'?' if total is None else total}"


def progress(watched: WatchedRun) -> str:
    """Iterations of all, and their share."""
    total = watched.run.total
    return counted(watched) if not total else f"{counted(watched)} ({100 * watched.iterations // total} %)"


def tempo(watched: WatchedRun) -> str:
    """Speed and time left of a run that goes on, time taken of one that is over."""
    if watched.over:
        seconds = watched.run.seconds
        return "" if math.isnan(seconds) else f"took {clock_time(seconds)}"
    speed = "" if math.isnan(watched.speed) else f"{watched.speed:.3g} it/s"
    left = "" if math.isnan(watched.remaining) else f"{duration(watched.remaining)} left"
    return "  ".join(part for part in (speed, left) if part)


def duration(seconds: float) -> str:
    """Time, a dash if there is none to tell."""
    return "–" if math.isnan(seconds) else clock_time(seconds)


def percent(share: float) -> str:
    """A share."""
    return "–" if math.isnan(share) else f"{100 * share:.1f} %"


def last(values: Sequence[float], form: str) -> str:
    """The last of some values."""
    if not values or math.isnan(values[-1]):
        return "–"
    return "unres." if values[-1] == math.inf else format(values[-1], form)
