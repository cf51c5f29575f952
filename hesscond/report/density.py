"""Figure of the spectral density of a Hessian, with its outliers and negative eigenvalues."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from hesscond.report.page import COLUMN, Page
from hesscond.report.palette import METHOD_COLORS
from hesscond.report.plotting import add_legend, label_figure, logarithmic

if TYPE_CHECKING:
    from hesscond.spectra.density import Curve, Density

#: Colours of positive and negative eigenvalues, and of the null space.
POSITIVE, NEGATIVE, NULL = METHOD_COLORS["bnp"], METHOD_COLORS["vanilla"], "0.1"

#: Points of the curve.
POINTS = 1500

#: Decades of the density axis, at most.
DECADES = 9

#: Nodes of each probe at either end that are marked.
MARKED = 8


def density_figure(density: Density, title: str | None = None, *, page: Page = COLUMN) -> Figure:
    """The density of the eigenvalues, logarithmic, over a linear axis.

    The curve is smoothed with Gaussians, narrow where the quadrature resolves single eigenvalues and wide where it
    does not; the line below the figure states their widths. The band is the standard error over the probes. Negative
    eigenvalues have a colour of their own. Ticks along the bottom are the extreme nodes of the probes: where those of
    all probes agree there is an eigenvalue. A null space that was known is no part of the curve but a stem at zero,
    with its share in the legend.

    Parameters
    ----------
    density
        Result of `hesscond.density`.
    title
        Title above the figure.
    page
        Page that the figure is drawn for.

    Returns
    -------
    matplotlib.figure.Figure
        Save it with `save_figure`.
    """
    curve = density.curve(POINTS)
    with page.styled():
        figure = page.figure(2.5)
        ax = figure.add_subplot()
        low, high = heights(density, curve)
        ax.set_yscale("log")
        ax.set_ylim(low, high)
        signs, null = draw_curve(ax, density, curve, low), draw_null(ax, density)
        draw_nodes(ax, density)
        label_axes(ax, curve, density)
        if signs or null:
            add_legend(ax, [[handle] for handle in signs], null)
        label_figure(figure, page, title, remark(density, curve))
    return figure


def heights(density: Density, curve: Curve) -> tuple[float, float]:
    """Limits of the density axis: a fifth of the peak of a single eigenvalue is still visible, if it can be."""
    top = float(curve.density.max())
    if top == 0:
        return 0.1, 10.0
    single = 1 / (density.order * curve.width * math.sqrt(2 * math.pi))
    return max(0.2 * min(single, top), top * 10.0**-DECADES), 3 * top


def draw_curve(ax: Axes, density: Density, curve: Curve, low: float) -> list[Any]:
    """Draw the curve with its band, coloured by the sign of the eigenvalues; return the legend entries."""
    x, middle, error = (tensor.numpy() for tensor in (curve.x, curve.density, curve.error))
    error = np.where(np.isfinite(error), error, 0.0)
    handles = []
    for sign, color, name in ((-1, NEGATIVE, "negative"), (1, POSITIVE, "positive")):
        # the tail of a Gaussian beyond zero is no eigenvalue of the other sign
        if (density.bottom >= -density.blur) if sign < 0 else (density.top <= 0):
            continue
        both = density.bottom < -density.blur and density.top > 0
        part = sign * x >= 0 if both else np.full(len(x), True)
        ax.fill_between(x[part], low, middle[part], color=color, alpha=0.16, lw=0, zorder=2, gid=f"{name}-area")
        bottom, top = np.maximum(middle - error, low)[part], np.maximum(middle + error, low)[part]
        ax.fill_between(x[part], bottom, top, color=color, alpha=0.4, lw=0, zorder=2, gid=f"{name}-band")
        ax.plot(x[part], np.maximum(middle[part], low / 10), color=color, lw=0.9, zorder=3, gid=name)
        if sign < 0:
            handles.append(Patch(color=color, alpha=0.6, lw=0, label=rf"$\lambda<0$: {density.negative}"))
        elif handles:
            handles.append(Patch(color=color, alpha=0.6, lw=0, label=r"$\lambda>0$"))
    return handles


def draw_null(ax: Axes, density: Density) -> list[Any]:
    """Draw a stem at zero for the null space that was known; return its legend entry."""
    if not density.null:
        return []
    low, high = ax.get_ylim()
    top = high / (high / low) ** 0.06
    ax.vlines(0.0, low, top, color=NULL, lw=0.9, zorder=4, gid="null")
    style: dict[str, Any] = {"marker": "o", "color": NULL, "markeredgewidth": 0}
    ax.plot([0.0], [top], ls="none", ms=3.5, zorder=5, gid="null-head", **style)
    label = f"known null space: {100 * density.null_weight:.3g} %"
    return [Line2D([], [], ls="none", ms=3.5, label=label, **style)]


def draw_nodes(ax: Axes, density: Density) -> None:
    """Draw ticks at the extreme nodes of every probe, or at the extreme eigenvalues if they were computed."""
    marked: list[np.ndarray] = []
    for nodes, weights in zip(density.nodes.numpy(), density.weights.numpy(), strict=True):
        there = nodes[weights > 0]
        marked += [there] if len(there) <= 2 * MARKED else [there[:MARKED], there[-MARKED:]]
    places = np.concatenate(marked) if marked else np.zeros(0)
    style: dict[str, Any] = {"color": "0.1", "lw": 0.35, "alpha": 0.7, "zorder": 4, "gid": "nodes"}
    ax.vlines(places, 0, 0.04, transform=ax.get_xaxis_transform(), **style)


def label_axes(ax: Axes, curve: Curve, density: Density) -> None:
    """Set limits, ticks and names of both axes."""
    # wide Gaussians reach to where no eigenvalue can be
    low = max(float(curve.x[0]), density.bottom - 5 * curve.width)
    ax.set_xlim(low, min(float(curve.x[-1]), density.top + 5 * curve.width))
    ax.xaxis.set_major_locator(MaxNLocator(6, steps=[1, 2, 5, 10]))
    ax.set_xlabel(r"eigenvalue $\lambda$")
    ax.set_ylabel("density of eigenvalues")
    logarithmic(ax)
    ax.set_axisbelow(True)
    ax.grid(axis="y", color="0.92", lw=0.4)


def remark(density: Density, curve: Curve) -> str:
    """Remark on how the density was computed, and on the curve."""
    if density.seed is None:
        how = f"all {density.order} eigenvalues"
    else:
        probes = f"{density.probes} probes" if density.probes > 1 else "1 probe"
        how = f"n = {density.order:,}; {probes} × {density.steps} Lanczos steps"
    band = ", band: ± standard error" if density.probes > 1 else ""
    width = scientific(curve.width)
    if curve.widest > 1.5 * curve.width:
        width = f"{width}–{scientific(curve.widest)}"
    return f"{how}; Gaussians of width {width}{band}"


def scientific(value: float) -> str:
    """Number to two digits, as a power of ten where that is shorter."""
    exponent = math.floor(math.log10(value))
    if -3 <= exponent <= 3:
        return f"{value:.2g}"
    return rf"${value / 10.0**exponent:.1f}\times10^{{{exponent}}}$"
