"""One row per run: final loss, accuracy and condition numbers, as a data frame and as a table for the terminal."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rich import box
from rich.table import Table
from rich.text import Text

from hesscond.report.groups import intervals, located, quantile
from hesscond.report.selection import select
from hesscond.report.series import RESOLVED, finite, gain, is_unresolved, lower_bounds, resolved_values
from hesscond.report.writing import Column, Number, Words, bounded, interval, numbers, words

if TYPE_CHECKING:
    import pandas as pd

    from hesscond.study.store import StoredRun

#: Quantiles of κ in the method's own coordinates.
QUANTILES = {"kappa_own_q10": 0.1, "kappa_own_median": 0.5, "kappa_own_q90": 0.9}
SUMMARY_CAPTION = (
    "loss: training, mean of the last iterations; κ(H), κ(PᵀHP) with P from the raw statistics of the samples: medians "
    "of the resolved ones over the probed mini-batches; κ own: 10 %, 50 % and 90 % quantiles in the method's own "
    "coordinates, ≥: a lower bound; held: checks of statements that are known to hold, of those that apply"
)


def summary_columns(frame: pd.DataFrame) -> list[Column]:
    """`summary_frame` as it is written; what no run has is left out."""
    columns = [
        words("method", "method", code=True),
        Column("seed", lambda row: Number((row["seed"],), "d")),
        Column("status", lambda row: Words(str(row["status"])), left=True),
        numbers("loss", "training_loss_tail_mean", ".3f"),
    ]
    if frame["test_accuracy"].notna().any():
        columns.append(numbers("acc. %", "test_accuracy", ".1f", r"acc.\,\%", factor=100))
    if frame["batch_probes"].any():
        columns.append(bounded("κ(H)", "batch_kappa", r"$\kappa(H)$"))
        columns.append(bounded("κ(PᵀHP)", "batch_kappa_preconditioned", r"$\kappa(P^{\top}HP)$"))
        columns += [
            interval(f"κ own {100 * q:.0f} %", f"batch_{name}", rf"$\kappa_{{\mathrm{{own}}}}$ {100 * q:.0f}\,\%")
            for name, q in QUANTILES.items()
        ]
    columns.append(numbers("time (s)", "seconds", ".3g"))
    if frame["statements_applicable"].any():
        held = ("statements_held", "statements_applicable")
        columns.append(Column("held", lambda row: Number(tuple(float(row[name]) for name in held), "d", "{0} / {1}")))
    return columns


def summary_frame(runs: Sequence[StoredRun], *, layer: str | None = None, unit: int | None = None) -> pd.DataFrame:
    """What came of each run.

    Parameters
    ----------
    runs
        Of one study.
    layer, unit
        Which unit's condition numbers; the first that was probed by default.

    Returns
    -------
    pandas.DataFrame
        One row per run, in the order given. method, seed, status, learning_rate, batch_size, iterations;
        training_loss_tail_mean: mean mini-batch loss of the last tail_iterations = min(100, 10 %) iterations;
        test_accuracy: the last, from 0 to 1; seconds that the run worked; statements_applicable and statements_held:
        how many checks of claims that are known to hold applied, and held. Then the columns below with ``batch_`` in
        front for the mini-batches (medians over the probed iterations), and with ``train_`` for the last probe of the
        whole training set:

        - probes: how many iterations were probed (train: how many of them went into the row, 1 or 0);
        - kappa, kappa_preconditioned, kappa_own: in the plain coordinates, with P from the raw statistics of the
          samples, and in the method's own coordinates; over the resolved ones only, NaN if there are none;
        - the same with ``_unresolved``: how many were not resolved;
        - the same with ``_lower``: median lower bound of those, NaN if there are none;
        - gain: of κ(H)/κ(PᵀHP), where both are resolved;
        - kappa_D_squared: κ(D)²;
        - kappa_own_q10, kappa_own_median, kappa_own_q90: quantiles of κ in the method's own coordinates, NaN where the
          unresolved leave them open, with ``_lower`` and ``_upper``, between which they lie;
        - dead: input features without variation (batch: the most in any batch).

    Raises
    ------
    ConfigError
        The runs are of different studies, or the unit was not probed.
    """
    import pandas as pd

    selection = select(runs, layer, unit)
    rows = []
    for run in selection.runs:
        row = training_summary(run)
        train = selection.probe(run, "train")
        for data, probe in (("batch", selection.probe(run, "batch")), ("train", train.tail(1))):
            row |= {f"{data}_{column}": value for column, value in probe_summary(probe).items()}
        rows.append(row)
    return pd.DataFrame(rows)


def training_summary(run: StoredRun) -> dict[str, Any]:
    """The columns of `summary_frame` that say how the training went."""
    training, evaluation = run.table("training"), run.table("evaluation")
    checks = run.table("statements")
    known = checks["known"].astype(bool)
    tail = training["loss"].tail(max(1, min(100, len(training) // 10)))
    return {
        "method": run.method,
        "seed": run.seed,
        "status": run.status,
        "learning_rate": float(run.config["run"]["learning_rate"]),
        "batch_size": int(run.config["training"]["batch_size"]),
        "iterations": len(training),
        "tail_iterations": len(tail),
        "training_loss_tail_mean": float(tail.mean(skipna=False)) if len(tail) else math.nan,
        "test_accuracy": float(evaluation["test_accuracy"].iloc[-1]) if len(evaluation) else math.nan,
        "seconds": run.seconds,
        "statements_applicable": int((known & (checks["status"] != "not-applicable")).sum()),
        "statements_held": int((known & (checks["status"] == "holds")).sum()),
    }


def probe_summary(probe: pd.DataFrame) -> dict[str, float | int]:
    """The columns of `summary_frame` about the condition numbers in the rows of ``probe``."""
    summary: dict[str, float | int] = {"probes": len(probe)}
    for quantity in RESOLVED:
        summary[quantity] = median(resolved_values(probe, quantity))
        summary[f"{quantity}_unresolved"] = int(is_unresolved(probe, quantity).sum())
        summary[f"{quantity}_lower"] = median(lower_bounds(probe, quantity))
    summary["gain"] = median(gain(probe))
    summary["kappa_D_squared"] = median(finite(probe["kappa_D"]) ** 2)
    ends = intervals(probe, "kappa_own")
    for name, q in QUANTILES.items():
        summary |= located(name, quantile(*ends, q))
    summary["dead"] = int(probe["dead"].fillna(0).max()) if len(probe) else 0
    return summary


def median(values: pd.Series) -> float:
    """Median of what is there; NaN if nothing is."""
    there = values.dropna()
    return float(there.median()) if len(there) else math.nan


def summary_table(runs: Sequence[StoredRun], *, layer: str | None = None, unit: int | None = None) -> Table:
    """`summary_frame` for the terminal, two lines per run: mini-batches and training set.

    Parameters
    ----------
    runs, layer, unit
        As for `summary_frame`.

    Returns
    -------
    rich.table.Table
        Less than 100 columns wide. A κ that was never resolved is shown by its lower bound, as "≥ 1.20e+09".

    Raises
    ------
    ConfigError
        As for `summary_frame`.
    """
    frame = summary_frame(runs, layer=layer, unit=unit)
    table = Table(
        title=Text(select(runs, layer, unit).title),
        caption=Text(
            "batch: medians over the probed iterations, of the resolved κ only; train: last probe of the training "
            "set; κ(PᵀHP): P from the raw statistics of the samples; κ own: in the method's own coordinates; loss: "
            "mean of the last min(100, 10 %) iterations; unres.: how many κ(H) + κ(PᵀHP) + κ own are unresolved / "
            "probes"
        ),
        box=box.SIMPLE_HEAD,
        show_edge=False,
        padding=0,
    )
    for name in ("method", "seed", "loss", "acc.%", "data"):
        table.add_column(name, justify="left" if name in ("method", "data") else "right", no_wrap=True)
    for name in ("κ(H)", "κ(PᵀHP)", "κ(D)²", "κ own", "dead"):
        table.add_column(name, justify="right", no_wrap=True)
    # the one that gives way in a narrow terminal: no digit is lost
    table.add_column("unres.", justify="right", overflow="fold")
    for row in frame.to_dict("records"):
        status = "" if row["status"] == "finished" else f"({row['status']})"
        table.add_row(
            Text(row["method"]),
            str(row["seed"]),
            number(row["training_loss_tail_mean"], ".3f"),
            number(100 * row["test_accuracy"], ".1f"),
            *probe_cells(row, "batch"),
        )
        table.add_row(status, "", "", "", *probe_cells(row, "train"), end_section=True)
    return table


def probe_cells(row: dict[str, Any], data: str) -> list[str]:
    """The cells from "data" on."""
    if not row[f"{data}_probes"]:
        return [data, "not probed", "", "", "", "", ""]
    kappa, preconditioned, own = (
        kappa_cell(row[f"{data}_{quantity}"], row[f"{data}_{quantity}_lower"]) for quantity in RESOLVED
    )
    unresolved = [row[f"{data}_{quantity}_unresolved"] for quantity in RESOLVED]
    count = "+".join(map(str, unresolved)) if any(unresolved) else "0"
    return [
        data,
        kappa,
        preconditioned,
        number(row[f"{data}_kappa_D_squared"]),
        own,
        str(row[f"{data}_dead"]),
        f"{count} / {row[f'{data}_probes']}",
    ]


def kappa_cell(value: float, lower: float) -> str:
    """κ if any was resolved, else the bound it is known to exceed."""
    return f"≥ {number(lower)}" if math.isnan(value) and not math.isnan(lower) else number(value)


def number(value: float, form: str = ".2e") -> str:
    """A number, by default to three significant digits; a dash if there is none."""
    return Number((value,), form).text
