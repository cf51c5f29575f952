"""Data sets on disk, and whether runs can be kept where they are to be."""

from __future__ import annotations

import os
import shutil
import sqlite3
import tempfile
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

from hesscond.data import locate
from hesscond.data.loading import ENVIRONMENT
from hesscond.data.published import SOURCES
from hesscond.doctor.check import Check, failed, ok, warning
from hesscond.errors import CorruptDataError

#: Free bytes on the disk of the runs below which a warning is due, and below which no run will end well.
LITTLE, TOO_LITTLE = 2**30, 50 * 2**20


def data_tests(data_dir: Path | None, *, checksums: bool) -> Iterator[tuple[str, Callable[[], Check]]]:
    """Name and test of each."""
    yield "folder", lambda: data_folder(data_dir)
    for name in SOURCES:
        yield name, lambda name=name: data_set(name, data_dir, checksums)  # type: ignore[misc]


def folder_tests(runs: Path) -> Iterator[tuple[str, Callable[[], Check]]]:
    """Name and test of each."""
    yield "run logs", lambda: sqlite_log(runs)
    yield "disk", lambda: disk(runs)


def data_folder(data_dir: Path | None) -> Check:
    """What the option or the environment says."""
    given = str(data_dir) if data_dir is not None else os.environ.get(ENVIRONMENT)
    if not given:
        return ok(f"${ENVIRONMENT} is not set: the cache is looked into")
    if not Path(given).expanduser().is_dir():
        return warning(f"{given} is no folder", f"set ${ENVIRONMENT} or --data-dir to a folder that there is")
    return ok(given)


def data_set(name: str, data_dir: Path | None, checksums: bool) -> Check:
    """Where a data set is, and with ``checksums`` whether it is the published one."""
    place = locate(name, data_dir)
    if place is None:
        return ok("not here", f"hesscond data fetch {name} gets it")
    if not checksums:
        return ok(str(place))
    try:
        SOURCES[name].verified_files(place)
    except CorruptDataError as error:
        return failed(str(error), f"delete {place} and run: hesscond data fetch {name}")
    return ok(f"{place}, all checksums right")


def sqlite_log(runs: Path) -> Check:
    """A log as runs keep it (SQLite with a write-ahead log), written, read by another, and deleted."""
    where = existing(runs)
    advice = "give the runs a local folder that you may write to, with --out"
    try:
        with tempfile.TemporaryDirectory(prefix=".hesscond-doctor-", dir=where) as folder:
            file = Path(folder) / "run.sqlite"
            with closing(sqlite3.connect(file)) as writer, closing(sqlite3.connect(file)) as reader:
                (mode,) = writer.execute("PRAGMA journal_mode=WAL").fetchone()
                if mode != "wal":
                    return failed(f"{where}: this file system has no write-ahead logs (mode {mode})", advice)
                writer.execute("CREATE TABLE training (iteration INTEGER, loss REAL)")
                writer.execute("INSERT INTO training VALUES (1, 0.5)")
                writer.commit()
                rows = reader.execute("SELECT iteration, loss FROM training").fetchall()
    except (OSError, sqlite3.Error) as error:
        return failed(f"{where}: {getattr(error, 'strerror', None) or error}", advice)
    if rows != [(1, 0.5)]:
        return failed(f"{where}: what was written is not what is read ({rows})", advice)
    return ok(f"SQLite {sqlite3.sqlite_version} with a write-ahead log works in {where.resolve()}")


def disk(runs: Path) -> Check:
    """Free space."""
    where = existing(runs)
    free = shutil.disk_usage(where).free
    found = f"{free / 2**30:.1f} GiB free for {where.resolve()}"
    advice = "make room, or give the runs another folder with --out"
    if free < TOO_LITTLE:
        return failed(found, advice)
    return warning(found, advice) if free < LITTLE else ok(found)


def existing(folder: Path) -> Path:
    """The folder, or the nearest one above it that exists."""
    return next(p for p in (folder, *folder.absolute().parents) if p.is_dir())
