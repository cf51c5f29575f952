"""The log of a run: what is in it after interruptions, and what is said of a damaged one."""

import math
import os
import random
import sqlite3
import subprocess
import sys

import pytest
import tomli_w

from hesscond.errors import ConfigError, HesscondError, RunError
from hesscond.runs import TABLES, RunLog, check_free
from hesscond.study import find_runs, open_run

CONFIG = {
    "name": "made-up",
    "description": "for the tests",
    "data": {"name": "digits"},
    "model": {"hidden": [8]},
    "training": {"batch_size": 60, "iterations": 3},
    "probe": {"layers": ["fc2"], "units": [3]},
    "run": {"method": "bnp", "seed": 4, "learning_rate": 0.1},
}


def row(iteration, **others):
    return {"iteration": iteration, "epoch": 0, "data": "batch", "layer": "fc2", "unit": 3} | others


@pytest.fixture
def log(tmp_path):
    log = RunLog(tmp_path / "run", CONFIG)
    yield log
    log._connection.close()


@pytest.fixture
def finished(log):
    for iteration in range(20):
        log.training(iteration, 0, 1 / (iteration + 1))
        log.commit(probe=[row(iteration, kappa=10.0**iteration, resolved=1)])
    log.commit(evaluation=[{"iteration": 0, "epoch": 0, "test_loss": 1.0, "test_accuracy": 0.5}])
    log.close("finished")
    return log.folder


def test_what_is_written_is_read(finished):
    stored = open_run(finished)
    assert (stored.method, stored.seed, stored.label, stored.status) == ("bnp", 4, "bnp-seed4", "finished")
    assert stored.iterations == 20
    assert stored.config == CONFIG
    assert stored.table("probe")["kappa"].tolist() == [10.0**k for k in range(20)]
    assert stored.table("probe")["resolved"].tolist() == [True] * 20
    assert stored.table("evaluation")["test_accuracy"].tolist() == [0.5]
    assert sorted(p.name for p in finished.iterdir()) == ["config.toml", "run.sqlite"]
    with pytest.raises(ConfigError, match=r"'weights'.*training, evaluation, probe"):
        stored.table("weights")


def test_infinite_and_missing_numbers(log):
    log.commit(probe=[row(0, kappa=math.inf, kappa_lower=1e18, resolved=0), row(1)])
    table = open_run(log.folder).table("probe")
    assert table["kappa"][0] == math.inf
    assert table["kappa_lower"][0] == 1e18
    assert math.isnan(table["kappa"][1])
    assert table["resolved"].isna().tolist() == [False, True]
    assert not table["resolved"][0]


def test_rows_between_probes_are_committed_within_a_second(log, monkeypatch):
    clock = [100.0]
    monkeypatch.setattr("hesscond.runs.log.time.monotonic", lambda: clock[0])
    log.commit()
    for iteration in range(3):
        log.training(iteration, 0, 1.0)
    assert open_run(log.folder).iterations == 0
    clock[0] += 1.1
    log.training(3, 0, 1.0)
    assert open_run(log.folder).iterations == 4


def test_a_probed_iteration_is_one_transaction(log):
    log.training(0, 0, 1.0)
    with pytest.raises(RunError, match="cannot be written"):
        log.commit(probe=[row(0), row(1) | {"kappa": object()}])
    stored = open_run(log.folder)
    assert (stored.iterations, len(stored.table("probe"))) == (0, 0)
    log.close("failed")
    assert open_run(log.folder).iterations == 1


class Rows(list):
    """Rows that a Ctrl-C interrupts, after the first."""

    def __iter__(self):
        yield self[0]
        raise KeyboardInterrupt


def test_interrupted_inside_a_transaction(log, monkeypatch):
    log.training(0, 0, 1.0)
    log.commit(probe=[row(0)])
    log.training(1, 0, 1.0)
    log._pending = Rows([*log._pending, (2, 0, 1.0, None)])
    with pytest.raises(KeyboardInterrupt):
        log.commit(probe=[row(1)])
    log._pending = list.copy(log._pending)
    log.close("interrupted")
    stored = open_run(log.folder)
    assert stored.status == "interrupted"
    assert stored.table("training")["iteration"].tolist() == [0, 1, 2]
    assert stored.table("probe")["iteration"].tolist() == [0]


def test_interrupted_between_the_commit_and_its_bookkeeping(log):
    class Pending(list):
        def clear(self):
            raise KeyboardInterrupt

    log._pending = Pending([(0, 0, 1.0, None), (1, 0, 2.0, None)])
    with pytest.raises(KeyboardInterrupt):
        log.commit(probe=[row(1)])
    log._pending = list(log._pending)
    log.close("interrupted")
    stored = open_run(log.folder)
    assert stored.table("training")["loss"].tolist() == [1.0, 2.0]
    assert stored.table("probe")["iteration"].tolist() == [1]


def test_somebody_reads_while_the_run_ends(log):
    log.training(0, 0, 1.0)
    log.commit()
    reader = sqlite3.connect(log.folder / "run.sqlite")
    assert reader.execute("SELECT COUNT(*) FROM training").fetchone() == (1,)
    log.training(1, 0, 1.0)
    log.close("finished")
    reader.close()
    assert (open_run(log.folder).status, open_run(log.folder).iterations) == ("finished", 2)


def test_a_disk_that_is_full(log):
    pages = log._connection.execute("PRAGMA page_count").fetchone()[0]
    log._connection.execute(f"PRAGMA max_page_count = {pages}")

    def fill():
        for iteration in range(1000):
            log.training(iteration, 0, 1.0)
            log.commit(probe=[row(iteration, solver=1000 * "x")])

    with pytest.raises(RunError, match=r"run\.sqlite cannot be written: .*full"):
        fill()
    stored = open_run(log.folder)
    assert stored.iterations == len(stored.table("probe")) > 0


def test_a_run_in_progress_and_a_killed_one(log):
    assert open_run(log.folder).status == "running"
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    for pid in (gone.pid, "", "x", -1, 0, 10**30):
        log.mark(pid=pid)
        assert open_run(log.folder).status == "killed"
    log.mark(pid=os.getppid())
    assert open_run(log.folder).status == "running"


def test_folders_that_are_taken(tmp_path, finished):
    (tmp_path / "file").write_text("x")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "notes.txt").write_text("x")
    for folder, word in ((finished, "holds a run"), (tmp_path / "file", "file"), (tmp_path / "full", "not empty")):
        with pytest.raises(ConfigError, match=word):
            check_free(folder)
    with pytest.raises(ConfigError, match="cannot be written: Not a directory"):
        RunLog(tmp_path / "file" / "below", CONFIG)
    (tmp_path / "empty").mkdir()
    check_free(tmp_path / "empty")
    check_free(tmp_path / "new")


def test_runs_are_found_below_a_folder(tmp_path, finished):
    RunLog(tmp_path / "a" / "b", CONFIG).close("finished")
    assert [r.folder for r in find_runs(tmp_path)] == [tmp_path / "a" / "b", finished]
    assert [r.folder for r in find_runs(finished)] == [finished]
    with pytest.raises(RunError, match="no folder"):
        find_runs(tmp_path / "absent")
    with pytest.raises(RunError, match="not a run folder"):
        open_run(tmp_path / "a")


SECTIONS = ["data", "model", "training", "probe", "run"]


@pytest.mark.parametrize(("key", "value"), [("name", ""), *((s, v) for s in SECTIONS for v in ("", "3", "'x'"))])
def test_a_config_that_lacks_what_reports_need(finished, key, value):
    rest = {k: v for k, v in CONFIG.items() if k != key}
    start = f"{key} = {value}\n" if value else ""
    (finished / "config.toml").write_text(start + tomli_w.dumps(rest))
    with pytest.raises(RunError, match=r"config\.toml is damaged"):
        open_run(finished)


@pytest.mark.parametrize("content", [b"", b"\xff\xff", b"name = [", b"a = " + 3000 * b"["])
def test_a_config_that_is_no_toml(finished, content):
    (finished / "config.toml").write_bytes(content)
    with pytest.raises(RunError, match=r"config\.toml is damaged"):
        open_run(finished)


def everything(folder):
    stored = open_run(folder)
    return stored.status, stored.iterations, [stored.table(name) for name in TABLES]


def damaged_logs():
    rng = random.Random(0)

    def cut(content):
        return content[: rng.randrange(len(content))]

    def overwritten(content):
        start = rng.randrange(len(content))
        return content[:start] + rng.randbytes(300) + content[start + 300 :]

    def flipped(content):
        array = bytearray(content)
        for _ in range(50):
            array[rng.randrange(len(array))] = rng.randrange(256)
        return bytes(array)

    return [damage for damage in (cut, overwritten, flipped) for _ in range(15)]


def test_a_damaged_log_is_an_error_of_ours_or_readable(finished):
    log = finished / "run.sqlite"
    content, sentences = log.read_bytes(), []
    for damage in damaged_logs():
        log.write_bytes(damage(content))
        try:
            everything(finished)
        except HesscondError as error:
            sentences.append(str(error))
    assert len(sentences) > 10
    assert all(str(log) in sentence for sentence in sentences)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", ""),
        (b"no database at all", "it is no SQLite database"),
        (bytes(4096), ""),
        (bytes(4097), "it is no SQLite"),
    ],
)
def test_a_log_that_is_no_log(finished, content, words):
    (finished / "run.sqlite").write_bytes(content)
    with pytest.raises(RunError, match=rf"run\.sqlite cannot be read: .*{words}"):
        everything(finished)


def test_a_log_that_was_cut_off_is_said_to_be(finished):
    path = finished / "run.sqlite"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(RunError, match=r"run\.sqlite cannot be read: it was cut off"):
        everything(finished)


def test_a_folder_of_runs_is_not_free_and_said_to_be_one(finished):
    with pytest.raises(ConfigError, match=rf"is a folder of runs \({finished.name}\): give another --out"):
        check_free(finished.parent)


@pytest.mark.parametrize(
    "statement",
    ["UPDATE probe SET kappa = 'many'", "UPDATE probe SET resolved = 'maybe'", "ALTER TABLE probe DROP COLUMN kappa"],
)
def test_a_log_with_other_contents(finished, statement):
    with sqlite3.connect(finished / "run.sqlite") as connection:
        connection.execute(statement)
    connection.close()
    with pytest.raises(RunError, match=r"run\.sqlite"):
        open_run(finished).table("probe")
