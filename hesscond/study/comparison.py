"""Methods side by side: each at its best learning rate of a grid, on one budget of iterations, over several seeds."""

from __future__ import annotations

import json
import math
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import torch

from hesscond.data import Dataset
from hesscond.errors import ConfigError, DivergedError, RunError
from hesscond.methods import parse
from hesscond.runs import RunLog, StoredRun, open_run
from hesscond.study.config import StudyConfig
from hesscond.study.runner import RunPlan, Training, check_plan, run

#: The learning rates that are tried unless others are given.
GRID = (0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0)
#: Factors of a method's default rate: those from 0.1 to 10 are tried, and further ones while the best is at an end.
AROUND = (0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0)
#: Iterations timed at a time, and how many times, the yardstick's and the method's in turn.
BLOCK, ROUNDS = 20, 7
#: Where the times are kept, so that none is measured twice.
TIMES = "times.json"

#: Function that performs or resumes runs (finished ones are left as they are) and returns why runs failed, by folder.
Runner = Callable[[Sequence[RunPlan]], Mapping[Path, str]]


@dataclass(frozen=True)
class Compared:
    """Result of one method in a comparison.

    Attributes
    ----------
    method
        The method, as ``--method`` takes it.
    rate
        Its best learning rate of the grid, by the training loss at the end; NaN if it diverged at all of them.
    edge
        Whether that is the smallest or largest of the grid: the best may lie outside.
    runs
        The probed runs at that rate that ended, one a seed.
    cost
        Time of an iteration without probing over that of the vanilla method, from interleaved blocks.
    refusal
        Why the method does not work here, else empty.
    failed
        Why probed runs of other seeds did not end.
    """

    method: str
    rate: float = math.nan
    edge: bool = False
    runs: tuple[StoredRun, ...] = ()
    cost: float = math.nan
    refusal: str = ""
    failed: tuple[str, ...] = ()

    @property
    def lost(self) -> str:
        """Seeds that loss and accuracy leave out, in words; empty if they cover all seeds."""
        diverged = sum(run.status != "finished" for run in self.runs)
        counts = {"diverged": diverged, "failed": 0 if self.refusal else len(self.failed)}
        if not any(counts.values()):
            return ""
        several = " and ".join(f"{count} {word}" for word, count in counts.items() if count)
        reason = f" ({self.failed[0]})" if counts["failed"] else ""
        return f"of {len(self.runs) + len(self.failed)} seeds {several}{reason}; loss and accuracy are of the others"


@dataclass
class Comparison:
    """One study trained by several methods: over a grid of learning rates, then over seeds with the probe.

    Attributes
    ----------
    study
        The study, with its final length and probing interval.
    data
        Data set, on the device.
    rates
        The grid; None: `AROUND` times the rate that the study, or else the method itself, has, as far as is needed.
    seeds
        Seeds of the probed runs; rates are tried with the first.
    out
        ``grid/METHOD-lrRATE`` and ``METHOD-seedS`` go here; runs that are there and finished are not repeated.
    device
        Device of the runs.
    do
        Performs the runs that it is given; returns the reasons of those that failed, by folder.
    say
        Called with a line before each step.
    """

    study: StudyConfig
    data: Dataset
    rates: Sequence[float] | None
    seeds: Sequence[int]
    out: Path
    device: torch.device
    do: Runner
    say: Callable[[str], None]
    failures: dict[Path, str] = field(default_factory=dict)
    #: By method, the first and last index of the part of `AROUND` that is tried.
    reach: dict[str, tuple[int, int]] = field(default_factory=dict)

    def results(self, methods: Sequence[str]) -> Iterator[Compared]:
        """Train every method at every rate without probing, then with every seed at the best one with the probe.

        The results come in the order of ``methods``.
        """
        refusals: dict[str, str] = {}
        for method in methods:
            try:
                check_plan(self.probed(method, self.grid(method)[0], self.seeds[0]), self.data)
            except ConfigError as refusal:
                refusals[method] = str(refusal)
        able = [method for method in methods if method not in refusals]
        if not able:
            raise ConfigError("; ".join(dict.fromkeys(refusals.values())))
        due = able
        while due:
            self.perform([self.tried(method, rate) for method in due for rate in self.grid(method)])
            due = [method for method in due if self.widened(method)]
        best = {method: self.best(method) for method in able}
        self.perform(
            [
                self.probed(method, rate, seed)
                for seed in self.seeds
                for method, rate in best.items()
                if rate is not None
            ]
        )
        for method in methods:
            if method in refusals:
                yield Compared(method, refusal=refusals[method])
            elif (rate := best[method]) is None:
                failed = [self.failures.get(self.tried(method, one).folder) for one in self.grid(method)]
                said = next((reason for reason in failed if reason), "diverged at every learning rate")
                yield Compared(method, refusal=said)
            else:
                yield self.compared(method, rate)

    def compared(self, method: str, rate: float) -> Compared:
        """Result of a method at its best rate."""
        grid = self.grid(method)
        plans = [self.probed(method, rate, seed) for seed in self.seeds]
        failed = [self.failures[plan.folder] for plan in plans if plan.folder in self.failures]
        runs = tuple(open_run(plan.folder) for plan in plans if plan.folder not in self.failures)
        return Compared(
            method,
            rate,
            len(grid) > 1 and rate in (grid[0], grid[-1]),
            runs,
            self.cost(method, rate),
            refusal="" if runs else failed[0],
            failed=tuple(failed),
        )

    def perform(self, plans: Sequence[RunPlan]) -> None:
        """Perform the runs and note which failed."""
        self.failures |= self.do(plans)

    def grid(self, method: str) -> list[float]:
        """The rates to try, ascending."""
        if self.rates is not None:
            return sorted(self.rates)
        own = self.study.learning_rate(method, self.study.training.batch_size)
        lowest, highest = self.reach.setdefault(method, (AROUND.index(0.1), AROUND.index(10.0)))
        return [float(f"{factor * own:.3g}") for factor in AROUND[lowest : highest + 1]]

    def widened(self, method: str) -> bool:
        """Extend the grid of a method by a rate if the best one is at an end; return whether it was extended."""
        best, grid = self.best(method), self.grid(method)
        if self.rates is not None or best not in (grid[0], grid[-1]):
            return False
        lowest, highest = self.reach[method]
        wider = (lowest - 1, highest) if best == grid[0] else (lowest, highest + 1)
        if wider[0] < 0 or wider[1] == len(AROUND):
            return False
        self.reach[method] = wider
        return True

    @property
    def unprobed(self) -> StudyConfig:
        """The study without its probes."""
        return self.study.model_copy(update={"probe": self.study.probe.unmeasured})

    def tried(self, method: str, rate: float) -> RunPlan:
        """Plan of a run of the grid."""
        folder = self.out / "grid" / f"{parse(method).folder}-lr{rate:g}"
        return RunPlan(self.unprobed, method, self.seeds[0], rate, folder, self.device)

    def probed(self, method: str, rate: float, seed: int) -> RunPlan:
        """Plan of a run with the study's probe."""
        return RunPlan(self.study, method, seed, rate, self.out / f"{parse(method).folder}-seed{seed}", self.device)

    def best(self, method: str) -> float | None:
        """The rate with the smallest loss at the end; None if every run diverged or failed."""
        losses = {rate: final_loss(self.tried(method, rate).folder) for rate in self.grid(method)}
        rate = min(losses, key=lambda r: losses[r])
        return None if math.isinf(losses[rate]) else rate

    def cost(self, method: str, rate: float) -> float:
        """Time of an iteration divided by that of the vanilla method, read from `TIMES` or measured now.

        It is measured at the smallest rates of their grids: an iteration takes as long at any rate, and moves the
        weights least at these.
        """
        path = self.out / TIMES
        times: dict[str, float] = {}
        with suppress(OSError, ValueError):
            times = json.loads(path.read_text(encoding="utf-8"))
        name = f"{method} {rate:g}"
        if name not in times:
            self.say(f"{method}, timed beside vanilla")
            lowest = self.grid(method)[0]
            times[name] = relative_cost(self.tried(method, lowest), self.tried("vanilla", lowest), self.data)
            path.write_text(json.dumps(times, indent=1), encoding="utf-8")
        return times[name]


def one_by_one(data: Dataset, say: Callable[[str], None]) -> Runner:
    """Runner that performs runs one after another in this process; one that cannot be measured has failed."""

    def do(plans: Sequence[RunPlan]) -> dict[Path, str]:
        failed = {}
        for plan in plans:
            say(f"{plan.name}, learning rate {plan.learning_rate:g}")
            try:
                with suppress(DivergedError):  # the log says so
                    run(plan, data, resume=True)
            except RunError as error:
                failed[plan.folder] = str(error)
        return failed

    return do


def final_loss(folder: Path) -> float:
    """Mean training loss over the last tenth of the iterations; infinite if the run diverged, or is not there."""
    if not (folder / "run.sqlite").exists():
        return math.inf
    stored = open_run(folder)
    if stored.status != "finished":
        return math.inf
    losses = stored.table("training")["loss"]
    return float(losses.tail(max(1, len(losses) // 10)).mean())


def relative_cost(plan: RunPlan, yardstick: RunPlan, data: Dataset) -> float:
    """Time of an iteration over that of the yardstick, from blocks of iterations of both in turn.

    All blocks but the first are added up, so that work that a method does only every few steps has its share; NaN if
    one of the two diverges.
    """
    total = [0.0, 0.0]
    with tempfile.TemporaryDirectory() as folder:
        trainings = [
            Training(p, data, RunLog(Path(folder) / name, p.config(data)), None)
            for name, p in (("yardstick", yardstick), ("own", plan))
        ]
        try:
            for number in range(ROUNDS):
                times = [block_time(training, number * BLOCK) for training in trainings]
                if number:
                    total = [sum(pair) for pair in zip(total, times, strict=True)]
        except DivergedError:
            return math.nan
        finally:
            for training in trainings:
                training.log.close("finished")
    return total[1] / total[0]


def block_time(training: Training, first: int) -> float:
    """Seconds for some iterations from ``first`` on, on the first batches of the training set."""
    size, batches = training.batch_size, max(1, training.per_epoch)
    device = training.targets.device
    start = time.perf_counter()
    for k in range(first, first + BLOCK):
        part = slice(k % batches * size, (k % batches + 1) * size)
        training.step(k, training.inputs[part], training.targets[part])
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - start
