"""Many runs at once: what of a grid is left to do, done by an executor, each run exactly once."""

from __future__ import annotations

import os
import threading
import time
import uuid
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

import torch

from hesscond.data import Dataset
from hesscond.errors import ConfigError
from hesscond.study.checkpoint import LOCK
from hesscond.study.executors import DataKey, Executor, Handle, data_key
from hesscond.study.grid import SweepConfig, check_same_sweep, write_sweep
from hesscond.study.grouping import Groups, each_alone, grouped
from hesscond.study.runner import RunPlan, check_plan
from hesscond.study.store import can_be_resumed, check_free
from hesscond.study.worker import STATES, Outcome, Task, is_locked, over

#: Seconds between two looks at what the workers do.
INTERVAL = 0.25
#: Seconds that runs have to end by themselves after a Ctrl-C.
GRACE = 20.0
#: How often a run is begun whose worker broke down each time.
ATTEMPTS = 3
#: Seconds after which a run that somebody else worked on is tried again, once: workers of a killed sweep end by then.
AGAIN = 2.0


class Watcher(Protocol):
    """What a sweep tells about itself."""

    def began(self, task: Task) -> None:
        """Runs were handed over."""

    def ended(self, outcome: Outcome) -> None:
        """A run is over."""

    def broke(self, task: Task, reason: str) -> None:
        """A worker broke down; its runs are begun again, each by itself."""

    def tick(self) -> None:
        """Time has gone by."""


@dataclass(frozen=True)
class Prepared:
    """A sweep that was checked: what is over and what is left to do."""

    plans: list[RunPlan]
    done: dict[str, Outcome]
    left: list[RunPlan]
    groups: Groups


def prepare(
    config: SweepConfig,
    plans: Sequence[RunPlan],
    data: Mapping[DataKey, Dataset],
    out: Path,
    *,
    jobs: int | None = None,
) -> Prepared:
    """Check every run of a sweep and what is in its folder, then describe the sweep there.

    Parameters
    ----------
    config, plans
        The grid.
    data
        Of every plan, by its `data_key`, on the CPU.
    out
        The sweep's folder.
    jobs
        How many tasks are done at a time, if that is known: runs that are trained together are spread over them.

    Raises
    ------
    ConfigError
        A run that would fail; a folder that holds something else, or cannot be written.
    RunError
        A run in the folder is damaged.
    """
    check_same_sweep(config, out)
    # seeds and rates make no difference to what can be checked; a cluster's GPU need not be in this machine
    for plan in {(id(plan.study), plan.method): plan for plan in reversed(plans)}.values():
        check_plan(replace(plan, device=torch.device("cpu")), data[data_key(plan)])
    done, left = {}, []
    for plan in plans:
        ended = already_over(plan, data[data_key(plan)])
        if ended is None:
            left.append(plan)
        else:
            done[ended.name] = ended
    try:
        (out / STATES).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"the folder {out} cannot be written: {error.strerror}") from None
    write_sweep(config, out)
    return Prepared(list(plans), done, left, grouped(left, data, jobs) if config.together else each_alone(left))


def already_over(plan: RunPlan, data: Dataset) -> Outcome | None:
    """How a run ended before; None if it is still to be done, or somebody is at it.

    Raises
    ------
    ConfigError
        Its folder holds a run of another configuration, or something else.
    RunError
        The run is damaged.
    """
    claim = plan.folder.parent / STATES / f"{plan.folder.name}.lock"
    # a log that is being written is not looked into
    if is_locked(claim) or is_locked(plan.folder / LOCK):
        return None
    if (plan.folder / "run.sqlite").exists():
        can_be_resumed(plan.folder, plan.config(data))
        return over(plan.folder)
    check_free(plan.folder, begun=True)
    return None


def sweep(
    groups: Sequence[Sequence[RunPlan]],
    executor: Executor,
    watcher: Watcher,
    *,
    threads: int,
    data_dir: Path | None = None,
) -> dict[str, Outcome]:
    """Do runs of one sweep.

    Parameters
    ----------
    groups
        What is left to do: the runs of each task.
    executor
        Where; it is closed at the end.
    watcher
        Told what happens.
    threads
        Of each task.
    data_dir
        Where workers that load the data sets themselves look for them.

    Returns
    -------
    dict
        How each run ended, by the name of its folder.

    Raises
    ------
    KeyboardInterrupt
        Raised while it waited; the runs in flight have been stopped, and can be gone on with.
    """
    if not groups:
        executor.close()
        return {}
    states = groups[0][0].folder.parent / STATES
    stop = states / f"stop-{os.getpid()}-{uuid.uuid4().hex}"
    at_work = AtWork(executor, watcher, [Task(tuple(plans), None, data_dir, threads, stop) for plans in groups])
    try:
        at_work.until_done()
    except KeyboardInterrupt:
        stop.touch()
        executor.withdraw()
        at_work.until_stopped(GRACE)
        raise
    finally:
        executor.close()
        with suppress(OSError):
            stop.unlink()
    return at_work.outcomes


class AtWork:
    """The tasks of a sweep: those that wait, those in flight, and how the others ended."""

    def __init__(self, executor: Executor, watcher: Watcher, tasks: Sequence[Task]) -> None:
        self.executor, self.watcher = executor, watcher
        self.waiting = deque(tasks)
        self.flying: list[tuple[Task, Handle]] = []
        self.busy: list[Task] = []
        self.attempts: dict[str, int] = {}
        self.outcomes: dict[str, Outcome] = {}
        self.wake = threading.Event()

    def until_done(self) -> None:
        """All of them; those that were busy once more at the end."""
        self.go_on()
        if self.busy:
            again, self.busy = self.busy, []
            pause_until = time.monotonic() + AGAIN
            while time.monotonic() < pause_until:
                time.sleep(INTERVAL)
                self.watcher.tick()
            self.waiting.extend(again)
            self.go_on()
        for task in self.busy:
            (name,) = task.names
            self.end(Outcome(name, "busy", "another process works on it"))

    def go_on(self) -> None:
        """Until nothing waits and nothing is in flight."""
        while self.waiting or self.flying:
            room = self.executor.capacity - len(self.flying)
            tasks = [self.waiting.popleft() for _ in range(int(min(room, len(self.waiting))))]
            for task in tasks:
                self.watcher.began(task)
            if tasks:
                handles = self.executor.submit(tasks, lambda _: self.wake.set())
                self.flying += zip(tasks, handles, strict=True)
            self.wake.wait(INTERVAL)
            self.wake.clear()
            self.collect()
            self.watcher.tick()

    def until_stopped(self, seconds: float) -> None:
        """Until nothing is in flight, or the time is up."""
        self.waiting.clear()
        end = time.monotonic() + seconds
        while self.flying and time.monotonic() < end:
            self.wake.wait(INTERVAL)
            self.wake.clear()
            self.collect(begin_again=False)

    def collect(self, *, begin_again: bool = True) -> None:
        """Take what is over."""
        over = [(task, handle) for task, handle in self.flying if handle.done()]
        self.flying = [pair for pair in self.flying if pair not in over]
        for task, handle in over:
            try:
                outcomes = handle.result()
            # whatever it is: a process that was killed, a cluster's job that failed
            except Exception as error:
                self.broken(task, error, begin_again)
                continue
            for outcome, alone in zip(outcomes, task.apart(), strict=True):
                if outcome.status == "busy":
                    self.busy.append(alone)
                else:
                    self.end(outcome)

    def broken(self, task: Task, error: Exception, begin_again: bool) -> None:
        """A worker broke down: begin its runs again, each by itself, unless that has been tried."""
        reason = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
        again = []
        for alone in task.apart():
            (name,) = alone.names
            times = self.attempts[name] = self.attempts.get(name, 0) + 1
            if begin_again and times < ATTEMPTS:
                again.append(alone)
            else:
                self.end(Outcome(name, "failed", f"its worker broke down {times} times ({reason})"))
        if again:
            self.watcher.broke(replace(task, plans=tuple(plan for alone in again for plan in alone.plans)), reason)
            self.waiting.extendleft(reversed(again))

    def end(self, outcome: Outcome) -> None:
        """How a run ended."""
        self.outcomes[outcome.name] = outcome
        self.watcher.ended(outcome)
