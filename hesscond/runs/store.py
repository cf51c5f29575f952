"""Reader of run folders: ``config.toml``, and the append-only log ``run.sqlite`` with the tables of its schema."""

from __future__ import annotations

import math
import os
import re
import socket
import sqlite3
import time
import tomllib
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from numbers import Integral
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hesscond.errors import ConfigError, RunError
from hesscond.lazy import without_folders
from hesscond.sheets import COORDINATES, ends, in_coordinates, in_sqlite

if TYPE_CHECKING:
    import pandas as pd

#: Version of all tables below; it goes up when they change.
SCHEMA_VERSION = 9
#: "HESS", in the header of the file.
APPLICATION_ID = 0x48455353

#: Condition numbers of a block, and kinds of scaling of which the best is bounded.
KAPPAS = ("kappa", *(in_coordinates("kappa", system) for system in COORDINATES))
OPTIMA = ("diagonal", "kronecker")

#: Columns that say where something was measured.
PLACE = {"iteration": "INTEGER", "epoch": "INTEGER", "data": "TEXT", "layer": "TEXT", "unit": "INTEGER"}

#: Columns of the log's tables with their SQLite types.
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
        **PLACE,
        "samples": "INTEGER",
        "n_params": "INTEGER",
        **dict.fromkeys((name for kappa in KAPPAS for name in ends(kappa)), "REAL"),
        "kappa_D": "REAL",
        "kappa_D_eps": "REAL",
        "kappa_D_running": "REAL",
        "kappa_D_running_eps": "REAL",
        "dead": "INTEGER",
        **in_sqlite("rank", "nullity", "negative", "resolved", "lambda_max", "lambda_min"),
        "trace": "REAL",
        **{in_coordinates(name, system): "INTEGER" for system in COORDINATES for name in ("rank", "resolved")},
        "lambda_max_own": "REAL",
        **dict.fromkeys((f"kappa_{kind}_{end}" for kind in OPTIMA for end in ("lower", "upper")), "REAL"),
        "coordinates": "TEXT",
        "solver": "TEXT",
    },
    "statements": {
        **PLACE,
        "statement": "TEXT",
        "claim": "TEXT",
        "known": "INTEGER",
        "status": "TEXT",
        "used": "REAL",
        "reason": "TEXT",
    },
    "readings": {
        **PLACE,
        "coordinates": "TEXT",
        **in_sqlite(*ends("kappa"), "rank", "nullity", "negative", "resolved", "solver"),
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

#: The values of columns as `sqlite3` gives them.
PYTHON: dict[str, tuple[type, ...]] = {"INTEGER": (int,), "REAL": (float, int), "TEXT": (str,)}


def check_schema(connection: sqlite3.Connection) -> None:
    """Check that a database is a log of this version with all tables."""
    (application,) = connection.execute("PRAGMA application_id").fetchone()
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    if application != APPLICATION_ID:
        raise RunError("it is no log of hesscond")
    if version != SCHEMA_VERSION:
        raise RunError(
            f"its schema version is {version}, but this hesscond reads {SCHEMA_VERSION}: take the hesscond that the "
            "run's config.toml names, or run the study again"
        )
    # no view, which may compute without end
    tables = {name for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
    for table in TABLES | BESIDE:
        if table not in tables:
            raise RunError(f"it has no table {table}")


LOG = "run.sqlite"
#: Name of the data of a watched training.
WATCHED = "watched"
#: Statuses of a run that is over and need not be resumed.
OVER = ("finished", "diverged")
#: Seconds after which a run on another machine, of which nothing was heard since, is no longer called running.
SILENCE = 900.0
#: Characters that steer a terminal or turn the direction of text, and bytes of a path that are no UTF-8.
UNPRINTABLE = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


@contextmanager
def reading(folder: Path) -> Iterator[sqlite3.Connection]:
    """Open the log of a run read-only; nothing that a damaged log contains is run."""
    path = folder / LOG
    # without a write-ahead log nobody writes, and SQLite must not begin one because the header asks for it
    written = path.with_name(f"{LOG}-wal").exists()
    address = f"{path.absolute().as_uri()}?mode=ro{'' if written else '&immutable=1'}"
    try:
        with closing(sqlite3.connect(address, uri=True, isolation_level=None)) as connection:
            connection.execute("PRAGMA query_only = ON")
            connection.execute("PRAGMA trusted_schema = OFF")
            (page,) = connection.execute("PRAGMA page_size").fetchone()
            if not written and path.stat().st_size % page:
                raise RunError("it was cut off, or is no SQLite database")
            check_schema(connection)
            yield connection
    except RunError as error:
        raise error if str(path) in str(error) else RunError(f"the log {path} cannot be read: {error}") from None
    except (sqlite3.Error, UnicodeDecodeError, OverflowError) as error:
        # SQLite needs an index of the write-ahead log that a kill left behind
        hint = ": copy the run to where it can be written" if written and not os.access(folder, os.W_OK) else ""
        raise RunError(f"the log {path} cannot be read: {error}{hint}") from None
    except OSError as error:
        raise RunError(f"the log {path} cannot be read: {error.strerror or error}") from None


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
        Status, message and times; status is running, finished, interrupted, diverged, failed or killed ("killed or not
        closed": a watch), or silent: the run is on another machine, and its log has not changed for a quarter of an
        hour.
    """

    folder: Path
    config: dict[str, Any]
    facts: dict[str, str]

    @property
    def method(self) -> str:
        """The method, as ``--method`` says it, without the folder of a file."""
        return without_folders(str(self.config["run"]["method"]))

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
            row = connection.execute("SELECT loss FROM training ORDER BY iteration DESC LIMIT 1").fetchone()
        return float(row[0]) if row and row[0] is not None else math.nan

    @property
    def seconds(self) -> float:
        """Seconds that the run has worked, breaks left out; NaN if nothing was logged yet."""
        worked = self.worked
        return max(worked.values()) if worked else math.nan

    @property
    def worked(self) -> dict[int, float]:
        """Seconds that the run had worked, breaks left out, by the number of iterations logged by then."""
        clock, seconds = self.rows("clock"), {}
        session, began, before, latest = None, 0.0, 0.0, 0.0
        for number, at, iterations in zip(clock["session"], clock["time"], clock["iterations"], strict=True):
            if number != session:
                session, began, before = number, at or 0.0, latest
            latest = max(latest, before + (at or 0.0) - began)
            seconds[iterations] = latest
        return seconds

    def rows(self, table: str) -> dict[str, list[Any]]:
        """Values of a table by column, in the order in which they were logged.

        Raises
        ------
        RunError
            The log is damaged.
        """
        columns = (TABLES | BESIDE)[table]
        with reading(self.folder) as connection:
            records = connection.execute(f"SELECT {', '.join(columns)} FROM {table} ORDER BY rowid").fetchall()
            values = list(map(list, zip(*records, strict=True))) if records else [[] for _ in columns]
            for (column, kind), cells in zip(columns.items(), values, strict=True):
                allowed = PYTHON[kind.split()[0]] + (() if column == "iteration" else (type(None),))
                if strange := [value for value in cells if not isinstance(value, allowed)]:
                    raise RunError(f"{table}.{column} holds {strange[0]!a}, which is not of type {kind}")
        return dict(zip(columns, values, strict=True))

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
        values = self.rows(name)
        columns = {}
        for column, kind in TABLES[name].items():
            cells = values[column]
            if kind == "REAL":
                columns[column] = pd.Series(cells, dtype=float)
            elif column.startswith("resolved"):
                columns[column] = pd.Series([None if v is None else v != 0 for v in cells], dtype="boolean")
            elif kind.startswith("INTEGER"):
                columns[column] = pd.Series(cells, dtype="Int64" if None in cells else "int64")
            else:
                columns[column] = pd.Series(cells, dtype=None if cells else object)
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
        is_run = {LOG, "config.toml"} <= set(os.listdir(folder))
    except PermissionError as error:
        raise RunError(f"{folder} cannot be read: {error.strerror}") from None
    except (OSError, ValueError):  # no folder; a null character
        is_run = False
    if not is_run:
        raise RunError(f"{folder} is not a run folder: it has not both {LOG} and config.toml")
    config = read_config(folder / "config.toml")
    with reading(folder) as connection:
        facts = {str(key): str(value) for key, value in connection.execute("SELECT key, value FROM run")}
        (latest,) = connection.execute("SELECT MAX(time) FROM clock").fetchone()
    if facts.get("status") == "running":
        if facts.get("host", socket.gethostname()) == socket.gethostname():
            # of a watch it is the user who closes it
            gone = "killed or not closed" if config["data"].get("name") == WATCHED else "killed"
            facts["status"] = "running" if alive(facts.get("pid", "")) else gone
        elif time.time() - (latest or 0.0) > SILENCE:
            facts["status"] = "silent"
    return StoredRun(folder, config, facts)


#: What reports need of ``config.toml``: the kinds of values by table and key.
NEEDED: dict[str, dict[str, type | tuple[type, ...]]] = {
    "": {"name": str, "data": dict, "model": dict, "training": dict, "probe": dict, "run": dict},
    "training": {"batch_size": int},
    "probe": {"layers": list, "units": (list, str)},
    "run": {"method": str, "seed": int, "learning_rate": (float, int)},
}


def read_config(path: Path) -> dict[str, Any]:
    """Contents of a run's ``config.toml``, which have all that reports need."""
    try:
        config = tomllib.loads(path.read_text(encoding="utf-8"))
        for table, keys in NEEDED.items():
            content, where = (config[table], f" in [{table}]") if table else (config, "")
            for key, kind in keys.items():
                if key not in content:
                    raise ValueError(f"it has no {key!r}{where}")
                if not isinstance(content[key], kind):
                    raise ValueError(f"{key!r}{where} cannot be {content[key]!a}")
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


def run_folders(folder: Path | str) -> list[Path]:
    """The run folders at or below ``folder``, in the order of their paths; links to folders are not followed.

    Folders that cannot be read are among them: they may be runs, and `open_run` says why it cannot tell.
    """
    folder = Path(folder)
    if folder.is_file():
        raise RunError(f"{folder} is a file: give the folders of runs, or {folder.parent} for all that are in it")
    if not folder.is_dir():
        raise RunError(f"no folder {folder}")
    # a run holds no other run: what else lies in it need not be looked through
    folders: list[Path] = []
    for place, below, files in os.walk(folder, onerror=lambda error: folders.append(Path(error.filename))):
        if LOG in files or LOG in below:
            folders.append(Path(place))
            below.clear()
    return sorted(folders)


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
    return UNPRINTABLE.sub(lambda match: ascii(match[0])[1:-1], text)
