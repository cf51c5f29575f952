"""The log of a run: what is in it after interruptions, and what is said of a damaged one."""

import math
import os
import re
import sqlite3
import subprocess
import sys

import pytest

from hesscond.errors import ConfigError, RunError
from hesscond.runs import RunLog, check_free
from hesscond.study import find_runs, open_run
from tests.runs.run_logs import CONFIG, row, written_run


@pytest.fixture
def log(tmp_path):
    log = RunLog(tmp_path / "run", CONFIG)
    yield log
    log._connection.close()


@pytest.fixture
def finished(tmp_path):
    return written_run(tmp_path / "finished")


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


def test_a_run_in_progress_and_a_killed_one(log):
    assert open_run(log.folder).status == "running"
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    for pid in (gone.pid, "", "x", -1, 0, 10**30):
        log.mark(pid=pid)
        assert open_run(log.folder).status == "killed"
    config = log.folder / "config.toml"
    config.write_text(re.sub(r'(\[data\]\nname = )".*"', r'\1"watched"', before := config.read_text()))
    assert before != config.read_text()
    assert open_run(log.folder).status == "killed or not closed"
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


def test_a_folder_of_runs_is_not_free_and_said_to_be_one(finished):
    with pytest.raises(ConfigError, match=rf"is a folder of runs \({finished.name}\): give another --out"):
        check_free(finished.parent)
