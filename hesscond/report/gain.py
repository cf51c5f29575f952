"""The gain of preconditioning against κ(D)², which BNP's Figure 8 expects it to be about."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import LogFormatterMathtext, LogLocator, NullFormatter

from hesscond.report.axes import SAMPLES, add_heading, say_empty
from hesscond.report.page import COLUMN, Page
from hesscond.report.palette import method_colors
from hesscond.report.registry import PROBED, UNIT, FigureKind
from hesscond.report.selection import Selection, first_start, select
from hesscond.report.series import finite, gain

if TYPE_CHECKING:
    from hesscond.runs import StoredRun

#: Marker, size and opacity of a mini-batch, of which there are many, and of the training set.
LOOKS = {"batch": (".", 3.0, 0.35), "train": ("D", 4.0, 0.95)}
EXPECTED, GAIN = r"$\kappa(D)^2$", r"gain $\kappa(H)\,/\,\kappa(P^{\top}HP)$"


def gain_figure(
    runs: Sequence[StoredRun], *, layer: str | None = None, unit: int | None = None, page: Page = COLUMN
) -> Figure:
    """κ(H)/κ(PᵀHP) against κ(D)² at every probe, with P and D from the raw statistics of the same samples.

    On the diagonal the gain is κ(D)². Mini-batches are dots, the whole training set diamonds; one colour a method.
    A probe with an unresolved κ has no gain and is left out; the number of these is stated in the corner.
    """
    selection = select(runs, layer, unit)
    ordered = sorted(selection.runs, key=lambda run: (first_start([run]), run.method != "vanilla"))
    methods = list(dict.fromkeys(run.method for run in ordered))
    colors = method_colors(methods)
    with page.styled():
        figure = page.figure(2.84)
        ax = figure.add_subplot()
        left_out = draw(ax, selection, colors)
        ax.set_xlabel(EXPECTED)
        ax.set_ylabel(GAIN)
        handles = [Line2D([], [], ls="", marker="o", ms=4, color=colors[m], label=m) for m in methods]
        handles += [
            Line2D([], [], ls="", marker=marker, ms=size, color="0.3", label=SAMPLES[data])
            for data, (marker, size, _) in LOOKS.items()
        ]
        handles.append(Line2D([], [], color="0.3", lw=0.8, label=r"gain $=\kappa(D)^2$"))
        add_heading(figure, page, selection.title, handles)
        if left_out:
            ax.text(0.98, 0.02, f"{left_out} unresolved", transform=ax.transAxes, ha="right", color="0.3")
    return figure


def draw(ax: Axes, selection: Selection, colors: dict[str, str]) -> int:
    """Draw all points and the diagonal; return the number of probes without a gain."""
    left_out, drawn = 0, 0
    for run in selection.runs:
        for data, (marker, size, alpha) in LOOKS.items():
            probe = selection.probe(run, data)
            expected, found = finite(probe["kappa_D"]) ** 2, gain(probe)
            there = expected.notna() & found.notna()
            left_out, drawn = left_out + int((~there).sum()), drawn + int(there.sum())
            style: dict[str, Any] = {"ls": "", "marker": marker, "ms": size, "alpha": alpha, "mew": 0}
            ax.plot(expected[there], found[there], color=colors[run.method], **style)
    if not drawn:
        say_empty(ax, "no probe with a resolved κ")
        return left_out
    ax.set_xscale("log")
    ax.set_yscale("log")
    ends = np.array([min(ax.get_xlim()[0], ax.get_ylim()[0]), max(ax.get_xlim()[1], ax.get_ylim()[1])])
    ax.set_autoscale_on(False)
    ax.plot(ends, ends, color="0.3", lw=0.8, zorder=0)
    for axis in (ax.xaxis, ax.yaxis):
        axis.set_major_locator(LogLocator(numticks=6))
        axis.set_major_formatter(LogFormatterMathtext())
        axis.set_minor_formatter(NullFormatter())
    return left_out


def gain_axes(ax: Axes, runs: Sequence[StoredRun], *, layer: str | None = None, unit: int | None = None) -> Axes:
    """Draw the gain κ(H)/κ(PᵀHP) against κ(D)², as `gain_figure` does."""
    selection = select(runs, layer, unit)
    draw(ax, selection, method_colors(run.method for run in selection.runs))
    ax.set_xlabel(EXPECTED)
    ax.set_ylabel(GAIN)
    return ax


GAIN_FIGURE = FigureKind(
    "gain",
    "the gain κ(H)/κ(PᵀHP) of preconditioning against κ(D)², which it is expected to be about",
    PROBED,
    gain_figure,
    select,
    UNIT,
)
