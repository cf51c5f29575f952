"""Sweeps whose runs are done by the workers of a Dask scheduler."""

import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from dataclasses import replace

import pandas as pd
import pytest
import torch
from threadpoolctl import threadpool_limits

from hesscond.data import load
from hesscond.errors import ConfigError, DivergedError, RunError
from hesscond.runs import TABLES
from hesscond.study import load_study, open_run, run
from hesscond.study.grid import Overrides, check_config, plan_sweep, with_settings
from hesscond.study.sweep import dask_workers, prepare_sweep, sweep

CPU = torch.device("cpu")

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning")


class Quiet:
    def ended(self, outcome):
        pass

    def broke(self, name, reason):
        raise AssertionError(reason)

    def tick(self):
        pass


def ready_in(folder, data, iterations=20, seconds=30.0, **axes):
    study = Overrides(iterations=iterations, probe_every=10).apply(
        with_settings(load_study("fc-digits"), {"model.hidden": [12, 10], "training.checkpoint_seconds": seconds})
    )
    content = study.model_dump(mode="json", exclude_none=True)
    grid = {"methods": ["vanilla"], "seeds": [0, 1], "rates": [0.1, 1e30], "batch_sizes": [60]} | axes
    config = check_config({"study": content, **grid})
    return prepare_sweep(config, plan_sweep(config, folder, CPU), {("digits", ()): data}, folder)


def check(folder, plans, data):
    """The same as in this process, bit for bit."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    for plan in plans:
        own = replace(plan, folder=folder / "here" / plan.folder.name)
        with threadpool_limits(1), suppress(DivergedError):
            run(own, data)
        for table in TABLES:
            one, other = open_run(own.folder).table(table), open_run(plan.folder).table(table)
            pd.testing.assert_frame_equal(one, other, check_exact=True)
        assert open_run(plan.folder).facts["pid"] != str(os.getpid())
    torch.set_num_threads(before)


SCHEDULER = """
from distributed import LocalCluster
if __name__ == "__main__":
    with LocalCluster(n_workers=1, threads_per_worker={threads}, dashboard_address=None, scheduler_port=0) as cluster:
        print(cluster.scheduler_address, flush=True)
        input()
"""


@pytest.fixture
def scheduler(tmp_path):
    """The address of a scheduler with one worker of so many threads, in a process of its own."""
    pytest.importorskip("distributed", reason="Dask is an extra: pip install distributed (extra 'dask')")
    processes = []

    def start(threads):
        file = tmp_path / "scheduler.py"
        file.write_text(SCHEDULER.format(threads=threads))
        process = subprocess.Popen(
            [sys.executable, file], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=tmp_path
        )
        processes.append(process)
        return process.stdout.readline().strip()

    yield start
    for process in processes:
        process.communicate("\n", timeout=60)


@pytest.mark.slow
def test_dask_comes_to_the_same(tmp_path, scheduler):
    data = load("digits")
    ready = ready_in(tmp_path / "out", data)
    with dask_workers(scheduler(1)) as executor:
        outcomes = sweep(ready.left, executor, Quiet(), threads=1)
    assert sorted(outcome.status for outcome in outcomes.values()) == ["diverged"] * 2 + ["finished"] * 2
    check(tmp_path / "out", ready.left, data)


@pytest.mark.slow
def test_a_run_whose_worker_is_killed_is_begun_again_and_comes_to_the_same(tmp_path, scheduler):
    data = load("digits")
    ready = ready_in(tmp_path / "out", data, iterations=3000, seconds=0.2, seeds=[0], rates=[0.1])
    (plan,) = ready.left

    def kill_it():
        while True:
            with suppress(RunError):
                if list((plan.folder / "checkpoints").glob("*.pt")):
                    os.kill(int(open_run(plan.folder).facts["pid"]), signal.SIGKILL)
                    return
            time.sleep(0.05)

    with dask_workers(scheduler(1)) as executor:
        killer = threading.Thread(target=kill_it)
        killer.start()
        (outcome,) = sweep(ready.left, executor, Quiet(), threads=1).values()
        killer.join()
    assert outcome.status == "finished"
    assert max(open_run(plan.folder).rows("clock")["session"]) == 2
    check(tmp_path / "out", ready.left, data)


@pytest.mark.slow
def test_dask_workers_with_several_threads_are_refused(scheduler):
    with pytest.raises(ConfigError, match="--nthreads 1"), dask_workers(scheduler(2)):
        pass


def test_a_scheduler_that_is_not_there():
    pytest.importorskip("distributed", reason="Dask is an extra: pip install distributed (extra 'dask')")
    with (
        pytest.raises(ConfigError, match=r"no Dask scheduler answers at nonsense://nowhere"),
        dask_workers("nonsense://nowhere"),
    ):
        pass
