"""Axes: titles and remarks, logarithmic ticks, limits, and what stands in an empty panel."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import (
    FuncFormatter,
    LogFormatterMathtext,
    LogLocator,
    MaxNLocator,
    NullFormatter,
    NullLocator,
)

from hesscond.report.page import Page

#: Colour of legend handles that stand for every method, and of remarks.
NEUTRAL = "0.25"


def label_figure(figure: Figure, page: Page, title: str | None, remark: str) -> None:
    """A title above the panels and a remark below them, in lines that fit the page; either may be empty."""
    size = float(page.style["font.size"])
    if title:
        figure.suptitle(page.wrapped(title, size), fontsize=size)
    if remark:
        small = page.style["legend.fontsize"]
        figure.supxlabel(page.wrapped(remark), fontsize=small, color=NEUTRAL)


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
    """Limits of a logarithmic y axis that a run which blows up does not stretch: `out_of_view` says what is beyond.

    The limits hold all of the values unless some lie more decades from the middle 98 % than that spans, and three.
    """
    logs = np.log10(values[np.isfinite(values) & (values > 0)])
    if not len(logs):
        return
    low, high = np.quantile(logs, (0.01, 0.99))
    room = (high - low) + 3
    if low - room <= logs.min() and logs.max() <= high + room:
        return
    ends = max(logs.min(), low - room), min(logs.max(), high + room)
    pad = 0.05 * (ends[1] - ends[0])
    ax.set_ylim(10 ** (ends[0] - pad), 10 ** (ends[1] + pad))


def out_of_view(axes: Iterable[Axes]) -> list[str]:
    """What is beyond the limits of logarithmic y axes, a sentence for each axes that hides something."""
    found, several = [], list(axes)
    for ax in several:
        values = drawn_values(ax)
        values = values[np.isfinite(values) & (values > 0)]
        low, high = ax.get_ylim()
        name = f"{ax.get_ylabel() or ax.get_title('left')}: " if len(several) > 1 else ""
        if len(values) and values.max() > high:
            found.append(rf"{name}values up to $10^{{{int(np.ceil(np.log10(values.max())))}}}$ beyond the axis")
        if len(values) and values.min() < low:
            found.append(rf"{name}values down to $10^{{{int(np.floor(np.log10(values.min())))}}}$ beyond the axis")
    return found


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
