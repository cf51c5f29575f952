"""Writer of a run's folder: the log, checkpoints, and which folders a run may begin or go on in.

A checkpoint is written whole or not at all, checked when it is read, and the last good one is never lost.
"""

from __future__ import annotations

import hashlib
import io
import logging
import os
import platform
import socket
import sqlite3
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, Literal

import tomli_w
from filelock import FileLock, Timeout

from hesscond.errors import ConfigError, RunError
from hesscond.runs import store
from hesscond.sheets import listed

if TYPE_CHECKING:
    import torch

#: Seconds between commits of training rows between probed iterations, and between two entries of the clock.
COMMIT_INTERVAL = 1.0

SET_FACT = "INSERT OR REPLACE INTO run (key, value) VALUES (?, ?)"

#: Keys of [training] that say how long a run is, and schedules whose learning rates depend on it.
LENGTH = ("iterations", "epochs")
UNTIL_THE_END = ("cosine", "linear")

#: Files that a start that was killed before its log existed can leave behind.
LEFTOVERS = ("config.toml", "config.toml.partial", f"{store.LOG}.partial", f"{store.LOG}.partial-journal")


class RunLog:
    """Writer of one run's folder, which is made if absent; rows of an iteration and of its probe are one transaction.

    ``config``: contents of ``config.toml``, everything needed to repeat the run. ``begun``: as for `check_free`.
    """

    def __init__(self, folder: Path, config: Mapping[str, Any], *, begun: bool = False) -> None:
        check_free(folder, begun=begun)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            for name in LEFTOVERS:
                (folder / name).unlink(missing_ok=True)
            write_config(folder, config)
            # the log gets its name when all tables are in it: a kill leaves no half of one
            partial = folder / f"{store.LOG}.partial"
            with closing(sqlite3.connect(partial, isolation_level=None)) as connection:
                connection.execute("BEGIN")
                create(connection)
                connection.executemany(SET_FACT, facts_of(**running(), started=now()))
                connection.execute("COMMIT")
            partial.replace(folder / store.LOG)
        except (OSError, sqlite3.Error) as error:
            why = getattr(error, "strerror", None) or error
            raise ConfigError(f"the run folder {folder} cannot be written: {why}") from None
        self._open(folder)

    @classmethod
    def reopened(cls, folder: Path, longer: Mapping[str, Any] | None = None) -> RunLog:
        """Reopen the log of a run that was broken off; rows that it already has are not written again.

        ``longer``: its new configuration, with more iterations. What was measured at its old end is then deleted, since
        a run that goes on does not measure there.
        """
        log = cls.__new__(cls)
        log._open(folder)
        log.mark(**running(), message="", ended="", resumed=now())
        if longer is not None:
            with log._transaction() as connection:
                (total,) = connection.execute("SELECT value FROM run WHERE key = 'total'").fetchone()
                connection.execute("DELETE FROM evaluation WHERE iteration = ?", [int(total)])
                for table in ("probe", "readings", "statements"):
                    connection.execute(f"DELETE FROM {table} WHERE iteration = ? AND data = 'train'", [int(total)])
            write_config(folder, longer)
        return log

    def _open(self, folder: Path) -> None:
        self.folder = folder
        try:
            self._connection = sqlite3.connect(f"{folder.absolute().as_uri()}/{store.LOG}?mode=rw", uri=True)
            self._connection.isolation_level = None
            self._connection.execute("PRAGMA trusted_schema=OFF")
            store.check_schema(self._connection)
            # a killed process loses nothing that was committed; no fsync for every iteration
            self._connection.execute("PRAGMA journal_mode=WAL")
            self._connection.execute("PRAGMA synchronous=NORMAL")
            (session,) = self._connection.execute("SELECT MAX(session) FROM clock").fetchone()
            (iteration,) = self._connection.execute("SELECT MAX(iteration) FROM training").fetchone()
        except sqlite3.Error as error:
            raise ConfigError(f"the run folder {folder} cannot be written: {error}") from None
        except RunError as error:
            self._connection.close()
            raise RunError(f"the log {folder / store.LOG} cannot be written: {error}") from None
        # OR IGNORE: a resumed run comes to the same rows again, and so does `close` after a Ctrl-C
        self._inserts = {
            table: f"INSERT OR IGNORE INTO {table} ({', '.join(columns)}) VALUES ({', '.join('?' * len(columns))})"
            for table, columns in store.TABLES.items()
        }
        self._session = 1 if session is None else session + 1
        self._iterations = 0 if iteration is None else iteration + 1
        self._clocked = -COMMIT_INTERVAL
        self._pending: list[tuple[int, int, float, float | None]] = []
        self._committed = time.monotonic()

    def training(self, iteration: int, epoch: int, loss: float, lr: float | None = None) -> None:
        """Add a training row; it is committed with the next probes, or within a second."""
        self._pending.append((iteration, epoch, loss, lr))
        if self.due:
            self.commit()

    @property
    def due(self) -> bool:
        """Whether rows have been waiting for a second."""
        return time.monotonic() - self._committed > COMMIT_INTERVAL

    def commit(self, **rows: list[dict[str, Any]]) -> None:
        """Write pending training rows, and those of other tables by their names, in one transaction."""
        with self._transaction() as connection:
            connection.executemany(self._inserts["training"], self._pending)
            for table, records in rows.items():
                columns = store.TABLES[table]
                connection.executemany(self._inserts[table], [[r.get(c) for c in columns] for r in records])
            if self._pending:
                self._iterations = max(self._iterations, self._pending[-1][0] + 1)
            if time.monotonic() - self._clocked >= COMMIT_INTERVAL:
                # the time at which the log has its present number of iterations
                connection.execute("INSERT INTO clock VALUES (?, ?, ?)", [self._session, time.time(), self._iterations])
                self._clocked = time.monotonic()
        self._pending.clear()
        self._committed = time.monotonic()

    def mark(self, **facts: Any) -> None:
        """Set facts of the run as a whole (status, message, …)."""
        with self._transaction() as connection:
            connection.executemany(SET_FACT, facts_of(**facts))

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        """Run the block as one transaction, rolled back on any error, Ctrl-C included."""
        try:
            with self._connection as connection:
                connection.execute("BEGIN")
                yield connection
        except sqlite3.Error as error:
            raise RunError(f"the log {self.folder / store.LOG} cannot be written: {error}") from None

    def close(self, status: str, message: str = "") -> None:
        """Commit what is pending, mark how the run ended and fold the log into its one file."""
        self._clocked = -COMMIT_INTERVAL
        self.commit()
        self.mark(status=status, message=message, ended=now())
        with suppress(sqlite3.OperationalError):  # somebody is reading: the log is complete all the same
            self._connection.execute("PRAGMA journal_mode=DELETE")
        self._connection.close()


def write_config(folder: Path, config: Mapping[str, Any]) -> None:
    """Write the run's ``config.toml``, whole or not at all."""
    partial = folder / "config.toml.partial"
    partial.write_text(tomli_w.dumps(config), encoding="utf-8")
    partial.replace(folder / "config.toml")


def create(connection: sqlite3.Connection) -> None:
    """Make the tables of this version in an empty database, inside the transaction that is open."""
    for table, columns in (store.TABLES | store.BESIDE).items():
        spec = ", ".join(f"{name} {kind}" for name, kind in columns.items())
        connection.execute(f"CREATE TABLE {table} ({spec})")
    for table, key in store.KEYS.items():
        # a row is logged once; to an index one NULL is not the same as another
        once = ", ".join("ifnull(unit, -1)" if column == "unit" else column for column in key)
        connection.execute(f"CREATE UNIQUE INDEX one_{table} ON {table} ({once})")
    connection.execute(f"PRAGMA application_id = {store.APPLICATION_ID}")
    connection.execute(f"PRAGMA user_version = {store.SCHEMA_VERSION}")


def versions(*packages: ModuleType) -> dict[str, str]:
    """Versions of packages and of Python, for ``config.toml``."""
    return {package.__name__: package.__version__ for package in packages} | {"python": platform.python_version()}


def running() -> dict[str, Any]:
    """Facts of a run that this process is writing."""
    return {"status": "running", "pid": os.getpid(), "host": socket.gethostname()}


def facts_of(**facts: Any) -> list[tuple[str, str]]:
    """Facts as rows of the log."""
    return [(key, str(value)) for key, value in facts.items()]


def now() -> str:
    """The time of day, with its zone."""
    return time.strftime("%Y-%m-%dT%H:%M:%S%z")


def check_outside_runs(folder: Path) -> None:
    """Refuse a folder that is or lies in a run, in which nobody looks for others, or a file."""
    for place in (folder, *Path(os.path.abspath(folder)).parents):
        if os.path.lexists(place / store.LOG):
            raise ConfigError(f"{place} is itself a run, and cannot hold others: give another --out")
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"{folder} is a file: give a folder for the run")


def can_be_resumed(folder: Path, config: Mapping[str, Any]) -> Literal["no", "same", "longer"]:
    """Whether the folder holds a run of this configuration ("same"), one to make "longer", or "no" run."""
    if not os.path.lexists(folder / store.LOG):
        return "no"
    stored_config, wanted = store.open_run(folder).config, {**config}
    # other versions go on too: they are not part of what is run
    for content in (stored_config, wanted):
        content["run"] = {key: value for key, value in content["run"].items() if key not in ("versions", "data_source")}
    if stored_config == wanted:
        return "same"
    if others := differences(stored_config, wanted, but=LENGTH):
        raise ConfigError(f"{folder} holds a run of another configuration ({others}): give another --out")
    length = differences(stored_config, wanted)
    if wanted.get("schedule", {}).get("kind") in UNTIL_THE_END:
        raise ConfigError(
            f"{folder} holds a run of another length ({length}), whose learning rates depend on it: give another --out"
        )
    stored, goal = ({key: content["training"].get(key) for key in LENGTH} for content in (stored_config, wanted))
    if not any(stored[key] and goal[key] and goal[key] > stored[key] for key in LENGTH):
        raise ConfigError(f"{folder} holds a run of another length ({length}), and can only be made longer")
    return "longer"


def differences(stored_config: Mapping[str, Any], wanted: Mapping[str, Any], *, but: Sequence[str] = ()) -> str:
    """Keys in which two configurations differ, a few with both values; ``but``: keys of [training] to leave out."""
    entries = []
    for table in sorted({*stored_config, *wanted}):
        stored, settings = stored_config.get(table), wanted.get(table)
        if isinstance(stored, dict) and isinstance(settings, dict):
            for key in sorted({*stored, *settings}):
                if stored.get(key) != settings.get(key) and not (table == "training" and key in but):
                    there, here = (repr(part[key]) if key in part else "not given" for part in (stored, settings))
                    entries.append(f"{table}.{key}: {there} there, {here} here")
        elif stored != settings:
            entries.append(table)
    return listed(entries)


def check_free(folder: Path, *, begun: bool = False) -> None:
    """Refuse a folder with anything but a run's lock; with ``begun``, what a killed start left behind is allowed."""
    if os.path.lexists(folder / store.LOG):
        raise ConfigError(f"{folder} holds a run: add --resume to go on with it, or give another --out")
    check_outside_runs(folder)
    if not folder.is_dir():
        return
    below = sorted(log.parent.name for log in folder.glob(f"*/{store.LOG}"))
    if below:
        raise ConfigError(f"{folder} is a folder of runs ({listed(below)}): give another --out, or a folder in it")
    for path in folder.iterdir():
        if path.name == LOCK.parent.name and path.is_dir() and {file.name for file in path.iterdir()} <= {LOCK.name}:
            continue
        if not begun or path.name not in LEFTOVERS:
            raise ConfigError(f"{folder} is not empty and holds no run: give another --out")


logger = logging.getLogger("hesscond")

#: Lock file in a run's folder: the process that holds it works on the run.
LOCK = Path("checkpoints") / "lock"
MAGIC = b"hesscond checkpoint 1"
#: Checkpoints that are kept: the newest, and the one before it in case that one is damaged later.
KEPT = 2


class BusyError(RunError):
    """Another process works on the run."""


class Checkpoints:
    """The folder ``checkpoints`` of a run, of which one process at a time may be the owner (a context manager).

    A file is a line with a checksum followed by the state as `torch.save` writes it. It is written under another name,
    flushed to the disk, read back and compared, and only then given its name; older ones are removed after that.
    """

    def __init__(self, run: Path) -> None:
        self.folder = run / LOCK.parent
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._lock = FileLock(run / LOCK, timeout=0)
            self._lock.acquire()
        except Timeout:
            raise BusyError(f"another process works on {run}: wait for it, or stop it") from None
        except OSError as error:
            raise ConfigError(f"the run folder {run} cannot be written: {error.strerror or error}") from None

    def __enter__(self) -> Checkpoints:
        return self

    def __exit__(self, *error: object) -> None:
        self._lock.release()

    def save(self, iteration: int, state: dict[str, Any]) -> None:
        """Keep the state before ``iteration``."""
        import torch

        buffer = io.BytesIO()
        torch.save(state, buffer)
        content = buffer.getvalue()
        path = self.folder / f"{iteration:09d}.pt"
        partial = path.with_suffix(".partial")
        try:
            with partial.open("wb") as file:
                file.write(header(content) + content)
                file.flush()
                os.fsync(file.fileno())
            if checked(partial) is None:
                raise RunError(f"the checkpoint {path} does not read back as it was written: check the disk")
            partial.replace(path)
        except OSError as error:
            with suppress(OSError):
                partial.unlink()
            raise RunError(f"the checkpoint {path} cannot be written: {error.strerror or error}") from None
        for old in self.files()[:-KEPT]:
            old.unlink(missing_ok=True)

    def files(self) -> list[Path]:
        """Checkpoint files in the folder, the newest last."""
        return sorted(self.folder.glob("*.pt"))

    def latest(self, device: torch.device) -> dict[str, Any] | None:
        """Newest state that is undamaged, loaded to a device; None if none was ever saved."""
        import torch

        files = self.files()
        for path in reversed(files):
            content = checked(path)
            if content is not None:
                return dict(torch.load(io.BytesIO(content), map_location=device, weights_only=True))
            if path != files[0]:
                logger.warning("the checkpoint %s is damaged: the one before it is taken", path)
        if files:
            raise RunError(f"all checkpoints in {self.folder} are damaged: remove the folder to start anew")
        return None


def header(content: bytes) -> bytes:
    """First line of a checkpoint: the name of the format and the SHA-256 checksum of the content."""
    return MAGIC + b" sha256 " + hashlib.sha256(content).hexdigest().encode() + b"\n"


def checked(path: Path) -> bytes | None:
    """Content of a checkpoint file; None if it is damaged or cannot be read."""
    try:
        line, _, content = path.read_bytes().partition(b"\n")
    except OSError:
        return None
    return content if line + b"\n" == header(content) else None
