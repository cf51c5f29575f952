"""Blocks by type and depth along training: κ, both ends of the spectrum, rank and inertia as maps, bands and tables."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.collections import PatchCollection
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
from hesscond.report.layers import COLORS, HATCH, PANELS, cell_edges, medians, painted
from hesscond.report.page import COLUMN, Page
from hesscond.report.registry import PROBED, FigureKind, TableKind
from hesscond.report.selection import Group, looks_of, of_units, probed_groups, title_of
from hesscond.report.series import finite, intervals, located, quantile
from hesscond.report.tables import Column, Number, Words, words
from hesscond.roles import KINDS, role_of

if TYPE_CHECKING:
    import pandas as pd

    from hesscond.runs import StoredRun


def in_order(kinds: pd.DataFrame) -> list[tuple[str, int | None]]:
    """Distinct pairs of kind and depth: known kinds in the order of `KINDS`, then others; by depth."""
    pairs = list(dict.fromkeys((kind, None if depth != depth else int(depth)) for kind, depth in kinds.to_numpy()))
    order = [*KINDS, *dict.fromkeys(kind for kind, _ in pairs if kind not in KINDS)]
    return sorted(pairs, key=lambda pair: (order.index(pair[0]), pair[1] is None, pair[1] or 0))


# --- quantities -------------------------------------------------------------------------------------------------------

Ends = tuple[np.ndarray, np.ndarray]


@dataclass(frozen=True)
class Quantity:
    """Quantity of a block that figures and tables show.

    Attributes
    ----------
    title, label
        Name in tables, and at axes.
    ends
        Gives the lower and upper bounds of the quantity for the rows of a probe table, NaN where there is none.
    logarithmic
        Whether it is drawn on a logarithmic scale.
    known
        Bound that is shown where it is not resolved: ``"lower"`` or ``"upper"``.
    form
        Format of a number in a table.
    """

    title: str
    label: str
    ends: Callable[[pd.DataFrame], Ends]
    logarithmic: bool = True
    known: str = "lower"
    form: str = ".2e"

    def bound(self, lower: np.ndarray, upper: np.ndarray) -> np.ndarray:
        """The bound that is shown."""
        return lower if self.known == "lower" else upper

    def cell(self, low: float, high: float, ends: tuple[float, float] | None = None) -> Number:
        """Table cell of a median, or of the bounds between which it lies, and the range around it."""
        values, pattern = [low], "{0}"
        if low < high and self.known == "upper":
            values, pattern = [high], "≤ {0}"
        elif low < high < np.inf:
            values, pattern = [low, high], "{0} … {1}"
        if ends is not None and not np.isnan(low):
            pattern += f" [{{{len(values)}}}, {{{len(values) + 1}}}]"
            values += ends
        return Number(tuple(values), self.form, pattern, lower=bool(np.isinf(high)))


def told(probe: pd.DataFrame) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(rows,) whether the spectrum is resolved (or the block zero); whether an eigenvalue is nonzero; the order."""
    resolved = probe["resolved"].fillna(False).to_numpy(dtype=bool)
    rank = probe["rank"].to_numpy(dtype=float, na_value=np.nan)
    return resolved | (rank == 0), rank > 0, rank + probe["nullity"].to_numpy(dtype=float, na_value=np.nan)


def largest(probe: pd.DataFrame) -> Ends:
    """λ_max of blocks that are not zero."""
    _, something, _ = told(probe)
    values = np.where(something, finite(probe["lambda_max"]).to_numpy(dtype=float), np.nan)
    return values, values


def smallest(probe: pd.DataFrame) -> Ends:
    """Smallest nonzero |λ|; where it is not resolved, at most the smallest that was told from zero."""
    sure, something, _ = told(probe)
    values = np.where(something, finite(probe["lambda_min"]).to_numpy(dtype=float), np.nan)
    return np.where(sure | np.isnan(values), values, 0.0), values


def relative_rank(probe: pd.DataFrame) -> Ends:
    """Share of nonzero eigenvalues; those told from zero are a lower bound."""
    sure, _, order = told(probe)
    values = probe["rank"].to_numpy(dtype=float, na_value=np.nan) / order
    return values, np.where(sure | np.isnan(values), values, 1.0)


def negative_share(probe: pd.DataFrame) -> Ends:
    """Share of negative eigenvalues; of those not told from zero, none or all may be negative."""
    sure, _, order = told(probe)
    counted = probe["negative"].to_numpy(dtype=float, na_value=np.nan)
    rank = probe["rank"].to_numpy(dtype=float, na_value=np.nan)
    least, most = np.where(np.isnan(counted), 0.0, counted), np.where(np.isnan(counted), rank, counted)
    return least / order, (most + np.where(sure, 0.0, order - rank)) / order


def mean_eigenvalue(probe: pd.DataFrame) -> Ends:
    """Trace / n of blocks that are not zero."""
    _, something, order = told(probe)
    values = np.where(something, probe["trace"].to_numpy(dtype=float) / order, np.nan)
    return values, values


QUANTITIES = {
    "kappa": Quantity("κ", r"$\kappa$", lambda probe: intervals(probe, "kappa")),
    "lambda_max": Quantity("λ_max", r"$|\lambda|_{\max}$", largest),
    "lambda_min": Quantity("λ_min⁺", r"smallest nonzero $|\lambda|$", smallest, known="upper"),
    "trace": Quantity("trace / size", "trace / size", mean_eigenvalue),
    "rank": Quantity("rank / size", "rank / size", relative_rank, logarithmic=False, form=".3f"),
    "negative": Quantity("negative", "share of negative eigenvalues", negative_share, logarithmic=False, form=".3f"),
}
#: LaTeX of the titles of quantities.
LATEX = {"kappa": r"$\kappa$", "lambda_max": r"$\lambda_{\max}$", "lambda_min": r"$\lambda_{\min}^{+}$"}


def quantity_of(name: str) -> Quantity:
    """The quantity of that name."""
    if name not in QUANTITIES:
        raise ConfigError(f"unknown quantity {name!r}: choose from {', '.join(QUANTITIES)}")
    return QUANTITIES[name]


def block_probes(runs: Sequence[StoredRun]) -> dict[str, pd.DataFrame]:
    """The probe rows of each group by its label, in plain parameters, with ``seed``, ``kind`` and ``depth`` (or NaN).

    The rows are those of mini-batches, or of the training set where only that was probed.
    """
    import pandas as pd

    found = {}
    for group in probed_groups(runs):
        rows = pd.concat([of_units(run.table("probe")).assign(seed=run.seed) for run in group.runs], ignore_index=True)
        batches = rows[rows["data"] == "batch"]
        rows = (batches if len(batches) else rows).drop_duplicates(
            ["seed", "iteration", "data", "layer", "unit"], keep="last"
        )
        if len(rows):
            kinds = {name: role_of(name) for name in rows["layer"].unique()}
            depths = {name: np.nan if depth is None else float(depth) for name, (_, depth) in kinds.items()}
            kind = rows["layer"].map({name: one for name, (one, _) in kinds.items()})
            found[group.label] = rows.assign(kind=kind, depth=rows["layer"].map(depths))
    if not found:
        raise ConfigError("none of the runs was probed: train with --probe-every 1 or more")
    if len({name for rows in found.values() for name in rows["layer"]}) < 2:
        raise ConfigError("only one layer was probed: blocks are compared where the study's [probe] names several")
    if len(found) > PANELS:
        raise ConfigError(f"{len(found)} methods are too many for one figure of blocks: give runs of at most {PANELS}")
    return found


def with_ends(probes: Mapping[str, pd.DataFrame], quantity: Quantity) -> dict[str, pd.DataFrame]:
    """Add columns ``lower`` and ``upper``, between which the quantity lies."""
    found = {}
    for label, rows in probes.items():
        lower, upper = quantity.ends(rows)
        found[label] = rows.assign(lower=lower, upper=upper)
    if not any(rows["lower"].notna().any() for rows in found.values()):
        raise ConfigError(f"the logs of the runs have no {quantity.title} of any block")
    return found


# --- heat map ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Picture:
    """Cells of one method in the heat map.

    Attributes
    ----------
    lower, upper : (rows, columns)
        Bounds between which the median lies; NaN where there is no value.
    """

    lower: np.ndarray
    upper: np.ndarray

    @property
    def open(self) -> np.ndarray:
        """Cells whose median is left open by unresolved values."""
        return ~np.isnan(self.lower) & (self.lower < self.upper)


def pictures_of(
    runs: Sequence[StoredRun], *, quantity: str = "kappa"
) -> tuple[dict[str, Picture], list[tuple[str, int | None]], np.ndarray]:
    """Picture of each method, kind and depth of the rows, and the first iteration of each column."""
    import pandas as pd

    probes = with_ends(block_probes(runs), quantity_of(quantity))
    everything = pd.concat(probes.values(), ignore_index=True)
    rows = in_order(everything[["kind", "depth"]])
    places = {(kind, -1.0 if depth is None else float(depth)): place for place, (kind, depth) in enumerate(rows)}
    edges = cell_edges(np.unique(everything["iteration"].to_numpy()))
    found = {}
    for label, probe in probes.items():
        keys = zip(probe["kind"], probe["depth"].fillna(-1.0), strict=True)
        row = pd.Series([places[key] for key in keys], index=probe.index)
        found[label] = Picture(*medians(probe, row, len(rows), edges))
    return found, rows, edges[:-1]


def blocks_figure(runs: Sequence[StoredRun], *, quantity: str = "kappa", page: Page = COLUMN) -> Figure:
    """A quantity of blocks by type and depth (rows) at every probed iteration (columns): a panel a method.

    A cell is the median over the blocks of a type and depth, their probed units, the seeds, and the iterations of a
    column where there are more than fit. Where unresolved values leave it open, the cell has the colour of its bound
    and is hatched; where it is negative, as a trace may be, the cell has the colour of its absolute value and a minus;
    white: not measured, or zero. The Hessian is that in plain parameters, over mini-batches, or over the training set
    where only that was probed.
    """
    chosen = quantity_of(quantity)
    pictures, rows, iterations = pictures_of(runs, quantity=quantity)
    medians_shown = {label: shown_medians(picture, chosen) for label, picture in pictures.items()}
    shown = {label: colours(values, chosen) for label, values in medians_shown.items()}
    known = np.concatenate([values[~np.isnan(values)] for values in shown.values()])
    low, high = (float(known.min()), float(known.max())) if len(known) else (0.0, 1.0)
    scale = Normalize(low, max(high, low + (0.1 if chosen.logarithmic else 1e-3)))

    def paint(ax: Axes, label: str) -> None:
        below = medians_shown[label] < 0
        draw_picture(ax, shown[label], pictures[label].open, below, rows, iterations, scale, label)

    with page.styled():
        name = rf"median $\log_{{10}}$ {chosen.label}" if chosen.logarithmic else f"median {chosen.label}"
        figure = painted(list(pictures), page, max(0.6, float(row_edges(rows)[-1])), paint, scale, name)
        handles: list[Artist] = []
        if any(picture.open.any() for picture in pictures.values()):
            label = f"unresolved: {chosen.known} bound of the median"
            handles.append(Patch(facecolor="0.75", edgecolor=NEUTRAL, hatch=HATCH, lw=0.4, label=label))
        if any((values < 0).any() for values in medians_shown.values()):
            handles.append(Line2D([], [], color=NEUTRAL, **MINUS, label="negative: its absolute value"))
        add_heading(figure, page, f"{title_of(probed_groups(runs))} · blocks by type and depth", handles)
    return figure


#: Style of the mark of a negative median.
MINUS: Mapping[str, Any] = {"ls": "none", "marker": "_", "ms": 4.0, "mew": 0.8}


def shown_medians(picture: Picture, quantity: Quantity) -> np.ndarray:
    """Median of each cell, or its bound."""
    return np.where(picture.open, quantity.bound(picture.lower, picture.upper), picture.lower)


def colours(values: np.ndarray, quantity: Quantity) -> np.ndarray:
    """Values that give cells their colours: log10 of the absolute value of the median."""
    return np.log10(np.where(values != 0, np.abs(values), np.nan)) if quantity.logarithmic else values


def draw_picture(
    ax: Axes,
    values: np.ndarray,
    hatched: np.ndarray,
    negative: np.ndarray,
    rows: Sequence[tuple[str, int | None]],
    iterations: np.ndarray,
    scale: Normalize,
    name: str,
) -> None:
    """Draw the cells (``NAME-cells``), hatches (``NAME-unresolved``), signs (``NAME-negative``) and labels."""
    count, columns = values.shape
    edges = row_edges(rows)
    ax.pcolormesh(np.arange(columns + 1) - 0.5, edges, values, cmap=COLORS, norm=scale, rasterized=True).set_gid(
        f"{name}-cells"
    )
    # dark hatches on light cells, light ones on dark
    light = np.nan_to_num(scale(values)) > 0.55
    for tone, where in ((NEUTRAL, light), ("0.85", ~light)):
        places = zip(*np.nonzero(hatched & where), strict=True)
        cells = [Rectangle((x - 0.5, edges[y]), 1, edges[y + 1] - edges[y]) for y, x in places]
        if cells:
            style: dict[str, Any] = {"facecolors": "none", "edgecolors": tone, "linewidths": 0}
            ax.add_collection(PatchCollection(cells, hatch=HATCH, gid=f"{name}-unresolved", **style))
        y, x = np.nonzero(negative & where)
        if len(x):
            ax.plot(x, (edges[y] + edges[y + 1]) / 2, color=tone, gid=f"{name}-negative", **MINUS)
    for place in range(1, count):
        if rows[place][0] != rows[place - 1][0]:
            ax.axhline(edges[place], color="white", lw=1.0)
    ax.set_yticks(*row_labels(rows))
    step = max(1, -(-columns // 5))
    ax.set_xticks(np.arange(0, columns, step), [str(int(one)) for one in iterations[::step]])
    ax.set_xlim(-0.5, columns - 0.5)
    ax.set_ylim(edges[-1], 0)
    ax.tick_params(axis="y", length=0)


#: Most rows of a picture that are labelled one by one; with more of them, whole kinds are labelled.
LABELLED = 60
#: Heights in inches: of a row, of a kind at least, and of all rows together where they are many.
ROW, LEAST, TALLEST = 0.1, 0.13, 6.0


def runs_of_kinds(rows: Sequence[tuple[str, int | None]]) -> list[list[int]]:
    """Places of the rows of each kind."""
    return [list(places) for _, places in groupby(range(len(rows)), key=lambda place: rows[place][0])]


def row_edges(rows: Sequence[tuple[str, int | None]]) -> np.ndarray:
    """(rows + 1,) edges of the rows, in inches from the top."""
    one = ROW if len(rows) <= LABELLED else TALLEST / len(rows)
    heights = [max(one, LEAST / len(places)) for places in runs_of_kinds(rows) for _ in places]
    return np.concatenate([[0.0], np.cumsum(heights)])


def row_labels(rows: Sequence[tuple[str, int | None]]) -> tuple[list[float], list[str]]:
    """Heights and texts of labels: the kind at its first row with depths below, or one for all of its rows."""
    edges = row_edges(rows)
    heights, labels = [], []
    for places in runs_of_kinds(rows):
        kind, depths = shortened(rows[places[0]][0]), [rows[place][1] for place in places]
        # a layer outside the transformer blocks comes last
        numbers = ["–" if depth is None and len(depths) > 1 else depth for depth in depths]
        if len(rows) > LABELLED:
            known = [depth for depth in depths if depth is not None]
            heights.append((edges[places[0]] + edges[places[-1] + 1]) / 2)
            labels.append(f"{kind}  {known[0]}–{known[-1]}" if len(known) > 1 else kind)
            continue
        for place, number in zip(places, numbers, strict=True):
            heights.append((edges[place] + edges[place + 1]) / 2)
            shown = "" if number is None else str(number)
            labels.append(f"{kind}  {shown}".rstrip() if place == places[0] else shown)
    return heights, labels


# --- bands ------------------------------------------------------------------------------------------------------------


def bands_of(runs: Sequence[StoredRun], *, quantity: str = "kappa") -> dict[str, pd.DataFrame]:
    """The median and the quartiles of each kind at every probed iteration, by the label of the group.

    Returns
    -------
    dict of pandas.DataFrame
        Columns kind, iteration, blocks and values (numbers of them), and for ``median``, ``q25`` and ``q75`` the two
        bounds between which they lie, as ``_lower`` and ``_upper``.
    """
    import pandas as pd

    found = {}
    for label, probe in with_ends(block_probes(runs), quantity_of(quantity)).items():
        lines = []
        for (kind, iteration), rows in probe.groupby(["kind", "iteration"], sort=False):
            line: dict[str, Any] = {"kind": kind, "iteration": iteration, "blocks": blocks_in(rows)}
            lines.append(line | {"values": int(rows["lower"].notna().sum())} | quartiles(rows))
        found[label] = pd.DataFrame(lines).sort_values("iteration", kind="stable", ignore_index=True)
    return found


def blocks_in(rows: pd.DataFrame) -> int:
    """Number of distinct blocks."""
    return len(rows[["layer", "unit"]].drop_duplicates())


def quartiles(rows: pd.DataFrame) -> dict[str, float]:
    """Bounds of median and quartiles of rows with ``lower`` and ``upper``."""
    lower, upper = rows["lower"].to_numpy(dtype=float), rows["upper"].to_numpy(dtype=float)
    found = {}
    for name, q in (("median", 0.5), ("q25", 0.25), ("q75", 0.75)):
        found[f"{name}_lower"], found[f"{name}_upper"] = quantile(lower, upper, q)
    return found


def bands_figure(runs: Sequence[StoredRun], *, quantity: str = "kappa", page: Page = COLUMN) -> Figure:
    """A quantity of blocks over the iterations, a panel for each type: the median in a band of the quartiles.

    They are taken over all blocks of the type, their probed units and the seeds. Where unresolved values leave the
    median open, its bound is an open triangle; where they leave a quartile open, the band reaches the end of the axis.
    """
    chosen = quantity_of(quantity)
    bands = bands_of(runs, quantity=quantity)
    groups = [group for group in probed_groups(runs) if group.label in bands]
    kinds = kinds_in(bands)
    looks = looks_of(groups)
    bound = f"median unresolved ({chosen.known} bound)"
    with page.styled():
        columns = min(4 if page.wide else 2, len(kinds))
        rows = -(-len(kinds) // columns)
        labels = [*(group.label for group in groups), bound]
        figure = page.figure(0.5 + 0.95 * rows + heading_height(labels, page))
        axes = figure.subplots(rows, columns, squeeze=False, sharex=True, sharey=True).ravel()
        some_open = draw_bands(list(axes[: len(kinds)]), groups, bands, kinds, chosen)
        for ax in axes[len(kinds) :]:
            ax.set_visible(False)
        for ax in axes[max(0, len(kinds) - columns) : len(kinds)]:
            ax.set_xlabel("iteration")
            ax.tick_params(labelbottom=True)
        figure.supylabel(chosen.label, fontsize=page.style["axes.labelsize"])
        handles = [method_handle(group.label, looks[group.label]) for group in groups]
        if some_open:
            style: dict[str, Any] = {"mfc": "none", "mew": 0.7, "ms": 3.5, "ls": "none", "color": NEUTRAL}
            handles.append(Line2D([], [], marker=triangle(chosen), label=bound, **style))
        add_heading(figure, page, title_of(groups), handles)
        parts = ["median and quartiles over the blocks of a type, their units and the seeds"]
        if any(
            (table["q75_upper"] == np.inf).any() or (chosen.logarithmic and (table["q25_lower"] == 0).any())
            for table in bands.values()
        ):
            parts[0] += "; a band that reaches the end of the axis: unresolved"
        label_figure(figure, page, None, "; ".join([*parts, *out_of_view(axes[:1])]))
    return figure


def kinds_in(bands: Mapping[str, pd.DataFrame]) -> list[str]:
    """The kinds of blocks in their order."""
    import pandas as pd

    everything = pd.concat(bands.values(), ignore_index=True)
    return [kind for kind, _ in in_order(everything[["kind"]].assign(depth=np.nan))]


def triangle(quantity: Quantity) -> str:
    """Marker of a bound; it points to where the value may be."""
    return "^" if quantity.known == "lower" else "v"


def draw_bands(
    axes: Sequence[Axes], groups: Sequence[Group], bands: Mapping[str, pd.DataFrame], kinds: list[str], chosen: Quantity
) -> bool:
    """Draw medians (``LABEL-KIND-median``), bands and triangles; return whether a median is open."""
    looks = looks_of(groups)
    names = ["median_lower", "median_upper", "q25_lower", "q75_upper"]
    drawn = np.concatenate([table[names].to_numpy(dtype=float).ravel() for table in bands.values()])
    drawn = drawn[np.isfinite(drawn) & (drawn > 0)] if chosen.logarithmic else drawn[np.isfinite(drawn)]
    first, some_open = axes[0], False
    if chosen.logarithmic:
        first.set_yscale("log", nonpositive="mask")
        if len(drawn):
            room = max((drawn.max() / drawn.min()) ** 0.06, 1.05)
            first.set_ylim(drawn.min() / room, drawn.max() * room)
            keep_in_view(first, drawn)
        logarithmic(first)
    else:
        room = 0.06 * max(float(np.ptp(drawn)), 0.02)
        first.set_ylim(max(0.0, drawn.min() - room) - 0.3 * room, min(1.0, drawn.max() + room) + 0.3 * room)
        first.yaxis.set_major_locator(MaxNLocator(4))
    bottom, top = first.get_ylim()
    for ax, kind in zip(axes, kinds, strict=True):
        for group in groups:
            table = bands[group.label].query("kind == @kind")
            look, at, gid = looks[group.label], table["iteration"], f"{group.label}-{kind}"
            # beyond the axis, where nothing says how far
            low = table["q25_lower"].where(table["q25_lower"] > 0, bottom) if chosen.logarithmic else table["q25_lower"]
            high = table["q75_upper"].where(np.isfinite(table["q75_upper"]) | table["q75_upper"].isna(), top)
            ax.fill_between(at, low, high, color=look.color, alpha=0.2, lw=0, zorder=2).set_gid(f"{gid}-band")
            is_open = table["median_lower"] < table["median_upper"]
            some_open |= bool(is_open.any())
            style: dict[str, Any] = {"marker": look.marker, "ms": 2.4, "mew": 0.3, "mec": "white"}
            # a value between two open ones is seen by its marker alone
            style["markevery"] = 1 if bool(is_open.any()) else max(1, len(table) // 6)
            median = table["median_lower"].mask(is_open)
            ax.plot(at, median, color=look.color, ls=look.dash, lw=1.0, zorder=3, gid=f"{gid}-median", **style)
            bounds = chosen.bound(table["median_lower"].to_numpy(), table["median_upper"].to_numpy())[is_open]
            mark: dict[str, Any] = {"marker": triangle(chosen), "ms": 2.6, "mfc": "none", "mew": 0.5, "ls": "none"}
            ax.plot(at[is_open], bounds, color=look.color, zorder=4, gid=f"{gid}-unresolved", **mark)
        ax.set_title(kind, loc="left", pad=2.0)
        ax.xaxis.set_major_locator(MaxNLocator(4, steps=[1, 2, 2.5, 5, 10], integer=True))
        ax.margins(x=0.03)
        ax.set_axisbelow(True)
        ax.grid(axis="y", color="0.92", lw=0.4)
    first.set_ylim(bottom, top)
    return some_open


# --- table ------------------------------------------------------------------------------------------------------------

#: Moments at which blocks are shown, as fractions of the way from the first to the last probe.
MOMENTS = {"0 %": 0.0, "10 %": 0.1, "50 %": 0.5, "end": 1.0}
CAPTION = (
    "median over the blocks of a type, their probed units and the seeds, at the probed iteration that is nearest to so "
    "much of the way; in brackets the quartiles; unresolved values are taken into account, with a bound (≥, ≤) or both "
    "(…) where they leave the median open; blocks in plain parameters"
)


def moments_of(iterations: np.ndarray) -> dict[str, int]:
    """Probed iteration nearest to each of `MOMENTS`; each iteration is named once, the end in any case."""
    found: dict[int, str] = {}
    for name in ("0 %", "end", "10 %", "50 %"):
        at = iterations[0] + MOMENTS[name] * (iterations[-1] - iterations[0])
        nearest = int(iterations[np.abs(iterations - at).argmin()])
        found.setdefault(nearest, name)
    return {name: at for at, name in sorted(found.items())}


def block_frame(runs: Sequence[StoredRun], *, quantity: str | None = None) -> pd.DataFrame:
    """Quantities of the blocks of each type along the training.

    Parameters
    ----------
    runs
        Runs of one study.
    quantity
        A key of `QUANTITIES`, for this quantity alone, at each depth. None: all of them, over all depths.

    Returns
    -------
    pandas.DataFrame
        One row per group of runs, kind (and depth) and moment: method, kind, (depth,) moment, iteration, blocks,
        seeds, n_params_min and n_params_max, and of each quantity ``NAME`` (the median, NaN where it is open),
        ``NAME_lower`` and ``NAME_upper`` (between which it lies), ``NAME_q25`` and ``NAME_q75`` (a lower bound of the
        lower and an upper bound of the upper quartile).
    """
    import pandas as pd

    names = list(QUANTITIES) if quantity is None else [quantity]
    chosen = {name: quantity_of(name) for name in names}
    lines = []
    for label, probe in block_probes(runs).items():
        moments = moments_of(np.unique(probe["iteration"].to_numpy()))
        pairs = in_order(probe[["kind", "depth"]])
        for kind, depth in pairs if quantity else [(kind, None) for kind in dict.fromkeys(k for k, _ in pairs)]:
            own = probe[probe["kind"] == kind]
            if quantity:
                own = own[own["depth"].isna() if depth is None else own["depth"] == depth]
            for moment, iteration in moments.items():
                rows = own[own["iteration"] == iteration]
                if not len(rows):
                    continue
                line: dict[str, Any] = {"method": label, "kind": kind}
                line |= {"depth": depth} if quantity else {}
                line |= {"moment": moment, "iteration": iteration, "blocks": blocks_in(rows)}
                line |= {"seeds": rows["seed"].nunique()}
                line |= {"n_params_min": rows["n_params"].min(), "n_params_max": rows["n_params"].max()}
                for name, one in chosen.items():
                    lower, upper = one.ends(rows)
                    found = quartiles(rows.assign(lower=lower, upper=upper))
                    line |= located(name, (found["median_lower"], found["median_upper"]))
                    line |= {f"{name}_q25": found["q25_lower"], f"{name}_q75": found["q75_upper"]}
                lines.append(line)
    frame = pd.DataFrame(lines)
    return frame.astype({"depth": "Int64"}) if quantity else frame


def shown_rows(frame: pd.DataFrame) -> pd.DataFrame:
    """The rows of the printed table: with depths, the moments of a block side by side."""
    import pandas as pd

    if "depth" not in frame:
        return frame
    lines = []
    for (method, kind, depth), rows in frame.groupby(["method", "kind", "depth"], sort=False, dropna=False):
        place = {"method": method, "kind": kind, "depth": np.nan if pd.isna(depth) else depth}
        first = rows.iloc[0].to_dict() | place
        lines.append(first | {"at": {row["moment"]: row for row in rows.to_dict("records")}})
    return pd.DataFrame(lines)


def block_columns(frame: pd.DataFrame) -> list[Column]:
    """Columns of the printed table."""
    start = [words("method", "method", code=True)] if frame["method"].nunique() > 1 else []
    start.append(words("block", "kind"))
    size = [
        Column("blocks", lambda row: Number((row["blocks"],), "d")),
        Column("params", size_cell),
    ]
    if "depth" not in frame:
        at = Column("at", lambda row: Words(f"{row['moment']} ({row['iteration']})"), left=True)
        return [*start, at, *size, *(quantity_column(name) for name in QUANTITIES)]
    (name,) = (one for one in QUANTITIES if one in frame)
    depth = Column(
        "depth", lambda row: Number((float(row["depth"]),), "d") if row["depth"] == row["depth"] else Words("")
    )
    return [*start, depth, *size, *(moment_column(name, moment) for moment in frame["moment"].unique())]


def size_cell(row: Mapping[str, Any]) -> Number:
    """Table cell with the number of parameters of a block."""
    low, high = int(row["n_params_min"]), int(row["n_params_max"])
    return Number((low,), "d") if low == high else Number((low, high), "d", "{0} – {1}")


def quantity_cell(name: str, row: Mapping[str, Any]) -> Number:
    """Table cell with the median of a quantity and its quartiles."""
    ends = (float(row[f"{name}_q25"]), float(row[f"{name}_q75"]))
    return QUANTITIES[name].cell(float(row[f"{name}_lower"]), float(row[f"{name}_upper"]), ends)


def quantity_column(name: str) -> Column:
    """Column of a quantity at the moment of the row."""
    chosen = QUANTITIES[name]

    def cell(row: Mapping[str, Any]) -> Number:
        if name == "kappa":
            return quantity_cell(name, row)
        return chosen.cell(float(row[f"{name}_lower"]), float(row[f"{name}_upper"]))

    return Column(chosen.title, cell, LATEX.get(name, ""))


def moment_column(name: str, moment: str) -> Column:
    """Column of a quantity at one moment, with its quartiles."""

    def cell(row: Mapping[str, Any]) -> Number:
        there = row["at"].get(moment)
        return Number((np.nan,)) if there is None else quantity_cell(name, there)

    title = f"{QUANTITIES[name].title}, {moment}"
    return Column(title, cell, f"{LATEX[name]}, {moment}".replace("%", r"\%") if name in LATEX else "")


BLOCKS_FIGURE = FigureKind(
    "blocks",
    "a heat map of κ, or of another quantity, by type of block and depth at every probed iteration, a panel a method",
    f"{PROBED} at several layers",
    blocks_figure,
    pictures_of,
    ("quantity",),
)

BANDS_FIGURE = FigureKind(
    "block-bands",
    "the median and quartiles of κ, or of another quantity, along training, a panel for each type of block",
    f"{PROBED} at several layers",
    bands_figure,
    bands_of,
    ("quantity",),
)

BLOCKS_TABLE = TableKind(
    "blocks",
    "a row for each type of block and moment of the training: κ, both ends of the spectrum, rank and inertia; of one "
    "quantity a row for each depth, and the moments side by side",
    f"{PROBED} at several layers",
    block_frame,
    block_columns,
    CAPTION,
    ("quantity",),
    rows=shown_rows,
)
