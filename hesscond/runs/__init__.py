"""The run folder: ``config.toml``, the log ``run.sqlite`` and checkpoints; how it is written and read.

The only door to it for studies, watches, reports, expectations, exports and commands; nothing here knows the engine.
"""

from typing import TYPE_CHECKING

from hesscond.lazy import attach

if TYPE_CHECKING:
    from hesscond.runs.checkpoint import BusyError, Checkpoints
    from hesscond.runs.log import RunLog, can_be_resumed, check_free, check_no_run
    from hesscond.runs.store import (
        LOG,
        OPTIMA,
        OVER,
        PLACE,
        TABLES,
        StoredRun,
        find_runs,
        open_run,
        place_name,
        printable,
        reading,
        run_folders,
    )
else:
    __getattr__, __dir__ = attach(__name__)

__all__ = [
    "LOG",
    "OPTIMA",
    "OVER",
    "PLACE",
    "TABLES",
    "BusyError",
    "Checkpoints",
    "RunLog",
    "StoredRun",
    "can_be_resumed",
    "check_free",
    "check_no_run",
    "find_runs",
    "open_run",
    "place_name",
    "printable",
    "reading",
    "run_folders",
]
