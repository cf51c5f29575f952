"""Measured rates of convergence against those that a condition number predicts, (κ − 1)/(κ + 1)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import LogFormatterMathtext, LogLocator, NullFormatter

from hesscond.errors import ConfigError
from hesscond.report.axes import label_figure
from hesscond.report.legends import add_heading
from hesscond.report.page import COLUMN, Page
from hesscond.report.palette import METHOD_COLORS

if TYPE_CHECKING:
    import pandas as pd

#: The statements whose claims compare rates.
STATEMENTS = ("prec-theorem-1", "bnp-theorem-1")
#: Of published claims in the order of a statement, then of readings nearby that are not true.
COLORS = tuple(METHOD_COLORS[name] for name in ("bnp", "batchnorm", "vanilla", "sphere", "equilibration"))
MARKERS = ("o", "s", "x", "+", "^")


def rate_trials(
    id: str, *, trials: int | None = None, seed: int = 0, on_trial: Callable[[int], None] | None = None
) -> pd.DataFrame:
    """Predicted and measured rates of every trial of a statement.

    Parameters
    ----------
    id
        Of a statement whose claims compare rates.
    trials
        How many; by default what the statement says.
    seed
        Trial k depends on the seed and k only, and is that of `hesscond.verify`.
    on_trial
        Called with the number of trials done.

    Returns
    -------
    pandas.DataFrame
        One row per trial and claim: trial, claim, true (whether it is known to hold), status, predicted and measured:
        decays −ln(rate) of an iteration.

    Raises
    ------
    ConfigError
        There is no such statement; no claim of it compares rates.
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
        raise ConfigError(f"no trial of {id!r} compares rates: choose from {', '.join(STATEMENTS)}")
    return pd.DataFrame(rows)


def rate_figure(found: pd.DataFrame, title: str, *, page: Page = COLUMN) -> Figure:
    """The decay −ln(rate) of gradient descent near a minimum, measured on its steps, against the predicted one.

    On the diagonal the rate is (κ − 1)/(κ + 1). Claims that are known to be false are crosses. What is above converges
    faster than predicted; a measured decay that is not positive does not converge, and is at the lower edge.

    Parameters
    ----------
    found
        What `rate_trials` gave.
    title
        Above the figure.
    page
        What it is drawn for.

    Returns
    -------
    matplotlib.figure.Figure
        One panel.
    """
    claims: Sequence[tuple[str, bool]] = list(dict.fromkeys(zip(found["claim"], found["true"], strict=True)))
    with page.styled():
        figure = page.figure(2.9)
        ax = figure.add_subplot()
        ax.set_xscale("log")
        ax.set_yscale("log", nonpositive="mask")
        smallest = min(found["predicted"].min(), found.loc[found["measured"] > 0, "measured"].min())
        handles = []
        for (claim, true), color, marker in zip(claims, COLORS, MARKERS, strict=False):
            rows = found[found["claim"] == claim]
            style: dict[str, Any] = {"ls": "none", "marker": marker, "color": color, "ms": 3.6, "alpha": 0.85}
            style |= {"mfc": "none", "mew": 0.8}
            ax.plot(rows["predicted"], rows["measured"].clip(lower=smallest / 3), gid=claim, **style)
            label = claim if true else f"{claim} (not true)"
            handles.append(Line2D([], [], label=label, **style))
        ends = np.array([smallest / 3, 2 * max(found["predicted"].max(), found["measured"].max())])
        ax.set_xlim(*ends)
        ax.set_ylim(*ends)
        ax.plot(ends, ends, color="0.3", lw=0.8, zorder=0)
        handles.append(Line2D([], [], color="0.3", lw=0.8, label=r"rate $=(\kappa-1)/(\kappa+1)$"))
        for axis in (ax.xaxis, ax.yaxis):
            axis.set_major_locator(LogLocator(numticks=6))
            axis.set_major_formatter(LogFormatterMathtext())
            axis.set_minor_formatter(NullFormatter())
        ax.set_xlabel(r"predicted decay $-\ln\,\frac{\kappa-1}{\kappa+1}$ an iteration")
        ax.set_ylabel("measured decay an iteration")
        ax.set_axisbelow(True)
        ax.grid(color="0.93", lw=0.4)
        add_heading(figure, page, title, handles)
        label_figure(figure, page, None, f"{found['trial'].nunique()} random minima with the best constant step size")
    return figure
