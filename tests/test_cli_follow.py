"""``hesscond follow``: a run that another process writes, in a terminal and in a pipe."""

import io
import math
import os
import re
import signal
import subprocess
import sys
import time

import pytest
from rich.console import Console
from rich.live import Live

from hesscond.commands.live_view import SweepView, line, rows
from hesscond.runs import RunLog, WatchedRun
from hesscond.study import open_run
from hesscond.study.sweep import Outcome
from tests.runs.run_logs import CONFIG, row, written_run

ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}


def start(*arguments, cwd):
    return subprocess.Popen(
        [sys.executable, "-m", "hesscond", *arguments],
        cwd=cwd,
        env=ENVIRONMENT,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


@pytest.fixture
def processes():
    """Processes to be ended whatever happens."""
    started = []
    yield started
    for process in started:
        if process.poll() is None:
            process.kill()
        process.communicate()


@pytest.mark.slow
def test_a_real_study_is_followed_to_its_end(tmp_path, processes, call_cli, monkeypatch):
    monkeypatch.chdir(tmp_path)
    study = ("study", "fc-digits", "--method", "vanilla", "--method", "bnp", "--iterations", "100", "--out", "out")
    processes.append(start(*study, cwd=tmp_path))
    deadline = time.monotonic() + 300
    while not (tmp_path / "out").is_dir():
        assert processes[0].poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.05)
    followed = call_cli("follow", "out", "--interval", "0.05", "--wait", "10")
    assert (followed.code, followed.err) == (0, "")
    assert processes[0].wait(timeout=60) == 0
    for method in ("vanilla", "bnp"):
        lines = [line for line in followed.out.splitlines() if line.startswith(f"out/{method}-seed0 · ")]
        counts = [int(re.search(r" (\d+)/100 ", line)[1]) for line in lines]
        assert counts == sorted(counts)
        stored = open_run(tmp_path / "out" / f"{method}-seed0")
        loss, accuracy = stored.table("training")["loss"].iloc[-1], stored.table("evaluation")["test_accuracy"].iloc[-1]
        kappa = stored.table("probe").query("data == 'batch'").iloc[-1]
        for part in (
            f" · finished · 100/100 · loss {loss:#.4g} · accuracy {100 * accuracy:.1f} % · ",
            f"fc3.3 κ(H) {kappa['kappa']:.2e} κ own {kappa['kappa_own']:.2e} · took ",
        ):
            assert part in lines[-1]


@pytest.mark.slow
def test_ctrl_c_ends_the_watching_and_not_the_run(tmp_path, processes):
    log = RunLog(tmp_path / "run", CONFIG)
    log.training(0, 0, 1.0)
    log.commit()
    processes.append(start("follow", "run", "--interval", "0.1", cwd=tmp_path))
    line = processes[0].stdout.readline()
    assert line.startswith("run · running · 1/6 · loss 1.000")
    processes[0].send_signal(signal.SIGINT)
    printed, error = processes[0].communicate(timeout=30)
    assert (processes[0].returncode, printed, error) == (130, "", "")
    log.training(1, 0, 0.5)
    log.close("finished")
    assert open_run(tmp_path / "run").iterations == 2


@pytest.mark.parametrize(
    ("status", "code"), [("finished", 0), ("diverged", 1), ("failed", 1), ("interrupted", 1), ("killed", 1)]
)
def test_the_exit_code_says_how_the_runs_ended(tmp_path, call_cli, status, code):
    written_run(tmp_path / "a")
    if status == "killed":
        written_run(tmp_path / "b", killed=True)
    else:
        RunLog(tmp_path / "b", CONFIG).close(status)
    result = call_cli("follow", tmp_path / "a", tmp_path / "b")
    assert (result.code, result.err) == (code, "")
    assert [line.split(" · ")[1] for line in result.out.splitlines()] == ["finished", status]


def terminal():
    """A terminal of 80 columns, and what is written to it."""
    written = io.StringIO()
    return Console(force_terminal=True, file=written, width=80, height=24, color_system=None, _environ={}), written


def shown(written):
    return re.sub(r"\x1b\[[^a-zA-Z]*[a-zA-Z]", "", written.getvalue()).splitlines()


@pytest.fixture
def watched(tmp_path, monkeypatch):
    """A run that goes on, 200 iterations in 100 seconds so far, of 400."""
    clock = [1e9]
    monkeypatch.setattr("hesscond.runs.log.time.monotonic", lambda: clock[0])
    monkeypatch.setattr("hesscond.runs.log.time.time", lambda: clock[0])
    log = RunLog(tmp_path / "run", CONFIG | {"training": {"batch_size": 60, "iterations": 400}})
    for k in range(200):
        clock[0] += 0.5
        log.training(k, 0, math.exp(-k / 50))
        unresolved = 50 <= k < 100
        log.commit(
            probe=[
                row(k, kappa=math.inf if unresolved else 10 ** (3 + k / 40), kappa_own=100.0),
                row(k, unit=5, kappa=1e3, kappa_own=math.inf),
            ]
        )
    log.commit(evaluation=[{"iteration": 200, "epoch": 1, "test_loss": 0.5, "test_accuracy": 0.875}])
    yield WatchedRun(log.folder)
    log.close("finished")


def test_of_a_text_the_bits_are_shown(tmp_path):
    log = RunLog(tmp_path / "run", CONFIG)
    log.commit(
        evaluation=[
            {"iteration": 0, "epoch": 0, "test_loss": 2.0, "test_accuracy": 0.25, "test_bits_per_character": 2.885390}
        ]
    )
    assert " · accuracy 25.0 % · 2.885 bits per character" in line(WatchedRun(log.folder))
    log.close("finished")


def test_each_run_has_a_row_in_the_terminal(watched):
    console, written = terminal()
    console.print(rows([watched] * 8))
    lines = shown(written)
    assert len(lines) == 9
    assert all(len(line) <= 80 for line in lines)
    assert lines[1].split() == ["run", "200/400", "0.0187", "87.5", "%", "9.4e+07", "1.0e+02", "2", "0:01:40", "left"]


def test_a_sweep_shows_the_runs_in_training(watched, tmp_path):
    """Long names give way, numbers do not."""
    name = "centred-weightnorm-b60-lr0.1-momentum0.9-nesterovTrue-seed0"
    (tmp_path / name).symlink_to(watched.run.folder)
    console, written = terminal()
    with Live(console=console, auto_refresh=False) as live:
        view = SweepView(console, [tmp_path / name, tmp_path / "next", tmp_path / "bad"], 12, live)
        view.ended(Outcome("bad", "failed", "the disk is full"))
        lines = shown(written)
    assert all(len(line) <= 80 for line in lines)
    for part in ("[10/12] bad: failed: the disk is full", "10 of 12 runs over, 1 not finished · ", "1 more to do"):
        assert any(part in line for line in lines)
    row = next(line for line in lines if line.startswith("centred-"))
    assert re.fullmatch(r"centred-weightnorm\S*… +200/400 +0\.0187 .* 9\.4e\+07 +1\.0e\+02 +2 +0:01:40 left *", row)


def test_what_comes_is_taken_once(tmp_path):
    log = RunLog(tmp_path / "run", CONFIG)
    watched = WatchedRun(log.folder)
    assert (watched.iterations, watched.units, watched.over) == (0, {}, False)
    for k in range(3):
        log.training(k, 0, float(k))
        log.commit(probe=[row(k, kappa=float(k + 1), kappa_own=1.0)])
        watched.update()
        watched.update()
    log.close("failed")
    watched.update()
    assert watched.losses == [0, 1, 2]
    assert watched.units["fc2", 3].kappa == [1, 2, 3]
    assert watched.over
