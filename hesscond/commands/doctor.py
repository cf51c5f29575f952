"""``hesscond doctor``: versions, threads, devices, and one condition number whose truth is known."""

from __future__ import annotations

import json
import math
import os
import platform
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path
from typing import Annotated

import numpy as np
import torch
import typer
from rich.table import Table
from rich.text import Text
from scipy.linalg import hadamard

import hesscond
from hesscond.commands.exits import UNMET
from hesscond.commands.printing import print_table, sign_of_life, stdout
from hesscond.spectra import condition_number

STYLES = {"ok": "green", "warning": "yellow", "failed": "bold red"}
#: Processor time that a container may use: "quota period" in microseconds, or "max period".
QUOTA = Path("/sys/fs/cgroup/cpu.max")
#: File that exists where a driver of NVIDIA is loaded.
DRIVER = Path("/proc/driver/nvidia/version")
#: κ(FᵀF) of the graded matrix, far beyond 1/eps, and the largest relative error that passes.
TRUTH, TOLERANCE = 4.0**48, 1e-10


@dataclass(frozen=True)
class Check:
    """Result of one check of the installation.

    Attributes
    ----------
    status
        ``"failed"``: hesscond cannot be used like this, or its numbers are wrong; ``"warning"``: slower than it could
        be; ``"ok"``.
    advice
        One sentence; empty if there is nothing to do.
    """

    status: str
    found: str
    advice: str = ""
    group: str = ""
    name: str = ""
    seconds: float = 0.0


def doctor(as_json: Annotated[bool, typer.Option("--json", help="A list of objects.")] = False) -> None:
    """Check versions, threads, devices and a known condition number on this machine, in seconds.

    Exit code 1 if a check failed; warnings do not count. Data sets are checked by hesscond data fetch.

    Example: hesscond doctor

    Example: hesscond doctor --json
    """
    start = time.perf_counter()
    checks = []
    with sign_of_life("looking") as say:
        for check in examine():
            say(f"{check.group}: {check.name}")
            checks.append(check)
    if as_json:
        typer.echo(json.dumps([asdict(check) for check in checks], indent=1))
    else:
        show(checks, time.perf_counter() - start)
    if any(check.status == "failed" for check in checks):
        raise typer.Exit(UNMET)


def examine() -> Iterator[Check]:
    """Run the checks and yield each result as soon as it is there; an exception makes a failed check."""
    tests: list[tuple[str, str, Callable[[], Check]]] = [
        ("versions", "hesscond", lambda: Check("ok", f"{hesscond.__version__}, Python {platform.python_version()}")),
        ("versions", "packages", packages),
        ("threads", "threads", threads),
    ]
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    tests += [("devices", f"cuda:{n}", lambda n=n: gpu(torch.device("cuda", n))) for n in range(count)]  # type: ignore[misc]
    tests += [("devices", "CUDA", no_gpu)] if not count else []
    tests += [("self-test", "κ", known_condition_number)]
    for group, name, test in tests:
        start = time.perf_counter()
        try:
            found = test()
        except Exception as error:
            said = f"{type(error).__name__}: {' '.join(str(error).split())}"
            found = Check("failed", said, "this should not happen: report it")
        yield replace(found, group=group, name=name, seconds=round(time.perf_counter() - start, 4))


def packages() -> Check:
    """Check that the packages that hesscond needs are installed, in the versions that it needs."""
    try:
        stated = [text for text in requires("hesscond") or [] if "extra ==" not in text]
    except PackageNotFoundError:
        return Check("warning", "hesscond runs from its source folder, not installed", "install it: pip install .")
    return required(stated)


def required(stated: list[str]) -> Check:
    """Check that requirements of the form ``NAME>=VERSION`` are met."""
    problems = {}
    for text in stated:
        name, _, least = re.sub(r"[;\s].*", "", text).partition(">=")
        try:
            if numbers(version(name)) < numbers(least):
                problems[text] = f"{name} {version(name)} is not >={least}"
        except PackageNotFoundError:
            problems[text] = f"{name} is missing"
    if problems:
        return Check("failed", "; ".join(problems.values()), f"pip install {' '.join(map(repr, problems))}")
    shown = ", ".join(f"{name} {version(name)}" for name in ("torch", "numpy", "scipy"))
    return Check("ok", f"{shown} and {len(stated) - 3} more, all as required")


def numbers(text: str) -> list[int]:
    """The numbers of a version."""
    return [int(number) for number in re.findall(r"\d+", text.partition("+")[0])]


def threads() -> Check:
    """Check torch's number of threads against the processors that this process may use."""
    there, given = processors(), os.environ.get("OMP_NUM_THREADS")
    found = f"torch {torch.get_num_threads()}, processors {there}, OMP_NUM_THREADS {given or 'not set'}"
    if torch.get_num_threads() > there:
        advice = f"more threads than processors slow each other down: set OMP_NUM_THREADS={there} before starting"
        return Check("warning", found, advice)
    return Check("ok", found)


def processors() -> int:
    """Number of processors that this process may use, by affinity and by the quota of its container."""
    there = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        quota, period = QUOTA.read_text(encoding="ascii").split()
        return there if quota == "max" else max(1, min(there, math.ceil(int(quota) / int(period))))
    except (OSError, ValueError):
        return there


def no_gpu() -> Check:
    """Check without a GPU: everything runs on the processor; a warning if a GPU may be there."""
    if not DRIVER.exists():
        return Check("ok", "no GPU: all is computed on the processor, which every study allows for")
    built = f"built for CUDA {torch.version.cuda}" if torch.version.cuda else "built without CUDA"
    found = f"torch {torch.__version__}, {built}, sees no GPU, but a driver of NVIDIA is loaded"
    return Check("warning", found, "install a torch that fits the driver (pytorch.org), or check CUDA_VISIBLE_DEVICES")


def gpu(device: torch.device) -> Check:
    """Check a GPU: its name and memory, and a product in float64 against the processor's."""
    free, total = torch.cuda.mem_get_info(device)
    found = f"{torch.cuda.get_device_name(device)}, {free / 2**30:.1f} of {total / 2**30:.1f} GiB free"
    A = torch.linspace(0, 1, 200 * 200, dtype=torch.float64).reshape(200, 200).sin()
    truth = A @ A
    error = float(((A.to(device) @ A.to(device)).cpu() - truth).abs().max() / truth.abs().max())
    if not error < 1e-13:
        return Check("failed", f"{found}; float64 is off by {error:.1e}", "run with --device cpu")
    return Check("ok", f"{found}, float64 right to {error:.0e}")


def known_condition_number() -> Check:
    """Check κ of F = H diag(2^-i…), H a Hadamard matrix, whose entries and singular values are exact."""
    found = condition_number(factor=hadamard(8) * 2.0 ** -np.rint(np.linspace(0, 48, 8)))
    error = abs(found.value / TRUTH - 1)
    if found.resolved and found.rank == 8 and found.lower <= TRUTH <= found.upper and error <= TOLERANCE:
        return Check("ok", f"{TRUTH:.0e} found, relative error {error:.0e}")
    advice = "numbers on this machine cannot be trusted: install torch, numpy and scipy again, and report it"
    return Check("failed", f"κ = {TRUTH:.3g} came out as {found}", advice)


def show(checks: list[Check], seconds: float) -> None:
    """Print the checks by groups, each with its advice below."""
    grid = Table.grid(padding=(0, 2))
    group = ""
    for check in checks:
        if check.group != group:
            group = check.group
            grid.add_row(Text(group, style="bold"))
        grid.add_row(Text(f"  {check.status}", STYLES[check.status]), check.name, check.found)
        if check.advice:
            grid.add_row("", "", f"→ {check.advice}")
    print_table(grid)
    counts = {status: sum(check.status == status for check in checks) for status in STYLES}
    text = f"{counts['ok']} ok, {counts['warning']} warnings, {counts['failed']} failed, in {seconds:.1f} s"
    stdout.print(Text(text, style="bold"))
