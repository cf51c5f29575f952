"""Curves along training: loss and accuracy, condition numbers of a unit, both ends of its spectrum; gain against κ(D)².

Mini-batches are lines, the whole training set markers; colours tell methods apart.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import LogFormatterMathtext, LogLocator, MaxNLocator, NullFormatter

from hesscond.errors import ConfigError
from hesscond.report.axes import (
    NEUTRAL,
    SAMPLES,
    Look,
    add_heading,
    add_legend,
    along,
    along_iterations,
    draw_band,
    draw_curve,
    draw_points,
    draw_unresolved,
    drawn_values,
    heading_height,
    keep_in_view,
    label_figure,
    logarithmic,
    method_handle,
    out_of_view,
    panels,
    say_empty,
)
from hesscond.report.page import COLUMN, Page
from hesscond.report.palette import DASHED, MethodLook, method_colors
from hesscond.report.registry import PROBED, STUDY, UNIT, FigureKind
from hesscond.report.selection import (
    Group,
    Selection,
    first_start,
    groups_of,
    looks_of,
    probed_groups,
    select,
    title_of,
)
from hesscond.report.series import (
    RESOLVED,
    expected,
    finite,
    gain,
    loss_of,
    lower_bounds,
    mean_over_seeds,
    means_of_stretches,
    resolved_values,
    thinned,
    window_of,
)

if TYPE_CHECKING:
    import pandas as pd

    from hesscond.runs import StoredRun

# --- loss and accuracy ------------------------------------------------------------------------------------------------

#: Most points of a curve of mini-batch losses: means over stretches of iterations.
STRETCHES = 50
#: Up to this number of evaluations are drawn as points: a line would suggest values between them.
FEW = 3
LOSSES = {"train": DASHED, "test": "-"}


def training_figure(runs: Sequence[StoredRun], *, page: Page = COLUMN) -> Figure:
    """Training and test loss, and test accuracy if there is one, over the iterations.

    Train is dashed, test solid. A line is the mean over the seeds, its band reaches from the lowest to the highest. A
    run that diverged enters neither: it is a separate thin line that ends in a cross. Mini-batch losses are averaged
    over stretches of iterations, whose length is stated below the figure.
    """
    groups = trained_groups(runs)
    measured = any(len(curve) for group in groups for curve in accuracies_of(group))
    width = stretch(groups)
    looks = looks_of(groups)
    with page.styled():
        columns = 2 if measured and page.wide else 1
        labels = [*map(with_diverged, groups), *LOSSES, "diverged"]
        figure = page.figure(0.5 + 1.6 * (1 + measured) / columns + heading_height(labels, page))
        axes = panels(figure, 1 + measured, columns)
        draw_loss(axes[0], groups, width)
        if measured:
            draw_accuracy(axes[1], groups)
        handles = [method_handle(with_diverged(group), looks[group.label]) for group in groups]
        handles += [Line2D([], [], color=NEUTRAL, ls=dash, label=name) for name, dash in LOSSES.items()]
        if any(group.diverged for group in groups):
            handles.append(Line2D([], [], color=NEUTRAL, marker="x", ls="none", ms=4, label="diverged"))
        add_heading(figure, page, title_of(groups), handles)
        remark = f"train: mini-batches, means of {width} iterations" if width > 1 else "train: mini-batches"
        most = max(len(group.runs) - group.diverged for group in groups)
        seeds = [f"lines: mean over up to {most} seeds; bands: lowest to highest"] if most > 1 else []
        label_figure(figure, page, None, "; ".join([remark, *seeds, *out_of_view(axes[:1])]))
    return figure


def trained_groups(runs: Sequence[StoredRun]) -> list[Group]:
    """Groups of the runs; a ConfigError if none of them has anything to show."""
    groups = groups_of(runs)
    if not any(run.iterations or len(run.table("evaluation")) for run in runs):
        raise ConfigError(
            "none of the runs has a training loss: draw it when they have trained (a watch logs the loss that "
            "watch.step(loss) is given)"
        )
    return groups


def with_diverged(group: Group) -> str:
    """Label of a group, with the number of runs that diverged."""
    if not group.diverged:
        return group.label
    count = f"{group.diverged} of {len(group.runs)} " if len(group.runs) > 1 else ""
    return f"{group.label} ({count}diverged)"


def accuracies_of(group: Group) -> list[pd.Series]:
    """The test accuracy in percent of each run by iteration; empty where a study has none."""
    return [100 * run.table("evaluation").set_index("iteration")["test_accuracy"].dropna() for run in group.runs]


def stretch(groups: Sequence[Group]) -> int:
    """Number of iterations over which mini-batch losses are averaged."""
    return max(1, max((len(loss_of(run)) for group in groups for run in group.runs), default=1) // STRETCHES)


def draw_loss(ax: Axes, groups: Sequence[Group], width: int) -> None:
    """Draw training loss, as means over ``width`` iterations, and test loss on a logarithmic axis."""
    looks = looks_of(groups)
    ax.set_yscale("log", nonpositive="mask")
    for group in groups:
        train = [means_of_stretches(loss_of(run), width) for run in group.runs]
        test = [finite(run.table("evaluation").set_index("iteration")["test_loss"]) for run in group.runs]
        draw_seeds(ax, group, train, looks[group.label], DASHED, f"{group.label}-train-loss")
        draw_seeds(ax, group, test, looks[group.label], "-", f"{group.label}-test-loss")
    keep_in_view(ax, drawn_values(ax))
    logarithmic(ax)
    ax.set_ylabel("loss")
    along_iterations(ax)


def draw_accuracy(ax: Axes, groups: Sequence[Group]) -> None:
    """Draw test accuracy in percent."""
    looks = looks_of(groups)
    for group in groups:
        draw_seeds(ax, group, accuracies_of(group), looks[group.label], "-", f"{group.label}-accuracy")
    ax.set_ylabel("test accuracy (%)")
    ax.yaxis.set_major_locator(MaxNLocator(5))
    along_iterations(ax)


def draw_seeds(ax: Axes, group: Group, curves: Sequence[pd.Series], look: MethodLook, dash: Any, name: str) -> None:
    """Draw mean and band of runs that did not diverge (``NAME-mean``, ``NAME-band``), and each diverged one."""
    there = [(curve, run.status == "diverged") for curve, run in zip(curves, group.runs, strict=True)]
    whole, broken = ([c for c, diverged in there if diverged == bad and c.notna().any()] for bad in (False, True))
    if whole:
        together = mean_over_seeds(whole)
        if len(whole) > 1:
            draw_band(ax, together, look.color, name)
        mean = thinned(together["mean"])
        style = along(look.marker, len(mean)) | {"ls": dash if len(mean) > FEW else "none", "lw": 1.0}
        ax.plot(mean.index, mean, color=look.color, zorder=3, gid=f"{name}-mean", **style)
    for number, curve in enumerate(broken):
        drawn = thinned(curve.dropna())
        ax.plot(drawn.index, drawn, color=look.color, ls=dash, lw=0.5, zorder=3, gid=f"{name}-diverged-{number}")
        end: dict[str, Any] = {"marker": "x", "ms": 4, "ls": "none", "zorder": 4}
        ax.plot(drawn.index[-1:], drawn.iloc[-1:], color=look.color, gid=f"{name}-end-{number}", **end)


def loss_axes(ax: Axes, runs: Sequence[StoredRun]) -> Axes:
    """Draw training loss (dashed) and test loss (solid), as `training_figure` does."""
    groups = trained_groups(runs)
    draw_loss(ax, groups, stretch(groups))
    ax.set_xlabel("iteration")
    return ax


def accuracy_axes(ax: Axes, runs: Sequence[StoredRun]) -> Axes:
    """Draw test accuracy in percent, as `training_figure` does."""
    draw_accuracy(ax, trained_groups(runs))
    ax.set_xlabel("iteration")
    return ax


# --- condition numbers of a unit --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Curve:
    """A quantity of the probe table: its look, and its values in the rows of a run."""

    look: Look
    values: Callable[[pd.DataFrame], pd.Series]


#: Quantities of the figure of conditioning; those whose κ may be unresolved are keys of `RESOLVED`.
CURVES = {
    "kappa": Curve(Look(r"$\kappa(H)$"), lambda probe: resolved_values(probe, "kappa")),
    "kappa_preconditioned": Curve(
        Look(r"$\kappa(P^{\top}HP)$", dash=(0, (3.2, 1.4)), marker="s", barred=True),
        lambda probe: resolved_values(probe, "kappa_preconditioned"),
    ),
    "expected": Curve(
        Look(r"$\kappa(H)/\kappa(D)^2$", dash=(0, (0.8, 1.2)), marker="x", width=0.9, raw=False), expected
    ),
    "kappa_D": Curve(Look(r"$\kappa(D)$"), lambda probe: finite(probe["kappa_D"])),
    "kappa_D_running_eps": Curve(
        Look(r"$\kappa(D)$ of running averages, with $\varepsilon$", dash=(0, (5, 1.2, 1, 1.2)), raw=False),
        lambda probe: finite(probe["kappa_D_running_eps"]),
    ),
}
TOGETHER = ("kappa", "kappa_preconditioned", "expected")
SCALING = ("kappa_D", "kappa_D_running_eps")
#: Explanation of the dotted lines.
CLAIM = r"dotted: what BNP expects of $\kappa(P^{\top}HP)$"
LOSS, ACCURACY = Look("training loss"), Look("test accuracy", marker="D")
#: Largest spread, in points, of the markers of all methods at one iteration; rows of methods in a column of the legend.
DODGE, ROWS = 12.0, 4


def conditioning_figure(
    runs: Sequence[StoredRun], *, layer: str | None = None, unit: int | None = None, page: Page = COLUMN
) -> Figure:
    """Training loss and test accuracy, κ(H) and κ(PᵀHP), and κ(D) of one unit over the iterations.

    P is that of the raw statistics of the same samples and D its scaling, whatever the method: κ in a method's own
    coordinates is in the figure of layers. One panel below the other at the width of a journal column, side by side
    across a page. Below the loss, lines are the mini-batches (``data == "batch"``) and markers the whole training set
    (``data == "train"``); κ(H) is solid and round, κ(PᵀHP) dashed and square, the κ(H)/κ(D)² that the paper expects of
    it dotted and crossed. With more than two methods κ(H) and κ(PᵀHP) have a panel each, of the same scale, without
    what is expected (`gain_figure` has it). An unresolved κ is an open triangle at its lower bound and no part of any
    line. Lines are running medians, over faint single values for one run of a method, in a band from the lowest to the
    highest for several seeds.
    """
    selection, groups = unit_of_groups(runs, layer=layer, unit=unit)
    last = [int(loss.index[-1]) for run in selection.runs if len(loss := loss_of(run))]
    window = window_of(max([*last, *(int(p["iteration"].iloc[-1]) for p in selection.probes if len(p))], default=0))
    apart = len(groups) > 2
    shown = [TOGETHER[:1], TOGETHER[1:2], SCALING] if apart else [TOGETHER, SCALING]
    with page.styled():
        figure, axes = stacked(page, 1 + len(shown))
        draw_training(axes[0], groups, window)
        drawn = [draw_quantities(ax, selection, groups, window, s) for ax, s in zip(axes[1:], shown, strict=True)]
        axes[1].set_ylabel(CURVES["kappa"].look.label if apart else "condition number")
        if apart:
            axes[2].set_ylabel(CURVES["kappa_preconditioned"].look.label)
            axes[1].sharey(axes[2])
        axes[-1].set_ylabel(CURVES["kappa_D"].look.label)
        for letter, ax in zip("abcd", axes, strict=False):
            ax.text(-0.02, 1.03, f"({letter})", transform=ax.transAxes, ha="right", weight="bold")
            along_iterations(ax, 6)
            place = ax.get_subplotspec()
            assert place is not None
            ax.set_xlabel("iteration" if place.is_last_row() else "")
            ax.tick_params(labelbottom=place.is_last_row())
        parts = [remark(groups, window), CLAIM if "expected" in drawn[0] else "", *out_of_view(axes)]
        label_figure(figure, page, selection.title, "; ".join(filter(None, parts)))
        figure.align_ylabels(axes)
    return figure


def unit_of_groups(
    runs: Sequence[StoredRun], *, layer: str | None = None, unit: int | None = None
) -> tuple[Selection, list[Group]]:
    """The rows of a unit, and the groups of runs."""
    return select(runs, layer, unit), groups_of(runs)


def stacked(page: Page, count: int) -> tuple[Figure, list[Axes]]:
    """Figure with three or four panels: below one another, or in two columns on a wide page."""
    if page.wide:
        figure = page.figure(4.6, hspace=0.0)
        mosaic = figure.subplot_mosaic("ab;cd" if count == 4 else "ab;cb", sharex=True)
        axes = [mosaic[letter] for letter in "abcd"[:count]]
    else:
        figure = page.figure(7.8 if count == 4 else 6.4, hspace=0.0)
        heights = (1.0, 1.2, 1.2, 1.0) if count == 4 else (1.0, 1.45, 1.0)
        axes = list(figure.subplots(count, 1, sharex=True, height_ratios=heights))
    return figure, axes


def remark(groups: Sequence[Group], window: int) -> str:
    """Remark on lines, faint values and bands."""
    parts = [f"lines: running median of {window} iterations"] if window > 1 else []
    sizes = sorted({len(group.runs) for group in groups})
    if sizes[-1] > 1:
        count = "–".join(str(size) for size in dict.fromkeys((sizes[0], sizes[-1])))
        parts.append(f"bands: range of {count} seeds")
    elif parts:
        parts.append("faint: single values")
    return "; ".join(parts)


def dodge(place: int, groups: Sequence[Group]) -> float:
    """Offset of a method's markers to the right, in points, so that none hides another's."""
    return min(3.0, DODGE / len(groups)) * (place - (len(groups) - 1) / 2)


def draw_training(ax: Axes, groups: Sequence[Group], window: int) -> None:
    """Draw training loss, and test accuracy on the right."""
    colors = {label: look.color for label, look in looks_of(groups).items()}
    ax.set_yscale("log", nonpositive="mask")
    loss = groups[0].runs[0].config["training"].get("loss", "cross_entropy")
    ax.set_ylabel("squared error" if loss == "mse" else "loss (nats)")
    names: list[Line2D | None] = [Line2D([], [], color=colors[label], lw=2.4, label=label) for label in colors]
    kinds: list[Line2D] = []
    losses = {group.label: list(map(loss_of, group.runs)) for group in groups}
    drawn = [draw_curve(ax, own, LOSS, colors[label], window, f"{label}-loss") for label, own in losses.items()]
    if any(drawn):
        keep_in_view(ax, drawn_values(ax))
        logarithmic(ax)
        kinds.append(LOSS.line_handle())
    else:
        say_empty(ax, "not trained")
    # there is no accuracy where values are predicted
    if any(len(curve) for group in groups for curve in accuracies_of(group)):
        right = ax.twinx()
        right.set_ylabel("test accuracy (%)")
        for place, group in enumerate(groups):
            color, name = colors[group.label], f"{group.label}-accuracy"
            draw_points(right, accuracies_of(group), ACCURACY, color, name, dodge(place, groups))
        right.margins(x=0.035, y=0.08)
        right.yaxis.set_major_locator(MaxNLocator(5))
        kinds.append(ACCURACY.marker_handle())
    columns = [names[start : start + ROWS] for start in range(0, len(names), ROWS)]
    few = len(columns) < 3
    add_legend(ax, [*columns, kinds] if few else columns, [] if few else kinds)


def draw_quantities(
    ax: Axes, selection: Selection, groups: Sequence[Group], window: int, shown: Sequence[str]
) -> dict[str, Line2D]:
    """Draw some of `CURVES` for mini-batches and training set, on a logarithmic axis; return the entries of lines."""
    looks = looks_of(groups)
    ax.set_yscale("log", nonpositive="mask")
    lines: dict[str, Line2D] = {}
    markers: dict[str, Line2D] = {}
    triangles: dict[str, Line2D] = {}
    for data in ("batch", "train"):
        for place, group in enumerate(groups):
            shift = dodge(place, groups) if data == "train" else 0.0
            probes = [selection.probe(run, data) for run in group.runs]
            for quantity in shown:
                look, name = CURVES[quantity].look, f"{group.label}-{quantity}-{data}"
                color = looks[group.label].color
                curves = list(map(CURVES[quantity].values, probes))
                if data == "batch" and draw_curve(ax, curves, look, color, window, name):
                    lines[quantity] = look.line_handle("" if quantity == SCALING[1] else data)
                # running averages are not those of the training set
                if data == "train" and quantity != SCALING[1] and draw_points(ax, curves, look, color, name, shift):
                    markers[quantity] = look.marker_handle(data)
                if quantity in RESOLVED:
                    bounds = [lower_bounds(probe, quantity) for probe in probes]
                    if draw_unresolved(ax, bounds, look, data, color, name, shift):
                        triangles[quantity + data] = look.unresolved_handle(data)
    # entries of batches and training set side by side, longer ones below
    below = [lines[SCALING[1]]] if SCALING[1] in lines else []
    rows = [(lines.get(q), markers.get(q)) for q in shown if q in {*lines, *markers} and q != SCALING[1]]
    columns = [column for side in (0, 1) if any(column := [row[side] for row in rows])]
    if rows or below or triangles:
        keep_in_view(ax, drawn_values(ax))
        logarithmic(ax)
        add_legend(ax, columns, [*below, *triangles.values()])
    else:
        say_empty(ax, "not probed")
    return lines


# --- gain -------------------------------------------------------------------------------------------------------------

#: Marker, size and opacity of a mini-batch, of which there are many, and of the training set.
POINTS = {"batch": (".", 3.0, 0.35), "train": ("D", 4.0, 0.95)}


def gain_figure(
    runs: Sequence[StoredRun], *, layer: str | None = None, unit: int | None = None, page: Page = COLUMN
) -> Figure:
    """κ(H)/κ(PᵀHP) against κ(D)² at every probe, with P and D from the raw statistics of the same samples.

    On the diagonal the gain is κ(D)². Mini-batches are dots, the whole training set diamonds; one colour a method.
    A probe with an unresolved κ has no gain and is left out; the number of these is stated in the corner.
    """
    selection = select(runs, layer, unit)
    ordered = sorted(selection.runs, key=lambda run: (first_start([run]), run.method != "vanilla"))
    colors = method_colors(run.method for run in ordered)
    with page.styled():
        figure = page.figure(2.84)
        ax = figure.add_subplot()
        left_out = draw_gain(ax, selection)
        methods = dict.fromkeys(run.method for run in ordered)
        handles = [Line2D([], [], ls="", marker="o", ms=4, color=colors[m], label=m) for m in methods]
        handles += [
            Line2D([], [], ls="", marker=marker, ms=size, color="0.3", label=SAMPLES[data])
            for data, (marker, size, _) in POINTS.items()
        ]
        handles.append(Line2D([], [], color="0.3", lw=0.8, label=r"gain $=\kappa(D)^2$"))
        add_heading(figure, page, selection.title, handles)
        if left_out:
            ax.text(0.98, 0.02, f"{left_out} unresolved", transform=ax.transAxes, ha="right", color="0.3")
    return figure


def draw_gain(ax: Axes, selection: Selection) -> int:
    """Draw all points and the diagonal; return the number of probes without a gain."""
    colors = method_colors(run.method for run in selection.runs)
    left_out, drawn = 0, 0
    for run in selection.runs:
        for data, (marker, size, alpha) in POINTS.items():
            probe = selection.probe(run, data)
            squared, found = finite(probe["kappa_D"]) ** 2, gain(probe)
            there = squared.notna() & found.notna()
            left_out, drawn = left_out + int((~there).sum()), drawn + int(there.sum())
            style: dict[str, Any] = {"ls": "", "marker": marker, "ms": size, "alpha": alpha, "mew": 0}
            ax.plot(squared[there], found[there], color=colors[run.method], **style)
    ax.set_xlabel(r"$\kappa(D)^2$")
    ax.set_ylabel(r"gain $\kappa(H)\,/\,\kappa(P^{\top}HP)$")
    if not drawn:
        say_empty(ax, "no probe with a resolved κ")
        return left_out
    ax.set(xscale="log", yscale="log")
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
    draw_gain(ax, select(runs, layer, unit))
    return ax


# --- spectrum ---------------------------------------------------------------------------------------------------------

ENDS = {
    "lambda_max": Look(r"$\lambda_{\max}$", width=1.0, raw=False),
    "lambda_min": Look(r"$\lambda_{\min}$, where resolved", dash=DASHED, width=1.0, raw=False),
}
RANK = Look("rank", width=1.0, raw=False)


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
    data = "batch" if any((probe["data"] == "batch").any() for probe in selection.probes) else "train"
    window = window_of(max(int(probe["iteration"].max()) for probe in selection.probes if len(probe)))
    probes = {group.label: [selection.probe(run, data) for run in group.runs] for group in groups}
    ranks = {float(rank) for own in probes.values() for probe in own for rank in probe["rank"].dropna()}
    changing = len(ranks) > 1
    with page.styled():
        columns = 2 if changing and page.wide else 1
        labels = [*probes, *(look.label for look in ENDS.values())]
        figure = page.figure(0.5 + 1.5 * (1 + changing) / columns + heading_height(labels, page))
        axes = panels(figure, 1 + changing, columns)
        axes[0].set_yscale("log", nonpositive="mask")
        for label, own in probes.items():
            method = looks[label]
            for column, look in ENDS.items():
                curves = [end_of(probe, column) for probe in own]
                draw_curve(axes[0], curves, look, method.color, window, f"{label}-{column}", method.marker)
            if changing:
                curves = [probe["rank"].astype(float) for probe in own]
                draw_curve(axes[1], curves, RANK, method.color, 1, f"{label}-rank", method.marker)
        keep_in_view(axes[0], drawn_values(axes[0]))
        logarithmic(axes[0])
        axes[0].set_ylabel(r"$|\lambda|$ of $\nabla^2 L$")
        if changing:
            axes[1].set_ylabel("rank")
            axes[1].yaxis.set_major_locator(MaxNLocator(5, integer=True))
        for ax in axes:
            along_iterations(ax)
        handles = [method_handle(label, looks[label]) for label in probes]
        add_heading(figure, page, selection.title, [*handles, *(look.line_handle() for look in ENDS.values())])
        parts = [{"batch": "mini-batches", "train": "training set"}[data]]
        parts += [f"rank {next(iter(ranks)):.0f} throughout"] if len(ranks) == 1 else []
        parts += [f"running median of {window}"] if window > 1 else []
        label_figure(figure, page, None, "; ".join([*parts, *out_of_view(axes[:1])]))
    return figure


def eigenvalues_logged(runs: Sequence[StoredRun], *, layer: str | None = None, unit: int | None = None) -> Selection:
    """Probe rows to show; a ConfigError if no eigenvalue was logged."""
    selection = select(runs, layer, unit)
    if not any(finite(probe["lambda_max"]).notna().any() for probe in selection.probes):
        raise ConfigError("no eigenvalue is in the logs of the runs: probe them with --probe-every 1 or more")
    return selection


def end_of(probe: pd.DataFrame, column: str) -> pd.Series:
    """|λ| at one end, NaN where it is not known."""
    values = finite(probe[column]).abs()
    return values if column == "lambda_max" else values.where(probe["resolved"].fillna(False).astype(bool))


TRAINING_FIGURE = FigureKind(
    "training",
    "training and test loss, and test accuracy, the mean over seeds in a band from the lowest to the highest",
    STUDY,
    training_figure,
    trained_groups,
)

CONDITIONING_FIGURE = FigureKind(
    "conditioning",
    "training loss, κ(H) against κ(PᵀHP), and κ(D) of one unit along training",
    STUDY,
    conditioning_figure,
    unit_of_groups,
    UNIT,
)

GAIN_FIGURE = FigureKind(
    "gain",
    "the gain κ(H)/κ(PᵀHP) of preconditioning against κ(D)², which it is expected to be about",
    PROBED,
    gain_figure,
    select,
    UNIT,
)

EIGENVALUES_FIGURE = FigureKind(
    "spectra",
    "largest and smallest nonzero eigenvalue of a unit's Hessian, and its rank, along training",
    PROBED,
    eigenvalue_figure,
    eigenvalues_logged,
    UNIT,
)
