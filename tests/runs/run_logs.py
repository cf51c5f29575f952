"""Made-up run folders, with a row in every table."""

import shutil

from hesscond.runs import RunLog

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
