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
