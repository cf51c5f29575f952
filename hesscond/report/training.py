"""Loss and accuracy along training, as papers show them: train dashed and test solid, the mean over seeds in a band."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

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
from hesscond.report.palette import DASHED, MethodLook
from hesscond.report.registry import STUDY, FigureKind
from hesscond.report.selection import Group, groups_of, looks_of, title_of
from hesscond.report.series import finite, mean_over_seeds, means_of_stretches, thinned, thinned_band

if TYPE_CHECKING:
    import pandas as pd

    from hesscond.runs import StoredRun

#: Most points of a curve of mini-batch losses: means over stretches of iterations.
STRETCHES = 50
#: Markers along a curve.
MARKS = 8
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
    losses = {group.label: losses_of(group) for group in groups}
    accuracies = {group.label: accuracies_of(group) for group in groups}
    measured = any(len(curve) for curves in accuracies.values() for curve in curves)
    width = stretch(losses)
    with page.styled():
        rows, columns = (1, 2) if measured and page.wide else (1 + measured, 1)
        figure = page.figure(0.5 + 1.6 * rows + heading_height([*map(named, groups), *LOSSES, "diverged"], page))
        axes = figure.subplots(rows, columns, squeeze=False, sharex=True).ravel()
        draw_loss(axes[0], groups, width)
        if measured:
            draw_accuracy(axes[1], groups)
        for ax in axes if page.wide else axes[-1:]:
            ax.set_xlabel("iteration")
        looks = looks_of(groups)
        handles = [method_handle(named(group), looks[group.label]) for group in groups]
        handles += [Line2D([], [], color=NEUTRAL, ls=dash, label=name) for name, dash in LOSSES.items()]
        if any(group.diverged for group in groups):
            handles.append(Line2D([], [], color=NEUTRAL, marker="x", ls="none", ms=4, label="diverged"))
        add_heading(figure, page, title_of(groups), handles)
        label_figure(figure, page, None, "; ".join([remark(groups, width), *out_of_view(axes[:1])]))
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


def named(group: Group) -> str:
    """Label of a group, with the number of runs that diverged."""
    if not group.diverged:
        return group.label
    count = f"{group.diverged} of {len(group.runs)} " if len(group.runs) > 1 else ""
    return f"{group.label} ({count}diverged)"


def losses_of(group: Group) -> list[pd.Series]:
    """Mini-batch loss of each run by iteration."""
    return [finite(run.table("training").set_index("iteration")["loss"]) for run in group.runs]


def accuracies_of(group: Group) -> list[pd.Series]:
    """The test accuracy in percent of each run by iteration; empty where a study has none."""
    return [100 * run.table("evaluation").set_index("iteration")["test_accuracy"].dropna() for run in group.runs]


def stretch(losses: dict[str, list[pd.Series]]) -> int:
    """Number of iterations over which mini-batch losses are averaged."""
    return max(1, max((len(curve) for curves in losses.values() for curve in curves), default=1) // STRETCHES)


def draw_loss(ax: Axes, groups: Sequence[Group], width: int) -> None:
    """Draw training loss, as means over ``width`` iterations, and test loss on a logarithmic axis."""
    looks = looks_of(groups)
    ax.set_yscale("log", nonpositive="mask")
    for group in groups:
        train = [means_of_stretches(curve, width) for curve in losses_of(group)]
        test = [finite(run.table("evaluation").set_index("iteration")["test_loss"]) for run in group.runs]
        draw_seeds(ax, group, train, looks[group.label], DASHED, f"{group.label}-train-loss")
        draw_seeds(ax, group, test, looks[group.label], "-", f"{group.label}-test-loss")
    keep_in_view(ax, drawn_values(ax))
    logarithmic(ax)
    ax.set_ylabel("loss")
    finish(ax)


def draw_accuracy(ax: Axes, groups: Sequence[Group]) -> None:
    """Draw test accuracy in percent."""
    looks = looks_of(groups)
    for group in groups:
        draw_seeds(ax, group, accuracies_of(group), looks[group.label], "-", f"{group.label}-accuracy")
    ax.set_ylabel("test accuracy (%)")
    ax.yaxis.set_major_locator(MaxNLocator(5))
    finish(ax)


def finish(ax: Axes) -> None:
    """Add a grid, and ticks of the iterations."""
    ax.xaxis.set_major_locator(MaxNLocator(5, steps=[1, 2, 2.5, 5, 10], integer=True))
    ax.margins(x=0.03)
    ax.set_axisbelow(True)
    ax.grid(axis="y", color="0.92", lw=0.4)


def draw_seeds(ax: Axes, group: Group, curves: Sequence[pd.Series], look: MethodLook, dash: Any, name: str) -> None:
    """Draw mean and band of runs that did not diverge (``NAME-mean``, ``NAME-band``), and each diverged one."""
    whole = [c for c, run in zip(curves, group.runs, strict=True) if run.status != "diverged" and c.notna().any()]
    broken = [c for c, run in zip(curves, group.runs, strict=True) if run.status == "diverged" and c.notna().any()]
    if whole:
        together = mean_over_seeds(whole)
        if len(whole) > 1:
            band = thinned_band(together)
            shade = ax.fill_between(band.index, band["low"], band["high"], color=look.color, alpha=0.18, lw=0, zorder=2)
            shade.set_gid(f"{name}-band")
        mean = thinned(together["mean"])
        every = max(1, len(mean) // MARKS)
        style: dict[str, Any] = {"marker": look.marker, "markevery": every, "ms": 3.0, "mew": 0.4, "mec": "white"}
        line = dash if len(mean) > FEW else "none"
        ax.plot(mean.index, mean, color=look.color, ls=line, lw=1.0, zorder=3, gid=f"{name}-mean", **style)
    for number, curve in enumerate(broken):
        there = thinned(curve.dropna())
        ax.plot(there.index, there, color=look.color, ls=dash, lw=0.5, zorder=3, gid=f"{name}-diverged-{number}")
        end: dict[str, Any] = {"marker": "x", "ms": 4, "ls": "none", "zorder": 4}
        ax.plot(there.index[-1:], there.iloc[-1:], color=look.color, gid=f"{name}-end-{number}", **end)


def remark(groups: Sequence[Group], width: int) -> str:
    """Remark on lines and bands."""
    parts = [f"train: mini-batches, means of {width} iterations" if width > 1 else "train: mini-batches"]
    most = max(len(group.runs) - group.diverged for group in groups)
    if most > 1:
        parts.append(f"lines: mean over up to {most} seeds; bands: lowest to highest")
    return "; ".join(parts)


def loss_axes(ax: Axes, runs: Sequence[StoredRun]) -> Axes:
    """Draw training loss (dashed) and test loss (solid), as `training_figure` does."""
    groups = trained_groups(runs)
    losses = {group.label: losses_of(group) for group in groups}
    draw_loss(ax, groups, stretch(losses))
    ax.set_xlabel("iteration")
    return ax


def accuracy_axes(ax: Axes, runs: Sequence[StoredRun]) -> Axes:
    """Draw test accuracy in percent, as `training_figure` does."""
    draw_accuracy(ax, trained_groups(runs))
    ax.set_xlabel("iteration")
    return ax


TRAINING_FIGURE = FigureKind(
    "training",
    "training and test loss, and test accuracy, the mean over seeds in a band from the lowest to the highest",
    STUDY,
    training_figure,
    trained_groups,
)
