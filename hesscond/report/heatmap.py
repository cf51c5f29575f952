"""log10 κ of every probed layer at every iteration, as a picture."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Normalize
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle
from matplotlib.ticker import MaxNLocator

from hesscond.errors import ConfigError
from hesscond.report.axes import NEUTRAL
from hesscond.report.groups import probed_groups, quantile, title_of
from hesscond.report.layers import own_kappas
from hesscond.report.legends import add_heading
from hesscond.report.page import COLUMN, Page
from hesscond.report.probed import shortened

if TYPE_CHECKING:
    import pandas as pd

    from hesscond.study.store import StoredRun

#: Columns of the picture, at most, and rows of one panel; beyond that rows are layers.
CELLS, ROWS = 160, 40
#: Panels of a figure, at most.
PANELS = 12
#: Perceived lightness grows with κ, with every common colour vision.
COLORS = "cividis"
HATCH = "//////"


def heatmap_figure(runs: Sequence[StoredRun], *, page: Page = COLUMN) -> Figure:
    """The median log10 κ, in the coordinates of each method, of every block over the iterations: a panel a method.

    A row is an output unit, or a layer where there are more than `ROWS` units; the first layer is at the top. A cell
    is the median over seeds, iterations of a stretch and units of the row. It is hatched where the unresolved among
    them leave the median open; white: not measured, or the Hessian is zero, as that of a unit that is never active.

    Parameters
    ----------
    runs
        Of one study.
    page
        What it is drawn for.

    Returns
    -------
    matplotlib.figure.Figure
        Pictures inside vector files have one pixel for each cell.

    Raises
    ------
    ConfigError
        Fewer than two units were probed, at fewer than two iterations; too many methods; different studies.
    """
    pictures = cells_of(runs)
    known = np.concatenate([lower[np.isfinite(upper)] for _, lower, upper, _ in pictures.values()])
    low, high = (np.log10(known.min()), np.log10(known.max())) if len(known) else (0.0, 1.0)
    scale = Normalize(low, max(high, low + 0.1))
    with page.styled():
        columns = column_count(len(pictures), page)
        rows = -(-len(pictures) // columns)
        tallest = max(len(names) for names, *_ in pictures.values())
        figure = page.figure(1.0 + rows * (0.5 + min(2.2, 0.13 * tallest)))
        axes = figure.subplots(rows, columns, squeeze=False, sharex=True, sharey=True).ravel()
        image, some_open = ScalarMappable(scale, COLORS), False
        for ax, (label, (names, lower, upper, edges)) in zip(axes, pictures.items(), strict=False):
            draw(ax, lower, upper, edges, scale, label)
            some_open |= bool(np.isinf(upper).any())
            step = max(1, len(names) // 12)
            ax.set_yticks(np.arange(0, len(names), step), [shortened(name) for name in names[::step]])
            ax.set_title(page.wrapped(label) if columns == 1 else shortened(label), loc="left", pad=2.0)
        for ax in axes[len(pictures) :]:
            ax.set_visible(False)
        for ax in axes[max(0, len(pictures) - columns) : len(pictures)]:
            ax.set_xlabel("iteration")
            ax.tick_params(labelbottom=True)
        shown = [ax for ax in axes if ax.get_visible()]
        bar = figure.colorbar(image, ax=shown, location="right", aspect=30, pad=0.02)
        bar.set_label(r"median $\log_{10}\kappa$")
        bar.outline.set_linewidth(0.5)
        handle = Patch(facecolor="white", edgecolor=NEUTRAL, hatch=HATCH, lw=0.4, label="median unresolved")
        add_heading(figure, page, f"{title_of(probed_groups(runs))} · own coordinates", [handle] if some_open else [])
    return figure


def column_count(panels: int, page: Page) -> int:
    """How many panels side by side."""
    if page.wide:
        return panels if panels <= 3 else 2 if panels == 4 else 3
    return 1 if panels <= 2 else 2


Cells = tuple[list[str], np.ndarray, np.ndarray, np.ndarray]


def cells_of(runs: Sequence[StoredRun]) -> dict[str, Cells]:
    """Names of the rows, where the median of each cell lies (rows, stretches), and the edges of stretches, by method.

    Raises
    ------
    ConfigError
        Fewer than two units were probed, at fewer than two iterations; too many methods; different studies.
    """
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
    width = max(1, -(-len(iterations) // CELLS))
    starts = iterations[::width]
    edges = np.append(starts, iterations[-1] + np.median(np.diff(iterations)))
    by_unit = len(blocks) <= ROWS
    names = [f"{layer} / {unit}" for layer, unit in blocks] if by_unit else list(dict.fromkeys(b[0] for b in blocks))
    return {label: (names, *medians(probe, names, edges, by_unit), edges) for label, probe in probes.items()}


def medians(probe: pd.DataFrame, names: list[str], edges: np.ndarray, by_unit: bool) -> tuple[np.ndarray, np.ndarray]:
    """Where the median of the κ in each cell lies: lower and upper (rows, stretches), NaN without any."""
    row = probe["layer"] + " / " + probe["unit"].astype(str) if by_unit else probe["layer"]
    place = np.searchsorted(edges, probe["iteration"].to_numpy(), side="right") - 1
    lower, upper = (np.full((len(names), len(edges) - 1), np.nan) for _ in range(2))
    for (name, column), cell in probe.groupby([row.to_numpy(), place]):
        found = quantile(cell["lower"].to_numpy(dtype=float), cell["upper"].to_numpy(dtype=float), 0.5)
        lower[names.index(name), column], upper[names.index(name), column] = found
    return lower, upper


def draw(ax: Axes, lower: np.ndarray, upper: np.ndarray, edges: np.ndarray, scale: Normalize, name: str) -> None:
    """The picture (``NAME-cells``): log10 of the medians that are known, hatches over those that are not."""
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
