"""Logs as earlier versions of hesscond wrote them, table by table in the words of their time."""

import shutil
import sqlite3
from contextlib import closing

import tomli_w

from hesscond.study.store import RunLog

CONFIG = {
    "name": "made-up",
    "description": "for the tests",
    "data": {"name": "digits"},
    "model": {"hidden": [8]},
    "training": {"batch_size": 60, "iterations": 6},
    "probe": {"layers": ["fc2"], "units": [3]},
    "run": {"method": "bnp", "seed": 4, "learning_rate": 0.1},
}

VERSION_1 = """
CREATE TABLE run (key TEXT PRIMARY KEY, value TEXT);
CREATE TABLE training (iteration INTEGER PRIMARY KEY, epoch INTEGER, loss REAL);
CREATE TABLE evaluation (iteration INTEGER PRIMARY KEY, epoch INTEGER, test_loss REAL, test_accuracy REAL);
CREATE TABLE probe (iteration INTEGER, epoch INTEGER, data TEXT, layer TEXT, unit INTEGER, samples INTEGER,
    n_params INTEGER, kappa REAL, kappa_lower REAL, kappa_upper REAL, kappa_preconditioned REAL,
    kappa_preconditioned_lower REAL, kappa_preconditioned_upper REAL, kappa_bnp REAL, kappa_D REAL, kappa_D_eps REAL,
    kappa_D_running REAL, kappa_D_running_eps REAL, dead INTEGER, rank INTEGER, nullity INTEGER, negative INTEGER,
    resolved INTEGER, lambda_max REAL, lambda_min REAL, rank_preconditioned INTEGER, resolved_preconditioned INTEGER,
    coordinates TEXT, solver TEXT);
"""

VERSION_2 = (
    VERSION_1
    + """
CREATE TABLE statements (iteration INTEGER, epoch INTEGER, data TEXT, layer TEXT, unit INTEGER, statement TEXT,
    claim TEXT, known INTEGER, status TEXT, used REAL, reason TEXT);
CREATE TABLE readings (iteration INTEGER, epoch INTEGER, data TEXT, layer TEXT, unit INTEGER, coordinates TEXT,
    kappa REAL, kappa_lower REAL, kappa_upper REAL, rank INTEGER, nullity INTEGER, negative INTEGER, resolved INTEGER,
    solver TEXT);
CREATE UNIQUE INDEX one_probe ON probe (iteration, data, layer, unit);
CREATE UNIQUE INDEX one_readings ON readings (iteration, data, layer, unit, coordinates);
CREATE UNIQUE INDEX one_statements ON statements (iteration, data, layer, unit, statement, claim);
"""
)

VERSION_3 = (
    VERSION_2
    + """
CREATE TABLE clock (session INTEGER, time REAL, iterations INTEGER);
PRAGMA application_id = 1212502867;
PRAGMA user_version = 3;
"""
)

VERSION_4 = (
    VERSION_3
    + """
ALTER TABLE training ADD COLUMN lr REAL;
ALTER TABLE probe ADD COLUMN kappa_bnp_lower REAL;
ALTER TABLE probe ADD COLUMN kappa_bnp_upper REAL;
PRAGMA user_version = 4;
"""
)

VERSIONS = {1: VERSION_1, 2: VERSION_2, 3: VERSION_3, 4: VERSION_4}


def past_run(folder, version, *, iterations=6, status="interrupted", journal="DELETE"):
    """A run folder of that version."""
    folder.mkdir()
    (folder / "config.toml").write_text(tomli_w.dumps(CONFIG))
    with closing(sqlite3.connect(folder / "run.sqlite", isolation_level=None)) as connection:
        connection.execute(f"PRAGMA journal_mode={journal}")
        connection.executescript(VERSIONS[version])
        connection.execute("BEGIN")
        for k in range(iterations):
            connection.execute("INSERT INTO training (iteration, epoch, loss) VALUES (?, 0, ?)", [k, 1 / (k + 1)])
            connection.execute(
                "INSERT INTO probe (iteration, epoch, data, layer, unit, kappa, resolved, solver) "
                "VALUES (?, 0, 'batch', 'fc2', 3, ?, 1, 'exact')",
                [k, 10.0 ** min(k, 300)],
            )
        connection.execute("INSERT INTO evaluation VALUES (0, 0, 2.5, 0.25)")
        facts = {"status": status, "message": "", "pid": "1", "started": "2026-01-31T10:00:00+0100"}
        facts["ended"] = "2026-01-31T10:01:40+0100"
        connection.executemany("INSERT INTO run VALUES (?, ?)", facts.items())
        connection.execute("COMMIT")
    return folder


def row(iteration, **others):
    """A row of the probe table."""
    return {"iteration": iteration, "epoch": 0, "data": "batch", "layer": "fc2", "unit": 3} | others


def written_run(folder, *, iterations=20, killed=False):
    """A run folder of the present version, with a row in every table; ``killed``: as it is when its process is gone."""
    log = RunLog(folder.with_name(f"{folder.name}-alive") if killed else folder, CONFIG)
    for k in range(iterations):
        log.training(k, 0, 1 / (k + 1))
        log.commit(
            probe=[row(k, kappa=10.0**k, resolved=1, solver="exact")],
            readings=[row(k, kappa=2.0**k, coordinates="projected")],
            statements=[row(k, statement="s-1", claim="bound", known=1, status="holds", used=0.5, reason="because")],
        )
    log.commit(evaluation=[{"iteration": 0, "epoch": 0, "test_loss": 1.0, "test_accuracy": 0.5}])
    if killed:
        log.mark(pid=-1)
        shutil.copytree(log.folder, folder)
    log.close("finished")
    return folder
