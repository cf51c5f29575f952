"""The same task for many parts of the data, by threads that each use one processor."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache
from typing import TypeVar

import torch

Part = TypeVar("Part")
Result = TypeVar("Result")


def threads_for(device: torch.device) -> int:
    """How many parts run at a time: as many as torch uses processors, and one on any other device."""
    return torch.get_num_threads() if device.type == "cpu" else 1


def side_by_side(task: Callable[[Part], Result], parts: Sequence[Part], threads: int) -> list[Result]:
    """``task`` of every part, in their order.

    Small decompositions gain nothing from threads within; torch's functions release the interpreter while they work.
    Meanwhile torch is set to one thread, for the whole process, since its linear algebra library knows no other way.
    """
    if threads == 1 or len(parts) < 2:
        return [task(part) for part in parts]
    with one_thread():
        return list(workers(threads).map(task, parts))


@contextmanager
def one_thread() -> Iterator[None]:
    """Decompositions of some hundred rows on one thread: several gain a third, and lose tenfold beside other work."""
    before = torch.get_num_threads()
    if before == 1:
        yield
        return
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@cache
def workers(threads: int) -> ThreadPoolExecutor:
    """Threads that stay; each takes over the number of threads that is set when it first uses torch."""
    return ThreadPoolExecutor(threads, thread_name_prefix="hesscond")


# a forked process inherits the pool but not its threads
os.register_at_fork(after_in_child=workers.cache_clear)
