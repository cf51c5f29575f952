"""Runs of a sweep in a worker process: claimed by locks, watched through files, stopped through another.

The folder is all that workers and the sweep share, so that it makes no difference where a worker runs.
"""

from __future__ import annotations

import json
import os
import socket
import threading
import time
import traceback
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from filelock import AcquireReturnProxy, FileLock, Timeout
from threadpoolctl import threadpool_limits

from hesscond.data import Dataset
from hesscond.errors import DivergedError, HesscondError, RunError
from hesscond.study.checkpoint import LOCK
from hesscond.study.datasets import load_data
from hesscond.study.runner import Progress, RunPlan, run
from hesscond.study.sections import DataConfig
from hesscond.study.store import OVER, open_run
from hesscond.study.together import JointProgress, is_new, run_together

#: Where a sweep keeps locks and states, in its folder.
STATES = ".sweep"
#: Seconds between two writes of a run's state, and between two looks whether to stop.
INTERVAL = 0.5

#: Runs share torch's random state and its threads: one at a time in a process.
one_at_a_time = threading.Lock()


@dataclass(frozen=True)
class Task:
    """A run for a worker, or runs that it trains together.

    Attributes
    ----------
    plans
        What to run; several differ in seed and folder only.
    data
        File with the data set (`torch.save`), which workers map into their memory; None: each loads it by itself.
    data_dir
        As for `hesscond.data.load`.
    threads
        Of a run, or of runs together.
    stop
        When this file exists, the runs end as after a Ctrl-C.
    saved
        The newest checkpoint of each run when Slurm last stopped the job.
    """

    plans: tuple[RunPlan, ...]
    data: Path | None
    data_dir: Path | None
    threads: int
    stop: Path
    saved: tuple[str, ...] | None = None

    @property
    def names(self) -> list[str]:
        """The names of the runs' folders."""
        return [plan.folder.name for plan in self.plans]

    @property
    def states(self) -> Path:
        """The folder for locks and states."""
        return self.plans[0].folder.parent / STATES

    def __call__(self) -> list[Outcome]:
        """Do it."""
        return work(self)

    def apart(self) -> list[Task]:
        """A task for each of the runs."""
        return [replace(self, plans=(plan,)) for plan in self.plans]

    def checkpoint(self) -> Any:
        """What Slurm shall start again when the job's time is up: the same, which goes on from the checkpoint.

        Raises
        ------
        RunError
            There is no newer checkpoint than the last time: it would never end.
        """
        from submitit.helpers import DelayedSubmission

        folders = [plan.folder / LOCK.parent for plan in self.plans]
        saved = tuple(max((path.name for path in folder.glob("*.pt")), default="") for folder in folders)
        if saved == self.saved:
            raise RunError(
                "the job's time was up twice without a checkpoint between: give a longer --slurm time, or a smaller "
                "training.checkpoint_seconds"
            )
        return DelayedSubmission(replace(self, saved=saved))


@dataclass(frozen=True)
class Outcome:
    """How a run ended: ``finished``, ``diverged``, ``failed``, ``interrupted``, or ``busy``: another works on it."""

    name: str
    status: str
    message: str = ""


@dataclass(frozen=True)
class State:
    """A run as its worker sees it.

    Attributes
    ----------
    status
        ``running``, or as in `Outcome`.
    iteration, iterations
        Done, and in all.
    loss, kappa, resolved
        The last ones; None before the first.
    rate
        Iterations a second since this start.
    seconds
        Since this start.
    starts
        How often it was begun or gone on with.
    host, pid
        The worker.
    """

    status: str = "running"
    iteration: int = 0
    iterations: int = 0
    loss: float | None = None
    kappa: float | None = None
    resolved: bool = True
    rate: float | None = None
    seconds: float = 0.0
    starts: int = 0
    host: str = ""
    pid: int = 0


def read_state(states: Path, name: str) -> State:
    """The state of a run; an empty one if it was never begun."""
    try:
        return State(**json.loads((states / f"{name}.json").read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return State(status="waiting")


class Reporter:
    """Writes a run's state.

    Parameters
    ----------
    states
        The folder for it.
    name
        Of the run.
    """

    def __init__(self, states: Path, name: str) -> None:
        self.path = states / f"{name}.json"
        before = read_state(states, name)
        self.state = replace(
            before, status="running", rate=None, starts=before.starts + 1, host=socket.gethostname(), pid=os.getpid()
        )
        self.began = time.monotonic()
        self.progress: Progress | None = None
        self.first = 0, self.began
        self.write()

    def saw(self, progress: Progress | None) -> None:
        """How far the run is; None: it has diverged, and what it was trained with goes on."""
        if progress is None:
            if self.state.status == "running":
                self.write(status="diverged")
            return
        if self.progress is None:
            self.first = progress.iteration, time.monotonic()
        self.progress = progress

    def write(self, **changes: Any) -> None:
        """The state, whole or not at all."""
        now = time.monotonic()
        self.state = replace(self.state, seconds=now - self.began, **self.measured(now), **changes)
        partial = self.path.with_suffix(".partial")
        # what is only shown is not worth a run: a full disk stops the run where it cannot write its log
        with suppress(OSError):
            partial.write_text(json.dumps(asdict(self.state)), encoding="utf-8")
            partial.replace(self.path)

    def measured(self, now: float) -> dict[str, Any]:
        """What the last iteration came to."""
        progress = self.progress
        if progress is None:
            return {}
        iteration, since = self.first
        row = progress.row or {}
        return {
            "iteration": progress.iteration,
            "iterations": progress.iterations,
            "loss": progress.loss,
            "kappa": row.get("kappa", self.state.kappa),
            "resolved": bool(row.get("resolved", self.state.resolved)),
            "rate": (progress.iteration - iteration) / (now - since) if now > since else None,
        }


class Watched:
    """Told of the runs of a task after every iteration: writes their states from time to time, ends them when asked to.

    Parameters
    ----------
    task
        Whose they are.
    plans
        Those of its runs that are done now.
    """

    def __init__(self, task: Task, plans: Sequence[RunPlan]) -> None:
        self.stop = task.stop
        self.reporters = [Reporter(task.states, plan.folder.name) for plan in plans]
        self.progress: Progress | None = None
        self.written = time.monotonic()

    def __call__(self, progress: Progress) -> None:
        """After an iteration."""
        first, self.progress = self.progress is None, progress
        if first:
            self.pass_on()
        if time.monotonic() - self.written < INTERVAL:
            return
        if self.stop.exists():
            raise KeyboardInterrupt
        self.pass_on()
        for reporter in self.reporters:
            if reporter.state.status == "running":
                reporter.write()
        self.written = time.monotonic()

    def pass_on(self) -> None:
        """Tell each run's reporter how far its run is."""
        if self.progress is None:
            return
        each = self.progress.each() if isinstance(self.progress, JointProgress) else [self.progress]
        for reporter, progress in zip(self.reporters, each, strict=True):
            reporter.saw(progress)

    def over(self, outcomes: Sequence[Outcome]) -> None:
        """How the runs ended."""
        self.pass_on()
        for reporter, outcome in zip(self.reporters, outcomes, strict=True):
            reporter.write(status=outcome.status)


def work(task: Task) -> list[Outcome]:
    """Do runs, or go on with them; whatever happens to one is in its outcome.

    Those of several that have begun before are done one after another, and so are those that are left when others are
    worked on elsewhere.
    """
    done = {outcome.name: outcome for outcome in work_together(task)}
    return [done.get(alone.names[0]) or work_alone(alone) for alone in task.apart()]


def work_alone(task: Task) -> Outcome:
    """Do the one run of a task."""
    (plan,) = task.plans
    if (claim := claimed(plan)) is None:
        return Outcome(plan.folder.name, "busy")
    with claim:
        if (ended := over(plan.folder)) is not None:  # another sweep on the folder was faster
            return ended
        (outcome,) = do(task, task.plans)
        return outcome


def work_together(task: Task) -> list[Outcome]:
    """Do those of several runs together that have not begun."""
    with ExitStack() as claims:
        mine = []
        for plan in task.plans if len(task.plans) > 1 else ():
            if (claim := claimed(plan)) is not None:
                claims.enter_context(claim)
                mine += [plan] if is_new(plan) else []
        return do(task, mine) if len(mine) > 1 else []


def claimed(plan: RunPlan) -> AcquireReturnProxy | None:
    """A lock that keeps others from a run, and ends with the process, however that ends; None: somebody has it."""
    if is_locked(plan.folder / LOCK):  # by `hesscond study --resume`
        return None
    try:
        return FileLock(plan.folder.parent / STATES / f"{plan.folder.name}.lock", timeout=0).acquire()
    except Timeout:
        return None


def do(task: Task, plans: Sequence[RunPlan]) -> list[Outcome]:
    """Do runs of a task that are claimed: one, or several together."""
    # of all libraries that add in parallel: torch's, and the BLAS of numpy and of scipy
    with one_at_a_time, threadpool_limits(task.threads):
        if task.stop.exists():
            return [Outcome(plan.folder.name, "interrupted") for plan in plans]
        watched = Watched(task, plans)
        try:
            outcomes = attempt(task, plans, watched)
        except SystemExit:  # the job was queued again
            watched.over([Outcome(plan.folder.name, "waiting") for plan in plans])
            raise
        watched.over(outcomes)
        return outcomes


def attempt(task: Task, plans: Sequence[RunPlan], watched: Watched) -> list[Outcome]:
    """The runs, and how they ended."""
    torch.set_num_threads(task.threads)
    status, message = "failed", "it ended without saying so in its log"
    try:
        data = dataset(task.data, plans[0].study.data.model_dump_json(), task.data_dir, plans[0].device)
        if len(plans) > 1:
            run_together(plans, data, watched)
        else:
            run(plans[0], data, watched, resume=True)
    except DivergedError as error:
        status, message = "diverged", str(error)
    except KeyboardInterrupt:
        status, message = "interrupted", ""
    except HesscondError as error:
        message = str(error)
    except Exception as error:
        trace = task.states / f"{plans[0].folder.name}.traceback"
        with suppress(OSError):
            trace.write_text(traceback.format_exc(), encoding="utf-8")
        reason = str(error).partition("\n")[0]
        message = f"{type(error).__name__}: {reason} (see {trace})"
    outcomes = []
    for plan in plans:
        outcome = Outcome(plan.folder.name, status, message)
        # of runs together, some may be over before the others break off; a damaged log has been spoken of
        with suppress(RunError):
            outcome = over(plan.folder) or outcome
        outcomes.append(outcome)
    return outcomes


def over(folder: Path) -> Outcome | None:
    """How a run ended that need not go on; None if there is none, or it was broken off.

    Raises
    ------
    RunError
        Its folder is damaged.
    """
    if not (folder / "run.sqlite").exists():
        return None
    stored = open_run(folder)
    return Outcome(folder.name, stored.status, stored.facts.get("message", "")) if stored.status in OVER else None


def is_locked(path: Path) -> bool:
    """Whether another process holds a lock."""
    if not path.exists():
        return False
    try:
        with FileLock(path, timeout=0):
            return False
    except (Timeout, OSError):
        return True


@lru_cache(maxsize=4)
def dataset(file: Path | None, config: str, data_dir: Path | None, device: torch.device) -> Dataset:
    """The data on the device, read once in a process; what is mapped from a file is in memory once for all."""
    if file is None:
        return load_data(DataConfig.model_validate_json(config), data_dir).to(device)
    data: Dataset = torch.load(file, mmap=True, weights_only=False)
    return data.to(device)
