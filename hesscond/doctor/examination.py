"""All checks in order."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from hesscond.doctor import arithmetic, devices, precision, storage, threads, versions
from hesscond.doctor.check import Check, run


def examine(runs: Path = Path("runs"), data_dir: Path | None = None, *, checksums: bool = False) -> Iterator[Check]:
    """Yield every check as soon as it is done; seconds in all, unless there are many GPUs.

    Parameters
    ----------
    runs
        Folder in which runs will be kept; it need not exist yet, and is not made.
    data_dir
        Where the data sets are looked for; None: where the studies look.
    checksums
        Whether every file of the data sets found is read and compared with its published md5.
    """
    yield from run("versions", versions.tests())
    yield from run("threads", threads.tests())
    yield from run("devices", devices.tests())
    yield from run("arithmetic", arithmetic.tests())
    yield from run("self-test", precision.tests())
    yield from run("data", storage.data_tests(data_dir, checksums=checksums))
    yield from run("storage", storage.folder_tests(runs))
