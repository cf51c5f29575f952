"""Figures and tables of the papers: their runs, what is claimed of them, and the numbers that were published."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from hesscond.errors import ConfigError
from hesscond.study import files, grid
from hesscond.study.config import StudyConfig
from hesscond.study.runner import RunPlan


@dataclass(frozen=True)
class Panel:
    """Part of a figure: a network on a data set, trained with the methods of the study, and the paper's numbers."""

    study: StudyConfig
    published: tuple[files.Published, ...]

    @property
    def name(self) -> str:
        """The panel's name; empty in a figure of one."""
        return self.study.panel

    @property
    def title(self) -> str:
        """Title above the panel."""
        return self.study.title or self.study.panel or self.study.name


@dataclass(frozen=True)
class Replication:
    """A figure or table of a paper."""

    name: str
    source: str
    panels: tuple[Panel, ...]
    claims: tuple[files.Claim, ...]
    cost: files.Cost


def replication(name: str, scale: str | None = None) -> Replication:
    """The figure or table called ``name``, or one panel of it (``NAME/PANEL``), or that of a TOML file."""
    of_file, chosen = files.split_name(name)
    file = files.StudyFile.named(of_file)
    layout = file.layout
    published = {table.name: tuple(table.paper) for table in layout.panels} or {"": tuple(layout.paper)}
    studies = [file.study(panel, scale) for panel in ([chosen] if chosen else file.panels or [""])]
    panels = tuple(Panel(study, published[study.panel]) for study in studies)
    for panel in panels:
        known = [entry.name for entry in panel.study.methods]
        if not known:
            raise ConfigError(
                f"study {panel.study.full_name!r} is of no figure or table: it names no [[methods]]; use hesscond study"
            )
        claims = [claim for claim in layout.claims if panel.name in claim.of_panels]
        named = [name for claim in claims for comparison in claim.comparisons for name in comparison.names]
        for name in [*named, *(name for row in panel.published for name in row.values)]:
            if name not in known:
                raise ConfigError(
                    f"{file.path}: panel {panel.name!r} has no method {name!r}, it has {', '.join(known)}"
                )
    if unknown := sorted({name for claim in layout.claims for name in claim.of_panels} - set(published)):
        raise ConfigError(f"{file.path}: a claim is of the panel {unknown[0]!r}, which is not there")
    kept = tuple(claim for claim in layout.claims if {panel.name for panel in panels} & set(claim.of_panels))
    first = studies[0]
    return Replication(first.full_name if chosen else first.name, first.source, panels, kept, layout.replicate)


def plan_replication(
    figure: Replication, seeds: int, out: Path, device: torch.device, overrides: grid.Overrides
) -> list[RunPlan]:
    """One plan for every panel, method and seed, all of the first seed before those of the next."""
    if seeds < 1:
        raise ConfigError(f"--seeds must be at least 1, got {seeds}")
    runs = []
    for panel in figure.panels:
        for entry in panel.study.methods:
            variant = panel.study.variant(entry.name)
            study = overrides.apply(variant.study)
            rate = overrides.learning_rate or study.learning_rate(entry.name, study.training.batch_size)
            name = "-".join([*([grid.plain(panel.name)] if panel.name else []), grid.folder_name(variant)])
            runs.append((study, variant, rate, name))
    return [
        RunPlan(study, variant.method, seed, rate, out / f"{name}-seed{seed}", device, variant.label)
        for seed in range(seeds)
        for study, variant, rate, name in runs
    ]
