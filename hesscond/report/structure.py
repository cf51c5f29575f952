"""Figure of how nearly block diagonal a Hessian is."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import TYPE_CHECKING

import numpy as np
from matplotlib.colors import Normalize
from matplotlib.figure import Figure

from hesscond.report.axes import add_heading, label_figure, shortened
from hesscond.report.layers import COLORS
from hesscond.report.page import COLUMN, Page

if TYPE_CHECKING:
    from hesscond.operators import Estimate
    from hesscond.structure import BlockStructure

#: Decades below the largest value that the colours cover.
DECADES = 6.0
#: Number of names that fit next to each other.
LABELS = 24


def structure_figure(found: BlockStructure, *, page: Page = COLUMN) -> Figure:
    """The root mean square entry ‖H_ab‖_F / √(n_a n_b) of every block of a Hessian.

    Lines separate layers. The title states the share of ‖H‖²_F on the diagonal of blocks, and on that of layers.

    Parameters
    ----------
    found
        Result of `hesscond.block_structure`.
    page
        Page that the figure is drawn for.
    """
    sizes = np.sqrt(np.array(found.n_params, dtype=float))
    entries = found.norms.value.numpy() / sizes / sizes[:, None]
    values = np.log10(np.where(entries > 0, entries, np.nan))
    places = [list(own) for _, own in groupby(range(len(found.layers)), key=lambda place: found.layers[place])]
    top = float(np.nanmax(values)) if bool((entries > 0).any()) else 0.0
    low = float(np.nanmin(values)) if bool((entries > 0).any()) else top
    with page.styled():
        figure = page.figure(0.8 * page.width / page.scale)
        ax = figure.add_subplot()
        grid = np.arange(len(values) + 1)
        scale = Normalize(max(low, top - DECADES), max(top, low + 0.1))
        mesh = ax.pcolormesh(grid, grid, values, cmap=COLORS, norm=scale, rasterized=True)
        mesh.set_gid("blocks")
        for own in places[1:]:
            for line in (ax.axhline, ax.axvline):
                line(own[0], color="white", lw=0.6 if len(places) > 12 else 1.0)
        # the matrix is symmetric: names of its rows are those of its columns
        ax.set_yticks(*labelled([(own[0] + own[-1] + 1) / 2 for own in places], places, found.layers))
        ax.set_xticks([])
        ax.tick_params(length=0)
        ax.set_ylim(len(values), 0)
        ax.set_aspect("equal")
        bar = figure.colorbar(mesh, ax=ax, aspect=30, pad=0.02, extend="min" if low < top - DECADES else "neither")
        bar.set_label(r"$\log_{10}\,\Vert H_{ab}\Vert_F\,/\,\sqrt{n_a n_b}$")
        bar.outline.set_linewidth(0.5)
        title = f"on the block diagonal: {share(found.share)} of $\\Vert H\\Vert_F^2$"
        if len(places) < len(values):
            title += f"; on that of layers: {share(found.share_of_layers)}"
        add_heading(figure, page, title, [])
        if found.norms.probes:
            label_figure(figure, page, None, f"estimated, {found.norms.products} products with the Hessian")
    return figure


def labelled(
    middles: Sequence[float], places: Sequence[Sequence[int]], layers: Sequence[str]
) -> tuple[list[float], list[str]]:
    """Places and names of layers; of layers that are too close to each other, the one with more rows."""
    room = len(layers) / LABELS
    chosen: list[int] = []
    for number in sorted(range(len(places)), key=lambda number: -len(places[number])):
        if all(abs(middles[number] - middles[other]) >= room for other in chosen):
            chosen.append(number)
    return [middles[number] for number in chosen], [shortened(layers[places[number][0]]) for number in chosen]


def share(found: Estimate[float]) -> str:
    """Share in percent, with its standard error if it has one."""
    error = f" ± {100 * found.error:.1g}" if found.error else ""
    return f"{100 * found.value:.3g}{error} %"
