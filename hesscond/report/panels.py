"""Single panels in axes of one's own: a paper's own figure with a panel of hesscond among others.

Sizes and fonts are those of the axes' figure; no title, remark or legend is added: `method_legend` makes one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from matplotlib.axes import Axes
from matplotlib.legend import Legend

from hesscond.report import gain, layers, training
from hesscond.report.groups import groups_of, looks_of, probed_groups
from hesscond.report.legends import method_handle
from hesscond.report.palette import method_colors
from hesscond.report.selection import select

if TYPE_CHECKING:
    from hesscond.study.store import StoredRun


def loss_axes(ax: Axes, runs: Sequence[StoredRun]) -> Axes:
    """Training loss (dashed) and test loss (solid), as `training_figure` draws them.

    Raises
    ------
    ConfigError
        As there.
    """
    groups = training.trained_groups(runs)
    losses = {group.label: training.losses_of(group) for group in groups}
    training.draw_loss(ax, groups, training.stretch(losses))
    ax.set_xlabel("iteration")
    return ax


def accuracy_axes(ax: Axes, runs: Sequence[StoredRun]) -> Axes:
    """Test accuracy in percent, as `training_figure` draws it.

    Raises
    ------
    ConfigError
        As there.
    """
    training.draw_accuracy(ax, training.trained_groups(runs))
    ax.set_xlabel("iteration")
    return ax


def layer_axes(ax: Axes, runs: Sequence[StoredRun], layer: str) -> Axes:
    """Violins of the κ of a layer along training, as `layers_figure` draws them.

    Raises
    ------
    ConfigError
        As there.
    """
    probes, _ = layers.probed_layers(runs, layer=layer)
    groups = probed_groups(runs)
    edges = layers.stretches([probes[group.label] for group in groups], len(groups))
    layers.draw_layer(ax, probes, groups, layer, edges)
    ax.set_xlabel("iteration")
    ax.set_ylabel(r"$\kappa$")
    return ax


def gain_axes(ax: Axes, runs: Sequence[StoredRun], *, layer: str | None = None, unit: int | None = None) -> Axes:
    """The gain κ(H)/κ(PᵀHP) against κ(D)², as `gain_figure` draws it.

    Raises
    ------
    ConfigError
        As there.
    """
    selection = select(runs, layer, unit)
    gain.draw(ax, selection, method_colors(run.method for run in selection.runs))
    ax.set_xlabel(gain.EXPECTED)
    ax.set_ylabel(gain.GAIN)
    return ax


def method_legend(ax: Axes, runs: Sequence[StoredRun], **options: object) -> Legend:
    """A legend of the methods in their looks; ``options`` go to ``Axes.legend``."""
    groups = groups_of(runs)
    looks = looks_of(groups)
    return ax.legend(handles=[method_handle(group.label, looks[group.label]) for group in groups], **options)
