"""What an iteration of each method costs: beside vanilla where that was measured, else as the logs' clocks say."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib.figure import Figure

from hesscond.errors import ConfigError, RunError
from hesscond.report.groups import Group, groups_of, looks_of, title_of
from hesscond.report.legends import add_heading
from hesscond.report.page import COLUMN, Page
from hesscond.report.probed import shortened

if TYPE_CHECKING:
    import pandas as pd

    from hesscond.study.store import StoredRun

#: What ``hesscond compare`` writes beside its runs.
COMPARISON = "comparison.csv"
#: Longest name of a method that is not shortened.
LONGEST = 26
RELATIVE = "time of an iteration, vanilla = 1"
ABSOLUTE = "milliseconds an iteration, probes and evaluations included"


def timing_figure(runs: Sequence[StoredRun], *, page: Page = COLUMN) -> Figure:
    """The time of an iteration, a row for each method, the fastest at the top.

    Runs of ``hesscond compare``: relative to vanilla, from blocks of iterations of both in turn and without probing,
    which other work on the machine hardly touches. Other runs: the time that the run worked over its iterations, which
    contains all that it did; a dot for each seed, a bar at their median. The axis says which.

    Parameters
    ----------
    runs
        Of one study.
    page
        What it is drawn for.

    Returns
    -------
    matplotlib.figure.Figure
        One panel.

    Raises
    ------
    ConfigError
        The time is known of none of the runs; runs of different studies.
    """
    times, groups = iteration_times(runs)
    looks = looks_of(groups)
    medians = times.groupby("label")["time"].median().sort_values()
    relative = bool(times["relative"].iloc[0])
    with page.styled():
        figure = page.figure(0.75 + 0.16 * len(medians))
        ax = figure.add_subplot()
        for row, label in enumerate(medians.index):
            seeds, look = times.loc[times["label"] == label, "time"], looks[str(label)]
            style: dict[str, Any] = {"marker": look.marker, "ms": 4, "mew": 0, "ls": "none", "color": look.color}
            ax.hlines(row, 0, medians[label], color=look.color, lw=1.4, alpha=0.5)
            ax.plot(seeds, np.full(len(seeds), row), zorder=3, gid=f"{label}-time", **style)
        if relative:
            ax.axvline(1.0, color="0.4", lw=0.6, zorder=0)
        ax.set_yticks(range(len(medians)), [shortened(str(label), LONGEST) for label in medians.index])
        ax.set_ylim(len(medians) - 0.4, -0.6)
        ax.set_xlim(left=0)
        ax.tick_params(axis="y", length=0)
        ax.set_xlabel(page.wrapped(RELATIVE if relative else ABSOLUTE, float(page.style["axes.labelsize"])))
        ax.set_axisbelow(True)
        ax.grid(axis="x", color="0.92", lw=0.4)
        add_heading(figure, page, title_of(groups), [])
    return figure


def iteration_times(runs: Sequence[StoredRun]) -> tuple[pd.DataFrame, list[Group]]:
    """One row per method or run whose time is known: label, time and whether it is relative to vanilla, else in ms.

    And the groups of runs that the labels are of.

    Raises
    ------
    ConfigError
        Of none.
    """
    import pandas as pd

    # of the grid of rates that a comparison tries, only the best was timed
    timed = [run for run in runs if not math.isnan(relative_cost(run))]
    groups = groups_of(timed or runs)
    rows: list[dict[str, Any]] = []
    for group in groups:
        costs = {cost for run in group.runs if not math.isnan(cost := relative_cost(run))}
        rows += [{"label": group.label, "time": cost, "relative": True} for cost in sorted(costs)]
    if not rows:
        for group in groups:
            times = [1000 * run.seconds / run.iterations for run in group.runs if run.iterations]
            rows += [{"label": group.label, "time": time, "relative": False} for time in times if time > 0]
    if not rows:
        raise ConfigError("the logs do not say how long the runs took: draw runs of hesscond compare, or repeat them")
    return pd.DataFrame(rows), groups


def relative_cost(run: StoredRun) -> float:
    """What ``hesscond compare`` measured for the run's method at the run's learning rate; NaN if nothing.

    Raises
    ------
    RunError
        The file it wrote is damaged.
    """
    import pandas as pd

    path = run.folder.parent / COMPARISON
    if not path.is_file():
        return math.nan
    try:
        found = pd.read_csv(path)
        row = found[(found["method"] == run.method) & np.isclose(found["learning_rate"], run_rate(run), rtol=1e-9)]
        return float(row["time"].iloc[0]) if len(row) else math.nan
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise RunError(f"{path} is damaged: {' '.join(str(error).split())}") from None


def run_rate(run: StoredRun) -> float:
    """The run's learning rate."""
    return float(run.config["run"]["learning_rate"])
