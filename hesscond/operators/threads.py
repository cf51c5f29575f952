"""Parallel tasks for many parts of the data, by threads that each use one processor."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from itertools import product
from typing import Any, TypeVar

import torch
from numpy.linalg import _umath_linalg
from scipy.linalg import _flapack

Part = TypeVar("Part")
Result = TypeVar("Result")

#: Decompositions of fewer rows and columns take no longer on one thread, and a tenth of the time among others.
ORDER = 500


def threads_for(device: torch.device) -> int:
    """Number of parts that run at a time: on a CPU the number of torch's threads, on any other device one."""
    return torch.get_num_threads() if device.type == "cpu" else 1


def side_by_side(task: Callable[[Part], Result], parts: Sequence[Part], threads: int) -> list[Result]:
    """Run ``task`` on every part, and return the results in order.

    Small decompositions gain nothing from threads within; torch's functions release the interpreter while they work.
    Meanwhile linear algebra is set to one thread, for the whole process, since the libraries know no other way.
    """
    if len(parts) < 2:
        return [task(part) for part in parts]
    with one_thread():
        if threads == 1:
            return [task(part) for part in parts]
        return list(workers(threads).map(task, parts))


@contextmanager
def one_thread() -> Iterator[None]:
    """Context with one thread for decompositions of some hundred rows."""
    libraries = [(torch.get_num_threads, torch.set_num_threads), *openblas()]
    before = [(count, put) for get, put in libraries if (count := get()) > 1]
    for _, put in before:
        put(1)
    try:
        yield
    finally:
        for count, put in before:
            put(count)


@contextmanager
def torch_threads(count: int) -> Iterator[None]:
    """Context with ``count`` threads for torch, for the whole process."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def few_threads(matrix: Any) -> AbstractContextManager[None]:
    """Context with one thread if the smaller side of a matrix is below `ORDER`."""
    return one_thread() if min(getattr(matrix, "shape", ()), default=0) < ORDER else nullcontext()


@cache
def openblas() -> list[tuple[Callable[[], int], Callable[[int], None]]]:
    """Functions that get and set the threads of the OpenBLAS of numpy and scipy, which torch does not control."""
    accessors = []
    for module in (_umath_linalg, _flapack):
        library = ctypes.CDLL(module.__file__)
        for prefix, suffix in product(("scipy_openblas", "openblas"), ("64_", "")):
            get, put = (getattr(library, f"{prefix}_{verb}_num_threads{suffix}", None) for verb in ("get", "set"))
            if get is not None and put is not None:
                accessors.append((get, put))
    return accessors


@cache
def workers(threads: int) -> ThreadPoolExecutor:
    """Pool of permanent threads; each takes over the number of threads that is set when it first uses torch."""
    return ThreadPoolExecutor(threads, thread_name_prefix="hesscond")


# a forked process inherits the pool but not its threads
os.register_at_fork(after_in_child=workers.cache_clear)
