"""Tables of ``hesscond sweep`` and ``hesscond compare``: a row for each run, and each method at its best rate."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from hesscond.hessians.roles import NETWORK
from hesscond.report.series import intervals, is_collapsed, located, quantile
from hesscond.report.summary import summary_frame, training_summary
from hesscond.report.tables import Column, TextTable, bounded, number, numbers, text_table, words
from hesscond.runs import OPTIMA
from hesscond.sheets import ends, in_coordinates

if TYPE_CHECKING:
    import pandas as pd

    from hesscond.runs import StoredRun
    from hesscond.study.comparison import Compared

#: Columns of `sweep_frame` that are averaged over seeds, and whether the mean is geometric (κ spans decades).
QUANTITIES = {"loss": False, "accuracy": False, "kappa": True, "kappa_own": True, "seconds": False}


def sweep_frame(runs: Sequence[tuple[StoredRun, Mapping[str, Any], float]]) -> pd.DataFrame:
    """Results of each run with the sweep's settings and seconds; κ: medians over mini-batches, and of lower bounds."""
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
    """The best learning rate of each method × batch size × setting, and the results of its seeds.

    The best rate is that with the smallest final training loss, the mean over the seeds; a rate at which a seed
    diverged is excluded (learning_rate is NaN if all are). Only the rates with the most finished or diverged seeds are
    compared. edge: ``"lowest"`` or ``"highest"`` if the best of several rates is at an end of the grid. Results are
    means over the seeds, geometric ones of κ, with ``_min`` and ``_max``; ``_lower``: the smallest bound of the seeds.
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
    """`best_frame` for the terminal: means over the seeds; the frame has their ranges."""
    caption = (
        "each method at its best rate by the final training loss, mean over the seeds (κ: geometric mean of the "
        "medians over the probed mini-batches; κ own: in the method's own coordinates); < or > at a rate: the lowest "
        "or highest of the grid, a better one may lie beyond; rates: tried, of which diverged"
    )
    marks = {"lowest": "< ", "highest": "> ", "": ""}
    columns = [
        words("method", "method"),
        numbers("batch", "batch_size", "d"),
        *(Column(name, lambda row, name=name: str(row[name])) for name in settings),  # type: ignore[misc]
        Column(
            "rate",
            lambda row: "none" if math.isnan(row["learning_rate"]) else f"{marks[row['edge']]}{row['learning_rate']:g}",
        ),
        Column("rates", lambda row: f"{row['rates']}-{row['diverged']}" if row["diverged"] else str(row["rates"])),
        numbers("seeds", "seeds", "d"),
        numbers("loss", "loss", ".3f"),
        numbers("acc.%", "accuracy", ".1f", 100),
        bounded("κ(H)", "kappa"),
        bounded("κ own", "kappa_own"),
        numbers("s", "seconds", ".1f"),
    ]
    return text_table(best, columns, caption, title)


#: Levels of Hessians, as in `hesscond.study.config.Level`, in the column ``level`` of `cells_frame`.
LEVELS = ("unit", "layer", "network")


def cells_frame(compared: Sequence[Compared]) -> pd.DataFrame:
    """Every κ that was measured: a row for each method, seed, iteration, block and unit, with the columns `CELLS`."""
    import pandas as pd

    tables = []
    for one in compared:
        for run in one.runs:
            probe = run.table("probe")
            network = (probe["layer"] == NETWORK) & probe["unit"].isna()
            level = pd.Series(np.where(probe["unit"].notna(), "unit", "layer"), index=probe.index).mask(
                network, NETWORK
            )
            rates = run.table("training").set_index("iteration")["lr"]
            probe = probe.assign(method=one.method, learning_rate=one.rate, seed=run.seed, level=level)
            probe["lr"] = probe["iteration"].map(rates)
            probe["sharpness"] = probe["lr"] * probe["lambda_max_own"] / 2
            for kind in OPTIMA:
                probe[[f"share_{kind}_lower", f"share_{kind}_upper"]] = [
                    possible(row, kind) for row in probe.to_dict("records")
                ] or np.zeros((0, 2))
            tables.append(probe[CELLS])
    return pd.concat(tables, ignore_index=True) if tables else pd.DataFrame(columns=CELLS)


#: The columns of `cells_frame`.
CELLS = [
    *("method", "learning_rate", "seed", "iteration", "data", "level", "layer", "unit", "n_params"),
    *(in_coordinates(name, own) for own in ("", "own") for name in (*ends("kappa"), "resolved", "rank")),
    *("lambda_max", "lambda_max_own", "lr", "sharpness"),
    *(f"share_{kind}_{end}" for kind in OPTIMA for end in ("lower", "upper")),
    *("coordinates", "solver"),
]


def possible(row: Mapping[str, Any], kind: str) -> tuple[float, float]:
    """Bounds of the share of the possible gain, (log κ(H) − log κ own)/(log κ(H) − log κ_opt)."""
    ends = [row[f"kappa_{kind}_{end}"] for end in ("lower", "upper")]
    known = all(math.isfinite(value) for value in (row["kappa"], row["kappa_own"], *ends))
    # an eigenvalue that is zero in only one of them is no gain
    if not known or row.get("rank") != row.get("rank_own"):
        return math.nan, math.nan
    gained = math.log(row["kappa"]) - math.log(row["kappa_own"])
    most, least = (math.log(row["kappa"]) - math.log(end) for end in ends)
    if not most > 0:
        return math.nan, math.nan
    one, other = gained / most, gained / least if least > 0 else math.copysign(math.inf, gained)
    return min(one, other), max(one, other)


def comparison_frame(compared: Sequence[Compared]) -> pd.DataFrame:
    """Results of each method, a row for each in the order given."""
    import pandas as pd

    cells, rows = cells_frame(compared), []
    levels = [level for level in LEVELS if (cells["level"] == level).any()]
    for one in compared:
        done = [run for run in one.runs if run.status == "finished"]
        row: dict[str, Any] = {"method": one.method, "learning_rate": one.rate, "at_edge": one.edge}
        row |= {"seeds": len(done), "diverged": len(one.runs) - len(done), "collapsed": sum(map(is_collapsed, done))}
        summaries = pd.DataFrame([training_summary(run) for run in done], columns=["training_loss_tail_mean", ACCURACY])
        losses = summaries["training_loss_tail_mean"].astype(float)
        row |= {"loss": losses.median(), "loss_min": losses.min(), "loss_max": losses.max()}
        row |= {ACCURACY: summaries[ACCURACY].astype(float).median(), "time": one.cost}
        own = cells[cells["method"] == one.method]
        for level in levels:
            row |= {f"{level}_{name}": value for name, value in of_level(own[own["level"] == level]).items()}
        for kind in OPTIMA:
            ends = own[[f"share_{kind}_lower", f"share_{kind}_upper"]].dropna().to_numpy(dtype=float)
            row |= located(f"share_{kind}", quantile(ends[:, 0], ends[:, 1], 0.5))
            row["shares"] = len(ends)
        row["coordinates"] = str(own["coordinates"].iloc[-1]) if len(own) else ""
        rows.append(row | {"refusal": one.refusal})
    return pd.DataFrame(rows)


ACCURACY = "test_accuracy"


def of_level(cells: pd.DataFrame) -> dict[str, float]:
    """The columns of `comparison_frame` about the κ of one level."""
    found: dict[str, float] = {"cells": 0, "resolved": 0}
    for name in ("kappa", "kappa_own"):
        lower, upper = intervals(cells, name)
        found |= located(name, quantile(lower, upper, 0.5))
        found["cells"] += int((~np.isnan(lower)).sum())
        found["resolved"] += int(np.isfinite(upper).sum())
    sharpness = cells["sharpness"].dropna()
    return found | {"sharpness": float(sharpness.median()) if len(sharpness) else math.nan}


def comparison_table(frame: pd.DataFrame, title: str) -> TextTable:
    """`comparison_frame` for the terminal, with a title above."""
    levels = [level for level in LEVELS if f"{level}_kappa" in frame]
    caption = (
        "loss: the last iterations, median over the seeds; time: of an iteration, vanilla = 1; κ: median over blocks, "
        "moments and seeds in the plain parameters, and in the method's own coordinates, ≥: the unresolved leave it "
        "open; λη/2: largest |λ| in the own coordinates times half the rate, 1 is the edge of stability; rate *: at "
        "the edge of the grid"
    )
    collapsed = frame["collapsed"].eq(frame["seeds"]) & frame["seeds"].gt(0)
    names = [f"{name} (collapsed)" if so else name for name, so in zip(frame["method"], collapsed, strict=True)]
    columns = [
        words("method", "name"),
        Column("rate", lambda row: number(row["learning_rate"], ".3g") + "*" * bool(row["at_edge"])),
        numbers("loss", "loss", ".3f"),
        *([numbers("acc.%", ACCURACY, ".1f", 100)] if frame[ACCURACY].notna().any() else []),
        numbers("time", "time", ".2f"),
    ]
    for level in levels:
        columns += [bounded(f"κ {level}", f"{level}_kappa"), bounded("own", f"{level}_kappa_own")]
    columns += [numbers(f"λη/2 {level}", f"{level}_sharpness", ".2g") for level in levels[-1:]]
    return text_table(frame.assign(name=names), columns, caption, title)
