"""CIFAR-10 and CIFAR-100, "python version": pickled batches, in a folder or still in their archive."""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hesscond.data.dataset import Dataset, images_from_bytes
from hesscond.data.files import Download, exists, read_verified, read_verified_members
from hesscond.data.form import Form
from hesscond.data.source import Source

SHAPE = (3, 32, 32)


@dataclass(frozen=True)
class CifarSource(Source):
    """Where the files of a CIFAR data set lie and what they must be.

    Attributes
    ----------
    name : str
        The data set's name.
    classes : int
        The number of classes.
    folder : str
        The folder of the batches below a data directory, the same as inside the archive.
    archive : Download
        The published archive.
    train, test : mapping
        The published md5 of each batch, by its file name, in order.
    label_key : bytes
        The key of the class numbers in a batch.
    """

    name: str
    classes: int
    folder: str
    archive: Download
    train: Mapping[str, str]
    test: Mapping[str, str]
    label_key: bytes

    @property
    def form(self) -> Form:
        """Colour images of 32 × 32."""
        return Form(SHAPE, self.classes, self.classes)

    @property
    def downloads(self) -> tuple[Download, ...]:
        """The files to download for a full copy."""
        return (self.archive,)

    def find(self, directory: Path) -> Path | None:
        """Return the full copy in `directory`: the folder of batches, else the archive, else None."""
        folder, archive = directory / self.folder, directory / self.archive.path
        if folder.is_dir() and not self.lacking(directory):
            return folder
        return archive if exists(archive) else None

    def lacking(self, directory: Path) -> list[str]:
        """Return the names of the batches that are not in the folder below `directory`."""
        return [batch for batch in self._batches if not exists(directory / self.folder / batch)]

    def verified_files(self, place: Path) -> dict[str, bytes]:
        """Return the content of every batch of the copy `place` (see `find`), each with its published md5."""
        if place.is_dir():
            return {batch: read_verified(place / batch, md5, dataset=self.name) for batch, md5 in self._batches.items()}
        members = {f"{self.folder}/{batch}": md5 for batch, md5 in self._batches.items()}
        contents = read_verified_members(place, self.archive.md5, members, dataset=self.name)
        return {batch: contents[f"{self.folder}/{batch}"] for batch in self._batches}

    def read(self, place: Path) -> Dataset:
        """Return the data set from the copy `place`; images are (N, 3, 32, 32)."""
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
        inputs = images_from_bytes([batch[b"data"] for batch in batches], SHAPE)
        labels = np.concatenate([np.asarray(batch[self.label_key], dtype=np.int64) for batch in batches])
        return inputs, torch.from_numpy(labels)
