"""Studies: config (TOML) → runner (trains and probes) → store (the run folder).

A new study is one TOML file in the folder ``studies``; nothing here needs to change for it.
"""

from typing import TYPE_CHECKING

from hesscond.lazy import attach

if TYPE_CHECKING:
    from hesscond.problem.devices import resolve_device
    from hesscond.runs import StoredRun, find_runs, open_run
    from hesscond.study.config import StudyConfig
    from hesscond.study.datasets import load_data
    from hesscond.study.files import built_in, load_study
    from hesscond.study.runner import Progress, RunPlan, check_plan, run
else:
    __getattr__, __dir__ = attach(__name__)

__all__ = [
    "Progress",
    "RunPlan",
    "StoredRun",
    "StudyConfig",
    "built_in",
    "check_plan",
    "find_runs",
    "load_data",
    "load_study",
    "open_run",
    "resolve_device",
    "run",
]
