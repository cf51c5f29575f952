"""Blocks along training, by type and depth, by layer or by unit: heat maps and bands of κ, λ, rank and inertia.

A block is a unit, or a layer that was probed as a whole.
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from itertools import chain
from numbers import Integral
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.collections import PatchCollection
from matplotlib.colors import Normalize
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch, Rectangle
from matplotlib.ticker import MaxNLocator

from hesscond.errors import ConfigError
from hesscond.hessians import roles
from hesscond.report import plotting, registry, selection, series
from hesscond.report.page import COLUMN, Page
from hesscond.report.palette import MethodLook

if TYPE_CHECKING:
    import pandas as pd

    from hesscond.runs import StoredRun

By = Literal["kind", "layer", "unit"]
#: Name of a type of block or of a layer, and depth or unit within it.
Row = tuple[str, int | None]
Ends = tuple[np.ndarray, np.ndarray]

#: Most panels of a figure, most columns of a heat map, most points of a band, and most rows labelled one by one.
PANELS, CELLS, POINTS, LABELLED = 12, 160, 30, 60


# --- quantities -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Quantity:
    """Quantity of blocks: ``ends`` bounds it in probe rows; the ``known`` bound is shown where it is not resolved."""

    title: str
    label: str
    ends: Callable[[pd.DataFrame], Ends]
    logarithmic: bool = True
    known: str = "lower"

    def bound(self, lower: np.ndarray, upper: np.ndarray) -> np.ndarray:
        """The bound that is shown."""
        return lower if self.known == "lower" else upper


def spectrum_of(probe: pd.DataFrame) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(rows,) whether the spectrum is resolved (or the block zero); whether an eigenvalue is nonzero; the order."""
    resolved = probe["resolved"].fillna(False).to_numpy(dtype=bool)
    rank = probe["rank"].to_numpy(dtype=float, na_value=np.nan)
    return resolved | (rank == 0), rank > 0, rank + probe["nullity"].to_numpy(dtype=float, na_value=np.nan)


def largest(probe: pd.DataFrame) -> Ends:
    """λ_max of blocks that are not zero."""
    _, nonzero, _ = spectrum_of(probe)
    values = np.where(nonzero, series.finite(probe["lambda_max"]).to_numpy(dtype=float), np.nan)
    return values, values


def smallest(probe: pd.DataFrame) -> Ends:
    """Smallest nonzero |λ|; where it is not resolved, at most the smallest that was distinguished from zero."""
    resolved, nonzero, _ = spectrum_of(probe)
    values = np.where(nonzero, series.finite(probe["lambda_min"]).to_numpy(dtype=float), np.nan)
    return np.where(resolved | np.isnan(values), values, 0.0), values


def relative_rank(probe: pd.DataFrame) -> Ends:
    """Share of nonzero eigenvalues; those distinguished from zero are a lower bound."""
    resolved, _, order = spectrum_of(probe)
    values = probe["rank"].to_numpy(dtype=float, na_value=np.nan) / order
    return values, np.where(resolved | np.isnan(values), values, 1.0)


def negative_share(probe: pd.DataFrame) -> Ends:
    """Share of negative eigenvalues; of those not distinguished from zero, none or all may be negative."""
    resolved, _, order = spectrum_of(probe)
    counted = probe["negative"].to_numpy(dtype=float, na_value=np.nan)
    rank = probe["rank"].to_numpy(dtype=float, na_value=np.nan)
    least, most = np.where(np.isnan(counted), 0.0, counted), np.where(np.isnan(counted), rank, counted)
    return least / order, (most + np.where(resolved, 0.0, order - rank)) / order


def mean_eigenvalue(probe: pd.DataFrame) -> Ends:
    """Trace / n of blocks that are not zero."""
    _, nonzero, order = spectrum_of(probe)
    values = np.where(nonzero, probe["trace"].to_numpy(dtype=float) / order, np.nan)
    return values, values


NAMED = {
    "kappa": Quantity("κ", r"$\kappa$", lambda probe: series.intervals(probe, "kappa")),
    "lambda_max": Quantity("λ_max", r"$|\lambda|_{\max}$", largest),
    "lambda_min": Quantity("λ_min⁺", r"smallest nonzero $|\lambda|$", smallest, known="upper"),
    "trace": Quantity("trace / size", "trace / size", mean_eigenvalue),
    "rank": Quantity("rank / size", "rank / size", relative_rank, logarithmic=False),
    "negative": Quantity("negative", "share of negative eigenvalues", negative_share, logarithmic=False),
    "kappa_own": Quantity("κ own", r"$\kappa$, own coordinates", lambda probe: series.intervals(probe, "kappa_own")),
}


def quantity_of(name: str) -> Quantity:
    """The quantity of that name."""
    if name not in NAMED:
        raise ConfigError(f"unknown quantity {name!r}: choose from {', '.join(registry.QUANTITIES)}")
    return NAMED[name]


# --- rows of the log --------------------------------------------------------------------------------------------------


def block_probes(
    runs: Sequence[StoredRun], by: By, quantity: str, layer: str | None = None
) -> tuple[dict[str, pd.DataFrame], list[Row]]:
    """The probe rows of each group of runs by its label, and the rows of a figure that show them."""
    import pandas as pd

    probes = rows_of_groups(runs, quantity_of(quantity))
    everything = pd.concat([rows[["layer", "unit", "lower"]] for rows in probes.values()], ignore_index=True)
    if everything["lower"].isna().all():
        raise ConfigError(f"the logs of the runs have no {quantity_of(quantity).title} of any block")
    layers = list(everything["layer"].unique())
    if layer is not None and layer not in layers:
        raise ConfigError(f"layer {layer!r} was not probed: choose from {', '.join(layers)}")
    blocks = everything.loc[:, ["layer", "unit"]].drop_duplicates()
    if (len(layers) if by == "kind" else len(blocks)) < 2 and by != "layer":
        noun = "layer" if by == "kind" else "unit"
        raise ConfigError(f"only one {noun} was probed: blocks are compared where the study's [probe] names several")
    # a row for each of many units would be too thin to be seen
    by = "layer" if by == "unit" and len(blocks) > LABELLED else by
    named = {label: [row_of(*at, by) for at in zip(r["layer"], r["unit"], strict=True)] for label, r in probes.items()}
    order = in_order(chain.from_iterable(named.values()), roles.KINDS if by == "kind" else ())
    for label, rows in probes.items():
        rows = rows.assign(row=list(map(order.index, named[label])))
        probes[label] = rows if layer is None else rows[rows["layer"] == layer]
    return probes, order


def rows_of_groups(runs: Sequence[StoredRun], quantity: Quantity) -> dict[str, pd.DataFrame]:
    """Probe rows of each group of runs by its label, with the bounds of a quantity."""
    import pandas as pd

    probes = {}
    for group in selection.probed_groups(runs):
        rows = pd.concat(
            [selection.of_units(run.table("probe")).assign(seed=run.seed) for run in group.runs], ignore_index=True
        )
        batches = rows[rows["data"] == "batch"]
        distinct = ["seed", "iteration", "data", "layer", "unit"]
        rows = (batches if len(batches) else rows).drop_duplicates(distinct, keep="last", ignore_index=True)
        if len(rows):
            lower, upper = quantity.ends(rows)
            probes[group.label] = rows.assign(lower=lower, upper=upper)
    if not probes:
        raise ConfigError("none of the runs was probed: train with --probe-every 1 or more")
    if len(probes) > PANELS:
        raise ConfigError(f"{len(probes)} methods are too many for one figure of blocks: give runs of at most {PANELS}")
    return probes


@cache
def row_of(layer: str, unit: Any, by: By) -> Row:
    """The row of the figure that shows a block."""
    if by == "kind":
        role = roles.role_of(layer)
        return role.kind, role.depth
    return layer, int(unit) if by == "unit" and isinstance(unit, Integral) else None


def in_order(rows: Iterable[Row], first: Sequence[str]) -> list[Row]:
    """Distinct rows: names in the order of ``first``, then others as they come; by number, those without one last."""
    distinct = list(dict.fromkeys(rows))
    order = list(dict.fromkeys([*first, *(name for name, _ in distinct)]))
    return sorted(distinct, key=lambda row: (order.index(row[0]), row[1] is None, row[1] or 0))


def stretches_of(probes: Mapping[str, pd.DataFrame], most: int) -> tuple[np.ndarray, int]:
    """First iterations of at most ``most`` stretches, and the number of probed iterations in each."""
    iterations = np.unique(np.concatenate([rows["iteration"].to_numpy() for rows in probes.values()]))
    width = -(-len(iterations) // most)
    return iterations[::width], width


def stretch_of(probe: pd.DataFrame, starts: np.ndarray) -> np.ndarray:
    """The number of the stretch of each probe row."""
    return np.searchsorted(starts, probe["iteration"].to_numpy(), side="right") - 1


def quartiles(rows: pd.DataFrame) -> dict[str, float]:
    """Bounds of median and quartiles of rows with ``lower`` and ``upper``."""
    lower, upper = rows["lower"].to_numpy(dtype=float), rows["upper"].to_numpy(dtype=float)
    bounds = {}
    for name, q in (("median", 0.5), ("q25", 0.25), ("q75", 0.75)):
        bounds[f"{name}_lower"], bounds[f"{name}_upper"] = series.quantile(lower, upper, q)
    return bounds


# --- heat map ---------------------------------------------------------------------------------------------------------


def heat_cells(runs: Sequence[StoredRun], *, by: By, quantity: str) -> tuple[dict[str, Ends], list[Row], np.ndarray]:
    """Bounds (rows, columns) of the medians of each method, the rows, and the first iteration of each column."""
    probes, rows = block_probes(runs, by, quantity)
    starts, _ = stretches_of(probes, CELLS)
    cells = {}
    for label, probe in probes.items():
        lower, upper = np.full((2, len(rows), len(starts)), np.nan)
        for place, cell in probe.groupby([probe["row"].to_numpy(), stretch_of(probe, starts)]):
            ends = cell["lower"].to_numpy(dtype=float), cell["upper"].to_numpy(dtype=float)
            lower[place], upper[place] = series.quantile(*ends, 0.5)
        cells[label] = lower, upper
    return cells, rows, starts


def heatmap_figure(
    runs: Sequence[StoredRun], *, by: By = "unit", quantity: str = "kappa_own", page: Page = COLUMN
) -> Figure:
    """A quantity of blocks (rows) at every probed iteration (columns): a panel a method.

    A cell is the median over the blocks of a row, their probed units, the seeds, and the iterations of a column where
    there are more than fit. Where unresolved values leave it open, the cell has the colour of its bound and is hatched;
    where it is negative, as a trace may be, the cell has the colour of its absolute value and a minus; white: not
    measured, or zero, as for a unit that is never active. The data are mini-batches, or the training set where only
    that was probed.

    Parameters
    ----------
    runs
        Runs of one study.
    by
        Rows: ``"kind"`` for types of blocks by depth, ``"layer"``, or ``"unit"`` (layers where there are too many).
    quantity
        ``"kappa_own"`` (in the method's own coordinates), or a quantity in plain parameters: ``"kappa"``,
        ``"lambda_max"``, ``"lambda_min"``, ``"trace"``, ``"rank"``, ``"negative"``.
    page
        Page that the figure is drawn for.
    """
    cells, rows, starts = heat_cells(runs, by=by, quantity=quantity)
    chosen = quantity_of(quantity)
    medians = {label: chosen.bound(lower, upper) for label, (lower, upper) in cells.items()}
    # left open by unresolved values
    is_open = {label: lower < upper for label, (lower, upper) in cells.items()}
    colors = medians
    if chosen.logarithmic:
        colors = {label: np.log10(np.where(median != 0, np.abs(median), np.nan)) for label, median in medians.items()}
    shown = np.concatenate([values[~np.isnan(values)] for values in colors.values()])
    low, high = (float(shown.min()), float(shown.max())) if len(shown) else (0.0, 1.0)
    scale = Normalize(low, max(high, low + (0.1 if chosen.logarithmic else 1e-3)))
    with page.styled():
        wide = min(3, len(cells)) if len(cells) != 4 else 2
        columns = wide if page.wide else 1 if len(cells) <= 2 else 2
        height = max(0.6, min(ROW * len(rows), TALLEST))
        figure = page.figure(1.0 + -(-len(cells) // columns) * (0.5 + height))
        axes = plotting.panels(figure, len(cells), columns, sharey=True)
        # beside the names of the rows and the bar
        letters = page.letters((page.width - 1.6) / columns, page.style["axes.titlesize"])
        for ax, label in zip(axes, cells, strict=True):
            draw_cells(ax, colors[label], is_open[label], medians[label] < 0, scale, label)
            for place in range(1, len(rows)):
                if rows[place][0] != rows[place - 1][0]:
                    ax.axhline(place - 0.5, color="white", lw=1.0)
            ax.set_yticks(*row_labels(rows))
            step = max(1, -(-len(starts) // 5))
            ax.set_xticks(np.arange(0, len(starts), step), [str(int(start)) for start in starts[::step]])
            ax.set_title(textwrap.fill(label, letters), loc="left", pad=2.0)
        bar = figure.colorbar(ScalarMappable(scale, plotting.COLORS), ax=axes, location="right", aspect=30, pad=0.02)
        bar.set_label(rf"median $\log_{{10}}$ {chosen.label}" if chosen.logarithmic else f"median {chosen.label}")
        bar.outline.set_linewidth(0.5)
        handles: list[Artist] = []
        if any(map(np.any, is_open.values())):
            label = f"unresolved: {chosen.known} bound of the median"
            handles.append(Patch(facecolor="0.75", edgecolor=plotting.NEUTRAL, hatch=HATCH, lw=0.4, label=label))
        if any((values < 0).any() for values in medians.values()):
            handles.append(Line2D([], [], color=plotting.NEUTRAL, **MINUS, label="negative: its absolute value"))
        what = " · blocks by type and depth" if by == "kind" else ""
        plotting.add_heading(figure, page, f"{selection.title_of(selection.probed_groups(runs))}{what}", handles)
    return figure


HATCH = "//////"
#: Style of the mark of a negative median.
MINUS: Mapping[str, Any] = {"ls": "none", "marker": "_", "ms": 4.0, "mew": 0.8}


def draw_cells(
    ax: Axes, values: np.ndarray, hatched: np.ndarray, negative: np.ndarray, scale: Normalize, name: str
) -> None:
    """Draw the cells (``NAME-cells``), hatches (``NAME-unresolved``) and signs (``NAME-negative``)."""
    rows, columns = values.shape
    mesh = ax.pcolormesh(values, cmap=plotting.COLORS, norm=scale, rasterized=True, shading="nearest")
    mesh.set_gid(f"{name}-cells")
    # dark hatches on light cells, light ones on dark
    light = np.nan_to_num(scale(values)) > 0.55
    for tone, where in ((plotting.NEUTRAL, light), ("0.85", ~light)):
        places = zip(*np.nonzero(hatched & where), strict=True)
        cells = [Rectangle((x - 0.5, y - 0.5), 1, 1) for y, x in places]
        if cells:
            style: dict[str, Any] = {"facecolors": "none", "edgecolors": tone, "linewidths": 0}
            ax.add_collection(PatchCollection(cells, hatch=HATCH, gid=f"{name}-unresolved", **style))
        y, x = np.nonzero(negative & where)
        if len(x):
            ax.plot(x, y, color=tone, gid=f"{name}-negative", **MINUS)
    ax.set_xlim(-0.5, columns - 0.5)
    ax.set_ylim(rows - 0.5, -0.5)
    ax.tick_params(axis="y", length=0)


#: Heights in inches: of a row, and of all rows together where they are many.
ROW, TALLEST = 0.13, 6.0


def row_labels(rows: Sequence[Row]) -> tuple[list[int], list[str]]:
    """Places and texts of at most `LABELLED` labels: a name where it begins, with numbers below."""
    places = list(range(0, len(rows), -(-len(rows) // LABELLED)))
    names = [name for name, _ in rows]
    short = dict(zip(dict.fromkeys(names), plotting.shortened(list(dict.fromkeys(names))), strict=True))
    labels = []
    for before, place in zip([None, *places], places, strict=False):
        name, number = rows[place]
        # a layer outside the transformer blocks has no depth
        shown = ("–" if names.count(name) > 1 else "") if number is None else str(number)
        begins = before is None or names[before] != name
        labels.append(f"{short[name]}  {shown}".rstrip() if begins else shown)
    return places, labels


# --- bands ------------------------------------------------------------------------------------------------------------


def bands_of(runs: Sequence[StoredRun], *, by: By, quantity: str, layer: str | None = None) -> dict[str, pd.DataFrame]:
    """The median and the quartiles of each type of block or layer along training, by the label of the group."""
    import pandas as pd

    probes, rows = block_probes(runs, by, quantity, layer)
    (starts, width), bands = stretches_of(probes, POINTS), {}
    for label, probe in probes.items():
        names = probe["row"].map([name for name, _ in rows].__getitem__)
        lines = [
            {"name": name, "iteration": starts[stretch]} | quartiles(cell)
            for (name, stretch), cell in probe.groupby([names, stretch_of(probe, starts)], sort=False)
        ]
        bands[label] = pd.DataFrame(lines).sort_values("iteration", kind="stable", ignore_index=True)
        bands[label].attrs["width"] = width
    names = names_in(bands)
    if by == "layer" and len(names) > PANELS:
        raise ConfigError(f"{len(names)} layers are too many for one figure: choose one, or draw a heatmap")
    return bands


def names_in(bands: Mapping[str, pd.DataFrame], by: By = "layer") -> list[str]:
    """The names of the panels in their order."""
    rows = [(name, None) for table in bands.values() for name in table["name"]]
    return [name for name, _ in in_order(rows, roles.KINDS if by == "kind" else ())]


def bands_figure(
    runs: Sequence[StoredRun],
    *,
    by: By = "kind",
    quantity: str = "kappa",
    layer: str | None = None,
    page: Page = COLUMN,
) -> Figure:
    """A quantity of blocks over the iterations, a panel for each type or layer: the median in a band of the quartiles.

    They are taken over all blocks of the panel, their probed units, the seeds, and stretches of iterations where more
    than `POINTS` were probed. Where unresolved values leave the
    median open, its bound is an open triangle; where they leave a quartile open, the band reaches the end of the axis.

    Parameters
    ----------
    runs
        Runs of one study.
    by
        Panels: ``"kind"`` for types of blocks, or ``"layer"``.
    quantity
        As for `heatmap_figure`.
    layer
        The only layer to show; all by default.
    page
        Page that the figure is drawn for.
    """
    bands = bands_of(runs, by=by, quantity=quantity, layer=layer)
    chosen, names = quantity_of(quantity), names_in(bands, by)
    looks = selection.looks_of(selection.probed_groups(runs))
    is_open = any((table["median_lower"] < table["median_upper"]).any() for table in bands.values())
    bound = f"median unresolved ({chosen.known} bound)"
    with page.styled():
        columns = min(4 if page.wide else 2, len(names)) if page.wide or len(names) > 3 else 1
        height = 0.95 if columns > 1 else 1.25
        figure = page.figure(0.5 + height * -(-len(names) // columns) + plotting.heading_height([*bands, bound], page))
        axes = plotting.panels(figure, len(names), columns, sharey=True)
        set_heights(axes[0], bands, chosen)
        letters = page.letters((page.width - 0.4) / columns, page.style["axes.titlesize"])
        for ax, name, short in zip(axes, names, plotting.shortened(names, letters), strict=True):
            draw_bands(ax, bands, name, chosen, looks)
            ax.set_title(short, loc="left", pad=2.0)
        figure.supylabel(chosen.label, fontsize=page.style["axes.labelsize"])
        handles = [plotting.method_handle(label, looks[label]) for label in bands]
        if is_open:
            style: dict[str, Any] = {"mfc": "none", "mew": 0.7, "ms": 3.5, "ls": "none", "color": plotting.NEUTRAL}
            handles.append(Line2D([], [], marker=triangle(chosen), label=bound, **style))
        plotting.add_heading(figure, page, selection.title_of(selection.probed_groups(runs)), handles)
        noun = "layer" if by == "layer" else "type"
        remark = f"median and quartiles over the blocks of a {noun}, their units and the seeds"
        if (width := next(iter(bands.values())).attrs["width"]) > 1:
            remark += f", {width} probed iterations each"
        if any(
            (table["q75_upper"] == np.inf).any() or (chosen.logarithmic and (table["q25_lower"] == 0).any())
            for table in bands.values()
        ):
            remark += "; a band that reaches the end of the axis: unresolved"
        plotting.label_figure(figure, page, "; ".join([remark, *plotting.out_of_view(axes[:1])]))
    return figure


def triangle(quantity: Quantity) -> str:
    """Marker of a bound; it points to where the value may be."""
    return "^" if quantity.known == "lower" else "v"


def set_heights(ax: Axes, bands: Mapping[str, pd.DataFrame], chosen: Quantity) -> None:
    """Set scale and limits of an axis that shows the bands."""
    ends = ["median_lower", "median_upper", "q25_lower", "q75_upper"]
    drawn = np.concatenate([table[ends].to_numpy(dtype=float).ravel() for table in bands.values()])
    drawn = drawn[np.isfinite(drawn) & (drawn > 0)] if chosen.logarithmic else drawn[np.isfinite(drawn)]
    if chosen.logarithmic:
        ax.set_yscale("log", nonpositive="mask")
        if len(drawn):
            room = max((drawn.max() / drawn.min()) ** 0.06, 1.05)
            ax.set_ylim(drawn.min() / room, drawn.max() * room)
            plotting.keep_in_view(ax, drawn)
        plotting.logarithmic(ax)
    else:
        room = 0.06 * max(float(np.ptp(drawn)), 0.02)
        ax.set_ylim(max(0.0, drawn.min() - room) - 0.3 * room, min(1.0, drawn.max() + room) + 0.3 * room)
        ax.yaxis.set_major_locator(MaxNLocator(4))


def draw_bands(
    ax: Axes, bands: Mapping[str, pd.DataFrame], name: str, chosen: Quantity, looks: Mapping[str, MethodLook]
) -> None:
    """Draw medians (``LABEL-NAME-median``), bands (``-band``) and triangles (``-unresolved``) within the limits."""
    bottom, top = ax.get_ylim()
    for label, frame in bands.items():
        table = frame[frame["name"] == name]
        look, at, gid = looks[label], table["iteration"], f"{label}-{name}"
        # beyond the axis, where nothing says how far
        low = table["q25_lower"].where(table["q25_lower"] > 0, bottom) if chosen.logarithmic else table["q25_lower"]
        high = table["q75_upper"].where(np.isfinite(table["q75_upper"]) | table["q75_upper"].isna(), top)
        ax.fill_between(at, low, high, color=look.color, alpha=0.2, lw=0, zorder=2).set_gid(f"{gid}-band")
        is_open = table["median_lower"] < table["median_upper"]
        style: dict[str, Any] = {"marker": look.marker, "ms": 2.4, "mew": 0.3, "mec": "white"}
        # a value between two open ones is seen by its marker alone
        style["markevery"] = 1 if bool(is_open.any()) else max(1, len(table) // 6)
        median = table["median_lower"].mask(is_open)
        ax.plot(at, median, color=look.color, ls=look.dash, lw=1.0, zorder=3, gid=f"{gid}-median", **style)
        bounds = chosen.bound(table["median_lower"].to_numpy(), table["median_upper"].to_numpy())[is_open]
        mark: dict[str, Any] = {"marker": triangle(chosen), "ms": 2.6, "mfc": "none", "mew": 0.5, "ls": "none"}
        ax.plot(at[is_open], bounds, color=look.color, zorder=4, gid=f"{gid}-unresolved", **mark)
    plotting.along_iterations(ax, 4)
    ax.set_ylim(bottom, top)


def layer_axes(ax: Axes, runs: Sequence[StoredRun], layer: str, quantity: str = "kappa_own") -> Axes:
    """Draw a quantity of a layer's blocks along training, as `bands_figure` does."""
    bands = bands_of(runs, by="layer", quantity=quantity, layer=layer)
    set_heights(ax, bands, quantity_of(quantity))
    draw_bands(ax, bands, layer, quantity_of(quantity), selection.looks_of(selection.probed_groups(runs)))
    ax.set_xlabel("iteration")
    ax.set_ylabel(quantity_of(quantity).label)
    return ax


SEVERAL = f"{registry.PROBED} at several layers"

HEATMAP_FIGURE = registry.FigureKind(
    "heatmap",
    50,
    "κ in each method's coordinates, or another quantity, of every probed unit at every iteration, a panel a method",
    f"{registry.PROBED} at several units",
    heatmap_figure,
    ("quantity",),
)

BLOCKS_FIGURE = registry.FigureKind(
    "blocks",
    60,
    "a heat map of κ, or of another quantity, by type of block and depth at every probed iteration, a panel a method",
    SEVERAL,
    partial(heatmap_figure, by="kind", quantity="kappa"),
    ("quantity",),
)

LAYERS_FIGURE = registry.FigureKind(
    "layers",
    40,
    "the median and quartiles of κ over the units of each layer, in each method's coordinates, along training",
    registry.PROBED,
    partial(bands_figure, by="layer", quantity="kappa_own"),
    ("layer", "quantity"),
)

BANDS_FIGURE = registry.FigureKind(
    "block-bands",
    70,
    "the median and quartiles of κ, or of another quantity, along training, a panel for each type of block",
    SEVERAL,
    bands_figure,
    ("quantity",),
)
