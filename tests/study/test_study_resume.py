"""Runs that are broken off and gone on with: the same weights and the same log as without the break, bit for bit."""

import os
import random
import resource
import signal
import sqlite3
import subprocess
import sys
import time
from contextlib import closing, contextmanager, suppress
from dataclasses import replace

import pandas as pd
import pytest
import torch

from hesscond.errors import ConfigError, RunError
from hesscond.runs import Checkpoints
from hesscond.study import RunPlan, StudyConfig, load_study, open_run, run
from tests.runs.run_logs import broken_off, same_runs

ITERATIONS = 60


def plan_for(folder, method="vanilla", *, seed=0, iterations=ITERATIONS, seconds=0.0, statements=(), **others):
    """Two epochs and a half; a checkpoint after every iteration."""
    study = load_study("fc-digits")
    training = dict(study.training) | {"iterations": iterations, "epochs": None, "checkpoint_seconds": seconds}
    sections = {
        "model": dict(study.model) | {"hidden": [12, 10]},
        "training": training | {"momentum": 0.0 if "adam" in method else 0.9},
        "probe": dict(study.probe) | {"every": 3, "train_every_epochs": 1},
        "statements": [{"id": id} for id in statements],
    } | others
    study = StudyConfig.model_validate(dict(study) | sections)
    return RunPlan(study, method, seed, 0.01, folder, torch.device("cpu"))


@pytest.mark.share(4)
@pytest.mark.parametrize("method", ["vanilla", "bnp"])
@pytest.mark.parametrize("breaks", [(1,), (22, 23, 24), (46, 59), (60,)])
def test_it_comes_to_the_same_as_without_the_break(tmp_path, digits, method, breaks):
    run(plan_for(tmp_path / "whole", method), digits)
    plan = plan_for(tmp_path / "broken", method)
    for number, at in enumerate(breaks):
        broken_off(plan, digits, at, how=ZeroDivisionError if number % 2 else KeyboardInterrupt, resume=number > 0)
        assert open_run(plan.folder).status == ("failed" if number % 2 else "interrupted")
    run(plan, digits, resume=True)
    assert open_run(plan.folder).status == "finished"
    same_runs(tmp_path / "whole", plan.folder)


def test_without_any_checkpoint_it_starts_again(tmp_path, digits):
    run(plan_for(tmp_path / "whole"), digits)
    plan = plan_for(tmp_path / "broken", seconds=1e6)
    broken_off(plan, digits, 30)
    assert not list((plan.folder / "checkpoints").glob("*.pt"))
    run(plan, digits, resume=True)
    same_runs(tmp_path / "whole", plan.folder)


def test_a_damaged_checkpoint_is_told_and_the_one_before_it_taken(tmp_path, digits, caplog):
    run(plan_for(tmp_path / "whole"), digits)
    plan = plan_for(tmp_path / "broken")
    broken_off(plan, digits, 30)
    _, newest = sorted((plan.folder / "checkpoints").glob("*.pt"))
    content = newest.read_bytes()
    newest.write_bytes(content[: len(content) // 2])
    run(plan, digits, resume=True)
    assert f"{newest.name} is damaged" in caplog.text
    same_runs(tmp_path / "whole", plan.folder)


def test_no_checkpoint_before_the_first_is_promised(tmp_path, caplog):
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(3, {"iteration": 3})
        checkpoints.files()[0].write_bytes(b"")
        with pytest.raises(RunError, match="all checkpoints"):
            checkpoints.latest(torch.device("cpu"))
    assert not caplog.text


@pytest.mark.parametrize("damage", ["truncated", "a bit", "empty", "another file"])
def test_damage_of_every_kind_is_found(tmp_path, damage):
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(3, {"iteration": 3, "x": torch.arange(1000.0)})
        (path,) = checkpoints.files()
        content = bytearray(path.read_bytes())
        if damage == "a bit":
            content[len(content) // 2] ^= 1
        changed = {"truncated": content[:-1], "empty": b"", "another file": b"PK" + content}.get(damage, content)
        path.write_bytes(changed)
        with pytest.raises(RunError, match="damaged"):
            checkpoints.latest(torch.device("cpu"))


def test_the_newest_and_the_one_before_are_kept(tmp_path):
    with Checkpoints(tmp_path) as checkpoints:
        assert checkpoints.latest(torch.device("cpu")) is None
        for iteration in (1, 2, 10, 11):
            checkpoints.save(iteration, {"iteration": iteration})
        assert [path.name for path in checkpoints.files()] == ["000000010.pt", "000000011.pt"]
        assert checkpoints.latest(torch.device("cpu"))["iteration"] == 11
        assert not list(checkpoints.folder.glob("*.partial"))


def test_a_run_that_is_over_is_left_as_it_is(tmp_path, digits):
    plan = plan_for(tmp_path / "run", iterations=3)
    run(plan, digits)
    before = {path: path.stat().st_mtime_ns for path in plan.folder.rglob("*") if path.name != "lock"}
    run(plan, digits, resume=True)
    after = {path: path.stat().st_mtime_ns for path in plan.folder.rglob("*") if path.name != "lock"}
    assert after == before


def test_another_configuration_is_refused(tmp_path, digits):
    plan = plan_for(tmp_path / "run", iterations=3)
    run(plan, digits)
    with pytest.raises(ConfigError, match=r"another configuration \(run.learning_rate: [\d.]+ there, 0.5 here\)"):
        run(replace(plan, learning_rate=0.5), digits, resume=True)
    with pytest.raises(ConfigError, match=r"training.iterations: 3 there, 2 here\), and can only be made longer"):
        run(plan_for(plan.folder, iterations=2), digits, resume=True)
    by_epochs = plan.study.model_copy(update={"training": plan.study.training.model_copy(update={"epochs": 5})})
    with pytest.raises(ConfigError, match=r"training.epochs: not given there, 5 here"):
        run(replace(plan, study=by_epochs), digits, resume=True)


@pytest.mark.share(2)
@pytest.mark.parametrize("first", [23, 30])
def test_a_run_that_is_made_longer_is_the_run_of_that_length(tmp_path, digits, first):
    """After one epoch of 23 iterations, and within the next."""
    short, whole = (plan_for(tmp_path / name, "bnp", iterations=n) for name, n in (("a", first), ("b", 40)))
    run(short, digits)
    longer = plan_for(short.folder, "bnp", iterations=40)
    run(longer, digits, resume=True)
    run(whole, digits)
    one, other = open_run(short.folder), open_run(whole.folder)
    assert one.config["training"] == other.config["training"]
    for table in ("training", "evaluation", "probe"):
        pd.testing.assert_frame_equal(one.table(table), other.table(table))
    with pytest.raises(ConfigError, match="only be made longer"):
        run(short, digits, resume=True)


def test_a_schedule_until_the_end_cannot_be_made_longer(tmp_path, digits):
    plans = [plan_for(tmp_path / "run", iterations=n, schedule={"kind": "cosine"}) for n in (3, 5)]
    run(plans[0], digits)
    with pytest.raises(ConfigError, match="whose learning rates depend on it"):
        run(plans[1], digits, resume=True)


def test_a_start_that_came_to_nothing_is_no_obstacle(tmp_path, digits):
    plan = plan_for(tmp_path / "run", iterations=3)
    plan.folder.mkdir()
    (plan.folder / "config.toml.partial").write_text("half a fi")
    run(plan, digits, resume=True)
    assert open_run(plan.folder).status == "finished"


@contextmanager
def another_process_on(folder):
    """It has the lock of the run, as one has that begins it or goes on with it."""
    code = (
        "from pathlib import Path\nfrom hesscond.runs import Checkpoints\n"
        f"owner = Checkpoints(Path({str(folder)!r}))\nprint('in', flush=True)\ninput()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        try:
            assert other.stdout.readline() == "in\n"
            yield
        finally:
            other.communicate("\n")


def test_a_second_process_is_refused(tmp_path, digits):
    plan = plan_for(tmp_path / "run")
    broken_off(plan, digits, 10)
    with another_process_on(plan.folder), pytest.raises(RunError, match="another process works on"):
        run(plan, digits, resume=True)
    run(plan, digits, resume=True)
    assert open_run(plan.folder).status == "finished"


@pytest.mark.parametrize("resume", [False, True])
def test_of_two_that_begin_a_run_at_once_the_second_is_refused(tmp_path, digits, resume):
    plan = plan_for(tmp_path / "run", iterations=3)
    with another_process_on(plan.folder):
        # what the first writes before its log is there
        (plan.folder / "config.toml.partial").write_text("half a fi")
        with pytest.raises(RunError if resume else ConfigError, match=r"another process works on|not empty"):
            run(plan, digits, resume=resume)
        assert (plan.folder / "config.toml.partial").read_text() == "half a fi"
        (plan.folder / "config.toml.partial").unlink()
        with pytest.raises(RunError, match="another process works on"):
            run(plan, digits, resume=resume)
        assert [path.name for path in plan.folder.iterdir()] == ["checkpoints"]
    # one that was killed before its log was there is no obstacle
    run(plan, digits, resume=resume)
    assert open_run(plan.folder).status == "finished"


def test_a_full_disk_is_said_and_nothing_is_lost(tmp_path):
    """No file may grow beyond 8 kB: the checkpoint of this state cannot be written."""
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, {"iteration": 1})
        before, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (8192, hard))
        try:
            with pytest.raises(RunError, match=r"000000002.pt cannot be written"):
                checkpoints.save(2, {"iteration": 2, "x": torch.zeros(10**5)})
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (before, hard))
            signal.signal(signal.SIGXFSZ, handler)
        assert checkpoints.latest(torch.device("cpu"))["iteration"] == 1
        assert not list(checkpoints.folder.glob("*.partial"))


@pytest.mark.slow
def test_resume_on_the_command_line(tmp_path, digits, call_cli, monkeypatch):
    monkeypatch.chdir(tmp_path)
    arguments = ("fc-digits", "-m", "bnp", "-m", "vanilla", "--iterations", "5", "--probe-every", "2")
    whole = call_cli("study", *arguments, "--out", "whole")
    assert (whole.code, whole.err) == (0, "")
    again = call_cli("study", *arguments, "--out", "whole", "--resume")
    assert (again.code, again.err) == (0, "")
    assert again.out.splitlines()[:5] == whole.out.splitlines()[:5]
    other = call_cli("study", *arguments, "--lr", "0.3", "--out", "whole", "--resume")
    assert other.code == 2
    assert "another configuration" in other.err
    nowhere = call_cli("study", *arguments, "--resume")
    assert (nowhere.code, nowhere.out) == (2, "")
    assert "--out" in nowhere.err
    own = call_cli("study", "whole/bnp-seed0/config.toml", "--resume")
    assert (own.code, own.err) == (0, "")


def killed_and_resumed(folder, study, rng, kills):
    """``hesscond study`` killed at random moments, until it is through."""
    command = [sys.executable, "-m", "hesscond", "study", str(study), "--out", str(folder), "--resume"]
    command += ["--method", "bnp", "--method", "vanilla"]
    options = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE, "text": True}
    done = 0
    while True:
        with subprocess.Popen(command, env=os.environ | {"OMP_NUM_THREADS": "1"}, **options) as process:
            if done < kills:
                log = folder / rng.choice(["bnp-seed0", "vanilla-seed0"]) / "run.sqlite"
                deadline = time.monotonic() + 20
                while process.poll() is None and not log.exists() and time.monotonic() < deadline:
                    time.sleep(0.01)
                time.sleep(rng.uniform(0, 0.6))
                process.send_signal(rng.choice([signal.SIGKILL, signal.SIGKILL, signal.SIGTERM]))
            _, error = process.communicate(timeout=300)
        if process.returncode >= 0:  # it came to its end
            assert process.returncode == 0, error
            return done
        done += 1
        for path in folder.rglob("run.sqlite"):
            with suppress(sqlite3.OperationalError), closing(sqlite3.connect(path)) as connection:
                assert connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)


@pytest.mark.share(4)
@pytest.mark.slow
@pytest.mark.parametrize("number", range(4))
def test_kills_at_random_moments(tmp_path, number):
    """Four studies of two runs, killed up to 14 times each; a fast machine may be through before."""
    text = (
        f'name = "killed"\ndescription = "-"\n[data]\nname = "digits"\n[model]\nhidden = [{[12, 30][number % 2]}]\n'
        f"[training]\nbatch_size = {[60, 7][number // 2]}\niterations = {[3000, 6000][number // 2]}\n"
        "checkpoint_seconds = 0.05\nmomentum = 0.5\n"
        "[[learning_rates]]\nbatch_size = 60\nrate = { vanilla = 0.1, bnp = 0.1 }\n"
        "[[learning_rates]]\nbatch_size = 7\nrate = { vanilla = 0.01, bnp = 0.01 }\n"
        '[probe]\nlayers = ["fc2"]\nunits = [3]\nevery = 2\ntrain_every_epochs = 7\n'
    )
    study = tmp_path / "killed.toml"
    study.write_text(text)
    unbroken = [sys.executable, "-m", "hesscond", "study", str(study), "--out", str(tmp_path / "whole")]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    subprocess.run([*unbroken, "-m", "bnp", "-m", "vanilla"], check=True, capture_output=True, env=environment)
    done = killed_and_resumed(tmp_path / "broken", study, random.Random(number), kills=14)
    assert done >= 5
    for name in ("bnp-seed0", "vanilla-seed0"):
        same_runs(tmp_path / "whole" / name, tmp_path / "broken" / name)
