"""``hesscond compare STUDY``: methods side by side, each at its best learning rate."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, get_args

import typer

from hesscond.commands import options
from hesscond.commands.performing import Place, loaded, perform
from hesscond.commands.printing import complain, print_table, stdout
from hesscond.errors import ConfigError
from hesscond.methods import parse, registered
from hesscond.report.sweeps import cells_frame, comparison_frame, comparison_table
from hesscond.study import RunPlan, load_study
from hesscond.study.comparison import GRID, Comparison
from hesscond.study.config import Level, StudyConfig
from hesscond.study.grid import Overrides
from hesscond.study.structure import layers_of, probed_layers
from hesscond.study.sweep import Outcome, data_key, prepare

#: `GRID` as it is written on the command line.
RATES = ",".join(f"{rate:g}" for rate in GRID)


def compare_methods(
    name: options.Study,
    method: Annotated[
        list[str] | None,
        typer.Option("--method", "-m", help="As for study; repeat for several. Default: all."),
    ] = None,
    scale: options.Scale = None,
    rates: Annotated[
        str,
        typer.Option(
            help="Learning rates, separated by commas; around: 0.1 to 10 times the method's default rate, and further "
            "if the best is at the end."
        ),
    ] = RATES,
    iterations: Annotated[int, typer.Option(help="Optimizer steps of every run.")] = 500,
    batch_size: options.BatchSize = None,
    probe_every: Annotated[
        int | None,
        typer.Option(help="Iterations between two probes of the mini-batch. Default: 10, or the study's key at."),
    ] = None,
    level: Annotated[
        list[str] | None,
        typer.Option(
            "--level",
            "-l",
            help="unit, layer or network, of all layers; repeat for several. Default: as the study says.",
        ),
    ] = None,
    seed: Annotated[
        str,
        typer.Option(
            "--seed", "--seeds", help="0,1,2 or 0:3. The rate is found with the first seed, and all are probed there."
        ),
    ] = "0",
    jobs: Annotated[int, typer.Option("--jobs", "-j", help="Runs at a time.")] = 1,
    device: options.Device = "auto",
    data_dir: options.DataDir = None,
    out: Annotated[Path | None, typer.Option(help="Folder of the runs; finished ones are not repeated.")] = None,
) -> None:
    """Train every method at each rate of a grid, probe it at its best one with every seed, and print one table.

    A method that the study or its network refuses has a row that says why; if all are refused, nothing is run.

    Example: hesscond compare fc-digits --method vanilla --method bnp --level layer --level network
    """
    study = configured(load_study(name, scale), iterations, batch_size, probe_every, options.names_of(level))
    methods = list(method) if method else [m.name for m in registered()]
    if len(set(methods)) < len(methods):
        raise ConfigError("a method is given twice")
    for text in methods:
        parse(text)
    grid, seeds = options.parse_rates("--rates", rates, "around"), options.parse_ranges(seed)
    if len(set(seeds)) < len(seeds):
        raise ConfigError(f"--seed {seed}: each may be given only once")
    where = out or Path("runs") / f"compare-{study.name}-{time.strftime('%Y%m%d-%H%M%S')}"
    place = Place.of(jobs, device)
    data = loaded(study.data, data_dir)

    def performed(plans: Sequence[RunPlan]) -> dict[Path, Outcome]:
        own = {data_key(plan): data for plan in plans}
        prepared, again = prepare(plans, own, where), f"the same command with --out {where}"
        outcomes = perform(plans, prepared, own, place, place.threads(where), again)
        for outcome in outcomes.values():
            if outcome.status == "failed":
                complain(f"{outcome.name} failed: {outcome.message}")
        return {plan.folder: outcomes[plan.folder.name] for plan in plans}

    here = data.to(place.devices[0])
    found = list(Comparison(study, here, grid, seeds, where, place.devices[0], performed).results(methods))
    frame = comparison_frame(found)
    shown = "around each method's own" if grid is None else ", ".join(f"{rate:g}" for rate in grid)
    blocks = probed_layers(study)
    title = (
        f"{study.name} · {blocks[0] if len(blocks) == 1 else f'{len(blocks)} blocks'} · batch size "
        f"{study.training.batch_size} · {iterations} iterations · {len(seeds)} seed{'s' * (len(seeds) > 1)} · rates "
        f"{shown}"
    )
    print_table(comparison_table(frame, title))
    for one in found:
        if one.refusal:
            stdout.print(f"{one.method}: {one.refusal}", soft_wrap=True)
    where.mkdir(parents=True, exist_ok=True)
    frame.to_csv(where / "comparison.csv", index=False, lineterminator="\n")
    cells_frame(found).to_csv(where / "cells.csv", index=False, lineterminator="\n")
    stdout.print(f"runs:  {where}", soft_wrap=True)
    stdout.print(f"table: {where / 'comparison.csv'}; every κ: {where / 'cells.csv'}", soft_wrap=True)


def configured(
    study: StudyConfig, iterations: int, batch_size: int | None, probe_every: int | None, levels: list[str] | None
) -> StudyConfig:
    """The study as it is run: with its length, and with the blocks to probe."""
    if probe_every is not None and probe_every < 1:
        raise ConfigError(f"--probe-every must be at least 1, got {probe_every}")
    every = probe_every if probe_every is not None else 0 if study.probe.at else 10
    study = Overrides(iterations, None, batch_size).apply(study)
    probe: dict[str, object] = {"every": every, "train_every_epochs": 0}
    if levels is not None:
        if odd := [one for one in levels if one not in get_args(Level)]:
            raise ConfigError(f"--level is unit, layer or network, not {odd[0]!r}")
        if len(set(levels)) < len(levels):
            raise ConfigError("a level is given twice")
        probe |= {"levels": levels}
        if study.probe.layers is None or "layer" not in study.probe.levels:
            probe |= {"layers": list(layers_of(study.model, study.data.form))}
    return study.model_copy(update={"probe": study.probe.model_copy(update=probe)})
