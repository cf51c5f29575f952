"""Fetching published files over the network, with pooch."""

from __future__ import annotations

import http.client
import logging
import sys
from collections.abc import Iterable
from pathlib import Path

from hesscond.data.files import Download

TIMEOUT_SECONDS = 20
_log = logging.getLogger(__name__)


class DownloadError(Exception):
    """A download that failed; its text is the reason, for the sentence the caller writes."""


def download_files(files: Iterable[Download], directory: Path) -> None:
    """Download files into `directory`; those already there with the right md5 are left alone.

    A bar on stderr shows the progress when stderr is a terminal.

    Parameters
    ----------
    files : iterable of Download
        What to download, and where below `directory` to put it.
    directory : Path
        Made if need be.

    Raises
    ------
    DownloadError
        If the network or the disk fails, or what was delivered has not the published md5 and is not kept.
    """
    import pooch
    import urllib3.exceptions

    downloader = pooch.HTTPDownloader(progressbar=sys.stderr.isatty(), timeout=TIMEOUT_SECONDS, chunk_size=1 << 16)
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
