"""The pieces figures are drawn with: curves, points, unresolved κ, logarithmic axes, legends."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.path import Path
from matplotlib.patheffects import withStroke
from matplotlib.transforms import ScaledTranslation, Transform

from hesscond.report.axes import NEUTRAL
from hesscond.report.series import across_seeds, running_median, thinned, thinned_band

if TYPE_CHECKING:
    import pandas as pd


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
