"""Accelerators, by what torch's module of each kind says of them: `torch.cuda`, `torch.xpu`, …"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from typing import Any

import torch

from hesscond.errors import ConfigError

#: Bytes that a computation may take if its user says nothing, where the device does not say what it has.
MEMORY = 4 * 10**9


def accelerators_of(tensors: Iterable[torch.Tensor]) -> list[torch.device]:
    """Devices of ``tensors`` that are no host, each once."""
    return sorted({t.device for t in tensors if t.device.type not in ("cpu", "meta")}, key=str)


def runtime(device: torch.device) -> Any:
    """Module of torch for a kind of device."""
    return torch.get_device_module(device)


def default_memory(tensors: Iterable[torch.Tensor]) -> int:
    """Half of the bytes that the fullest accelerator of ``tensors`` reports as free; 4 GB on the host."""
    free = [runtime(device).mem_get_info(device)[0] for device in accelerators_of(tensors)]
    return min(free) // 2 if free else MEMORY


@cache
def has_float64(device: torch.device) -> bool:
    """Whether a device computes in float64: Apple's mps does not."""
    try:
        return bool(torch.zeros(1, dtype=torch.float64, device=device).cpu().dtype == torch.float64)
    except (TypeError, RuntimeError):
        return False


def check_float64(tensors: Iterable[torch.Tensor]) -> None:
    """Raise a ConfigError if a tensor is on a device without float64, in which condition numbers are computed."""
    for device in accelerators_of(tensors):
        if not has_float64(device):
            raise ConfigError(
                f"device '{device}' has no float64, in which condition numbers are computed: move the model, the "
                "loss and the data to the CPU (model.cpu(), --device cpu)"
            )


def resolve_device(name: str) -> torch.device:
    """The torch device called ``name``; ``auto`` is the accelerator if there is one with float64, else the CPU.

    Raises
    ------
    ConfigError
        No such device here, or one without float64.
    """
    if name == "auto":
        there = torch.accelerator.current_accelerator(check_available=True)
        return there if there is not None and has_float64(there) else torch.device("cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ConfigError(f"unknown device {name!r}: use auto, cpu, cuda or cuda:N") from None
    kind: Any = getattr(torch, device.type, None)
    if not hasattr(kind, "device_count"):
        raise ConfigError(f"device {name!r} is not supported: use auto, cpu, cuda or cuda:N")
    if (device.index or 0) >= (count := kind.device_count()):
        raise ConfigError(f"device {name!r} does not exist here: torch sees {count} of {device.type}")
    check_float64([torch.empty(0, device=device)])
    return device
