"""Figures of methods side by side: end of training against the median κ, and the time of an iteration."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import LogFormatterMathtext, LogLocator, MaxNLocator, NullFormatter
from matplotlib.transforms import ScaledTranslation

from hesscond.errors import ConfigError, RunError
from hesscond.report.axes import (
    NEUTRAL,
    add_heading,
    heading_height,
    label_figure,
    logarithmic,
    method_handle,
    shortened,
)
from hesscond.report.page import COLUMN, Page
from hesscond.report.registry import PROBED, UNIT, FigureKind
from hesscond.report.selection import Group, groups_of, looks_of, probed_groups, select, title_of
from hesscond.report.series import is_collapsed, kappa_ends, quantile
from hesscond.report.summary import training_summary

if TYPE_CHECKING:
    import pandas as pd

    from hesscond.runs import StoredRun


def comparison_figure(
    runs: Sequence[StoredRun], *, layer: str | None = None, unit: int | None = None, page: Page = COLUMN
) -> Figure:
    """Final training loss, and test accuracy if there is one, against the median κ: a point for each method.

    κ is that of a unit in the coordinates of the method, the median over the probed mini-batches (the training set
    where only that was probed); the horizontal bar is its interquartile range. With several seeds a point is the
    median, and the vertical bar the range. Where unresolved values leave the median open, it is an open marker with an
    arrow at its lower bound. Runs that were not probed, such as those on which ``hesscond compare`` tries learning
    rates, are left out; so are those that diverged or have not finished, whose number is stated.
    """
    points = comparison_points(runs, layer=layer, unit=unit)
    everything = probed_groups(runs)
    groups = [group for group in everything if group.label in set(points["label"])]
    looks = looks_of(groups)
    accurate = points["accuracy"].notna().any()
    with page.styled():
        rows, columns = (1, 2) if accurate and page.wide else (1 + accurate, 1)
        labels = [group.label for group in groups] + ["unresolved (lower bound)"] * bool(points["open"].any())
        figure = page.figure(0.5 + 1.7 * rows + heading_height(labels, page))
        axes = figure.subplots(rows, columns, squeeze=False, sharex=True).ravel()
        for ax, quantity in zip(axes, ("loss", "accuracy"), strict=False):
            for row in points.to_dict("records"):
                draw_point(ax, row, quantity, looks[row["label"]])
            finish(ax)
        axes[0].set_yscale("log")
        logarithmic(axes[0])
        axes[0].set_ylabel("final training loss")
        if accurate:
            axes[1].set_ylabel("test accuracy (%)")
            low, high = axes[1].get_ylim()
            axes[1].set_ylim(max(low, -1.0), min(high, 101.0))
            axes[1].yaxis.set_major_locator(MaxNLocator(5))
        for ax in axes if page.wide else axes[-1:]:
            ax.set_xlabel(r"median $\kappa$, own coordinates")
        handles = [method_handle(group.label, looks[group.label], line=False) for group in groups]
        if points["open"].any():
            style: dict[str, Any] = {"marker": ">", "mfc": "none", "mew": 0.7, "ms": 4, "ls": "none", "color": NEUTRAL}
            handles.append(Line2D([], [], label="unresolved (lower bound)", **style))
        add_heading(figure, page, title_of(groups), handles)
        label_figure(figure, page, None, remark(points, everything))
    return figure


def comparison_points(runs: Sequence[StoredRun], *, layer: str | None = None, unit: int | None = None) -> pd.DataFrame:
    """One row per group: label, seeds (that finished); kappa, kappa_low and kappa_high (quartiles), open (κ: a bound).

    Further columns: loss and accuracy (percent), medians over the seeds, with ``_min`` and ``_max``; NaN if there is
    none.
    """
    import pandas as pd

    selection = select(runs, layer, unit)
    rows = []
    for group in probed_groups(runs):
        done = [run for run in group.finished if not is_collapsed(run)]
        ends = [kappa_ends(selection.rows_of(run)) for run in done]
        lower, upper = (np.concatenate([end[side] for end in ends]) if ends else np.zeros(0) for side in (0, 1))
        if not len(lower):
            continue
        summaries = pd.DataFrame([training_summary(run) for run in done])
        low, high = quantile(lower, upper, 0.5)
        row: dict[str, Any] = {"label": group.label, "seeds": len(done)}
        row |= {"kappa": low, "open": low != high}
        row |= {"kappa_low": quantile(lower, upper, 0.25)[0], "kappa_high": quantile(lower, upper, 0.75)[1]}
        for name, column, factor in (("loss", "training_loss_tail_mean", 1), ("accuracy", "test_accuracy", 100)):
            values = factor * summaries[column]
            row |= {name: values.median(), f"{name}_min": values.min(), f"{name}_max": values.max()}
        rows.append(row)
    if not rows:
        raise ConfigError("no run that was probed went to its end: probe with --probe-every 1 or more")
    return pd.DataFrame(rows)


def draw_point(ax: Axes, row: dict[str, Any], quantity: str, look: Any) -> None:
    """Draw a marker with its bars (``LABEL-QUANTITY``); open, with an arrow, where κ is a lower bound."""
    x, y = float(row["kappa"]), float(row[quantity])
    if math.isnan(y):
        return
    ax.vlines(x, row[f"{quantity}_min"], row[f"{quantity}_max"], color=look.color, lw=0.7, alpha=0.8)
    style: dict[str, Any] = {"marker": look.marker, "ms": 5, "mew": 0.4, "ls": "none", "color": look.color, "zorder": 4}
    name = f"{row['label']}-{quantity}"
    if row["open"]:
        ax.plot([x], [y], gid=f"{name}-unresolved", **style | {"mfc": "none", "mew": 0.8})
        # an arrow to the right of the marker: κ is there, or farther
        head = ScaledTranslation(8 / 72, 0, ax.figure.dpi_scale_trans)
        ax.plot([x], [y], marker=r"$\rightarrow$", ms=6, mew=0, color=look.color, transform=ax.transData + head)
        return
    if math.isfinite(row["kappa_high"]):
        ax.hlines(y, row["kappa_low"], row["kappa_high"], color=look.color, lw=0.7, alpha=0.8)
    ax.plot([x], [y], gid=name, **style | {"mec": "white"})


def finish(ax: Axes) -> None:
    """Set up the κ axis."""
    ax.set_xscale("log")
    ax.margins(0.08)
    ax.xaxis.set_major_locator(LogLocator(numticks=5))
    ax.xaxis.set_major_formatter(LogFormatterMathtext())
    ax.xaxis.set_minor_formatter(NullFormatter())
    ax.set_axisbelow(True)
    ax.grid(color="0.92", lw=0.4)


def remark(points: pd.DataFrame, groups: Sequence[Group]) -> str:
    """Remark on the bars, and on the runs that were left out."""
    parts = ["horizontal: middle half of the κ"]
    if points["seeds"].max() > 1:
        parts.append("vertical: range over seeds")
    for status in ("diverged", "collapsed", "unfinished"):
        if number := sum(getattr(group, status) for group in groups):
            parts.append(f"{status} and left out: {number}")
    return "; ".join(parts)


#: File that ``hesscond compare`` writes next to its runs.
COMPARISON = "comparison.csv"
#: Longest name of a method that is not shortened.
LONGEST = 26
RELATIVE = "time of an iteration, vanilla = 1"
ABSOLUTE = "ms an iteration, with probes and evaluations"


def timing_figure(runs: Sequence[StoredRun], *, page: Page = COLUMN) -> Figure:
    """The time of an iteration, a row for each method, the fastest at the top.

    Runs of ``hesscond compare`` have times relative to vanilla, from blocks of iterations of both in turn and without
    probing, which other work on the machine hardly affects. Other runs have the total time of the run divided by its
    number of iterations, probes and evaluations included. A dot is a seed, the bar their median. The axis says which.
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
    """Label, time and whether it is relative to vanilla (else in ms), a row per method or run with a known time.

    The second value is the list of groups that the labels belong to.
    """
    import pandas as pd

    # in the grid of rates that a comparison tries, only the best was timed
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
    """Relative time that ``hesscond compare`` measured for the run's method and learning rate; NaN if none."""
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


COMPARISON_FIGURE = FigureKind(
    "comparison",
    "final loss and accuracy of each method against the median κ in its coordinates",
    PROBED,
    comparison_figure,
    comparison_points,
    UNIT,
)


TIMING_FIGURE = FigureKind(
    "timing",
    "what an iteration of each method costs",
    "runs of one study; those of hesscond compare have times relative to vanilla",
    timing_figure,
    iteration_times,
)
