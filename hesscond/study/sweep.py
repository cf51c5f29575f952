"""Many runs at once: an executor performs or resumes those that are left to do, each exactly once."""

from __future__ import annotations

import tempfile
import threading
import time
import traceback
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Executor, Future, wait
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Protocol

import torch
from threadpoolctl import threadpool_limits

from hesscond.data import Dataset
from hesscond.errors import ConfigError, DivergedError, HesscondError, RunError
from hesscond.runs import BusyError, open_run
from hesscond.study.datasets import load_data
from hesscond.study.grid import SweepConfig, check_same_sweep, write_sweep
from hesscond.study.runner import RunPlan, check_plan, run, standing
from hesscond.study.sections import DataConfig
from hesscond.study.workers import sigterm_interrupts

#: Seconds between two ticks of the watcher.
INTERVAL = 0.25
#: Number of attempts at a run whose worker breaks down.
ATTEMPTS = 3
#: Seconds after which a run that another process works on is tried again: workers of a killed sweep end by then.
AGAIN = 2.0

#: A data set and what was done to it.
DataKey = tuple[str, tuple[str, ...]]

#: Runs share torch's random state and its threads: one at a time in a process.
one_at_a_time = threading.Lock()


def data_key(plan: RunPlan) -> DataKey:
    """Key that is the same for runs on the same data: the name of the data set, and its preparation."""
    return plan.study.data.name, plan.study.data.preparation


@dataclass(frozen=True)
class Outcome:
    """End of a run: ``finished``, ``diverged``, ``failed``, ``interrupted``, or ``busy`` in another process."""

    name: str
    status: str
    message: str = ""


class Watcher(Protocol):
    """Receiver of the events of a sweep."""

    def ended(self, outcome: Outcome) -> None:
        """Handle the end of a run."""

    def broke(self, name: str, reason: str) -> None:
        """Handle the breakdown of a run's worker; the run is resumed."""

    def tick(self) -> None:
        """Handle the passing of time."""


@dataclass(frozen=True)
class Prepared:
    """Checked runs: outcomes of those that are over, by name, and those that are left to do."""

    done: dict[str, Outcome]
    left: list[RunPlan]


def prepare(plans: Sequence[RunPlan], data: Mapping[DataKey, Dataset], out: Path) -> Prepared:
    """Check the runs, given their data on the CPU, and their folders; ``out``, the folder of all, is made."""
    # seeds and rates make no difference to what can be checked; a cluster's GPU need not be in this machine
    for plan in {(id(plan.study), plan.method): plan for plan in reversed(plans)}.values():
        check_plan(replace(plan, device=torch.device("cpu")), data[data_key(plan)])
    done, left = {}, []
    for plan in plans:
        if standing(plan, plan.config(data[data_key(plan)]), resume=True) == "over":
            done[plan.folder.name] = ended(plan)
        else:
            left.append(plan)
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"the folder {out} cannot be written: {error.strerror}") from None
    return Prepared(done, left)


def prepare_sweep(
    config: SweepConfig, plans: Sequence[RunPlan], data: Mapping[DataKey, Dataset], out: Path
) -> Prepared:
    """`prepare` the runs of a sweep, then describe it in its folder."""
    check_same_sweep(config, out)
    prepared = prepare(plans, data, out)
    write_sweep(config, out)
    return prepared


def sweep(
    plans: Sequence[RunPlan],
    executor: Executor,
    watcher: Watcher,
    *,
    threads: int,
    files: Mapping[DataKey, Path] | None = None,
    data_dir: Path | None = None,
) -> dict[str, Outcome]:
    """Perform or resume runs by an executor, which is then shut down; returns their outcomes by the folders' names."""
    outcomes: dict[str, Outcome] = {}
    breakdowns: Counter[str] = Counter()
    flying: dict[Future[Outcome], RunPlan] = {}

    def submit(plan: RunPlan) -> None:
        # a worker of a cluster has another working directory
        there = replace(plan, folder=plan.folder.absolute())
        flying[executor.submit(work, there, (files or {}).get(data_key(plan)), data_dir, threads)] = plan

    def take(plan: RunPlan, future: Future[Outcome]) -> None:
        name = plan.folder.name
        try:
            outcome = future.result()
        # whatever it is: a process that was killed, a cluster that gave up
        except Exception as error:
            reason = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
            breakdowns[name] += 1
            if breakdowns[name] < ATTEMPTS:
                watcher.broke(name, reason)
                submit(plan)
                return
            outcome = Outcome(name, "failed", f"its worker broke down {ATTEMPTS} times ({reason})")
        outcomes[name] = outcome
        watcher.ended(outcome)

    try:
        for plan in plans:
            submit(plan)
        while flying:
            for future in wait(flying, INTERVAL, FIRST_COMPLETED).done:
                take(flying.pop(future), future)
            watcher.tick()
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


def work(plan: RunPlan, file: Path | None, data_dir: Path | None, threads: int) -> Outcome:
    """Perform or resume a run in a worker; returns its outcome, also where it fails."""
    name = plan.folder.name
    # threads of all libraries that add in parallel: torch's, and the BLAS of numpy and of scipy
    with one_at_a_time, threadpool_limits(threads):
        torch.set_num_threads(threads)
        try:
            with sigterm_interrupts():
                data = dataset(file, plan.study.data.model_dump_json(), data_dir, plan.device)
                try:
                    run(plan, data, resume=True)
                except BusyError:
                    time.sleep(AGAIN)
                    run(plan, data, resume=True)
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
        return ended(plan)


def ended(plan: RunPlan) -> Outcome:
    """Outcome of a run that is over, from its log."""
    try:
        stored = open_run(plan.folder)
    except RunError as error:
        return Outcome(plan.folder.name, "failed", str(error))
    return Outcome(plan.folder.name, stored.status, stored.facts.get("message", ""))


@lru_cache(maxsize=4)
def dataset(file: Path | None, config: str, data_dir: Path | None, device: torch.device) -> Dataset:
    """The data on the device, read once in a process; data mapped from a file are in memory once for all."""
    if file is None:
        return load_data(DataConfig.model_validate_json(config), data_dir).to(device)
    data: Dataset = torch.load(file, mmap=True, weights_only=False)
    return data.to(device)
