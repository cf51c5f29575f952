"""40 small runs one after another in one process, and as a sweep of several processes: `hesscond sweep`'s gain.

Both do the same runs with one thread each, in turns, several times; the sweep's time has the start of its processes in
it. CPU seconds are those of all processes: where others use the machine too, the number of jobs times the one by the
other is what cores of one's own would give at best. After each round the logs of both are compared: they must agree in
every digit. Run: ``python benchmarks/sweep.py``.
"""

from __future__ import annotations

import argparse
import os
import platform
import resource
import statistics
import tempfile
import time
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
    """The runs in processes."""
    plans = plan_sweep(config, folder, CPU)
    by_key = {data_key(plans[0]): data}
    ready = prepare(config, plans, by_key, folder)
    sweep(ready.left, LocalProcesses(jobs, config.threads, [CPU], by_key), Nobody(), threads=config.threads)
    return plans


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
    parser.add_argument("--seeds", type=int, default=10, help="times 2 methods and 2 rates")
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
            "methods": ["vanilla", "bnp"],
            "seeds": list(range(arguments.seeds)),
            "rates": [0.01, 0.1],
            "batch_sizes": [study.training.batch_size],
        }
    )
    runs = 4 * arguments.seeds
    print(
        f"{study.name}: {runs} runs of {arguments.iterations} iterations, probed every {arguments.probe_every}; "
        f"{len(os.sched_getaffinity(0))} cores, torch {torch.__version__}, Python {platform.python_version()}"
    )
    ratios = []
    for turn in range(arguments.rounds):
        with tempfile.TemporaryDirectory() as temporary:
            folder, load = Path(temporary), os.getloadavg()[0]
            start, cpu = time.perf_counter(), cpu_seconds()
            alone = one_after_another(config, data, folder / "alone")
            middle, cpu_middle = time.perf_counter(), cpu_seconds()
            together = as_sweep(config, data, folder / "sweep", arguments.jobs)
            end, cpu_end = time.perf_counter(), cpu_seconds()
            for one, other in zip(alone, together, strict=True):
                for table in ("training", "probe", "evaluation"):
                    assert open_run(one.folder).table(table).equals(open_run(other.folder).table(table)), one.folder
        ratios.append((middle - start) / (end - middle))
        print(
            f"round {turn + 1}: one after another {middle - start:.1f} s (CPU {cpu_middle - cpu:.1f} s), "
            f"sweep --jobs {arguments.jobs} {end - middle:.1f} s (CPU {cpu_end - cpu_middle:.1f} s): "
            f"{ratios[-1]:.2f}× (load average before: {load:.1f})",
            flush=True,
        )
    print(f"median {statistics.median(ratios):.2f}×")


if __name__ == "__main__":
    main()
