"""Where the runs of a sweep are done: in processes on this machine, by a Dask scheduler, or by Slurm."""

from __future__ import annotations

import os
import signal
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import torch

from hesscond.data import Dataset
from hesscond.errors import ConfigError
from hesscond.study.runner import RunPlan
from hesscond.study.worker import Outcome, Task

#: A data set and what was done to it.
DataKey = tuple[str, tuple[str, ...]]


def data_key(plan: RunPlan) -> DataKey:
    """What tells the data of a run from those of another."""
    return plan.study.data.name, plan.study.data.preparation


class Handle(Protocol):
    """A run that was handed over."""

    def done(self) -> bool:
        """Whether it is over."""

    def result(self) -> Outcome:
        """How it ended; any exception says that the worker broke down."""


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
            future = slot.submit(replace(task, data=self._files.get(data_key(task.plan))))
            future.add_done_callback(wake)
            handles.append(future)
        return handles

    def close(self) -> None:
        """End the workers and remove the files."""
        import shutil

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

    def close(self) -> None:
        """Withdraw what waits; what runs ends by the sweep's stop file."""
        self._client.cancel([future for future in self._futures if not future.done()])
        self._client.close()


#: Parameters that submitit knows for every cluster, and shorter names for them.
SHARED = {"time": "timeout_min", "mem": "mem_gb", "cpus": "cpus_per_task", "gpus": "gpus_per_node"}
SHARED |= {name: name for name in SHARED.values()}
SHARED["name"] = "name"


class Slurm(Executor):
    """Slurm through submitit: a job array, each run a job that is queued again when its time is up.

    Parameters
    ----------
    options
        ``partition=gpu,time=120,gpus=1``: ``time`` (minutes, or HH:MM:SS), ``mem`` (GB), ``cpus``, ``gpus``, and any
        other parameter of sbatch; ``cluster=local`` starts processes on this machine instead.
    folder
        For submitit's files.
    threads
        CPUs of a job unless ``cpus`` says it.
    jobs
        How many at a time; None: as Slurm has room.

    Raises
    ------
    ConfigError
        submitit is not installed; there is no Slurm; an option it does not know.
    """

    def __init__(self, options: str, folder: Path, threads: int, jobs: int | None) -> None:
        try:
            import submitit
        except ImportError:
            raise ConfigError("--slurm needs submitit: pip install 'hesscond[slurm]'") from None
        given = dict(parse_option(text) for text in options.split(","))
        cluster = str(given.pop("cluster", "slurm"))
        parameters = {SHARED.get(key, key if "_" in key else f"slurm_{key}"): value for key, value in given.items()}
        if cluster == "slurm" and jobs is not None:
            parameters["slurm_array_parallelism"] = jobs
        try:
            self._executor = submitit.AutoExecutor(folder=folder, cluster=cluster)
            self._executor.update_parameters(**{"name": "hesscond", "cpus_per_task": threads} | parameters)
        except (RuntimeError, ValueError, TypeError, NameError) as error:
            reason = " ".join(str(error).split())
            raise ConfigError(f"--slurm {options}: {reason}") from None
        # Slurm keeps the queue; processes on this machine would all start at once
        self.capacity = float("inf") if cluster == "slurm" else jobs or 1
        self._jobs: list[Any] = []

    def submit(self, tasks: Sequence[Task], wake: Callable[[Any], None]) -> list[Handle]:
        """All as one array; Slurm does not wake anybody."""
        with self._executor.batch():
            jobs = [self._executor.submit(task) for task in tasks]
        self._jobs += jobs
        return list(jobs)

    def close(self) -> None:
        """Cancel what has not ended."""
        for job in self._jobs:
            if not job.done():
                job.cancel()


def parse_option(text: str) -> tuple[str, str | int]:
    """A Slurm option from ``KEY=VALUE``.

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
    if key == "time" and ":" in value:
        try:
            hours, minutes, seconds = (int(part) for part in value.split(":"))
        except ValueError:
            raise ConfigError(f"--slurm time={value}: minutes, or HH:MM:SS") from None
        return key, 60 * hours + minutes + -(-seconds // 60)
    return key, int(value) if value.isdigit() else value


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
