"""Tables of ``hesscond sweep``: a row for each run, for each κ, and for each method at its best rate."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import reduce
from operator import getitem
from typing import TYPE_CHECKING, Any

import numpy as np

from hesscond.hessians.roles import NETWORK
from hesscond.report import series, tables
from hesscond.report.summary import summary_frame
from hesscond.runs import OPTIMA
from hesscond.sheets import ends, in_coordinates

if TYPE_CHECKING:
    import pandas as pd

    from hesscond.runs import StoredRun


def sweep_frame(runs: Sequence[StoredRun], keys: Mapping[str, str]) -> pd.DataFrame:
    """Results of each run, with settings by names of their dotted keys; κ: medians over mini-batches."""
    import pandas as pd

    rows = []
    for run in runs:
        settings = {name: reduce(getitem, key.split("."), run.config) for name, key in keys.items()}
        summary = summary_frame([run]).iloc[0]
        row: dict[str, Any] = {"run": run.folder.name, "method": run.legend}
        row |= {name: summary[name] for name in ("batch_size", "learning_rate")}
        row |= {name: value if isinstance(value, (int, float)) else str(value) for name, value in settings.items()}
        row |= {name: summary[name] for name in ("seed", "status", "iterations", "collapsed")}
        row |= {"loss": summary["training_loss_tail_mean"], "accuracy": summary["test_accuracy"]}
        kappas = ("kappa", "kappa_lower", "kappa_own", "kappa_own_lower")
        rows.append(row | {name: summary[f"batch_{name}"] for name in kappas} | {"seconds": run.seconds})
    return pd.DataFrame(rows)


#: Columns of `sweep_frame` that `best_frame` gives with their ranges over the seeds.
QUANTITIES = ("loss", "accuracy", "seconds")
#: Levels of Hessians, as in `hesscond.study.config.Level`, in the column ``level`` of `cells_frame`.
LEVELS = ("unit", "layer", "network")


def best_frame(frame: pd.DataFrame, cells: pd.DataFrame, settings: Sequence[str] = ()) -> pd.DataFrame:
    """The best learning rate of each method × batch size × setting, and the results of its seeds.

    The best rate is that with the fewest diverged seeds, and of these with the smallest final training loss, the mean
    over the finished seeds (learning_rate is NaN if all diverged). Only the rates with the most finished or diverged
    seeds are compared. edge: ``"lowest"`` or ``"highest"`` if the best of several rates is at an end of the grid.
    Results are means over the seeds with ``_min`` and ``_max``; those of each level are medians of `cells_frame` over
    mini-batches, or the training set where no mini-batch was probed.
    """
    import pandas as pd

    keys = ["method", "batch_size", *settings]
    cells = series.shown_probes(cells)
    levels = [level for level in LEVELS if (cells["level"] == level).any()]
    rows = []
    for key, group in frame.groupby(keys, sort=False, dropna=False):
        row: dict[str, Any] = dict(zip(keys, key, strict=True))
        over = group[group["status"].isin(["finished", "diverged"])]
        tried = sorted(group["learning_rate"].unique())
        by_rate = dict(iter(over.groupby("learning_rate")))
        most = max((len(runs) for runs in by_rate.values()), default=0)
        bad = {rate: int((runs["status"] == "diverged").sum()) for rate, runs in by_rate.items()}
        losses = {
            rate: (bad[rate], runs.loc[runs["status"] == "finished", "loss"].mean())
            for rate, runs in by_rate.items()
            if len(runs) == most > bad[rate]
        }
        best = min(losses, key=lambda r: losses[r], default=math.nan)
        at_end = {tried[0]: "lowest", tried[-1]: "highest"} if len(tried) > 1 else {}
        chosen = over[(over["learning_rate"] == best) & (over["status"] == "finished")]
        row |= {"rates": len(tried), "diverged": sum(map(bool, bad.values()))}
        row |= {"learning_rate": best, "edge": at_end.get(best, ""), "seeds": len(chosen)}
        row["collapsed"] = int(chosen["collapsed"].sum())
        for name in QUANTITIES:
            values = chosen[name].dropna()
            row |= {name: values.mean(), f"{name}_min": values.min(), f"{name}_max": values.max()}
        probes = cells[cells["run"].isin(chosen["run"])]
        for level in levels:
            row |= {f"{level}_{name}": value for name, value in of_level(probes[probes["level"] == level]).items()}
        for kind in OPTIMA:
            bounds = probes[[f"share_{kind}_lower", f"share_{kind}_upper"]].dropna().to_numpy(dtype=float)
            row |= series.located(f"share_{kind}", series.quantile(bounds[:, 0], bounds[:, 1], 0.5))
        rows.append(row)
    best = pd.DataFrame(rows)
    best.attrs["probed"] = "mini-batches" if (cells["data"] == "batch").any() else "training set"
    return best


def of_level(cells: pd.DataFrame) -> dict[str, float]:
    """The columns of `best_frame` about the κ of one level."""
    columns: dict[str, float] = {"cells": 0, "resolved": 0}
    for name in ("kappa", "kappa_own"):
        columns |= series.median_kappa(cells, name)
        lower, upper = series.intervals(cells, name)
        columns["cells"] += int((~np.isnan(lower)).sum())
        columns["resolved"] += int(np.isfinite(upper).sum())
    sharpness = cells["sharpness"].dropna()
    return columns | {"sharpness": float(sharpness.median()) if len(sharpness) else math.nan}


def best_table(best: pd.DataFrame, settings: Sequence[str], title: str) -> tables.TextTable:
    """`best_frame` for the terminal; the frame has the ranges over the seeds."""
    marks = {"lowest": "< ", "highest": "> ", "": ""}
    levels = [level for level in LEVELS if f"{level}_kappa" in best]
    caption = (
        f"each method at its best rate by the loss, mean over the seeds; {tables.LAST}; < or > at a rate: the lowest "
        "or highest of the grid, a better one may lie beyond; rates: number tried"
    )
    if levels:
        caption += (
            f"; κ: median over all probes ({best.attrs['probed']}), blocks and seeds in the plain parameters, and in "
            f"the method's own coordinates{tables.OPEN}; λη/2: largest |λ| in the own coordinates times half the rate, "
            "1 is the edge of stability"
        )
    if timed := "time" in best:
        caption += "; time: of an iteration without probes, vanilla = 1"
    columns = [
        tables.Column(
            "method", lambda row: row["method"] + " (collapsed)" * (row["collapsed"] == row["seeds"] > 0), left=True
        ),
        tables.numbers("batch", "batch_size", "d"),
        *(tables.Column(name, lambda row, name=name: str(row[name])) for name in settings),  # type: ignore[misc]
        tables.Column(
            "rate",
            lambda row: "none" if math.isnan(row["learning_rate"]) else f"{marks[row['edge']]}{row['learning_rate']:g}",
        ),
        tables.Column(
            "rates", lambda row: f"{row['rates']}" + f" ({row['diverged']} diverged)" * (row["diverged"] > 0)
        ),
        tables.numbers("seeds", "seeds", "d"),
        tables.numbers("loss", "loss", tables.LOSS),
        *([tables.numbers("acc.%", "accuracy", ".1f", 100)] if best["accuracy"].notna().any() else []),
    ]
    for level in levels:
        columns += [tables.bounded(f"κ {level}", f"{level}_kappa"), tables.bounded("own", f"{level}_kappa_own")]
    columns += [tables.numbers(f"λη/2 {level}", f"{level}_sharpness", ".2g") for level in levels[-1:]]
    columns += [tables.numbers("time", "time", ".2f")] if timed else []
    return tables.text_table(best, [*columns, tables.numbers("s", "seconds", ".1f")], caption, title)


def cells_frame(runs: Sequence[StoredRun]) -> pd.DataFrame:
    """Every κ that was measured: a row for each run, iteration, block and unit, with the columns `CELLS`."""
    import pandas as pd

    frames = []
    for run in runs:
        probe = run.table("probe")
        network = (probe["layer"] == NETWORK) & probe["unit"].isna()
        level = pd.Series(np.where(probe["unit"].notna(), "unit", "layer"), index=probe.index).mask(network, NETWORK)
        rate = float(run.config["run"]["learning_rate"])
        probe = probe.assign(
            run=run.folder.name,
            method=run.legend,
            learning_rate=rate,
            seed=run.seed,
            level=level,
            lr=probe["iteration"].map(run.table("training").set_index("iteration")["lr"]),
        )
        probe["sharpness"] = probe["lr"] * probe["lambda_max_own"] / 2
        for kind in OPTIMA:
            probe[[f"share_{kind}_lower", f"share_{kind}_upper"]] = [
                possible(row, kind) for row in probe.to_dict("records")
            ] or np.zeros((0, 2))
        frames.append(probe[CELLS])
    return pd.concat(frames, ignore_index=True) if frames else pd.DataFrame(columns=CELLS)


#: The columns of `cells_frame`.
CELLS = [
    *("run", "method", "learning_rate", "seed", "iteration", "data", "level", "layer", "unit", "n_params"),
    *(in_coordinates(name, suffix) for suffix in ("", "own") for name in (*ends("kappa"), "resolved", "rank")),
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
    share, other = gained / most, gained / least if least > 0 else math.copysign(math.inf, gained)
    return min(share, other), max(share, other)
