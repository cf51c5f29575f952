"""κ of each layer along training: violins over units and iterations, a panel for each layer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from hesscond.errors import ConfigError
from hesscond.report.axes import NEUTRAL, keep_in_view, label_figure, logarithmic, out_of_view
from hesscond.report.groups import Group, intervals, looks_of, probed_groups, quantile, title_of
from hesscond.report.legends import add_heading, heading_height, method_handle
from hesscond.report.page import COLUMN, Page
from hesscond.report.palette import MethodLook

if TYPE_CHECKING:
    import pandas as pd

    from hesscond.study.store import StoredRun

#: Violins in a panel, and stretches of iterations, at most; panels in a figure.
VIOLINS, STRETCHES, PANELS = 36, 8, 12
#: With fewer values than this they are drawn one by one.
FEWEST = 5
#: Points that a violin's outline is made of.
POINTS = 40


@dataclass(frozen=True)
class Spread:
    """The κ of a layer in a stretch of iterations.

    Attributes
    ----------
    left, right
        First and last iteration of the stretch.
    lower, upper : (values,)
        Between which each κ is known to lie; infinite above where it is unresolved.
    """

    left: float
    right: float
    lower: np.ndarray
    upper: np.ndarray

    @property
    def resolved(self) -> np.ndarray:
        """The κ that are numbers."""
        return self.lower[np.isfinite(self.upper)]

    @property
    def bounds(self) -> np.ndarray:
        """Lower bounds of the others."""
        return self.lower[np.isinf(self.upper)]


def layers_figure(runs: Sequence[StoredRun], *, layer: str | None = None, page: Page = COLUMN) -> Figure:
    """κ of the probed units of each layer, in the coordinates of each method, over stretches of iterations.

    A violin is the distribution of the resolved κ of all probed units, seeds and iterations of a stretch, with a bar
    at their median where the unresolved ones leave no doubt about it; up to four are drawn as dots. An open triangle
    is the smallest lower bound of the unresolved ones. Mini-batches, or the training set where only that was probed.

    Parameters
    ----------
    runs
        Of one study.
    layer
        One layer only; all that were probed by default.
    page
        What it is drawn for.

    Returns
    -------
    matplotlib.figure.Figure
        A panel for each layer.

    Raises
    ------
    ConfigError
        Nothing was probed, too many layers were, or that one was not.
    """
    probes, layers = probed_layers(runs, layer=layer)
    groups = [group for group in probed_groups(runs) if len(probes[group.label])]
    looks = looks_of(groups)
    edges = stretches([probes[group.label] for group in groups], len(groups))
    with page.styled():
        columns = 1 if len(layers) <= 3 and not page.wide else min(2, len(layers))
        rows = -(-len(layers) // columns)
        labels = [*(group.label for group in groups), "unresolved (lower bound)"]
        figure = page.figure(0.5 + max(1.6, 1.25 * rows) + heading_height(labels, page))
        axes = figure.subplots(rows, columns, squeeze=False, sharex=True).ravel()
        anything_open = False
        for ax, name in zip(axes, layers, strict=False):
            anything_open |= draw_layer(ax, probes, groups, name, edges)
            ax.set_title(name, loc="left", pad=2.0)
        for ax in axes[len(layers) :]:
            ax.set_visible(False)
        for ax in axes[max(0, len(layers) - columns) : len(layers)]:
            ax.set_xlabel("iteration")
            ax.tick_params(labelbottom=True)
        figure.supylabel(r"$\kappa$, own coordinates", fontsize=page.style["axes.labelsize"])
        handles = [method_handle(group.label, looks[group.label], line=False) for group in groups]
        if anything_open:
            style: dict[str, Any] = {"marker": "^", "mfc": "none", "mew": 0.7, "ms": 4, "ls": "none", "color": NEUTRAL}
            handles.append(Line2D([], [], label="unresolved (lower bound)", **style))
        add_heading(figure, page, title_of(groups), handles)
        label_figure(figure, page, None, "; ".join([remark(probes), *out_of_view(axes[: len(layers)])]))
    return figure


def probed_layers(runs: Sequence[StoredRun], *, layer: str | None = None) -> tuple[dict[str, pd.DataFrame], list[str]]:
    """The probe rows of each group (κ as columns ``lower`` and ``upper``), by its label, and the layers.

    Raises
    ------
    ConfigError
        Nothing was probed, too many layers were, or the one asked for was not.
    """
    groups = probed_groups(runs)
    probes = {group.label: own_kappas(group) for group in groups}
    layers = list(dict.fromkeys(name for probe in probes.values() for name in probe["layer"]))
    if not layers:
        raise ConfigError("none of the runs was probed: train with --probe-every 1 or more")
    if layer is not None:
        if layer not in layers:
            raise ConfigError(f"layer {layer!r} was not probed: choose from {', '.join(layers)}")
        layers = [layer]
    if len(layers) > PANELS:
        raise ConfigError(f"{len(layers)} layers are too many for one figure: choose one, or draw a heatmap")
    return probes, layers


def own_kappas(group: Group) -> pd.DataFrame:
    """iteration, data, layer, unit, seed, lower and upper of κ in the method's own coordinates, of one kind of data.

    Of the mini-batches; of the training set where there are none.
    """
    import pandas as pd

    tables = []
    for run in group.runs:
        probe = run.table("probe")
        lower, upper = intervals(probe, "kappa_own")
        columns = probe[["iteration", "data", "layer", "unit"]]
        tables.append(columns.assign(seed=run.seed, lower=lower, upper=upper))
    together = pd.concat(tables, ignore_index=True)
    batches = together[together["data"] == "batch"]
    return batches if len(batches) else together


def stretches(probes: Sequence[pd.DataFrame], count: int) -> np.ndarray:
    """Edges of the stretches of iterations, as many as leave room for the violins of ``count`` methods."""
    iterations = np.unique(np.concatenate([probe["iteration"].to_numpy() for probe in probes]))
    number = int(np.clip(VIOLINS // max(1, count), 2, STRETCHES))
    number = min(number, len(iterations))
    return np.linspace(iterations[0], iterations[-1] + 1, number + 1)


def spread_of(probe: pd.DataFrame, layer: str, left: float, right: float) -> Spread:
    """The κ of a layer from iteration ``left`` up to ``right``."""
    at = probe["iteration"]
    rows = probe[(probe["layer"] == layer) & (at >= left) & (at < right)]
    return Spread(left, right, rows["lower"].to_numpy(dtype=float), rows["upper"].to_numpy(dtype=float))


def draw_layer(
    ax: Axes, probes: dict[str, pd.DataFrame], groups: Sequence[Group], layer: str, edges: np.ndarray
) -> bool:
    """A panel; returns whether something in it is unresolved."""
    looks, some_open = looks_of(groups), False
    ax.set_yscale("log", nonpositive="mask")
    seen, width = [np.zeros(0)], (edges[1] - edges[0]) / (len(groups) + 0.6)
    for number, (left, right) in enumerate(pairwise(edges)):
        if number % 2:
            ax.axvspan(left, right, color="0.955", lw=0, zorder=0)
        for place, group in enumerate(groups):
            spread = spread_of(probes[group.label], layer, left, right)
            x = left + (place + 0.8) * width
            draw_spread(ax, spread, x, width, looks[group.label], f"{group.label}-{layer}-{number}")
            some_open |= bool(len(spread.bounds))
            seen.append(spread.lower)
    keep_in_view(ax, np.concatenate(seen))
    logarithmic(ax)
    ax.set_xlim(edges[0], edges[-1])
    ax.xaxis.set_major_locator(MaxNLocator(5, steps=[1, 2, 2.5, 5, 10], integer=True))
    ax.set_axisbelow(True)
    ax.grid(axis="y", color="0.88", lw=0.4)
    return some_open


def draw_spread(ax: Axes, spread: Spread, x: float, width: float, look: MethodLook, name: str) -> None:
    """A violin (``NAME-violin``) with its median, or dots (``NAME-dots``), and the triangle of what is unresolved."""
    values = spread.resolved
    if len(values) >= FEWEST and values.max() > values.min():
        heights, widths = outline(np.log10(values))
        half = 0.46 * width * widths
        shape = ax.fill_betweenx(10**heights, x - half, x + half, color=look.color, alpha=0.45, lw=0.3, zorder=2)
        shape.set_gid(f"{name}-violin")
    elif len(values):
        dots: dict[str, Any] = {"marker": look.marker, "ms": 2.6, "mew": 0, "ls": "none", "color": look.color}
        ax.plot(np.full(len(values), x), values, zorder=3, gid=f"{name}-dots", **dots)
    low, high = quantile(spread.lower, spread.upper, 0.5)
    if low == high and len(values) >= FEWEST:
        ax.hlines(low, x - 0.4 * width, x + 0.4 * width, color=look.color, lw=1.1, zorder=4, gid=f"{name}-median")
        ax.plot([x], [low], marker=look.marker, ms=2.4, color=look.color, mew=0.3, mec="white", zorder=5)
    if len(spread.bounds):
        style: dict[str, Any] = {"marker": "^", "ms": 3.4, "mfc": "none", "mew": 0.6, "color": look.color, "ls": "none"}
        ax.plot([x], [spread.bounds.min()], zorder=5, gid=f"{name}-unresolved", **style)


def outline(logs: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Heights and half widths, at most 1, of a kernel density estimate that ends at the smallest and largest value."""
    from scipy.stats import gaussian_kde

    heights = np.linspace(logs.min(), logs.max(), POINTS)
    # values that nearly coincide have no covariance to scale a kernel with
    if np.std(logs) < 1e-9:
        return heights, np.ones(POINTS)
    density = gaussian_kde(logs)(heights)
    return heights, density / density.max()


def remark(probes: dict[str, pd.DataFrame]) -> str:
    """Over what the violins are."""
    kinds = {str(kind) for probe in probes.values() for kind in probe["data"].unique()}
    data = {"batch": "mini-batches", "train": "training set"}
    return "all probed units, seeds and iterations of a stretch; " + ", ".join(data[kind] for kind in sorted(kinds))
