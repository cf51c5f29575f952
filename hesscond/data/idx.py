"""MNIST and its drop-in replacements: four idx files, gzipped as published or unpacked."""

from __future__ import annotations

import gzip
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from hesscond.data.dataset import Dataset, images_from_bytes
from hesscond.data.files import Download, exists, file_md5, read_verified
from hesscond.data.form import Form
from hesscond.data.source import Source
from hesscond.errors import CorruptDataError

# Every data set of this family has the same four files of the same shapes.
TRAIN_IMAGES, TRAIN_LABELS = "train-images-idx3-ubyte", "train-labels-idx1-ubyte"
TEST_IMAGES, TEST_LABELS = "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte"
SHAPES: dict[str, tuple[int, ...]] = {
    TRAIN_IMAGES: (60_000, 28, 28),
    TRAIN_LABELS: (60_000,),
    TEST_IMAGES: (10_000, 28, 28),
    TEST_LABELS: (10_000,),
}


class IdxMd5(NamedTuple):
    """The md5 of an idx file as published (gzipped), and unpacked."""

    gz: str
    raw: str


@dataclass(frozen=True)
class IdxSource(Source):
    """Where the four idx files of a data set lie and what they must be.

    Attributes
    ----------
    name : str
        The data set's name.
    folder : str
        Their folder below a data directory.
    url : str
        The folder they are published in, with a slash at its end.
    md5 : mapping
        The checksums by the name of the unpacked file.
    namesakes : frozenset of str
        Checksums of the gzipped training labels of other data sets whose files have the same names.
    classes : int
        The number of classes.
    """

    name: str
    folder: str
    url: str
    md5: Mapping[str, IdxMd5]
    namesakes: frozenset[str] = field(default=frozenset())
    classes: int = 10

    @property
    def form(self) -> Form:
        """Grey images of 28 × 28."""
        return Form((1, *SHAPES[TRAIN_IMAGES][1:]), self.classes, self.classes)

    @property
    def downloads(self) -> tuple[Download, ...]:
        """The files to download for a full copy."""
        return tuple(
            Download(f"{self.url}{file}.gz", md5.gz, f"{self.folder}/{file}.gz") for file, md5 in self.md5.items()
        )

    def find(self, directory: Path) -> Path | None:
        """Return the folder with the full copy: torchvision's in `directory`, else `directory`, else None."""
        if not self.lacking(directory):
            return directory / self.folder
        if all(exists(directory / f"{file}.gz") for file in self.md5) and not self._is_namesake(directory):
            return directory
        return None

    def lacking(self, directory: Path) -> list[str]:
        """Return the names of the files that are not in the folder below `directory`, gzipped or unpacked."""
        folder = directory / self.folder
        return [file for file in self.md5 if not (exists(folder / f"{file}.gz") or exists(folder / file))]

    def verified_files(self, place: Path) -> dict[str, bytes]:
        """Return the unpacked content of the four files in the folder `place`, each with its published md5."""
        contents = {}
        for file, md5 in self.md5.items():
            if exists(place / f"{file}.gz"):
                packed = read_verified(place / f"{file}.gz", md5.gz, dataset=self.name)
                contents[file] = gzip.decompress(packed)
            else:
                contents[file] = read_verified(place / file, md5.raw, dataset=self.name)
        return contents

    def read(self, place: Path) -> Dataset:
        """Return the data set from the folder `place`; images are (N, 1, 28, 28)."""
        arrays = {
            file: parse_idx(content, SHAPES[file], file=str(place / file))
            for file, content in self.verified_files(place).items()
        }
        return Dataset(
            self.name,
            images_from_bytes([arrays[TRAIN_IMAGES]], (1, 28, 28)),
            torch.from_numpy(arrays[TRAIN_LABELS].astype(np.int64)),
            images_from_bytes([arrays[TEST_IMAGES]], (1, 28, 28)),
            torch.from_numpy(arrays[TEST_LABELS].astype(np.int64)),
            self.classes,
            str(place),
        )

    def _is_namesake(self, directory: Path) -> bool:
        # In torchvision's layout the folder says whose files they are; lying loose, only their content does.
        return file_md5(directory / f"{TRAIN_LABELS}.gz") in self.namesakes


def parse_idx(content: bytes, shape: tuple[int, ...], *, file: str) -> np.ndarray:
    """Return the array of 8-bit numbers that an idx file holds.

    The format: two zero bytes, the type (8 is unsigned byte), the number of dimensions, each dimension as a
    big-endian 32-bit integer, then the numbers in C order.

    Parameters
    ----------
    content : bytes
        The whole unpacked file.
    shape : tuple of int
        The shape it must have.
    file : str
        How to name it in the message.

    Returns
    -------
    numpy.ndarray
        uint8, of shape `shape`, read-only.

    Raises
    ------
    CorruptDataError
        If header or length are any other than those of an unsigned byte array of this shape.
    """
    header = struct.pack(f">BBBB{len(shape)}I", 0, 0, 8, len(shape), *shape)
    if content[: len(header)] != header or len(content) != len(header) + prod(shape):
        raise CorruptDataError(
            f"{file} is not an idx file of unsigned bytes of shape {shape} (its header is "
            f"{content[: len(header)].hex()} instead of {header.hex()}, its length {len(content)} bytes "
            f"instead of {len(header) + prod(shape)}): delete it and fetch it again."
        )
    return np.frombuffer(content, dtype=np.uint8, offset=len(header)).reshape(shape)
