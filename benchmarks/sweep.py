"""Small runs one after another in one process, and as a sweep of several processes.

Both do the same runs with one thread each, in turns, several times; the sweep's time has the start of its processes in
it. CPU seconds are those of all processes: where others use the machine too, the number of jobs times the one by the
other is what cores of one's own would give at best. After each round the logs are compared: they must agree in every
digit. Run: ``python benchmarks/sweep.py``, or with ``--methods vanilla layernorm --seeds 8 --probe-every 100``.
"""

from __future__ import annotations

import argparse
import os
import platform
import resource
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from threadpoolctl import threadpool_limits

from hesscond.data import Dataset
from hesscond.study import RunPlan, load_data, load_study, open_run, run
from hesscond.study.grid import Overrides, SweepConfig, check_config, plan_sweep
from hesscond.study.sweep import Outcome, data_key, prepare, shared_files, sweep
from hesscond.study.workers import WorkerProcesses

CPU = torch.device("cpu")


class Nobody:
    """Watches nothing."""

    def ended(self, outcome: Outcome) -> None:
        """A run is over."""
        assert outcome.status == "finished", outcome

    def broke(self, name: str, reason: str) -> None:
        """A worker broke down."""
        raise AssertionError(reason)

    def tick(self) -> None:
        """Time has gone by."""


def one_after_another(config: SweepConfig, data: Dataset, folder: Path) -> list[RunPlan]:
    """The runs in this process."""
    torch.set_num_threads(1)
    plans = plan_sweep(config, folder, CPU)
    with threadpool_limits(1):
        for plan in plans:
            run(plan, data)
    return plans


def as_sweep(config: SweepConfig, data: Dataset, folder: Path, jobs: int) -> list[RunPlan]:
    """The runs in processes."""
    plans = plan_sweep(config, folder, CPU)
    by_key = {data_key(plans[0]): data}
    left = prepare(config, plans, by_key, folder).left
    with shared_files(by_key) as (scratch, files):
        sweep(left, WorkerProcesses([CPU] * jobs, scratch), Nobody(), threads=config.threads, files=files)
    return plans


def check_equal(alone: list[RunPlan], swept: list[RunPlan]) -> None:
    """The logs must be the same to the bit."""
    for plans in zip(alone, swept, strict=True):
        one, many = (open_run(plan.folder) for plan in plans)
        for table in ("training", "probe", "evaluation"):
            assert one.table(table).equals(many.table(table)), one.folder


@dataclass(frozen=True)
class Seconds:
    """By the clock, and of all processors."""

    wall: float
    cpu: float

    def __str__(self) -> str:
        return f"{self.wall:.1f} s (CPU {self.cpu:.1f} s)"


def timed(work: Callable[[], list[RunPlan]]) -> tuple[list[RunPlan], Seconds]:
    """What it gives, and how long it takes."""
    start, cpu = time.perf_counter(), cpu_seconds()
    plans = work()
    return plans, Seconds(time.perf_counter() - start, cpu_seconds() - cpu)


def cpu_seconds() -> float:
    """Of this process and those it has waited for."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in used)


def main() -> None:
    """Time and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--study", default="fc-digits")
    parser.add_argument("--iterations", type=int, default=1000)
    parser.add_argument("--probe-every", type=int, default=10)
    parser.add_argument("--methods", nargs="+", default=["vanilla", "bnp"])
    parser.add_argument("--seeds", type=int, default=10, help="times the methods and 2 rates")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    study = Overrides(iterations=arguments.iterations, probe_every=arguments.probe_every).apply(
        load_study(arguments.study)
    )
    data = load_data(study.data)
    config = check_config(
        {
            "study": study.model_dump(mode="json", exclude_none=True),
            "methods": arguments.methods,
            "seeds": list(range(arguments.seeds)),
            "rates": [0.01, 0.1],
            "batch_sizes": [study.training.batch_size],
        }
    )
    runs = 2 * len(arguments.methods) * arguments.seeds
    print(
        f"{study.name}: {runs} runs of {arguments.iterations} iterations, probed every {arguments.probe_every}; "
        f"{len(os.sched_getaffinity(0))} cores, torch {torch.__version__}, Python {platform.python_version()}"
    )
    ratios: list[float] = []
    for turn in range(arguments.rounds):
        with tempfile.TemporaryDirectory() as temporary:
            folder, load = Path(temporary), os.getloadavg()[0]
            alone, one = timed(partial(one_after_another, config, data, folder / "alone"))
            swept, many = timed(partial(as_sweep, config, data, folder / "sweep", arguments.jobs))
            check_equal(alone, swept)
        ratios.append(one.wall / many.wall)
        print(
            f"round {turn + 1}: one after another {one}, sweep --jobs {arguments.jobs} {many}: {ratios[-1]:.2f}× "
            f"(load average before: {load:.1f})",
            flush=True,
        )
    print(f"median {statistics.median(ratios):.2f}×")


if __name__ == "__main__":
    main()
