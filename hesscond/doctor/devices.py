"""GPUs: which there are, their memory, and whether float64 on them gives what it gives on the host."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from hesscond.doctor.check import Check, failed, ok, warning

#: There where a driver of NVIDIA is loaded.
DRIVER = Path("/proc/driver/nvidia/version")
#: Free memory below which a warning is due.
LITTLE = 2**30


def tests() -> Iterator[tuple[str, Callable[[], Check]]]:
    """Name and test of each."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if not count:
        yield "CUDA", no_gpu
    for index in range(count):
        yield f"cuda:{index}", lambda index=index: gpu(torch.device("cuda", index))  # type: ignore[misc]


def no_gpu() -> Check:
    """Everything runs on the processor, and whether it has to."""
    if DRIVER.exists():
        built = f"built for CUDA {torch.version.cuda}" if torch.version.cuda else "built without CUDA"
        return warning(
            f"torch {torch.__version__}, {built}, sees no GPU, but a driver of NVIDIA is loaded",
            "install a torch that fits the driver (pytorch.org), or check CUDA_VISIBLE_DEVICES",
        )
    return ok("no GPU: all is computed on the processor, which every study allows for")


def gpu(device: torch.device) -> Check:
    """Name and memory of a GPU, and a product in float64."""
    free, total = torch.cuda.mem_get_info(device)
    name = torch.cuda.get_device_name(device)
    found = f"{name}, {free / 2**30:.1f} of {total / 2**30:.1f} GiB free, CUDA {torch.version.cuda}"
    A = torch.linspace(0, 1, 200 * 200, dtype=torch.float64).reshape(200, 200).sin()
    truth = A @ A
    error = float(((A.to(device) @ A.to(device)).cpu() - truth).abs().max() / truth.abs().max())
    if not error < 1e-13:
        return failed(f"{found}; float64 is off by {error:.1e}", "do not use this GPU: run with --device cpu")
    if free < LITTLE:
        return warning(found, "other programs use this GPU: stop them, or choose another with --device cuda:N")
    return ok(f"{found}, float64 right to {error:.0e}")
