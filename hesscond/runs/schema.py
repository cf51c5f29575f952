"""The tables of a run's log ``run.sqlite``."""

from __future__ import annotations

import sqlite3

from hesscond.errors import RunError
from hesscond.sheets import COORDINATES, ends, in_coordinates, in_sqlite

#: Version of all tables below; it goes up when they change.
SCHEMA_VERSION = 9
#: "HESS", in the header of the file.
APPLICATION_ID = 0x48455353

#: Condition numbers of a block, and kinds of scaling of which the best is bounded.
KAPPAS = ("kappa", *(in_coordinates("kappa", own) for own in COORDINATES))
OPTIMA = ("diagonal", "kronecker")

#: Columns that say where something was measured.
PLACE = {"iteration": "INTEGER", "epoch": "INTEGER", "data": "TEXT", "layer": "TEXT", "unit": "INTEGER"}

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
        **{in_coordinates(name, own): "INTEGER" for own in COORDINATES for name in ("rank", "resolved")},
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
    there = {name for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
    for table in TABLES | BESIDE:
        if table not in there:
            raise RunError(f"it has no table {table}")
