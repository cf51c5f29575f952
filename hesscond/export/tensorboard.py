"""TensorBoard event files of a run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import tomli_w

from hesscond.errors import ConfigError
from hesscond.export.curves import Scalar, flat

if TYPE_CHECKING:
    from hesscond.runs import StoredRun


class TensorBoardFiles:
    """Sink that writes a run's curves into a folder that ``tensorboard --logdir`` reads.

    Numbers are written in double precision: what is read back is what the log holds, to the last bit. The
    configuration is there as text and as hyperparameters, with the last loss and accuracy as their metrics.

    Parameters
    ----------
    folder
        Folder for this run; made if absent.
    run
        The run.

    Raises
    ------
    ConfigError
        The package tensorboard is not installed; the folder holds event files already, or cannot be written.
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
        self._last: dict[str, float] = {}
        self._writer.add_text("config", f"```toml\n{tomli_w.dumps(run.config)}```")

    def cursors(self) -> Mapping[str, int]:
        """Return no positions: event files are written from the start."""
        return {}

    def write(self, points: Sequence[Scalar], cursors: Mapping[str, int]) -> None:
        """Add points and flush them to the file."""
        for point in points:
            self._writer.add_scalar(
                point.name, point.value, point.iteration, point.time, new_style=True, double_precision=True
            )
            if point.name in ("loss/train", "loss/test", "accuracy/test"):
                self._last[point.name] = point.value
        self._writer.flush()

    def close(self, run: StoredRun) -> None:
        """Add the hyperparameters, and close the file."""
        from torch.utils.tensorboard.summary import hparams

        metrics = {f"last/{name}": value for name, value in self._last.items()}
        for summary in hparams(flat(run.config) | {"status": run.status}, metrics):
            self._writer._get_file_writer().add_summary(summary)
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, new_style=True, double_precision=True)
        self._writer.close()
