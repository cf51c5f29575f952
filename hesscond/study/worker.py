"""One run of a sweep in a worker process: claimed by a lock, watched through a file, stopped through another.

The folder is all that workers and the sweep share, so that it makes no difference where a worker runs.
"""

from __future__ import annotations

import json
import os
import socket
import threading
import time
import traceback
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock, Timeout
from threadpoolctl import threadpool_limits

from hesscond.data import Dataset
from hesscond.errors import DivergedError, HesscondError
from hesscond.study.datasets import load_data
from hesscond.study.runner import Progress, RunPlan, run
from hesscond.study.sections import DataConfig
from hesscond.study.store import OVER, open_run

#: Where a sweep keeps locks and states, in its folder.
STATES = ".sweep"
#: Seconds between two writes of a run's state, and between two looks whether to stop.
INTERVAL = 0.5

#: Runs share torch's random state and its threads: one at a time in a process.
one_at_a_time = threading.Lock()


@dataclass(frozen=True)
class Task:
    """A run for a worker.

    Attributes
    ----------
    plan
        What to run.
    data
        File with the data set (`torch.save`), which workers map into their memory; None: each loads it by itself.
    data_dir
        As for `hesscond.data.load`.
    threads
        Of the run.
    stop
        When this file exists, the run ends as after a Ctrl-C.
    """

    plan: RunPlan
    data: Path | None
    data_dir: Path | None
    threads: int
    stop: Path

    @property
    def name(self) -> str:
        """The name of the run's folder."""
        return self.plan.folder.name

    @property
    def states(self) -> Path:
        """The folder for locks and states."""
        return self.plan.folder.parent / STATES

    def __call__(self) -> Outcome:
        """Do it."""
        return work(self)

    def checkpoint(self) -> Any:
        """What Slurm shall start again when the job's time is up: the same, which goes on from the checkpoint."""
        from submitit.helpers import DelayedSubmission

        return DelayedSubmission(self)


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
    """Writes a run's state from time to time, and ends the run when asked to."""

    def __init__(self, task: Task) -> None:
        self.task = task
        before = read_state(task.states, task.name)
        self.state = replace(
            before, status="running", rate=None, starts=before.starts + 1, host=socket.gethostname(), pid=os.getpid()
        )
        self.began = time.monotonic()
        self.progress: Progress | None = None
        self.first = 0, self.began
        self.write()

    def __call__(self, progress: Progress) -> None:
        """After an iteration."""
        now = time.monotonic()
        if self.progress is None:
            self.first = progress.iteration, now
        self.progress = progress
        if now - self.written < INTERVAL:
            return
        if self.task.stop.exists():
            raise KeyboardInterrupt
        self.write()

    def write(self, **changes: Any) -> None:
        """The state, whole or not at all."""
        self.written = time.monotonic()
        self.state = replace(self.state, seconds=self.written - self.began, **self.measured(self.written), **changes)
        path = self.task.states / f"{self.task.name}.json"
        partial = path.with_suffix(".partial")
        # what is only shown is not worth a run: a full disk stops the run where it cannot write its log
        with suppress(OSError):
            partial.write_text(json.dumps(asdict(self.state)), encoding="utf-8")
            partial.replace(path)

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


def work(task: Task) -> Outcome:
    """Do a run, or go on with it; whatever happens to it is in the outcome.

    Nobody else does it meanwhile: the claim is a lock that ends with the process, however that ends.
    """
    if is_locked(task.plan.folder / "checkpoints" / "lock"):  # by `hesscond study --resume`
        return Outcome(task.name, "busy")
    try:
        claim = FileLock(task.states / f"{task.name}.lock", timeout=0).acquire()
    except Timeout:
        return Outcome(task.name, "busy")
    # of all libraries that add in parallel: torch's, and the BLAS of numpy and of scipy
    with claim, one_at_a_time, threadpool_limits(task.threads):
        if task.stop.exists():
            return Outcome(task.name, "interrupted")
        if (ended := over(task.plan.folder)) is not None:  # another sweep on the folder was faster
            return ended
        reporter = Reporter(task)
        outcome = attempt(task, reporter)
        reporter.write(status=outcome.status)
        return outcome


def attempt(task: Task, reporter: Reporter) -> Outcome:
    """The run, without the claim."""
    torch.set_num_threads(task.threads)
    try:
        data = dataset(task.data, task.plan.study.data.model_dump_json(), task.data_dir, task.plan.device)
        run(task.plan, data, reporter, resume=True)
    except DivergedError as error:
        return Outcome(task.name, "diverged", str(error))
    except KeyboardInterrupt:
        return Outcome(task.name, "interrupted")
    except HesscondError as error:
        return Outcome(task.name, "failed", str(error))
    except Exception as error:
        trace = task.states / f"{task.name}.traceback"
        with suppress(OSError):
            trace.write_text(traceback.format_exc(), encoding="utf-8")
        reason = str(error).partition("\n")[0]
        return Outcome(task.name, "failed", f"{type(error).__name__}: {reason} (see {trace})")
    return over(task.plan.folder) or Outcome(task.name, "failed", "it ended without saying so in its log")


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
