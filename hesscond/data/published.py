"""Data sets that come as files, CIFAR and the MNIST family: their layout, addresses and checksums.

The checksums of archives, CIFAR batches and gzipped idx files are those torchvision publishes. A further data
set is a further `register`.
"""

from __future__ import annotations

import gzip
import io
import pickle
import tarfile
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hesscond.data import files, sources
from hesscond.data.dataset import Dataset, Form, images_from_bytes
from hesscond.errors import DataNotFoundError

# Every data set of this family has the same four files of the same shapes.
TRAIN_IMAGES, TRAIN_LABELS = "train-images-idx3-ubyte", "train-labels-idx1-ubyte"
TEST_IMAGES, TEST_LABELS = "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte"
IDX_SHAPES: dict[str, tuple[int, ...]] = {
    TRAIN_IMAGES: (60_000, 28, 28),
    TRAIN_LABELS: (60_000,),
    TEST_IMAGES: (10_000, 28, 28),
    TEST_LABELS: (10_000,),
}
#: Inputs and targets for training, inputs and targets for tests.
FourTensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


class PublishedSource(sources.Source):
    """Data set in published files: in a folder, as torchvision has it, or in an archive of this folder."""

    folder: str  # below a data directory, and inside the archive
    archive: files.Download | None
    url: str  # folder that files without an archive are published in, with a slash at its end
    shape: tuple[int, int, int]  # of an image
    classes: int
    fetchable = True

    @property
    def downloads(self) -> tuple[files.Download, ...]:
        """Files to download for a full copy."""
        if self.archive:
            return (self.archive,)
        named = self.md5_of_files.items()
        return tuple(files.Download(f"{self.url}{file}", md5, f"{self.folder}/{file}") for file, md5 in named)

    @property
    @abstractmethod
    def md5_of_files(self) -> dict[str, str]:
        """Published md5 of each file of the folder, by its name."""

    @abstractmethod
    def decoded(self, contents: Mapping[str, bytes]) -> FourTensors:
        """Samples in the contents of the published files."""

    def form(self, options: Mapping[str, Any]) -> Form:
        return Form(self.shape, self.classes, self.classes)

    def find(self, directory: Path) -> Path | None:
        """Path of the full copy in ``directory``: the folder, else the archive; None: there is none."""
        if not self.lacking(directory):
            return directory / self.folder
        archive = directory / self.archive.path if self.archive else None
        return archive if archive and files.exists(archive) else None

    def lacking(self, directory: Path) -> list[str]:
        """Names of the files that are not in the folder below ``directory``."""
        return [file for file in self.md5_of_files if not files.exists(directory / self.folder / file)]

    def verified_files(self, place: Path) -> dict[str, bytes]:
        """Content of every file of a copy by its name, as published; ``place`` is what `find` gave."""
        if place.is_dir() or self.archive is None:
            md5s = self.md5_of_files.items()
            return {file: files.read_verified(place / file, md5, dataset=self.name) for file, md5 in md5s}
        names = {f"{self.folder}/{file}": file for file in self.md5_of_files}
        archive = files.read_verified(place, self.archive.md5, dataset=self.name)
        # "r|gz" reads in one pass: looking members up by name would unpack the archive several times over
        with tarfile.open(fileobj=io.BytesIO(archive), mode="r|gz") as tar:
            found = {names[m.name]: file.read() for m in tar if m.name in names and (file := tar.extractfile(m))}
        return found

    def load(self, options: Mapping[str, Any], directories: Sequence[Path], *, download: bool, **how: Any) -> Dataset:
        place = self.present(directories, download=download)[1]
        return Dataset(self.name, *self.decoded(self.verified_files(place)), self.classes, str(place))

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
        if (directory / self.folder).is_dir():
            return f"{directory} ({self.folder} lacks {', '.join(self.lacking(directory))})"
        return str(directory)


@dataclass(frozen=True)
class CifarSource(PublishedSource):
    """Data set of the CIFAR family, in batches."""

    name: str
    classes: int
    folder: str
    archive: files.Download
    train: Mapping[str, str]  # published md5 by file name, in order
    test: Mapping[str, str]
    label_key: bytes  # key of the class numbers in a batch

    shape = (3, 32, 32)

    @property
    def md5_of_files(self) -> dict[str, str]:
        return {**self.train, **self.test}

    def decoded(self, contents: Mapping[str, bytes]) -> FourTensors:
        found = []
        for names in (self.train, self.test):
            # A pickle runs code when loaded; these are bytes whose published md5 has just been checked.
            batches = [pickle.loads(contents[name], encoding="bytes") for name in names]
            labels = np.concatenate([np.asarray(batch[self.label_key], dtype=np.int64) for batch in batches])
            found += [images_from_bytes([batch[b"data"] for batch in batches], self.shape), torch.from_numpy(labels)]
        return found[0], found[1], found[2], found[3]


@dataclass(frozen=True)
class IdxSource(PublishedSource):
    """Data set in four gzipped idx files: a header, then 8-bit numbers in C order."""

    name: str
    folder: str
    url: str
    md5: Mapping[str, str]  # of each file as published, by its name without .gz
    classes: int = 10

    archive = None
    shape = (1, 28, 28)

    @property
    def md5_of_files(self) -> dict[str, str]:
        return {f"{file}.gz": md5 for file, md5 in self.md5.items()}

    def decoded(self, contents: Mapping[str, bytes]) -> FourTensors:
        train, train_labels, test, test_labels = (
            # four bytes, and four more for each dimension, come before the numbers
            np.frombuffer(gzip.decompress(contents[f"{file}.gz"]), np.uint8, offset=4 + 4 * len(shape)).reshape(shape)
            for file, shape in IDX_SHAPES.items()
        )
        targets, test_targets = (torch.from_numpy(labels.astype(np.int64)) for labels in (train_labels, test_labels))
        return images_from_bytes([train], self.shape), targets, images_from_bytes([test], self.shape), test_targets


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
