"""The run folder: ``config.toml`` and the append-only log ``run.sqlite``, its tables, and how they are read."""

from __future__ import annotations

import math
import os
import re
import shutil
import socket
import sqlite3
import tempfile
import time
import tomllib
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from datetime import datetime
from numbers import Integral
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from hesscond.errors import ConfigError, RunError

if TYPE_CHECKING:
    import pandas as pd

LOG = "run.sqlite"
#: Endings of the files that SQLite keeps next to the log while it is written, or after a kill.
COMPANIONS = ("-wal", "-shm", "-journal")
#: Statuses of a run that is over and need not be resumed.
OVER = ("finished", "diverged")
#: Smaller than every row number.
FROM_THE_START = -(2**63)
#: Seconds after which a run on another machine, of which nothing was heard since, is no longer called running.
SILENCE = 900.0
#: Attempts at a copy between two of the writer's checkpoints.
ATTEMPTS = 20
#: Characters that steer a terminal or turn the direction of text, and bytes of a path that are no UTF-8.
UNPRINTABLE = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")

#: Version of `TABLES` and of all other tables below; it goes up when they change.
SCHEMA_VERSION = 9
#: Columns of the probe table that came with version 9.
LATER = (
    "lambda_max_own",
    "kappa_diagonal_lower",
    "kappa_diagonal_upper",
    "kappa_kronecker_lower",
    "kappa_kronecker_upper",
)
#: The versions that can be read, and what their logs lack: columns by table. They are empty, and there as soon as a run
#: goes on.
LACKING: dict[int, dict[str, tuple[str, ...]]] = {
    5: {
        "evaluation": ("test_top5", "test_class_accuracy", "test_psnr", "test_bits_per_character"),
        "probe": ("trace", *LATER),
    },
    6: {"evaluation": ("test_bits_per_character",), "probe": ("trace", *LATER)},
    7: {"probe": ("trace", *LATER)},
    8: {"probe": LATER},
    SCHEMA_VERSION: {},
}
#: "HESS", in the header of the file.
APPLICATION_ID = 0x48455353

#: Columns of the log's tables with their SQLite types; `PROBE_MEANING` explains those of ``probe``.
TABLES: dict[str, dict[str, str]] = {
    "training": {"iteration": "INTEGER PRIMARY KEY", "epoch": "INTEGER", "loss": "REAL", "lr": "REAL"},
    "evaluation": {
        "iteration": "INTEGER PRIMARY KEY",
        "epoch": "INTEGER",
        "test_loss": "REAL",
        "test_accuracy": "REAL",
        "test_top5": "REAL",
        "test_class_accuracy": "REAL",
        "test_psnr": "REAL",
        "test_bits_per_character": "REAL",
    },
    "probe": {
        "iteration": "INTEGER",
        "epoch": "INTEGER",
        "data": "TEXT",
        "layer": "TEXT",
        "unit": "INTEGER",
        "samples": "INTEGER",
        "n_params": "INTEGER",
        "kappa": "REAL",
        "kappa_lower": "REAL",
        "kappa_upper": "REAL",
        "kappa_preconditioned": "REAL",
        "kappa_preconditioned_lower": "REAL",
        "kappa_preconditioned_upper": "REAL",
        "kappa_own": "REAL",
        "kappa_own_lower": "REAL",
        "kappa_own_upper": "REAL",
        "kappa_D": "REAL",
        "kappa_D_eps": "REAL",
        "kappa_D_running": "REAL",
        "kappa_D_running_eps": "REAL",
        "dead": "INTEGER",
        "rank": "INTEGER",
        "nullity": "INTEGER",
        "negative": "INTEGER",
        "resolved": "INTEGER",
        "lambda_max": "REAL",
        "lambda_min": "REAL",
        "trace": "REAL",
        "rank_preconditioned": "INTEGER",
        "resolved_preconditioned": "INTEGER",
        "rank_own": "INTEGER",
        "resolved_own": "INTEGER",
        "lambda_max_own": "REAL",
        "kappa_diagonal_lower": "REAL",
        "kappa_diagonal_upper": "REAL",
        "kappa_kronecker_lower": "REAL",
        "kappa_kronecker_upper": "REAL",
        "coordinates": "TEXT",
        "solver": "TEXT",
    },
    "statements": {
        "iteration": "INTEGER",
        "epoch": "INTEGER",
        "data": "TEXT",
        "layer": "TEXT",
        "unit": "INTEGER",
        "statement": "TEXT",
        "claim": "TEXT",
        "known": "INTEGER",
        "status": "TEXT",
        "used": "REAL",
        "reason": "TEXT",
    },
    "readings": {
        "iteration": "INTEGER",
        "epoch": "INTEGER",
        "data": "TEXT",
        "layer": "TEXT",
        "unit": "INTEGER",
        "coordinates": "TEXT",
        "kappa": "REAL",
        "kappa_lower": "REAL",
        "kappa_upper": "REAL",
        "rank": "INTEGER",
        "nullity": "INTEGER",
        "negative": "INTEGER",
        "resolved": "INTEGER",
        "solver": "TEXT",
    },
}

#: What makes a row the same: a resumed run measures some of them a second time. Whole blocks have no unit.
KEYS = {
    "probe": ("iteration", "data", "layer", "unit"),
    "readings": ("iteration", "data", "layer", "unit", "coordinates"),
    "statements": ("iteration", "data", "layer", "unit", "statement", "claim"),
}

#: Tables other than `TABLES`: facts of the run as a whole, and iterations logged by a time (seconds since 1970), at
#: most a row a second, in each session (the process that started the run, and those that went on with it).
BESIDE = {
    "run": {"key": "TEXT PRIMARY KEY", "value": "TEXT"},
    "clock": {"session": "INTEGER", "time": "REAL", "iterations": "INTEGER"},
}

PROBE_MEANING = {
    "iteration": "optimizer steps taken when it was measured",
    "layer": "as the study names it; network: all parameters together",
    "unit": "of the layer; empty: the Hessian is that of the whole block",
    "data": "samples of the Hessian: batch (the mini-batch about to be trained on) or train (the training set)",
    "kappa": "κ(H) in the plain parameters [b, w]; inf if unresolved",
    "kappa_preconditioned": "κ(PᵀHP) with P = U D from the raw statistics of the same samples, whatever the method",
    "kappa_own": "κ in the method's own coordinates: P of its step, a tangent space, … (vanilla: equal to kappa)",
    "kappa_D": "κ(D), D = diag(1, 1/σ) from the raw statistics of the same samples, dead features left out",
    "kappa_D_eps": "the same with Algorithm 2's ε₁, ε₂",
    "kappa_D_running": "κ(D) of the method's raw running statistics (empty where it has none)",
    "kappa_D_running_eps": "the same with ε₁, ε₂: the D that the step used",
    "dead": "input features constant over the samples (σ = 0)",
    "coordinates": "the coordinates of kappa_own; where they are not defined, the reason",
    "lambda_max_own": "largest |λ| of the Hessian in the method's own coordinates",
    "kappa_diagonal_lower": "a bound that no κ(DHD) with a diagonal D is below (see optima in [probe])",
    "kappa_diagonal_upper": "the smallest κ(DHD) that was found",
    "kappa_kronecker_lower": "a bound that no κ((L⊗R)ᵀH(L⊗R)) is below",
    "kappa_kronecker_upper": "the smallest one that was found",
    "trace": "of H in the plain parameters",
    "rank": "rank of H; with nullity it adds up to n_params",
}

#: The values of columns as `sqlite3` gives them.
PYTHON: dict[str, tuple[type, ...]] = {"INTEGER": (int,), "REAL": (float, int), "TEXT": (str,)}


def check_schema(connection: sqlite3.Connection) -> dict[str, tuple[str, ...]]:
    """Check that a database is a log of a version in `LACKING`, with all tables; return the columns that it lacks."""
    (application,) = connection.execute("PRAGMA application_id").fetchone()
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    if application != APPLICATION_ID:
        raise RunError("it is no log of hesscond")
    if version not in LACKING:
        readable = " and ".join(map(str, LACKING))
        raise RunError(
            f"its schema version is {version}, but this hesscond reads {readable}: take the hesscond that the "
            "run's config.toml names, or run the study again"
        )
    # no view, which may compute without end
    there = {name for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
    for table in TABLES | BESIDE:
        if table not in there:
            raise RunError(f"it has no table {table}")
    return LACKING[version]


@contextmanager
def reading(folder: Path) -> Iterator[sqlite3.Connection]:
    """A connection to a run's log that writes nothing and runs nothing.

    A log that nobody writes is opened as it is. Where a kill left a write-ahead log it is read too, from a copy if the
    folder does not let SQLite index it in place (a read-only medium).
    """
    path = folder / LOG
    check_regular(folder)
    try:
        with _connected(path) as connection:
            connection.execute("PRAGMA query_only = ON")
            connection.execute("PRAGMA trusted_schema = OFF")
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
    """
    for name in (LOG, "config.toml", *(LOG + end for end in COMPANIONS)):
        path = folder / name
        if path.is_symlink():
            raise RunError(f"{path} is a symbolic link: a run is read from files in its own folder only")
        if os.path.lexists(path) and not path.is_file():
            raise RunError(f"{path} is not a file")


#: First bytes of a database.
MAGIC = b"SQLite format 3\0"


@contextmanager
def _connected(path: Path) -> Iterator[sqlite3.Connection]:
    """A read-only connection to what SQLite finds in a file and its companions."""
    wal, shm, journal = (path.with_name(path.name + end) for end in COMPANIONS)
    written = wal.exists()
    in_place = written and shm.exists() and os.access(shm, os.W_OK) and os.access(path.parent, os.W_OK)
    if not in_place and (written or journal.exists()):
        with (
            tempfile.TemporaryDirectory(prefix="hesscond-") as folder,
            closing(sqlite3.connect(_copied(path, Path(folder)), isolation_level=None)) as connection,
        ):
            yield connection
        return
    # nobody writes, but a header that asks for a write-ahead log would make SQLite begin one
    immutable = "" if written else "&immutable=1"
    address = f"{path.absolute().as_uri()}?mode=ro{immutable}"
    with closing(sqlite3.connect(address, uri=True, isolation_level=None)) as connection:
        (size,) = connection.execute("PRAGMA page_size").fetchone()
        if not written and path.stat().st_size % size:
            raise RunError("it was cut off" if begins_as_sqlite(path) else "it is no SQLite database")
        yield connection


def begins_as_sqlite(path: Path) -> bool:
    """Whether a file begins as a database does."""
    with path.open("rb") as file:
        return file.read(len(MAGIC)) == MAGIC


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


@dataclass(frozen=True)
class StoredRun:
    """A run folder, read only.

    Attributes
    ----------
    folder
        The run folder.
    config
        The contents of ``config.toml``; ``config["run"]`` has method, seed, learning rate and versions.
    facts
        Status, message and times; status is running, finished, interrupted, diverged, failed or killed, or silent: the
        run is on another machine, and its log has not changed for a quarter of an hour.
    """

    folder: Path
    config: dict[str, Any]
    facts: dict[str, str]

    @property
    def method(self) -> str:
        """The method, as ``--method`` says it."""
        return str(self.config["run"]["method"])

    @property
    def legend(self) -> str:
        """The method's name in the study, else what ``--method`` says."""
        return str(self.config["run"].get("label") or self.method)

    @property
    def seed(self) -> int:
        """The seed."""
        return int(self.config["run"]["seed"])

    @property
    def label(self) -> str:
        """The run's name, METHOD-seedS."""
        return f"{self.legend}-seed{self.seed}"

    @property
    def status(self) -> str:
        """Status of the run, as in ``facts``; unknown if the log does not say."""
        return self.facts.get("status", "unknown")

    @property
    def iterations(self) -> int:
        """Training iterations in the log."""
        with reading(self.folder) as connection:
            return int(connection.execute("SELECT COUNT(*) FROM training").fetchone()[0])

    @property
    def total(self) -> int | None:
        """Iterations that the run is to have; None where neither its config nor its log says so yet."""
        training = self.config["training"]
        if training.get("iterations") is not None:
            return int(training["iterations"])
        total = self.facts.get("total", "")
        return int(total) if total.isdecimal() else None

    @property
    def last_loss(self) -> float:
        """The training loss of the last iteration in the log; NaN if there is none."""
        with reading(self.folder) as connection:
            found = connection.execute("SELECT loss FROM training ORDER BY iteration DESC LIMIT 1").fetchone()
        return float(found[0]) if found and found[0] is not None else math.nan

    @property
    def seconds(self) -> float:
        """Seconds that the run has worked, breaks left out; NaN if nothing was logged yet."""
        worked = self.worked
        return max(worked.values()) if worked else math.nan

    @property
    def worked(self) -> dict[int, float]:
        """Seconds that the run had worked, breaks left out, by the number of iterations logged by then."""
        clock, found = self.rows("clock")[1], {}
        session, began, before, latest = None, 0.0, 0.0, 0.0
        for own, at, iterations in zip(clock["session"], clock["time"], clock["iterations"], strict=True):
            if own != session:
                session, began, before = own, at or 0.0, latest
            latest = max(latest, before + (at or 0.0) - began)
            found[iterations] = latest
        return found

    def rows(self, table: str, *, after: int = FROM_THE_START) -> tuple[list[int], dict[str, list[Any]]]:
        """The rows of a table that came after row number ``after``: their numbers, and the values by column.

        Raises
        ------
        RunError
            The log is damaged.
        """
        columns = (TABLES | BESIDE)[table]
        with reading(self.folder) as connection:
            lacking = check_schema(connection).get(table, ())
            wanted = ("NULL" if column in lacking else column for column in columns)
            found = connection.execute(
                f"SELECT rowid, {', '.join(wanted)} FROM {table} WHERE rowid > ? ORDER BY rowid", [after]
            ).fetchall()
            numbers, *values = map(list, zip(*found, strict=True)) if found else [[] for _ in range(len(columns) + 1)]
            for (column, kind), own in zip(columns.items(), values, strict=True):
                allowed = PYTHON[kind.split()[0]] + (() if column == "iteration" else (type(None),))
                if strange := [value for value in own if not isinstance(value, allowed)]:
                    raise RunError(f"{table}.{column} holds {strange[0]!a}, which is not of type {kind}")
        return numbers, dict(zip(columns, values, strict=True))

    def table(self, name: str) -> pd.DataFrame:
        """A table of the log: ``"training"``, ``"probe"``, ``"evaluation"``, ``"statements"`` or ``"readings"``.

        Readings are κ's in further coordinates that the method has, one row each; statements are the published ones
        that were checked, a row for each claim (``known``: whether it is known to be true; ``used``: how much of what
        is allowed was used).

        Raises
        ------
        ConfigError
            No such table.
        RunError
            The log is damaged.
        """
        import pandas as pd

        if name not in TABLES:
            raise ConfigError(f"unknown table {name!r}: choose from {', '.join(TABLES)}")
        _, values = self.rows(name)
        columns = {}
        for column, kind in TABLES[name].items():
            own = values[column]
            if kind == "REAL":
                columns[column] = pd.Series(own, dtype=float)
            elif column.startswith("resolved"):
                columns[column] = pd.Series([None if v is None else v != 0 for v in own], dtype="boolean")
            elif kind.startswith("INTEGER"):
                columns[column] = pd.Series(own, dtype="Int64" if None in own else "int64")
            else:
                columns[column] = pd.Series(own, dtype=None if own else object)
        return pd.DataFrame(columns).sort_values("iteration", kind="stable", ignore_index=True)


def open_run(folder: Path | str) -> StoredRun:
    """Read a run folder.

    Raises
    ------
    RunError
        There is no run, or it is damaged, or of another version.
    """
    folder = Path(folder)
    try:
        there = all(os.path.lexists(folder / name) for name in (LOG, "config.toml"))
    except ValueError:  # a null character
        there = False
    if not there:
        raise RunError(f"{folder} is not a run folder: it has no {LOG} with a config.toml beside it")
    check_regular(folder)
    config = read_config(folder / "config.toml")
    with reading(folder) as connection:
        facts = {str(key): str(value) for key, value in connection.execute("SELECT key, value FROM run")}
        (latest,) = connection.execute("SELECT MAX(time) FROM clock").fetchone()
    if facts.get("status") == "running":
        if facts.get("host", socket.gethostname()) == socket.gethostname():
            facts["status"] = "running" if alive(facts.get("pid", "")) else "killed"
        elif time.time() - (latest or 0.0) > SILENCE:
            facts["status"] = "silent"
    return StoredRun(folder, config, facts)


class _Table(BaseModel):
    """Table of ``config.toml`` with the keys that reports need; other keys are not checked."""

    model_config = ConfigDict(extra="allow", strict=True)


class _Training(_Table):
    batch_size: int
    iterations: int | None = None
    epochs: int | None = None


class _Probe(_Table):
    layers: Annotated[list[str], Field(min_length=1)]
    units: Annotated[list[int], Field(min_length=1)] | Literal["all"]


class _Run(_Table):
    method: str
    seed: int
    learning_rate: Annotated[float, Field(allow_inf_nan=False)]


class _Config(_Table):
    name: str
    data: dict[str, Any]
    model: dict[str, Any]
    training: _Training
    probe: _Probe
    run: _Run


def read_config(path: Path) -> dict[str, Any]:
    """The contents of a run's config.toml, with all that reports need."""
    try:
        config = tomllib.loads(path.read_text(encoding="utf-8"))
        _Config.model_validate(config)
    except ValidationError as error:
        first = error.errors()[0]
        *tables, last = map(str, first["loc"])
        where = f" in [{'.'.join(tables)}]" if tables else ""
        words = f"it has no {last!r}{where}" if first["type"] == "missing" else f"{last!r}{where}: {first['msg']}"
        raise RunError(f"{path} is damaged: {words}") from None
    except OSError as error:
        raise RunError(f"{path} cannot be read: {error.strerror or error}") from None
    except (ValueError, RecursionError) as error:
        raise RunError(f"{path} is damaged: {error}") from None
    return config


def alive(pid: str) -> bool:
    """Whether a process of that number runs on this machine."""
    try:
        if int(pid) <= 0:
            return False
        os.kill(int(pid), 0)
    except (ProcessLookupError, ValueError, OverflowError):
        return False
    except PermissionError:
        return True
    return True


def moment(text: str) -> float | None:
    """Seconds since 1970 of a time in the log's format; None if it is not in this format."""
    try:
        return datetime.strptime(text, "%Y-%m-%dT%H:%M:%S%z").timestamp()
    except (ValueError, OverflowError):
        return None


def run_folders(folder: Path | str) -> list[Path]:
    """The run folders at or below ``folder``, in the order of their paths; links to folders are not followed."""
    folder = Path(folder)
    if not folder.is_dir():
        raise RunError(f"no folder {folder}")
    # a run holds no other run: what else lies in it need not be looked through
    found = []
    for place, below, files in os.walk(folder):
        if LOG in files or LOG in below:
            found.append(Path(place))
            below.clear()
    return sorted(found)


def find_runs(folder: Path | str) -> Iterator[StoredRun]:
    """Every run at or below ``folder``, in the order of their paths.

    Raises
    ------
    RunError
        The folder does not exist; on the way, one of the runs is damaged.
    """
    return map(open_run, run_folders(folder))


def place_name(layer: str, unit: object, between: str = ".") -> str:
    """Name of the place where something was measured; a whole block has no unit.

    Examples
    --------
    >>> place_name("fc", 3), place_name("fc", None)
    ('fc.3', 'fc')
    """
    return f"{layer}{between}{unit}" if isinstance(unit, Integral) else layer


def printable(text: str) -> str:
    """A text with escapes for characters that steer a terminal, or that cannot be printed: a path may hold any."""
    return UNPRINTABLE.sub(lambda found: ascii(found[0])[1:-1], text)
