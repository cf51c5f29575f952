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


def probed_rows(frame: pd.DataFrame) -> str:
    """Caption of the κ of `probed_data`: the probes that they are of."""
    data = probed_data(frame)
    if not frame[f"{data}_probes"].any():
        return "nothing was probed"
    return "medians over the probed mini-batches" if data == "batch" else "last probe of the training set"


def has_unresolved(frame: pd.DataFrame) -> bool:
    """Whether some κ of `probed_data` is unresolved."""
    return any(frame[f"{probed_data(frame)}_{name}_unresolved"].any() for name in ("kappa", "kappa_own"))


def summary_caption(frame: pd.DataFrame) -> str:
    """Caption that explains the columns of `summary_columns`."""
    few = f"; unres.: how many κ own are unresolved{tables.OPEN}" * has_unresolved(frame)
    own = "κ own: κ in the coordinates in which the method takes plain gradient steps"
    return f"{tables.LAST}; {own}; {probed_rows(frame)}{few}"


def summary_columns(frame: pd.DataFrame) -> list[tables.Column]:
    """Columns of `summary_frame` as they are shown, in 80 columns; those that no run has are left out."""
    data = probed_data(frame)

    def name(row: Mapping[str, Any]) -> str:
        status = "collapsed" if row["collapsed"] else row["status"]
        return str(row["label"]) if status == "finished" else f"{row['label']} ({status})"

    columns = [tables.Column("method", name, left=True), tables.numbers("loss", "training_loss_tail_mean", tables.LOSS)]
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
        One row per run, by method and seed. method, label (tells runs apart), seed, status, collapsed (to constant
        outputs), learning_rate, batch_size, iterations;
        training_loss_tail_mean: mean mini-batch loss of the last tail_iterations = min(100, 10 %) iterations;
        test_loss, test_accuracy, …: last value of each column of the log's evaluations; seconds that the run worked.
        Then the columns below with ``batch_`` in front for the mini-batches (medians over the probed iterations, of two
        in the middle the lower), and with ``train_`` for the last probe of the whole training set:

        - probes: number of probed iterations (train: number of them that went into the row, 1 or 0);
        - kappa, kappa_preconditioned, kappa_own: κ in the plain coordinates, with P from the raw statistics of the
          samples, and in the method's own coordinates; NaN if unresolved κ leave the median open;
        - the same with ``_lower`` and ``_upper``: bounds of the median;
        - the same with ``_unresolved``: number of κ that were not resolved;
        - gain: κ(H)/κ(PᵀHP), where both are resolved;
        - kappa_D_squared: κ(D)²;
        - dead: input features without variation (batch: the most in any batch).
    """
    import pandas as pd

    chosen = selection.select(runs, layer, unit)
    ordered = selection.in_order(chosen.runs)
    frame = pd.DataFrame([summary_of(run, chosen) for run in ordered])
    labels = selection.labels_of(map(selection.setting_of, ordered))
    several = frame["seed"].nunique() > 1
    names = [labels[selection.setting_of(run)] + f" seed {run.seed}" * several for run in ordered]
    # nothing but its folder tells a repetition apart
    names = [
        f"{name} · {run.folder}" if names.count(name) > 1 else name for run, name in zip(ordered, names, strict=True)
    ]
    frame.insert(1, "label", names)
    frame.attrs["title"] = chosen.title
    return frame


def summary_of(run: StoredRun, chosen: selection.Selection) -> dict[str, Any]:
    """The row of `summary_frame` of one of the chosen runs."""
    training, evaluation = run.table("training"), run.table("evaluation")
    tail = training["loss"].tail(max(1, min(100, len(training) // 10)))
    row: dict[str, Any] = {
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
    for data, probe in (("batch", chosen.probe(run, "batch")), ("train", chosen.probe(run, "train").tail(1))):
        row[f"{data}_probes"] = len(probe)
        for quantity in series.RESOLVED:
            row |= {f"{data}_{name}": value for name, value in series.median_kappa(probe, quantity).items()}
            row[f"{data}_{quantity}_unresolved"] = int(series.is_unresolved(probe, quantity).sum())
        for name, values in (("gain", series.gain(probe)), ("kappa_D_squared", series.finite(probe["kappa_D"]) ** 2)):
            row[f"{data}_{name}"], _ = series.quantile(values.to_numpy(), values.to_numpy(), 0.5)
        row[f"{data}_dead"] = int(probe["dead"].fillna(0).max()) if len(probe) else 0
    return row


def summary_table(runs: Sequence[StoredRun], *, layer: str | None = None, unit: int | None = None) -> tables.TextTable:
    """`summary_frame` for the terminal: loss, accuracy, κ(H) and κ in the method's own coordinates, a line a run.

    The probes are those of mini-batches, or of the training set where no mini-batch was probed. A median that
    unresolved κ leave open is shown by its lower bound, as "≥ 1.20e+09".
    """
    return SUMMARY_TABLE.print(runs, layer=layer, unit=unit)


#: Columns of the table of seeds, and those of `summary_of` that they summarize.
QUANTITIES = {"loss": "training_loss_tail_mean", "accuracy": "test_accuracy"}


def seed_frame(runs: Sequence[StoredRun], *, layer: str | None = None, unit: int | None = None) -> pd.DataFrame:
    """Results over the seeds, a row for each method, learning rate and batch size."""
    import pandas as pd

    chosen, rows = selection.select(runs, layer, unit), []
    summary = pd.DataFrame([summary_of(run, chosen) for run in runs], index=[run.folder for run in runs])
    kappa = f"{probed_data(summary)}_kappa_own"
    for group in selection.groups_of(runs):
        done = summary.loc[[run.folder for run in group.finished]]
        row: dict[str, Any] = {"method": group.method, "learning_rate": group.learning_rate}
        row |= {"batch_size": group.batch_size, "seeds": len(group.runs)}
        row |= {"diverged": group.diverged, "unfinished": group.unfinished}
        for name, column in QUANTITIES.items():
            values = done[column].astype(float)
            row |= {f"{name}_mean": values.mean(), f"{name}_min": values.min(), f"{name}_max": values.max()}
        known = done[f"{kappa}_lower"].dropna()
        row |= {"kappa_own_mean": float(np.exp(np.log(known).mean())), "kappa_own_min": known.min()}
        row |= {"kappa_own_max": known.max(), "kappa_own_open": bool(done.loc[known.index, kappa].isna().any())}
        rows.append(row)
    frame = pd.DataFrame(rows)
    frame.attrs["probed"] = probed_rows(summary)
    return frame


def seeds_caption(frame: pd.DataFrame) -> str:
    """Caption that explains the columns of `seed_columns`."""
    few = tables.OPEN * any(frame["kappa_own_open"])
    return (
        f"mean (smallest … largest) over the seeds that finished; {tables.LAST}; κ own: in the "
        f"method's coordinates, {frame.attrs['probed']}, geometric mean{few}"
    )


def seed_columns(frame: pd.DataFrame) -> list[tables.Column]:
    """Columns of `seed_frame` as they are shown; the batch size only where it differs."""
    columns = [tables.words("method", "method")]
    columns.append(tables.numbers("rate", "learning_rate", "g"))
    if frame["batch_size"].nunique() > 1:
        columns.append(tables.numbers("batch", "batch_size", "d"))
    columns += [tables.numbers("seeds", "seeds", "d"), tables.numbers("diverged", "diverged", "d")]
    if frame["unfinished"].any():
        columns.append(tables.numbers("unfinished", "unfinished", "d"))
    columns.append(tables.Column("loss", lambda row: ranged(row, "loss", tables.LOSS)))
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
    seeds_caption,
    registry.UNIT,
)
