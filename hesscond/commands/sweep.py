"""``hesscond sweep``: a grid of runs, many at once, that can be interrupted and resumed."""

from __future__ import annotations

import signal
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Executor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import reduce
from operator import getitem
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from hesscond.commands.exits import DIVERGED, INTERRUPTED
from hesscond.commands.live_view import sweep_view
from hesscond.commands.options import (
    DataDir,
    Devices,
    Epochs,
    Iterations,
    Jobs,
    Methods,
    ProbeEvery,
    Scale,
    Threads,
    integers,
    parse_ranges,
    parse_rates,
)
from hesscond.commands.printing import complain, print_table, stderr, stdout
from hesscond.commands.study import loaded, tell_default_rates
from hesscond.data import Dataset
from hesscond.errors import ConfigError
from hesscond.report.sweeps import best_frame, best_table, sweep_frame
from hesscond.runs import open_run
from hesscond.study import RunPlan, load_study, resolve_device
from hesscond.study.grid import FILE, Overrides, SweepConfig, check_config, parse_settings, plan_sweep, read_sweep
from hesscond.study.sweep import DataKey, Outcome, Prepared, data_key, prepare_sweep, shared_files
from hesscond.study.sweep import sweep as run_sweep
from hesscond.study.workers import WorkerProcesses, dask_workers, sigterm_interrupts

#: Exit code after SIGTERM, as a shell has it.
TERMINATED = 128 + signal.SIGTERM


class Terminated(KeyboardInterrupt):
    """Interrupt by SIGTERM."""


def sweep(
    name: Annotated[
        str,
        typer.Argument(
            help="A built-in study (hesscond studies), a .toml file, or the folder of a sweep to resume.",
        ),
    ],
    method: Methods = None,
    scale: Scale = None,
    seed: Annotated[str | None, typer.Option(help="Seeds, as 0,1,2 or 0:5 (0 to 4). Default: 0.")] = None,
    lr: Annotated[
        str | None,
        typer.Option(help="Learning rates, separated by commas; grid: the study's list. Default: the study's rate."),
    ] = None,
    batch_size: Annotated[str | None, typer.Option(help="Batch sizes, separated by commas.")] = None,
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=V[,V…]", help="Values of a key of the study file, as training.momentum."),
    ] = None,
    iterations: Iterations = None,
    epochs: Epochs = None,
    probe_every: ProbeEvery = None,
    jobs: Jobs = None,
    threads: Threads = None,
    device: Devices = "auto",
    dask: Annotated[
        str | None, typer.Option(metavar="ADDRESS", help="Use the workers of a running Dask scheduler.")
    ] = None,
    data_dir: DataDir = None,
    out: Annotated[Path | None, typer.Option(help="Folder of the sweep. Default: runs/sweep-NAME.")] = None,
) -> None:
    """Train a grid of methods × seeds × rates × batch sizes, several runs at a time, and show each method at its best.

    Example: hesscond sweep fc-digits -m vanilla -m bnp --seed 0:3 --lr 0.01,0.1,1 --iterations 500 --jobs 2

    The same command, or the sweep's folder, resumes an interrupted sweep, and repeats no finished run. A larger
    grid adds runs. Several sweeps may work on one folder, from several machines too.
    """
    place = place_of(jobs, device, dask)
    grid_options = (method, scale, seed, lr, batch_size, set_, iterations, epochs, probe_every)
    if Path(name).is_dir():
        if any(option is not None for option in grid_options) or out is not None:
            raise ConfigError(f"{name} is the folder of a sweep, which says what to run: leave the other options out")
        where = Path(name)
        config = read_sweep(where)
        changed = {} if threads is None else {"threads": threads}
        config = check_config(config.model_dump(exclude_none=True) | changed)
    else:
        study = Overrides(iterations, epochs, None, None, probe_every).apply(load_study(name, scale))
        where = out or Path("runs") / f"sweep-{study.name}"
        content = {
            "study": study.model_dump(mode="json", exclude_none=True, exclude={"run"}),
            "methods": method or [],
            "seeds": parse_ranges("0" if seed is None else seed),
            "rates": "study" if lr is None else parse_rates("--lr", lr, "grid") or "grid",
            "batch_sizes": [study.training.batch_size]
            if batch_size is None
            else integers("--batch-size", batch_size, 1),
            "settings": parse_settings(set_ or []),
            "threads": threads if threads is not None else usual_threads(where, place),
        }
        if not method:
            raise ConfigError("name at least one method with --method (hesscond methods lists them)")
        config = check_config(content)
    plans = plan_sweep(config, where, torch.device(place.devices[0].type))
    if config.rates == "study":
        tell_default_rates(plans)
    data = data_of(plans, data_dir)
    prepared = prepare_sweep(config, plans, data, where)
    outcomes = do(plans, prepared, data, place, config.threads, data_dir, f"hesscond sweep {where}")
    finish(config, where, plans, outcomes)


@dataclass(frozen=True)
class Place:
    """Place of computation: devices of this machine with ``jobs`` runs at a time, or a Dask cluster."""

    jobs: int
    devices: tuple[torch.device, ...]
    dask: str | None = None

    @contextmanager
    def workers(
        self, data: Mapping[DataKey, Dataset], runs: int
    ) -> Iterator[tuple[Executor, Mapping[DataKey, Path] | None]]:
        """The executor for a number of runs, and files with their data; a cluster has none."""
        if self.dask is not None:
            with dask_workers(self.dask) as executor:
                yield executor, None
            return
        with shared_files(data) as (folder, files):
            del data
            jobs = min(self.jobs, runs)
            yield WorkerProcesses([self.devices[n % len(self.devices)] for n in range(jobs)], folder), files


def place_of(jobs: int | None, device: str, dask: str | None) -> Place:
    """Place of computation that the options mean."""
    if jobs is not None and jobs < 1:
        raise ConfigError(f"--jobs must be at least 1, got {jobs}")
    names = [part.strip() for part in device.split(",")]
    if dask is not None:
        if jobs is not None:
            raise ConfigError("--jobs: the number of Dask's workers says how many runs go at a time, leave it out")
        if names not in (["auto"], ["cpu"], ["cuda"]):
            raise ConfigError(f"--device {device}: on a cluster it is cpu or cuda, the cluster says which GPU")
        kind = resolve_device("auto").type if names == ["auto"] else names[0]
        return Place(0, (torch.device(kind),), dask)
    devices = [resolve_device(part) for part in names]
    if names == ["auto"] and devices[0].type == "cuda":
        devices = [torch.device("cuda", index) for index in range(torch.cuda.device_count())]
    if len({one.type for one in devices}) > 1:
        raise ConfigError(f"--device {device}: either the CPU or GPUs, their last digits differ")
    return Place(jobs or (len(devices) if devices[0].type == "cuda" else cores()), tuple(devices))


def data_of(plans: Sequence[RunPlan], data_dir: Path | None) -> dict[DataKey, Dataset]:
    """The data sets of many runs, each loaded once."""
    wanted = {data_key(plan): plan.study.data for plan in plans}
    return {key: loaded(one, data_dir) for key, one in wanted.items()}


def do(
    plans: Sequence[RunPlan],
    prepared: Prepared,
    data: dict[DataKey, Dataset],
    place: Place,
    threads: int,
    data_dir: Path | None,
    again: str,
) -> dict[str, Outcome]:
    """Perform the runs that are left, and show them; empties ``data``; ``again`` is the command that resumes."""
    left = prepared.left
    runs = f"{len(plans)} run{'s' if len(plans) > 1 else ''}"
    runs += f", {len(prepared.done)} of them over before" if prepared.done else ""
    stderr.print(f"{runs}; {words(place, threads, len(left))}", soft_wrap=True)
    outcomes = dict(prepared.done)
    if left:
        try:
            with (
                sigterm_interrupts(Terminated),
                place.workers(data, len(left)) as (executor, files),
                sweep_view(stderr, [plan.folder for plan in left], len(plans)) as shown,
            ):
                data.clear()
                outcomes |= run_sweep(left, executor, shown, threads=threads, files=files, data_dir=absolute(data_dir))
        except KeyboardInterrupt as interrupt:
            stderr.print(f"interrupted; resume with: {again}", soft_wrap=True)
            raise typer.Exit(TERMINATED if isinstance(interrupt, Terminated) else INTERRUPTED) from None
    return outcomes


def complain_of(outcomes: Mapping[str, Outcome]) -> None:
    """Name the runs that went wrong; exit code 1 if some did."""
    bad = [outcome for outcome in outcomes.values() if outcome.status in ("diverged", "failed")]
    for outcome in bad:
        complain(f"{outcome.name} {outcome.status}: {outcome.message}")
    if bad:
        raise typer.Exit(DIVERGED)


def cores() -> int:
    """Number of cores that this process may use."""
    from joblib import cpu_count

    return int(cpu_count())


def usual_threads(where: Path, place: Place) -> int:
    """Threads of the sweep in this folder, so that it resumes to the same digits; else a share of the cores."""
    if (where / FILE).exists():
        return read_sweep(where).threads
    return 1 if place.dask is not None else max(1, torch.get_num_threads() // place.jobs)


def words(place: Place, threads: int, runs: int) -> str:
    """Words for the place of computation."""
    if not runs:
        return "nothing to do"
    each = f"{threads} thread{'s' if threads > 1 else ''} each"
    if place.dask is not None:
        return f"Dask at {place.dask}, on {place.devices[0].type}, {each}"
    return f"{min(place.jobs, runs)} at a time on {', '.join(map(str, place.devices))}, {each}"


def absolute(path: Path | None) -> Path | None:
    """A path that means the same to every process."""
    return None if path is None else path.expanduser().resolve()


def finish(config: SweepConfig, where: Path, plans: list[RunPlan], outcomes: dict[str, Outcome]) -> None:
    """Write the tables, print the summary and name what went wrong; exit code 1 if something did."""
    stored = [open_run(p.folder) for p in plans if outcomes[p.folder.name].status in ("finished", "diverged")]
    if stored:
        rows: list[tuple[Any, dict[str, Any], float]] = [
            (
                run,
                {
                    axis: reduce(getitem, key.split("."), run.config)
                    for axis, key in zip(config.axes, config.settings, strict=True)
                },
                run.seconds,
            )
            for run in stored
        ]
        frame = sweep_frame(rows)
        best = best_frame(frame, config.axes)
        frame.to_csv(where / "runs.csv", index=False, lineterminator="\n")
        best.to_csv(where / "best.csv", index=False, lineterminator="\n")
        print_table(best_table(best, config.axes, f"{config.study.name} · {len(stored)} runs"))
        stdout.print(f"runs:   {where}", soft_wrap=True)
        stdout.print(f"tables: {where / 'best.csv'}, {where / 'runs.csv'}", soft_wrap=True)
    complain_of(outcomes)
