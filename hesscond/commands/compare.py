"""``hesscond compare STUDY``: methods side by side, each at its best learning rate."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer

from hesscond.commands import completion
from hesscond.commands.options import Scale
from hesscond.commands.printing import print_table, sign_of_life, stderr, stdout
from hesscond.errors import ConfigError
from hesscond.methods import parse, registered
from hesscond.progress import loading_bar
from hesscond.report import comparison_frame, comparison_table
from hesscond.report.selection import first_unit
from hesscond.study import load_data, load_study, resolve_device
from hesscond.study.comparison import GRID, compare
from hesscond.study.grid import Overrides
from hesscond.study.sections import LARGEST, LARGEST_RATE
from hesscond.study.store import place_name
from hesscond.study.structure import probed_layers

#: `GRID` as it is written on the command line.
RATES = ",".join(f"{rate:g}" for rate in GRID)


def compare_methods(
    name: Annotated[
        str,
        typer.Argument(help="A built-in study (hesscond studies) or a .toml file.", autocompletion=completion.studies),
    ],
    method: Annotated[
        list[str] | None,
        typer.Option(
            "--method", "-m", help="As for study; all registered ones if not given.", autocompletion=completion.methods
        ),
    ] = None,
    scale: Scale = None,
    rates: Annotated[str, typer.Option(help="Learning rates to try, separated by commas.")] = RATES,
    iterations: Annotated[int, typer.Option(help="Optimizer steps of every run.")] = 500,
    batch_size: Annotated[int | None, typer.Option(help="Samples in a mini-batch.")] = None,
    probe_every: Annotated[int, typer.Option(help="Probe the mini-batch every so many iterations.")] = 10,
    seed: Annotated[int, typer.Option(help="Of every run.")] = 0,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")] = "auto",
    data_dir: Annotated[
        Path | None, typer.Option(help="Folder that holds the data set (else $HESSCOND_DATA_DIR, the cache).")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Folder for the runs; finished ones in it are not repeated.")] = None,
) -> None:
    """Train every method at each rate of a grid, probe it at its best one, and print one table.

    Example: hesscond compare fc-digits --method vanilla --method bnp --method batchnorm
    """
    if probe_every < 1:
        raise ConfigError(f"--probe-every must be at least 1, got {probe_every}")
    if not 0 <= seed <= LARGEST:
        raise ConfigError(f"--seed must be from 0 to {LARGEST}, got {seed}")
    study = Overrides(iterations, None, batch_size, None, probe_every).apply(load_study(name, scale))
    study = study.model_copy(update={"probe": study.probe.model_copy(update={"train_every_epochs": 0})})
    methods = list(method) if method else [m.name for m in registered()]
    if len(set(methods)) < len(methods):
        raise ConfigError("a method is given twice")
    for text in methods:
        parse(text)
    grid = parse_rates(rates)
    where = out or Path("runs") / f"compare-{study.name}-{time.strftime('%Y%m%d-%H%M%S')}"
    place = resolve_device(device)
    with loading_bar(stderr, study.data.name) as on_decoded:
        data = load_data(study.data, data_dir, on_decoded).to(place)
    with sign_of_life("starting") as say:
        found = list(compare(study, methods, data, rates=grid, seed=seed, out=where, device=place, on_run=say))
    frame = comparison_frame(found)
    shown = ", ".join(f"{rate:g}" for rate in sorted(grid))
    unit = first_unit(study.probe.units, study.probe.levels)
    title = (
        f"{study.name} · {place_name(f'layer {probed_layers(study)[0]}', unit, ', unit ')} · batch size "
        f"{study.training.batch_size} · {iterations} iterations · rates {shown}"
    )
    print_table(comparison_table(frame, title))
    for one in found:
        if one.refusal:
            stdout.print(f"{one.method}: {one.refusal}", soft_wrap=True)
    where.mkdir(parents=True, exist_ok=True)
    frame.to_csv(where / "comparison.csv", index=False, lineterminator="\n")
    stdout.print(f"runs:  {where}", soft_wrap=True)
    stdout.print(f"table: {where / 'comparison.csv'}", soft_wrap=True)


def parse_rates(text: str) -> list[float]:
    """Learning rates from ``0.01,0.1``.

    Raises
    ------
    ConfigError
        Anything else.
    """
    try:
        rates = [float(part) for part in text.split(",")]
    except ValueError:
        raise ConfigError(f"--rates takes numbers separated by commas, got {text!r}") from None
    for rate in rates:
        if not 0 < rate <= LARGEST_RATE:
            raise ConfigError(f"--rates must be positive and at most {LARGEST_RATE:.3g}, got {rate:g}")
    return sorted(set(rates))
