"""A study in a process of its own, killed or interrupted in the middle."""

import os
import signal
import sqlite3
import subprocess
import sys
import time
from contextlib import closing

import pytest

from hesscond.study import open_run


def probed(log):
    try:
        with closing(sqlite3.connect(f"{log.as_uri()}?mode=ro", uri=True)) as connection:
            return connection.execute("SELECT COUNT(*) FROM probe WHERE data = 'batch'").fetchone()[0]
    except sqlite3.OperationalError:  # not there yet
        return 0


@pytest.fixture
def stopped(tmp_path):
    """Start a study of three runs, send a signal after so many probed iterations; (exit code, stderr)."""
    processes = []

    def stop(folder, probes, sent):
        command = [sys.executable, "-m", "hesscond", "study", "fc-digits", "--method", "bnp", "--seed", "0,1"]
        environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
        process = subprocess.Popen(
            [*command, "--iterations", "100000", "--out", str(folder)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
            cwd=tmp_path,
        )
        processes.append(process)
        deadline = time.monotonic() + 60
        while probed(folder / "bnp-seed0" / "run.sqlite") < probes:
            assert process.poll() is None, process.communicate()[1]
            assert time.monotonic() < deadline, "the study makes no progress"
            time.sleep(0.02)
        assert open_run(folder / "bnp-seed0").status == "running"
        process.send_signal(sent)
        stdout, error = process.communicate(timeout=30)
        assert stdout == ""
        return process.returncode, error

    yield stop
    for process in processes:
        if process.poll() is None:
            process.kill()
            process.communicate()


def check_consistent(run, at_least):
    with closing(sqlite3.connect(run.folder / "run.sqlite")) as connection:
        assert connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)
    training, probe = run.table("training"), run.table("probe")
    batch = probe[probe["data"] == "batch"]
    assert len(training) >= at_least
    assert training["iteration"].tolist() == list(range(len(training)))
    assert batch["iteration"].tolist() == list(range(len(batch)))
    assert 0 <= len(training) - len(batch) <= 1
    assert training["loss"].notna().all()
    assert (batch["kappa"] >= 1).all()
    # the end may have come between the last step of an epoch and the evaluation behind it
    due = [i for i in range(len(training) + 1) if i % 23 == 0]
    evaluated = run.table("evaluation")["iteration"].tolist()
    assert evaluated == due or [*evaluated, len(training)] == due


@pytest.mark.slow
def test_kill_9_loses_at_most_the_iteration_in_flight(tmp_path, stopped):
    code, error = stopped(tmp_path / "out", 40, signal.SIGKILL)
    assert (code, error) == (-signal.SIGKILL, "")
    run = open_run(tmp_path / "out" / "bnp-seed0")
    assert run.status == "killed"
    check_consistent(run, 40)
    assert len(run.table("training")) == len(run.table("probe").query("data == 'batch'"))


@pytest.mark.slow
def test_ctrl_c_leaves_a_readable_run_and_starts_no_other(tmp_path, stopped):
    code, error = stopped(tmp_path / "out", 40, signal.SIGINT)
    assert code == 130
    begin = f"interrupted: the log up to here is in {tmp_path / 'out' / 'bnp-seed0'}; resume with: hesscond study "
    assert error.startswith(begin)
    assert error.endswith(f" --iterations 100000 --out {tmp_path / 'out'} --resume\n")
    run = open_run(tmp_path / "out" / "bnp-seed0")
    assert run.status == "interrupted"
    check_consistent(run, 40)
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["bnp-seed0"]
    assert sorted(path.name for path in run.folder.iterdir()) == ["checkpoints", "config.toml", "run.sqlite"]
