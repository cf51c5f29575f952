"""What a loader returns: images in [0, 1] with their labels, split into training and test."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch


# No generated ==: comparing tensors elementwise has no single truth value, so it would only ever raise.
@dataclass(frozen=True, eq=False)
class Dataset:
    """A labelled image data set in memory.

    Attributes
    ----------
    name : str
        The name `load` was given.
    train_inputs, test_inputs : torch.Tensor
        Images, shape (N, C, H, W), float32 in [0, 1].
    train_targets, test_targets : torch.Tensor
        Class numbers 0 … classes − 1, shape (N,), int64.
    classes : int
        The number of classes.
    source : str
        Where it was read from: the path of a folder or archive, or ``"scikit-learn"``.
    """

    name: str
    train_inputs: torch.Tensor
    train_targets: torch.Tensor
    test_inputs: torch.Tensor
    test_targets: torch.Tensor
    classes: int
    source: str

    def to(self, device: torch.device | str) -> Dataset:
        """Return the same data set with its four tensors on `device`.

        Parameters
        ----------
        device : torch.device or str
            Where the tensors should lie.

        Returns
        -------
        Dataset
            Tensors already there are shared, not copied.
        """
        return replace(
            self,
            train_inputs=self.train_inputs.to(device),
            train_targets=self.train_targets.to(device),
            test_inputs=self.test_inputs.to(device),
            test_targets=self.test_targets.to(device),
        )


def images_from_bytes(blocks: Sequence[np.ndarray], shape: tuple[int, int, int]) -> torch.Tensor:
    """Join blocks of 8-bit images into one tensor scaled to [0, 1].

    Parameters
    ----------
    blocks : sequence of numpy.ndarray
        Each uint8, of shape (n, C·H·W) or anything that reshapes to it; joined in order.
    shape : tuple of int
        (C, H, W).

    Returns
    -------
    torch.Tensor
        float32, shape (N, C, H, W), each value the pixel divided by 255.
    """
    images = np.empty((sum(len(block) for block in blocks), *shape), dtype=np.float32)
    start = 0
    for block in blocks:  # straight into place: CIFAR is 0.6 GB in float32 and deserves no second copy
        stop = start + len(block)
        np.divide(block.reshape(-1, *shape), np.float32(255), out=images[start:stop])
        start = stop
    return torch.from_numpy(images)
