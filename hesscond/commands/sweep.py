"""``hesscond sweep``: a grid of runs, many at once, that can be interrupted and resumed."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import torch
import typer

from hesscond.commands import options, performing, printing
from hesscond.errors import ConfigError, counted, did_you_mean
from hesscond.operators.threads import torch_threads
from hesscond.report import sweeps
from hesscond.runs import open_run
from hesscond.study import RunPlan, grid, listing, load_study, sections
from hesscond.study.sweep import DataKey, data_key, prepare_sweep, relative_cost

if TYPE_CHECKING:
    import pandas as pd

    from hesscond.data import Dataset


def sweep(
    name: Annotated[
        str,
        typer.Argument(help="A built-in study (hesscond studies), a .toml file, or the folder of a sweep to resume."),
    ],
    method: options.Methods = None,
    scale: options.Scale = None,
    seed: Annotated[str | None, typer.Option(help="Seeds, as 0,1,2 or 0:5 (0 to 4). Default: 0.")] = None,
    lr: Annotated[
        str | None,
        typer.Option(
            help="Learning rates, separated by commas; grid: the study's list; around: 0.1 to 10 times the method's "
            "default. Default: the study's rate."
        ),
    ] = None,
    batch_size: Annotated[str | None, typer.Option(help="Batch sizes, separated by commas.")] = None,
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=V[,V…]", help="Values of a key of the study file, as training.momentum."),
    ] = None,
    iterations: options.Iterations = None,
    epochs: options.Epochs = None,
    probe_every: options.ProbeEvery = None,
    time: Annotated[
        bool, typer.Option("--time", help="Also measure the time of an iteration relative to vanilla's.")
    ] = False,
    jobs: options.Jobs = None,
    threads: options.Threads = None,
    device: options.Devices = "auto",
    data_dir: options.DataDir = None,
    out: Annotated[Path | None, typer.Option(help="Folder of the sweep. Default: runs/sweep-NAME.")] = None,
) -> None:
    """Train a grid of methods × seeds × rates × batch sizes, several runs at a time, and show each method at its best.

    Example: hesscond sweep fc-digits -m vanilla -m bnp --seed 0:3 --lr 0.01,0.1,1 --iterations 500 --jobs 2

    The same command, or the sweep's folder, resumes an interrupted sweep, and repeats no finished run. A larger
    grid adds runs. Several sweeps may work on one folder, from several machines too.
    """
    place = performing.Place.of(jobs, device, threads)
    grid_options = (method, scale, seed, lr, batch_size, set_, iterations, epochs, probe_every, out)
    if Path(name).is_dir():
        if any(option is not None for option in grid_options):
            raise ConfigError(f"{name} is the folder of a sweep, which says what to run: leave the other options out")
        where = Path(name)
        config = grid.read_sweep(where)
        changed = {} if threads is None else {"threads": threads}
        config = sections.validated(grid.SweepConfig, config.model_dump(exclude_none=True) | changed)
    else:
        if ".toml" not in name and not listing.panels_of(name):
            hint = did_you_mean(name, (row["name"] for row in listing.described()), otherwise="see hesscond studies")
            raise ConfigError(f"there is no folder {name}, and no study of that name: {hint}")
        study = grid.Overrides(iterations, epochs, None, None, probe_every).apply(load_study(name, scale))
        where = out or Path("runs") / f"sweep-{study.name}"
        sizes = str(study.training.batch_size) if batch_size is None else batch_size
        axes = {
            "seeds": options.integers("--seed", "0" if seed is None else seed),
            "rates": "study" if lr is None else options.parse_rates("--lr", lr, ("grid", "around")),
            "batch_sizes": options.integers("--batch-size", sizes, 1),
            "settings": grid.parse_settings(set_ or []),
            "threads": place.threads(where) if threads is None else threads,
        }
        if not method:
            raise ConfigError("name at least one method with --method (hesscond methods lists them)")
        content = study.model_dump(mode="json", exclude_none=True, exclude={"run"})
        config = sections.validated(grid.SweepConfig, {"study": content, "methods": method} | axes)
    plans = grid.plan_sweep(config, where, torch.device(place.devices[0].type))
    if config.rates == "study":
        performing.tell_default_rates(plans)
    data = performing.data_of(plans, data_dir)
    prepared, kept = prepare_sweep(config, plans, data, where), dict(data) if time else {}
    outcomes = performing.perform(plans, prepared, data, place, config.threads)
    stored = [open_run(p.folder) for p in plans if outcomes[p.folder.name].status in ("finished", "diverged")]
    if stored:
        keys = dict(zip(config.axes, config.settings, strict=True))
        frame, cells = sweeps.sweep_frame(stored, keys), sweeps.cells_frame(stored)
        best = sweeps.best_frame(frame, cells, config.axes)
        if time:
            best["time"] = times(frame, plans, kept, config)
        written = {"best.csv": best, "runs.csv": frame, "cells.csv": cells}
        for file, table in written.items():
            table.to_csv(where / file, index=False, lineterminator="\n")
        title = f"{config.study.name} · {counted(len(stored), 'run')}"
        printing.print_table(sweeps.best_table(best, config.axes, title))
        printing.stdout.print(f"runs:   {where}", soft_wrap=True)
        printing.stdout.print(f"tables: {', '.join(str(where / file) for file in written)}", soft_wrap=True)
    performing.complain_of(outcomes)


def times(
    frame: pd.DataFrame, plans: list[RunPlan], data: Mapping[DataKey, Dataset], config: grid.SweepConfig
) -> list[float]:
    """Time of an iteration over vanilla's for each row of `best_frame`.

    It is measured at the lowest rate: it takes as long as at any other, and the weights move least.
    """
    by_name, costs = {plan.folder.name: plan for plan in plans}, []
    for _, group in frame.groupby(["method", "batch_size", *config.axes], sort=False, dropna=False):
        plan = by_name[group.sort_values("learning_rate")["run"].iloc[0]]
        with torch_threads(config.threads):
            costs.append(relative_cost(plan, data[data_key(plan)].to(plan.device)))
    return costs
