"""Mean and range over seeds, one row per method."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from hesscond.report.groups import groups_of, quantile
from hesscond.report.selection import select
from hesscond.report.side_by_side import kappa_ends
from hesscond.report.summary import training_summary
from hesscond.report.writing import Cell, Column, Number, words

if TYPE_CHECKING:
    import pandas as pd

    from hesscond.study.store import StoredRun

CAPTION = (
    "mean (smallest … largest) over the seeds that finished; loss: training, the last iterations; κ own: median "
    "in the method's coordinates over the probed mini-batches, geometric mean; ≥: the median of a seed is unresolved"
)
#: Columns of the summary of a run that are taken over.
QUANTITIES = {"loss": "training_loss_tail_mean", "accuracy": "test_accuracy"}


def seed_frame(runs: Sequence[StoredRun], *, layer: str | None = None, unit: int | None = None) -> pd.DataFrame:
    """What came of each method, over its seeds.

    Parameters
    ----------
    runs
        Of one study.
    layer, unit
        Which unit's κ; the first that was probed by default.

    Returns
    -------
    pandas.DataFrame
        One row per method, learning rate and batch size: method, learning_rate, batch_size, seeds, diverged,
        unfinished (they go on, or were broken off); of those that finished loss, accuracy (from 0 to 1) and kappa_own
        with ``_mean``, ``_min`` and ``_max``; kappa_own_open: whether the median of a seed is unresolved, so that mean,
        least and largest are lower bounds.

    Raises
    ------
    ConfigError
        The runs are of different studies, or the unit was not probed.
    """
    import pandas as pd

    selection, rows = select(runs, layer, unit), []
    for group in groups_of(runs):
        done = group.finished
        row: dict[str, Any] = {"method": group.method, "learning_rate": group.learning_rate}
        row |= {"batch_size": group.batch_size, "seeds": len(group.runs)}
        row |= {"diverged": group.diverged, "unfinished": group.unfinished}
        summaries = pd.DataFrame([training_summary(run) for run in done], columns=list(QUANTITIES.values()))
        for name, column in QUANTITIES.items():
            values = summaries[column].astype(float)
            row |= {f"{name}_mean": values.mean(), f"{name}_min": values.min(), f"{name}_max": values.max()}
        medians = [quantile(*kappa_ends(selection.rows_of(run), group), 0.5) for run in done]
        known = np.array([low for low, _ in medians if not math.isnan(low)])
        row["kappa_own_mean"] = float(np.exp(np.log(known).mean())) if len(known) else math.nan
        row |= {f"kappa_own_{end.__name__}": float(end(known)) if len(known) else math.nan for end in (min, max)}
        rows.append(row | {"kappa_own_open": any(low != high for low, high in medians if not math.isnan(low))})
    return pd.DataFrame(rows)


def seed_columns(frame: pd.DataFrame) -> list[Column]:
    """As they are shown: the learning rate and the batch size only where they differ."""
    columns = [words("method", "method", code=True)]
    columns.append(Column("rate", lambda row: Number((row["learning_rate"],), "g")))
    if frame["batch_size"].nunique() > 1:
        columns.append(Column("batch", lambda row: Number((row["batch_size"],), "d")))
    columns += [
        Column("seeds", lambda row: Number((row["seeds"],), "d")),
        Column("diverged", lambda row: Number((row["diverged"],), "d")),
    ]
    if frame["unfinished"].any():
        columns.append(Column("unfinished", lambda row: Number((row["unfinished"],), "d")))
    columns.append(Column("loss", lambda row: ranged(row, "loss", ".3f")))
    if frame["accuracy_mean"].notna().any():
        columns.append(Column("accuracy %", lambda row: ranged(row, "accuracy", ".1f", 100)))
    return [*columns, Column("κ own", lambda row: ranged(row, "kappa_own", ".2e", lower=row["kappa_own_open"]))]


def ranged(row: Mapping[str, Any], name: str, form: str, factor: float = 1.0, lower: bool = False) -> Cell:
    """Mean (smallest … largest); the mean alone of one seed."""
    values = tuple(factor * float(row[f"{name}_{end}"]) for end in ("mean", "min", "max"))
    single = row["seeds"] - row["diverged"] - row["unfinished"] <= 1
    return Number(values[:1] if single else values, form, "{0}" if single else "{0} ({1} … {2})", lower=lower)
