"""Logs of every version of the schema: read without a change, gone on with as one of the present."""

import math
import shutil
import sqlite3
from contextlib import closing

import pytest
from study.past_logs import CONFIG, VERSIONS, past_run, row, written_run

from hesscond.errors import ConfigError, RunError
from hesscond.study import find_runs, open_run
from hesscond.study.reading import reading
from hesscond.study.schema import MIGRATIONS, SCHEMA_VERSION, TABLES, create
from hesscond.study.store import RunLog, can_be_resumed

PAST = range(1, SCHEMA_VERSION)


def schema(connection):
    """Tables with their columns, types and keys; unique indices with theirs."""
    found = {}
    for kind, name, table in connection.execute("SELECT type, name, tbl_name FROM sqlite_master").fetchall():
        if kind == "table":
            found[name] = connection.execute(f"PRAGMA table_xinfo({name})").fetchall()
        elif not name.startswith("sqlite_"):
            found[name] = (table, [column[2] for column in connection.execute(f"PRAGMA index_info({name})")])
    return found | {p: connection.execute(f"PRAGMA {p}").fetchone()[0] for p in ("application_id", "user_version")}


def made(script):
    connection = sqlite3.connect(":memory:", isolation_level=None)
    script(connection) if callable(script) else connection.executescript(script)
    return schema(connection)


def content(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


def test_a_change_of_the_tables_is_a_new_version():
    """If this fails: raise SCHEMA_VERSION, add a step to MIGRATIONS and the new version to past_logs.py."""
    assert max(VERSIONS) == SCHEMA_VERSION
    assert made(create) == made(VERSIONS[SCHEMA_VERSION])
    assert sorted(MIGRATIONS) == list(PAST)


@pytest.mark.parametrize("version", VERSIONS)
def test_a_run_of_any_version_reads_the_same_and_stays_as_it_is(tmp_path, version):
    folder = past_run(tmp_path / "run", version)
    before = content(folder)
    stored = open_run(folder)
    assert (stored.label, stored.status, stored.iterations, stored.total) == ("bnp-seed4", "interrupted", 6, 6)
    assert stored.last_loss == 1 / 6
    assert stored.seconds == 100
    assert stored.table("training")["loss"].tolist() == [1 / (k + 1) for k in range(6)]
    assert stored.table("probe")["kappa"].tolist() == [10.0**k for k in range(6)]
    assert stored.table("evaluation")["test_accuracy"].tolist() == [0.25]
    for name, columns in TABLES.items():
        assert list(stored.table(name).columns) == list(columns)
    with reading(folder) as connection:
        assert schema(connection) == made(create)
        with pytest.raises(sqlite3.OperationalError, match="readonly"):
            connection.execute("DELETE FROM training")
    assert content(folder) == before


@pytest.mark.parametrize("version", VERSIONS)
def test_a_run_of_any_version_goes_on_as_one_of_the_present(tmp_path, version):
    folder = past_run(tmp_path / "run", version)
    assert can_be_resumed(folder, CONFIG)
    log = RunLog.reopened(folder)
    for k in range(4, 8):
        log.training(k, 0, 1 / (k + 1))
        log.commit(
            probe=[row(k, kappa=10.0**k, resolved=1, solver="exact")], readings=[row(k, kappa=1.0, coordinates="x")]
        )
    log.close("finished")
    with closing(sqlite3.connect(folder / "run.sqlite")) as connection:
        assert schema(connection) == made(create)
        assert connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)
    stored = open_run(folder)
    assert (stored.status, stored.iterations, stored.facts["started"]) == ("finished", 8, "2026-01-31T10:00:00+0100")
    assert stored.table("probe")["kappa"].tolist() == [10.0**k for k in range(8)]
    assert len(stored.table("readings")) == 4


def test_version_1_could_hold_a_row_twice(tmp_path):
    folder = past_run(tmp_path / "run", 1)
    with closing(sqlite3.connect(folder / "run.sqlite", isolation_level=None)) as connection:
        connection.execute("INSERT INTO probe SELECT * FROM probe WHERE iteration = 3")
    assert open_run(folder).table("probe")["iteration"].tolist() == list(range(6))
    RunLog.reopened(folder).close("finished")
    assert open_run(folder).table("probe")["iteration"].tolist() == list(range(6))


@pytest.mark.parametrize("version", PAST)
def test_a_kill_during_the_migration_leaves_the_old_log(tmp_path, version, monkeypatch):
    folder = past_run(tmp_path / "run", version)
    steps = {**MIGRATIONS, SCHEMA_VERSION - 1: (*MIGRATIONS[SCHEMA_VERSION - 1], "SELECT no_such_function()")}
    with monkeypatch.context() as patched:
        patched.setattr("hesscond.study.schema.MIGRATIONS", steps)
        with pytest.raises(Exception, match="cannot be written"):
            RunLog.reopened(folder)
    with closing(sqlite3.connect(folder / "run.sqlite")) as connection:
        assert schema(connection) == made(VERSIONS[version])
    RunLog.reopened(folder).close("finished")
    assert open_run(folder).iterations == 6


def test_a_log_of_a_later_version_is_left_alone(tmp_path):
    folder = written_run(tmp_path / "run")
    with closing(sqlite3.connect(folder / "run.sqlite")) as connection:
        connection.execute(f"PRAGMA user_version = {SCHEMA_VERSION + 1}")
    before = content(folder)
    later = rf"run\.sqlite cannot be (read|written): .*version {SCHEMA_VERSION + 1}.*update hesscond"
    for use in (open_run, RunLog.reopened, lambda place: can_be_resumed(place, CONFIG)):
        with pytest.raises(RunError, match=later):
            use(folder)
    assert content(folder) == before


@pytest.mark.parametrize(("pragma", "word"), [("application_id = 7", "another program"), ("user_version = 1", "1")])
def test_databases_that_are_no_logs(tmp_path, pragma, word):
    folder = written_run(tmp_path / "run")
    with closing(sqlite3.connect(folder / "run.sqlite")) as connection:
        connection.execute(f"PRAGMA {pragma}")
    with pytest.raises(RunError, match=word):
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


def test_a_killed_run_on_a_medium_that_takes_nothing(tmp_path, monkeypatch):
    folder = killed(tmp_path / "run")
    (folder / "run.sqlite-shm").unlink()
    before = content(folder)
    monkeypatch.setattr("hesscond.study.reading.os.access", lambda path, mode: False)
    stored = open_run(folder)
    assert (stored.status, stored.iterations, len(stored.table("readings"))) == ("killed", 20, 20)
    assert content(folder) == before


def test_a_log_copied_without_its_companions_begins_none(tmp_path):
    """Its header still asks for a write-ahead log, which SQLite would make to read it."""
    folder = past_run(tmp_path / "run", 3, journal="WAL")
    assert (folder / "run.sqlite").read_bytes()[18:20] == b"\x02\x02"
    before = content(folder)
    assert open_run(folder).iterations == 6
    assert content(folder) == before


def test_a_copy_is_of_one_moment(tmp_path, monkeypatch):
    """The writer's checkpoint between the copies of the two files: the copies are made again."""
    folder = killed(tmp_path / "run")
    (folder / "run.sqlite-shm").unlink()
    copyfile, copied = shutil.copyfile, []

    def copy(source, target):
        copied.append(source.name)
        result = copyfile(source, target)
        if len(copied) == 1:
            with closing(sqlite3.connect(folder / "run.sqlite", isolation_level=None)) as connection:
                connection.execute("INSERT INTO training (iteration, epoch, loss) VALUES (20, 0, 0.5)")
        return result

    monkeypatch.setattr("hesscond.study.reading.os.access", lambda path, mode: False)
    monkeypatch.setattr("hesscond.study.reading.shutil.copyfile", copy)
    assert open_run(folder).iterations == 21
    assert copied.count("run.sqlite") == 2


def test_a_run_on_another_machine(tmp_path, monkeypatch):
    log = RunLog(tmp_path / "run", CONFIG)
    log.mark(host="another", pid=1)
    log.training(0, 0, 1.0)
    log.commit()
    assert open_run(log.folder).status == "running"
    (then,) = log._connection.execute("SELECT MAX(time) FROM clock").fetchone()
    monkeypatch.setattr("hesscond.study.stored.time.time", lambda: then + 3600)
    assert open_run(log.folder).status == "silent"
    log.close("finished")
    assert open_run(log.folder).status == "finished"


def test_the_clock_leaves_breaks_out(tmp_path, monkeypatch):
    clock = [1000.0]
    monkeypatch.setattr("hesscond.study.log.time.monotonic", lambda: clock[0])
    monkeypatch.setattr("hesscond.study.log.time.time", lambda: clock[0])

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
    iterations = stored.rows("clock")[1]["iterations"]
    assert iterations == sorted(iterations)
    assert iterations[-1] == stored.iterations == 15


def test_how_many_iterations_there_will_be(tmp_path):
    config = CONFIG | {"training": {"batch_size": 60, "epochs": 4}}
    log = RunLog(tmp_path / "run", config)
    log.commit(evaluation=[{"iteration": 0, "epoch": 0, "test_loss": 1.0}])
    assert open_run(log.folder).total is None
    assert math.isnan(open_run(log.folder).last_loss)
    log.commit(evaluation=[{"iteration": 23, "epoch": 1, "test_loss": 1.0}])
    assert open_run(log.folder).total == 92
    assert open_run(log.folder).table("evaluation")["test_accuracy"].isna().all()
    # a log of the present version says it from the start
    log.mark(total=96)
    assert open_run(log.folder).total == 96
    log.close("finished")


@pytest.mark.parametrize("version", PAST)
def test_what_earlier_versions_did_not_log_is_missing(tmp_path, version):
    stored = open_run(past_run(tmp_path / "run", version))
    assert stored.table("training")["lr"].isna().all()
    assert stored.table("probe")[["kappa_bnp_lower", "kappa_bnp_upper"]].isna().all(axis=None)


def test_a_start_that_was_killed_is_begun_again(tmp_path, monkeypatch):
    folder = tmp_path / "run"

    def die(connection):
        raise SystemExit(9)

    with monkeypatch.context() as patched:
        patched.setattr("hesscond.study.log.create", die)
        with pytest.raises(SystemExit):
            RunLog(folder, CONFIG)
    assert not (folder / "run.sqlite").exists()
    assert any(folder.iterdir())
    assert list(find_runs(folder)) == []
    assert not can_be_resumed(folder, CONFIG)
    with pytest.raises(ConfigError, match="not empty"):
        RunLog(folder, CONFIG)
    RunLog(folder, CONFIG, begun=True).close("finished")
    assert open_run(folder).label == "bnp-seed4"
    assert sorted(path.name for path in folder.iterdir()) == ["config.toml", "run.sqlite"]
