"""Pictures that stay in their files, and are decoded where a tensor of samples is indexed."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hesscond.data.files import DIGITS, fingerprint
from hesscond.errors import CorruptDataError, DataNotFoundError

#: Called with the number of pictures decoded, and of all.
OnDecoded = Callable[[int, int], None]
#: First row and column, height and width of parts of pictures, from their heights and widths; each int64 (n,).
Parts = Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, ...]]
#: Pictures decoded at a time to count their values.
CHUNK = 64
#: Pillow's modes of at most 8 bits a channel: others would be cut off when they become RGB.
MODES = ("1", "L", "LA", "P", "PA", "RGB", "RGBA", "RGBX", "CMYK", "YCbCr", "LAB", "HSV")


@dataclass(frozen=True, eq=False)
class Pictures:
    """Images on disk that act as a float32 tensor (N, 3, size, size) in [0, 1]; each is decoded when it is indexed.

    Each becomes RGB, its shorter side ``resize`` pixels (bilinear), of which the centre is taken.

    Attributes
    ----------
    folder
        Folder of the files.
    files
        Paths of the files below the folder, with ``/``.
    resize, size
        Lengths in pixels; ``size`` is not larger than ``resize``.
    device
        Device of the tensors that are returned.
    flat
        Whether images are vectors (3·size²,).
    shift, scale
        float32 (3, 1, 1): (x − shift) / scale is given in place of x; None: x.
    """

    folder: Path
    files: Sequence[str]
    resize: int
    size: int
    device: torch.device = torch.device("cpu")  # noqa: RUF009 - it cannot be changed
    flat: bool = False
    shift: torch.Tensor | None = None
    scale: torch.Tensor | None = None

    def __len__(self) -> int:
        return len(self.files)

    @property
    def shape(self) -> torch.Size:
        """Shape (N, 3, size, size), or (N, 3·size²)."""
        return torch.Size([len(self), 3 * self.size**2] if self.flat else [len(self), 3, self.size, self.size])

    @property
    def ndim(self) -> int:
        """Number of dimensions."""
        return len(self.shape)

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the tensors that are returned: float32."""
        return torch.float32

    def __getitem__(self, index: slice | torch.Tensor) -> torch.Tensor:
        """Images of a slice, or of indices (n,), as a tensor."""
        return self._tensor(self._bytes(index))

    def resized(self, index: torch.Tensor, parts: Parts) -> torch.Tensor:
        """Parts of the whole pictures of indices (n,), each resized to size × size, as a tensor."""
        return self._tensor(self._bytes(index, parts))

    def _tensor(self, pixels: np.ndarray) -> torch.Tensor:
        """Images of pixels, uint8 (n, 3, size, size)."""
        # 8-bit pixels are moved to the device, whose quotients are those of the CPU
        images = torch.from_numpy(pixels).to(self.device).to(torch.float32)
        images.div_(torch.tensor(255.0, device=self.device))
        if self.shift is not None and self.scale is not None:
            images.sub_(self.shift.to(self.device)).div_(self.scale.to(self.device))
        return images.flatten(1) if self.flat else images

    def index_select(self, dim: int, index: torch.Tensor) -> torch.Tensor:
        """Select samples (``dim`` 0), like `torch.Tensor.index_select`."""
        if dim != 0:
            raise IndexError(f"only samples (dim 0) of images on disk can be selected, not dim {dim}")
        return self[index]

    def flatten(self, start_dim: int) -> Pictures:
        """Return the same images as vectors (N, 3·size²); ``start_dim`` must be 1."""
        if start_dim != 1:
            raise IndexError(f"images on disk are flattened from dim 1, not from dim {start_dim}")
        return replace(self, flat=True)

    def to(self, device: torch.device | str) -> Pictures:
        """Return the same images, with tensors on ``device``."""
        return replace(self, device=torch.device(device))

    def selected(self, index: torch.Tensor) -> Pictures:
        """Images of indices (n,), still on disk."""
        return replace(self, files=[self.files[row] for row in index.tolist()])

    def standardized(self, mean: torch.Tensor, deviation: torch.Tensor) -> Pictures:
        """Images with (x − mean) / deviation in place of x; both float32 (3, 1, 1)."""
        return replace(self, shift=mean, scale=deviation)

    def moments(self, on_decoded: OnDecoded | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """Mean and variance (1/N) of the channels of x in [0, 1], float64 (3,): from counts, without rounding sums."""
        counts = np.zeros((3, 256), np.int64)
        for start in range(0, len(self), CHUNK):
            channels = self._bytes(slice(start, start + CHUNK)).swapaxes(0, 1)
            counts += [np.bincount(channel.reshape(-1), minlength=256) for channel in channels]
            if on_decoded is not None:
                on_decoded(min(start + CHUNK, len(self)), len(self))
        # the very numbers that tensors hold
        values = (np.arange(256, dtype=np.float32) / np.float32(255)).astype(np.float64)
        means, variances = [], []
        for histogram in counts:
            total = int(histogram.sum())
            means.append(math.fsum(histogram * values) / total)
            variances.append(math.fsum(histogram * (values - means[-1]) ** 2) / total)
        return torch.tensor(means, dtype=torch.float64, device="cpu"), torch.tensor(
            variances, dtype=torch.float64, device="cpu"
        )

    def fingerprint(self) -> str:
        """Checksum of names, sizes and modification times of the files, and of both lengths."""
        return fingerprint(f"{self.resize} {self.size}", self.folder, self.files)[:DIGITS]

    def _bytes(self, index: slice | torch.Tensor, parts: Parts | None = None) -> np.ndarray:
        """Pixels of the centre or of parts, uint8 (n, 3, size, size)."""
        from PIL import Image

        files = self.files[index] if isinstance(index, slice) else [self.files[row] for row in index.tolist()]
        pixels = np.empty((len(files), 3, self.size, self.size), np.uint8)
        Image.init()  # once: not by all threads at the same time
        with warnings.catch_warnings(), ThreadPoolExecutor() as threads:
            warnings.filterwarnings("ignore", module=r"PIL\.")  # about metadata that is not used
            # Pillow lets other threads run while it works
            if parts is None:
                decodings = threads.map(self._centre, files)
            else:
                # of the headers
                sizes = threads.map(lambda file: opened(self.folder / file, lambda picture: picture.size), files)
                sides = torch.tensor(list(sizes), device="cpu")
                decodings = threads.map(self._part, files, torch.stack(parts(sides[:, 1], sides[:, 0]), 1).tolist())
            for image, values in zip(pixels, decodings, strict=True):
                image[:] = np.asarray(values).transpose(2, 0, 1)
        return pixels

    def _centre(self, file: str) -> Any:
        """Centre of one picture, resized with torchvision's arithmetic."""
        from PIL import Image

        image = decoded(self.folder / file)
        short, long = sorted(image.size)
        sides = [self.resize if side == short else int(self.resize * long / short) for side in image.size]
        image = image.resize((sides[0], sides[1]), Image.Resampling.BILINEAR)
        left, top = (round((side - self.size) / 2) for side in sides)
        return image.crop((left, top, left + self.size, top + self.size))

    def _part(self, file: str, place: Sequence[int]) -> Any:
        """Part of one picture with a first row and column, height and width, resized."""
        from PIL import Image

        top, left, high, wide = place
        # pixels outside the part do not count, as in torchvision
        part = decoded(self.folder / file).crop((left, top, left + wide, top + high))
        return part.resize([self.size] * 2, Image.Resampling.BILINEAR)


def decoded(path: Path) -> Any:
    """Picture of a file, in RGB."""
    return opened(path, lambda picture: picture.convert("RGB"))


def opened(path: Path, read: Callable[[Any], Any]) -> Any:
    """Result of a function of the picture of a file, which is not decoded yet."""
    from PIL import Image, UnidentifiedImageError

    try:
        with Image.open(path) as picture:
            if picture.mode not in MODES:
                raise ValueError(f"its mode {picture.mode} has more than 8 bits a channel")
            return read(picture)
    except FileNotFoundError as error:
        raise DataNotFoundError(f"{path} cannot be read: {error.strerror}.") from None
    except UnidentifiedImageError:
        raise CorruptDataError(f"{path} is no picture: replace or delete it.") from None
    except Exception as error:  # any error of a decoder
        reason = str(error).partition("\n")[0] or type(error).__name__
        raise CorruptDataError(f"{path} cannot be decoded ({reason}): replace or delete it.") from None
