"""Data sets that are not for download, read from the folder or file that the user has on disk."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hesscond.data.dataset import Dataset, Form
from hesscond.errors import DataNotFoundError


@dataclass(frozen=True)
class FolderSource:
    """Data set in a folder, or in a file, that the user has on disk."""

    name: str
    options: Mapping[str, Any]  # with defaults; ``folder`` or ``file`` is a path, or a name below the data directory
    form: Callable[[Mapping[str, Any]], Form]  # shapes of the samples, from the options given
    load: Callable[..., Dataset]  # load(given, directories, *, train_samples, test_samples)
    advice: str  # which files must be where, with {places} for the folders

    def what_to_bring(self, directories: Sequence[Path]) -> str:
        """Sentence that says which files must be where."""
        return self.advice.format(places=" or ".join(str(place / self.options["folder"]) for place in directories))

    def find(self, directories: Sequence[Path]) -> Path | None:
        """Folder of the default name below one of the ``directories``; None: there is none."""
        return find_folder(self.options["folder"], directories)

    def folder(self, name: str, directories: Sequence[Path]) -> Path:
        """Folder of an absolute path, or of a path below one of the ``directories``."""
        found = find_folder(name, directories)
        if found is None:
            raise DataNotFoundError(f"there is no folder {name}: {self.what_to_bring(directories)}")
        return found


def find_folder(name: str, directories: Sequence[Path]) -> Path | None:
    """Folder of an absolute path, or of a path below one of the ``directories``; None: there is none."""
    own = Path(name).expanduser()
    places = [own] if own.is_absolute() else [directory / own for directory in directories]
    return next((place for place in places if place.is_dir()), None)
