"""Small runs one after another in one process, as a sweep of several processes, and as one with ``--together``.

All do the same runs with one thread each, in turns, several times; a sweep's time has the start of its processes in it,
and that of ``--together`` its trial whether seeds can be trained together. CPU seconds are those of all processes:
where others use the machine too, the number of jobs times the one by the other is what cores of one's own would give at
best. After each round the logs are compared: those of the sweep must agree with the first in every digit, and it is
said how far the losses of the joint one are from them. Run: ``python benchmarks/sweep.py``, or with
``--methods vanilla layernorm --seeds 8 --probe-every 100``, of which all seeds can be trained together.
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
from hesscond.study.batch import Overrides
from hesscond.study.executors import LocalProcesses, data_key
from hesscond.study.grid import SweepConfig, check_config, plan_sweep
from hesscond.study.sweep import prepare, sweep
from hesscond.study.worker import Outcome, Task

CPU = torch.device("cpu")


class Nobody:
    """Watches nothing."""

    def began(self, task: Task) -> None:
        """A run was handed over."""

    def ended(self, outcome: Outcome) -> None:
        """A run is over."""
        assert outcome.status == "finished", outcome

    def broke(self, task: Task, reason: str) -> None:
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
    """The runs in processes, those together that can be if the sweep says so."""
    plans = plan_sweep(config, folder, CPU)
    by_key = {data_key(plans[0]): data}
    ready = prepare(config, plans, by_key, folder, jobs=jobs)
    sweep(ready.groups.tasks, LocalProcesses(jobs, config.threads, [CPU], by_key), Nobody(), threads=config.threads)
    return plans


def compared(alone: list[RunPlan], swept: list[RunPlan], joined: list[RunPlan]) -> float:
    """The largest relative difference of a training loss of the joint sweep; the other must be the same to the bit."""
    difference = 0.0
    for plans in zip(alone, swept, joined, strict=True):
        one, many, together = (open_run(plan.folder) for plan in plans)
        for table in ("training", "probe", "evaluation"):
            assert one.table(table).equals(many.table(table)), one.folder
        losses, other = (run.table("training")["loss"].to_numpy() for run in (one, together))
        difference = max(difference, float((abs(losses - other) / abs(losses)).max()))
    return difference


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
    joint = config.model_copy(update={"together": True})
    runs = 2 * len(arguments.methods) * arguments.seeds
    print(
        f"{study.name}: {runs} runs of {arguments.iterations} iterations, probed every {arguments.probe_every}; "
        f"{len(os.sched_getaffinity(0))} cores, torch {torch.__version__}, Python {platform.python_version()}"
    )
    ratios: list[tuple[float, float]] = []
    for turn in range(arguments.rounds):
        with tempfile.TemporaryDirectory() as temporary:
            folder, load = Path(temporary), os.getloadavg()[0]
            alone, one = timed(partial(one_after_another, config, data, folder / "alone"))
            swept, many = timed(partial(as_sweep, config, data, folder / "sweep", arguments.jobs))
            joined, together = timed(partial(as_sweep, joint, data, folder / "together", arguments.jobs))
            difference = compared(alone, swept, joined)
        ratios.append((one.wall / many.wall, many.wall / together.wall))
        print(
            f"round {turn + 1}: one after another {one}, sweep --jobs {arguments.jobs} {many}: {ratios[-1][0]:.2f}×, "
            f"--together {together}: {ratios[-1][1]:.2f}× more, losses differ by {difference:.0e} at most "
            f"(load average before: {load:.1f})",
            flush=True,
        )
    print("median " + ", ".join(f"{statistics.median(own):.2f}×" for own in zip(*ratios, strict=True)))


if __name__ == "__main__":
    main()
