"""Images that stay on disk as 8-bit pixels, and are read where a tensor of samples is indexed."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch

from hesscond.errors import CorruptDataError, DataNotFoundError

CPU = torch.device("cpu")
#: Images that are read at a time to count their values.
CHUNK = 64


@dataclass(frozen=True, eq=False)
class MappedImages:
    """What a study does with a tensor of images, float32 (N, C, H, W) in [0, 1]; only what is indexed is in memory.

    Processes that read the same file have its pages in memory once for all. Pickling gives the path, not the pixels.

    Attributes
    ----------
    file
        The pixels, uint8 (M, C, H, W), and nothing else.
    stored
        (M, C, H, W).
    rows
        int64 (N,): which of them, in which order; None: all.
    device
        Where tensors are made.
    flat
        Whether images are vectors (C·H·W,).
    shift, scale
        float32 (C, 1, 1): (x − shift) / scale is given in place of x; None: x.
    counts
        int64 (C, 256): how often each value occurs in all of the file; None: not known.
    """

    file: Path
    stored: tuple[int, int, int, int]
    rows: np.ndarray | None = None
    device: torch.device = CPU
    flat: bool = False
    shift: torch.Tensor | None = None
    scale: torch.Tensor | None = None
    counts: np.ndarray | None = None

    def __len__(self) -> int:
        return self.stored[0] if self.rows is None else len(self.rows)

    @property
    def shape(self) -> torch.Size:
        """(N, C, H, W), or (N, C·H·W)."""
        own = self.stored[1:]
        return torch.Size([len(self), math.prod(own)] if self.flat else [len(self), *own])

    @property
    def ndim(self) -> int:
        """Number of dimensions."""
        return len(self.shape)

    @property
    def dtype(self) -> torch.dtype:
        """Of what is read: float32."""
        return torch.float32

    def __getitem__(self, index: slice | torch.Tensor) -> torch.Tensor:
        """The images of a slice, or of indices (n,), as a tensor.

        Raises
        ------
        DataNotFoundError
            The file is gone.
        CorruptDataError
            It is not of its length.
        """
        # 8-bit pixels are what goes to the device; quotients of the device's own numbers are those of the CPU
        images = torch.from_numpy(self._bytes(index)).to(self.device).to(torch.float32)
        images.div_(torch.tensor(255.0, device=self.device))
        if self.shift is not None and self.scale is not None:
            images.sub_(self.shift.to(self.device)).div_(self.scale.to(self.device))
        return images.flatten(1) if self.flat else images

    def index_select(self, dim: int, index: torch.Tensor) -> torch.Tensor:
        """As that of a tensor, of samples: along ``dim`` 0."""
        if dim != 0:
            raise IndexError(f"only samples (dim 0) of images on disk can be selected, not dim {dim}")
        return self[index]

    def flatten(self, start_dim: int) -> MappedImages:
        """As vectors (N, C·H·W); ``start_dim`` is 1."""
        if start_dim != 1:
            raise IndexError(f"images on disk are flattened from dim 1, not from dim {start_dim}")
        return replace(self, flat=True)

    def to(self, device: torch.device | str) -> MappedImages:
        """The same, tensors being made on ``device``."""
        return replace(self, device=torch.device(device))

    def selected(self, index: torch.Tensor) -> MappedImages:
        """The images of indices (n,), still on disk."""
        chosen = index.cpu().numpy()
        return replace(self, rows=chosen if self.rows is None else self.rows[chosen], counts=None)

    def standardized(self, mean: torch.Tensor, deviation: torch.Tensor) -> MappedImages:
        """(x − mean) / deviation in place of x; both float32 (C, 1, 1)."""
        return replace(self, shift=mean, scale=deviation)

    def moments(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Mean and variance (1/N) of the channels of x in [0, 1], float64 (C,): from counts, without rounding sums."""
        counts = self.counts if self.counts is not None else self._counted()
        # the very numbers that tensors hold
        values = (np.arange(256, dtype=np.float32) / np.float32(255)).astype(np.float64)
        means, variances = [], []
        for own in counts:
            total = int(own.sum())
            means.append(math.fsum(own * values) / total)
            variances.append(math.fsum(own * (values - means[-1]) ** 2) / total)
        return torch.tensor(means, dtype=torch.float64), torch.tensor(variances, dtype=torch.float64)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_pixels"}

    @cached_property
    def _pixels(self) -> np.ndarray:
        try:
            size = self.file.stat().st_size
        except OSError:
            raise DataNotFoundError(f"the decoded images {self.file} are gone: load the data set once more") from None
        if size != math.prod(self.stored):
            raise CorruptDataError(
                f"the decoded images {self.file} have {size} bytes instead of {math.prod(self.stored)}: delete the "
                "file, and load the data set once more"
            )
        return np.asarray(np.memmap(self.file, np.uint8, "r", shape=self.stored))

    def _bytes(self, index: slice | torch.Tensor) -> np.ndarray:
        """A copy of the pixels, uint8 (n, C, H, W)."""
        place = index if isinstance(index, slice) else index.cpu().numpy()
        if self.rows is not None:
            place = self.rows[place]
        return self._pixels[place].copy() if isinstance(place, slice) else np.take(self._pixels, place, axis=0)

    def _counted(self) -> np.ndarray:
        counts = np.zeros((self.stored[1], 256), np.int64)
        for start in range(0, len(self), CHUNK):
            channels = self._bytes(slice(start, start + CHUNK)).swapaxes(0, 1)
            counts += [np.bincount(channel.reshape(-1), minlength=256) for channel in channels]
        return counts


#: Samples of a data set.
Samples: TypeAlias = torch.Tensor | MappedImages


def selected(inputs: Samples, index: torch.Tensor) -> Samples:
    """The samples of indices (n,): copies in memory, or on disk where they are."""
    return inputs.selected(index) if isinstance(inputs, MappedImages) else inputs[index]


@dataclass(frozen=True)
class Stream:
    """(inputs, targets) of parts of the samples, read anew every time it is gone through."""

    inputs: Samples
    targets: torch.Tensor
    parts: Sequence[slice]

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        return ((self.inputs[part], self.targets[part]) for part in self.parts)
