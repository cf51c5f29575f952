"""Linear algebra libraries, and whether more threads run than there are processors for."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import scipy.linalg  # noqa: F401  (so that its library is loaded, and seen)
import torch
from threadpoolctl import threadpool_info

from hesscond.doctor.check import Check, ok, warning

#: Processor time that a container may use: "quota period" in microseconds, or "max period".
QUOTA = Path("/sys/fs/cgroup/cpu.max")


def tests() -> Iterator[tuple[str, Callable[[], Check]]]:
    """Name and test of each."""
    yield "linear algebra", libraries
    yield "threads", oversubscription
    yield "OpenMP", runtimes


def libraries() -> Check:
    """Who computes: BLAS and LAPACK of numpy and scipy, and those that torch brings."""
    found = [
        f"{one['internal_api']} {one.get('version') or ''}".strip()
        for one in threadpool_info()
        if one["user_api"] == "blas"
    ]
    own = "MKL" if torch.backends.mkl.is_available() else "its own BLAS"
    return ok(f"numpy and scipy: {', '.join(sorted(set(found))) or 'unknown'}; torch: {own}")


def oversubscription() -> Check:
    """Threads of torch and of the libraries against the processors that this process may use."""
    there = processors()
    given = os.environ.get("OMP_NUM_THREADS")
    set_to = f"OMP_NUM_THREADS={given}" if given else "OMP_NUM_THREADS not set"
    most = max([torch.get_num_threads(), *(one["num_threads"] for one in threadpool_info())])
    found = f"torch {torch.get_num_threads()}, libraries up to {most}, processors {there}, {set_to}"
    if most > there:
        advice = f"more threads than processors slow each other down: set OMP_NUM_THREADS={there} before starting"
        return warning(found, advice)
    return ok(found)


def runtimes() -> Check:
    """Copies of OpenMP in this process."""
    found = sorted({one["prefix"] for one in threadpool_info() if one["user_api"] == "openmp"})
    named = ", ".join(found) or "none"
    if "libiomp" in found and len(found) > 1:
        return warning(named, "Intel's OpenMP beside another can hang or crash: take all packages from one source")
    return ok(named)


def processors() -> int:
    """How many this process may use: by affinity, and by the quota of its container."""
    there = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        quota, period = QUOTA.read_text(encoding="ascii").split()
        return there if quota == "max" else max(1, min(there, math.ceil(int(quota) / int(period))))
    except (OSError, ValueError):
        return there
