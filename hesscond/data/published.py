"""Data sets that come as files, CIFAR and the MNIST family: their layout, addresses and checksums.

The checksums of archives, CIFAR batches and gzipped idx files are those torchvision publishes. A further data
set is a further `register`.
"""

from __future__ import annotations

import gzip
import pickle
import struct
from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hesscond.data import files, sources
from hesscond.data.dataset import Dataset, Form, images_from_bytes
from hesscond.errors import CorruptDataError, DataNotFoundError

CIFAR_SHAPE = (3, 32, 32)
# Every data set of this family has the same four files of the same shapes.
TRAIN_IMAGES, TRAIN_LABELS = "train-images-idx3-ubyte", "train-labels-idx1-ubyte"
TEST_IMAGES, TEST_LABELS = "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte"
IDX_SHAPES: dict[str, tuple[int, ...]] = {
    TRAIN_IMAGES: (60_000, 28, 28),
    TRAIN_LABELS: (60_000,),
    TEST_IMAGES: (10_000, 28, 28),
    TEST_LABELS: (10_000,),
}


class PublishedSource(sources.Source):
    """Layout of the files of a data set, with their checksums."""

    folder: str  # below a data directory, as torchvision has it
    fetchable = True

    @property
    @abstractmethod
    def downloads(self) -> tuple[files.Download, ...]:
        """Files to download for a full copy."""

    @abstractmethod
    def find(self, directory: Path) -> Path | None:
        """Path of the full copy in ``directory``; None: there is none."""

    @abstractmethod
    def lacking(self, directory: Path) -> list[str]:
        """Names of the files that are not in the folder below ``directory``."""

    @abstractmethod
    def verified_files(self, place: Path) -> dict[str, bytes]:
        """Content of every file of a copy by its name, each with its published md5; ``place`` is what `find` gave."""

    @abstractmethod
    def read(self, place: Path) -> Dataset:
        """Data set of a copy, checked as in `verified_files`; CorruptDataError also for a wrong layout of a file."""

    def load(self, options: Mapping[str, Any], directories: Sequence[Path], *, download: bool, **how: Any) -> Dataset:
        return self.read(self.present(directories, download=download)[1])

    def locate(self, directories: Sequence[Path]) -> Path | None:
        return next((place for directory in directories if (place := self.find(directory))), None)

    def fetch(self, directories: Sequence[Path]) -> Path:
        directory, place = self.present(directories, download=True)
        self.verified_files(place)
        return directory

    def present(self, directories: Sequence[Path], *, download: bool) -> tuple[Path, Path]:
        """Folder searched and the copy found in it, downloaded into the last one if there was none."""
        for directory in directories:
            if place := self.find(directory):
                return directory, place
        if not download:
            raise self.not_found(directories, "downloading was not allowed")
        target = directories[-1]
        try:
            files.download_files(self.downloads, target)
        except files.DownloadError as error:
            raise self.not_found(directories, str(error)) from None
        place = self.find(target)
        assert place is not None, "a completed download is a full copy"
        return target, place

    def not_found(self, directories: Sequence[Path], reason: str) -> DataNotFoundError:
        """Error that says where the files are not, and how to get them."""
        places = " or ".join(self.described(directory) for directory in directories)
        return DataNotFoundError(
            f"{self.name} is not in {places}, and {reason}: run `hesscond data fetch {self.name}` where "
            f"there is a network and point ${sources.ENVIRONMENT} to the folder, or take the study fc-digits, "
            "which needs no download."
        )

    def described(self, directory: Path) -> str:
        """A folder that was searched, and what it lacks."""
        if not directory.is_dir():
            return f"{directory} (no such folder)"
        if (directory / self.folder).is_dir() and (lacking := self.lacking(directory)):
            return f"{directory} ({self.folder} lacks {', '.join(lacking)})"
        return str(directory)


@dataclass(frozen=True)
class CifarSource(PublishedSource):
    """Data set of the CIFAR family, in batches."""

    name: str
    classes: int
    folder: str  # of the batches below a data directory, and inside the archive
    archive: files.Download
    train: Mapping[str, str]  # published md5 by file name, in order
    test: Mapping[str, str]
    label_key: bytes  # key of the class numbers in a batch

    def form(self, options: Mapping[str, Any]) -> Form:
        return Form(CIFAR_SHAPE, self.classes, self.classes)

    @property
    def downloads(self) -> tuple[files.Download, ...]:
        return (self.archive,)

    def find(self, directory: Path) -> Path | None:
        """Folder of batches in ``directory``, else the archive, else None."""
        folder, archive = directory / self.folder, directory / self.archive.path
        if folder.is_dir() and not self.lacking(directory):
            return folder
        return archive if files.exists(archive) else None

    def lacking(self, directory: Path) -> list[str]:
        return [batch for batch in self._batches if not files.exists(directory / self.folder / batch)]

    def verified_files(self, place: Path) -> dict[str, bytes]:
        if place.is_dir():
            return {
                batch: files.read_verified(place / batch, md5, dataset=self.name)
                for batch, md5 in self._batches.items()
            }
        members = {f"{self.folder}/{batch}": md5 for batch, md5 in self._batches.items()}
        contents = files.read_verified_members(place, self.archive.md5, members, dataset=self.name)
        return {batch: contents[f"{self.folder}/{batch}"] for batch in self._batches}

    def read(self, place: Path) -> Dataset:
        contents = self.verified_files(place)
        train_inputs, train_targets = self._decode(contents[batch] for batch in self.train)
        test_inputs, test_targets = self._decode(contents[batch] for batch in self.test)
        return Dataset(self.name, train_inputs, train_targets, test_inputs, test_targets, self.classes, str(place))

    @property
    def _batches(self) -> dict[str, str]:
        return {**self.train, **self.test}

    def _decode(self, contents: Iterable[bytes]) -> tuple[torch.Tensor, torch.Tensor]:
        # A pickle runs code when loaded; these are bytes whose published md5 has just been checked.
        batches: list[dict[bytes, Any]] = [pickle.loads(content, encoding="bytes") for content in contents]
        inputs = images_from_bytes([batch[b"data"] for batch in batches], CIFAR_SHAPE)
        labels = np.concatenate([np.asarray(batch[self.label_key], dtype=np.int64) for batch in batches])
        return inputs, torch.from_numpy(labels)


@dataclass(frozen=True)
class IdxSource(PublishedSource):
    """Data set in four gzipped idx files."""

    name: str
    folder: str
    url: str  # folder that they are published in, with a slash at its end
    md5: Mapping[str, str]  # of each file as published, by its name without .gz
    classes: int = 10

    def form(self, options: Mapping[str, Any]) -> Form:
        return Form((1, *IDX_SHAPES[TRAIN_IMAGES][1:]), self.classes, self.classes)

    @property
    def downloads(self) -> tuple[files.Download, ...]:
        return tuple(
            files.Download(f"{self.url}{file}.gz", md5, f"{self.folder}/{file}.gz") for file, md5 in self.md5.items()
        )

    def find(self, directory: Path) -> Path | None:
        return None if self.lacking(directory) else directory / self.folder

    def lacking(self, directory: Path) -> list[str]:
        folder = directory / self.folder
        return [f"{file}.gz" for file in self.md5 if not files.exists(folder / f"{file}.gz")]

    def verified_files(self, place: Path) -> dict[str, bytes]:
        return {
            file: gzip.decompress(files.read_verified(place / f"{file}.gz", md5, dataset=self.name))
            for file, md5 in self.md5.items()
        }

    def read(self, place: Path) -> Dataset:
        arrays = {
            file: parse_idx(content, IDX_SHAPES[file], file=str(place / file))
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


def parse_idx(content: bytes, shape: tuple[int, ...], *, file: str) -> np.ndarray:
    """Array uint8 of an idx file of 8-bit numbers, whose ``shape`` is known; ``file`` is its name in the message.

    The header is two zero bytes, the type (8: unsigned byte), the number of dimensions, and each dimension as a big-
    endian 32-bit integer; the numbers follow in C order.
    """
    header = struct.pack(f">BBBB{len(shape)}I", 0, 0, 8, len(shape), *shape)
    if content[: len(header)] != header or len(content) != len(header) + prod(shape):
        raise CorruptDataError(
            f"{file} is not an idx file of unsigned bytes of shape {shape} (its header is "
            f"{content[: len(header)].hex()} instead of {header.hex()}, its length {len(content)} bytes "
            f"instead of {len(header) + prod(shape)}): delete it and fetch it again."
        )
    return np.frombuffer(content, dtype=np.uint8, offset=len(header)).reshape(shape)


_MNIST = {
    TRAIN_IMAGES: "f68b3c2dcbeaaa9fbdd348bbdeb94873",
    TRAIN_LABELS: "d53e105ee54ea40749a09fcbcd1e9432",
    TEST_IMAGES: "9fb629c4189551a2d022fa330f9573f3",
    TEST_LABELS: "ec29112dd5afa0611ce80d1b7f02629c",
}
_FASHION = {
    TRAIN_IMAGES: "8d4fb7e6c68d591d4c3dfef9ec88bf0d",
    TRAIN_LABELS: "25c81989df183df01b3e8a0aad5dffbe",
    TEST_IMAGES: "bef4ecab320f06d8554ea6380940ec79",
    TEST_LABELS: "bb300cfdad3c16e7a12a480ee83cd310",
}

sources.register(
    CifarSource(
        name="cifar10",
        classes=10,
        folder="cifar-10-batches-py",
        archive=files.Download(
            "https://www.cs.toronto.edu/~kriz/cifar-10-python.tar.gz",
            "c58f30108f718f92721af3b95e74349a",
            "cifar-10-python.tar.gz",
        ),
        train={
            "data_batch_1": "c99cafc152244af753f735de768cd75f",
            "data_batch_2": "d4bba439e000b95fd0a9bffe97cbabec",
            "data_batch_3": "54ebc095f3ab1f0389bbae665268c751",
            "data_batch_4": "634d18415352ddfa80567beed471001a",
            "data_batch_5": "482c414d41f54cd18b22e5b47cb7c3cb",
        },
        test={"test_batch": "40351d587109b95175f43aff81a1287e"},
        label_key=b"labels",
    )
)
sources.register(
    CifarSource(
        name="cifar100",
        classes=100,
        folder="cifar-100-python",
        archive=files.Download(
            "https://www.cs.toronto.edu/~kriz/cifar-100-python.tar.gz",
            "eb9058c3a382ffc7106e4002c42a8d85",
            "cifar-100-python.tar.gz",
        ),
        train={"train": "16019d7e3df5f24257cddd939b257f8d"},
        test={"test": "f0ef6b0ae62326f3e7ffdfab6717acfc"},
        label_key=b"fine_labels",
    )
)
sources.register(
    IdxSource(
        name="fashion-mnist",
        folder="FashionMNIST/raw",
        # The only address of the publisher that serves these files, without https; the md5 check covers that.
        url="http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",
        md5=_FASHION,
    )
)
sources.register(
    IdxSource(
        name="mnist",
        folder="MNIST/raw",
        url="https://ossci-datasets.s3.amazonaws.com/mnist/",
        md5=_MNIST,
    )
)
