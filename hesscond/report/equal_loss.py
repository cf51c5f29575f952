"""Figure of training loss, and of κ in each method's own coordinates against the training loss at which it was met."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import LogFormatterMathtext, LogLocator, NullFormatter, NullLocator, ScalarFormatter

from hesscond.report import plotting, registry, selection, series, verdict
from hesscond.report.page import Page
from hesscond.report.palette import MethodLook

if TYPE_CHECKING:
    from hesscond.runs import StoredRun

#: Panels side by side; at the 300 dots an inch of a PNG twice the 800 pixels that a web page shows.
TWO_PANELS = Page(5.35)
#: More methods than this are drawn without κ(H), which would hide their lines.
TOGETHER = 2
LOSS = plotting.Look("training loss")
OWN, PLAIN = r"$\kappa$ in own coordinates", r"$\kappa(H)$ of the same run"


def equal_loss_figure(
    runs: Sequence[StoredRun], *, layer: str | None = None, unit: int | None = None, page: Page = TWO_PANELS
) -> Figure:
    """Training loss over the iterations, and κ against the training loss: methods compared at equal loss.

    On the right, lines are medians of κ in the method's own coordinates over the probes in each interval of loss, bands
    are their interquartile ranges, and triangles are lower bounds of medians that unresolved values leave open. With at
    most two methods, κ(H) is dotted where it is a different number. Runs that diverged or collapsed are left out,
    and if nothing else is left only their losses are drawn. The verdict is printed below.
    """
    chosen = selection.select(runs, layer, unit)
    groups, left_out = verdict.compared_groups(runs)
    together = [group for group, _ in groups] or selection.probed_groups(runs)
    looks = selection.looks_of(together)
    with page.styled():
        figure = page.figure(2.6 if page.wide else 4.6)
        left, right = figure.subplots(1, 2, width_ratios=(1, 1.3)) if page.wide else figure.subplots(2, 1)
        for group, members in groups:
            color = looks[group.label].color
            curves = [series.loss_of(run) for run in members]
            plotting.draw_curve(
                left, curves, LOSS, color, series.window_of(max(map(len, curves))), f"{group.label}-loss"
            )
        if not groups:
            for group in together:
                curves = [series.loss_of(run) for run in group.runs]
                plotting.draw_seeds(left, group, curves, looks[group.label], "-", f"{group.label}-loss")
        left.set(yscale="log", xlabel="iteration", ylabel=f"training {plotting.loss_name(runs)}")
        plotting.along_iterations(left)
        plotting.logarithmic(left) if left.lines else plotting.say_empty(left, "no finite loss")
        shown = ["kappa_own", "kappa"] if len(groups) <= TOGETHER else ["kappa_own"]
        probes = {group.label: verdict.Probes.of(chosen, members) for group, members in groups}
        losses = np.concatenate([probe_set.loss[probe_set.loss > 0] for probe_set in probes.values()] or [np.zeros(0)])
        width = 1 / verdict.intervals_per_decade(losses.min(), losses.max()) if len(losses) else 1.0
        drawn = [
            quantity
            for label, probe_set in probes.items()
            for quantity in shown
            if draw_against_loss(right, probe_set, quantity, looks[label], label, width)
        ]
        right.set(xlabel="training loss (falls to the right)", ylabel="condition number")
        if drawn:
            right.set(xscale="log", yscale="log")
            plotting.fit_logarithmic(right)
            low, high = right.get_xlim()
            right.invert_xaxis()
            decades = high / low > 30
            right.xaxis.set_major_locator(LogLocator(subs=(1,) if decades else (1, 2, 5), numticks=7))
            right.xaxis.set_major_formatter(LogFormatterMathtext() if decades else ScalarFormatter(useOffset=False))
            right.xaxis.set_minor_formatter(NullFormatter())
        else:
            plotting.say_empty(right, "not probed" if groups else "κ is not compared: see below")
            right.xaxis.set_major_locator(NullLocator())
        for ax in (left, right):
            ax.spines[["top", "right"]].set_visible(False)
            ax.grid(axis="y", color="0.92", lw=0.4)
            ax.set_axisbelow(True)
        handles = [plotting.method_handle(group.label, looks[group.label]) for group in together]
        if "kappa" in drawn:
            styles = ((OWN, "-"), (PLAIN, ":"))
            handles += [Line2D([], [], color=plotting.NEUTRAL, lw=1.1, ls=ls, label=label) for label, ls in styles]
        plotting.add_heading(figure, page, chosen.title, handles)
        sentences: Sequence[str] = left_out if not groups else ()
        if 0 < len(groups) <= TOGETHER:
            sentences = verdict.verdict_sentences(runs, layer=layer, unit=unit)[: max(1, len(groups) - 1)]
        plotting.label_figure(figure, page, " ".join([*sentences, *plotting.out_of_view([left, right])]))
    return figure


def draw_against_loss(
    ax: Axes, probes: verdict.Probes, quantity: str, look: MethodLook, name: str, width: float
) -> bool:
    """Draw quartiles of a κ in intervals of loss, ``width`` decades each; False if there are none, or κ(H) is κ own."""
    mask = probes.measured(quantity)
    if quantity == "kappa" and np.array_equal(probes.lower["kappa"], probes.lower["kappa_own"], equal_nan=True):
        return False
    bins = probes.bins(1 / width)
    places = np.unique(bins[mask])
    if not len(places):
        return False
    inside = [mask & (bins == place) for place in places]
    ends = [
        [series.quantile(probes.lower[quantity][rows], probes.upper[quantity][rows], q) for q in verdict.QUARTILES]
        for rows in inside
    ]
    loss = 10 ** ((places + 0.5) * width)
    low, median, high = np.array([[end[0] for end in quartiles] for quartiles in ends]).T
    known = np.array([quartiles[1][0] == quartiles[1][1] for quartiles in ends])
    plain = quantity == "kappa"
    label = f"{name}-{quantity}"
    ax.plot(loss, np.where(known, median, np.nan), color=look.color, lw=1.1, ls=":" if plain else "-", gid=label)
    if not plain:
        ax.fill_between(loss, low, np.where(known, high, low), color=look.color, alpha=0.2, lw=0)
        style: dict[str, Any] = {"marker": "^", "mfc": "none", "ms": 3.5, "mew": 0.7, "ls": "none", "color": look.color}
        ax.plot(loss[~known], median[~known], gid=f"{label}-unresolved", **style)
    return True


EQUAL_LOSS_FIGURE = registry.FigureKind(
    "equal-loss",
    10,
    "training loss, and κ of each method against the training loss at which it was measured",
    registry.PROBED,
    equal_loss_figure,
    registry.UNIT,
)
