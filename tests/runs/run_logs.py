"""Made-up run folders, with a row in every table; comparisons of runs, bit for bit."""

import shutil

import pandas as pd
import pytest
import torch

from hesscond.runs import TABLES, Checkpoints, RunLog, open_run
from hesscond.study import run

CONFIG = {
    "name": "made-up",
    "description": "for the tests",
    "data": {"name": "digits"},
    "model": {"hidden": [8]},
    "training": {"batch_size": 60, "iterations": 6},
    "probe": {"layers": ["fc2"], "units": [3]},
    "run": {"method": "bnp", "seed": 4, "learning_rate": 0.1},
}


def row(iteration, **others):
    """A row of the probe table."""
    return {"iteration": iteration, "epoch": 0, "data": "batch", "layer": "fc2", "unit": 3} | others


def written_run(folder, *, iterations=20, killed=False):
    """A run folder of the present version, with a row in every table; ``killed``: as it is when its process is gone."""
    log = RunLog(folder.with_name(f"{folder.name}-alive") if killed else folder, CONFIG)
    every = range(iterations)
    for k in every:
        log.training(k, 0, 1 / (k + 1))
    facts = {"statement": "s-1", "claim": "bound", "known": 1, "status": "holds", "used": 0.5, "reason": "because"}
    log.commit(
        probe=[row(k, kappa=10.0 ** min(k, 300), resolved=1, solver="exact") for k in every],
        readings=[row(k, kappa=2.0 ** min(k, 300), coordinates="projected") for k in every],
        statements=[row(k, **facts) for k in every],
    )
    log.commit(evaluation=[{"iteration": 0, "epoch": 0, "test_loss": 1.0, "test_accuracy": 0.5}])
    if killed:
        log.mark(pid=-1)
        shutil.copytree(log.folder, folder)
    log.close("finished")
    return folder


def broken_off(plan, data, at, how=KeyboardInterrupt, resume=False):
    """Run until iteration ``at`` is over."""

    def watch(progress):
        if progress.iteration == at:
            raise how

    with pytest.raises(how):
        run(plan, data, watch, resume=resume)


def latest(folder):
    """The newest checkpoint of a run."""
    with Checkpoints(folder) as checkpoints:
        return checkpoints.latest(torch.device("cpu"))


def same_logs(one, other, tables=TABLES):
    """Two runs logged the same."""
    for table in tables:
        pd.testing.assert_frame_equal(open_run(one).table(table), open_run(other).table(table), check_exact=True)


def same_runs(one, other):
    """Two runs logged the same, and came to the same weights, order of samples and random state."""
    same_logs(one, other)
    a, b = latest(one), latest(other)
    assert a["iteration"] == b["iteration"]
    assert a["model"].keys() == b["model"].keys()
    assert all(torch.equal(x, b["model"][name]) for name, x in a["model"].items())
    assert torch.equal(a["order"], b["order"])
    assert torch.equal(a["random"], b["random"])
