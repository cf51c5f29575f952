"""Published files, downloaded and read: nothing leaves this module that has not the published md5."""

from __future__ import annotations

import hashlib
import http.client
import logging
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from hesscond.errors import CorruptDataError, DataNotFoundError

TIMEOUT_SECONDS = 20
#: Number of digits of the fingerprints of files that a run records.
DIGITS = 12
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Download:
    """Published file: its address, md5, and path below a data directory, as torchvision has it."""

    url: str
    md5: str
    path: str


def read_verified(path: Path, md5: str, *, dataset: str) -> bytes:
    """Content of a file after checking its published md5.

    The file is read once, and its md5 is that of the bytes returned, so that nothing can change between check and use.
    """
    try:
        content = path.read_bytes()
    except OSError as error:
        raise DataNotFoundError(f"{path} cannot be read ({error.strerror}): check its permissions.") from None
    # A checksum, not security: without the flag, hosts in FIPS mode refuse md5.
    digest = hashlib.md5(content, usedforsecurity=False).hexdigest()
    if digest != md5:
        raise CorruptDataError(
            f"{path} is not the published {dataset} file (md5 {digest} instead of {md5}): "
            f"delete it and run `hesscond data fetch {dataset}` for a fresh copy."
        )
    return content


def fingerprint(header: str, folder: Path, files: Iterable[str]) -> str:
    """Checksum of a header and of names, sizes and modification times of files in a folder."""
    checksum = hashlib.sha256(f"{header}\n".encode())
    for name in files:
        try:
            status = os.stat(folder / name)
        except OSError as error:
            raise DataNotFoundError(f"{folder / name} cannot be read: {error.strerror}.") from None
        checksum.update(f"{name}\0{status.st_size}\0{status.st_mtime_ns}\n".encode(errors="surrogateescape"))
    return checksum.hexdigest()


def exists(path: Path) -> bool:
    """Whether a path is a file that can be reached."""
    # Path.is_file would raise for a file in a folder that may not be entered.
    return os.path.isfile(path)


class DownloadError(Exception):
    """Failed download; the text is the reason."""


def download_files(files: Iterable[Download], directory: Path) -> None:
    """Download files into `directory`, creating it if needed; files already there with the right md5 are kept."""
    import pooch
    import urllib3.exceptions

    downloader = pooch.HTTPDownloader(timeout=TIMEOUT_SECONDS, chunk_size=1 << 16)
    chatter = pooch.get_logger()
    level = chatter.level
    chatter.setLevel(logging.WARNING)  # pooch announces each file on stderr; a library should not
    try:
        for file in files:
            target = directory / file.path
            _log.info("downloading %s to %s", file.url, target)
            try:
                pooch.retrieve(
                    file.url, f"md5:{file.md5}", fname=target.name, path=target.parent, downloader=downloader
                )
            # requests' errors are OSErrors; the other two can escape it in the middle of a body.
            except (OSError, http.client.HTTPException, urllib3.exceptions.HTTPError) as error:
                raise DownloadError(f"downloading {file.url} failed with {_reason(error)}") from None
            except ValueError:  # pooch's word for a wrong checksum
                raise DownloadError(f"{file.url} delivered a file that has not the published md5 {file.md5}") from None
    finally:
        chatter.setLevel(level)


def _reason(error: Exception) -> str:
    # The text of a requests error is a paragraph of nested representations; its type says as much.
    status = getattr(getattr(error, "response", None), "status_code", None)
    detail = getattr(error, "strerror", None) or (f"HTTP status {status}" if status else "")
    return f"{type(error).__name__}: {detail}" if detail else type(error).__name__
