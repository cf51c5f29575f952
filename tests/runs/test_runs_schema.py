"""The schema of logs, and reading them without a change; logs of other versions are refused."""

import math
import sqlite3
from contextlib import closing

import pytest

from hesscond.errors import ConfigError, RunError
from hesscond.runs import TABLES, RunLog, can_be_resumed, reading
from hesscond.runs.store import SCHEMA_VERSION
from hesscond.study import find_runs, open_run
from tests.runs.run_logs import CONFIG, row, written_run


def content(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


def test_reading_changes_nothing(tmp_path):
    folder = written_run(tmp_path / "run", iterations=6)
    before = content(folder)
    stored = open_run(folder)
    assert (stored.label, stored.status, stored.iterations, stored.last_loss) == ("bnp-seed4", "finished", 6, 1 / 6)
    for name, columns in TABLES.items():
        assert list(stored.table(name).columns) == list(columns)
    with reading(folder) as connection, pytest.raises(sqlite3.OperationalError, match="readonly"):
        connection.execute("DELETE FROM training")
    assert content(folder) == before


def test_a_run_goes_on_where_it_was_broken_off(tmp_path):
    """Rows that are there already are not written again."""
    folder = written_run(tmp_path / "run", iterations=6)
    assert can_be_resumed(folder, CONFIG) == "same"
    log = RunLog.reopened(folder)
    for k in range(4, 8):
        log.training(k, 0, 1 / (k + 1))
        log.commit(probe=[row(k, kappa=10.0**k, resolved=1)], readings=[row(k, kappa=1.0, coordinates="x")])
    log.close("finished")
    stored = open_run(folder)
    assert (stored.status, stored.iterations) == ("finished", 8)
    assert stored.table("probe")["kappa"].tolist() == [10.0**k for k in range(8)]
    assert len(stored.table("readings")) == 6 + 4


@pytest.mark.parametrize("version", [0, SCHEMA_VERSION - 1, SCHEMA_VERSION + 1])
def test_a_log_of_another_version_is_left_alone(tmp_path, version):
    """Its columns mean something else: one sentence says so, to whoever reads it or goes on with it."""
    folder = written_run(tmp_path / "run")
    with closing(sqlite3.connect(folder / "run.sqlite")) as connection:
        connection.execute(f"PRAGMA user_version = {version}")
    before = content(folder)
    sentence = rf"run\.sqlite cannot be (read|written): its schema version is {version}, .* run the study again"
    for use in (open_run, RunLog.reopened, lambda place: can_be_resumed(place, CONFIG)):
        with pytest.raises(RunError, match=sentence):
            use(folder)
    assert content(folder) == before


def test_a_database_of_another_program_is_no_log(tmp_path):
    folder = written_run(tmp_path / "run")
    with closing(sqlite3.connect(folder / "run.sqlite")) as connection:
        connection.execute("PRAGMA application_id = 7")
    with pytest.raises(RunError, match="no log of hesscond"):
        open_run(folder)


def killed(folder):
    """A run whose process was killed: what it wrote last is in the write-ahead log only."""
    written_run(folder, killed=True)
    assert (folder / "run.sqlite-wal").stat().st_size > 0
    return folder


def test_a_killed_run_is_read_with_its_write_ahead_log_which_stays(tmp_path):
    folder = killed(tmp_path / "run")
    before = content(folder)
    stored = open_run(folder)
    assert (stored.status, stored.iterations, len(stored.table("readings"))) == ("killed", 20, 20)
    after = content(folder)
    # SQLite's index of the write-ahead log is no part of what is stored: it is made again by whoever reads
    assert sorted(after) == sorted(before)
    for name in ("config.toml", "run.sqlite", "run.sqlite-wal"):
        assert after[name] == before[name]


def test_a_log_copied_without_its_companions_begins_none(tmp_path):
    """Its header still asks for a write-ahead log, which SQLite would make to read it."""
    folder = written_run(tmp_path / "run", iterations=6)
    with closing(sqlite3.connect(folder / "run.sqlite")) as connection:
        connection.execute("PRAGMA journal_mode = WAL")
    assert (folder / "run.sqlite").read_bytes()[18:20] == b"\x02\x02"
    before = content(folder)
    assert open_run(folder).iterations == 6
    assert content(folder) == before


def test_a_run_on_another_machine(tmp_path, monkeypatch):
    log = RunLog(tmp_path / "run", CONFIG)
    log.mark(host="another", pid=1)
    log.training(0, 0, 1.0)
    log.commit()
    assert open_run(log.folder).status == "running"
    (then,) = log._connection.execute("SELECT MAX(time) FROM clock").fetchone()
    monkeypatch.setattr("hesscond.runs.store.time.time", lambda: then + 3600)
    assert open_run(log.folder).status == "silent"
    log.close("finished")
    assert open_run(log.folder).status == "finished"


def test_the_clock_leaves_breaks_out(tmp_path, monkeypatch):
    clock = [1000.0]
    monkeypatch.setattr("hesscond.runs.log.time.monotonic", lambda: clock[0])
    monkeypatch.setattr("hesscond.runs.log.time.time", lambda: clock[0])

    def some(log, first):
        for k in range(first, first + 10):
            clock[0] += 2
            log.training(k, 0, 1.0)
            log.commit()
        log.close("interrupted")

    some(RunLog(tmp_path / "run", CONFIG), 0)
    clock[0] += 5000
    some(RunLog.reopened(tmp_path / "run"), 5)
    stored = open_run(tmp_path / "run")
    assert stored.seconds == 2 * 18
    # a session goes on where the one before ended
    assert list(stored.worked.values()) == sorted(stored.worked.values())
    assert max(stored.worked.values()) == stored.seconds
    iterations = stored.rows("clock")["iterations"]
    assert iterations == sorted(iterations)
    assert iterations[-1] == stored.iterations == 15


def test_how_many_iterations_there_will_be(tmp_path):
    config = CONFIG | {"training": {"batch_size": 60, "epochs": 4}}
    log = RunLog(tmp_path / "run", config)
    log.commit(evaluation=[{"iteration": 0, "epoch": 0, "test_loss": 1.0}])
    assert open_run(log.folder).total is None
    assert math.isnan(open_run(log.folder).last_loss)
    log.mark(total=96)
    assert open_run(log.folder).total == 96
    assert open_run(log.folder).table("evaluation")["test_accuracy"].isna().all()
    log.close("finished")


def test_a_start_that_was_killed_is_begun_again(tmp_path, monkeypatch):
    folder = tmp_path / "run"

    def die(connection):
        raise SystemExit(9)

    with monkeypatch.context() as patched:
        patched.setattr("hesscond.runs.log.create", die)
        with pytest.raises(SystemExit):
            RunLog(folder, CONFIG)
    assert not (folder / "run.sqlite").exists()
    assert any(folder.iterdir())
    assert list(find_runs(folder)) == []
    assert can_be_resumed(folder, CONFIG) == "no"
    with pytest.raises(ConfigError, match="not empty"):
        RunLog(folder, CONFIG)
    RunLog(folder, CONFIG, begun=True).close("finished")
    assert open_run(folder).label == "bnp-seed4"
    assert sorted(path.name for path in folder.iterdir()) == ["config.toml", "run.sqlite"]
