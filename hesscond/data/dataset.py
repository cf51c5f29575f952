"""What a loader returns: inputs with their labels or values, split into training and test."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from hesscond.data.form import Form
from hesscond.data.mapped import Samples


# No generated ==: comparing tensors elementwise has no single truth value, so it would only ever raise.
@dataclass(frozen=True, eq=False)
class Dataset:
    """A data set in memory, or images that stay on disk.

    Attributes
    ----------
    name : str
        The name `load` was given.
    train_inputs, test_inputs : torch.Tensor or MappedImages
        float32: images (N, C, H, W) in [0, 1], clouds of points (N, P, d), or coordinates (N, d).
    train_targets, test_targets : torch.Tensor
        Class numbers 0 … classes − 1, int64 (N,); or values, float32 (N, outputs).
    classes : int
        The number of classes; 0: the targets are values.
    source : str
        Where it was read from: the path of a folder or archive, or ``"scikit-learn"``.
    preparation : tuple of str
        What was asked of the loader and done to the samples since, as a study says it.
    """

    name: str
    train_inputs: Samples
    train_targets: torch.Tensor
    test_inputs: Samples
    test_targets: torch.Tensor
    classes: int
    source: str
    preparation: tuple[str, ...] = ()

    @property
    def form(self) -> Form:
        """Shapes of inputs and targets."""
        outputs = self.classes or self.train_targets.shape[1]
        return Form(tuple(self.train_inputs.shape[1:]), outputs, self.classes)

    def to(self, device: torch.device | str) -> Dataset:
        """Return the same data set with its four tensors on `device`.

        Parameters
        ----------
        device : torch.device or str
            Where the tensors should lie.

        Returns
        -------
        Dataset
            Tensors already there are shared, not copied; images on disk become tensors there when they are read.
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
