"""The same task for many parts of the data, by threads that each use one processor."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from threading import Barrier
from typing import TypeVar

import torch

Part = TypeVar("Part")
Result = TypeVar("Result")


def threads_for(device: torch.device) -> int:
    """How many parts run at a time: as many as torch uses processors, and one on any other device."""
    return torch.get_num_threads() if device.type == "cpu" else 1


def side_by_side(task: Callable[[Part], Result], parts: Sequence[Part], threads: int) -> list[Result]:
    """``task`` of every part, in their order.

    LAPACK runs on one thread for small matrices; torch's functions release the interpreter while they work.
    """
    if threads == 1 or len(parts) < 2:
        return [task(part) for part in parts]
    return list(workers(threads).map(task, parts))


@cache
def workers(threads: int) -> ThreadPoolExecutor:
    """Threads that stay, for torch to use one processor in each."""
    started = Barrier(threads + 1)

    def start() -> None:
        torch.set_num_threads(1)
        started.wait()

    pool = ThreadPoolExecutor(threads, thread_name_prefix="hesscond", initializer=start)
    for _ in range(threads):
        pool.submit(int)
    started.wait()
    # what a thread sets for itself is also the default of threads to come
    torch.set_num_threads(threads)
    return pool


# a forked process inherits the pool but not its threads
os.register_at_fork(after_in_child=workers.cache_clear)
