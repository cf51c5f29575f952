"""What came of ``hesscond sweep`` and ``hesscond compare``: a row for each run, and the best rate of each method."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from hesscond.report.summary import kappa_cell, number, summary_frame
from hesscond.report.tables import TextTable

if TYPE_CHECKING:
    import pandas as pd

    from hesscond.study.comparison import Compared
    from hesscond.study.store import StoredRun

#: Columns of `sweep_frame` that are averaged over seeds, and whether the mean is geometric (κ spans decades).
QUANTITIES = {"loss": False, "accuracy": False, "kappa": True, "kappa_own": True, "seconds": False}


def sweep_frame(runs: Sequence[tuple[StoredRun, Mapping[str, Any], float]]) -> pd.DataFrame:
    """What came of each run.

    Parameters
    ----------
    runs
        Each with the values of the sweep's settings by their names, and the seconds that it took.

    Returns
    -------
    pandas.DataFrame
        One row per run: run (name of its folder), method, batch_size, learning_rate, the settings, seed, status,
        iterations, loss (`summary_frame`: mean of the last iterations), accuracy (from 0 to 1), and the medians over
        the probed mini-batches of the first probed unit: kappa and kappa_own (resolved ones only; NaN if
        there are none), kappa_lower and kappa_own_lower (of the unresolved ones); seconds.
    """
    import pandas as pd

    rows = []
    for run, settings, seconds in runs:
        summary = summary_frame([run]).iloc[0]
        rows.append(
            {
                "run": run.folder.name,
                "method": run.legend,
                "batch_size": summary["batch_size"],
                "learning_rate": summary["learning_rate"],
                **{name: value if isinstance(value, (int, float)) else str(value) for name, value in settings.items()},
                "seed": run.seed,
                "status": run.status,
                "iterations": summary["iterations"],
                "loss": summary["training_loss_tail_mean"],
                "accuracy": summary["test_accuracy"],
                "kappa": summary["batch_kappa"],
                "kappa_lower": summary["batch_kappa_lower"],
                "kappa_own": summary["batch_kappa_own"],
                "kappa_own_lower": summary["batch_kappa_own_lower"],
                "seconds": seconds,
            }
        )
    return pd.DataFrame(rows)


def best_frame(frame: pd.DataFrame, settings: Sequence[str] = ()) -> pd.DataFrame:
    """The best learning rate of each method × batch size × setting, and what its seeds came to.

    The best rate is that with the smallest final training loss, the mean over the seeds; one at which a seed diverged
    is not. Of the rates, only those with the most finished or diverged seeds are compared.

    Parameters
    ----------
    frame
        From `sweep_frame`.
    settings
        Its columns that are settings.

    Returns
    -------
    pandas.DataFrame
        One row per group: method, batch_size, the settings; rates: how many were tried; diverged: at how many of them
        a seed diverged; learning_rate (NaN if at all of them); edge: ``"lowest"`` or ``"highest"`` if the best of
        several is at an end of the grid, so that a better one may lie beyond; seeds; and for loss, accuracy, kappa,
        kappa_own and seconds the mean over the seeds (of κ the geometric one), ``_min`` and ``_max``;
        kappa_lower, kappa_own_lower: the smallest.
    """
    import pandas as pd

    keys = ["method", "batch_size", *settings]
    rows = []
    for key, group in frame.groupby(keys, sort=False, dropna=False):
        row: dict[str, Any] = dict(zip(keys, key, strict=True))
        over = group[group["status"].isin(["finished", "diverged"])]
        tried = sorted(group["learning_rate"].unique())
        by_rate = dict(iter(over.groupby("learning_rate")))
        most = max((len(runs) for runs in by_rate.values()), default=0)
        bad = {rate for rate, runs in by_rate.items() if (runs["status"] == "diverged").any()}
        losses = {r: runs["loss"].mean() for r, runs in by_rate.items() if r not in bad and len(runs) == most}
        best = min(losses, key=lambda r: losses[r], default=math.nan)
        ends = {tried[0]: "lowest", tried[-1]: "highest"} if len(tried) > 1 else {}
        chosen = over[over["learning_rate"] == best]
        row |= {"rates": len(tried), "diverged": len(bad), "learning_rate": best, "edge": ends.get(best, "")}
        row |= {"seeds": len(chosen)}
        for name, geometric in QUANTITIES.items():
            values = chosen[name].dropna()
            there = len(values) > 0
            logarithms = values.map(math.log) if geometric else values
            mean = logarithms.mean() if there else math.nan
            row[name] = math.exp(mean) if geometric and there else mean
            row[f"{name}_min"], row[f"{name}_max"] = values.min(), values.max()
            if geometric:
                row[f"{name}_lower"] = chosen[f"{name}_lower"].min()
        rows.append(row)
    return pd.DataFrame(rows)


def best_table(best: pd.DataFrame, settings: Sequence[str], title: str) -> TextTable:
    """`best_frame` for the terminal: means over the seeds, and below them the ranges if there are several."""
    caption = (
        "each method at its best rate by the final training loss, mean over the seeds (κ: geometric mean of the "
        "medians over the probed mini-batches; κ own: in the method's own coordinates) and range; < or > at a "
        "rate: the lowest or highest of the grid, a better one may lie beyond; rates: tried, of which diverged"
    )
    numeric = ("batch", *settings, "rate", "rates", "seeds", "loss", "acc.%", "κ(H)", "κ own", "s")
    table = TextTable(["method", *(f">{name}" for name in numeric)], title=title, caption=caption)
    shown = {"loss": ".3f", "accuracy": ".1f", "kappa": ".0e", "kappa_own": ".0e", "seconds": ".1f"}
    for row in best.to_dict("records"):
        mark = {"lowest": "< ", "highest": "> ", "": ""}[row["edge"]]
        several = row["seeds"] > 1
        table.add_row(
            row["method"],
            str(row["batch_size"]),
            *(str(row[name]) for name in settings),
            "none" if math.isnan(row["learning_rate"]) else f"{mark}{row['learning_rate']:g}",
            f"{row['rates']}-{row['diverged']}" if row["diverged"] else str(row["rates"]),
            str(row["seeds"]),
            number(row["loss"], ".3f"),
            number(100 * row["accuracy"], ".1f"),
            *(kappa_cell(row[name], row[f"{name}_lower"]) for name in ("kappa", "kappa_own")),
            number(row["seconds"], ".1f"),
            end_section=not several,
        )
        for end, word in (("min", "least"), ("max", "most")) if several else ():
            ends = {name: (100 if name == "accuracy" else 1) * row[f"{name}_{end}"] for name in shown}
            blank = [""] * (4 + len(settings))
            table.add_row(
                f"  {word}", *blank, *(number(ends[n], f) for n, f in shown.items()), end_section=end == "max"
            )
    return table


#: What is taken over from the summary of a run, and what it is called in the comparison.
COLUMNS = {
    "training_loss_tail_mean": "loss",
    "test_accuracy": "test_accuracy",
    "batch_probes": "probes",
    "batch_kappa_own": "kappa_own",
    "batch_kappa_own_unresolved": "kappa_own_unresolved",
    "batch_kappa_own_lower": "kappa_own_lower",
    "batch_kappa": "kappa",
    "batch_kappa_unresolved": "kappa_unresolved",
    "batch_kappa_lower": "kappa_lower",
}


def comparison_frame(compared: Sequence[Compared]) -> pd.DataFrame:
    """One row per method, in the order given.

    Parameters
    ----------
    compared
        Of one study.

    Returns
    -------
    pandas.DataFrame
        method, learning_rate (NaN if none worked), at_edge of the grid; loss: training, mean of the last iterations;
        test_accuracy; kappa_own: median over the probed iterations of κ in the method's own coordinates, kappa: in the
        plain ones of the network as it is built, each of the resolved ones only, with how many were not and their
        median lower bound; coordinates: the own ones' name; time: of an iteration, relative to vanilla; refusal: why
        there is nothing else.
    """
    import pandas as pd

    rows = []
    for one in compared:
        row = {"method": one.method, "learning_rate": one.rate, "at_edge": one.edge}
        row |= dict.fromkeys(COLUMNS.values(), math.nan) | {"coordinates": "", "time": one.cost, "refusal": one.refusal}
        if one.run is not None:
            summary = summary_frame([one.run]).iloc[0]
            row |= {name: summary[column] for column, name in COLUMNS.items()}
            row["coordinates"] = own_coordinates(one)
        rows.append(row)
    return pd.DataFrame(rows)


def own_coordinates(one: Compared) -> str:
    """The name of the method's coordinates at the last probe."""
    assert one.run is not None
    probe = one.run.table("probe")
    return str(probe["coordinates"].iloc[-1]) if len(probe) else ""


def comparison_table(frame: pd.DataFrame, title: str) -> TextTable:
    """`comparison_frame` for the terminal.

    Parameters
    ----------
    frame
        What `comparison_frame` gave.
    title
        Above the table.
    """
    caption = (
        "κ own: in the method's own coordinates, κ(H): in the plain ones; medians of the resolved ones over the "
        "probed mini-batches, unres.: how many were not (own + plain); rate *: at the edge of the grid; time: of "
        "an iteration, vanilla = 1"
    )
    titles = ("method", ">rate", ">loss", ">acc.%", ">κ own", ">κ(H)", ">unres.", ">time")
    table = TextTable(titles, title=title, caption=caption)
    for row in frame.to_dict("records"):
        if row["refusal"]:
            table.add_row(row["method"], *["–"] * 7)
            continue
        table.add_row(
            row["method"],
            f"{row['learning_rate']:g}{'*' if row['at_edge'] else ''}",
            number(row["loss"], ".3f"),
            number(100 * row["test_accuracy"], ".1f"),
            kappa_cell(row["kappa_own"], row["kappa_own_lower"]),
            kappa_cell(row["kappa"], row["kappa_lower"]),
            f"{row['kappa_own_unresolved']:.0f}+{row['kappa_unresolved']:.0f} / {row['probes']:.0f}",
            number(row["time"], ".2f"),
        )
    return table
