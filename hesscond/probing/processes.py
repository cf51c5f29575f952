"""Measurements in several processes, each with its share of the data: every one measures all of them."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from hesscond.errors import ConfigError
from hesscond.problem import batches, containers, weighting

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


def group_of(model: nn.Module, group: ProcessGroup | None) -> ProcessGroup | None:
    """Processes that measure together: those of ``group``, or of a ``DistributedDataParallel`` model; None: one."""
    check_group(group)
    if group is None and isinstance(model, nn.parallel.DistributedDataParallel):
        group = model.process_group
    return None if group is None or group.size() == 1 else group


def check_group(group: object) -> None:
    """Raise a ConfigError if ``group`` is no process group of torch."""
    if group is not None and not isinstance(group, torch.distributed.ProcessGroup):
        raise ConfigError(f"group must be a process group of torch.distributed, not {group!r}")


def refuse_sharded(model: nn.Module) -> None:
    """Raise a ConfigError for a model whose parameters are split over processes."""
    # compared by name, since importing DTensor takes a second
    for name, parameter in model.named_parameters():
        if type(parameter).__name__ == "DTensor" or type(parameter.data).__name__ == "DTensor":
            raise ConfigError(
                f"parameter {name!r} is sharded over processes (FSDP2): give every process a plain model with the "
                "whole parameters (torch.distributed.checkpoint.state_dict.get_model_state_dict with "
                "full_state_dict=True), its share of the data, and group="
            )


def gathered(
    group: ProcessGroup, model: nn.Module, data: Any, weight: weighting.BatchWeight | None
) -> tuple[list[Any], weighting.BatchWeight | None]:
    """Batches of all processes, and their weights; a ConfigError if the processes have different parameters."""
    own: Iterable[Any] = [data] if batches.is_batch(data) else data
    own = list(own)
    device = next((tensor.device for tensor in containers.tensors_of(own)), None)
    fingerprint = hashlib.sha256()
    for parameter in model.parameters():
        fingerprint.update(parameter.detach().to("cpu", torch.float64).numpy().tobytes())
    given = None if weight is None or callable(weight) else list(weight)
    # from one accelerator to another, tensors go by way of the host
    share = batches.moved(own, torch.device("cpu")), given, fingerprint.digest()
    found: list[Any] = [None] * group.size()
    torch.distributed.all_gather_object(found, share, group=group)
    shares, weights, fingerprints = zip(*found, strict=True)
    if len(set(fingerprints)) > 1:
        raise ConfigError(
            "the processes have different parameters: make the model with the same random seed in each, or load it"
        )
    every = batches.moved([batch for part in shares for batch in part], device)
    return every, weight if given is None else [number for part in weights for number in part]
