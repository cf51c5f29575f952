"""Checkpoints of a run: written whole or not at all, checked when read, the last good one never lost."""

from __future__ import annotations

import hashlib
import io
import logging
import os
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from filelock import FileLock, Timeout

from hesscond.errors import ConfigError, RunError

if TYPE_CHECKING:
    import torch

logger = logging.getLogger("hesscond")

#: Lock file in a run's folder: the process that holds it works on the run.
LOCK = Path("checkpoints") / "lock"
MAGIC = b"hesscond checkpoint 1"
#: Checkpoints that are kept: the newest, and the one before it in case that one is damaged later.
KEPT = 2


class BusyError(RunError):
    """Another process works on the run."""


class Checkpoints:
    """The folder ``checkpoints`` of a run, of which one process at a time may be the owner (a context manager).

    A file is a line with a checksum followed by the state as `torch.save` writes it. It is written under another name,
    flushed to the disk, read back and compared, and only then given its name; older ones are removed after that.
    """

    def __init__(self, run: Path) -> None:
        self.folder = run / LOCK.parent
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._lock = FileLock(run / LOCK, timeout=0)
            self._lock.acquire()
        except Timeout:
            raise BusyError(f"another process works on {run}: wait for it, or stop it") from None
        except OSError as error:
            raise ConfigError(f"the run folder {run} cannot be written: {error.strerror or error}") from None

    def __enter__(self) -> Checkpoints:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._lock.release()

    def save(self, iteration: int, state: dict[str, Any]) -> None:
        """Keep the state before ``iteration``."""
        import torch

        buffer = io.BytesIO()
        torch.save(state, buffer)
        content = buffer.getvalue()
        path = self.folder / f"{iteration:09d}.pt"
        partial = path.with_suffix(".partial")
        try:
            with partial.open("wb") as file:
                file.write(header(content) + content)
                file.flush()
                os.fsync(file.fileno())
            if checked(partial) is None:
                raise RunError(f"the checkpoint {path} does not read back as it was written: check the disk")
            partial.replace(path)
        except OSError as error:
            with suppress(OSError):
                partial.unlink()
            raise RunError(f"the checkpoint {path} cannot be written: {error.strerror or error}") from None
        for old in self.files()[:-KEPT]:
            old.unlink(missing_ok=True)

    def files(self) -> list[Path]:
        """Checkpoint files in the folder, the newest last."""
        return sorted(self.folder.glob("*.pt"))

    def latest(self, device: torch.device) -> dict[str, Any] | None:
        """Newest state that is undamaged, loaded to a device; None if none was ever saved."""
        import torch

        files = self.files()
        for path in reversed(files):
            content = checked(path)
            if content is not None:
                return dict(torch.load(io.BytesIO(content), map_location=device, weights_only=True))
            logger.warning("the checkpoint %s is damaged: the one before it is taken", path)
        if files:
            raise RunError(f"all checkpoints in {self.folder} are damaged: remove the folder to start anew")
        return None


def header(content: bytes) -> bytes:
    """First line of a checkpoint: the name of the format and the SHA-256 checksum of the content."""
    return MAGIC + b" sha256 " + hashlib.sha256(content).hexdigest().encode() + b"\n"


def checked(path: Path) -> bytes | None:
    """Content of a checkpoint file; None if it is damaged or cannot be read."""
    try:
        line, _, content = path.read_bytes().partition(b"\n")
    except OSError:
        return None
    return content if line + b"\n" == header(content) else None
