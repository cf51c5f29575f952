"""``hesscond doctor``: versions, threads, devices, and one condition number whose truth is known."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import scipy
import torch
import typer
from joblib import cpu_count
from scipy.linalg import hadamard

import hesscond
from hesscond.commands import printing
from hesscond.runs.log import versions
from hesscond.spectra import condition_number

#: κ(FᵀF) of the graded matrix, far beyond 1/eps, and the largest relative error that passes.
TRUTH, TOLERANCE = 4.0**48, 1e-10


class Check(NamedTuple):
    """Result of a check: ``ok``, ``warning`` or ``failed``, what was found, and advice if there is any."""

    status: str
    found: str
    advice: str = ""


def doctor(as_json: printing.AsJson = False) -> None:
    """Check versions, threads, devices and a known condition number on this machine, in seconds.

    Exit code 1 if a check failed; warnings do not count. Data sets are checked by hesscond data fetch.

    Example: hesscond doctor

    Example: hesscond doctor --json
    """
    rows = [{"name": name, **result(check)._asdict()} for name, check in CHECKS.items()]
    printing.listing(rows, as_json)
    if any(row["status"] == "failed" for row in rows):
        raise typer.Exit(printing.UNMET)


def result(check: Callable[[], Check]) -> Check:
    """Result of a check; an exception is a failure."""
    try:
        return check()
    except Exception as error:
        return Check("failed", f"{type(error).__name__}: {' '.join(str(error).split())}", "please report this")


def packages() -> Check:
    """Versions of hesscond and of what it computes with; ``pip check`` finds what is missing."""
    version_numbers = versions(hesscond, torch, np, scipy)
    return Check("ok", ", ".join(f"{name} {version}" for name, version in version_numbers.items()))


def threads() -> Check:
    """Check the number of torch's threads against that of the cores that this process may use."""
    cores, used = int(cpu_count()), torch.get_num_threads()
    advice = f"set OMP_NUM_THREADS={cores}: more threads than cores slow each other down" if used > cores else ""
    return Check("warning" if advice else "ok", f"torch takes {used} of {cores} cores", advice)


def devices() -> Check:
    """Check a product in float64 on each GPU against the processor's."""
    if not torch.cuda.is_available():
        return Check("ok", f"no GPU for torch {torch.__version__}, CUDA {torch.version.cuda}")
    A = torch.linspace(0, 1, 200 * 200, dtype=torch.float64, device="cpu").reshape(200, 200).sin()
    names = [torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())]
    products = [(A.to(f"cuda:{number}") @ A.to(f"cuda:{number}")).cpu() for number in range(len(names))]
    error = max(float((product - A @ A).abs().max() / (A @ A).abs().max()) for product in products)
    message = f"{', '.join(names)}: error {error:.0e} in float64"
    return Check("ok", message) if error < 1e-13 else Check("failed", message, "run with --device cpu")


def known_condition_number() -> Check:
    """Check κ of F = H diag(2^-i…), H a Hadamard matrix, whose entries and singular values are exact."""
    kappa = condition_number(factor=hadamard(8) * 2.0 ** -np.rint(np.linspace(0, 48, 8)))
    error = abs(kappa.value / TRUTH - 1)
    if kappa.resolved and kappa.rank == 8 and kappa.lower <= TRUTH <= kappa.upper and error <= TOLERANCE:
        return Check("ok", f"{TRUTH:.0e} found, relative error {error:.0e}")
    return Check(
        "failed", f"κ = {TRUTH:.3g} came out as {kappa}", "install torch, numpy and scipy again, and report it"
    )


CHECKS = {"packages": packages, "threads": threads, "devices": devices, "κ": known_condition_number}
