"""The pieces figures are drawn with: curves, points, unresolved κ, logarithmic axes, legends."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.path import Path
from matplotlib.patheffects import withStroke
from matplotlib.ticker import (
    FuncFormatter,
    LogFormatterMathtext,
    LogLocator,
    MaxNLocator,
    NullFormatter,
    NullLocator,
)
from matplotlib.transforms import ScaledTranslation, Transform

from hesscond.report.series import across_seeds, running_median, thinned, thinned_band

if TYPE_CHECKING:
    import pandas as pd

#: Width of a journal column, in inches.
COLUMN_WIDTH = 3.3

#: rcParams while a figure is made; 6.5 pt is the smallest type.
STYLE: dict[str, Any] = {
    "font.family": "DejaVu Sans",
    "mathtext.fontset": "dejavusans",
    "font.size": 7.0,
    "axes.labelsize": 7.0,
    "axes.linewidth": 0.6,
    "axes.labelpad": 2.5,
    "xtick.labelsize": 6.5,
    "ytick.labelsize": 6.5,
    "xtick.direction": "out",
    "ytick.direction": "out",
    "xtick.major.size": 2.5,
    "ytick.major.size": 2.5,
    "xtick.minor.size": 1.4,
    "ytick.minor.size": 1.4,
    "xtick.major.width": 0.6,
    "ytick.major.width": 0.6,
    "xtick.minor.width": 0.4,
    "ytick.minor.width": 0.4,
    "xtick.major.pad": 2.0,
    "ytick.major.pad": 2.0,
    "legend.fontsize": 6.5,
}

#: Colour of legend handles that stand for every method, and of remarks.
NEUTRAL = "0.25"

#: Size in points of the open triangle of an unresolved κ.
UNRESOLVED_SIZE = {"batch": 2.8, "train": 5.0}


#: With more markers than this in a series they are drawn smaller.
MANY = 15

#: An open triangle that stands on a bar.
BARRED_TRIANGLE = Path(
    [(0, 1), (-1, -0.7), (1, -0.7), (0, 1), (-1.3, -1.9), (1.3, -1.9)],
    [Path.MOVETO, Path.LINETO, Path.LINETO, Path.CLOSEPOLY, Path.MOVETO, Path.LINETO],
)


@dataclass(frozen=True)
class Look:
    """How a quantity is drawn: a line where it is followed step by step, markers where it is measured rarely.

    Attributes
    ----------
    label
        For the legend.
    dash
        Line style.
    marker
        Of measured points.
    width
        Of the line, in points.
    raw
        Whether single values are drawn too, faintly.
    barred
        Whether the triangle of an unresolved value stands on a bar, to tell two quantities apart.
    """

    label: str
    dash: Any = "-"
    marker: str = "o"
    width: float = 1.1
    raw: bool = True
    barred: bool = False

    def line_handle(self, data: str = "") -> Line2D:
        """Legend entry of the line."""
        return Line2D([], [], color=NEUTRAL, ls=self.dash, lw=self.width, label=self.named(data))

    def marker_handle(self, data: str = "") -> Line2D:
        """Legend entry of the markers."""
        return Line2D([], [], color=NEUTRAL, ls="none", label=self.named(data), **marker_style(self))

    def unresolved_handle(self, data: str) -> Line2D:
        """Legend entry of its unresolved values."""
        label = f"{self.label} unresolved (lower bound), {data}"
        return Line2D([], [], color=NEUTRAL, ls="none", label=label, **unresolved_style(self, data))

    def named(self, data: str) -> str:
        """The label, with the data if there are several kinds."""
        return f"{self.label}, {data}" if data else self.label


def marker_style(look: Look) -> dict[str, Any]:
    """Filled markers with a white rim, that stand out from lines; crosses as they are."""
    if look.marker == "x":
        rim = withStroke(linewidth=1.9, foreground="white")
        return {"marker": "x", "markersize": 3.6, "markeredgewidth": 0.9, "path_effects": [rim]}
    return {"marker": look.marker, "markersize": 4.2, "markeredgewidth": 0.5, "markeredgecolor": "white"}


def draw_curve(ax: Axes, curves: Sequence[pd.Series], look: Look, color: str, window: int, name: str) -> bool:
    """Draw a noisy quantity: the running median of one run over its faint values, or of several with a band.

    Parameters
    ----------
    ax
        Where.
    curves
        One per seed, indexed by iteration, NaN where there is no value.
    look, color
        How.
    window
        Of the running median, in iterations.
    name
        Identifies the lines (``NAME-raw``, ``NAME-median``, ``NAME-band``) in the figure and in SVG files.

    Returns
    -------
    bool
        Whether there was anything to draw.
    """
    curves = [curve for curve in curves if curve.notna().any()]
    if not curves:
        return False
    if len(curves) == 1 and look.raw and window > 1:
        raw = thinned(curves[0])
        ax.plot(raw.index, raw, color=color, lw=0.35, alpha=0.28, zorder=2, gid=f"{name}-raw")
    together = across_seeds([running_median(curve, window) for curve in curves])
    if len(curves) > 1:
        band = thinned_band(together)
        shade = ax.fill_between(band.index, band["low"], band["high"], color=color, alpha=0.2, lw=0, zorder=2)
        shade.set_gid(f"{name}-band")
    median = thinned(together["median"])
    ax.plot(median.index, median, color=color, lw=look.width, ls=look.dash, zorder=3, gid=f"{name}-median")
    return True


def draw_points(ax: Axes, curves: Sequence[pd.Series], look: Look, color: str, name: str, shift: float = 0.0) -> bool:
    """Draw a quantity measured a few times: markers at the median of the seeds, with their range.

    Parameters
    ----------
    ax, curves, look, color
        As for `draw_curve`.
    name
        Identifies the markers (``NAME-points``) and the ranges (``NAME-range``).
    shift
        Points to the right that everything is set off by on paper; the data stay what they are.

    Returns
    -------
    bool
        Whether there was anything to draw.
    """
    curves = [curve for curve in curves if curve.notna().any()]
    if not curves:
        return False
    points = across_seeds(curves)
    if len(curves) > 1:
        bars = ax.vlines(points.index, points["low"], points["high"], color=color, lw=0.8, zorder=4)
        bars.set_gid(f"{name}-range")
        bars.set_transform(shifted(ax, shift))
    style = marker_style(look) | {"ls": "none", "color": color, "zorder": 5, "gid": f"{name}-points"}
    if len(points) > MANY:
        style["markersize"] *= 0.7
    (markers,) = ax.plot(points.index, points["median"], **style)
    markers.set_transform(shifted(ax, shift))
    return True


def draw_unresolved(
    ax: Axes,
    bounds: Sequence[pd.Series],
    look: Look,
    data: str,
    color: str,
    name: str,
    shift: float = 0.0,
) -> bool:
    """Draw the lower bounds of unresolved κ of every seed as open triangles.

    Parameters
    ----------
    ax, look, color, shift
        As for `draw_points`.
    bounds
        One per seed, indexed by iteration.
    data
        "batch" or "train".
    name
        Identifies the triangles (``NAME-unresolved``).

    Returns
    -------
    bool
        Whether there was anything to draw.
    """
    import pandas as pd

    points = pd.concat(bounds).dropna()
    if points.empty:
        return False
    style = unresolved_style(look, data) | {"ls": "none", "color": color, "gid": f"{name}-unresolved"}
    # those of single batches may be thousands: beneath the lines
    (triangles,) = ax.plot(points.index, points, zorder=5 if data == "train" else 2.5, **style)
    triangles.set_transform(shifted(ax, shift))
    return True


def shifted(ax: Axes, points: float) -> Transform:
    """Data coordinates, set off to the right by so many points; to be set after the limits know the data."""
    return ax.transData + ScaledTranslation(points / 72, 0.0, ax.figure.dpi_scale_trans)


def unresolved_style(look: Look, data: str) -> dict[str, Any]:
    """Open upward triangles, small for single batches."""
    size = UNRESOLVED_SIZE[data]
    return {
        "marker": BARRED_TRIANGLE if look.barred else "^",
        "markersize": 1.7 * size if look.barred else size,
        "markerfacecolor": "none",
        "markeredgewidth": 0.35 if data == "batch" else 0.8,
        "alpha": 0.6 if data == "batch" else 1.0,
    }


def add_legend(ax: Axes, columns: Sequence[Sequence[Line2D | None]], below: Sequence[Line2D]) -> None:
    """A legend above the axes, clear of the data.

    Parameters
    ----------
    ax
        Whose legend.
    columns
        Entries column by column; None leaves a place empty.
    below
        Longer entries, each a row of its own beneath those.
    """
    common: dict[str, Any] = {
        "loc": "lower left",
        "frameon": False,
        "borderpad": 0.15,
        "borderaxespad": 0.15,
        "handlelength": 2.2,
        "handletextpad": 0.5,
        "columnspacing": 1.2,
        "labelspacing": 0.25,
    }
    place: dict[str, Any] = {"bbox_to_anchor": (0.0, 1.0), "bbox_transform": ax.transAxes}
    if below:
        lower = ax.legend(handles=below, **common, **place)
        if not columns:
            return
        ax.add_artist(lower)
        height = (len(below) * 1.45 + 0.1) * STYLE["legend.fontsize"] / 72
        place["bbox_transform"] = ax.transAxes + ScaledTranslation(0.0, height, ax.figure.dpi_scale_trans)
    rows = max(map(len, columns))
    blank = Line2D([], [], ls="none", label=" ")
    handles = [entry or blank for column in columns for entry in [*column, *[None] * (rows - len(column))]]
    ax.legend(handles=handles, ncols=len(columns), **common, **place)


def say_empty(ax: Axes, sentence: str) -> None:
    """Write in the middle of an empty panel why it is empty."""
    ax.text(0.5, 0.5, sentence, transform=ax.transAxes, ha="center", va="center", color=NEUTRAL)
    ax.yaxis.set_major_locator(NullLocator())
    ax.yaxis.set_minor_locator(NullLocator())


def label_number(value: float, position: int | None = None) -> str:
    """A tick label: plain up to four digits, else as a power of ten."""
    if value <= 0:
        return ""
    exponent = int(np.floor(np.log10(value) + 1e-9))
    if -3 <= exponent <= 3:
        return f"{value:g}"
    return rf"${value / 10.0**exponent:.3g}\times10^{{{exponent}}}$"


def logarithmic(ax: Axes) -> None:
    """Ticks of a logarithmic y axis that already holds its data: powers of ten, or round numbers between them."""
    low, high = ax.get_ylim()
    ax.set_ylim(low, high)
    decades = np.floor(np.log10(high) + 1e-9) - np.ceil(np.log10(low) - 1e-9) + 1
    axis = ax.yaxis
    if decades >= 2:
        axis.set_major_locator(LogLocator(numticks=7))
        axis.set_major_formatter(LogFormatterMathtext())
        subs = range(2, 10) if decades <= 4 else (1.0,)
        axis.set_minor_locator(LogLocator(subs=subs, numticks=99))
    else:
        wide = high / low > 4
        axis.set_major_locator(LogLocator(subs=(1, 2, 5), numticks=9) if wide else MaxNLocator(5, steps=[1, 2, 5, 10]))
        axis.set_major_formatter(FuncFormatter(label_number))
        axis.set_minor_locator(NullLocator())
    axis.set_minor_formatter(NullFormatter())
