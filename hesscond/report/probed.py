"""Figure of κ per layer, from the results of a probe."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from hesscond.probing import tables
from hesscond.report import plotting
from hesscond.report.page import COLUMN, Page
from hesscond.report.palette import METHOD_COLORS

if TYPE_CHECKING:
    import pandas as pd

    from hesscond.probing.results import ProbeResult

#: Positive semidefinite blocks, and blocks with negative eigenvalues.
PLAIN, INDEFINITE, MEDIAN = METHOD_COLORS["bnp"], METHOD_COLORS["vanilla"], "0.1"

#: Share of a row's height over which its dots are spread.
SPREAD = 0.66
#: With more dots than this they become an image inside a PDF or SVG.
MANY_DOTS = 3000
GOLDEN = (5**0.5 - 1) / 2


def probe_figure(result: ProbeResult | pd.DataFrame, title: str = "", *, page: Page = COLUMN) -> Figure:
    """κ of every layer on a logarithmic axis, layers from the top in network order.

    At level ``"unit"`` a layer's row holds a dot for every output unit, spread over the height of the row, and a
    bar at their median; at level ``"layer"`` one dot with its interval. Blocks with negative eigenvalues are
    diamonds of another colour. An unresolved κ is an open triangle at its lower bound, which points to where κ is,
    and no part of the median; a Hessian that is exactly zero has no κ and shows only as the rank 0.

    Parameters
    ----------
    result
        A `ProbeResult`, or its ``to_frame()``.
    title
        Title above the figure.
    page
        Page that the figure is drawn for.
    """
    import pandas as pd

    frame: pd.DataFrame = result if isinstance(result, pd.DataFrame) else result.to_frame()
    layers = tables.layer_frame(frame)
    whole = bool(frame["unit"].isna().all())
    count = len(layers)
    with page.styled():
        row = next(height for most, height in ((4, 0.45), (12, 0.28), (25, 0.19), (10**9, 0.14)) if count <= most)
        height = 0.95 + count * row
        figure = page.figure(max(height, 1.5))
        ax = figure.add_subplot()
        ax.set_xscale("log", nonpositive="mask")
        ax.set_ylim(count - 0.5, -0.5)
        ax.set_yticks(range(count), plotting.shortened(list(layers["layer"])))
        for row in range(1, count, 2):
            ax.axhspan(row - 0.5, row + 0.5, color="0.95", lw=0, zorder=0)
        handles = draw_blocks(ax, frame, layers, whole)
        if handles:
            plotting.logarithmic_x(ax)
        else:
            plotting.say_empty(ax, "every Hessian is zero" if count else "nothing was probed")
        plotting.add_heading(figure, page, title, handles)
        ax.set_xlabel(r"$\kappa$ of the whole layer" if whole else r"$\kappa$ of the output units")
        right = ax.twinx()
        right.set_ylim(ax.get_ylim())
        ranks = [
            f"{tables.span(row['rank_min'], row['rank_max'])} / {tables.span(row['nullity_min'], row['nullity_max'])}"
            for row in layers.to_dict("records")
        ]
        right.set_yticks(range(count), ranks)
        right.tick_params(axis="y", length=0)
        ax.annotate("rank / nullity", (1, 0), (2, -15), xycoords="axes fraction", textcoords="offset points", va="top")
        ax.tick_params(axis="y", length=0)
    return figure


def draw_blocks(ax: Axes, frame: pd.DataFrame, layers: pd.DataFrame, whole: bool) -> list[Line2D]:
    """Draw dots, medians, intervals and triangles; return the legend entries of what was drawn."""
    place = {name: row for row, name in enumerate(layers["layer"])}
    rows = frame["layer"].map(place).to_numpy(dtype=float)
    kappa, lower, upper = (frame[n].to_numpy(dtype=float) for n in ("kappa", "kappa_lower", "kappa_upper"))
    resolved = frame["resolved"].to_numpy(dtype=bool)
    indefinite = frame["negative"].fillna(0).to_numpy(dtype=int) > 0
    unresolved = ~resolved & ~tables.is_zero(frame).to_numpy(dtype=bool)
    heights = rows if whole else rows + spread(frame)
    size = 4.5 if whole else max(1.3, 3.6 - 0.12 * frame.groupby("layer").size().max() ** 0.5 - 0.02 * len(layers))
    common: dict[str, Any] = {"ls": "none", "zorder": 3, "rasterized": len(frame) > MANY_DOTS}
    alpha = 1.0 if whole else 0.55
    noun = "layer" if whole else "unit"
    handles = []
    for chosen, color, marker, label, name in (
        (resolved & ~indefinite, PLAIN, "o", noun, "blocks"),
        (resolved & indefinite, INDEFINITE, "D", rf"{noun} with $\lambda<0$", "indefinite"),
    ):
        if not chosen.any():
            continue
        style: dict[str, Any] = {"marker": marker, "color": color, "markeredgewidth": 0}
        scale = 0.85 if marker == "D" else 1.0
        if whole:
            ax.hlines(heights[chosen], lower[chosen], upper[chosen], color=color, lw=1.4, zorder=2, gid=f"{name}-range")
        ax.plot(kappa[chosen], heights[chosen], **common, **style, ms=scale * size, alpha=alpha, gid=name)
        handles.append(Line2D([], [], ls="none", **style, ms=4 * scale, label=label))
    if not whole and resolved.any():
        medians = layers["kappa_median"].to_numpy(dtype=float)
        at = np.flatnonzero(np.isfinite(medians))
        length = 0.42
        ax.vlines(medians[at], at - length, at + length, color=MEDIAN, lw=1.3, zorder=5, gid="medians")
        bar: dict[str, Any] = {"ls": "none", "marker": "|", "ms": 6, "mew": 1.3, "color": MEDIAN}
        handles.append(Line2D([], [], **bar, label="median of resolved"))
    if unresolved.any():
        style = {"marker": ">", "mfc": "none"}
        for chosen, color in ((unresolved & ~indefinite, PLAIN), (unresolved & indefinite, INDEFINITE)):
            drawn: dict[str, Any] = common | style | {"zorder": 4, "mew": 0.6, "color": color, "ms": size + 0.8}
            ax.plot(lower[chosen], heights[chosen], **drawn, gid="unresolved")
        shown: dict[str, Any] = {**style, "ls": "none", "mew": 0.7, "ms": 4.5, "color": "0.25"}
        handles.append(Line2D([], [], **shown, label="unresolved (lower bound)"))
    return handles


def spread(frame: pd.DataFrame) -> np.ndarray:
    """Offset of each block's dot from the middle of its row: reproducible, and evenly spread."""
    number = frame.groupby("layer", sort=False).cumcount().to_numpy()
    total = frame.groupby("layer", sort=False)["layer"].transform("size").to_numpy()
    return np.where(total == 1, 0.0, SPREAD * ((0.5 + number * GOLDEN) % 1 - 0.5))
