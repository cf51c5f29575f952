"""Run folders that are damaged, or made to do harm: one sentence, exit code 2, and nothing happens."""

import copy
import errno
import json
import os
import re
import shutil
import sqlite3
from contextlib import closing
from functools import partial

import pytest
import tomli_w
from hypothesis import HealthCheck, given, settings, strategies as st

from hesscond.errors import HesscondError
from hesscond.report import summary_frame
from hesscond.runs import TABLES, RunLog
from hesscond.study import open_run
from tests.runs.run_logs import CONFIG, written_run

ESCAPE = "\x1b]0;owned\x07\x1b[2J"


@pytest.fixture
def folder(tmp_path):
    """A finished run."""
    return written_run(tmp_path / "run")


def everything(folder):
    """All that is ever read of a run."""
    stored = open_run(folder)
    tables = [stored.table(name) for name in TABLES]
    facts = (stored.status, stored.iterations, stored.total, stored.last_loss, stored.seconds, stored.label)
    summary_frame([stored])
    return tables, facts


def refusal(folder):
    """The sentence with which a run is refused; None if it is read."""
    try:
        everything(folder)
    except HesscondError as error:
        return str(error)
    return None


def check_refused(folder, *words):
    sentence = refusal(folder)
    assert sentence is not None
    assert "\n" not in sentence
    assert not re.search(r"[\x00-\x1f\x7f]", sentence)
    for word in (str(folder), *words):
        assert word in sentence
    return sentence


def change(folder, *statements):
    with closing(sqlite3.connect(folder / "run.sqlite", isolation_level=None)) as connection:
        connection.execute("PRAGMA writable_schema = ON")
        for statement in statements:
            connection.execute(statement)


# --- the log ---------------------------------------------------------------------------------------------------------


def test_a_log_that_was_cut_off(folder):
    path = folder / "run.sqlite"
    content, page = path.read_bytes(), 4096
    # nothing, in the magic, in the header, in the first page, at and around every page, all but the last byte
    lengths = {0, 1, 15, 16, 17, 99, 100, 101, 511, len(content) - 1}
    lengths |= {k * page + d for k in range(1, len(content) // page) for d in (-1, 0, 1)}
    for length in sorted(lengths):
        path.write_bytes(content[:length])
        check_refused(folder, "run.sqlite")
    path.write_bytes(content)
    assert refusal(folder) is None


DAMAGE = st.lists(
    st.tuples(st.floats(0, 1, exclude_max=True), st.binary(min_size=1, max_size=40)), min_size=1, max_size=8
)


@given(damage=DAMAGE)
@settings(max_examples=15, deadline=None, suppress_health_check=list(HealthCheck))
def test_bytes_that_were_changed(tmp_path_factory, damage):
    folder = tmp_path_factory.getbasetemp() / "changed"
    path, whole = folder / "run.sqlite", folder / "whole"
    if not folder.exists():
        written_run(folder)
        shutil.copyfile(path, whole)
    content = bytearray(whole.read_bytes())
    for place, new in damage:
        start = int(place * len(content))
        content[start : start + len(new)] = new[: len(content) - start]
    path.write_bytes(content)
    sentence = refusal(folder)
    assert sentence is None or str(path) in sentence


@pytest.mark.parametrize("table", [*TABLES, "run", "clock"])
def test_a_table_or_a_column_that_is_missing(folder, table):
    with closing(sqlite3.connect(folder / "run.sqlite")) as connection:
        column = connection.execute(f"PRAGMA table_info({table})").fetchall()[-1][1]
    indices = [f"DROP INDEX IF EXISTS one_{table}"]
    change(folder, *indices, f"ALTER TABLE {table} RENAME COLUMN {column} TO other")
    check_refused(folder, f"no such column: {column}")
    change(folder, f"DROP TABLE {table}")
    check_refused(folder, f"no table {table}")


# --- the folder ------------------------------------------------------------------------------------------------------


def test_a_link_to_a_run_is_the_run(folder):
    link = folder.parent / "link"
    link.symlink_to(folder)
    assert open_run(link).iterations == 20


def test_a_file_that_nobody_may_write(folder, monkeypatch):
    """As root, to whom permissions are nothing, SQLite is told so."""
    connect = sqlite3.connect
    monkeypatch.setattr(
        "hesscond.runs.log.sqlite3.connect", lambda address, **o: connect(address.replace("mode=rw", "mode=ro"), **o)
    )
    with pytest.raises(HesscondError, match=r"cannot be written: attempt to write a readonly database"):
        RunLog.reopened(folder)
    assert refusal(folder) is None


def test_a_folder_that_nobody_may_read_is_not_passed_over(folder, monkeypatch, call_cli):
    """As root, to whom permissions are nothing, the system is told so."""
    closed = written_run(folder.parent / "closed")

    def read(real, place):
        if str(place) == str(closed):
            raise PermissionError(errno.EACCES, "Permission denied", str(place))
        return real(place)

    for name in ("listdir", "scandir"):
        monkeypatch.setattr(os, name, partial(read, getattr(os, name)))
    for command in (["runs"], ["table", "summary"], ["table", "seeds"], ["check", "--expect", "last(loss) < 2.4"]):
        result = call_cli(*command, folder.parent)
        assert (result.code, result.err) == (2, f"error: {closed} cannot be read: Permission denied\n")
        assert ("finished" in result.out) == (command == ["runs"])


# --- the configuration -----------------------------------------------------------------------------------------------


KEYS = ["training.batch_size", "probe.layers", "probe.units", "run.method", "run.seed", "run.learning_rate"]


@pytest.mark.parametrize("value", [None, {}])
@pytest.mark.parametrize("place", ["name", *KEYS])
def test_a_config_that_lacks_what_reports_need(folder, place, value):
    config = copy.deepcopy(CONFIG)
    *above, last = place.split(".")
    table = config[above[0]] if above else config
    del table[last]
    if value is not None:
        table[last] = value
    (folder / "config.toml").write_text(tomli_w.dumps(config), encoding="utf-8")
    check_refused(folder, "config.toml is damaged", repr(last))


@pytest.mark.parametrize("content", [b"", b"\xff\xff", b"name = [", b"a = " + 3000 * b"["])
def test_a_config_that_is_no_toml(folder, content):
    (folder / "config.toml").write_bytes(content)
    check_refused(folder, "config.toml is damaged")


# --- the command line ------------------------------------------------------------------------------------------------


@pytest.fixture
def many(tmp_path, monkeypatch):
    """A folder with three good runs and three damaged ones; it is the working directory."""
    for name in ("a", "b", "c", "d", "e", ESCAPE):
        written_run(tmp_path / name)
    (tmp_path / "b" / "run.sqlite").write_bytes(b"nothing")
    change(tmp_path / "d", "DROP TABLE probe")
    (tmp_path / ESCAPE / "config.toml").write_bytes(b"")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_good_ones_among_many(many, call_cli):
    for arguments in (("runs", "."), ("runs", ".", "--json")):
        result = call_cli(*arguments)
        assert result.code == 2
        damaged = result.err.splitlines()
        assert len(damaged) == 3
        for line, word in zip(
            damaged, (r"\x1b]0;owned\x07\x1b[2J/config.toml", "b/run.sqlite", "d/run.sqlite"), strict=True
        ):
            assert line.startswith("error: ")
            assert word in line
        assert "\x1b" not in result.out + result.err
        assert "\x07" not in result.out + result.err
    assert [row["run"] for row in json.loads(result.out)] == ["a", "c", "e"]
