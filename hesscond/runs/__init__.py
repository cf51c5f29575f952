"""The run folder: ``config.toml``, the log ``run.sqlite`` and checkpoints; how it is written and read.

The only door to it for studies, watches, reports, expectations, exports and commands; nothing here knows the engine.
"""

from typing import TYPE_CHECKING

from hesscond.lazy import attach

if TYPE_CHECKING:
    from hesscond.runs.log import (
        BusyError as BusyError,
        Checkpoints as Checkpoints,
        RunLog as RunLog,
        can_be_resumed as can_be_resumed,
        check_free as check_free,
        check_outside_runs as check_outside_runs,
    )
    from hesscond.runs.store import (
        LOG as LOG,
        OPTIMA as OPTIMA,
        OVER as OVER,
        PLACE as PLACE,
        TABLES as TABLES,
        StoredRun as StoredRun,
        find_runs as find_runs,
        open_run as open_run,
        place_name as place_name,
        printable as printable,
        reading as reading,
        run_folders as run_folders,
    )
else:
    __getattr__, __dir__, __all__ = attach(__name__)
