"""Sweeps whose runs are done by a Dask scheduler, or by submitit, whose local cluster stands for Slurm."""

import os
import shutil
import subprocess
import sys
import uuid
from contextlib import suppress
from dataclasses import replace
from types import SimpleNamespace

import pandas as pd
import pytest
import torch
from threadpoolctl import threadpool_limits

from hesscond.data import load
from hesscond.errors import ConfigError, DivergedError, RunError
from hesscond.study import load_study, open_run, run, run_together
from hesscond.study.batch import Overrides
from hesscond.study.executors import DaskCluster, Slurm
from hesscond.study.grid import check_config, plan_sweep, with_settings
from hesscond.study.slurm import COMMANDS, LEAST, LostJobError, Queue, SlurmHandle, parameters_of, parse_option
from hesscond.study.store import TABLES
from hesscond.study.sweep import prepare, sweep
from hesscond.study.worker import STATES, Task, read_state

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


def ready_in(folder, data, together):
    study = Overrides(iterations=20, probe_every=10).apply(
        with_settings(load_study("fc-digits"), {"model.hidden": [12, 10]})
    )
    content = study.model_dump(mode="json", exclude_none=True)
    axes = {"methods": ["vanilla"], "seeds": [0, 1], "rates": [0.1, 1e30], "batch_sizes": [60], "together": together}
    config = check_config({"study": content, **axes})
    return prepare(config, plan_sweep(config, folder, CPU), {("digits", ()): data}, folder)


def check(folder, outcomes, data, groups):
    """The same as in this process, bit for bit."""
    assert [o.status for o in outcomes.values()].count("finished") == 2
    assert [o.status for o in outcomes.values()].count("diverged") == 2
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    for plans in groups:
        here = [replace(plan, folder=folder / "here" / plan.folder.name) for plan in plans]
        with threadpool_limits(1), suppress(DivergedError):
            run(here[0], data) if len(here) == 1 else run_together(here, data)
        for plan, own in zip(plans, here, strict=True):
            for table in TABLES:
                one, other = open_run(own.folder).table(table), open_run(plan.folder).table(table)
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
@pytest.mark.parametrize("together", [False, True])
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning")
def test_dask_comes_to_the_same(tmp_path, scheduler, together):
    data = load("digits")
    ready = ready_in(tmp_path / "out", data, together)
    assert {len(plans) for plans in ready.groups.tasks} == {2 if together else 1}
    outcomes = sweep(ready.groups.tasks, DaskCluster(scheduler(1), None), Quiet(), threads=1)
    check(tmp_path / "out", outcomes, data, ready.groups.tasks)


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
@pytest.mark.parametrize("together", [False, True])
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning")
def test_submitit_comes_to_the_same(tmp_path, together):
    pytest.importorskip("submitit", reason="submitit is an extra: pip install hesscond[slurm]")
    data = load("digits")
    ready = ready_in(tmp_path / "out", data, together)
    assert {len(plans) for plans in ready.groups.tasks} == {2 if together else 1}
    executor = Slurm("cluster=local,time=10", tmp_path / "out" / STATES / "slurm", 1, 2)
    assert executor.capacity == 2
    outcomes = sweep(ready.groups.tasks, executor, Quiet(), threads=1)
    check(tmp_path / "out", outcomes, data, ready.groups.tasks)


def has_slurm():
    if any(shutil.which(name) is None for name in (*COMMANDS, "sinfo")):
        return False
    return bool(subprocess.run(["sinfo", "--noheader"], capture_output=True, timeout=60, check=False).stdout.strip())


class Disturbing(Quiet):
    """Kills the job of a run once it works; when it was begun again, sends the signal that its time is up."""

    def __init__(self, states, run, job):
        self.states, self.run, self.job = states, run, job
        self.lost, self.signals, self.reached = [], [["--signal=ABRT"], ["--signal=USR2"]], 0

    def broke(self, task, reason):
        self.lost.append(reason)

    def tick(self):
        state = read_state(self.states, self.run)
        if self.signals and state.starts == 3 - len(self.signals) and state.iteration > self.reached:
            self.reached = state.iteration
            subprocess.run(["scancel", "--name", self.job, *self.signals.pop(0)], timeout=60, check=True)


@pytest.mark.slow
def test_slurm_comes_to_the_same_though_a_job_is_killed_and_its_time_is_up(tmp_path):
    """Where nodes do not share /tmp, give pytest a --basetemp that they see."""
    pytest.importorskip("submitit", reason="submitit is an extra: pip install hesscond[slurm]")
    if not has_slurm():
        pytest.skip("no Slurm answers here: sbatch and sinfo of one that runs")
    data, out = load("digits"), tmp_path / "out"
    study = Overrides(iterations=20000, probe_every=500).apply(
        with_settings(load_study("fc-digits"), {"model.hidden": [12, 10], "training.checkpoint_seconds": 1})
    )
    content = study.model_dump(mode="json", exclude_none=True)
    axes = {"methods": ["vanilla"], "seeds": [0], "rates": [0.1], "batch_sizes": [60]}
    config = check_config({"study": content, **axes})
    (plan,) = prepare(config, plan_sweep(config, out, CPU), {("digits", ()): data}, out).left
    job = f"hesscond-{uuid.uuid4().hex[:8]}"
    watcher = Disturbing(out / STATES, plan.folder.name, job)
    outcomes = sweep([[plan]], Slurm(f"time=30,name={job}", out / STATES / "slurm", 1, None), watcher, threads=1)
    assert [outcome.status for outcome in outcomes.values()] == ["finished"]
    assert watcher.signals == []
    assert len(watcher.lost) == 1
    assert "ended as FAILED" in watcher.lost[0]
    assert read_state(out / STATES, plan.folder.name).starts == 3
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    with threadpool_limits(1):
        run(replace(plan, folder=tmp_path / "alone"), data)
    torch.set_num_threads(before)
    for table in TABLES:
        one, other = open_run(tmp_path / "alone").table(table), open_run(plan.folder).table(table)
        pd.testing.assert_frame_equal(one, other, check_exact=True)


@pytest.fixture
def squeue(tmp_path, monkeypatch):
    """A squeue that says what it is told to."""
    (tmp_path / "bin").mkdir()
    script, answer = tmp_path / "bin" / "squeue", tmp_path / "answer"
    script.write_text(f"#!/bin/sh\nexec cat '{answer}'\n")
    script.chmod(0o755)
    monkeypatch.setenv("PATH", f"{script.parent}:{os.environ['PATH']}")
    monkeypatch.setattr("hesscond.study.slurm.POLL", -1.0)
    return answer


def test_a_job_is_lost_only_when_slurm_says_that_it_ended_without_a_result(squeue, tmp_path, monkeypatch):
    paths = SimpleNamespace(result_pickle=tmp_path / "result", folder=tmp_path, stderr=tmp_path / "log.err")
    task = SimpleNamespace(names=["a", "b"])
    handle = SlurmHandle(SimpleNamespace(job_id="7_1", paths=paths, result=lambda: "result"), task, Queue())
    assert not handle.done()  # squeue fails: there is no answer
    for alive in ("PENDING", "RUNNING", "COMPLETING", "SUSPENDED", "REQUEUED"):
        squeue.write_text(f"7_0 FAILED\n7_1 {alive}\n")
        assert not handle.done()
    squeue.write_text("7_1 COMPLETED\n")
    assert not handle.done()  # its result may not be seen yet
    monkeypatch.setattr("hesscond.study.slurm.GRACE", -1.0)
    for ended in ("7_1 COMPLETED", "7_1 NODE_FAIL", "7_1 CANCELLED", "7_0 RUNNING"):
        squeue.write_text(f"{ended}\n")
        assert handle.done()
    with pytest.raises(LostJobError, match=r"Slurm job 7_1 ended as GONE, see .*log\.err"):
        handle.result()
    handle.withdrawn = True
    assert [(outcome.name, outcome.status) for outcome in handle.result()] == [
        ("a", "interrupted"),
        ("b", "interrupted"),
    ]
    paths.result_pickle.touch()
    assert handle.result() == "result"


def test_a_run_whose_time_is_up_twice_without_a_checkpoint_between_is_not_queued_again(tmp_path):
    pytest.importorskip("submitit", reason="submitit is an extra: pip install hesscond[slurm]")
    task = Task((SimpleNamespace(folder=tmp_path),), None, None, 1, tmp_path / "stop")
    (tmp_path / "checkpoints").mkdir()
    again = task.checkpoint().function
    (tmp_path / "checkpoints" / "000000010.pt").touch()
    again = again.checkpoint().function
    assert again.plans == task.plans
    with pytest.raises(RunError, match="give a longer --slurm time"):
        again.checkpoint()


def test_options_of_slurm_become_those_of_submitit_and_sbatch():
    cluster, parameters = parameters_of("partition=gpu,time=1-02:30:00,mem=0.5,gpus=2,cpus=4,exclusive=true", 1, 3)
    assert cluster == "slurm"
    assert parameters == {
        "name": "hesscond",
        "timeout_min": 26 * 60 + 30,
        "mem_gb": 0.5,
        "gpus_per_node": 2,
        "cpus_per_task": 4,
        "slurm_array_parallelism": 3,
        "slurm_srun_args": ["--cpus-per-task=4"],
        "slurm_additional_parameters": {"partition": "gpu", "exclusive": True},
    }


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("mem=4GB", "a number of GB"),
        ("cpus=two", "must be a number"),
        (f"time={LEAST - 1}", f"at least {LEAST} minutes"),
        ("cluster=moon", "slurm, or local"),
        ("cluster=local,colour_of=red", "not colour_of"),
    ],
)
def test_values_of_slurm_that_cannot_be(options, words):
    with pytest.raises(ConfigError, match=f"--slurm .*{words}"):
        parameters_of(options, 1, None)


def test_a_machine_without_slurm_is_told(tmp_path, monkeypatch):
    pytest.importorskip("submitit", reason="submitit is an extra: pip install hesscond[slurm]")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match=r"--slurm time=10: there is no Slurm here, sbatch, srun"):
        Slurm("time=10", tmp_path, 1, None)


@pytest.mark.parametrize("text", ["partition", "=3", "time=", "time=1:2", "time=a:b:c", "time=-5"])
def test_options_of_slurm_that_cannot_be(text):
    with pytest.raises(ConfigError, match="--slurm"):
        parse_option(text)
