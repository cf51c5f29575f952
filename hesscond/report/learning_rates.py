"""The final training loss of every method at every learning rate."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from hesscond.errors import ConfigError
from hesscond.report.groups import groups_of
from hesscond.report.summary import training_summary
from hesscond.report.writing import Cell, Column, Number, Words, words

if TYPE_CHECKING:
    import pandas as pd

    from hesscond.study.store import StoredRun

CAPTION = "training loss, the mean of the last iterations and over seeds that finished; marked: the best of each method"


def rate_grid_frame(runs: Sequence[StoredRun]) -> pd.DataFrame:
    """The losses of a grid.

    Parameters
    ----------
    runs
        Of one study.

    Returns
    -------
    pandas.DataFrame
        One row per method, batch size and learning rate: method, batch_size, learning_rate, seeds, diverged, unfinished
        (they go on, or were broken off), loss (mean over the seeds that finished; infinite if one diverged, NaN if none
        finished), best (whether it is the smallest of its method and batch size).

    Raises
    ------
    ConfigError
        No method ran at two learning rates; the runs are of different studies.
    """
    import pandas as pd

    rows = []
    for group in groups_of(runs):
        losses = [training_summary(run)["training_loss_tail_mean"] for run in group.finished]
        loss = math.inf if group.diverged else sum(losses) / len(losses) if losses else math.nan
        row: dict[str, Any] = {"method": group.method, "batch_size": group.batch_size}
        row |= {"learning_rate": group.learning_rate, "seeds": len(group.runs)}
        rows.append(row | {"diverged": group.diverged, "unfinished": group.unfinished, "loss": loss})
    frame = pd.DataFrame(rows)
    methods = frame.groupby(["method", "batch_size"])
    if methods["learning_rate"].nunique().max() < 2:
        raise ConfigError("no method ran at two learning rates: make a grid of them, as hesscond compare does")
    smallest = methods["loss"].transform("min")
    frame["best"] = (frame["loss"] == smallest) & (smallest < math.inf)
    return frame


def rate_grid_columns(frame: pd.DataFrame) -> list[Column]:
    """A column for each rate."""
    columns = [words("method", "method", code=True)]
    if frame["batch_size"].nunique() > 1:
        columns.append(Column("batch", lambda row: Number((row["batch_size"],), "d")))
    return columns + [Column(f"{rate:g}", loss_at(rate)) for rate in sorted(frame["learning_rate"].unique())]


def loss_at(rate: float) -> Callable[[Mapping[str, Any]], Cell]:
    """The cell of a rate in a row of `rate_grid_rows`."""

    def cell(row: Mapping[str, Any]) -> Cell:
        loss, best = row["losses"].get(rate, (math.nan, False))
        if rate in row["losses"] and not math.isfinite(loss):
            return Words("diverged" if math.isinf(loss) else "unfinished")
        return Number((loss,), ".3g", strong=best)

    return cell


def rate_grid_rows(frame: pd.DataFrame) -> pd.DataFrame:
    """One row per method and batch size, with the losses by rate."""
    import pandas as pd

    rows = []
    for (method, size), group in frame.groupby(["method", "batch_size"], sort=False):
        ends = zip(group["loss"], group["best"], strict=True)
        losses = dict(zip(group["learning_rate"], ends, strict=True))
        rows.append({"method": method, "batch_size": size, "losses": losses})
    return pd.DataFrame(rows)
