"""Search for a data set on disk; if it is not there, download it or say how to get it."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from hesscond.data import image_folder, llff, modelnet, text
from hesscond.data.dataset import Dataset, Form
from hesscond.data.files import DownloadError, download_files
from hesscond.data.generated import DIGITS, GENERATED, digits_folder
from hesscond.data.preparation import part
from hesscond.data.published import SOURCES, PublishedSource
from hesscond.errors import ConfigError, DataNotFoundError

ENVIRONMENT = "HESSCOND_DATA_DIR"

FOLDERS = {module.SOURCE.name: module.SOURCE for module in (image_folder, llff, modelnet, text)}


def names() -> tuple[str, ...]:
    """Names of all data sets, in alphabetical order.

    Returns
    -------
    tuple of str
        What `load` accepts.

    Examples
    --------
    >>> names()[:6]
    ('cifar10', 'cifar100', 'digits', 'fashion-mnist', 'image-folder', 'image-regression')
    """
    return tuple(sorted((*SOURCES, *GENERATED, *FOLDERS)))


def options(name: str) -> dict[str, Any]:
    """Options of a data set with their defaults; published files have none.

    Parameters
    ----------
    name : str
        One of `names`.

    Returns
    -------
    dict
        Keyword arguments for `load`.

    Examples
    --------
    >>> options("occupancy")
    {'train': 20000, 'test': 5000, 'seed': 0}
    """
    if name in FOLDERS:
        return dict(FOLDERS[name].options)
    return GENERATED[name].options if name in GENERATED else {}


def form(name: str, **given: Any) -> Form:
    """Shapes of the samples of a data set, without loading it.

    Parameters
    ----------
    name : str
        One of `names`.
    **given
        `options` of the data set.

    Returns
    -------
    Form
        Shapes of inputs and targets.

    Raises
    ------
    ConfigError
        There is no data set of this name, or an option does not fit.

    Examples
    --------
    >>> form("shapes", points=64)
    Form(input_shape=(64, 3), outputs=5, classes=5, tokens=False)
    """
    if name in FOLDERS:
        return FOLDERS[name].form(given)
    refuse_options(name, given)
    return GENERATED[name].form(GENERATED[name].checked(given)) if name in GENERATED else _source(name).form


def load(
    name: str,
    data_dir: Path | str | None = None,
    *,
    download: bool = True,
    train_samples: int | None = None,
    test_samples: int | None = None,
    **given: Any,
) -> Dataset:
    """Load a data set into memory, every file checked against its published md5 first.

    Copies are searched in `data_dir` alone if given, else in ``$HESSCOND_DATA_DIR`` and then in the cache
    (``pooch.os_cache("hesscond")``), in torchvision's layout or as the published archive (for the MNIST family also as
    four separate ``.gz`` files). A corrupt copy is an error, even if there is another copy. The pictures of an
    ``image-folder`` stay on disk, and are decoded when they are indexed.

    Parameters
    ----------
    name : str
        One of `names`.
    data_dir : Path or str, optional
        Existing folder to use instead of the other two. ``digits`` is in scikit-learn and ignores it.
    download : bool, default True
        Whether a data set that is not on disk may be downloaded: into `data_dir` if given, else the cache.
    train_samples, test_samples : int, optional
        Sizes of a fixed part of it, see `part`; by default all.
    **given
        `options` of the data set.

    Returns
    -------
    Dataset
        Images float32 (N, C, H, W) in [0, 1] with targets int64 (N,), or other samples, see `Dataset`.

    Raises
    ------
    ConfigError
        There is no data set of this name, an option does not fit, or there are fewer samples.
    DataNotFoundError
        It is neither on disk nor downloadable, or `data_dir` is no folder.
    CorruptDataError
        A file is not the published one, or pictures lie in no class.

    Examples
    --------
    >>> data = load("digits")
    >>> data.train_inputs.shape, data.test_inputs.shape
    (torch.Size([1437, 1, 8, 8]), torch.Size([360, 1, 8, 8]))
    """
    if data_dir is not None and name in (*SOURCES, *FOLDERS) and not Path(data_dir).expanduser().is_dir():
        there = Path(data_dir).expanduser().exists()
        wrong = "is a file: give" if there else "does not exist: make it, or give"
        raise DataNotFoundError(f"the data directory {data_dir} {wrong} the folder that holds {name}.")
    if name in FOLDERS:
        directories = _directories(data_dir)
        return FOLDERS[name].load(given, directories, train_samples=train_samples, test_samples=test_samples)
    refuse_options(name, given)
    if name in GENERATED:
        data = GENERATED[name](**given)
    else:
        source = _source(name)
        _, place = _locate(source, _directories(data_dir), may_download=download)
        data = source.read(place)
    return part(data, train=train_samples, test=test_samples)


def fetch(name: str, data_dir: Path | str | None = None) -> Path:
    """Folder of a full copy of a data set with the published checksums, downloaded if it is not on disk.

    Parameters
    ----------
    name : str
        One of `names`.
    data_dir : Path or str, optional
        Folder for the copy, made if it does not exist. By default any copy that `load` finds is accepted, and a
        download goes into the cache.

    Returns
    -------
    Path
        Folder that `load` accepts as `data_dir`; for ``digits`` that of scikit-learn's data.

    Raises
    ------
    ConfigError
        There is no data set of this name, or it cannot be downloaded.
    DataNotFoundError
        It is neither on disk nor downloadable.
    CorruptDataError
        A file is not the published one.
    """
    if name == DIGITS:
        return digits_folder()
    if name in GENERATED:
        raise ConfigError(f"the data set {name!r} is generated: there is nothing to fetch.")
    if name in FOLDERS:
        raise ConfigError(f"{name} is not for download: {FOLDERS[name].what_to_bring(_directories(data_dir))}")
    source = _source(name, choices=(DIGITS, *SOURCES))
    directory, place = _locate(source, _directories(data_dir), may_download=True)
    source.verified_files(place)
    return directory


def locate(name: str, data_dir: Path | str | None = None) -> Path | None:
    """Path of the copy of a data set that `load` reads; nothing is downloaded or checked.

    Parameters
    ----------
    name : str
        One of `names` that has files.
    data_dir : Path or str, optional
        The only folder to look in.

    Returns
    -------
    Path or None
        The copy; None if there is none.

    Raises
    ------
    ConfigError
        There is no data set of this name, or it has no files.
    """
    if name == DIGITS:
        return digits_folder()
    if name in FOLDERS:
        return FOLDERS[name].find(_directories(data_dir))
    source = _source(name)
    return next((place for directory in _directories(data_dir) if (place := source.find(directory))), None)


def refuse_options(name: str, given: Mapping[str, Any]) -> None:
    """Raise a ConfigError for options of a data set that has none."""
    if given and name in names() and not options(name):
        raise ConfigError(f"the data set {name!r} has no option {next(iter(given))!r}: it has none.")


def _source(name: str, choices: Iterable[str] | None = None) -> PublishedSource:
    if name not in SOURCES:
        raise ConfigError(f"there is no data set {name!r}: choose one of {', '.join(sorted(choices or names()))}.")
    return SOURCES[name]


def _directories(data_dir: Path | str | None) -> list[Path]:
    """Folders to search, in order; a download goes into the last one."""
    if data_dir is not None:
        return [Path(data_dir).expanduser()]

    import pooch

    from_environment = os.environ.get(ENVIRONMENT)
    chosen = [Path(from_environment).expanduser()] if from_environment else []
    return [*chosen, Path(pooch.os_cache("hesscond"))]


def _locate(source: PublishedSource, directories: list[Path], *, may_download: bool) -> tuple[Path, Path]:
    """Folder searched and the copy found in it, downloaded if there was none."""
    for directory in directories:
        if place := source.find(directory):
            return directory, place
    if not may_download:
        raise _not_found(source, directories, "downloading was not allowed")
    target = directories[-1]
    try:
        download_files(source.downloads, target)
    except DownloadError as error:
        raise _not_found(source, directories, str(error)) from None
    place = source.find(target)
    assert place is not None, "a completed download is a full copy"
    return target, place


def _not_found(source: PublishedSource, directories: list[Path], reason: str) -> DataNotFoundError:
    places = " or ".join(_describe(source, directory) for directory in directories)
    return DataNotFoundError(
        f"{source.name} is not in {places}, and {reason}: run `hesscond data fetch {source.name}` where "
        f"there is a network and point ${ENVIRONMENT} to the folder, or take the study fc-digits, "
        "which needs no download."
    )


def _describe(source: PublishedSource, directory: Path) -> str:
    if not directory.is_dir():
        return f"{directory} (no such folder)"
    if (directory / source.folder).is_dir() and (lacking := source.lacking(directory)):
        return f"{directory} ({source.folder} lacks {', '.join(lacking)})"
    return str(directory)
