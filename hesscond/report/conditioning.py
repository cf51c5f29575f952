"""Loss, condition numbers and κ(D) over a training run: Figure 8 of Lange, Helfrich and Ye (2022)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from hesscond.report.axes import (
    Look,
    add_legend,
    draw_curve,
    draw_points,
    draw_unresolved,
    drawn_values,
    keep_in_view,
    label_figure,
    logarithmic,
    out_of_view,
    say_empty,
)
from hesscond.report.page import COLUMN, Page
from hesscond.report.palette import method_colors
from hesscond.report.registry import UNIT, FigureKind
from hesscond.report.selection import Selection, by_method, select
from hesscond.report.series import RESOLVED, expected, finite, loss_of, lower_bounds, resolved_values, window_of

if TYPE_CHECKING:
    import pandas as pd

    from hesscond.runs import StoredRun

#: Largest spread, in points, of the markers of all methods at one iteration.
DODGE = 12.0
#: Rows of methods in a column of the legend.
ROWS = 4

#: Most methods whose κ(H) and κ(PᵀHP) are told apart in one panel.
TOGETHER = 2

LOSS = Look("training loss")
ACCURACY = Look("test accuracy", marker="D")
KAPPA = {
    "kappa": Look(r"$\kappa(H)$"),
    "kappa_preconditioned": Look(r"$\kappa(P^{\top}HP)$", dash=(0, (3.2, 1.4)), marker="s", barred=True),
    "expected": Look(r"$\kappa(H)/\kappa(D)^2$", dash=(0, (0.8, 1.2)), marker="x", width=0.9, raw=False),
}
#: Explanation of the dotted lines.
CLAIM = r"dotted: what BNP expects of $\kappa(P^{\top}HP)$"
#: Quantities that have a separate panel each.
SEPARATE = {name: Look(KAPPA[name].label) for name in ("kappa", "kappa_preconditioned")}
KAPPA_D = Look(r"$\kappa(D)$")
RUNNING = Look(r"$\kappa(D)$ of running averages, with $\varepsilon$", dash=(0, (5, 1.2, 1, 1.2)), raw=False)


def conditioning_figure(
    runs: Sequence[StoredRun], *, layer: str | None = None, unit: int | None = None, page: Page = COLUMN
) -> Figure:
    """Training loss and test accuracy, κ(H) and κ(PᵀHP), and κ(D) of one unit over the iterations.

    P is that of the raw statistics of the same samples and D its scaling, whatever the method: κ in a method's own
    coordinates is in the figures of layers and of methods side by side. One panel below the other at the width of a
    journal column, side by side across a page. Colours tell methods apart. Below the loss, lines are the mini-batches
    (``data == "batch"``) and markers the whole training set (``data == "train"``); κ(H) is solid and round, κ(PᵀHP)
    dashed and square, the κ(H)/κ(D)² that the paper expects of it dotted and crossed. With more than two methods κ(H)
    and κ(PᵀHP) have a panel each, of the same scale, without what is expected (`gain_figure` has it). An unresolved κ
    is an open triangle at its lower bound and no part of any line. Lines are running medians, over faint single values
    for one run of a method, in a band from the lowest to the highest for several seeds.
    """
    selection = select(runs, layer, unit)
    groups = selection.by_method()
    losses = {method: [loss_of(run) for run in members] for method, members in groups.items()}
    window = window_of(last_iteration(selection, losses))
    apart = len(groups) > TOGETHER
    with page.styled():
        figure, axes = panels(page, apart)
        draw_training(axes["a"], groups, losses, window)
        claim = ""
        if apart:
            for letter, (quantity, look) in zip("bc", SEPARATE.items(), strict=True):
                draw_kappa(axes[letter], selection, groups, window, {quantity: look})
            axes["b"].sharey(axes["c"])
        elif draw_kappa(axes["b"], selection, groups, window, KAPPA):
            claim = CLAIM
        draw_kappa_d(axes["d" if apart else "c"], selection, groups, window)
        for letter, ax in axes.items():
            ax.text(-0.02, 1.03, f"({letter})", transform=ax.transAxes, ha="right", weight="bold")
            ax.margins(x=0.05)
            ax.set_axisbelow(True)
            ax.grid(axis="y", color="0.92", lw=0.4)
            ax.xaxis.set_major_locator(MaxNLocator(6, steps=[1, 2, 2.5, 5, 10], integer=True))
            place = ax.get_subplotspec()
            assert place is not None
            if place.is_last_row():
                ax.set_xlabel("iteration")
            else:
                ax.tick_params(labelbottom=False)
        parts = [remark(groups, window), claim, *out_of_view(axes.values())]
        label_figure(figure, page, selection.title, "; ".join(filter(None, parts)))
        figure.align_ylabels(list(axes.values()))
    return figure


def panels(page: Page, apart: bool) -> tuple[Figure, dict[str, Axes]]:
    """Figure and its panels by their letters: below one another, or in two columns on a wide page."""
    if page.wide:
        figure = page.figure(4.6, hspace=0.0)
        return figure, dict(sorted(figure.subplot_mosaic("ab;cd" if apart else "ab;cb", sharex=True).items()))
    heights = (1.0, 1.2, 1.2, 1.0) if apart else (1.0, 1.45, 1.0)
    figure = page.figure(7.8 if apart else 6.4, hspace=0.0)
    return figure, dict(zip("abcd", figure.subplots(len(heights), 1, sharex=True, height_ratios=heights), strict=False))


def last_iteration(selection: Selection, losses: dict[str, list[pd.Series]]) -> int:
    """Last iteration with a training or probe row."""
    training = (int(loss.index[-1]) for curves in losses.values() for loss in curves if len(loss))
    probed = (int(probe["iteration"].iloc[-1]) for probe in selection.probes if len(probe))
    return max((*training, *probed), default=0)


def remark(groups: dict[str, list[StoredRun]], window: int) -> str:
    """Remark on lines, faint values and bands."""
    parts = [f"lines: running median of {window} iterations"] if window > 1 else []
    sizes = sorted({len(runs) for runs in groups.values()})
    if sizes[-1] > 1:
        count = "–".join(str(size) for size in dict.fromkeys((sizes[0], sizes[-1])))
        parts.append(f"bands: range of {count} seeds")
    elif parts:
        parts.append("faint: single values")
    return "; ".join(parts)


def dodge(place: int, groups: dict[str, list[StoredRun]]) -> float:
    """Offset of a method's markers to the right, in points, so that none hides another's."""
    return min(3.0, DODGE / len(groups)) * (place - (len(groups) - 1) / 2)


def draw_training(
    ax: Axes, groups: dict[str, list[StoredRun]], losses: dict[str, list[pd.Series]], window: int
) -> None:
    """Draw panel (a): training loss, and test accuracy on the right."""
    colors = method_colors(groups)
    ax.set_yscale("log", nonpositive="mask")
    ax.set_ylabel(loss_label(groups))
    names: list[Line2D | None] = [Line2D([], [], color=colors[m], lw=2.4, label=m) for m in groups]
    kinds: list[Line2D | None] = []
    drawn = [draw_curve(ax, losses[m], LOSS, colors[m], window, f"{m}-loss") for m in groups]
    if any(drawn):
        keep_in_view(ax, drawn_values(ax))
        logarithmic(ax)
        kinds.append(LOSS.line_handle())
    else:
        say_empty(ax, "not trained")
    evaluations = {m: [r.table("evaluation").set_index("iteration") for r in g] for m, g in groups.items()}
    # there is no accuracy where values are predicted
    if any(table["test_accuracy"].notna().any() for tables in evaluations.values() for table in tables):
        right = ax.twinx()
        right.set_ylabel("test accuracy (%)")
        for place, (method, tables) in enumerate(evaluations.items()):
            percent = [100 * table["test_accuracy"] for table in tables]
            draw_points(right, percent, ACCURACY, colors[method], f"{method}-accuracy", dodge(place, groups))
        right.margins(x=0.035, y=0.08)
        right.yaxis.set_major_locator(MaxNLocator(5))
        kinds.append(ACCURACY.marker_handle())
    # one more column for every few methods
    columns = [names[start : start + ROWS] for start in range(0, len(names), ROWS)]
    add_legend(ax, [*columns, kinds] if len(columns) < 3 else columns, [] if len(columns) < 3 else present(kinds))


def present(handles: Sequence[Line2D | None]) -> list[Line2D]:
    """Handles that are not None."""
    return [handle for handle in handles if handle is not None]


def loss_label(groups: dict[str, list[StoredRun]]) -> str:
    """Name and unit of the loss."""
    loss = next(iter(groups.values()))[0].config["training"].get("loss", "cross_entropy")
    return "squared error" if loss == "mse" else "loss (nats)"


def draw_kappa(
    ax: Axes, selection: Selection, groups: dict[str, list[StoredRun]], window: int, looks: dict[str, Look]
) -> bool:
    """Draw a panel of κ(H), of κ(PᵀHP), or of both and of the expected κ(H)/κ(D)², for batches and training set.

    Return whether an expected value was drawn for mini-batches.
    """
    colors = method_colors(groups)
    ax.set_yscale("log", nonpositive="mask")
    ax.set_ylabel("condition number" if len(looks) > 1 else next(iter(looks.values())).label)
    lines: dict[str, Line2D] = {}
    markers: dict[str, Line2D] = {}
    triangles: dict[str, Line2D] = {}
    for data in ("batch", "train"):
        for place, (method, members) in enumerate(groups.items()):
            shift = dodge(place, groups) if data == "train" else 0.0
            probes = [selection.probe(run, data) for run in members]
            for quantity, look in looks.items():
                name, color = f"{method}-{quantity}-{data}", colors[method]
                curves = [values_of(probe, quantity) for probe in probes]
                if data == "batch" and draw_curve(ax, curves, look, color, window, name):
                    lines[quantity] = look.line_handle(data)
                if data == "train" and draw_points(ax, curves, look, color, name, shift):
                    markers[quantity] = look.marker_handle(data)
                if quantity in RESOLVED:
                    bounds = [lower_bounds(probe, quantity) for probe in probes]
                    if draw_unresolved(ax, bounds, look, data, color, name, shift):
                        triangles[quantity + data] = look.unresolved_handle(data)
    finish(ax, [(lines.get(quantity), markers.get(quantity)) for quantity in looks], list(triangles.values()))
    return "expected" in lines


def values_of(probe: pd.DataFrame, quantity: str) -> pd.Series:
    """Values that a panel shows of a probe table under the name ``quantity``, a key of `KAPPA`."""
    return expected(probe) if quantity == "expected" else resolved_values(probe, quantity)


def draw_kappa_d(ax: Axes, selection: Selection, groups: dict[str, list[StoredRun]], window: int) -> None:
    """Draw the panel of κ(D) of the batches, of the method's running statistics, and of the training set."""
    colors = method_colors(groups)
    ax.set_yscale("log", nonpositive="mask")
    ax.set_ylabel(r"$\kappa(D)$")
    batch = running = train = None
    for place, (method, members) in enumerate(groups.items()):
        shift = dodge(place, groups)
        name, color = f"{method}-kappa_D", colors[method]
        probes = [selection.probe(run, "batch") for run in members]
        if draw_curve(ax, [finite(p["kappa_D"]) for p in probes], KAPPA_D, color, window, f"{name}-batch"):
            batch = KAPPA_D.line_handle("batch")
        curves = [finite(p["kappa_D_running_eps"]) for p in probes]
        if draw_curve(ax, curves, RUNNING, color, window, f"{name}-running"):
            running = RUNNING.line_handle()
        probes = [selection.probe(run, "train") for run in members]
        if draw_points(ax, [finite(p["kappa_D"]) for p in probes], KAPPA_D, color, f"{name}-train", shift):
            train = KAPPA_D.marker_handle("train")
    finish(ax, [(batch, train)], present([running]))


def finish(ax: Axes, pairs: Sequence[tuple[Line2D | None, Line2D | None]], below: Sequence[Line2D]) -> None:
    """Add ticks and legend to a panel of probed quantities, or the remark that nothing was probed.

    Parameters
    ----------
    ax
        Axes with everything drawn.
    pairs
        Legend entries of each quantity over batches and over the training set, one row each.
    below
        Entries in separate rows below.
    """
    rows = [pair for pair in pairs if pair != (None, None)]
    if not rows and not below:
        say_empty(ax, "not probed")
        return
    keep_in_view(ax, drawn_values(ax))
    logarithmic(ax)
    columns = [[row[side] for row in rows] for side in (0, 1)]
    add_legend(ax, [column for column in columns if any(column)], below)


CONDITIONING_FIGURE = FigureKind(
    "conditioning",
    "training loss, κ(H) against κ(PᵀHP), and κ(D) of one unit along training",
    "runs of one study with one learning rate a method",
    conditioning_figure,
    by_method,
    UNIT,
)
