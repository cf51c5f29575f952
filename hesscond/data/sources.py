"""Data sets by name: made without files, or read from a folder; the module of each registers it."""

from __future__ import annotations

import inspect
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

from hesscond.data import dataset
from hesscond.errors import ANY, ConfigError, DataNotFoundError, did_you_mean, unfit
from hesscond.lazy import IN_FILE, Registry, defaults, own_code

#: Variable of the environment that names a folder of data sets.
ENVIRONMENT = "HESSCOND_DATA_DIR"


def file_of_yours(file: str) -> Path:
    """Path of a file that an option names: as it is, or below ``$HESSCOND_DATA_DIR``."""
    path = Path(file).expanduser()
    match = next((p for p in (path, Path(os.environ.get(ENVIRONMENT, ".")).expanduser() / path) if p.is_file()), None)
    if match is None:
        raise DataNotFoundError(f"there is no file {file}, nor one of this name below ${ENVIRONMENT}")
    return match


#: Numbers of training and of test samples; None: all.
Sizes = tuple[int | None, int | None]


class Source(ABC):
    """Data set of a name: its options, the form of its samples, where its files are, and how it is read."""

    name: str
    #: Options with their defaults.
    options: Mapping[str, Any] = {}
    #: Whether it is read from a data directory.
    on_disk: ClassVar[bool] = True
    #: Whether its files can be fetched.
    fetchable: bool = False

    @abstractmethod
    def form(self, options: Mapping[str, Any]) -> dataset.Form:
        """Shapes of the samples, from the values of all options."""

    @abstractmethod
    def load(
        self, options: Mapping[str, Any], directories: Sequence[Path], *, download: bool, samples: Sizes
    ) -> dataset.Dataset:
        """Data set, or no more of it than is needed for the numbers of samples."""

    def locate(self, directories: Sequence[Path]) -> Path | None:
        """Copy that `load` reads if no option names another; None: there is none."""
        return None

    def fetch(self, directories: Sequence[Path]) -> Path:
        """Folder of a checked copy, downloaded if there is none."""
        raise ConfigError(f"the data set {self.name!r} is generated, or a file of yours: there is nothing to fetch.")

    def checked(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Values of all options: the given ones, and the defaults of the others."""
        if given and not self.options:
            raise ConfigError(f"the data set {self.name!r} has no option {next(iter(given))!r}: it has none.")
        least = ANY if IN_FILE.fullmatch(self.name) else 1
        for option, value in given.items():
            if option not in self.options:
                raise ConfigError(f"there is no option {option!r}: {did_you_mean(option, self.options)}")
            if expected := unfit(value, self.options[option], min(least, 0 if option == "seed" else 1)):
                raise ConfigError(f"{option} must be {expected}, not {value!r}.")
        return {**self.options, **given}


@dataclass(frozen=True)
class Generated(Source):
    """Data set without files, made by a function whose keyword arguments are the options."""

    name: str
    make: Callable[..., dataset.Dataset]
    shapes: Callable[[Mapping[str, Any]], dataset.Form]  # form of the samples, from the values of all options
    folder: Callable[[], Path] | None = None  # where another package keeps what it is made of

    on_disk = False

    @property
    def options(self) -> dict[str, Any]:  # type: ignore[override]
        return defaults(inspect.signature(self.make).parameters.values())

    @property
    def fetchable(self) -> bool:  # type: ignore[override]
        return self.folder is not None

    def form(self, options: Mapping[str, Any]) -> dataset.Form:
        return self.shapes(options)

    def load(self, options: Mapping[str, Any], directories: Sequence[Path], **how: Any) -> dataset.Dataset:
        return self.make(**options)

    def locate(self, directories: Sequence[Path]) -> Path:
        return self.fetch(directories)

    def fetch(self, directories: Sequence[Path]) -> Path:
        return super().fetch(directories) if self.folder is None else self.folder()


def in_file(name: str, function: Any) -> Source:
    """Data set of ``FILE.py:FUNCTION``; FUNCTION(**options) returns a `Dataset` or the arrays of `of_arrays`."""
    if not callable(function):
        raise ConfigError(f"{name} is no function that returns a data set")
    parameters = inspect.signature(function).parameters.values()
    if missing := [p.name for p in parameters if p.default is p.empty]:
        raise ConfigError(f"{name} is called with options alone: give {missing[0]!r} a default")

    @cache
    def made(given: tuple[tuple[str, Any], ...]) -> dataset.Dataset:
        with own_code(name):
            data = function(**dict(given))
        return data if isinstance(data, dataset.Dataset) else dataset.of_arrays(name, data, name)

    def make(**options: Any) -> dataset.Dataset:
        return replace(made(tuple(sorted(options.items()))), name=name)

    source = Generated(name, make, lambda options: make(**options).form)
    object.__setattr__(make, "__signature__", inspect.signature(function))
    return source


#: All data sets by name; packages that bring some name modules that register them as entry points of the group.
SOURCES: Registry[Source] = Registry("data set", "hesscond.data", in_file)


def register(source: Source) -> None:
    """Make a data set known by its name."""
    SOURCES.add(source.name, source)


class FolderSource(Source):
    """Data set in a folder that the user has on disk.

    Its option ``folder`` is a path, or a name below the data directory. ``advice`` says which files must be where, with
    {places} for the folders.
    """

    advice: str

    def fetch(self, directories: Sequence[Path]) -> Path:
        places = " or ".join(str(place / self.options["folder"]) for place in directories)
        raise ConfigError(f"{self.name} is not for download: {self.advice.format(places=places)}")

    def locate(self, directories: Sequence[Path]) -> Path | None:
        return found_folder(self.options["folder"], directories)

    def folder(self, name: str, directories: Sequence[Path]) -> Path:
        """Folder of an absolute path, or of a path below one of the ``directories``."""
        path = found_folder(name, directories)
        if path is None:
            places = dict.fromkeys(str(place / name) for place in directories)
            raise DataNotFoundError(f"there is no folder {name}: {self.advice.format(places=' or '.join(places))}")
        return path


def found_folder(name: str, directories: Sequence[Path]) -> Path | None:
    """Folder of an absolute path, or of a path below one of the ``directories``; None: there is none."""
    path = Path(name).expanduser()
    places = [path] if path.is_absolute() else [directory / path for directory in directories]
    return next((place for place in places if place.is_dir()), None)
