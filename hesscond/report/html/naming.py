"""Names of the runs on a page, all different."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hesscond.report.html.text import shortened

if TYPE_CHECKING:
    from hesscond.study.store import StoredRun


@dataclass(frozen=True)
class NamedRun:
    """A run, what it is called on the page, and what its configuration is called as a file."""

    run: StoredRun
    name: str
    file: str


def named_runs(runs: Sequence[StoredRun]) -> list[NamedRun]:
    """Method and seed; where that is not enough learning rate and batch size too, else a number."""
    plain = [f"{shortened(run.method)}, seed {run.seed}" for run in runs]
    fuller = [
        name
        if plain.count(name) == 1
        else f"{name}, lr {run.config['run']['learning_rate']:g}, batch {run.config['training']['batch_size']}"
        for name, run in zip(plain, runs, strict=True)
    ]
    numbered = [
        name if fuller.count(name) == 1 else f"{name} #{fuller[: place + 1].count(name)}"
        for place, name in enumerate(fuller)
    ]
    files = [re.sub(r"[^A-Za-z0-9._-]+", "-", run.label)[:60].strip("-.") or "run" for run in runs]
    return [
        NamedRun(run, name, file if files.count(file) == 1 else f"{file}-{files[: place + 1].count(file)}")
        for place, (run, name, file) in enumerate(zip(runs, numbered, files, strict=True))
    ]
