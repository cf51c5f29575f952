"""Executors of the runs of a sweep: processes on this machine, or the workers of a Dask cluster."""

from __future__ import annotations

import os
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager, suppress
from multiprocessing import get_context
from pathlib import Path
from queue import SimpleQueue
from types import FrameType
from typing import Any

import torch

from hesscond.errors import ConfigError
from hesscond.lazy import optional

#: Seconds that calls have to end by themselves after SIGTERM.
GRACE = 20.0


class WorkerProcesses(Executor):
    """Process pools of one process each, one for each of the ``devices``: a killed process loses only its own call.

    A single `concurrent.futures.ProcessPoolExecutor` gives up all calls when it loses a process. The folder ``scratch``
    is removed if this process is killed.
    """

    def __init__(self, devices: Sequence[torch.device], scratch: Path) -> None:
        self._threads = ThreadPoolExecutor(len(devices))
        self._devices, self._scratch = devices, scratch
        self._pools: dict[int, ProcessPoolExecutor] = {}
        self._pids: dict[int, int] = {}
        self._idle: SimpleQueue[int] = SimpleQueue()
        for number in range(len(devices)):
            self._idle.put(number)

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Call ``fn`` in the next process that is free."""
        return self._threads.submit(self._call, fn, *args, **kwargs)

    def _call(self, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        number = self._idle.get()
        try:
            if number not in self._pools:
                # a fork would take along torch's threads
                start = (os.getpid(), self._devices[number], self._scratch)
                pool = ProcessPoolExecutor(1, get_context("spawn"), start_worker, start)
                self._pools[number] = pool
                self._pids[number] = pool.submit(os.getpid).result()
            return self._pools[number].submit(fn, *args, **kwargs).result()
        except BrokenProcessPool:
            self._pids.pop(number, None)
            self._pools.pop(number).shutdown()
            raise
        finally:
            self._idle.put(number)

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Stop the processes; unless ``wait``, those at work get SIGTERM, and SIGKILL if they do not end."""
        self._threads.shutdown(wait, cancel_futures=cancel_futures or not wait)
        if not wait:
            self._send(signal.SIGTERM)
            killer = threading.Timer(GRACE, self._send, [signal.SIGKILL])
            killer.start()
            self._threads.shutdown()
            killer.cancel()
        for pool in self._pools.values():
            pool.shutdown()

    def _send(self, number: int) -> None:
        for pid in list(self._pids.values()):
            with suppress(ProcessLookupError):
                os.kill(pid, number)


def start_worker(parent: int, device: torch.device, scratch: Path) -> None:
    """Prepare a new process: it leaves Ctrl-C to its parent, ends with it, and takes its GPU."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)

    def watch() -> None:
        # the runs must be free for another sweep when the parent is killed
        while os.getppid() == parent:
            time.sleep(0.2)
        shutil.rmtree(scratch, ignore_errors=True)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
    if device.type == "cuda":
        torch.cuda.set_device(device)


@contextmanager
def sigterm_interrupts(interrupt: type[KeyboardInterrupt] = KeyboardInterrupt) -> Iterator[None]:
    """Treat the first SIGTERM as a Ctrl-C; in a thread that gets no signals nothing changes."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(number: int, frame: FrameType | None) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        raise interrupt

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextmanager
def dask_workers(address: str) -> Iterator[Executor]:
    """Executor of the workers of a Dask scheduler, with an address as ``tcp://host:8786``."""
    with optional("--dask"):
        from distributed import Client
    try:
        client = Client(address, timeout="10s", set_as_default=False)
    except (OSError, ValueError, TimeoutError) as error:
        raise ConfigError(f"no Dask scheduler answers at {address}: {str(error).partition(chr(10))[0]}") from None
    with client:
        threads = [worker["nthreads"] for worker in client.scheduler_info(n_workers=-1)["workers"].values()]
        if any(number > 1 for number in threads):
            raise ConfigError(
                f"the Dask workers at {address} have up to {max(threads)} threads, but runs in one process share "
                "torch's random state: start them with dask worker --nthreads 1"
            )
        yield client.get_executor(pure=False)
