"""The run folder: ``config.toml`` and the append-only log ``run.sqlite``, written by one process, read by any."""

from hesscond.study.log import OVER, RunLog, can_be_resumed, check_free, check_no_run
from hesscond.study.schema import KEYS, PROBE_MEANING, SCHEMA_VERSION, TABLES
from hesscond.study.stored import StoredRun, find_runs, open_run

__all__ = [
    "KEYS",
    "OVER",
    "PROBE_MEANING",
    "SCHEMA_VERSION",
    "TABLES",
    "RunLog",
    "StoredRun",
    "can_be_resumed",
    "check_free",
    "check_no_run",
    "find_runs",
    "open_run",
]
