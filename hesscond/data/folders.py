"""Data sets that are not for download, read from where the user or Python has them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from hesscond.data import image_folder, llff, modelnet, text
from hesscond.data.dataset import Dataset, Form


@dataclass(frozen=True)
class FolderSource:
    """A data set in a folder, or in a file, that the user has on disk.

    Attributes
    ----------
    options
        Options and their defaults; ``folder`` or ``file`` is a path, or a name below the data directory.
    form
        Returns the shapes of the samples, from the options given.
    load
        ``load(given, directories, *, train_samples, test_samples)``.
    what_to_bring
        Sentence that says which files must be where.
    find
        Returns its path below some directories, by its default name; None: it is not there.
    """

    options: Mapping[str, Any]
    form: Callable[[Mapping[str, Any]], Form]
    load: Callable[..., Dataset]
    what_to_bring: Callable[[Sequence[Path]], str]
    find: Callable[[Sequence[Path]], Path | None]


FOLDERS: dict[str, FolderSource] = {
    image_folder.NAME: FolderSource(
        image_folder.OPTIONS,
        image_folder.form_of,
        image_folder.load_image_folder,
        image_folder.what_to_bring,
        partial(image_folder.find, image_folder.OPTIONS["folder"]),
    ),
    llff.NAME: FolderSource(
        llff.OPTIONS,
        llff.form_of,
        llff.load_llff,
        llff.what_to_bring,
        partial(image_folder.find, llff.OPTIONS["folder"]),
    ),
    modelnet.NAME: FolderSource(
        modelnet.OPTIONS,
        modelnet.form_of,
        modelnet.load_modelnet,
        modelnet.what_to_bring,
        partial(image_folder.find, modelnet.OPTIONS["folder"]),
    ),
    text.NAME: FolderSource(text.OPTIONS, text.form_of, text.load_text, text.what_to_bring, text.find),
}
