"""Data sets that are not for download, read from a folder in which the user has them in their published layout."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hesscond.data import image_folder, llff, modelnet
from hesscond.data.dataset import Dataset, Form


@dataclass(frozen=True)
class FolderSource:
    """A data set in a folder.

    Attributes
    ----------
    options
        With their defaults; ``folder`` is a path, or a name below the data directory.
    form
        What the samples are, from the options given.
    load
        ``load(given, directories, *, train_samples, test_samples)``.
    what_to_bring
        The sentence that says which folders must be where.
    """

    options: Mapping[str, Any]
    form: Callable[[Mapping[str, Any]], Form]
    load: Callable[..., Dataset]
    what_to_bring: Callable[[Sequence[Path]], str]


FOLDERS: dict[str, FolderSource] = {
    image_folder.NAME: FolderSource(
        image_folder.OPTIONS, image_folder.form_of, image_folder.load_image_folder, image_folder.what_to_bring
    ),
    llff.NAME: FolderSource(llff.OPTIONS, llff.form_of, llff.load_llff, llff.what_to_bring),
    modelnet.NAME: FolderSource(modelnet.OPTIONS, modelnet.form_of, modelnet.load_modelnet, modelnet.what_to_bring),
}
