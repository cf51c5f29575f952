"""Methods at their best learning rates: a grid of rates without probes, then probed runs at the best rate."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import torch

from hesscond.data import Dataset
from hesscond.errors import ConfigError, DivergedError
from hesscond.lazy import located
from hesscond.methods import parse
from hesscond.problem.devices import accelerators_of, runtime
from hesscond.runs import OVER, StoredRun, open_run
from hesscond.study import runner
from hesscond.study.config import StudyConfig
from hesscond.study.sweep import Outcome

#: The learning rates that are tried unless others are given.
GRID = (0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0)
#: Factors of a method's default rate: those from 0.1 to 10 are tried, and further ones while the best is at an end.
AROUND = (0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0)
#: Iterations timed at a time, and how many times, the vanilla method's and the method's in turn.
BLOCK, ROUNDS = 20, 7
#: File that keeps the times, so that none is measured twice.
TIMES = "times.json"


@dataclass(frozen=True)
class Compared:
    """Result of a method: runs at its best rate (NaN: none), cost of an iteration over vanilla's, or a refusal."""

    method: str
    rate: float = math.nan
    edge: bool = False
    runs: tuple[StoredRun, ...] = ()
    cost: float = math.nan
    refusal: str = ""


@dataclass
class Comparison:
    """Study trained by several methods: over a grid of rates without probing, then over seeds with the probe.

    ``rates`` None means `AROUND` times the rate that the study, or else the method, has. Rates are tried with the first
    of the ``seeds``. Runs go to ``out/grid/METHOD-lrRATE`` and ``out/METHOD-seedS``; ``perform`` performs or resumes
    them and returns their outcomes by folder.
    """

    study: StudyConfig
    data: Dataset
    rates: Sequence[float] | None
    seeds: Sequence[int]
    out: Path
    device: torch.device
    perform: Callable[[Sequence[runner.RunPlan]], Mapping[Path, Outcome]]
    outcomes: dict[Path, Outcome] = field(default_factory=dict)
    #: By method, the first and last index of the part of `AROUND` that is tried.
    reach: dict[str, tuple[int, int]] = field(default_factory=dict)

    def results(self, methods: Sequence[str]) -> Iterator[Compared]:
        """Find the best rate of each method, then probe it there with every seed; results in the order of methods."""
        refusals: dict[str, str] = {}
        for method in methods:
            try:
                runner.check_plan(self.probed(method, self.grid(method)[0], self.seeds[0]), self.data)
            except ConfigError as refusal:
                refusals[method] = str(refusal)
        due = able = [method for method in methods if method not in refusals]
        if not able:
            raise ConfigError("; ".join(dict.fromkeys(refusals.values())))
        while due:
            self.do([self.tried(method, rate) for method in due for rate in self.grid(method)])
            due = [method for method in due if self.widened(method)]
        best = {method: rate for method in able if (rate := self.best(method)) is not None}
        self.do([self.probed(method, rate, seed) for seed in self.seeds for method, rate in best.items()])
        for method in methods:
            if method not in best:
                yield Compared(method, refusal=refusals.get(method, "diverged or failed at every learning rate"))
                continue
            rate, grid = best[method], self.grid(method)
            folders = [self.probed(method, rate, seed).folder for seed in self.seeds]
            runs = tuple(open_run(folder) for folder in folders if self.outcomes[folder].status in OVER)
            edge = len(grid) > 1 and rate in (grid[0], grid[-1])
            yield Compared(method, rate, edge, runs, self.cost(method, rate), "" if runs else "no probed run has ended")

    def do(self, plans: Sequence[runner.RunPlan]) -> None:
        """Perform those of the runs that were not performed yet."""
        if due := [plan for plan in plans if plan.folder not in self.outcomes]:
            self.outcomes |= self.perform(due)

    def grid(self, method: str) -> list[float]:
        """The rates to try, ascending."""
        if self.rates is not None:
            return sorted(set(self.rates))
        own = self.study.learning_rate(method, self.study.training.batch_size)
        lowest, highest = self.reach.setdefault(method, (AROUND.index(0.1), AROUND.index(10.0)))
        return [float(f"{factor * own:.3g}") for factor in AROUND[lowest : highest + 1]]

    def widened(self, method: str) -> bool:
        """Extend the grid of a method by a rate if the best one is at an end; whether it was extended."""
        best, grid = self.best(method), self.grid(method)
        if self.rates is not None or best not in (grid[0], grid[-1]):
            return False
        lowest, highest = self.reach[method]
        wider = (lowest - 1, highest) if best == grid[0] else (lowest, highest + 1)
        if wider[0] < 0 or wider[1] == len(AROUND):
            return False
        self.reach[method] = wider
        return True

    @cached_property
    def unprobed(self) -> StudyConfig:
        """The study without its probes."""
        return self.study.model_copy(update={"probe": self.study.probe.unmeasured})

    def tried(self, method: str, rate: float) -> runner.RunPlan:
        """Plan of a run of the grid, without probes."""
        folder = self.out / "grid" / f"{parse(method).folder}-lr{rate:g}"
        return runner.RunPlan(self.unprobed, located(method), self.seeds[0], rate, folder, self.device)

    def probed(self, method: str, rate: float, seed: int) -> runner.RunPlan:
        """Plan of a run with the study's probe."""
        folder = self.out / f"{parse(method).folder}-seed{seed}"
        return runner.RunPlan(self.study, located(method), seed, rate, folder, self.device)

    def best(self, method: str) -> float | None:
        """The rate with the smallest loss at the end; None if every run diverged or failed."""
        losses = {rate: final_loss(self.tried(method, rate).folder) for rate in self.grid(method)}
        rate = min(losses, key=lambda r: losses[r])
        return None if math.isinf(losses[rate]) else rate

    def cost(self, method: str, rate: float) -> float:
        """Time of an iteration divided by that of the vanilla method, read from `TIMES` or measured now."""
        path = self.out / TIMES
        times: dict[str, float] = {}
        with suppress(OSError, ValueError):
            times = json.loads(path.read_text(encoding="utf-8"))
        name = f"{method} {rate:g}"
        if name not in times:
            # as long as at any other rate, and the weights move least
            lowest = self.grid(method)[0]
            times[name] = relative_cost(self.tried(method, lowest), self.tried("vanilla", lowest), self.data)
            path.write_text(json.dumps(times, indent=1), encoding="utf-8")
        return times[name]


def final_loss(folder: Path) -> float:
    """Mean training loss over the last tenth of the iterations; infinite if the run diverged, or is not there."""
    if not (folder / "run.sqlite").exists():
        return math.inf
    stored = open_run(folder)
    if stored.status != "finished":
        return math.inf
    losses = stored.table("training")["loss"]
    return float(losses.tail(max(1, len(losses) // 10)).mean())


def relative_cost(plan: runner.RunPlan, vanilla: runner.RunPlan, data: Dataset) -> float:
    """Time of an iteration over that of the vanilla method, from blocks of iterations of both in turn."""
    total = [0.0, 0.0]
    with suppress(DivergedError), runner.rehearsal(vanilla, data) as base, runner.rehearsal(plan, data) as own:
        for number in range(ROUNDS):
            times = [block_time(training, number * BLOCK) for training in (base, own)]
            # the first is slow; what a method does only every few steps has its share
            if number:
                total = [sum(pair) for pair in zip(total, times, strict=True)]
        return total[1] / total[0]
    return math.nan


def block_time(training: runner.Training, first: int) -> float:
    """Seconds for some iterations from ``first`` on, on the first batches of the training set."""
    size, batches = training.batch_size, max(1, training.per_epoch)
    start = time.perf_counter()
    for k in range(first, first + BLOCK):
        part = slice(k % batches * size, (k % batches + 1) * size)
        training.step(k, training.inputs[part], training.targets[part])
    for accelerator in accelerators_of([training.targets]):
        runtime(accelerator).synchronize(accelerator)
    return time.perf_counter() - start
