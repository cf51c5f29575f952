"""Data sets that come as files, CIFAR and the MNIST family: their layout, addresses and checksums.

The checksums of archives, CIFAR batches and gzipped idx files are those torchvision publishes. A further data
set is a further `register`.
"""

from __future__ import annotations

import gzip
import io
import pickle
import tarfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hesscond.data import files, sources
from hesscond.data.dataset import Dataset, Form, images_from_bytes
from hesscond.errors import DataNotFoundError

#: Shapes of the numbers in the four files of each data set of the MNIST family.
IDX_SHAPES: dict[str, tuple[int, ...]] = {
    "train-images-idx3-ubyte.gz": (60_000, 28, 28),
    "train-labels-idx1-ubyte.gz": (60_000,),
    "t10k-images-idx3-ubyte.gz": (10_000, 28, 28),
    "t10k-labels-idx1-ubyte.gz": (10_000,),
}


@dataclass(frozen=True)
class PublishedSource(sources.Source):
    """Data set in published files: in a folder, as torchvision has it, or in an archive of this folder."""

    name: str
    classes: int
    shape: tuple[int, int, int]  # of an image
    folder: str  # below a data directory, and inside the archive
    md5: Mapping[str, str]  # published, of each file of the folder
    #: Inputs and targets for training, inputs and targets for tests, from the contents of the files in this order.
    decode: Callable[..., list[torch.Tensor]]
    url: str  # of the archive; or of the folder that the files are published in, with a slash at its end
    archive_md5: str = ""  # "": there is no archive

    fetchable = True

    @property
    def archive(self) -> files.Download | None:
        """Archive of the folder."""
        name = self.url.rpartition("/")[2]
        return files.Download(self.url, self.archive_md5, name) if self.archive_md5 else None

    @property
    def downloads(self) -> list[files.Download]:
        """Files to download for a full copy."""
        if self.archive:
            return [self.archive]
        return [files.Download(f"{self.url}{file}", md5, f"{self.folder}/{file}") for file, md5 in self.md5.items()]

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
        return [file for file in self.md5 if not files.exists(directory / self.folder / file)]

    def verified_files(self, place: Path) -> dict[str, bytes]:
        """Content of every file of a copy by its name, as published; ``place`` is what `find` gave."""
        if place.is_dir() or self.archive is None:
            md5s = self.md5.items()
            return {file: files.read_verified(place / file, md5, dataset=self.name) for file, md5 in md5s}
        names = {f"{self.folder}/{file}": file for file in self.md5}
        archive = files.read_verified(place, self.archive.md5, dataset=self.name)
        # "r|gz" reads in one pass: looking members up by name would unpack the archive several times over
        with tarfile.open(fileobj=io.BytesIO(archive), mode="r|gz") as tar:
            return {names[m.name]: file.read() for m in tar if m.name in names and (file := tar.extractfile(m))}

    def load(self, options: Mapping[str, Any], directories: Sequence[Path], *, download: bool, **how: Any) -> Dataset:
        # the folder that the variable names may be shared, and not for writing
        place = self.present(directories, directories[-1] if download else None)[1]
        contents = self.verified_files(place)
        # an archive has its members in any order
        train, train_targets, test, test_targets = self.decode([contents[file] for file in self.md5])
        return Dataset(self.name, train, train_targets, test, test_targets, self.classes, str(place))

    def locate(self, directories: Sequence[Path]) -> Path | None:
        return next((place for directory in directories if (place := self.find(directory))), None)

    def fetch(self, directories: Sequence[Path]) -> Path:
        directory, place = self.present(directories, directories[0])
        self.verified_files(place)
        return directory

    def present(self, directories: Sequence[Path], target: Path | None) -> tuple[Path, Path]:
        """Folder searched and the copy found in it, downloaded into ``target`` if there was none."""
        for directory in directories:
            if place := self.find(directory):
                return directory, place
        if target is None:
            raise self.not_found(directories, "downloading was not allowed")
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


def cifar(contents: Sequence[bytes], label_key: bytes) -> list[torch.Tensor]:
    """Samples of the CIFAR family: batches of training samples, and one of test samples."""
    # A pickle runs code when loaded; these are bytes whose published md5 has just been checked.
    *train, test = (pickle.loads(content, encoding="bytes") for content in contents)
    tensors = []
    for batches in (train, [test]):
        labels = np.concatenate([np.asarray(batch[label_key], dtype=np.int64) for batch in batches])
        tensors += [images_from_bytes([batch[b"data"] for batch in batches], (3, 32, 32)), torch.from_numpy(labels)]
    return tensors


def idx(contents: Sequence[bytes]) -> list[torch.Tensor]:
    """Samples of the MNIST family: four gzipped files of a header, then 8-bit numbers in C order."""
    tensors = []
    for content, shape in zip(contents, IDX_SHAPES.values(), strict=True):
        # four bytes, and four more for each dimension, come before the numbers
        numbers = np.frombuffer(gzip.decompress(content), np.uint8, offset=4 + 4 * len(shape)).reshape(shape)
        if len(shape) == 1:
            tensors.append(torch.from_numpy(numbers.astype(np.int64)))
        else:
            tensors.append(images_from_bytes([numbers], (1, 28, 28)))
    return tensors


sources.register(
    PublishedSource(
        name="cifar10",
        classes=10,
        shape=(3, 32, 32),
        folder="cifar-10-batches-py",
        md5={
            "data_batch_1": "c99cafc152244af753f735de768cd75f",
            "data_batch_2": "d4bba439e000b95fd0a9bffe97cbabec",
            "data_batch_3": "54ebc095f3ab1f0389bbae665268c751",
            "data_batch_4": "634d18415352ddfa80567beed471001a",
            "data_batch_5": "482c414d41f54cd18b22e5b47cb7c3cb",
            "test_batch": "40351d587109b95175f43aff81a1287e",
        },
        decode=partial(cifar, label_key=b"labels"),
        url="https://www.cs.toronto.edu/~kriz/cifar-10-python.tar.gz",
        archive_md5="c58f30108f718f92721af3b95e74349a",
    )
)
sources.register(
    PublishedSource(
        name="cifar100",
        classes=100,
        shape=(3, 32, 32),
        folder="cifar-100-python",
        md5={"train": "16019d7e3df5f24257cddd939b257f8d", "test": "f0ef6b0ae62326f3e7ffdfab6717acfc"},
        decode=partial(cifar, label_key=b"fine_labels"),
        url="https://www.cs.toronto.edu/~kriz/cifar-100-python.tar.gz",
        archive_md5="eb9058c3a382ffc7106e4002c42a8d85",
    )
)
for name, folder, url, md5 in (
    (
        "fashion-mnist",
        "FashionMNIST/raw",
        # The only address of the publisher that serves these files, without https; the md5 check covers that.
        "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",
        (
            "8d4fb7e6c68d591d4c3dfef9ec88bf0d",
            "25c81989df183df01b3e8a0aad5dffbe",
            "bef4ecab320f06d8554ea6380940ec79",
            "bb300cfdad3c16e7a12a480ee83cd310",
        ),
    ),
    (
        "mnist",
        "MNIST/raw",
        "https://ossci-datasets.s3.amazonaws.com/mnist/",
        (
            "f68b3c2dcbeaaa9fbdd348bbdeb94873",
            "d53e105ee54ea40749a09fcbcd1e9432",
            "9fb629c4189551a2d022fa330f9573f3",
            "ec29112dd5afa0611ce80d1b7f02629c",
        ),
    ),
):
    checksums = dict(zip(IDX_SHAPES, md5, strict=True))
    sources.register(PublishedSource(name, 10, (1, 28, 28), folder, checksums, idx, url))
