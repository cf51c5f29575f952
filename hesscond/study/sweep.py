"""Many runs at once: processes of this machine perform or resume those that are left to do, each exactly once."""

from __future__ import annotations

import math
import os
import shutil
import signal
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product
from multiprocessing import active_children, get_context
from pathlib import Path
from queue import SimpleQueue
from types import FrameType
from typing import Any

import torch
from threadpoolctl import threadpool_limits

from hesscond.data import Dataset
from hesscond.errors import ConfigError, DivergedError, HesscondError, RunError
from hesscond.problem.devices import accelerators_of, runtime
from hesscond.runs import BusyError, open_run
from hesscond.study import grid, runner

#: Seconds that calls have to end by themselves after SIGTERM.
GRACE = 20.0


class WorkerProcesses(Executor):
    """Pools of one process each: one pool of several gives up all calls when it loses a process."""

    def __init__(self, devices: Sequence[torch.device], scratch: Path) -> None:
        self._free: SimpleQueue[torch.device] = SimpleQueue()
        for device in devices:
            self._free.put(device)
        self._own, self._scratch = threading.local(), scratch
        self._pools: list[ProcessPoolExecutor] = []
        self._threads = ThreadPoolExecutor(len(devices), initializer=self._take_device)

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Call ``fn`` in the next process that is free."""
        return self._threads.submit(self._call, fn, *args, **kwargs)

    def _take_device(self) -> None:
        self._own.device, self._own.pool = self._free.get(), None

    def _call(self, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        worker = self._own
        if worker.pool is None:
            # a fork would take along torch's threads
            start = (os.getpid(), worker.device, self._scratch)
            worker.pool = ProcessPoolExecutor(1, get_context("spawn"), start_worker, start)
            self._pools.append(worker.pool)
        try:
            return worker.pool.submit(fn, *args, **kwargs).result()
        except BrokenProcessPool:
            worker.pool = None
            raise

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Stop the processes; unless ``wait``, those at work get SIGTERM, and SIGKILL if they do not end."""
        self._threads.shutdown(wait, cancel_futures=cancel_futures or not wait)
        if not wait:
            until, children = time.monotonic() + GRACE, active_children()
            for child in children:
                child.terminate()
            for child in children:
                child.join(max(0.0, until - time.monotonic()))
                child.kill()
            self._threads.shutdown()
        for pool in self._pools:
            pool.shutdown()


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
    if device.index is not None:
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


#: Seconds between two ticks.
INTERVAL = 0.25
#: Seconds after which a run that another process works on is tried again: workers of a killed sweep end by then.
AGAIN = 2.0

#: A data set and what was done to it.
DataKey = tuple[str, tuple[str, ...]]

#: Runs share torch's random state and its threads: one at a time in a process.
one_at_a_time = threading.Lock()


def data_key(plan: runner.RunPlan) -> DataKey:
    """Key that is the same for runs on the same data: the name of the data set, and its preparation."""
    return plan.study.data.name, plan.study.data.preparation


@dataclass(frozen=True)
class Outcome:
    """End of a run: ``finished``, ``diverged``, ``failed``, ``interrupted``, or ``busy`` in another process."""

    name: str
    status: str
    message: str = ""


@dataclass(frozen=True)
class Prepared:
    """Checked runs: outcomes of those that are over, by name, and those that are left to do."""

    done: dict[str, Outcome]
    left: list[runner.RunPlan]


def prepare(plans: Sequence[runner.RunPlan], data: Mapping[DataKey, Dataset], out: Path) -> Prepared:
    """Check the runs, given their data on the CPU, and their folders; ``out``, the folder of all, is made."""
    # seeds and rates make no difference to what can be checked
    for plan in {(id(plan.study), plan.method): plan for plan in reversed(plans)}.values():
        runner.check_plan(replace(plan, device=torch.device("cpu")), data[data_key(plan)])
    done, left = {}, []
    for plan in plans:
        if runner.run_status(plan, plan.config(data[data_key(plan)]), resume=True) == "over":
            done[plan.folder.name] = outcome_of(plan)
        else:
            left.append(plan)
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"the folder {out} cannot be written: {error.strerror}") from None
    return Prepared(done, left)


def prepare_sweep(
    config: grid.SweepConfig, plans: Sequence[runner.RunPlan], data: Mapping[DataKey, Dataset], out: Path
) -> Prepared:
    """`prepare` the runs of a sweep, then describe it in its folder."""
    grid.check_same_sweep(config, out)
    prepared = prepare(plans, data, out)
    grid.write_sweep(config, out)
    return prepared


def sweep(
    plans: Sequence[runner.RunPlan],
    executor: Executor,
    ended: Callable[[Outcome], None],
    *,
    threads: int,
    files: Mapping[DataKey, Path],
    tick: Callable[[], None] = lambda: None,
) -> dict[str, Outcome]:
    """Perform or resume runs by an executor, which is then shut down; ``files`` as `shared_files` makes them.

    ``ended`` is called with the end of each run, ``tick`` several times a second.
    """
    outcomes: dict[str, Outcome] = {}
    flying: dict[Future[Outcome], str] = {}
    try:
        for plan in plans:
            flying[executor.submit(work, plan, files[data_key(plan)], threads)] = plan.folder.name
        while flying:
            for future in wait(flying, INTERVAL, FIRST_COMPLETED).done:
                name = flying.pop(future)
                try:
                    outcomes[name] = future.result()
                # whatever it is, as a process that was killed
                except Exception as error:
                    reason = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
                    outcomes[name] = Outcome(name, "failed", f"its worker broke down ({reason}): start the sweep again")
                ended(outcomes[name])
            tick()
    except BaseException:
        for future in flying:
            future.cancel()
        executor.shutdown(wait=False)
        raise
    executor.shutdown()
    return outcomes


@contextmanager
def shared_files(data: Mapping[DataKey, Dataset]) -> Iterator[tuple[Path, dict[DataKey, Path]]]:
    """A temporary folder with a file of each data set, which all processes of this machine map into their memory."""
    with tempfile.TemporaryDirectory(prefix="hesscond-sweep-", ignore_cleanup_errors=True) as folder:
        files = {key: Path(folder) / f"{number}.pt" for number, key in enumerate(data)}
        for key, file in files.items():
            torch.save(data[key], file)
        del data  # the workers have it
        yield Path(folder), files


def work(plan: runner.RunPlan, file: Path, threads: int) -> Outcome:
    """Perform or resume a run in a worker; returns its outcome, also where it fails."""
    name = plan.folder.name
    # threads of all libraries that add in parallel: torch's, and the BLAS of numpy and of scipy
    with one_at_a_time, threadpool_limits(threads):
        torch.set_num_threads(threads)
        try:
            with sigterm_interrupts():
                data = dataset(file, plan.device)
                try:
                    runner.run(plan, data, resume=True)
                except BusyError:
                    time.sleep(AGAIN)
                    runner.run(plan, data, resume=True)
        except BusyError:
            return Outcome(name, "busy", "another process works on it")
        except DivergedError as error:
            return Outcome(name, "diverged", str(error))
        except KeyboardInterrupt:
            return Outcome(name, "interrupted")
        except HesscondError as error:
            return Outcome(name, "failed", str(error))
        except Exception as error:
            trace = plan.folder.with_name(f"{name}.traceback")
            with suppress(OSError):
                trace.write_text(traceback.format_exc(), encoding="utf-8")
            reason = str(error).partition("\n")[0]
            return Outcome(name, "failed", f"{type(error).__name__}: {reason} (see {trace})")
        return outcome_of(plan)


def outcome_of(plan: runner.RunPlan) -> Outcome:
    """Outcome of a run that is over, from its log."""
    try:
        stored = open_run(plan.folder)
    except RunError as error:
        return Outcome(plan.folder.name, "failed", str(error))
    return Outcome(plan.folder.name, stored.status, stored.facts.get("message", ""))


@lru_cache(maxsize=4)
def dataset(file: Path, device: torch.device) -> Dataset:
    """The data of a file on the device, read once in a process; mapped, so that they are in memory once for all."""
    data: Dataset = torch.load(file, mmap=True, weights_only=False)
    return data.to(device)


#: Iterations timed at a time, and how many times, the vanilla method's and the method's in turn.
BLOCK, ROUNDS = 20, 7


def relative_cost(plan: runner.RunPlan, data: Dataset) -> float:
    """Time of an iteration without probes over that of vanilla, from blocks of iterations of both in turn."""
    seconds = torch.zeros(2, ROUNDS, dtype=torch.float64, device="cpu")
    plan = replace(plan, study=plan.study.model_copy(update={"probe": plan.study.probe.unmeasured}))
    vanilla = replace(plan, method="vanilla", label="")
    with suppress(DivergedError), runner.rehearsal(vanilla, data) as base, runner.rehearsal(plan, data) as training:
        for number, turn in product(range(ROUNDS), (0, 1)):
            # caches favour what comes second: each comes first in every other round, and has batches of its own
            which = (number + turn) % 2
            seconds[which, number] = block_time((base, training)[which], number * BLOCK, which * ROUNDS * BLOCK)
        # the first round is slow; what a method does only every few steps has its share
        return float(seconds[1, 1:].sum() / seconds[0, 1:].sum())
    return math.nan


def block_time(training: runner.Training, first: int, ahead: int) -> float:
    """Seconds for some iterations from ``first`` on, on the training set's batches from ``ahead`` further on."""
    size, batches = training.batch_size, max(1, training.per_epoch)
    start = time.perf_counter()
    for k in range(first, first + BLOCK):
        part = slice((k + ahead) % batches * size, ((k + ahead) % batches + 1) * size)
        training.step(k, training.inputs[part], training.targets[part])
    for accelerator in accelerators_of([training.targets]):
        runtime(accelerator).synchronize(accelerator)
    return time.perf_counter() - start
