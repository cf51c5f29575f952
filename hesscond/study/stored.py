"""Reads run folders: what a run was, how it stands, and the tables of its log."""

from __future__ import annotations

import math
import os
import socket
import time
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hesscond.errors import ConfigError, RunError
from hesscond.study.reading import (
    FROM_THE_START,
    LOG,
    check_regular,
    check_text,
    check_values,
    count,
    reading,
    rows,
    shortened,
)
from hesscond.study.schema import TABLES

if TYPE_CHECKING:
    import pandas as pd

#: Seconds after which a run on another machine, of which nothing was heard since, is no longer called running.
SILENCE = 900.0

#: Largest config.toml in bytes, and how deep its tables nest: far more than any study has.
LARGEST_CONFIG, DEEPEST_CONFIG = 256_000, 20
#: Most dots in a line of it: the time tomllib takes for a key grows with their square.
MOST_DOTS = 200
#: The largest integer of a seed or a size.
LARGEST = 2**63 - 1


@dataclass(frozen=True)
class StoredRun:
    """A run folder, read only.

    Attributes
    ----------
    folder
        Where it lies.
    config
        The contents of ``config.toml``; ``config["run"]`` has method, seed, learning rate and versions.
    facts
        Status, message and times; status is running, finished, interrupted, diverged, failed or killed, or silent: it
        runs on another machine, and nothing was heard of it for a quarter of an hour.
    """

    folder: Path
    config: dict[str, Any]
    facts: dict[str, str]

    @property
    def method(self) -> str:
        """The method's name."""
        return str(self.config["run"]["method"])

    @property
    def seed(self) -> int:
        """The seed."""
        return int(self.config["run"]["seed"])

    @property
    def label(self) -> str:
        """METHOD-seedS."""
        return f"{self.method}-seed{self.seed}"

    @property
    def status(self) -> str:
        """How the run stands."""
        return self.facts.get("status", "unknown")

    @property
    def iterations(self) -> int:
        """Training iterations in the log."""
        with reading(self.folder) as connection:
            return count(connection, "training")

    @property
    def total(self) -> int | None:
        """Iterations that the run is to have; None where neither its config nor its log says so yet."""
        training = self.config["training"]
        if training.get("iterations") is not None:
            return int(training["iterations"])
        if (total := self.facts.get("total", "")).isascii() and total.isdigit() and len(total) < len(str(LARGEST)):
            return int(total)
        return None

    @property
    def last_loss(self) -> float:
        """The training loss of the last iteration in the log; NaN if there is none."""
        with reading(self.folder) as connection:
            found = connection.execute("SELECT loss FROM training ORDER BY iteration DESC LIMIT 1").fetchone()
            check_values("training.loss", "REAL", list(found or ()))
        return float(found[0]) if found and found[0] is not None else math.nan

    @property
    def seconds(self) -> float:
        """How long the run has worked, breaks left out; NaN if nothing was logged yet."""
        spans: dict[int, list[float]] = {}
        clock = self.rows("clock")[1]
        for session, at in zip(clock["session"], clock["time"], strict=True):
            spans.setdefault(session, []).append(at or 0.0)
        return float(sum(max(0.0, span[-1] - span[0]) for span in spans.values())) if spans else math.nan

    def rows(self, table: str, *, after: int = FROM_THE_START) -> tuple[list[int], dict[str, list[Any]]]:
        """The rows of a table that came after row number ``after``: their numbers, and the values by column.

        Raises
        ------
        RunError
            The log is damaged.
        """
        with reading(self.folder) as connection:
            return rows(connection, table, after=after)

    def table(self, name: str) -> pd.DataFrame:
        """A table of the log: ``"training"``, ``"probe"``, ``"evaluation"``, ``"statements"`` or ``"readings"``.

        Readings are κ's in further coordinates that the method has, one row each; statements are the published ones
        that were checked, a row for each claim (``known``: whether it is known to hold; ``used``: how much of what is
        allowed was used).

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
                strange = next((v for v in own if v not in (0, 1, None)), None)
                if strange is not None:
                    raise RunError(f"the log {self.folder / LOG} is damaged: {name}.{column} holds {strange}")
                columns[column] = pd.Series(own, dtype="boolean")
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
        found = connection.execute("SELECT key, value FROM run LIMIT 1000").fetchall()
        for column in zip(*found, strict=True):
            check_values("run", "TEXT", list(column))
        clock = connection.execute("SELECT MAX(time) FROM clock").fetchone()
    facts = {str(key): str(value) for key, value in found}
    if facts.get("status") == "running":
        if facts.get("host", socket.gethostname()) == socket.gethostname():
            facts["status"] = "running" if alive(facts.get("pid", "")) else "killed"
        elif time.time() - (clock[0] or 0.0) > SILENCE:
            facts["status"] = "silent"
    return StoredRun(folder, config, facts)


def read_config(path: Path) -> dict[str, Any]:
    """The contents of a run's config.toml, with all that reports need.

    Raises
    ------
    RunError
        It is damaged, or no file that a run leaves behind.
    """
    try:
        if path.stat().st_size > LARGEST_CONFIG:
            raise ValueError(f"it is larger than {LARGEST_CONFIG} bytes")
        text = path.read_text(encoding="utf-8")
        if any(line.count(".") > MOST_DOTS for line in text.splitlines()):
            raise ValueError(f"it has a line with more than {MOST_DOTS} dots")
        config = tomllib.loads(text)
        check_contents(config, "config")
        check_config(config)
    except KeyError as error:
        raise RunError(f"{path} is damaged: it has no {error}") from None
    except OSError as error:
        raise RunError(f"{path} cannot be read: {error.strerror or error}") from None
    except (ValueError, TypeError, LookupError, RecursionError, RunError) as error:
        raise RunError(f"{path} is damaged: {error}") from None
    return config


def check_contents(value: Any, where: str, depth: int = 0) -> None:
    """Refuse what no study has: tables in tables without end, texts that steer a terminal, integers without bound.

    Raises
    ------
    RunError
        There is such a thing.
    """
    if depth > DEEPEST_CONFIG:
        raise RunError(f"its tables nest more than {DEEPEST_CONFIG} deep")
    if isinstance(value, str):
        check_text(where, value)
    elif isinstance(value, int) and abs(value) > LARGEST:
        raise RunError(f"{where} holds an integer of {value.bit_length()} bits")
    elif isinstance(value, list):
        for item in value:
            check_contents(item, where, depth + 1)
    elif isinstance(value, dict):
        for key, item in value.items():
            check_text("a key", key)
            check_contents(item, key, depth + 1)


def check_config(config: dict[str, Any]) -> None:
    """See that what reports need of a config.toml is there, of the right kind.

    Raises
    ------
    KeyError
        Something is missing.
    RunError
        Something is of another kind.
    """
    for key in ("data", "model", "training", "probe", "run"):
        of_kind(key, config[key], dict)
    training, probe, run = config["training"], config["probe"], config["run"]
    of_kind("name", config["name"], str)
    of_kind("training.batch_size", training["batch_size"], int)
    for key in ("iterations", "epochs"):
        if key in training:
            of_kind(f"training.{key}", training[key], int)
    for key, kind in (("layers", str), ("units", int)):
        of_kind(f"probe.{key}", probe[key], list)
        if not probe[key]:
            raise RunError(f"probe.{key} is empty")
        for item in probe[key]:
            of_kind(f"probe.{key}", item, kind)
    of_kind("run.method", run["method"], str)
    of_kind("run.seed", run["seed"], int)
    rate = run["learning_rate"]
    if not isinstance(rate, int):
        of_kind("run.learning_rate", rate, float)
    if not math.isfinite(rate):
        raise RunError(f"run.learning_rate is {rate}")


def of_kind(key: str, value: Any, kind: type) -> None:
    """Refuse a value of another type."""
    if type(value) is not kind:
        raise RunError(f"{key} should be of type {kind.__name__}, not {shortened(value)}")


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
    """Seconds since 1970 of a time as the log writes it; None if it is none."""
    try:
        return datetime.strptime(text, "%Y-%m-%dT%H:%M:%S%z").timestamp()
    except (ValueError, OverflowError):
        return None


def run_folders(folder: Path | str) -> list[Path]:
    """The run folders at or below ``folder``, in the order of their paths; links to folders are not followed.

    Raises
    ------
    RunError
        The folder does not exist.
    """
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
