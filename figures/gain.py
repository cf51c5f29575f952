"""The gain κ(H)/κ(PᵀHP) against κ(D)² along runs of BNP's Figure 8: ``python figures/gain.py RUN… --out FILE.csv``.

A row for each run and kind of data (mini-batches, training set), P = U D from the raw statistics of the same samples,
whatever the method; unresolved κ are left out, and counted. The loss at equal time takes the time of an iteration
without probes from a file of its own.
"""

from __future__ import annotations

import argparse
import statistics
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pandas as pd
import torch

from hesscond.runs import StoredRun
from hesscond.study import RunPlan, load_data, load_study, open_run
from hesscond.study.runner import rehearsal

#: The paper's range of κ(D).
LOW, HIGH = 1e2, 1e5
#: Blocks of iterations that are timed, and their length.
BLOCKS, BLOCK = 40, 20


def rows_of(run: StoredRun, shares: pd.Series) -> list[dict[str, Any]]:
    """Rows of a run: of the mini-batches, and of the training set; ``shares`` of the run by method for equal times."""
    records = []
    probe, evaluation = run.table("probe"), run.table("evaluation")
    accuracy = 100 * evaluation[evaluation["epoch"] >= 1]["test_accuracy"].astype(float)
    for data, every in probe.groupby("data"):
        scaling = every["kappa_D"]
        rows = every[every["kappa"].lt(float("inf")) & every["kappa_preconditioned"].lt(float("inf"))]
        gain, expected = rows["kappa"] / rows["kappa_preconditioned"], rows["kappa_D"] ** 2
        short = expected / gain
        records.append(
            {
                "inputs": "standardized" if run.config["data"]["standardize"] else "[0, 1]",
                "method": run.legend,
                "seed": run.seed,
                "data": data,
                "probes": len(every),
                "resolved": len(rows),
                "kappa_D": scaling.median(),
                "kappa_D_least": scaling.min(),
                "kappa_D_most": scaling.max(),
                "below": 100 * (scaling < LOW).mean(),
                "inside": 100 * scaling.between(LOW, HIGH).mean(),
                "above": 100 * (scaling > HIGH).mean(),
                "kappa": rows["kappa"].median(),
                "kappa_preconditioned": rows["kappa_preconditioned"].median(),
                "gains": 100 * (gain > 1).mean(),
                "gain": gain.median(),
                "relative_gain": (gain / expected).median(),
                "short": short.median(),
                "short_least": short.min(),
                "short_most": short.max(),
                "correlation": gain.corr(expected, method="spearman"),
                "mean_accuracy": accuracy.mean(),
                "accuracy": accuracy.iloc[-1],
                "loss": loss_after(run, 1.0),
                "loss_at_equal_time": loss_after(run, shares[run.legend]),
            }
        )
    return records


def loss_after(run: StoredRun, share: float) -> float:
    """Training loss after a share of a run: the mean over the epoch before, within which it rises."""
    loss = run.table("training")["loss"]
    last = int(share * len(loss))
    return float(loss.iloc[last - len(loss) // int(run.table("evaluation")["epoch"].max()) : last].mean())


def times() -> pd.DataFrame:
    """Milliseconds of an iteration without probes: medians over blocks, the methods in turn, one thread."""
    torch.set_num_threads(1)
    study = load_study("bnp-figure-8")
    study = study.model_copy(update={"probe": study.probe.model_copy(update={"every": 0})})
    data = load_data(study.data)
    measured: dict[str, list[float]] = {}
    with ExitStack() as stack:
        training = {
            name: stack.enter_context(
                rehearsal(RunPlan(study, method, 0, rate, Path(), torch.device("cpu"), name), data)
            )
            for name, method, rate in (("vanilla", "vanilla", 0.01), ("BNP", "bnp", 0.1))
        }
        order = training["BNP"].shuffled()[: BLOCKS * BLOCK * study.training.batch_size]
        for number, block in enumerate(order.reshape(BLOCKS, BLOCK, -1)):
            for name, run in training.items():
                started = time.perf_counter()
                for batch in block:
                    run.step(number, run.inputs[batch], run.targets[batch])
                measured.setdefault(name, []).append(1000 * (time.perf_counter() - started) / BLOCK)
    medians = {name: statistics.median(milliseconds[1:]) for name, milliseconds in measured.items()}
    return pd.DataFrame([{"method": name, "blocks": BLOCKS - 1, "median_ms": ms} for name, ms in medians.items()])


def main() -> None:
    """Read the runs and write the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("runs", nargs="+", type=Path, help="run folders, or folders that hold run folders")
    parser.add_argument("--out", type=Path, required=True, help="file of the rows of the runs")
    parser.add_argument("--times", type=Path, required=True, help="file of the times, measured if it is not there")
    given = parser.parse_args()
    if not given.times.exists():
        times().to_csv(given.times, index=False, float_format="%.4g", lineterminator="\n")
    each = pd.read_csv(given.times).set_index("method")["median_ms"]
    folders = [log.parent for run in given.runs for log in sorted(run.rglob("run.sqlite"))]
    frame = pd.DataFrame([row for folder in folders for row in rows_of(open_run(folder), each.min() / each)])
    frame.to_csv(given.out, index=False, float_format="%.5g", lineterminator="\n")


if __name__ == "__main__":
    main()
