"""``hesscond study``: train, probe, log, and draw the figure."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer
from rich.text import Text

from hesscond.commands.check import POLICIES, Expect, Unresolved, meet
from hesscond.commands.exits import DIVERGED, INTERRUPTED
from hesscond.commands.options import (
    BatchSize,
    DataDir,
    Device,
    Epochs,
    Iterations,
    Methods,
    ProbeEvery,
    Scale,
    Study,
    choice,
    integers,
)
from hesscond.commands.printing import complain, print_table, sign_of_life, stderr, stdout
from hesscond.commands.progress import progress_bar
from hesscond.data import Dataset
from hesscond.errors import ConfigError, DivergedError
from hesscond.expectations import Expectation
from hesscond.methods import registered
from hesscond.report import (
    FIGURES,
    rounding_note,
    save_figure,
    statement_table,
    summary_table,
    verdict_sentences,
)
from hesscond.runs import StoredRun, open_run
from hesscond.study import RunPlan, check_plan, load_data, load_study, resolve_device, run
from hesscond.study.grid import Overrides, plan_runs
from hesscond.study.listing import aliases
from hesscond.study.sections import DataConfig


def study(
    name: Study,
    method: Methods = None,
    scale: Scale = None,
    seed: Annotated[str | None, typer.Option(help="Seeds, separated by commas. Default: 0.")] = None,
    iterations: Iterations = None,
    epochs: Epochs = None,
    batch_size: BatchSize = None,
    lr: Annotated[float | None, typer.Option(help="Learning rate of every method.")] = None,
    probe_every: ProbeEvery = None,
    statement: Annotated[
        list[str] | None,
        typer.Option(help="Check a published statement wherever a unit is probed (hesscond statements); repeatable."),
    ] = None,
    resume: Annotated[
        bool,
        typer.Option("--resume", help="Resume the runs in --out that were interrupted, or that have fewer iterations."),
    ] = False,
    device: Device = "auto",
    data_dir: DataDir = None,
    out: Annotated[
        Path | None, typer.Option(help="Run folder; of several runs, the folder of their folders METHOD-seedS.")
    ] = None,
    expect: Expect = None,
    unresolved: Unresolved = "fail",
) -> None:
    """Train a network with each method, log loss, accuracy and condition numbers, and draw the figure.

    Example: hesscond study fc-digits --method vanilla --method bnp

    The config.toml of a run is a study too: without --method and --seed it repeats that run, and with --resume it
    resumes it.
    """
    choice("--unresolved", unresolved, POLICIES)
    expectations = [Expectation.of(text) for text in expect or ()]
    config = load_study(name, scale)
    if resume and out is None:
        if config.run is None:
            raise ConfigError("--resume needs the folder of the runs: give it as --out")
        out = Path(name).parent
    if config.run is not None:
        if not method:
            method, lr = [config.run.label or config.run.method], lr or config.run.learning_rate
        seed = str(config.run.seed) if seed is None else seed
    if not method:
        own = "".join(f"{entry.name}, " for entry in config.methods)
        names = ", ".join(m.name for m in registered())
        raise ConfigError(f"name at least one method with --method: {own}{names}")
    where = out or Path("runs") / f"{config.name}-{time.strftime('%Y%m%d-%H%M%S')}"
    overrides = Overrides(iterations, epochs, batch_size, lr, probe_every, tuple(statement or ()))
    plans = plan_runs(
        config,
        method,
        integers("--seed", "0" if seed is None else seed),
        where,
        resolve_device(device),
        overrides,
        resume=resume,
    )
    for expectation in expectations:
        expectation.check_methods([plan.method for plan in plans])
    data = loaded(config.data, data_dir)
    for plan in plans:
        check_plan(plan, data)
    if name in aliases():
        stderr.print(f"{name} is another name of {aliases()[name]}", soft_wrap=True)
    if lr is None:
        tell_default_rates(plans)
    data = data.to(plans[0].device)
    diverged = run_all(plans, data, resume)
    stored = [open_run(plan.folder) for plan in plans]
    finish(where, stored)
    for sentence in diverged:
        complain(sentence)
    if expectations:
        meet(expectations, stored, unresolved)
    if diverged:
        raise typer.Exit(DIVERGED)


def loaded(config: DataConfig, data_dir: Path | None) -> Dataset:
    """The data of a study, with a sign of life while they are loaded."""
    label = f"loading {config.name}"
    with sign_of_life(label) as say:
        return load_data(
            config, data_dir, lambda done, total: say(f"{label}, {done} of {total} pictures", done / total)
        )


def run_all(plans: Sequence[RunPlan], data: Dataset, resume: bool) -> list[str]:
    """Run plans one after another, each with a progress bar; returns the sentences of those that diverged."""
    sentences = []
    for plan in plans:
        try:
            with interruptible(plan.folder), progress_bar(stderr, plan.name) as on_progress:
                run(plan, data, on_progress, resume=resume)
        except DivergedError as error:
            sentences.append(f"{plan.study.name} {plan.name}: {error}")
    return sentences


def tell_default_rates(plans: Sequence[RunPlan]) -> None:
    """Name the methods that train at their default learning rate, because the study has none for them."""
    for (method, size), plan in {(plan.method, plan.study.training.batch_size): plan for plan in plans}.items():
        if plan.study.known_rate(plan.label or method, size) is None:
            said = f"study {plan.study.full_name} has no learning rate for {method} at batch size {size}"
            stderr.print(f"{said}: taking the method's default, {plan.learning_rate:g}", soft_wrap=True)


@contextmanager
def interruptible(where: Path) -> Iterator[None]:
    """After a Ctrl-C, say where the logs are."""
    try:
        yield
    except KeyboardInterrupt:
        stderr.print(f"interrupted: the log up to here is in {where}; --resume continues", soft_wrap=True)
        raise typer.Exit(INTERRUPTED) from None


def finish(where: Path, runs: list[StoredRun]) -> None:
    """Print the summary and draw the figure next to the runs."""
    stdout.print(summary_table(runs))
    if any(run.config.get("statements") for run in runs):
        print_table(statement_table(runs))
    note = rounding_note(runs)
    if note:
        stdout.print(f"note:   {note}", soft_wrap=True)
    stdout.print()
    for sentence in verdict_sentences(runs):
        stdout.print(Text(sentence))
    stdout.print(f"runs:   {where}", soft_wrap=True)
    # training where nothing was probed
    kind = next((kind for kind in ("equal-loss", "training") if FIGURES[kind].fits(runs) is None), None)
    if kind is not None:
        figure = FIGURES[kind].draw(runs)
        for suffix in (".pdf", ".png"):
            save_figure(figure, where / f"{kind}{suffix}")
        stdout.print(f"figure: {where / kind}.png (and .pdf)", soft_wrap=True)
