"""Both ends of the spectrum of a unit's Hessian along training, and its rank."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from hesscond.errors import ConfigError
from hesscond.report.axes import (
    NEUTRAL,
    add_heading,
    drawn_values,
    heading_height,
    keep_in_view,
    label_figure,
    logarithmic,
    method_handle,
    out_of_view,
)
from hesscond.report.page import COLUMN, Page
from hesscond.report.palette import DASHED
from hesscond.report.registry import PROBED, UNIT, FigureKind
from hesscond.report.selection import Group, Selection, looks_of, probed_groups, select
from hesscond.report.series import across_seeds, finite, running_median, thinned, thinned_band, window_of

if TYPE_CHECKING:
    import pandas as pd

    from hesscond.runs import StoredRun

MARKS = 6
ENDS = {"lambda_max": "-", "lambda_min": DASHED}
NAMES = {"lambda_max": r"$\lambda_{\max}$", "lambda_min": r"$\lambda_{\min}$, where resolved"}


def eigenvalue_figure(
    runs: Sequence[StoredRun], *, layer: str | None = None, unit: int | None = None, page: Page = COLUMN
) -> Figure:
    """The largest and the smallest nonzero eigenvalue of a unit's Hessian, and its rank, over the iterations.

    The figure shows |λ| in the plain parameters, over mini-batches (over the training set where only that was probed).
    Where the rank is not resolved, no smallest nonzero eigenvalue is known, and none is drawn. Lines are running
    medians, the median over seeds in a band from the lowest to the highest. A rank that never changes is stated below
    the figure, in place of a panel.
    """
    selection = eigenvalues_logged(runs, layer=layer, unit=unit)
    groups = [group for group in probed_groups(runs) if any(len(selection.rows_of(run)) for run in group.runs)]
    looks = looks_of(groups)
    data, window = data_of(selection), window_of(max(int(p["iteration"].max()) for p in selection.probes if len(p)))
    ranks = {float(r) for group in groups for run in group.runs for r in selection.probe(run, data)["rank"].dropna()}
    changing = len(ranks) > 1
    with page.styled():
        rows, columns = (1, 1 + changing) if page.wide else (1 + changing, 1)
        labels = [*(group.label for group in groups), *NAMES.values()]
        figure = page.figure(0.5 + 1.5 * rows + heading_height(labels, page))
        axes = figure.subplots(rows, columns, sharex=True, squeeze=False).ravel()
        top, bottom = axes[0], axes[-1]
        top.set_yscale("log", nonpositive="mask")
        for group in groups:
            probes = [selection.probe(run, data) for run in group.runs]
            for column, dash in ENDS.items():
                draw(top, group, [end_of(probe, column) for probe in probes], looks, dash, window, column)
            if changing:
                draw(bottom, group, [probe["rank"].astype(float) for probe in probes], looks, "-", 1, "rank")
        keep_in_view(top, drawn_values(top))
        logarithmic(top)
        top.set_ylabel(r"$|\lambda|$ of $\nabla^2 L$")
        if changing:
            bottom.set_ylabel("rank")
            bottom.yaxis.set_major_locator(MaxNLocator(5, integer=True))
        for ax in axes:
            ax.xaxis.set_major_locator(MaxNLocator(5, steps=[1, 2, 2.5, 5, 10], integer=True))
            ax.set_axisbelow(True)
            ax.grid(axis="y", color="0.92", lw=0.4)
        for ax in axes if page.wide else axes[-1:]:
            ax.set_xlabel("iteration")
        handles = [method_handle(group.label, looks[group.label]) for group in groups]
        handles += [Line2D([], [], color=NEUTRAL, ls=dash, label=NAMES[name]) for name, dash in ENDS.items()]
        add_heading(figure, page, selection.title, handles)
        where = {"batch": "mini-batches", "train": "training set"}[data]
        constant = [f"rank {next(iter(ranks)):.0f} throughout"] if len(ranks) == 1 else []
        median = [f"running median of {window}"] if window > 1 else []
        parts = [where, *constant, *median, *out_of_view([top])]
        label_figure(figure, page, None, "; ".join(parts))
    return figure


def eigenvalues_logged(runs: Sequence[StoredRun], *, layer: str | None = None, unit: int | None = None) -> Selection:
    """Probe rows to show; a ConfigError if no eigenvalue was logged."""
    selection = select(runs, layer, unit)
    if not any(finite(probe["lambda_max"]).notna().any() for probe in selection.probes):
        raise ConfigError("no eigenvalue is in the logs of the runs: probe them with --probe-every 1 or more")
    return selection


def data_of(selection: Selection) -> str:
    """The kind of data to show: mini-batches if any were probed, else the training set."""
    return "batch" if any((probe["data"] == "batch").any() for probe in selection.probes) else "train"


def end_of(probe: pd.DataFrame, column: str) -> pd.Series:
    """|λ| at one end, NaN where it is not known."""
    values = finite(probe[column]).abs()
    return values if column == "lambda_max" else values.where(probe["resolved"].fillna(False).astype(bool))


def draw(
    ax: Axes, group: Group, curves: Sequence[pd.Series], looks: Any, dash: Any, window: int, quantity: str
) -> None:
    """Draw median and band of the seeds (``LABEL-QUANTITY``)."""
    there = [running_median(curve, window) for curve in curves if curve.notna().any()]
    if not there:
        return
    look, together = looks[group.label], across_seeds(there)
    if len(there) > 1:
        band = thinned_band(together)
        ax.fill_between(band.index, band["low"], band["high"], color=look.color, alpha=0.18, lw=0, zorder=2)
    median = thinned(together["median"])
    every = max(1, len(median) // MARKS)
    style: dict[str, Any] = {"marker": look.marker, "markevery": every, "ms": 3.0, "mew": 0.4, "mec": "white"}
    name = f"{group.label}-{quantity}"
    ax.plot(median.index, np.asarray(median), color=look.color, ls=dash, lw=1.0, zorder=3, gid=name, **style)


EIGENVALUES_FIGURE = FigureKind(
    "spectra",
    "largest and smallest nonzero eigenvalue of a unit's Hessian, and its rank, along training",
    PROBED,
    eigenvalue_figure,
    eigenvalues_logged,
    UNIT,
)
