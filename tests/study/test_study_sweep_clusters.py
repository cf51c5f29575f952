"""Sweeps whose runs are done by a Dask scheduler, or by submitit, whose local cluster stands for Slurm."""

import os
import subprocess
import sys
from dataclasses import replace

import pandas as pd
import pytest
import torch
from threadpoolctl import threadpool_limits

from hesscond.data import load
from hesscond.errors import ConfigError
from hesscond.study import load_study, open_run, run
from hesscond.study.batch import Overrides
from hesscond.study.executors import DaskCluster, Slurm, parse_option
from hesscond.study.grid import check_config, plan_sweep, with_settings
from hesscond.study.store import TABLES
from hesscond.study.sweep import prepare, sweep
from hesscond.study.worker import STATES, read_state

CPU = torch.device("cpu")


class Quiet:
    def began(self, task):
        pass

    def ended(self, outcome):
        pass

    def broke(self, task, reason):
        raise AssertionError(reason)

    def tick(self):
        pass


def plans_in(folder, data):
    study = Overrides(iterations=20, probe_every=10).apply(
        with_settings(load_study("fc-digits"), {"model.hidden": [12, 10]})
    )
    content = study.model_dump(mode="json", exclude_none=True)
    axes = {"methods": ["vanilla"], "seeds": [0, 1], "rates": [0.1, 1e30], "batch_sizes": [60]}
    config = check_config({"study": content, **axes})
    return prepare(config, plan_sweep(config, folder, CPU), {("digits", ()): data}, folder).left


def check(folder, outcomes, data, plans):
    """The same as in this process, bit for bit."""
    assert [o.status for o in outcomes.values()].count("finished") == 2
    assert [o.status for o in outcomes.values()].count("diverged") == 2
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    for plan in plans:
        if plan.learning_rate == 0.1:
            alone = folder / "alone" / plan.folder.name
            with threadpool_limits(1):
                run(replace(plan, folder=alone), data)
            for table in TABLES:
                one, other = open_run(alone).table(table), open_run(plan.folder).table(table)
                pd.testing.assert_frame_equal(one, other, check_exact=True)
        assert read_state(plan.folder.parent / STATES, plan.folder.name).pid not in (0, os.getpid())
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
    pytest.importorskip("distributed", reason="Dask is an extra: pip install hesscond[dask]")
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
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning")
def test_dask_comes_to_the_same(tmp_path, scheduler):
    data = load("digits")
    plans = plans_in(tmp_path / "out", data)
    outcomes = sweep(plans, DaskCluster(scheduler(1), None), Quiet(), threads=1)
    check(tmp_path / "out", outcomes, data, plans)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning")
def test_dask_workers_with_several_threads_are_refused(scheduler):
    with pytest.raises(ConfigError, match="--nthreads 1"):
        DaskCluster(scheduler(2), None)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning")
def test_a_scheduler_that_is_not_there():
    pytest.importorskip("distributed", reason="Dask is an extra: pip install hesscond[dask]")
    with pytest.raises(ConfigError, match=r"no Dask scheduler answers at nonsense://nowhere"):
        DaskCluster("nonsense://nowhere", None)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning")
def test_submitit_comes_to_the_same(tmp_path):
    pytest.importorskip("submitit", reason="submitit is an extra: pip install hesscond[slurm]")
    data = load("digits")
    plans = plans_in(tmp_path / "out", data)
    executor = Slurm("cluster=local,time=10", tmp_path / "out" / STATES / "slurm", 1, 2)
    assert executor.capacity == 2
    outcomes = sweep(plans, executor, Quiet(), threads=1)
    check(tmp_path / "out", outcomes, data, plans)


def test_a_machine_without_slurm_is_told(tmp_path):
    pytest.importorskip("submitit", reason="submitit is an extra: pip install hesscond[slurm]")
    with pytest.raises(ConfigError, match=r"--slurm time=10: .*srun"):
        Slurm("time=10", tmp_path, 1, None)
    with pytest.raises(ConfigError, match=r"--slurm cluster=local,colour_of=red: .*colour_of"):
        Slurm("cluster=local,colour_of=red", tmp_path, 1, None)


@pytest.mark.parametrize("text", ["partition", "=3", "time=", "time=1:2", "time=a:b:c"])
def test_options_of_slurm_that_cannot_be(text):
    with pytest.raises(ConfigError, match="--slurm"):
        parse_option(text)
