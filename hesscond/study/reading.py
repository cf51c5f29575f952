"""Connections to a run's log that change nothing, and rows that are what they should be."""

from __future__ import annotations

import os
import re
import shutil
import sqlite3
import tempfile
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

from hesscond.errors import RunError
from hesscond.study.schema import BESIDE, TABLES, check_schema

LOG = "run.sqlite"
#: What SQLite keeps beside the log while it is written, or after a kill.
COMPANIONS = ("-wal", "-shm", "-journal")

#: Bytes of a text in the log; a damaged length field must not fill the memory.
LONGEST_TEXT = 1_000_000
#: Columns without which a row says nothing; in all other tables the iteration.
REQUIRED = {
    "training": ("iteration", "epoch"),
    "evaluation": ("iteration", "epoch"),
    "statements": ("iteration", "statement", "claim", "known", "status"),
}
#: No row of a table takes fewer bytes in SQLite's file format.
SMALLEST_ROW = 6
#: Before every row number.
FROM_THE_START = -(2**63)
#: Attempts at a copy between two of the writer's checkpoints.
ATTEMPTS = 20

#: Characters that steer a terminal or turn the direction of text; names and reasons have none.
STEERING = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069]")

#: Those, and bytes of a path that are no UTF-8, which no encoding has.
UNPRINTABLE = re.compile(f"{STEERING.pattern}|[\ud800-\udfff]")


@contextmanager
def reading(folder: Path) -> Iterator[sqlite3.Connection]:
    """A connection to a run's log that writes nothing.

    A log that nobody writes is opened as it is. Where a kill left a write-ahead log it is read too, from a copy if the
    folder does not let SQLite index it in place (a read-only medium).

    Raises
    ------
    RunError
        It is damaged, of another version, no log at all, or not a file.
    """
    path = folder / LOG
    try:
        check_regular(folder)
        with _connected(path) as connection:
            _guard(connection)
            check_schema(connection)
            yield connection
    except RunError as error:
        raise error if str(path) in str(error) else RunError(f"the log {path} cannot be read: {error}") from None
    except (sqlite3.Error, UnicodeDecodeError, OverflowError) as error:
        raise RunError(f"the log {path} cannot be read: {error}") from None
    except OSError as error:
        raise RunError(f"the log {path} cannot be read: {error.strerror or error}") from None


def check_regular(folder: Path) -> None:
    """Refuse a run whose files are not files in its own folder: what a link leads to is not this run's.

    The folder itself may be reached through links.

    Raises
    ------
    RunError
        One is a link, a folder or a device.
    """
    for name in (LOG, "config.toml", *(LOG + end for end in COMPANIONS)):
        path = folder / name
        if path.is_symlink():
            raise RunError(f"{path} is a symbolic link: a run is read from files in its own folder only")
        if os.path.lexists(path) and not path.is_file():
            raise RunError(f"{path} is not a file")


@contextmanager
def _connected(path: Path) -> Iterator[sqlite3.Connection]:
    """A read-only connection to what SQLite finds in a file and its companions."""
    wal, shm, journal = (path.with_name(path.name + end) for end in COMPANIONS)
    written = wal.exists()
    if (written and not (shm.exists() and os.access(shm, os.W_OK) and os.access(path.parent, os.W_OK))) or (
        not written and journal.exists()
    ):
        with (
            tempfile.TemporaryDirectory(prefix="hesscond-") as folder,
            closing(sqlite3.connect(_copied(path, Path(folder)), isolation_level=None)) as connection,
        ):
            yield connection
        return
    # without a write-ahead log nobody writes, and a header that asks for one would make SQLite begin one
    immutable = "" if written or not _asks_for_wal(path) else "&immutable=1"
    address = f"{path.absolute().as_uri()}?mode=ro{immutable}"
    with closing(sqlite3.connect(address, uri=True, isolation_level=None)) as connection:
        (size,) = connection.execute("PRAGMA page_size").fetchone()
        if not written and path.stat().st_size % size:
            raise RunError("it was cut off")
        yield connection


def _asks_for_wal(path: Path) -> bool:
    """Whether the header says that changes go to a write-ahead log."""
    with path.open("rb") as file:
        return file.read(20)[18:] == b"\x02\x02"


def _copied(path: Path, folder: Path) -> Path:
    """A copy of a log and its companions as they were at one moment."""
    for _ in range(ATTEMPTS):
        before = path.stat()
        copies = [shutil.copyfile(path, folder / path.name)]
        for end in ("-wal", "-journal"):
            companion = path.with_name(path.name + end)
            if companion.exists():
                copies.append(shutil.copyfile(companion, folder / companion.name))
        after = path.stat()
        # the write-ahead log only grows until what it holds has gone to the main file
        if (before.st_mtime_ns, before.st_size) == (after.st_mtime_ns, after.st_size):
            return Path(copies[0])
    raise RunError("it changes faster than it can be copied")


def _guard(connection: sqlite3.Connection) -> None:
    """Whatever the file holds, reading it neither writes nor runs anything, nor fills the memory."""
    connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, LONGEST_TEXT)
    for pragma in ("query_only = ON", "trusted_schema = OFF", "cell_size_check = ON"):
        connection.execute(f"PRAGMA {pragma}")


def most_rows(connection: sqlite3.Connection) -> int:
    """More rows than fit into the file: pages that point at each other give them without end."""
    (pages,) = connection.execute("PRAGMA page_count").fetchone()
    (size,) = connection.execute("PRAGMA page_size").fetchone()
    return int(pages) * int(size) // SMALLEST_ROW


def count(connection: sqlite3.Connection, table: str) -> int:
    """How many rows a table has."""
    limit = most_rows(connection)
    (found,) = connection.execute(f"SELECT COUNT(*) FROM (SELECT 1 FROM {table} LIMIT {limit + 1})").fetchone()
    if found > limit:
        raise RunError(f"its table {table} has more rows than fit into the file")
    return int(found)


def rows(
    connection: sqlite3.Connection, table: str, *, after: int = FROM_THE_START
) -> tuple[list[int], dict[str, list[Any]]]:
    """The rows of a table that were written after row number ``after``: their numbers, and the values by column.

    Raises
    ------
    RunError
        A value is not of its column's type, or is a text that no log holds.
    """
    columns = (TABLES | BESIDE)[table]
    limit = most_rows(connection)
    found = connection.execute(
        f"SELECT rowid, {', '.join(columns)} FROM {table} WHERE rowid > ? ORDER BY rowid LIMIT {limit + 1}", [after]
    ).fetchall()
    if len(found) > limit:
        raise RunError(f"its table {table} has more rows than fit into the file")
    numbers, *values = map(list, zip(*found, strict=True)) if found else [[] for _ in range(len(columns) + 1)]
    for (column, kind), own in zip(columns.items(), values, strict=True):
        check_values(f"{table}.{column}", kind.split()[0], own)
    found_values = dict(zip(columns, values, strict=True))
    for column in REQUIRED.get(table, ("iteration",)):
        if None in found_values.get(column, ()):
            raise RunError(f"{table}.{column} is empty in a row")
    return numbers, found_values


def check_values(column: str, kind: str, values: list[Any]) -> None:
    """See that the values of a column are of its SQLite type or missing.

    Raises
    ------
    RunError
        One is not.
    """
    allowed: dict[str, tuple[type, ...]] = {"INTEGER": (int,), "REAL": (float, int), "TEXT": (str,)}
    strange = next((v for v in values if v is not None and not isinstance(v, allowed[kind])), None)
    if strange is not None:
        raise RunError(f"{column} holds {shortened(strange)}, which is not of type {kind}")
    if kind == "TEXT":
        for value in set(values) - {None}:
            check_text(column, value)
    elif kind == "INTEGER" and column.endswith(("iteration", "epoch")):
        for value in values:
            if value is not None and value < 0:
                raise RunError(f"{column} holds {value}")


def check_text(where: str, text: str) -> None:
    """Refuse a text that would steer the terminal it is printed on.

    Raises
    ------
    RunError
        It would.
    """
    if STEERING.search(text):
        raise RunError(f"{where} holds control characters: {shortened(text)}")


def printable(text: str) -> str:
    """A text with escapes for characters that steer a terminal, or that cannot be printed: a path may hold any."""
    return UNPRINTABLE.sub(lambda found: ascii(found[0])[1:-1], text)


def shortened(value: Any) -> str:
    """A value as Python writes it, which is safe to print, cut to what fits into a sentence."""
    text = ascii(value)
    return text if len(text) <= 60 else f"{text[:57]}…"
