"""TensorBoard event files of a run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import tomli_w

from hesscond.errors import ConfigError
from hesscond.export.curves import Scalar

if TYPE_CHECKING:
    from hesscond.runs import StoredRun


class TensorBoardFiles:
    """Writer of a run's curves into a new folder that ``tensorboard --logdir`` reads.

    Numbers are written in double precision: what is read back is what the log holds, to the last bit. The
    configuration is there as text.
    """

    def __init__(self, folder: Path, run: StoredRun) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            raise ConfigError("tensorboard is not installed: pip install tensorboard (extra 'tensorboard')") from None
        try:
            if any(folder.glob("*tfevents*")):
                raise ConfigError(f"{folder} holds TensorBoard files already: give another folder")
            folder.mkdir(parents=True, exist_ok=True)
            self._writer = SummaryWriter(str(folder))
        except OSError as error:
            raise ConfigError(f"{folder} cannot be written: {error.strerror or error}") from None
        self._writer.add_text("config", f"```toml\n{tomli_w.dumps(run.config)}```")

    def write(self, points: Sequence[Scalar]) -> None:
        """Add points and flush them to the file."""
        for name, iteration, time, value in ((p.name, p.iteration, p.time, p.value) for p in points):
            self._writer.add_scalar(name, value, iteration, time, new_style=True, double_precision=True)
        self._writer.flush()

    def close(self, run: StoredRun) -> None:
        """Close the file."""
        self._writer.close()
