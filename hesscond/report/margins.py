"""How much of what a statement allows its trials used, claim by claim."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from hesscond.errors import ConfigError
from hesscond.report.page import COLUMN, Page
from hesscond.report.palette import METHOD_COLORS
from hesscond.report.probed import logarithmic_x

if TYPE_CHECKING:
    from hesscond.study.store import StoredRun
    from hesscond.theorems import Tally, Verdict

#: Claims that are known to hold, and to be false.
TRUE, FALSE = METHOD_COLORS["bnp"], METHOD_COLORS["vanilla"]
#: Shares of what is allowed that are drawn; others are at the ends.
SMALLEST, LARGEST = 1e-6, 1e6
BINS = 60


def margin_figure(verdict: Verdict, *, page: Page = COLUMN) -> Figure:
    """A histogram for every claim, on a logarithmic axis; right of the line at 1 it is violated.

    Parameters
    ----------
    verdict
        What `hesscond.verify` returned.
    page
        What it is drawn for.

    Returns
    -------
    matplotlib.figure.Figure
        Claims from the top as the statement lists them, true ones in blue, false
        ones in orange, with the number of trials that were decided and of those that violated it. A share below 1e-6
        or above 1e6 is drawn at the end of the axis; a claim without any says so.
    """
    return tally_figure(verdict.tallies, f"{verdict.id}, {verdict.trials} trials", page)


def stored_margin_figure(runs: Sequence[StoredRun], *, page: Page = COLUMN) -> Figure:
    """The same of what was checked along runs: a histogram for every claim, over all runs, layers and iterations.

    Parameters
    ----------
    runs
        Any in which statements were checked.
    page
        What it is drawn for.

    Returns
    -------
    matplotlib.figure.Figure
        As `margin_figure`.

    Raises
    ------
    ConfigError
        In none of the runs, or there is no run.
    """
    tallies = stored_tallies(runs)
    checks = sum(len(run.table("statements")) for run in runs)
    names = ", ".join(sorted({run.config["name"] for run in runs}))
    return tally_figure(tallies, f"{names}: {checks} checks along {len(runs)} runs", page)


def stored_tallies(runs: Sequence[StoredRun]) -> tuple[Tally, ...]:
    """What the checks along runs came to, claim by claim.

    Raises
    ------
    ConfigError
        There were none, or there is no run.
    """
    from hesscond.theorems import Claim, Outcome, Tally

    if not runs:
        raise ConfigError("no runs given: name at least one run folder")
    found: dict[tuple[str, str], Tally] = {}
    for run in runs:
        for number, row in enumerate(run.table("statements").to_dict("records")):
            key = row["statement"], row["claim"]
            if key not in found:
                found[key] = Tally(Claim(f"{row['statement']}, {row['claim']}", "", bool(row["known"])))
            found[key].add(Outcome(row["status"], float(row["used"])), number)
    if not found:
        raise ConfigError("no statement was checked along the runs: train with --statement ID (hesscond statements)")
    return tuple(found.values())


def tally_figure(tallies: tuple[Tally, ...], title: str, page: Page) -> Figure:
    """A row for each tally."""
    with page.styled():
        figure = page.figure(0.55 + 0.55 * len(tallies), h_pad=0.02, hspace=0.04)
        axes = figure.subplots(len(tallies), 1, sharex=True, squeeze=False)[:, 0]
        edges = edges_of(tallies)
        for ax, tally in zip(axes, tallies, strict=True):
            draw(ax, tally, edges)
        axes[-1].set_xlabel("used of what the claim allows (violated right of the line)")
        logarithmic_x(axes[-1])
        axes[-1].set_xlim(edges[0], edges[-1])
        size = float(page.style["font.size"])
        figure.suptitle(page.wrapped(title, size), x=0.02, ha="left", fontsize=size, weight="bold")
    return figure


def edges_of(tallies: tuple[Tally, ...]) -> np.ndarray:
    """Bins that hold all the shares, and 1 among their edges."""
    shares = np.concatenate([clipped(tally) for tally in tallies] + [np.array([0.1, 10.0])])
    low, high = np.floor(np.log10(shares.min())), np.ceil(np.log10(shares.max()))
    per_decade = max(1, round(BINS / (high - low)))
    return np.logspace(low, high, int(high - low) * per_decade + 1)


def clipped(tally: Tally) -> np.ndarray:
    """The shares used, within what is drawn."""
    shares = np.clip(np.array(tally.used, dtype=float), SMALLEST, LARGEST)
    # all that is allowed is still allowed: left of the line
    return np.where(shares == 1.0, np.nextafter(1.0, 0.0), shares)


def draw(ax: Axes, tally: Tally, edges: np.ndarray) -> None:
    """The histogram of a claim."""
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
    decided = tally.holds + tally.violated
    known = "true" if tally.claim.true else "false"
    label = f"{tally.claim.name} ({known}): {tally.violated} of {decided} violated"
    ax.set_title(label, loc="left", fontsize=matplotlib.rcParams["legend.fontsize"], pad=2.0)
