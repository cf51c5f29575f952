"""What a sweep needs to know of Slurm: its options, the states of its jobs, and how each ended."""

from __future__ import annotations

import os
import re
import subprocess
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from hesscond.errors import ConfigError
from hesscond.study.worker import Outcome, Task

#: Parameters that submitit knows for every cluster, and shorter names for them.
SHARED = {"time": "timeout_min", "mem": "mem_gb", "cpus": "cpus_per_task", "gpus": "gpus_per_node"}
SHARED |= {name: name for name in SHARED.values()}
SHARED["name"] = "name"
#: Shared parameters that are numbers.
NUMBERS = set(SHARED.values()) - {"name"}
#: What is used of Slurm.
COMMANDS = ("sbatch", "srun", "squeue", "scancel")
#: Least time limit in minutes: Slurm gives notice 90 to 150 seconds before, and a job needs some to start.
LEAST = 5
#: Jobs in an array: Slurm's MaxArraySize is 1001 unless it was configured.
ARRAY = 1000
#: Seconds between two calls of squeue.
POLL = 10.0
#: Seconds that a file from another machine may take to be seen.
GRACE = 15.0
#: States that a job does not leave by itself.
ENDED = {"BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY", "TIMEOUT", "GONE"}


class LostJobError(RuntimeError):
    """A job ended and left no result."""


class Queue:
    """The states of this user's jobs, by ``squeue``: unlike ``sacct`` it needs no accounting, which many lack."""

    def __init__(self) -> None:
        self._asked = float("-inf")
        self._states: dict[str, str] | None = None

    def ask(self) -> None:
        """Call squeue."""
        command = ["squeue", "--user", str(os.getuid()), "--states=all", "--array", "--noheader", "--format=%i %T"]
        self._asked = time.monotonic()
        try:
            answer = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True).stdout
        except (OSError, subprocess.SubprocessError):
            self._states = None
            return
        self._states = {line.split()[0]: line.split()[1] for line in answer.splitlines() if line.strip()}

    def state(self, job: str, since: float) -> str:
        """A job's state; GONE if Slurm has forgotten it, UNKNOWN if Slurm did not answer since it was submitted."""
        if time.monotonic() - self._asked > POLL:
            self.ask()
        if self._states is None or self._asked < since:
            return "UNKNOWN"
        return self._states.get(job, "GONE")


class SlurmHandle:
    """A task that was handed over to Slurm.

    Parameters
    ----------
    job
        As submitit knows it.
    task
        What it does.
    queue
        Where its state is found.
    """

    def __init__(self, job: Any, task: Task, queue: Queue) -> None:
        self.job, self.task, self.queue = job, task, queue
        self.since = time.monotonic()
        self.state = "PENDING"
        #: Whether the sweep does not want it any more.
        self.withdrawn = False
        self._ended: float | None = None

    @property
    def has_result(self) -> bool:
        """Whether its result is there."""
        return bool(self.job.paths.result_pickle.exists())

    def done(self) -> bool:
        """Whether it is over."""
        if self.has_result:
            return True
        self.state = self.queue.state(self.job.job_id, self.since)
        if self.state not in ENDED:
            self._ended = None
            return False
        if self._ended is None:
            self._ended = time.monotonic()
        with suppress(OSError):  # makes NFS look again
            self.job.paths.folder.chmod(self.job.paths.folder.stat().st_mode)
        return self.state == "CANCELLED" or time.monotonic() - self._ended > GRACE

    def result(self) -> list[Outcome]:
        """How its runs ended.

        Raises
        ------
        LostJobError
            It left no result.
        """
        if self.has_result:
            outcomes: list[Outcome] = self.job.result()
            return outcomes
        if self.withdrawn:
            return [Outcome(name, "interrupted") for name in self.task.names]
        raise LostJobError(f"Slurm job {self.job.job_id} ended as {self.state}, see {self.job.paths.stderr}")


def cancel(handles: Sequence[SlurmHandle], *options: str) -> None:
    """Cancel those of some jobs that have no result."""
    jobs = [handle.job.job_id for handle in handles if not handle.has_result]
    if jobs:
        with suppress(OSError):
            # those that have ended meanwhile are no failure
            subprocess.run(["scancel", "--quiet", *options, *jobs], capture_output=True, check=False)


def parameters_of(options: str, threads: int, jobs: int | None) -> tuple[str, dict[str, Any]]:
    """The cluster of ``--slurm``, and what submitit is to be told.

    Options of sbatch, which submitit need not know, are handed through; sbatch checks them.

    Raises
    ------
    ConfigError
        Not of the form KEY=VALUE,…; a value that is not of its kind; a time limit that is too short to go on after it.
    """
    given = dict(parse_option(text) for text in options.split(","))
    cluster = given.pop("cluster", "slurm")
    if cluster not in ("slurm", "local"):
        raise ConfigError(f"--slurm cluster={cluster}: slurm, or local for processes on this machine")
    shared: dict[str, Any] = {SHARED[key]: value for key, value in given.items() if key in SHARED}
    rest = {key: value for key, value in given.items() if key not in SHARED}
    for key, value in given.items():
        if SHARED.get(key) in NUMBERS and isinstance(value, str | bool):
            unit = " of GB" if SHARED[key] == "mem_gb" else ""
            raise ConfigError(f"--slurm {key}={value}: it must be a number{unit}")
    parameters = {"name": "hesscond", "cpus_per_task": threads} | shared
    if cluster == "local":
        if rest:
            raise ConfigError(f"--slurm cluster=local takes {', '.join(sorted(SHARED))}, not {', '.join(rest)}")
        return str(cluster), parameters
    if shared.get("timeout_min", LEAST) < LEAST:
        raise ConfigError(
            f"--slurm time={shared['timeout_min']}: at least {LEAST} minutes, of which Slurm takes up to 2.5 as notice "
            "that the time is up"
        )
    if jobs is not None:
        parameters["slurm_array_parallelism"] = jobs
    # srun no longer takes it from sbatch (Slurm 22.05)
    parameters["slurm_srun_args"] = [f"--cpus-per-task={parameters['cpus_per_task']}"]
    parameters["slurm_additional_parameters"] = rest
    return str(cluster), parameters


def parse_option(text: str) -> tuple[str, str | int | float | bool]:
    """A Slurm option from ``KEY=VALUE``; ``true`` is an option without a value.

    Raises
    ------
    ConfigError
        Not of this form.

    Examples
    --------
    >>> parse_option("partition=gpu"), parse_option("time=1:30:00"), parse_option("gpus=2")
    (('partition', 'gpu'), ('time', 90), ('gpus', 2))
    """
    key, equals, value = (part.strip() for part in text.partition("="))
    if not key or not equals or not value:
        raise ConfigError(f"--slurm takes KEY=VALUE[,KEY=VALUE…] as in partition=gpu,time=120, not {text!r}")
    if key == "time" and not value.isdecimal():
        match = re.fullmatch(r"(?:(\d+)-)?(\d+):(\d+):(\d+)", value)
        if match is None:
            raise ConfigError(f"--slurm time={value}: minutes, or [D-]HH:MM:SS")
        days, hours, minutes, seconds = (int(part or 0) for part in match.groups())
        return key, 1440 * days + 60 * hours + minutes + -(-seconds // 60)
    if value == "true":
        return key, True
    if value.isdecimal():
        return key, int(value)
    return key, float(value) if re.fullmatch(r"\d+\.\d+", value) else value


def said_by_sbatch(error: Exception) -> str:
    """Why sbatch refused jobs, without its own name."""
    lines = [line.removeprefix("sbatch: ").removeprefix("error: ").strip() for line in str(error).splitlines()]
    return "; ".join(line for line in lines if line)
