"""The tables of a run's log ``run.sqlite``, and their version: logs of no other are read."""

from __future__ import annotations

import sqlite3

from hesscond.errors import RunError

#: Of `TABLES` and all else below; a change of theirs is a new version.
SCHEMA_VERSION = 5
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
        "rank_preconditioned": "INTEGER",
        "resolved_preconditioned": "INTEGER",
        "rank_own": "INTEGER",
        "resolved_own": "INTEGER",
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

#: What makes a row the same: a resumed run measures some of them a second time.
KEYS = {
    "probe": ("iteration", "data", "layer", "unit"),
    "readings": ("iteration", "data", "layer", "unit", "coordinates"),
    "statements": ("iteration", "data", "layer", "unit", "statement", "claim"),
}

#: Beside `TABLES`: facts of the run as a whole, and how many iterations were logged by when (seconds since 1970), at
#: most a row a second, in each session (the process that started the run, and those that went on with it).
BESIDE = {
    "run": {"key": "TEXT PRIMARY KEY", "value": "TEXT"},
    "clock": {"session": "INTEGER", "time": "REAL", "iterations": "INTEGER"},
}

PROBE_MEANING = {
    "iteration": "optimizer steps taken when it was measured",
    "data": "samples of the Hessian: batch (the mini-batch about to be trained on) or train (the training set)",
    "kappa": "κ(H) in the plain parameters [b, w]; inf if unresolved",
    "kappa_preconditioned": "κ(PᵀHP) with P = U D from the raw statistics of the same samples, whatever the method",
    "kappa_own": "κ in the method's own coordinates: P of its step, a tangent space, … (vanilla: equal to kappa)",
    "kappa_D": "κ(D), D = diag(1, 1/σ) from the raw statistics of the same samples, dead features left out",
    "kappa_D_eps": "the same with Algorithm 2's ε₁, ε₂",
    "kappa_D_running": "κ(D) of the method's raw running statistics (empty where it has none)",
    "kappa_D_running_eps": "the same with ε₁, ε₂: the D that the step used",
    "dead": "input features constant over the samples (σ = 0)",
    "coordinates": "the coordinates of kappa_own",
    "rank": "rank of H; with nullity it adds up to n_params",
}


def create(connection: sqlite3.Connection) -> None:
    """Make the tables of this version in an empty database, inside the transaction that is open."""
    for table, columns in (TABLES | BESIDE).items():
        spec = ", ".join(f"{name} {kind}" for name, kind in columns.items())
        connection.execute(f"CREATE TABLE {table} ({spec})")
    for table, key in KEYS.items():
        connection.execute(f"CREATE UNIQUE INDEX one_{table} ON {table} ({', '.join(key)})")
    connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
    connection.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")


def tables_of(connection: sqlite3.Connection) -> set[str]:
    """The tables in a database.

    Raises
    ------
    RunError
        There is something in it that computes: a view, a trigger, a virtual table. No log has any.
    """
    tables = set()
    # no bound on what a schema may hold but its file's size, and sqlite has parsed all of it already
    for kind, name, definition in connection.execute("SELECT type, name, sql FROM sqlite_master"):
        if kind not in ("table", "index") or str(definition).upper().startswith("CREATE VIRTUAL"):
            raise RunError(f"it has a {kind} {str(name)!r}, which no log has")
        if kind == "table":
            tables.add(str(name).lower())
    return tables


def check_schema(connection: sqlite3.Connection) -> None:
    """See that a database is a log of this version, with all tables and columns.

    Raises
    ------
    RunError
        It is not; the sentence lacks the file's name.
    """
    (application,) = connection.execute("PRAGMA application_id").fetchone()
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    there = tables_of(connection)
    # the first logs did not say what they are
    early = (application, version) == (0, 0) and {"training", "probe"} <= there
    if application != APPLICATION_ID and not early:
        raise RunError("it is a database of another program")
    if version > SCHEMA_VERSION:
        raise RunError(
            f"its schema version {version} is of a later hesscond (this one reads {SCHEMA_VERSION}): update hesscond"
        )
    if version < SCHEMA_VERSION:
        raise RunError(
            f"its schema version {version or 'of the first logs'} is of an earlier hesscond (this one reads "
            f"{SCHEMA_VERSION}, whose columns mean something else): read it with that, or run the study again"
        )
    for table, columns in (TABLES | BESIDE).items():
        if table not in there:
            raise RunError(f"it has no table {table}")
        hidden = {str(row[1]): row[6] for row in connection.execute(f"PRAGMA table_xinfo({table})")}
        for column in columns:
            if hidden.get(column) != 0:  # anything else is computed when read
                raise RunError(f"its table {table} has no column {column}")
