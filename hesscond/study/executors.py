"""Where the runs of a sweep are done: in processes on this machine, by a Dask scheduler, or by Slurm."""

from __future__ import annotations

import io
import os
import shutil
import signal
import sys
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stderr
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import torch

from hesscond.data import Dataset
from hesscond.errors import ConfigError
from hesscond.study.runner import RunPlan
from hesscond.study.slurm import ARRAY, COMMANDS, Queue, SlurmHandle, cancel, parameters_of, said_by_sbatch
from hesscond.study.worker import Outcome, Task

#: A data set and what was done to it.
DataKey = tuple[str, tuple[str, ...]]


def data_key(plan: RunPlan) -> DataKey:
    """What tells the data of a run from those of another."""
    return plan.study.data.name, plan.study.data.preparation


class Handle(Protocol):
    """A task that was handed over."""

    def done(self) -> bool:
        """Whether it is over."""

    def result(self) -> list[Outcome]:
        """How its runs ended; any exception says that the worker broke down."""


class Executor(ABC):
    """Does runs.

    Attributes
    ----------
    capacity
        How many runs are handed over at a time; infinite where something else keeps the queue.
    """

    capacity: float

    @abstractmethod
    def submit(self, tasks: Sequence[Task], wake: Callable[[Any], None]) -> list[Handle]:
        """Hand runs over; ``wake`` may be called (with anything) when one is over."""

    @abstractmethod
    def withdraw(self) -> None:
        """Take back what has not begun and would not begin soon."""

    @abstractmethod
    def close(self) -> None:
        """Give everything back; what still runs is killed."""


class LocalProcesses(Executor):
    """Worker processes on this machine (loky), one run at a time in each.

    Each is a pool of its own: where one breaks down the others do not notice.

    Parameters
    ----------
    jobs
        How many.
    threads
        Of each run.
    devices
        Given to the workers by turns; GPUs are addressed as ``cuda``, so that a run can go on on another one.
    data
        Put into files that all workers map into their memory.
    """

    def __init__(
        self, jobs: int, threads: int, devices: Sequence[torch.device], data: Mapping[DataKey, Dataset]
    ) -> None:
        from joblib.externals.loky.backend import resource_tracker

        self.capacity = jobs
        self._folder = Path(tempfile.mkdtemp(prefix="hesscond-sweep-"))
        # removed also when this process is killed
        resource_tracker.register(str(self._folder), "folder")
        self._files = {key: self._folder / f"{number}.pt" for number, key in enumerate(data)}
        for key, file in self._files.items():
            torch.save(data[key], file)
        self._slots = [Slot(threads, devices[number % len(devices)]) for number in range(jobs)]

    def submit(self, tasks: Sequence[Task], wake: Callable[[Any], None]) -> list[Handle]:
        """Each to a free worker."""
        free = [slot for slot in self._slots if slot.free]
        handles: list[Handle] = []
        for slot, task in zip(free, tasks, strict=False):
            future = slot.submit(replace(task, data=self._files.get(data_key(task.plans[0]))))
            future.add_done_callback(wake)
            handles.append(future)
        return handles

    def withdraw(self) -> None:
        """All has begun."""

    def close(self) -> None:
        """End the workers and remove the files."""
        from joblib.externals.loky.backend import resource_tracker

        for slot in self._slots:
            slot.close()
        shutil.rmtree(self._folder, ignore_errors=True)
        resource_tracker.unregister(str(self._folder), "folder")


class Slot:
    """One worker process, and another one after it broke down."""

    def __init__(self, threads: int, device: torch.device) -> None:
        self._threads, self._device = threads, device
        self._pool: Any = None
        self._future: Any = None

    @property
    def free(self) -> bool:
        """Whether it does nothing."""
        return self._future is None or self._future.done()

    def submit(self, task: Task) -> Any:
        """Begin a run; returns its future."""
        from joblib.externals.loky import ProcessPoolExecutor

        if self._future is not None and self._future.exception() is not None:
            self.close()
        if self._pool is None:
            variables = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
            self._pool = ProcessPoolExecutor(
                max_workers=1,
                initializer=start_worker,
                initargs=(os.getpid(), self._device),
                env={name: str(self._threads) for name in variables},
            )
        self._future = self._pool.submit(task)
        return self._future

    def close(self) -> None:
        """Kill the process."""
        if self._pool is not None:
            self._pool.shutdown(wait=True, kill_workers=True)
        self._pool = self._future = None


def start_worker(parent: int, device: torch.device) -> None:
    """What a worker process does first: it listens to its sweep only, ends with it, and takes its GPU."""
    import gc
    import threading
    import time

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # loky collects garbage about once a second; what was imported, torch above all, need not be searched each time
    gc.freeze()

    def watch() -> None:
        # a killed sweep takes its workers along: runs are made to be killed, and the next sweep needs them free
        while os.getppid() == parent:
            time.sleep(0.2)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
    if device.type == "cuda":
        torch.cuda.set_device(device)


class DaskCluster(Executor):
    """The workers of a running Dask scheduler, which see the sweep's folder under the same path.

    Parameters
    ----------
    address
        Of the scheduler: ``tcp://host:8786``.
    jobs
        How many runs at a time; None: as many as there are workers.

    Raises
    ------
    ConfigError
        Dask is not installed; no scheduler answers, or it has workers with several threads.
    """

    def __init__(self, address: str, jobs: int | None) -> None:
        try:
            from distributed import Client
        except ImportError:
            raise ConfigError("--dask needs Dask: pip install 'hesscond[dask]'") from None
        try:
            self._client = Client(address, timeout="10s", set_as_default=False)
        except (OSError, ValueError, TimeoutError) as error:
            raise ConfigError(f"no Dask scheduler answers at {address}: {str(error).partition(chr(10))[0]}") from None
        threads = [worker["nthreads"] for worker in self._client.scheduler_info(n_workers=-1)["workers"].values()]
        if any(number > 1 for number in threads):
            self._client.close()
            raise ConfigError(
                f"the Dask workers at {address} have up to {max(threads)} threads, but runs in one process share "
                "torch's random state: start them with dask worker --nthreads 1"
            )
        self.capacity = jobs or float("inf")
        self._futures: list[Any] = []

    def submit(self, tasks: Sequence[Task], wake: Callable[[Any], None]) -> list[Handle]:
        """To the scheduler's queue."""
        futures = [self._client.submit(task, pure=False) for task in tasks]
        for future in futures:
            future.add_done_callback(wake)
        self._futures += futures
        return list(futures)

    def withdraw(self) -> None:
        """What waits begins as what runs ends, and ends at once by the sweep's stop file."""

    def close(self) -> None:
        """Withdraw what waits; what runs ends by the sweep's stop file."""
        self._client.cancel([future for future in self._futures if not future.done()])
        self._client.close()


class Slurm(Executor):
    """Slurm through submitit: job arrays, each task a job that is queued again when its time is up.

    Parameters
    ----------
    options
        ``partition=gpu,time=120,gpus=1``: ``time`` (minutes, or [D-]HH:MM:SS), ``mem`` (GB), ``cpus``, ``gpus``,
        ``name``, and any option of sbatch; ``cluster=local`` starts processes on this machine instead.
    folder
        For submitit's files.
    threads
        CPUs of a job unless ``cpus`` says it.
    jobs
        How many of an array at a time; None: as Slurm has room.

    Raises
    ------
    ConfigError
        submitit is not installed; there is no Slurm; an option that cannot be.
    """

    def __init__(self, options: str, folder: Path, threads: int, jobs: int | None) -> None:
        try:
            import submitit
        except ImportError:
            raise ConfigError("--slurm needs submitit: pip install 'hesscond[slurm]'") from None
        self._options = options
        cluster, parameters = parameters_of(options, threads, jobs)
        missing = [name for name in COMMANDS if shutil.which(name) is None]
        if cluster == "slurm" and missing:
            raise ConfigError(f"--slurm {options}: there is no Slurm here, {', '.join(missing)} cannot be found")
        # how often a job may be queued again is for `Task.checkpoint` to say
        self._executor = submitit.AutoExecutor(folder=folder, cluster=cluster, slurm_max_num_timeout=sys.maxsize)
        self._executor.update_parameters(**parameters)
        self._queue = Queue() if cluster == "slurm" else None
        # Slurm keeps the queue; processes on this machine would all start at once
        self.capacity = float("inf") if self._queue else jobs or 1
        self._handles: list[Any] = []

    def submit(self, tasks: Sequence[Task], wake: Callable[[Any], None]) -> list[Handle]:
        """All as one array, or as few; Slurm does not wake anybody.

        Raises
        ------
        ConfigError
            sbatch refuses them.
        """
        from submitit.core.utils import FailedJobError, FailedSubmissionError

        handles: list[Any] = []
        for first in range(0, len(tasks), ARRAY):
            array = tasks[first : first + ARRAY]
            try:
                # submitit prints what sbatch says
                with redirect_stderr(io.StringIO()), self._executor.batch():
                    jobs = [self._executor.submit(task) for task in array]
            except (FailedJobError, FailedSubmissionError) as error:
                raise ConfigError(f"--slurm {self._options}: sbatch says: {said_by_sbatch(error)}") from None
            if self._queue is None:
                handles += jobs
            else:
                handles += [SlurmHandle(job, task, self._queue) for job, task in zip(jobs, array, strict=True)]
            self._handles += handles[first:]
        return handles

    def withdraw(self) -> None:
        """Cancel what waits in Slurm's queue."""
        if self._queue is None:
            return
        for handle in self._handles:
            handle.withdrawn = True
        cancel(self._handles, "--state=PENDING")
        self._queue.ask()

    def close(self) -> None:
        """Cancel what has not ended."""
        if self._queue is not None:
            cancel(self._handles)
            return
        for job in self._handles:
            if not job.done():
                job.cancel()


@dataclass(frozen=True)
class Place:
    """Where a sweep computes, as the command line says it; at most one of ``dask`` and ``slurm``."""

    jobs: int | None = None
    devices: tuple[torch.device, ...] = (torch.device("cpu"),)
    dask: str | None = None
    slurm: str | None = None

    def executor(self, states: Path, threads: int, data: Mapping[DataKey, Dataset], runs: int) -> Executor:
        """Make it ready for a number of runs.

        Raises
        ------
        ConfigError
            It is not there.
        """
        if self.dask is not None:
            return DaskCluster(self.dask, self.jobs)
        if self.slurm is not None:
            return Slurm(self.slurm, states / "slurm", threads, self.jobs)
        return LocalProcesses(min(self.jobs or 1, runs), threads, self.devices, data)
