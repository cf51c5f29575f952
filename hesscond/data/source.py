"""What every data set that comes as files can do."""

from __future__ import annotations

from abc import ABC, abstractmethod
from pathlib import Path

from hesscond.data.dataset import Dataset
from hesscond.data.files import Download
from hesscond.data.form import Form


class Source(ABC):
    """Where the files of a data set lie and what they must be.

    Attributes
    ----------
    name : str
        The data set's name.
    folder : str
        The folder of its files below a data directory, as torchvision has it.
    """

    name: str
    folder: str

    @property
    @abstractmethod
    def form(self) -> Form:
        """What its samples are."""

    @property
    @abstractmethod
    def downloads(self) -> tuple[Download, ...]:
        """The files to download for a full copy."""

    @abstractmethod
    def find(self, directory: Path) -> Path | None:
        """Return the full copy in `directory`, or None."""

    @abstractmethod
    def lacking(self, directory: Path) -> list[str]:
        """Return the names of the files that are not in the folder below `directory`."""

    @abstractmethod
    def verified_files(self, place: Path) -> dict[str, bytes]:
        """Return the content of every file of the copy `place` by its name, each with its published md5.

        Parameters
        ----------
        place : Path
            What `find` returned.

        Raises
        ------
        DataNotFoundError
            If a file cannot be read.
        CorruptDataError
            If a checksum is not the published one.
        """

    @abstractmethod
    def read(self, place: Path) -> Dataset:
        """Return the data set from the copy `place`.

        Parameters
        ----------
        place : Path
            What `find` returned.

        Raises
        ------
        DataNotFoundError
            If a file cannot be read.
        CorruptDataError
            If a checksum or the layout of a file is not the published one.
        """
