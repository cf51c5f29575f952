"""Runs performed where the options say, one by one or several at a time, and shown meanwhile."""

from __future__ import annotations

import math
import shlex
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from pathlib import Path

import torch
import typer

from hesscond.commands import printing
from hesscond.data import Dataset
from hesscond.errors import ConfigError, DivergedError, counted
from hesscond.lazy import optional
from hesscond.report.tables import number
from hesscond.runs import open_run, printable
from hesscond.study import Progress, RunPlan, grid, load_data, resolve_device, run, sweep as sweeps
from hesscond.study.sections import DataConfig

#: Exit code after SIGTERM, as a shell has it.
TERMINATED = 128 + signal.SIGTERM


class Terminated(KeyboardInterrupt):
    """Interrupt by SIGTERM."""


def announced_by(say: printing.Say, folders: Sequence[Path], total: int) -> Callable[[sweeps.Outcome], None]:
    """Callback for `hesscond.study.sweep.sweep` with a line for each of the runs that ends, ``total`` with others."""
    left = {folder.name: folder for folder in folders}

    def ended(outcome: sweeps.Outcome) -> None:
        folder = left.pop(outcome.name)
        how = f"{outcome.status}: {outcome.message}" if outcome.message else outcome.status
        if outcome.status == "finished":
            run = open_run(folder)
            how += f", {run.iterations} iterations, loss {run.last_loss:.4g}, {run.seconds:.1f} s"
        over = total - len(left)
        printing.print_line(printable(f"[{over}/{total}] {outcome.name}: {how}"), printing.stderr)
        say(f"{over} of {total} runs over", over / total)

    return ended


def shown_by(say: printing.Say, name: str) -> Callable[[Progress], None]:
    """Callback for `hesscond.study.run` that says how far a run is."""

    def show(progress: Progress) -> None:
        row = progress.row or {}
        kappa = math.nan if row.get("kappa_own") is None else row["kappa_own"]
        kappa_text = number(kappa, ".0e") if row.get("resolved_own", True) else "unresolved"
        text = f"{name} {progress.iteration}/{progress.iterations} loss {progress.loss:.3f} κ own {kappa_text}"
        say(text, progress.iteration / progress.iterations)

    return show


def resumed_by(*more: str) -> str:
    """Sentence with the command that resumes, to be pasted into a shell: that of this process, and more options."""
    return f"resume with: {shlex.join(['hesscond', *sys.argv[1:], *more])}"


def one_by_one(plans: Sequence[RunPlan], data: Dataset, resume: bool, *lacking: str) -> list[str]:
    """Run plans one after another, each with a sign of life; returns the sentences of those that diverged.

    ``lacking``: options that the command needs beside those given if it is to resume.
    """
    sentences = []
    for plan in plans:
        try:
            with printing.sign_of_life(plan.name) as say:
                run(plan, data, shown_by(say, plan.name), resume=resume)
        except KeyboardInterrupt:
            printing.stderr.print(
                f"interrupted: the log up to here is in {plan.folder}; {resumed_by(*lacking)}", soft_wrap=True
            )
            raise typer.Exit(printing.INTERRUPTED) from None
        except DivergedError as error:
            sentences.append(f"{plan.study.name} {plan.name}: {error}")
    return sentences


@dataclass(frozen=True)
class Place:
    """Place of computation: devices of this machine with ``jobs`` runs at a time."""

    jobs: int
    devices: tuple[torch.device, ...]

    @classmethod
    def of(cls, jobs: int | None, device: str, threads: int | None = None) -> Place:
        """Place of computation that the options mean."""
        from joblib import cpu_count

        for option, given in (("--jobs", jobs), ("--threads", threads)):
            if given is not None and given < 1:
                raise ConfigError(f"{option} must be at least 1, got {given}")
        names = [part.strip() for part in device.split(",")]
        devices = [resolve_device(part) for part in names]
        if names == ["auto"] and devices[0].type == "cuda":
            devices = [torch.device("cuda", index) for index in range(torch.cuda.device_count())]
        if len({processor.type for processor in devices}) > 1:
            raise ConfigError(f"--device {device}: either the CPU or GPUs, their last digits differ")
        return cls(jobs or (len(devices) if devices[0].type == "cuda" else int(cpu_count())), tuple(devices))

    def threads(self, where: Path) -> int:
        """Threads of the sweep in this folder, so that it resumes to the same digits; else a share of the cores."""
        if (where / grid.FILE).exists():
            return grid.read_sweep(where).threads
        return max(1, torch.get_num_threads() // self.jobs)

    def described(self, threads: int, runs: int) -> str:
        """Words for the place of computation."""
        if not runs:
            return "nothing to do"
        devices = ", ".join(map(str, self.devices))
        return f"{min(self.jobs, runs)} at a time on {devices}, {counted(threads, 'thread')} each"

    def workers(self, runs: int, folder: Path) -> Executor:
        """The executor for a number of runs."""
        jobs = min(self.jobs, runs)
        return sweeps.WorkerProcesses([self.devices[n % len(self.devices)] for n in range(jobs)], folder)


def loaded(config: DataConfig, data_dir: Path | None) -> Dataset:
    """The data of a study, with a sign of life while they are loaded."""
    with optional("the figure of a study"):
        import matplotlib  # noqa: F401  (before an hour of training)
    label = f"loading {config.name}"
    with printing.sign_of_life(label) as say:
        return load_data(
            config, data_dir, lambda done, total: say(f"{label}, {done} of {total} pictures", done / total)
        )


def data_of(plans: Sequence[RunPlan], data_dir: Path | None) -> dict[sweeps.DataKey, Dataset]:
    """The data sets of many runs, each loaded once."""
    wanted = {sweeps.data_key(plan): plan.study.data for plan in plans}
    return {key: loaded(config, data_dir) for key, config in wanted.items()}


def tell_default_rates(plans: Sequence[RunPlan]) -> None:
    """Name the methods that train at their default learning rate, because the study has none for them."""
    for (method, size), plan in {(plan.method, plan.study.training.batch_size): plan for plan in plans}.items():
        if plan.study.known_rate(plan.label or method, size) is None:
            reason = f"study {plan.study.full_name} has no learning rate for {method} at batch size {size}"
            printing.print_line(f"{reason}: taking the method's default, {plan.learning_rate:g}", printing.stderr)


def perform(
    plans: Sequence[RunPlan],
    prepared: sweeps.Prepared,
    data: dict[sweeps.DataKey, Dataset],
    place: Place,
    threads: int,
) -> dict[str, sweeps.Outcome]:
    """Perform the runs that are left, and show them; empties ``data``."""
    left = prepared.left
    runs, which = counted(len(plans), "run"), f"{len(prepared.done)} of them" if left else "all of them"
    runs += f", {which if len(plans) > 1 else 'which was'} over before" if prepared.done else ""
    printing.stderr.print(f"{runs}; {place.described(threads, len(left))}", soft_wrap=True)
    outcomes = dict(prepared.done)
    if left:
        try:
            label = f"{len(outcomes)} of {len(plans)} runs over"
            with (
                sweeps.sigterm_interrupts(Terminated),
                sweeps.shared_files(data) as (folder, files),
                printing.sign_of_life(label) as say,
            ):
                data.clear()
                ended = announced_by(say, [plan.folder for plan in left], len(plans))
                outcomes |= sweeps.sweep(left, place.workers(len(left), folder), ended, threads=threads, files=files)
        except KeyboardInterrupt as interrupt:
            printing.stderr.print(f"interrupted; {resumed_by()}", soft_wrap=True)
            raise typer.Exit(TERMINATED if isinstance(interrupt, Terminated) else printing.INTERRUPTED) from None
    return outcomes


def complain_of(outcomes: Mapping[str, sweeps.Outcome]) -> None:
    """Name the runs that went wrong; exit code 1 if some did."""
    bad = [outcome for outcome in outcomes.values() if outcome.status in ("diverged", "failed")]
    for outcome in bad:
        printing.complain(f"{outcome.name} {outcome.status}: {outcome.message}")
    if bad:
        raise typer.Exit(printing.DIVERGED)
