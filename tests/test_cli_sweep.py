"""`hesscond sweep` as it is typed: what it prints and leaves behind, kills and signals, two at once."""

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pandas as pd
import pytest

from hesscond.errors import RunError
from hesscond.study import find_runs, open_run
from tests.cli_targets import STUDY
from tests.runs.run_logs import same_logs


def study(folder, iterations=12, seconds=30.0, every=4):
    text = STUDY.replace("iterations = 3", f"iterations = {iterations}\ncheckpoint_seconds = {seconds}")
    text = text.replace("rate = {", "grid = [0.05, 0.1, 0.2]\nrate = {").replace("bnp = 0.5", "bnp = 0.2")
    (folder / "tiny.toml").write_text(f"{text}every = {every}\ntrain_every_epochs = 0\n")


@pytest.fixture
def folder(tmp_path, monkeypatch):
    study(tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def started(*arguments, cwd):
    return subprocess.Popen(
        [sys.executable, "-m", "hesscond", "sweep", *map(str, arguments)],
        cwd=cwd,
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def states(out):
    """How the runs of a sweep stand, by name, as their logs say."""
    found = {}
    for path in Path(out).glob("*/run.sqlite"):
        with suppress(RunError):  # it is being made
            run = open_run(path.parent)
            sessions = run.rows("clock")["session"]
            found[path.parent.name] = {
                "status": run.status,
                "pid": int(run.facts["pid"]),
                "iteration": run.iterations,
                "starts": max(sessions, default=0),
            }
    return found


def wait_for(condition, process, seconds=120):
    deadline = time.monotonic() + seconds
    while not condition():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline, "the sweep makes no progress"
        time.sleep(0.02)


def gone(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


def wait_for_workers(found, seconds=20):
    """Those of a killed sweep end by themselves."""
    deadline = time.monotonic() + seconds
    while not all(gone(state["pid"]) for state in found.values()):
        assert time.monotonic() < deadline, "workers outlive their sweep"
        time.sleep(0.05)


@pytest.mark.slow
def test_a_grid_is_run_shown_and_not_repeated(folder, call_cli):
    arguments = ("sweep", "tiny.toml", "-m", "vanilla", "-m", "bnp", "--seed", "0:2", "--lr", "grid", "-j", "2")
    done = call_cli(*arguments)
    assert done.code == 0, done.err
    lines = done.err.splitlines()
    assert lines[0].startswith("12 runs; 2 at a time on cpu, 1 thread each") or "threads each" in lines[0]
    assert sum(": finished, 12 iterations, loss " in line for line in lines) == 12
    assert lines[-1].startswith("[12/12] ")
    runs = pd.read_csv("runs/sweep-tiny/runs.csv")
    assert sorted(runs["run"]) == sorted(run.folder.name for run in find_runs("runs/sweep-tiny"))
    assert set(runs["learning_rate"]) == {0.05, 0.1, 0.2}
    assert (runs["seconds"] > 0).all()
    best = pd.read_csv("runs/sweep-tiny/best.csv")
    for row in best.to_dict("records"):
        of_method = runs[runs["method"] == row["method"]]
        means = of_method.groupby("learning_rate")["loss"].mean()
        assert row["learning_rate"] == means.idxmin()
        assert row["loss"] == pytest.approx(means.min(), rel=1e-12)
        assert row["accuracy_max"] == of_method[of_method["learning_rate"] == means.idxmin()]["accuracy"].max()
        edge = {0.05: "lowest", 0.2: "highest"}.get(means.idxmin())
        assert row["edge"] == edge if edge else row["edge"] != row["edge"]
        assert row["method"] in done.out
    # the same command, and the folder: nothing is left to do
    for again in (call_cli(*arguments), call_cli("sweep", "runs/sweep-tiny")):
        assert (again.code, again.out) == (0, done.out)
        assert again.err == "12 runs, all of them over before; nothing to do\n"
    assert all(state["starts"] == 1 for state in states("runs/sweep-tiny").values())
    assert call_cli("runs", "runs/sweep-tiny", "--json").out.count('"finished"') == 12


# long enough to be met while it runs, on a fast machine too
LONG = 12_000


@pytest.fixture
def long(tmp_path):
    """A sweep of three runs that takes a while; its arguments."""
    study(tmp_path, LONG, seconds=0.2, every=100)
    return tmp_path, ("tiny.toml", "-m", "vanilla", "--seed", "0:3", "-j", "2", "--out", "o")


def check_against_unbroken_runs(folder):
    """What the sweep came to in the end is what one process that nobody disturbs comes to."""
    command = [sys.executable, "-m", "hesscond", "study", "tiny.toml", "-m", "vanilla", "--seed", "0,1,2"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    subprocess.run([*command, "--out", "alone"], cwd=folder, env=environment, check=True, capture_output=True)
    for seed in range(3):
        same_logs(folder / "o" / f"vanilla-b60-lr0.1-seed{seed}", folder / "alone" / f"vanilla-seed{seed}")


@pytest.mark.slow
def test_kill_9_of_the_sweep_and_of_a_worker_loses_only_what_was_in_flight(long):
    folder, arguments = long
    out = folder / "o"
    sweep = started(*arguments, cwd=folder)
    wait_for(lambda: sum(s["iteration"] > 0 for s in states(out).values()) >= 2, sweep)
    before = states(out)
    sweep.kill()
    sweep.communicate()
    wait_for_workers(before)
    # started again, one of its workers is killed
    sweep = started(*arguments, cwd=folder)

    def gone_on():
        return [n for n, s in states(out).items() if s["starts"] == 2 and s["status"] == "running"]

    wait_for(gone_on, sweep)
    victim = gone_on()[0]
    os.kill(states(out)[victim]["pid"], signal.SIGKILL)
    _, error = sweep.communicate(timeout=300)
    assert (sweep.returncode, f"{victim}: failed: its worker broke down (" in error) == (1, True), error
    sweep = started(*arguments, cwd=folder)
    _, error = sweep.communicate(timeout=300)
    assert sweep.returncode == 0, error
    after = states(out)
    starts = {name: state["starts"] for name, state in after.items()}
    # those in flight were gone on with, the killed one once more, and what had not begun was begun once
    assert starts == {name: 1 + (name in before) + (name == victim) for name in after}
    assert {state["status"] for state in after.values()} == {"finished"}
    check_against_unbroken_runs(folder)


@pytest.mark.slow
@pytest.mark.parametrize(("sent", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_signals_end_it_cleanly_and_it_goes_on(long, sent, code):
    folder, arguments = long
    out = folder / "o"
    sweep = started(*arguments, cwd=folder)
    wait_for(lambda: sum(s["iteration"] > 0 for s in states(out).values()) >= 2, sweep)
    sweep.send_signal(sent)
    said, error = sweep.communicate(timeout=60)
    assert (sweep.returncode, said) == (code, "")
    assert error.splitlines()[-1] == f"interrupted; resume with: hesscond sweep {' '.join(arguments)}"
    before = states(out)
    assert all(gone(state["pid"]) for state in before.values())
    assert {state["status"] for state in before.values()} <= {"interrupted", "finished"}
    assert sorted(path.name for path in out.iterdir()) == sorted([*before, "sweep.toml"])
    again = started("o", "-j", "2", cwd=folder)
    _, error = again.communicate(timeout=300)
    assert again.returncode == 0, error
    check_against_unbroken_runs(folder)
