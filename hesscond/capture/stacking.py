"""Stacking of small tensors of one shape: an operation on a small tensor costs little more than its call."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import torch

#: Largest number of entries stacked at a time: 32 MB.
TOGETHER = 2**22


def by_shape(tensors: Sequence[torch.Tensor], kinds: Sequence[Hashable] | None = None) -> list[list[int]]:
    """Groups of positions of tensors of one shape and kind, in order, with at most `TOGETHER` numbers or one tensor."""
    found: list[list[int]] = []
    last: dict[Hashable, list[int]] = {}
    for position, tensor in enumerate(tensors):
        key = tensor.shape, kinds and kinds[position]
        members = last.get(key)
        if members is None or (len(members) + 1) * tensor.numel() > TOGETHER:
            last[key] = members = []
            found.append(members)
        members.append(position)
    return found


def stacked(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Stack (k, …) of k tensors of one shape; a single tensor is not copied."""
    return tensors[0][None] if len(tensors) == 1 else torch.stack(list(tensors))
