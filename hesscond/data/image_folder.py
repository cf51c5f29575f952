"""Pictures in folders, ``train/CLASS/*`` and ``val/CLASS/*``, as ImageNet has them: for those who have it."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from hesscond.data import dataset, sources
from hesscond.data.pictures import Pictures
from hesscond.data.preparation import rows_of
from hesscond.errors import ConfigError, CorruptDataError, DataNotFoundError
from hesscond.lazy import optional

#: Suffixes of pictures, as in torchvision's ``ImageFolder``, in upper or lower case; other files are ignored.
SUFFIXES = (".jpg", ".jpeg", ".png", ".ppm", ".bmp", ".pgm", ".tif", ".tiff", ".webp")
#: The two splits, and their names in a `Dataset`.
SPLITS = {"train": "train", "val": "test"}


class ImageFolder(sources.FolderSource):
    """Pictures of a folder, which stay on disk and are decoded when they are indexed; the test set is ``val``.

    Classes are numbered in the order of their names, those of ``val`` as those of ``train``. Each picture is brought to
    a shorter side of ``resize`` pixels, and its centre of ``size`` × ``size`` is taken.
    """

    name = "image-folder"
    options: Mapping[str, Any] = {"folder": "imagenet", "size": 224, "resize": 256, "classes": 1000}
    advice = (
        "put your pictures into train/CLASS/* and val/CLASS/* of {places}, or name their folder by folder = … in "
        "[data] (ImageNet is given by image-net.org to those who accept its terms)."
    )

    def checked(self, given: Mapping[str, Any]) -> dict[str, Any]:
        options = super().checked(given)
        if options["size"] > options["resize"]:
            raise ConfigError(
                f"size = {options['size']} exceeds resize = {options['resize']}: the centre is no larger."
            )
        return options

    def form(self, options: Mapping[str, Any]) -> dataset.Form:
        return dataset.Form((3, options["size"], options["size"]), options["classes"], options["classes"])

    def load(
        self, options: Mapping[str, Any], directories: Sequence[Path], *, samples: sources.Sizes, **how: Any
    ) -> dataset.Dataset:
        with optional("image-folder"):
            import PIL  # noqa: F401  (before an hour of training)
        folder = self.folder(options["folder"], directories)
        for split in SPLITS:
            if not (folder / split).is_dir():
                raise DataNotFoundError(f"{folder} has no folder {split}: it must hold train/CLASS/* and val/CLASS/*.")
        classes, others = class_folders(folder / "train", options["classes"]), folders_in(folder / "val")
        if unknown := sorted(set(others) - set(classes)):
            raise CorruptDataError(
                f"{folder / 'val'} has a class {unknown[0]!r} that {folder / 'train'} lacks: give both."
            )
        files, targets = {}, {}
        for (split, name), folders, number in zip(SPLITS.items(), (classes, others), samples, strict=True):
            if not folders:
                where = f"its pictures must lie in {split}/CLASS"
                raise CorruptDataError(f"{folder / split} has no folders of classes: {where}.")
            numbers = {class_name: classes.index(class_name) for class_name in folders}
            files[split], targets[split] = listed(folder / split, numbers, SUFFIXES)
            if number is not None:
                rows = rows_of(self.name, name, targets[split], number)
                files[split], targets[split] = [files[split][row] for row in rows.tolist()], targets[split][rows]
        train, val = (Pictures(folder / split, files[split], options["resize"], options["size"]) for split in SPLITS)
        # other pictures are another source
        source = f"{folder} (pictures {', '.join(pictures.fingerprint() for pictures in (train, val))})"
        return dataset.Dataset(self.name, train, targets["train"], val, targets["val"], len(classes), source)


def folders_in(place: Path) -> list[str]:
    """Sorted names of the folders in a folder."""
    with os.scandir(place) as entries:
        return sorted(entry.name for entry in entries if entry.is_dir())


def class_folders(place: Path, classes: int) -> list[str]:
    """Sorted names of the folders of as many classes as the study says."""
    folders = folders_in(place)
    if len(folders) != classes:
        raise ConfigError(
            f"{place} has {len(folders)} folders of classes, not {classes}: complete it, or set "
            f"classes = {len(folders)} in [data]."
        )
    return folders


def listed(place: Path, classes: Mapping[str, int], suffixes: tuple[str, ...]) -> tuple[list[str], torch.Tensor]:
    """Paths of the files with some suffixes, at any depth below the folders of classes in a place, and their classes.

    ``classes``: number of the class of each folder.
    """
    files: list[str] = []
    targets: list[int] = []
    for name, number in classes.items():
        before = len(files)
        for folder, inner, names in os.walk(place / name, followlinks=True):
            inner.sort()
            below = Path(folder).relative_to(place).as_posix()
            files += [f"{below}/{file}" for file in sorted(names) if file.lower().endswith(suffixes)]
        if len(files) == before:
            raise CorruptDataError(
                f"the class {place / name} has no files {' '.join(suffixes)}: add some, or remove it."
            )
        targets += [number] * (len(files) - before)
    return files, torch.tensor(targets, device="cpu")


sources.register(ImageFolder())
