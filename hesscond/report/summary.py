"""Tables of runs: a row for each run, for each method over its seeds, and for each method a column for each rate."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from hesscond.report import registry, selection, series, tables

if TYPE_CHECKING:
    import pandas as pd

    from hesscond.runs import StoredRun


def probed_data(frame: pd.DataFrame) -> str:
    """Data whose probes are shown: mini-batches, or the training set where no mini-batch was probed."""
    return "batch" if frame["batch_probes"].any() else "train"


def has_unresolved(frame: pd.DataFrame) -> bool:
    """Whether some κ of `probed_data` is unresolved."""
    return any(frame[f"{probed_data(frame)}_{name}_unresolved"].any() for name in ("kappa", "kappa_own"))


def summary_caption(frame: pd.DataFrame) -> str:
    """Caption that explains the columns of `summary_columns`."""
    data = probed_data(frame)
    probed = "medians over the probed mini-batches" if data == "batch" else "last probe of the training set"
    probed = probed if frame[f"{data}_probes"].any() else "nothing was probed"
    few = "; unres.: how many κ own are unresolved" * has_unresolved(frame)
    return f"κ own: κ in the coordinates in which the method takes plain gradient steps; {probed}{few}"


def summary_columns(frame: pd.DataFrame) -> list[tables.Column]:
    """Columns of `summary_frame` as they are shown, in 80 columns; those that no run has are left out."""
    data, several = probed_data(frame), frame["seed"].nunique() > 1

    def name(row: Mapping[str, Any]) -> str:
        status = "collapsed" if row["collapsed"] else row["status"]
        label = f"{row['method']} seed {row['seed']}" if several else row["method"]
        return label if status == "finished" else f"{label} ({status})"

    columns = [tables.Column("method", name, left=True), tables.numbers("loss", "training_loss_tail_mean", ".3f")]
    for title, key, form, factor in METRICS:
        if frame[key].notna().any():
            columns.append(tables.numbers(title, key, form, factor))
    columns += [tables.bounded("κ(H)", f"{data}_kappa"), tables.bounded("κ own", f"{data}_kappa_own")]
    if has_unresolved(frame):
        columns.append(
            tables.Column("unres.", lambda row: f"{row[f'{data}_kappa_own_unresolved']}/{row[f'{data}_probes']}")
        )
    return columns


#: Columns of the metrics that a study may have.
METRICS = (
    ("acc. %", "test_accuracy", ".1f", 100),
    ("PSNR (dB)", "test_psnr", ".2f", 1),
    ("bits/char.", "test_bits_per_character", ".3f", 1),
)


def summary_frame(runs: Sequence[StoredRun], *, layer: str | None = None, unit: int | None = None) -> pd.DataFrame:
    """Results of each run: training, test set, and condition numbers of one unit.

    Parameters
    ----------
    runs
        Runs of one study.
    layer, unit
        Unit whose condition numbers are given; the first that was probed by default.

    Returns
    -------
    pandas.DataFrame
        One row per run, in the order given. method, seed, status, collapsed (to constant outputs), learning_rate,
        batch_size, iterations;
        training_loss_tail_mean: mean mini-batch loss of the last tail_iterations = min(100, 10 %) iterations;
        test_loss, test_accuracy, …: last value of each column of the log's evaluations; seconds that the run worked.
        Then the columns below with ``batch_`` in front for the mini-batches (medians over the probed iterations), and
        with ``train_`` for the last probe of the whole training set:

        - probes: number of probed iterations (train: number of them that went into the row, 1 or 0);
        - kappa, kappa_preconditioned, kappa_own: κ in the plain coordinates, with P from the raw statistics of the
          samples, and in the method's own coordinates; over the resolved ones only, NaN if there are none;
        - the same with ``_unresolved``: number of κ that were not resolved;
        - the same with ``_lower``: median lower bound of those, NaN if there are none;
        - gain: κ(H)/κ(PᵀHP), where both are resolved;
        - kappa_D_squared: κ(D)²;
        - dead: input features without variation (batch: the most in any batch).
    """
    import pandas as pd

    chosen = selection.select(runs, layer, unit)
    rows = []
    for run in selection.in_order(chosen.runs):
        row = training_summary(run)
        train = chosen.probe(run, "train")
        for data, probe in (("batch", chosen.probe(run, "batch")), ("train", train.tail(1))):
            row[f"{data}_probes"] = len(probe)
            for quantity in series.RESOLVED:
                row[f"{data}_{quantity}"] = median(series.resolved_values(probe, quantity))
                row[f"{data}_{quantity}_unresolved"] = int(series.is_unresolved(probe, quantity).sum())
                row[f"{data}_{quantity}_lower"] = median(series.lower_bounds(probe, quantity))
            row[f"{data}_gain"] = median(series.gain(probe))
            row[f"{data}_kappa_D_squared"] = median(series.finite(probe["kappa_D"]) ** 2)
            row[f"{data}_dead"] = int(probe["dead"].fillna(0).max()) if len(probe) else 0
        rows.append(row)
    frame = pd.DataFrame(rows)
    frame.attrs["title"] = chosen.title
    return frame


def training_summary(run: StoredRun) -> dict[str, Any]:
    """Columns of `summary_frame` about the training and the evaluations."""
    training, evaluation = run.table("training"), run.table("evaluation")
    tail = training["loss"].tail(max(1, min(100, len(training) // 10)))
    return {
        "method": run.method,
        "seed": run.seed,
        "status": run.status,
        "collapsed": series.is_collapsed(run),
        "learning_rate": float(run.config["run"]["learning_rate"]),
        "batch_size": int(run.config["training"]["batch_size"]),
        "iterations": len(training),
        "tail_iterations": len(tail),
        "training_loss_tail_mean": float(tail.mean(skipna=False)) if len(tail) else math.nan,
        **{
            name: float(values.iloc[-1]) if len(values) else math.nan
            for name, values in evaluation.items()
            if name not in ("iteration", "epoch")
        },
        "seconds": run.seconds,
    }


def median(values: pd.Series) -> float:
    """Median of the values that are not NaN; NaN if there are none."""
    numbers = values.dropna()
    # bounds of κ reach the largest numbers, whose sum overflows
    return 2 * float((numbers / 2).median()) if len(numbers) else math.nan


def summary_table(runs: Sequence[StoredRun], *, layer: str | None = None, unit: int | None = None) -> tables.TextTable:
    """`summary_frame` for the terminal: loss, accuracy, κ(H) and κ in the method's own coordinates, a line a run.

    The probes are those of mini-batches, or of the training set where no mini-batch was probed. A κ that was never
    resolved is shown by its lower bound, as "≥ 1.20e+09".
    """
    return SUMMARY_TABLE.print(runs, layer=layer, unit=unit)


SEEDS_CAPTION = (
    "mean (smallest … largest) over the seeds that finished; loss: training, the last iterations; κ own: median "
    "in the method's coordinates over the probed mini-batches, geometric mean; ≥: the median of a seed is unresolved"
)
#: Columns of the table of seeds, and those of `training_summary` that they summarize.
QUANTITIES = {"loss": "training_loss_tail_mean", "accuracy": "test_accuracy"}


def seed_frame(runs: Sequence[StoredRun], *, layer: str | None = None, unit: int | None = None) -> pd.DataFrame:
    """Results over the seeds, a row for each method, learning rate and batch size."""
    import pandas as pd

    chosen, rows = selection.select(runs, layer, unit), []
    for group in selection.groups_of(runs):
        done = group.finished
        row: dict[str, Any] = {"method": group.method, "learning_rate": group.learning_rate}
        row |= {"batch_size": group.batch_size, "seeds": len(group.runs)}
        row |= {"diverged": group.diverged, "unfinished": group.unfinished}
        summaries = pd.DataFrame([training_summary(run) for run in done], columns=list(QUANTITIES.values()))
        for name, column in QUANTITIES.items():
            values = summaries[column].astype(float)
            row |= {f"{name}_mean": values.mean(), f"{name}_min": values.min(), f"{name}_max": values.max()}
        medians = []
        for probe in map(chosen.rows_of, done):
            batches = probe[probe["data"] == "batch"]
            medians.append(series.quantile(*series.intervals(batches if len(batches) else probe, "kappa_own"), 0.5))
        known = np.array([low for low, _ in medians if not math.isnan(low)])
        row["kappa_own_mean"] = float(np.exp(np.log(known).mean())) if len(known) else math.nan
        row |= {f"kappa_own_{end.__name__}": float(end(known)) if len(known) else math.nan for end in (min, max)}
        rows.append(row | {"kappa_own_open": any(low != high for low, high in medians if not math.isnan(low))})
    return pd.DataFrame(rows)


def seed_columns(frame: pd.DataFrame) -> list[tables.Column]:
    """Columns of `seed_frame` as they are shown; the batch size only where it differs."""
    columns = [tables.words("method", "method")]
    columns.append(tables.numbers("rate", "learning_rate", "g"))
    if frame["batch_size"].nunique() > 1:
        columns.append(tables.numbers("batch", "batch_size", "d"))
    columns += [tables.numbers("seeds", "seeds", "d"), tables.numbers("diverged", "diverged", "d")]
    if frame["unfinished"].any():
        columns.append(tables.numbers("unfinished", "unfinished", "d"))
    columns.append(tables.Column("loss", lambda row: ranged(row, "loss", ".3f")))
    if frame["accuracy_mean"].notna().any():
        columns.append(tables.Column("accuracy %", lambda row: ranged(row, "accuracy", ".1f", 100)))
    return [*columns, tables.Column("κ own", lambda row: ranged(row, "kappa_own", ".2e", lower=row["kappa_own_open"]))]


def ranged(row: Mapping[str, Any], name: str, form: str, factor: float = 1.0, lower: bool = False) -> str:
    """Text of mean (smallest … largest), or of the mean alone for one seed."""
    mean, least, most = (tables.number(factor * float(row[f"{name}_{end}"]), form) for end in ("mean", "min", "max"))
    single = row["seeds"] - row["diverged"] - row["unfinished"] <= 1
    return "≥ " * lower + (mean if single or mean == tables.DASH else f"{mean} ({least} … {most})")


SUMMARY_TABLE = registry.TableKind(
    "summary",
    10,
    "a row for each run: loss, accuracy, κ",
    registry.STUDY,
    summary_frame,
    summary_columns,
    summary_caption,
    registry.UNIT,
)

SEEDS_TABLE = registry.TableKind(
    "seeds",
    30,
    "a row for each method: mean and range over its seeds",
    registry.STUDY,
    seed_frame,
    seed_columns,
    SEEDS_CAPTION,
    registry.UNIT,
)
