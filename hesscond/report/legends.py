"""Legends: above the axes, clear of the data."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties
from matplotlib.lines import Line2D
from matplotlib.transforms import ScaledTranslation

from hesscond.report.page import Page
from hesscond.report.palette import MethodLook


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
        size = FontProperties(size=matplotlib.rcParams["legend.fontsize"]).get_size_in_points()
        height = (len(below) * 1.45 + 0.1) * size / 72
        place["bbox_transform"] = ax.transAxes + ScaledTranslation(0.0, height, ax.figure.dpi_scale_trans)
    rows = max(map(len, columns))
    blank = Line2D([], [], ls="none", label=" ")
    handles = [entry or blank for column in columns for entry in [*column, *[None] * (rows - len(column))]]
    ax.legend(handles=handles, ncols=len(columns), **common, **place)


def method_handle(label: str, look: MethodLook, *, line: bool = True) -> Line2D:
    """Legend entry of a method."""
    style: dict[str, Any] = {
        "marker": look.marker,
        "ms": 3.8,
        "mew": 0.4,
        "mec": "white",
        "ls": "-" if line else "none",
    }
    return Line2D([], [], color=look.color, label=label, **style)


def add_heading(figure: Figure, page: Page, title: str, handles: Sequence[Any]) -> None:
    """Title and legend above all panels, in as many columns as the longest label leaves room for."""
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
    return common | {"ncols": ncols, "borderaxespad": 0.2, "borderpad": 0.1}


def column_count(labels: Sequence[str], page: Page) -> int:
    """The most columns of a legend that fit the page, filled one after the other."""
    room = 72 * page.width / float(page.style["legend.fontsize"]) - 1.0
    for count in range(min(len(labels), 8), 1, -1):
        rows = -(-len(labels) // count)
        longest = (max(map(plain_length, labels[k : k + rows])) for k in range(0, len(labels), rows))
        # a handle and the space beside it take 3.2 em, a character 0.58
        if sum(3.2 + 0.58 * length for length in longest) <= room:
            return -(-len(labels) // rows)
    return 1


def plain_length(label: str) -> int:
    """Characters that are seen of a label, that may have formulas in it."""
    return len(re.sub(r"\\[A-Za-z]+|[${}^_]", lambda found: "x" if len(found[0]) > 1 else "", label))


def heading_height(labels: Sequence[str], page: Page) -> float:
    """Inches that `add_heading` takes, for the type of `STYLE`, of which pages make as much as they need."""
    return 0.17 + 0.115 * -(-len(labels) // column_count(labels, page)) if labels else 0.17
