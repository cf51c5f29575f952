"""``hesscond study``: train, probe, log, and draw the figure."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer
from rich.text import Text

from hesscond.commands import check, options, performing, printing
from hesscond.expectations import Expectation, decisions
from hesscond.report import TABLES, rounding_note, summary_table, verdict_sentences
from hesscond.report.registry import draw_first
from hesscond.runs import store
from hesscond.study import check_plan, grid, load_study, resolve_device
from hesscond.study.listing import aliases


def study(
    name: options.Study,
    method: options.Methods = None,
    scale: options.Scale = None,
    seed: Annotated[str | None, typer.Option(help="Seeds, separated by commas. Default: 0.")] = None,
    iterations: options.Iterations = None,
    epochs: options.Epochs = None,
    batch_size: options.BatchSize = None,
    lr: Annotated[float | None, typer.Option(help="Learning rate of every method.")] = None,
    probe_every: options.ProbeEvery = None,
    statement: Annotated[
        list[str] | None,
        typer.Option(help="Check a published statement wherever a unit is probed (hesscond statements); repeatable."),
    ] = None,
    resume: Annotated[
        bool,
        typer.Option("--resume", help="Resume the runs in --out that were interrupted, or that have fewer iterations."),
    ] = False,
    device: options.Device = "auto",
    data_dir: options.DataDir = None,
    out: Annotated[
        Path | None, typer.Option(help="Run folder; of several runs, the folder of their folders METHOD-seedS.")
    ] = None,
    expect: check.Expect = None,
    unresolved: check.Unresolved = "fail",
) -> None:
    """Train a network with each method, log loss, accuracy and condition numbers, and draw the figure.

    Example: hesscond study fc-digits --method vanilla --method bnp

    The config.toml of a run is a study too: without --method and --seed it repeats that run, and with --resume it
    resumes it.
    """
    options.choice("--unresolved", unresolved, check.POLICIES)
    expectations = [Expectation.of(text) for text in expect or ()]
    config = load_study(name, scale)
    methods, lr, seed, out = grid.asked(config, Path(name), method, lr, seed, out, resume)
    where = out or Path("runs") / f"{config.name}-{time.strftime('%Y%m%d-%H%M%S')}"
    overrides = grid.Overrides(iterations, epochs, batch_size, lr, probe_every, tuple(statement or ()))
    plans = grid.plan_runs(
        config,
        methods,
        options.integers("--seed", seed),
        where,
        resolve_device(device),
        overrides,
        resume=resume,
    )
    for expectation in expectations:
        expectation.check_methods([plan.method for plan in plans])
    data = performing.loaded(config.data, data_dir)
    for plan in plans:
        check_plan(plan, data)
    if name in aliases():
        printing.print_line(f"{name} is another name of {aliases()[name]}", printing.stderr)
    if lr is None:
        performing.tell_default_rates(plans)
    data = data.to(plans[0].device)
    lacking = [*([] if out else ["--out", str(where)]), *([] if resume else ["--resume"])]
    diverged = performing.one_by_one(plans, data, resume, *lacking)
    stored = [store.open_run(plan.folder) for plan in plans]
    finish(where, stored)
    for sentence in diverged:
        printing.complain(sentence)
    if expectations:
        decided = decisions(expectations, stored)
        check.show(decided)
        check.refuse(decided, unresolved, github=None, quiet=False)
    if diverged:
        raise typer.Exit(printing.DIVERGED)


def finish(where: Path, runs: list[store.StoredRun]) -> None:
    """Print the summary and draw the figure next to the runs."""
    printing.stdout.print(summary_table(runs))
    if any(run.config.get("statements") for run in runs):
        printing.print_table(TABLES["statements"].print(runs))
    if note := rounding_note(runs):
        printing.print_line(f"note:   {note}")
    printing.stdout.print()
    for sentence in verdict_sentences(runs):
        printing.stdout.print(Text(sentence))
    printing.stdout.print(f"runs:   {where}", soft_wrap=True)
    # training where nothing was probed
    if drawn := draw_first(("equal-loss", "training"), runs, where):
        printing.stdout.print(f"figure: {drawn}.png (and .pdf)", soft_wrap=True)
