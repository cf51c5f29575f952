"""Studies: config (TOML) → runner (trains and probes) → store (the run folder).

A new study is one TOML file in the folder ``studies``; nothing here needs to change for it.
"""

from typing import TYPE_CHECKING

from hesscond.lazy import attach

if TYPE_CHECKING:
    from hesscond.problem.devices import resolve_device as resolve_device
    from hesscond.runs import StoredRun as StoredRun, find_runs as find_runs, open_run as open_run
    from hesscond.study.config import StudyConfig as StudyConfig
    from hesscond.study.datasets import load_data as load_data
    from hesscond.study.files import built_in as built_in, load_study as load_study
    from hesscond.study.runner import Progress as Progress, RunPlan as RunPlan, check_plan as check_plan, run as run
else:
    __getattr__, __dir__, __all__ = attach(__name__)
