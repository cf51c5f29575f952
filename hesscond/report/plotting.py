"""Common parts of figures: curves and points, unresolved κ, logarithmic axes, titles, legends above the data."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.legend import Legend
from matplotlib.lines import Line2D
from matplotlib.path import Path
from matplotlib.patheffects import withStroke
from matplotlib.ticker import (
    LogFormatterMathtext,
    LogLocator,
    MaxNLocator,
    NullFormatter,
    NullLocator,
    ScalarFormatter,
)
from matplotlib.transforms import ScaledTranslation, Transform

from hesscond.report import selection, series
from hesscond.report.page import Page
from hesscond.report.palette import MethodLook

if TYPE_CHECKING:
    import pandas as pd

    from hesscond.runs import StoredRun

#: Colour of legend handles that stand for every method, and of remarks.
NEUTRAL = "0.25"
#: Colour map whose perceived lightness grows with the value, for every common type of colour vision.
COLORS = "cividis"
#: Markers along a curve.
MARKS = 7
#: Up to this number of evaluations are drawn as points: a line would suggest values between them.
FEW = 3
#: Rows to which a band is thinned, more than print shows; matplotlib thins lines by itself.
MANY_ROWS = 800


def label_figure(figure: Figure, page: Page, remark: str) -> None:
    """Add a remark below the panels, if there is one, broken to fit the page."""
    if remark:
        figure.supxlabel(page.wrapped(remark), fontsize=page.style["legend.fontsize"], color=NEUTRAL)


def panels(figure: Figure, count: int, columns: int, *, sharey: bool = False) -> list[Axes]:
    """Panels over the iterations, filled row by row; the lowest of each column names the iterations."""
    rows = -(-count // columns)
    axes = list(figure.subplots(rows, columns, squeeze=False, sharex=True, sharey=sharey).ravel())
    for ax in axes[count:]:
        ax.set_visible(False)
    for ax in axes[max(0, count - columns) : count]:
        ax.set_xlabel("iteration")
        ax.tick_params(labelbottom=True)
    return axes[:count]


def few_panels(page: Page, count: int, height: float, labels: Sequence[str]) -> tuple[Figure, list[Axes]]:
    """Figure with one or two `panels` below a heading with these labels, side by side on a wide page."""
    columns = count if page.wide else 1
    figure = page.figure(0.5 + height * count / columns + heading_height(labels, page))
    return figure, panels(figure, count, columns)


def along_iterations(ax: Axes, ticks: int = 5) -> None:
    """Add a grid, and ticks of the iterations."""
    ax.xaxis.set_major_locator(MaxNLocator(ticks, steps=[1, 2, 2.5, 5, 10], integer=True))
    ax.margins(x=0.03)
    ax.set_axisbelow(True)
    ax.grid(axis="y", color="0.92", lw=0.4)


def loss_name(runs: Sequence[StoredRun]) -> str:
    """Name of the loss of runs, with its unit."""
    mse = runs[0].config["training"].get("loss") == "mse"
    return "squared error" if mse else "loss (nats)"


def say_empty(ax: Axes, sentence: str) -> None:
    """Write in the middle of an empty panel why it is empty."""
    ax.text(0.5, 0.5, sentence, transform=ax.transAxes, ha="center", va="center", color=NEUTRAL)
    ax.yaxis.set_major_locator(NullLocator())
    ax.yaxis.set_minor_locator(NullLocator())


def drawn_values(ax: Axes) -> np.ndarray:
    """The heights of all lines and areas of an axes."""
    drawn = [np.asarray(line.get_ydata(), dtype=float) for line in ax.lines]
    drawn += [np.asarray(path.vertices)[:, 1] for shade in ax.collections for path in shade.get_paths()]
    return np.concatenate(drawn) if drawn else np.zeros(0)


def keep_in_view(ax: Axes, values: np.ndarray) -> None:
    """Set limits of a logarithmic y axis that a diverging run does not stretch (see `out_of_view`)."""
    logs = np.log10(values[np.isfinite(values) & (values > 0)])
    if not len(logs):
        return
    if np.ptp(logs) < 1e-9:
        # matplotlib does this for equal values, but warns of those that differ by rounding
        ax.autoscale(enable=False, axis="y")
        ax.set_ylim(10 ** (logs.min() - 1), 10 ** (logs.max() + 1))
        return
    # beyond the middle 98 % by more than its span and three decades
    low, high = np.quantile(logs, (0.01, 0.99))
    room = (high - low) + 3
    if low - room <= logs.min() and logs.max() <= high + room:
        return
    ends = max(logs.min(), low - room), min(logs.max(), high + room)
    pad = 0.05 * (ends[1] - ends[0])
    ax.set_ylim(10 ** (ends[0] - pad), 10 ** (ends[1] + pad))


def out_of_view(axes: Iterable[Axes]) -> list[str]:
    """Sentences about values beyond the limits of logarithmic y axes, one for each side that hides some."""
    remarks, several = [], list(axes)
    for ax in several:
        values = drawn_values(ax)
        values = values[np.isfinite(values) & (values > 0)]
        low, high = ax.get_ylim()
        name = f"{ax.get_ylabel() or ax.get_title('left')}: " if len(several) > 1 else ""
        if len(values) and values.max() > high:
            remarks.append(rf"{name}values up to $10^{{{int(np.ceil(np.log10(values.max())))}}}$ beyond the axis")
        if len(values) and values.min() < low:
            remarks.append(rf"{name}values down to $10^{{{int(np.floor(np.log10(values.min())))}}}$ beyond the axis")
    return remarks


def logarithmic(ax: Axes) -> None:
    """Set ticks of a logarithmic y axis that already has its data: powers of ten, or round numbers between them."""
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
        axis.set_major_formatter(ScalarFormatter(useOffset=False))
        axis.set_minor_locator(NullLocator())
    axis.set_minor_formatter(NullFormatter())


def fit_logarithmic(ax: Axes) -> None:
    """Set limits and ticks of a logarithmic y axis to what is drawn."""
    keep_in_view(ax, drawn_values(ax))
    logarithmic(ax)


def logarithmic_x(ax: Axes) -> None:
    """Set limits and ticks of the κ axis, two decades wide at least: round-off must not look like a difference."""
    low, high = np.log10(ax.dataLim.intervalx)
    room = max(0.06 * (high - low), (2 - (high - low)) / 2)
    ax.set_xlim(10 ** max(low - room, min(-0.1, low)), 10 ** (high + room))
    ax.xaxis.set_major_locator(LogLocator(numticks=5))
    ax.xaxis.set_major_formatter(LogFormatterMathtext())
    ax.xaxis.set_minor_locator(LogLocator(subs=range(2, 10), numticks=99) if high - low <= 4 else NullLocator())
    ax.xaxis.set_minor_formatter(NullFormatter())
    ax.set_axisbelow(True)
    ax.grid(axis="x", color="0.88", lw=0.4)


def shortened(names: Sequence[str], longest: int = 20) -> list[str]:
    """Names of layers that fit: long ones without the parts that all begin with, then with first letters, then cut."""
    levels = zip(*(name.split(".")[:-1] for name in names), strict=False)
    shared = len(list(takewhile(lambda level: len(set(level)) == 1, levels))) if len(set(names)) > 1 else 0
    labels = []
    for name in names:
        parts = name.split(".")[0 if max(map(len, names)) <= longest else shared :]
        for place, part in enumerate(parts[:-1]):
            if len(".".join(parts)) > longest and not part.isdigit():
                parts[place] = part[0]
        short, head = ".".join(parts), longest // 3
        labels.append(short if len(short) <= longest else f"{short[:head]}…{short[head + 1 - longest :]}")
    return labels


def add_legend(ax: Axes, handles: Sequence[Any], page: Page) -> None:
    """Add a legend above the axes, in as many columns as fit a page of their width."""
    place = {"loc": "lower left", "bbox_to_anchor": (0.0, 1.0), "frameon": False}
    ax.legend(handles=handles, **place, **columns_of(handles, page))


def method_handle(label: str, look: MethodLook) -> Line2D:
    """Legend entry of a method."""
    return Line2D([], [], color=look.color, label=label, marker=look.marker, ms=3.8, mew=0.4, mec="white")


def dash_handles(kinds: Mapping[str, Any]) -> list[Line2D]:
    """Legend entries of kinds of lines by their dashes."""
    return [Line2D([], [], color=NEUTRAL, ls=dash, label=name) for name, dash in kinds.items()]


def add_heading(figure: Figure, page: Page, title: str, handles: Sequence[Any]) -> None:
    """Add title and legend, or a title alone, above all panels; columns as the longest label leaves room for."""
    size = float(page.style["font.size"])
    if not handles:
        figure.suptitle(page.wrapped(title, size), x=0.01, ha="left", fontsize=size)
        return
    heading: dict[str, Any] = {"title": page.wrapped(title, size), "title_fontsize": size, "alignment": "left"}
    figure.legend(handles=handles, loc="outside upper left", frameon=False, **heading, **columns_of(handles, page))


def columns_of(handles: Sequence[Any], page: Page) -> dict[str, Any]:
    """Options of a legend across the page."""
    ncols = column_count([str(handle.get_label()) for handle in handles], page)
    common = {"handlelength": 1.8, "handletextpad": 0.4, "columnspacing": 1.0, "labelspacing": 0.25}
    return common | {"ncols": ncols, "borderaxespad": 0.4, "borderpad": 0.1}


def column_count(labels: Sequence[str], page: Page) -> int:
    """The most columns of a legend that fit the page, filled one after the other."""
    room = 72 * page.width / float(page.style["legend.fontsize"]) - 1.0
    for count in range(min(len(labels), 8), 1, -1):
        rows = -(-len(labels) // count)
        longest = (max(map(plain_length, labels[k : k + rows])) for k in range(0, len(labels), rows))
        # a handle and the space next to it take 3.2 em, a character 0.58
        if sum(3.2 + 0.58 * length for length in longest) <= room:
            return -(-len(labels) // rows)
    return 1


def plain_length(label: str) -> int:
    """Number of visible characters of a label, which may contain formulas."""
    return len(re.sub(r"\\[A-Za-z]+|[${}^_]", lambda match: "x" if len(match[0]) > 1 else "", label))


def heading_height(labels: Sequence[str], page: Page) -> float:
    """Height of `add_heading` in inches, for the font size of `STYLE`."""
    return 0.17 + 0.115 * -(-len(labels) // column_count(labels, page)) if labels else 0.17


def method_legend(ax: Axes, runs: Sequence[StoredRun], **options: object) -> Legend:
    """Add a legend of the methods in their looks; ``options`` go to ``Axes.legend``."""
    groups = selection.groups_of(runs)
    looks = selection.looks_of(groups)
    return ax.legend(handles=[method_handle(group.label, looks[group.label]) for group in groups], **options)


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
    """Style of a quantity: a line where it is followed step by step, markers where it is measured rarely.

    ``raw``: single values are drawn too, faintly; ``barred``: the triangle of an unresolved value stands on a bar, to
    tell two quantities apart.
    """

    label: str
    dash: Any = "-"
    marker: str = "o"
    width: float = 1.1
    raw: bool = True
    barred: bool = False

    def handle(self, drawn: Collection[str] = ("line",)) -> Line2D:
        """Legend entry of the line, of the markers, or of both."""
        markers = marker_style(self) if "points" in drawn else {}
        dash = self.dash if "line" in drawn else "none"
        return Line2D([], [], color=NEUTRAL, ls=dash, lw=self.width, label=self.label, **markers)

    def unresolved_handle(self) -> Line2D:
        """Legend entry of the quantity's unresolved values."""
        label = f"{self.label} unresolved (lower bound)"
        return Line2D([], [], color=NEUTRAL, ls="none", label=label, **unresolved_style(self, "train"))


def marker_style(look: Look) -> dict[str, Any]:
    """Style of filled markers with a white rim, which stand out from lines; crosses are not filled."""
    if look.marker == "x":
        rim = withStroke(linewidth=1.9, foreground="white")
        return {"marker": "x", "markersize": 3.6, "markeredgewidth": 0.9, "path_effects": [rim]}
    return {"marker": look.marker, "markersize": 4.2, "markeredgewidth": 0.5, "markeredgecolor": "white"}


def draw_curve(
    ax: Axes, curves: Sequence[pd.Series], look: Look, color: str, window: int, name: str, marker: str = ""
) -> bool:
    """Draw a noisy quantity: the running median of one run over its faint values, or of several seeds with a band."""
    curves = [curve for curve in curves if curve.notna().any()]
    if not curves:
        return False
    if len(curves) == 1 and look.raw and window > 1:
        ax.plot(curves[0].index, curves[0], color=color, lw=0.35, alpha=0.28, zorder=2, gid=f"{name}-raw")
    together = series.over_seeds("median", [series.running_median(curve, window) for curve in curves])
    if len(curves) > 1:
        draw_band(ax, together, color, name)
    median = together["median"]
    style: dict[str, Any] = {"color": color, "lw": look.width, "ls": look.dash, "zorder": 3, "gid": f"{name}-median"}
    ax.plot(median.index, median, **style, **(along(marker, len(median)) if marker else {}))
    return True


def draw_band(ax: Axes, together: pd.DataFrame, color: str, name: str) -> None:
    """Draw the band (``NAME-band``) from the lowest to the highest of the seeds, in `MANY_ROWS` stretches at most."""
    band = together.reset_index(names="iteration")
    if len(band) > MANY_ROWS:
        groups = band.groupby(np.arange(len(band)) * MANY_ROWS // len(band))
        band = groups.agg(iteration=("iteration", "median"), low=("low", "min"), high=("high", "max"))
    shade = ax.fill_between(band["iteration"], band["low"], band["high"], color=color, alpha=0.2, lw=0, zorder=2)
    shade.set_gid(f"{name}-band")


def draw_seeds(
    ax: Axes, group: selection.Group, curves: Sequence[pd.Series], look: MethodLook, dash: Any, name: str
) -> None:
    """Draw mean and band of runs that did not diverge (``NAME-mean``, ``NAME-band``), and each diverged one."""
    pairs = [(curve, run.status == "diverged") for curve, run in zip(curves, group.runs, strict=True)]
    whole, broken = ([c for c, diverged in pairs if diverged == bad and c.notna().any()] for bad in (False, True))
    if whole:
        together = series.over_seeds("mean", whole)
        if len(whole) > 1:
            draw_band(ax, together, look.color, name)
        mean = together["mean"]
        style = along(look.marker, len(mean)) | {"ls": dash if len(mean) > FEW else "none", "lw": 1.0}
        ax.plot(mean.index, mean, color=look.color, zorder=3, gid=f"{name}-mean", **style)
    for number, curve in enumerate(broken):
        drawn = curve.dropna()
        ax.plot(drawn.index, drawn, color=look.color, ls=dash, lw=0.5, zorder=3, gid=f"{name}-diverged-{number}")
        end: dict[str, Any] = {"marker": "x", "ms": 4, "ls": "none", "zorder": 4}
        ax.plot(drawn.index[-1:], drawn.iloc[-1:], color=look.color, gid=f"{name}-end-{number}", **end)


def along(marker: str, points: int) -> dict[str, Any]:
    """Style of a few markers along a line of ``points`` points."""
    return {"marker": marker, "markevery": max(1, points // MARKS), "ms": 3.0, "mew": 0.4, "mec": "white"}


def draw_points(ax: Axes, curves: Sequence[pd.Series], look: Look, color: str, name: str, shift: float = 0.0) -> bool:
    """Draw a quantity measured a few times: markers (``NAME-points``) at the median of the seeds, with their range."""
    curves = [curve for curve in curves if curve.notna().any()]
    if not curves:
        return False
    points = series.over_seeds("median", curves)
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
    ax: Axes, bounds: Sequence[pd.Series], look: Look, data: str, color: str, name: str, shift: float = 0.0
) -> bool:
    """Draw the lower bounds of unresolved κ of every seed as open triangles (``NAME-unresolved``), as `draw_points`."""
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
    """Data coordinates with an offset to the right in points; to be set after the limits know the data."""
    return ax.transData + ScaledTranslation(points / 72, 0.0, ax.figure.dpi_scale_trans)


def unresolved_style(look: Look, data: str) -> dict[str, Any]:
    """Style of open upward triangles, small for single batches."""
    size = UNRESOLVED_SIZE[data]
    return {
        "marker": BARRED_TRIANGLE if look.barred else "^",
        "markersize": 1.7 * size if look.barred else size,
        "markerfacecolor": "none",
        "markeredgewidth": 0.35 if data == "batch" else 0.8,
        "alpha": 0.6 if data == "batch" else 1.0,
    }
