"""Curves along training: loss and accuracy, condition numbers of a unit, both ends of its spectrum.

Mini-batches are lines, the whole training set markers; colours tell methods apart.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import product
from typing import TYPE_CHECKING

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from hesscond.errors import ConfigError
from hesscond.report import palette, plotting, registry, selection, series
from hesscond.report.page import COLUMN, Page

if TYPE_CHECKING:
    import pandas as pd

    from hesscond.runs import StoredRun

# --- loss and accuracy ------------------------------------------------------------------------------------------------

LOSSES = {"train": palette.DASHED, "test": "-"}


def training_figure(runs: Sequence[StoredRun], *, page: Page = COLUMN) -> Figure:
    """Training and test loss, and test accuracy if there is one, over the iterations.

    Train is dashed, test solid. A line is the mean over the seeds, its band reaches from the lowest to the highest. A
    run that diverged enters neither: it is a separate thin line that ends in a cross. Mini-batch losses are running
    medians, over a number of iterations that is stated below the figure.
    """
    groups = trained_groups(runs)
    measured = any(len(curve) for group in groups for curve in accuracies_of(group))
    window = window_of(groups)
    looks = selection.looks_of(groups)
    with page.styled():
        labels = [*map(with_diverged, groups), *LOSSES, "diverged"]
        figure, axes = plotting.few_panels(page, 1 + measured, 1.6, labels)
        draw_loss(axes[0], groups, window)
        if measured:
            draw_accuracy(axes[1], groups)
        handles = [plotting.method_handle(with_diverged(group), looks[group.label]) for group in groups]
        handles += plotting.dash_handles(LOSSES)
        if any(group.diverged for group in groups):
            handles.append(Line2D([], [], color=plotting.NEUTRAL, marker="x", ls="none", ms=4, label="diverged"))
        plotting.add_heading(figure, page, selection.title_of(groups), handles)
        remark = "train: mini-batches" + (f", running median of {window} iterations" if window > 1 else "")
        counts = {group.label: len(group.runs) - group.diverged for group in groups}
        most = max(counts.values())
        fewer = "".join(f", {count} of {label}" for label, count in counts.items() if count < most)
        seeds = [f"lines: mean over {most} seeds{fewer}; bands: lowest to highest"] if most > 1 else []
        plotting.label_figure(figure, page, "; ".join([remark, *seeds, *plotting.out_of_view(axes[:1])]))
    return figure


def trained_groups(runs: Sequence[StoredRun]) -> list[selection.Group]:
    """Groups of the runs; a ConfigError if none of them has anything to show."""
    groups = selection.groups_of(runs)
    if not any(run.iterations or len(run.table("evaluation")) for run in runs):
        raise ConfigError(
            "none of the runs has a training loss: draw it when they have trained (a watch logs the loss that "
            "watch.step(loss) is given)"
        )
    return groups


def with_diverged(group: selection.Group) -> str:
    """Label of a group, with the number of runs that diverged."""
    if not group.diverged:
        return group.label
    count = f"{group.diverged} of {len(group.runs)} " if len(group.runs) > 1 else ""
    return f"{group.label} ({count}diverged)"


def accuracies_of(group: selection.Group) -> list[pd.Series]:
    """The test accuracy in percent of each run by iteration; empty where a study has none."""
    return [100 * run.table("evaluation").set_index("iteration")["test_accuracy"].dropna() for run in group.runs]


def window_of(groups: Sequence[selection.Group]) -> int:
    """Width of the running median of training losses."""
    return series.window_of(max(len(series.loss_of(run)) for group in groups for run in group.runs))


def draw_loss(ax: Axes, groups: Sequence[selection.Group], window: int) -> None:
    """Draw training loss, as running medians over ``window`` iterations, and test loss on a logarithmic axis."""
    looks = selection.looks_of(groups)
    ax.set_yscale("log", nonpositive="mask")
    for group in groups:
        train = [series.running_median(series.loss_of(run), window) for run in group.runs]
        test = [series.finite(run.table("evaluation").set_index("iteration")["test_loss"]) for run in group.runs]
        plotting.draw_seeds(ax, group, train, looks[group.label], palette.DASHED, f"{group.label}-train-loss")
        plotting.draw_seeds(ax, group, test, looks[group.label], "-", f"{group.label}-test-loss")
    plotting.fit_logarithmic(ax)
    ax.set_ylabel(plotting.loss_name(groups[0].runs))
    plotting.along_iterations(ax)


def draw_accuracy(ax: Axes, groups: Sequence[selection.Group]) -> None:
    """Draw test accuracy in percent."""
    looks = selection.looks_of(groups)
    for group in groups:
        plotting.draw_seeds(ax, group, accuracies_of(group), looks[group.label], "-", f"{group.label}-accuracy")
    ax.set_ylabel("test accuracy (%)")
    ax.yaxis.set_major_locator(MaxNLocator(5))
    plotting.along_iterations(ax)


def loss_axes(ax: Axes, runs: Sequence[StoredRun]) -> Axes:
    """Draw training loss (dashed) and test loss (solid), as `training_figure` does."""
    groups = trained_groups(runs)
    draw_loss(ax, groups, window_of(groups))
    ax.set_xlabel("iteration")
    return ax


def accuracy_axes(ax: Axes, runs: Sequence[StoredRun]) -> Axes:
    """Draw test accuracy in percent, as `training_figure` does."""
    draw_accuracy(ax, trained_groups(runs))
    ax.set_xlabel("iteration")
    return ax


# --- condition numbers of a unit --------------------------------------------------------------------------------------


#: Quantities of the figure of conditioning; those whose κ may be unresolved are keys of `RESOLVED`.
CURVES = {
    "kappa": plotting.Look(r"$\kappa(H)$"),
    "kappa_preconditioned": plotting.Look(r"$\kappa(P^{\top}HP)$", dash=(0, (3.2, 1.4)), marker="s", barred=True),
    "expected": plotting.Look(r"$\kappa(H)/\kappa(D)^2$", dash=(0, (0.8, 1.2)), marker="x", width=0.9, raw=False),
    "kappa_D": plotting.Look(r"$\kappa(D)$"),
    "kappa_D_running_eps": plotting.Look(
        r"$\kappa(D)$ of running averages, with $\varepsilon$", dash=(0, (5, 1.2, 1, 1.2)), raw=False
    ),
}
TOGETHER = ("kappa", "kappa_preconditioned", "expected")
SCALING = ("kappa_D", "kappa_D_running_eps")
#: Explanation of the dotted lines.
CLAIM = r"dotted: what BNP expects of $\kappa(P^{\top}HP)$"
LOSS, ACCURACY = plotting.Look("training loss"), plotting.Look("test accuracy", marker="D")
#: Largest spread, in points, of the markers of all methods at one iteration.
DODGE = 12.0


def conditioning_figure(
    runs: Sequence[StoredRun], *, layer: str | None = None, unit: int | None = None, page: Page = COLUMN
) -> Figure:
    """Training loss and test accuracy, κ(H) and κ(PᵀHP), and κ(D) of one unit over the iterations.

    P is that of the raw statistics of the same samples and D its scaling, whatever the method: κ in a method's own
    coordinates is in the figure of layers. One panel below the other at the width of a journal column, side by side
    across a page. Below the loss, lines are the mini-batches (``data == "batch"``) and markers the whole training set
    (``data == "train"``); κ(H) is solid and round, κ(PᵀHP) dashed and square, the κ(H)/κ(D)² that the paper expects of
    it dotted and crossed. With more than two methods κ(H) and κ(PᵀHP) have a panel each, of the same scale, without
    what is expected. An unresolved κ is an open triangle at its lower bound and no part of any
    line. Lines are running medians, over faint single values for one run of a method, in a band from the lowest to the
    highest for several seeds.
    """
    chosen, groups = selection.select(runs, layer, unit), selection.groups_of(runs)
    last = [int(loss.index[-1]) for run in chosen.runs if len(loss := series.loss_of(run))]
    window = series.window_of(max([*last, *(int(p["iteration"].iloc[-1]) for p in chosen.probes if len(p))], default=0))
    apart = len(groups) > 2
    shown = [TOGETHER[:1], TOGETHER[1:2], SCALING] if apart else [TOGETHER, SCALING]
    # as wide as a panel
    panel = replace(page, width=page.width / (2 if page.wide else 1) - 0.4)
    with page.styled():
        figure = page.figure(4.6 if page.wide else 3.6 + 1.4 * len(shown), hspace=0.0)
        axes = plotting.panels(figure, 1 + len(shown), 2 if page.wide else 1)
        draw_training(axes[0], groups, window, panel)
        pairs = zip(axes[1:], shown, strict=True)
        drawn = [draw_quantities(ax, chosen, groups, window, quantities, panel) for ax, quantities in pairs]
        axes[1].set_ylabel(CURVES["kappa"].label if apart else "condition number")
        if apart:
            axes[2].set_ylabel(CURVES["kappa_preconditioned"].label)
            ends = [ax.get_ylim() for ax in axes[1:3]]
            axes[1].sharey(axes[2])
            axes[1].set_ylim(min(low for low, _ in ends), max(high for _, high in ends))
            plotting.logarithmic(axes[1])
        axes[-1].set_ylabel(CURVES["kappa_D"].label)
        for letter, ax in zip("abcd", axes, strict=False):
            ax.text(-0.02, 1.03, f"({letter})", transform=ax.transAxes, ha="right", weight="bold")
            plotting.along_iterations(ax, 6)
        parts = [remark(groups, window), CLAIM if "expected" in drawn[0] else "", *plotting.out_of_view(axes)]
        plotting.add_heading(figure, page, chosen.title, [])
        plotting.label_figure(figure, page, "; ".join(filter(None, parts)))
        figure.align_ylabels(axes)
    return figure


def remark(groups: Sequence[selection.Group], window: int) -> str:
    """Remark on lines, markers, faint values and bands."""
    median = f", running median of {window} iterations" if window > 1 else ""
    parts = [f"lines: mini-batches{median}; markers: training set"]
    sizes = sorted({len(group.runs) for group in groups})
    if sizes[-1] > 1:
        count = "–".join(str(size) for size in dict.fromkeys((sizes[0], sizes[-1])))
        parts.append(f"bands: range of {count} seeds")
    elif median:
        parts.append("faint: single values")
    return "; ".join(parts)


def dodge(place: int, groups: Sequence[selection.Group]) -> float:
    """Offset of a method's markers to the right, in points, so that none hides another's."""
    return min(3.0, DODGE / len(groups)) * (place - (len(groups) - 1) / 2)


def draw_training(ax: Axes, groups: Sequence[selection.Group], window: int, page: Page) -> None:
    """Draw training loss, and test accuracy on the right."""
    colors = {label: look.color for label, look in selection.looks_of(groups).items()}
    ax.set_yscale("log", nonpositive="mask")
    ax.set_ylabel(plotting.loss_name(groups[0].runs))
    handles = [Line2D([], [], color=color, lw=2.4, label=label) for label, color in colors.items()]
    losses = {group.label: list(map(series.loss_of, group.runs)) for group in groups}
    curves = losses.items()
    drawn = [plotting.draw_curve(ax, lines, LOSS, colors[label], window, f"{label}-loss") for label, lines in curves]
    if any(drawn):
        plotting.fit_logarithmic(ax)
        handles.append(LOSS.handle())
    else:
        plotting.say_empty(ax, "not trained")
    # there is no accuracy where values are predicted
    if any(len(curve) for group in groups for curve in accuracies_of(group)):
        right = ax.twinx()
        right.set_ylabel("test accuracy (%)")
        for place, group in enumerate(groups):
            color, name = colors[group.label], f"{group.label}-accuracy"
            plotting.draw_points(right, accuracies_of(group), ACCURACY, color, name, dodge(place, groups))
        right.margins(x=0.035, y=0.08)
        right.yaxis.set_major_locator(MaxNLocator(5))
        handles.append(ACCURACY.handle(["points"]))
    plotting.add_legend(ax, handles, page)


def draw_quantities(
    ax: Axes,
    chosen: selection.Selection,
    groups: Sequence[selection.Group],
    window: int,
    shown: Sequence[str],
    page: Page,
) -> set[str]:
    """Draw some of `CURVES` for mini-batches and training set, on a logarithmic axis; return those that have lines."""
    looks = selection.looks_of(groups)
    ax.set_yscale("log", nonpositive="mask")
    drawn: dict[str, set[str]] = {quantity: set() for quantity in shown}
    for data, (place, group) in product(("batch", "train"), enumerate(groups)):
        shift = dodge(place, groups) if data == "train" else 0.0
        probes = [chosen.probe(run, data) for run in group.runs]
        for quantity, parts in drawn.items():
            look, color, name = CURVES[quantity], looks[group.label].color, f"{group.label}-{quantity}-{data}"
            curves = [series.values_of(probe, quantity) for probe in probes]
            if data == "batch" and plotting.draw_curve(ax, curves, look, color, window, name):
                parts.add("line")
            # running averages are not those of the training set
            rare = data == "train" and quantity != SCALING[1]
            if rare and plotting.draw_points(ax, curves, look, color, name, shift):
                parts.add("points")
            if quantity in series.RESOLVED:
                unresolved = [probe[series.is_unresolved(probe, quantity)] for probe in probes]
                bounds = [series.finite(rows[f"{quantity}_lower"]) for rows in unresolved]
                if plotting.draw_unresolved(ax, bounds, look, data, color, name, shift):
                    parts.add("unresolved")
    handles = [CURVES[quantity].handle(parts) for quantity, parts in drawn.items() if parts & {"line", "points"}]
    handles += [CURVES[quantity].unresolved_handle() for quantity, parts in drawn.items() if "unresolved" in parts]
    if handles:
        plotting.fit_logarithmic(ax)
        plotting.add_legend(ax, handles, page)
    else:
        plotting.say_empty(ax, "not probed")
    return {quantity for quantity, parts in drawn.items() if "line" in parts}


# --- spectrum ---------------------------------------------------------------------------------------------------------

ENDS = {
    "lambda_max": plotting.Look(r"$\lambda_{\max}$", width=1.0, raw=False),
    "lambda_min": plotting.Look(r"$\lambda_{\min}$, where resolved", dash=palette.DASHED, width=1.0, raw=False),
}
RANK = plotting.Look("rank", width=1.0, raw=False)


def eigenvalue_figure(
    runs: Sequence[StoredRun], *, layer: str | None = None, unit: int | None = None, page: Page = COLUMN
) -> Figure:
    """The largest and the smallest nonzero eigenvalue of a unit's Hessian, and its rank, over the iterations.

    The figure shows |λ| in the plain parameters, over mini-batches (over the training set where only that was probed).
    Where the rank is not resolved, no smallest nonzero eigenvalue is known, and none is drawn. Lines are running
    medians, the median over seeds in a band from the lowest to the highest. A rank that never changes is stated below
    the figure, in place of a panel.
    """
    chosen = selection.select(runs, layer, unit)
    import pandas as pd

    rows = pd.concat([probe[["data", "iteration", "lambda_max", "rank"]] for probe in chosen.probes])
    if not series.finite(rows["lambda_max"].astype(float)).notna().any():
        raise ConfigError("no eigenvalue is in the logs of the runs: probe them with --probe-every 1 or more")
    groups = selection.probed_groups(chosen.runs)
    groups = [group for group in groups if any(len(chosen.rows_of(run)) for run in group.runs)]
    looks = selection.looks_of(groups)
    data = "batch" if (rows["data"] == "batch").any() else "train"
    window = series.window_of(int(rows["iteration"].max()))
    probes = {group.label: [chosen.probe(run, data) for run in group.runs] for group in groups}
    ranks = set(rows.loc[rows["data"] == data, "rank"].dropna().astype(float))
    with page.styled():
        labels = [*probes, *(look.label for look in ENDS.values())]
        figure, axes = plotting.few_panels(page, 1 + (len(ranks) > 1), 1.5, labels)
        axes[0].set_yscale("log", nonpositive="mask")
        draw_columns(axes[0], probes, ENDS, looks, window)
        plotting.fit_logarithmic(axes[0])
        axes[0].set_ylabel(r"$|\lambda|$ of $\nabla^2 L$")
        for ax in axes[1:]:
            draw_columns(ax, probes, {"rank": RANK}, looks, 1)
            ax.set_ylabel("rank")
            ax.yaxis.set_major_locator(MaxNLocator(5, integer=True))
        for ax in axes:
            plotting.along_iterations(ax)
        handles = [plotting.method_handle(label, looks[label]) for label in probes]
        plotting.add_heading(figure, page, chosen.title, [*handles, *(look.handle() for look in ENDS.values())])
        parts = ["mini-batches" if data == "batch" else "training set"]
        parts += [f"rank {rank:.0f} throughout" for rank in ranks if len(ranks) == 1]
        parts += [f"running median of {window}"] * (window > 1)
        plotting.label_figure(figure, page, "; ".join([*parts, *plotting.out_of_view(axes[:1])]))
    return figure


def draw_columns(
    ax: Axes,
    probes: Mapping[str, Sequence[pd.DataFrame]],
    shown: Mapping[str, plotting.Look],
    looks: Mapping[str, palette.MethodLook],
    window: int,
) -> None:
    """Draw columns of the probe table for each group of runs."""
    for label, frames in probes.items():
        for column, look in shown.items():
            curves = [series.finite(probe[column].astype(float)).abs() for probe in frames]
            if column == "lambda_min":
                known = (probe["resolved"].fillna(False).astype(bool) for probe in frames)
                curves = [curve.where(rows) for curve, rows in zip(curves, known, strict=True)]
            plotting.draw_curve(ax, curves, look, looks[label].color, window, f"{label}-{column}", looks[label].marker)


TRAINING_FIGURE = registry.FigureKind(
    "training",
    30,
    "training and test loss, and test accuracy, the mean over seeds in a band from the lowest to the highest",
    registry.STUDY,
    training_figure,
)

CONDITIONING_FIGURE = registry.FigureKind(
    "conditioning",
    20,
    "training loss, κ(H) against κ(PᵀHP), and κ(D) of one unit along training",
    registry.STUDY,
    conditioning_figure,
    registry.UNIT,
)

EIGENVALUES_FIGURE = registry.FigureKind(
    "spectra",
    90,
    "largest and smallest nonzero eigenvalue of a unit's Hessian, and its rank, along training",
    registry.PROBED,
    eigenvalue_figure,
    registry.UNIT,
)
