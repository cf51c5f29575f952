"""Figure of claims: share of the allowed amount that was used."""

from __future__ import annotations

from typing import TYPE_CHECKING

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from hesscond.report import plotting
from hesscond.report.page import COLUMN, Page
from hesscond.report.palette import METHOD_COLORS

if TYPE_CHECKING:
    from hesscond.theorems import Tally, Verdict

#: Colours of claims that are known to be true, and of those known to be false.
TRUE, FALSE = METHOD_COLORS["bnp"], METHOD_COLORS["vanilla"]
#: Smallest and largest share of the allowed amount that is drawn; others are drawn at the ends.
SMALLEST, LARGEST = 1e-6, 1e6
BINS = 60


def margin_figure(verdict: Verdict, *, page: Page = COLUMN) -> Figure:
    """A histogram for every claim, on a logarithmic axis; to the right of the line at 1 the claim is violated.

    Parameters
    ----------
    verdict
        Result of `hesscond.verify`.
    page
        Page that the figure is drawn for.

    Returns
    -------
    matplotlib.figure.Figure
        Claims from the top as the statement lists them, true ones in blue, false
        ones in orange, with the number of trials that were decided and of those that violated it. A share below 1e-6
        or above 1e6 is drawn at the end of the axis; a claim without any says so.
    """
    tallies = verdict.tallies
    with page.styled():
        figure = page.figure(0.55 + 0.55 * len(tallies), h_pad=0.02, hspace=0.04)
        axes = figure.subplots(len(tallies), 1, sharex=True, squeeze=False)[:, 0]
        edges = edges_of(tallies)
        for ax, tally in zip(axes, tallies, strict=True):
            draw(ax, tally, edges)
        axes[-1].set_xlabel("measured value / claimed bound (violated above 1)")
        plotting.logarithmic_x(axes[-1])
        axes[-1].set_xlim(edges[0], edges[-1])
        size = float(page.style["font.size"])
        title = page.wrapped(f"{verdict.id}, {verdict.trials} trials", size)
        figure.suptitle(title, x=0.01, ha="left", fontsize=size)
    return figure


def edges_of(tallies: tuple[Tally, ...]) -> np.ndarray:
    """Edges of bins that hold all the shares, with 1 among them."""
    shares = np.concatenate([clipped(tally) for tally in tallies] + [np.array([0.1, 10.0])])
    low, high = np.floor(np.log10(shares.min())), np.ceil(np.log10(shares.max()))
    per_decade = max(1, round(BINS / (high - low)))
    return np.logspace(low, high, int(high - low) * per_decade + 1)


def clipped(tally: Tally) -> np.ndarray:
    """The shares used, clipped to the range that is drawn."""
    shares = np.clip(np.array(tally.used, dtype=float), SMALLEST, LARGEST)
    # a share of exactly 1 is allowed: left of the line
    return np.where(shares == 1.0, np.nextafter(1.0, 0.0), shares)


def draw(ax: Axes, tally: Tally, edges: np.ndarray) -> None:
    """Draw the histogram of a claim."""
    color = TRUE if tally.claim.true else FALSE
    ax.set_xscale("log")
    ax.axvspan(1.0, 10 * LARGEST, color="0.94", lw=0, zorder=0)
    ax.set_xlim(edges[0], edges[-1])
    ax.set_yticks([])
    ax.axvline(1.0, color="0.2", lw=0.8)
    for side in ("left", "right", "top"):
        ax.spines[side].set_visible(False)
    if tally.used:
        ax.hist(clipped(tally), bins=edges.tolist(), color=color, lw=0)
    else:
        ax.text(0.5, 0.4, "no trial applied", transform=ax.transAxes, ha="center", color="0.4")
    ax.set_title(title_of(tally), loc="left", fontsize=matplotlib.rcParams["legend.fontsize"], pad=2.0)


def title_of(tally: Tally) -> str:
    """A claim, whether it is known to be false, and how often it held, in words."""
    decided = tally.holds + tally.violated
    if not decided:
        return tally.claim.name
    if tally.claim.true:
        held = f"{tally.holds} of {decided}" if tally.violated else f"all {decided}"
        return f"{tally.claim.name}: holds in {held}"
    against = f"refuted in {tally.violated} of" if tally.violated else "not refuted in"
    return f"{tally.claim.name} (false): {against} {decided}"
