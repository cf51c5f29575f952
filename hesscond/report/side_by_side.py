"""Methods side by side: where training ended against how well conditioned the Hessian was on the way."""

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

from hesscond.errors import ConfigError
from hesscond.report.axes import NEUTRAL, label_figure, logarithmic
from hesscond.report.groups import Group, intervals, looks_of, probed_groups, quantile, title_of
from hesscond.report.legends import add_heading, heading_height, method_handle
from hesscond.report.page import COLUMN, Page
from hesscond.report.selection import select
from hesscond.report.summary import training_summary

if TYPE_CHECKING:
    import pandas as pd

    from hesscond.study.store import StoredRun


def comparison_figure(
    runs: Sequence[StoredRun], *, layer: str | None = None, unit: int | None = None, page: Page = COLUMN
) -> Figure:
    """Final training loss, and test accuracy if there is one, against the median κ: a point for each method.

    κ is that of a unit in the coordinates of the method, the median over the probed mini-batches (the training set
    where only that was probed); the bar reaches over its middle half. Of several seeds a point is the median, and the
    vertical bar the range. Where the unresolved leave the median open, it is an open marker with an arrow at its lower
    bound. Runs that were not probed, as those on which ``hesscond compare`` tries learning rates, are left out; so are
    those that diverged or have not finished, and it is said how many.

    Parameters
    ----------
    runs
        Of one study.
    layer, unit
        Which unit; the first that was probed by default.
    page
        What it is drawn for.

    Returns
    -------
    matplotlib.figure.Figure
        One panel or two.

    Raises
    ------
    ConfigError
        No finished run was probed; runs of different studies.
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

    And loss and accuracy (percent): medians over the seeds, with ``_min`` and ``_max``; accuracy is NaN if there is
    none.

    Raises
    ------
    ConfigError
        No finished run was probed; runs of different studies.
    """
    import pandas as pd

    selection = select(runs, layer, unit)
    rows = []
    for group in probed_groups(runs):
        done = group.finished
        ends = [kappa_ends(selection.rows_of(run), group) for run in done]
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


def kappa_ends(probe: pd.DataFrame, group: Group) -> tuple[np.ndarray, np.ndarray]:
    """Where the κ of a run lie: over its mini-batches, or the training set."""
    batches = probe[probe["data"] == "batch"]
    lower, upper = intervals(batches if len(batches) else probe, "kappa_own")
    return lower[~np.isnan(lower)], upper[~np.isnan(lower)]


def draw_point(ax: Axes, row: dict[str, Any], quantity: str, look: Any) -> None:
    """A marker with its bars (``LABEL-QUANTITY``); open, with an arrow, where κ is a lower bound."""
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
    """The axis of κ."""
    ax.set_xscale("log")
    ax.margins(0.08)
    ax.xaxis.set_major_locator(LogLocator(numticks=5))
    ax.xaxis.set_major_formatter(LogFormatterMathtext())
    ax.xaxis.set_minor_formatter(NullFormatter())
    ax.set_axisbelow(True)
    ax.grid(color="0.92", lw=0.4)


def remark(points: pd.DataFrame, groups: Sequence[Group]) -> str:
    """What the bars are, and what was left out."""
    parts = ["horizontal: middle half of the κ"]
    if points["seeds"].max() > 1:
        parts.append("vertical: range over seeds")
    for status in ("diverged", "unfinished"):
        if number := sum(getattr(group, status) for group in groups):
            parts.append(f"{status} and left out: {number}")
    return "; ".join(parts)
