"""Settings that change what floating-point operations give."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import torch

from hesscond.doctor.check import Check, failed, ok, warning


def tests() -> Iterator[tuple[str, Callable[[], Check]]]:
    """Name and test of each."""
    yield "rounding", rounding
    yield "denormals", denormals
    yield "float32 products", products
    yield "repeatability", repeatability


def rounding() -> Check:
    """IEEE double precision, to nearest even."""
    eps = 2.0**-52
    one = torch.ones((), dtype=torch.float64)
    # halves go to the even neighbour: down from 1, up from 1 + eps
    right = bool(one + eps / 2 == 1) and bool((one + eps) + eps / 2 == 1 + 2 * eps) and 1.0 + eps / 2 == 1.0
    if not right:
        return failed("float64 does not round to nearest even", "no bound that hesscond gives holds on this machine")
    return ok("float64 rounds to nearest even")


def denormals() -> Check:
    """Whether numbers below 2.2e-308 are kept."""
    smallest = 2.0**-1074
    flushed = []
    if not bool(torch.tensor([smallest], dtype=torch.float64) * 1.0 != 0):
        flushed.append("torch")
    if not bool(np.array([smallest]) * 1.0 != 0):
        flushed.append("numpy")
    if flushed:
        return warning(
            f"{' and '.join(flushed)} flush them to zero",
            "call torch.set_flush_denormal(False); otherwise a library built with -ffast-math was loaded: remove it",
        )
    return ok("kept")


def products() -> Check:
    """Precision of float32 matrix products; float64 is what it is."""
    setting = torch.get_float32_matmul_precision()
    if setting != "highest":
        return warning(
            f"torch's float32 matrix products are set to {setting!r}: TF32 or bfloat16",
            'call torch.set_float32_matmul_precision("highest"): training in float32 is then repeatable elsewhere',
        )
    if torch.cuda.is_available() and torch.backends.cudnn.allow_tf32:
        return ok("full float32; convolutions on this GPU may use TF32 (torch's default)")
    return ok("full float32")


def repeatability() -> Check:
    """Torch's deterministic algorithms."""
    if torch.are_deterministic_algorithms_enabled():
        return ok("torch is set to deterministic algorithms")
    if torch.cuda.is_available():
        advice = "for runs that repeat bit for bit use --device cpu, or torch.use_deterministic_algorithms(True)"
        return ok("torch's defaults: on a GPU two runs may differ in the last digits", advice)
    return ok("torch's defaults, deterministic on this processor")
