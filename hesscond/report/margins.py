"""Figures of claims: share of the allowed amount that was used, and rates as predicted."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import LogFormatterMathtext, LogLocator, NullFormatter

from hesscond.errors import ConfigError
from hesscond.report import plotting
from hesscond.report.page import COLUMN, Page
from hesscond.report.palette import METHOD_COLORS
from hesscond.report.registry import RATED

if TYPE_CHECKING:
    import pandas as pd

    from hesscond.theorems import Tally, Verdict

#: Colours of claims that are known to be true, and of those known to be false.
TRUE, FALSE = METHOD_COLORS["bnp"], METHOD_COLORS["vanilla"]
#: Smallest and largest share of the allowed amount that is drawn; others are drawn at the ends.
SMALLEST, LARGEST = 1e-6, 1e6
BINS = 60


def margin_figure(verdict: Verdict, *, page: Page = COLUMN) -> Figure:
    """A histogram for every claim, on a logarithmic axis; to the right of the line at 1 the claim is violated.

    True claims are blue, false ones orange, with the number of trials that were decided and of those that violated it.
    A share below 1e-6 or above 1e6 is drawn at the end of the axis; a claim without any says so.

    Parameters
    ----------
    verdict
        Result of `hesscond.verify`.
    page
        Page that the figure is drawn for.
    """
    tallies = verdict.tallies
    with page.styled():
        figure = page.figure(0.55 + 0.55 * len(tallies), h_pad=0.02, hspace=0.04)
        axes = figure.subplots(len(tallies), 1, sharex=True, squeeze=False)[:, 0]
        # bins that hold all the shares, with 1 among their edges
        shares = np.concatenate([clipped(tally) for tally in tallies] + [np.array([0.1, 10.0])])
        low, high = np.floor(np.log10(shares.min())), np.ceil(np.log10(shares.max()))
        edges = np.logspace(low, high, int(high - low) * max(1, round(BINS / (high - low))) + 1)
        for ax, tally in zip(axes, tallies, strict=True):
            draw(ax, tally, edges)
        axes[-1].set_xlabel("measured value / claimed bound (violated above 1)")
        plotting.logarithmic_x(axes[-1])
        axes[-1].set_xlim(edges[0], edges[-1])
        plotting.add_heading(figure, page, f"{verdict.id}, {verdict.trials} trials", [])
    return figure


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


#: Colours of published claims in the order of a statement, then of similar claims that are not true.
COLORS = tuple(METHOD_COLORS[name] for name in ("bnp", "batchnorm", "vanilla", "sphere", "equilibration"))
MARKERS = ("o", "s", "x", "+", "^")


def rate_trials(
    id: str, *, trials: int | None = None, seed: int = 0, on_trial: Callable[[int], None] | None = None
) -> pd.DataFrame:
    """Predicted and measured rates of every trial of a statement.

    Parameters
    ----------
    id
        Id of a statement whose claims compare rates.
    trials
        Number of trials; by default that of the statement.
    seed
        Trial k depends on the seed and k only, and is that of `hesscond.verify`.
    on_trial
        Called with the number of trials done.

    Returns
    -------
    pandas.DataFrame
        One row per trial and claim: trial, claim, true (whether that is known), status, predicted and measured:
        decays −ln(rate) of an iteration.
    """
    import pandas as pd

    from hesscond.theorems import statement
    from hesscond.theorems.base import one_trial

    checked = statement(id)
    rows = []
    for number in range(checked.trials if trials is None else trials):
        for claim, outcome in zip(checked.claims, one_trial(checked, seed, number), strict=True):
            if np.isfinite(outcome.predicted) and np.isfinite(outcome.measured):
                row = {"trial": number, "claim": claim.name, "true": claim.true, "status": outcome.status}
                rows.append(row | {"predicted": outcome.predicted, "measured": outcome.measured})
        if on_trial is not None:
            on_trial(number + 1)
    if not rows:
        raise ConfigError(f"no trial of {id!r} compares rates: choose from {', '.join(RATED)}")
    return pd.DataFrame(rows)


def rate_figure(trials: pd.DataFrame, title: str, *, page: Page = COLUMN) -> Figure:
    """The decay −ln(rate) of gradient descent near a minimum, measured on its steps, against the predicted one.

    On the diagonal the rate is (κ − 1)/(κ + 1). Claims that are known to be false are crosses. Points above it converge
    faster than predicted; where the measured decay is not positive, the descent does not converge, and the point is at
    the lower edge.

    Parameters
    ----------
    trials
        Result of `rate_trials`.
    title
        Title above the figure.
    page
        Page that the figure is drawn for.
    """
    claims: Sequence[tuple[str, bool]] = list(dict.fromkeys(zip(trials["claim"], trials["true"], strict=True)))
    with page.styled():
        figure = page.figure(2.9)
        ax = figure.add_subplot()
        ax.set_xscale("log")
        ax.set_yscale("log", nonpositive="mask")
        smallest = min(trials["predicted"].min(), trials.loc[trials["measured"] > 0, "measured"].min())
        handles = []
        for (claim, true), color, marker in zip(claims, COLORS, MARKERS, strict=False):
            rows = trials[trials["claim"] == claim]
            style: dict[str, Any] = {"ls": "none", "marker": marker, "color": color, "ms": 3.6, "alpha": 0.85}
            style |= {"mfc": "none", "mew": 0.8}
            ax.plot(rows["predicted"], rows["measured"].clip(lower=smallest / 3), gid=claim, **style)
            label = claim if true else f"{claim} (not true)"
            handles.append(Line2D([], [], label=label, **style))
        ends = np.array([smallest / 3, 2 * max(trials["predicted"].max(), trials["measured"].max())])
        ax.set_xlim(*ends)
        ax.set_ylim(*ends)
        ax.plot(ends, ends, color="0.3", lw=0.8, zorder=0)
        for axis in (ax.xaxis, ax.yaxis):
            axis.set_major_locator(LogLocator(numticks=6))
            axis.set_major_formatter(LogFormatterMathtext())
            axis.set_minor_formatter(NullFormatter())
        handles.append(Line2D([], [], color="0.3", lw=0.8, label=r"rate $=(\kappa-1)/(\kappa+1)$"))
        ax.set_xlabel(r"predicted decay $-\ln\,\frac{\kappa-1}{\kappa+1}$ an iteration")
        ax.set_ylabel("measured decay an iteration")
        ax.set_axisbelow(True)
        ax.grid(color="0.93", lw=0.4)
        plotting.add_heading(figure, page, title, handles)
        remark = f"{trials['trial'].nunique()} random minima with the best constant step size"
        plotting.label_figure(figure, page, remark)
    return figure
