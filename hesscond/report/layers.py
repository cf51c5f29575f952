"""κ over the units of each layer along training: violins, a picture of every unit, and a table of quantiles."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Normalize
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch, Rectangle
from matplotlib.ticker import MaxNLocator

from hesscond.errors import ConfigError
from hesscond.report.axes import (
    NEUTRAL,
    add_heading,
    heading_height,
    keep_in_view,
    label_figure,
    logarithmic,
    method_handle,
    out_of_view,
    shortened,
)
from hesscond.report.page import COLUMN, Page
from hesscond.report.palette import MethodLook
from hesscond.report.registry import PROBED, FigureKind, TableKind
from hesscond.report.selection import Group, looks_of, of_units, probed_groups, title_of
from hesscond.report.series import intervals, located, quantile
from hesscond.report.tables import Column, Number, Words, interval, words
from hesscond.runs import place_name

if TYPE_CHECKING:
    import pandas as pd

    from hesscond.runs import StoredRun

#: Most violins in a panel, most stretches of iterations, and most panels in a figure.
VIOLINS, STRETCHES, PANELS = 36, 8, 12
#: With fewer values than this they are drawn one by one.
FEWEST = 5
#: Points of a violin's outline.
POINTS = 40


@dataclass(frozen=True)
class Spread:
    """The κ of a layer in a stretch of iterations.

    Attributes
    ----------
    left, right
        First and last iteration of the stretch.
    lower, upper : (values,)
        Bounds of each κ; the upper one is infinite where it is unresolved.
    """

    left: float
    right: float
    lower: np.ndarray
    upper: np.ndarray

    @property
    def resolved(self) -> np.ndarray:
        """Values of the resolved κ."""
        return self.lower[np.isfinite(self.upper)]

    @property
    def bounds(self) -> np.ndarray:
        """Lower bounds of the unresolved κ."""
        return self.lower[np.isinf(self.upper)]


def layers_figure(runs: Sequence[StoredRun], *, layer: str | None = None, page: Page = COLUMN) -> Figure:
    """κ of the probed units of each layer, in the coordinates of each method, over stretches of iterations.

    A violin is the distribution of the resolved κ of all probed units, seeds and iterations of a stretch, with a bar
    at the median where unresolved values do not leave it open; up to four values are drawn as dots. An open triangle
    is the smallest lower bound of the unresolved κ. The data are mini-batches, or the training set where only that was
    probed.
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
    """The probe rows of each group (κ as columns ``lower`` and ``upper``), by its label, and the layers."""
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

    The data are mini-batches, or the training set where there are none.
    """
    import pandas as pd

    tables = []
    for run in group.runs:
        probe = of_units(run.table("probe"))
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
    """Draw a panel; return whether something in it is unresolved."""
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
    """Draw a violin (``NAME-violin``) with its median, or dots (``NAME-dots``), and a triangle if unresolved."""
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
    """Remark on the values that the violins cover."""
    kinds = {str(kind) for probe in probes.values() for kind in probe["data"].unique()}
    data = {"batch": "mini-batches", "train": "training set"}
    return "all probed units, seeds and iterations of a stretch; " + ", ".join(data[kind] for kind in sorted(kinds))


def layer_axes(ax: Axes, runs: Sequence[StoredRun], layer: str) -> Axes:
    """Draw violins of the κ of a layer along training, as `layers_figure` does."""
    probes, _ = probed_layers(runs, layer=layer)
    groups = probed_groups(runs)
    edges = stretches([probes[group.label] for group in groups], len(groups))
    draw_layer(ax, probes, groups, layer, edges)
    ax.set_xlabel("iteration")
    ax.set_ylabel(r"$\kappa$")
    return ax


#: Most columns of the picture, and most rows of one panel; with more units, rows are layers.
CELLS, ROWS = 160, 40
#: Colour map whose perceived lightness grows with κ, for every common type of colour vision.
COLORS = "cividis"
HATCH = "//////"


def heatmap_figure(runs: Sequence[StoredRun], *, page: Page = COLUMN) -> Figure:
    """The median log10 κ, in the coordinates of each method, of every block over the iterations: a panel a method.

    A row is an output unit, or a layer where there are more than `ROWS` units; the first layer is at the top. A cell
    is the median over seeds, iterations of a stretch and units of the row. It is hatched where unresolved values leave
    the median open; white: not measured, or the Hessian is zero, as for a unit that is never active.
    """
    pictures = cells_of(runs)
    known = np.concatenate([lower[np.isfinite(upper)] for _, lower, upper, _ in pictures.values()])
    low, high = (np.log10(known.min()), np.log10(known.max())) if len(known) else (0.0, 1.0)
    scale = Normalize(low, max(high, low + 0.1))
    open_cells = any(np.isinf(upper).any() for _, _, upper, _ in pictures.values())
    tallest = max(len(names) for names, *_ in pictures.values())

    def paint(ax: Axes, label: str) -> None:
        names, lower, upper, edges = pictures[label]
        draw_cells(ax, lower, upper, edges, scale, label)
        step = max(1, len(names) // 12)
        ax.set_yticks(np.arange(0, len(names), step), [shortened(name) for name in names[::step]])

    with page.styled():
        figure = painted(list(pictures), page, min(2.2, 0.13 * tallest), paint, scale, r"median $\log_{10}\kappa$")
        handle = Patch(facecolor="white", edgecolor=NEUTRAL, hatch=HATCH, lw=0.4, label="median unresolved")
        add_heading(figure, page, f"{title_of(probed_groups(runs))} · own coordinates", [handle] if open_cells else [])
    return figure


def painted(
    labels: Sequence[str], page: Page, height: float, paint: Callable[[Axes, str], None], scale: Normalize, name: str
) -> Figure:
    """A panel for each label, ``height`` inches high, filled by ``paint(ax, label)``, with one colour bar."""
    columns = panel_columns(len(labels), page)
    rows = -(-len(labels) // columns)
    figure = page.figure(1.0 + rows * (0.5 + height))
    axes = figure.subplots(rows, columns, squeeze=False, sharex=True, sharey=True).ravel()
    for ax, label in zip(axes, labels, strict=False):
        paint(ax, label)
        ax.set_title(page.wrapped(label) if columns == 1 else shortened(label), loc="left", pad=2.0)
    for ax in axes[len(labels) :]:
        ax.set_visible(False)
    for ax in axes[max(0, len(labels) - columns) : len(labels)]:
        ax.set_xlabel("iteration")
        ax.tick_params(labelbottom=True)
    shown = [ax for ax in axes if ax.get_visible()]
    bar = figure.colorbar(ScalarMappable(scale, COLORS), ax=shown, location="right", aspect=30, pad=0.02)
    bar.set_label(name)
    bar.outline.set_linewidth(0.5)
    return figure


def panel_columns(panels: int, page: Page) -> int:
    """Number of panels side by side."""
    if page.wide:
        return panels if panels <= 3 else 2 if panels == 4 else 3
    return 1 if panels <= 2 else 2


Cells = tuple[list[str], np.ndarray, np.ndarray, np.ndarray]


def cells_of(runs: Sequence[StoredRun]) -> dict[str, Cells]:
    """Names of the rows, the median of each cell (rows, stretches), and the edges of stretches, by method."""
    import pandas as pd

    probes = {group.label: own_kappas(group) for group in probed_groups(runs)}
    probes = {label: probe for label, probe in probes.items() if len(probe)}
    if not probes:
        raise ConfigError("none of the runs was probed: train with --probe-every 1 or more")
    if len(probes) > PANELS:
        raise ConfigError(f"{len(probes)} methods are too many for one heatmap: give runs of at most {PANELS}")
    blocks = list(
        dict.fromkeys(key for probe in probes.values() for key in zip(probe["layer"], probe["unit"], strict=True))
    )
    iterations = np.unique(np.concatenate([probe["iteration"].to_numpy() for probe in probes.values()]))
    if len(blocks) < 2 or len(iterations) < 2:
        raise ConfigError(
            "a heatmap needs two probed units and two probed iterations at least: name more layers or units in the "
            "study's [probe]"
        )
    edges = cell_edges(iterations)
    by_unit = len(blocks) <= ROWS
    names = list(dict.fromkeys(place_name(*block, " / ") if by_unit else block[0] for block in blocks))
    found = {}
    for label, probe in probes.items():
        row = probe["layer"]
        if by_unit:
            places = zip(row, probe["unit"], strict=True)
            row = pd.Series([place_name(layer, unit, " / ") for layer, unit in places], index=row.index)
        found[label] = (names, *medians(probe, row.map(names.index), len(names), edges), edges)
    return found


def cell_edges(iterations: np.ndarray) -> np.ndarray:
    """Edges of the columns of cells: one for each of the ascending iterations, or for stretches of many."""
    width = max(1, -(-len(iterations) // CELLS))
    last = np.median(np.diff(iterations)) if len(iterations) > 1 else 1.0
    return np.append(iterations[::width], iterations[-1] + last)


def medians(probe: pd.DataFrame, row: pd.Series, rows: int, edges: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Bounds of the median in each cell: lower and upper (rows, stretches), NaN where there is no value."""
    place = np.searchsorted(edges, probe["iteration"].to_numpy(), side="right") - 1
    lower, upper = (np.full((rows, len(edges) - 1), np.nan) for _ in range(2))
    for (number, column), cell in probe.groupby([row.to_numpy(), place]):
        found = quantile(cell["lower"].to_numpy(dtype=float), cell["upper"].to_numpy(dtype=float), 0.5)
        lower[number, column], upper[number, column] = found
    return lower, upper


def draw_cells(ax: Axes, lower: np.ndarray, upper: np.ndarray, edges: np.ndarray, scale: Normalize, name: str) -> None:
    """Draw the picture (``NAME-cells``): log10 of the medians that are known, hatches over the others."""
    value = np.where(np.isfinite(upper) & (lower == upper), lower, np.nan)
    heights = np.arange(len(lower) + 1) - 0.5
    mesh = ax.pcolormesh(edges, heights, np.log10(value), cmap=COLORS, norm=scale, rasterized=True)
    mesh.set_gid(f"{name}-cells")
    for row, column in zip(*np.nonzero(~np.isnan(upper) & np.isnan(value)), strict=True):
        left, right = edges[column], edges[column + 1]
        style: dict[str, Any] = {"facecolor": "white", "edgecolor": NEUTRAL, "hatch": HATCH, "lw": 0}
        ax.add_patch(Rectangle((left, row - 0.5), right - left, 1, gid=f"{name}-unresolved", **style))
    ax.set_ylim(len(lower) - 0.5, -0.5)
    ax.set_xlim(edges[0], edges[-1])
    ax.tick_params(axis="y", length=0)
    ax.xaxis.set_major_locator(MaxNLocator(4, steps=[1, 2, 2.5, 5, 10], integer=True))


CAPTION = (
    "κ in the method's own coordinates over all probed units, seeds and iterations; 10 %, median, 90 %: quantiles that "
    "take unresolved κ into account, ≥: a lower bound of it; unres.: how many of them are"
)
QUANTILES = {"kappa_q10": 0.1, "kappa_median": 0.5, "kappa_q90": 0.9}


def layer_kappa_frame(runs: Sequence[StoredRun]) -> pd.DataFrame:
    """Quantiles of the condition numbers of each layer.

    Returns
    -------
    pandas.DataFrame
        One row per group of runs and layer: method, layer, data, units, measured (number of κ), unresolved, and
        kappa_q10, kappa_median, kappa_q90: quantiles, NaN where unresolved values leave them open, with the bounds
        ``_lower`` and ``_upper``.
    """
    import pandas as pd

    rows = []
    for group in probed_groups(runs):
        for layer, probe in own_kappas(group).groupby("layer", sort=False):
            lower, upper = probe["lower"].to_numpy(dtype=float), probe["upper"].to_numpy(dtype=float)
            row: dict[str, Any] = {"method": group.label, "layer": layer, "data": probe["data"].iloc[0]}
            row |= {
                # a block that was measured as a whole counts as one
                "units": max(1, probe["unit"].nunique()),
                "measured": int(np.sum(~np.isnan(lower))),
                "unresolved": int(np.isinf(upper).sum()),
            }
            for name, q in QUANTILES.items():
                row |= located(name, quantile(lower, upper, q))
            rows.append(row)
    return pd.DataFrame(rows)


def layer_kappa_columns(frame: pd.DataFrame) -> list[Column]:
    """Columns of `layer_kappa_frame` as they are shown."""
    titles = {
        "kappa_q10": ("κ 10 %", r"$\kappa$ 10\,\%"),
        "kappa_median": ("median", ""),
        "kappa_q90": ("90 %", r"90\,\%"),
    }
    return [
        words("method", "method", code=True),
        words("layer", "layer", code=True),
        Column("data", lambda row: Words(str(row["data"])), left=True),
        Column("units", lambda row: Number((row["units"],), "d")),
        *(interval(title, name, latex) for name, (title, latex) in titles.items()),
        Column("unres.", lambda row: Number((row["unresolved"], row["measured"]), "d", "{0} / {1}")),
    ]


LAYERS_FIGURE = FigureKind(
    "layers",
    "violins of κ over the units of each layer, in each method's coordinates, along training",
    PROBED,
    layers_figure,
    probed_layers,
    ("layer",),
)


HEATMAP_FIGURE = FigureKind(
    "heatmap",
    "log10 κ of every probed unit at every iteration, a panel a method",
    "runs of one study that were probed at two units or more",
    heatmap_figure,
    cells_of,
)

LAYERS_TABLE = TableKind(
    "layers",
    "a row for each method and layer: quantiles of κ in the method's coordinates",
    PROBED,
    layer_kappa_frame,
    layer_kappa_columns,
    CAPTION,
)
