"""Search for a data set on disk; if it is not there, download it or say how to get it."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from hesscond.data import dataset, sources
from hesscond.data.preparation import part
from hesscond.errors import ConfigError, DataNotFoundError, did_you_mean


def names() -> tuple[str, ...]:
    """Names of all data sets that `load` accepts, in alphabetical order.

    Examples
    --------
    >>> names()[:6]
    ('cifar10', 'cifar100', 'csv', 'digits', 'fashion-mnist', 'image-folder')
    """
    return tuple(sorted(sources.SOURCES))


def options(name: str) -> dict[str, Any]:
    """Options of a data set with their defaults, keyword arguments for `load`; published files have none.

    Examples
    --------
    >>> options("image-regression")
    {'photograph': 'china', 'every': 4}
    """
    return dict(sources.SOURCES[name].options) if name in sources.SOURCES else {}


def form(name: str, **given: Any) -> dataset.Form:
    """Shapes of the samples of a data set with some `options`, without loading it.

    A `ConfigError` if there is no data set of this name, or an option does not fit.

    Examples
    --------
    >>> form("shapes", points=64)
    Form(input_shape=(64, 3), outputs=5, classes=5, tokens=False)
    """
    source = _source(name)
    return source.form(source.checked(given))


def load(
    name: str,
    data_dir: Path | str | None = None,
    *,
    download: bool = True,
    train_samples: int | None = None,
    test_samples: int | None = None,
    **given: Any,
) -> dataset.Dataset:
    """Load a data set into memory, every file checked against its published md5 first.

    Copies are searched in `data_dir` alone if given, else in ``$HESSCOND_DATA_DIR`` and then in the cache
    (``pooch.os_cache("hesscond")``), in torchvision's layout or as the published archive. A corrupt copy is
    an error, even if there is another copy. The pictures of an ``image-folder`` stay on disk, and are decoded when they
    are indexed.

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
    source = _source(name)
    if data_dir is not None and source.on_disk and not Path(data_dir).expanduser().is_dir():
        exists = Path(data_dir).expanduser().exists()
        wrong = "is a file: give" if exists else "does not exist: make it, or give"
        raise DataNotFoundError(f"the data directory {data_dir} {wrong} the folder that holds {name}.")
    sizes = train_samples, test_samples
    data = source.load(source.checked(given), _directories(source, data_dir), download=download, samples=sizes)
    return part(data, train=train_samples, test=test_samples)


def fetch(name: str, data_dir: Path | str | None = None) -> Path:
    """Folder of a full copy of a data set with the published checksums, downloaded if it is not on disk.

    Parameters
    ----------
    name : str
        One of `names`.
    data_dir : Path or str, optional
        Folder for the copy, made if it does not exist. By default any copy that `load` finds is accepted, and a
        download goes into ``$HESSCOND_DATA_DIR``, or into the cache if that is not set.

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
    source = _source(name, choices=[name for name, candidate in sources.SOURCES.items() if candidate.fetchable])
    return source.fetch(_directories(source, data_dir))


def locate(name: str, data_dir: Path | str | None = None) -> Path | None:
    """Path of the copy of a data set that `load` reads, in ``data_dir`` only if given; None: there is none.

    Nothing is downloaded or checked. A `ConfigError` if there is no data set of this name, or it has no files.
    """
    source = _source(name)
    return source.locate(_directories(source, data_dir))


def _source(name: str, choices: Iterable[str] | None = None) -> sources.Source:
    if name not in sources.SOURCES:
        known = sorted(choices or names())
        hint = did_you_mean(name, known, otherwise=f"choose one of {', '.join(known)}.")
        raise ConfigError(f"there is no data set {name!r}: {hint}")
    return sources.SOURCES[name]


def _directories(source: sources.Source, data_dir: Path | str | None) -> list[Path]:
    """Folders to search, in order."""
    if not source.on_disk:
        return []
    if data_dir is not None:
        return [Path(data_dir).expanduser()]

    import pooch

    from_environment = os.environ.get(sources.ENVIRONMENT)
    chosen = [Path(from_environment).expanduser()] if from_environment else []
    return [*chosen, Path(pooch.os_cache("hesscond"))]
