"""Result of a loader: inputs with their labels or values, split into training and test samples."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeAlias

import numpy as np
import torch

from hesscond.data.pictures import Pictures
from hesscond.errors import ConfigError

#: Samples of a data set.
Samples: TypeAlias = torch.Tensor | Pictures
Kind: TypeAlias = Literal["coordinates", "points", "image", "tokens"]
#: By the number of dimensions of one input.
KINDS: dict[int, Kind] = {1: "coordinates", 2: "points", 3: "image"}


@dataclass(frozen=True)
class Form:
    """Shapes of inputs and targets, known before anything is loaded.

    Attributes
    ----------
    input_shape
        Shape of one input: (channels, height, width), (points, d) or (d,); for tokens (context,).
    outputs
        Number of classes, or of values to predict.
    classes
        Number of classes; 0: the targets are values.
    tokens
        Whether the inputs are class numbers; the target of each is the next one.
    """

    input_shape: tuple[int, ...]
    outputs: int
    classes: int
    tokens: bool = False

    @property
    def kind(self) -> Kind:
        """Kind of the inputs: tokens, or by the number of their dimensions coordinates, points or an image."""
        return "tokens" if self.tokens else KINDS[len(self.input_shape)]


# No generated ==: comparing tensors elementwise has no single truth value, so it would only ever raise.
@dataclass(frozen=True, eq=False)
class Dataset:
    """Data set in memory, or with pictures that stay on disk.

    Attributes
    ----------
    name
        Name that `load` was given.
    train_inputs, test_inputs
        float32: images (N, C, H, W) in [0, 1], clouds of points (N, P, d), or coordinates (N, d); int64: tokens
        (N, context).
    train_targets, test_targets
        Class numbers 0 … classes − 1, int64 (N,), of tokens (N, context); or values, float32 (N, outputs).
    classes
        Number of classes; 0: the targets are values.
    source
        Path of the folder or archive that it was read from, or ``"scikit-learn"``.
    preparation
        Options of the loader and later changes of the samples, in the words of a study.
    pinned
        Options with which the loader gives these very data or raises an error.
    """

    name: str
    train_inputs: Samples
    train_targets: torch.Tensor
    test_inputs: Samples
    test_targets: torch.Tensor
    classes: int
    source: str
    preparation: tuple[str, ...] = ()
    pinned: Mapping[str, Any] = field(default_factory=dict)

    @property
    def form(self) -> Form:
        """Shapes of inputs and targets."""
        outputs = self.classes or self.train_targets.shape[1]
        tokens = isinstance(self.train_inputs, torch.Tensor) and not self.train_inputs.is_floating_point()
        return Form(tuple(self.train_inputs.shape[1:]), outputs, self.classes, tokens)

    def to(self, device: torch.device | str) -> Dataset:
        """Return the data set on `device`; tensors already there are shared, pictures go there when they are read."""
        return replace(
            self,
            train_inputs=self.train_inputs.to(device),
            train_targets=self.train_targets.to(device),
            test_inputs=self.test_inputs.to(device),
            test_targets=self.test_targets.to(device),
        )


def of_arrays(name: str, arrays: Any, source: str) -> Dataset:
    """Data set of four arrays or tensors: inputs and targets for training, inputs and targets for tests.

    Inputs are (N, …) of 1 to 3 dimensions a sample, made float32, or tokens (N, context) if they are integers. Targets
    are class numbers from 0 (integers (N,), of tokens (N, context)) or values (floats (N,) or (N, outputs)).
    """
    if not isinstance(arrays, (tuple, list)) or len(arrays) != 4:
        raise ConfigError(
            f"{name} must return (train_inputs, train_targets, test_inputs, test_targets) or a hesscond.data.Dataset"
        )
    tensors: list[torch.Tensor] = []
    names = ("train_inputs", "train_targets", "test_inputs", "test_targets")
    for what, array in zip(names, arrays, strict=True):
        try:
            is_tensor = isinstance(array, torch.Tensor)
            tensors.append(array if is_tensor else torch.as_tensor(np.asarray(array), device="cpu"))
            len(tensors[-1])  # a single number has no rows
        except (TypeError, ValueError) as error:
            raise ConfigError(f"{what} of {name} must be an array of numbers, a row for each sample: {error}") from None
    by_class = not any(target.is_floating_point() for target in tensors[1::2])
    for number, (what, tensor) in enumerate(zip(names, tensors, strict=True)):
        if len(tensor) != len(tensors[number - number % 2]) or not tensor.numel():
            raise ConfigError(f"{what} of {name} has {len(tensor)} rows: inputs and targets need one for each sample")
        if tensor.is_floating_point() and not bool(tensor.isfinite().all()):
            raise ConfigError(f"{what} of {name} has values that are not finite: remove or fill them")
        if number % 2:
            tensors[number] = tensor.long() if by_class else tensor.float().reshape(len(tensor), -1)
            continue
        tensors[number] = tensor.float() if tensor.is_floating_point() else tensor.long()
        if tensor.ndim - 1 not in KINDS:
            raise ConfigError(f"{what} of {name} has the shape {tuple(tensor.shape)}: a sample has 1 to 3 dimensions")
    if by_class and min(int(target.min()) for target in tensors[1::2]) < 0:
        raise ConfigError(f"targets of {name} are integers below 0: class numbers begin at 0, values are floats")
    classes = 1 + max(int(target.max()) for target in tensors[1::2]) if by_class else 0
    return Dataset(name, tensors[0], tensors[1], tensors[2], tensors[3], classes, source)


def selected(inputs: Samples, index: torch.Tensor) -> Samples:
    """Samples of some indices (n,): copies of samples in memory, files of samples on disk."""
    return inputs.selected(index) if isinstance(inputs, Pictures) else inputs[index]


@dataclass(frozen=True)
class SampleStream:
    """Stream of batches (inputs, targets), which is read anew in every iteration."""

    inputs: Samples
    targets: torch.Tensor
    parts: Sequence[slice]

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        return ((self.inputs[part], self.targets[part]) for part in self.parts)


def images_from_bytes(blocks: Sequence[np.ndarray], shape: tuple[int, int, int]) -> torch.Tensor:
    """Images float32 (N, C, H, W) in [0, 1] from blocks of 8-bit pixels, each of shape (n, C·H·W), joined in order."""
    images = np.empty((sum(len(block) for block in blocks), *shape), dtype=np.float32)
    start = 0
    for block in blocks:  # straight into place: CIFAR is 0.6 GB in float32 and deserves no second copy
        stop = start + len(block)
        np.divide(block.reshape(-1, *shape), np.float32(255), out=images[start:stop])
        start = stop
    return torch.from_numpy(images)
