"""Methods side by side: each at its best learning rate of a grid, on one budget of iterations."""

from __future__ import annotations

import math
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from hesscond.data import Dataset
from hesscond.errors import ConfigError, DivergedError
from hesscond.methods import parse
from hesscond.study.config import StudyConfig
from hesscond.study.log import RunLog
from hesscond.study.runner import RunPlan, Training, check_plan, run
from hesscond.study.store import StoredRun, open_run

#: The learning rates that are tried unless others are given.
GRID = (0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0)
#: Iterations timed at a time, and how many times, the yardstick's and the method's in turn.
BLOCK, ROUNDS = 20, 7


@dataclass(frozen=True)
class Compared:
    """What came of one method.

    Attributes
    ----------
    method
        As ``--method`` says it.
    rate
        Its best learning rate of the grid, by the training loss at the end; NaN if it diverged at all of them.
    edge
        Whether that is the smallest or largest of the grid: the best may lie outside.
    run
        The probed run at that rate; None if there is none.
    cost
        Time of an iteration without probing over that of the vanilla method, median over interleaved blocks.
    refusal
        Why the method does not work here, else empty.
    """

    method: str
    rate: float = math.nan
    edge: bool = False
    run: StoredRun | None = None
    cost: float = math.nan
    refusal: str = ""


def compare(
    study: StudyConfig,
    methods: Sequence[str],
    data: Dataset,
    *,
    rates: Sequence[float],
    seed: int,
    out: Path,
    device: torch.device,
    on_run: Callable[[str], None],
) -> Iterator[Compared]:
    """Train every method at every rate without probing, then once more at the best one with the study's probe.

    Parameters
    ----------
    study
        With its final length and probing interval.
    methods
        As ``--method`` says them.
    data
        On the device.
    rates
        The grid.
    seed
        Of every run.
    out
        ``grid/METHOD-lrRATE`` and ``METHOD-seedS`` go here; runs that are there and finished are not repeated.
    device
        Where to run.
    on_run
        Called with a line before each run.

    Yields
    ------
    Compared
        In the order of ``methods``.

    Raises
    ------
    ConfigError
        A run that is there is of another configuration; no method of that name.
    """
    unprobed = study.model_copy(update={"probe": study.probe.model_copy(update={"every": 0, "train_every_epochs": 0})})
    grid = sorted(rates)
    yardstick = RunPlan(unprobed, "vanilla", seed, grid[0], out, device)
    for method in methods:
        spec = parse(method)
        plans = {
            rate: RunPlan(unprobed, method, seed, rate, out / "grid" / f"{spec.folder}-lr{rate:g}", device)
            for rate in grid
        }
        try:
            check_plan(plans[grid[0]], data)
        except ConfigError as refusal:
            yield Compared(method, refusal=str(refusal))
            continue
        losses = {}
        for rate, plan in plans.items():
            on_run(f"{method}, learning rate {rate:g}")
            losses[rate] = final_loss(finished(plan, data))
        rate = min(losses, key=lambda r: losses[r])
        if math.isinf(losses[rate]):
            yield Compared(method, refusal="diverged at every learning rate")
            continue
        on_run(f"{method}, learning rate {rate:g}, probed")
        probed = finished(RunPlan(study, method, seed, rate, out / f"{spec.folder}-seed{seed}", device), data)
        on_run(f"{method}, timed beside vanilla")
        cost = relative_cost(replace(plans[rate], learning_rate=rate), yardstick, data)
        yield Compared(method, rate, len(grid) > 1 and rate in (grid[0], grid[-1]), probed, cost)


def finished(plan: RunPlan, data: Dataset) -> StoredRun:
    """The run of a plan; one that is in its folder and was broken off is gone on with."""
    with suppress(DivergedError):  # the log says so
        run(plan, data, resume=True)
    return open_run(plan.folder)


def final_loss(stored: StoredRun) -> float:
    """Mean training loss over the last tenth of the iterations; infinite if the run diverged."""
    if stored.status != "finished":
        return math.inf
    losses = stored.table("training")["loss"]
    return float(losses.tail(max(1, len(losses) // 10)).mean())


def relative_cost(plan: RunPlan, yardstick: RunPlan, data: Dataset) -> float:
    """Time of an iteration over that of the yardstick, from blocks of iterations of both in turn."""
    ratios = []
    with tempfile.TemporaryDirectory() as folder:
        own, other = (
            Training(p, data, RunLog(Path(folder) / name, p.config(data)), None)
            for name, p in (("own", plan), ("yardstick", yardstick))
        )
        for _ in range(ROUNDS):
            times = [block_time(training) for training in (other, own)]
            ratios.append(times[1] / times[0])
        for training in (own, other):
            training.log.close("finished")
    return statistics.median(ratios[1:])


def block_time(training: Training) -> float:
    """Seconds for some iterations on the first batches of the training set."""
    size, batches = training.batch_size, max(1, training.per_epoch)
    device = training.targets.device
    start = time.perf_counter()
    for k in range(BLOCK):
        part = slice(k % batches * size, (k % batches + 1) * size)
        training.step(k, training.inputs[part], training.targets[part])
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - start
