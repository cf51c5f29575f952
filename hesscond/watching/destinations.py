"""Where the rows of a watch go: functions, TensorBoard, Weights & Biases, MLflow, and run folders."""

from __future__ import annotations

import math
import os
import platform
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch

from hesscond.errors import ConfigError
from hesscond.study.log import RunLog, can_be_resumed, check_free

Metrics = dict[str, Any]


class Destination(Protocol):
    """Takes what a watch finds."""

    def write(self, step: int, metrics: Metrics, rows: Sequence[Mapping[str, Any]]) -> None:
        """A probe: its numbers by name, and a row for each block."""

    def check(self) -> None:
        """Refuse a step that has no place there."""

    def training(self, step: int, loss: float, rate: float | None) -> None:
        """The loss of a training step."""

    def resume(self) -> None:
        """What comes now goes on with what is there."""

    def close(self, status: str, message: str) -> None:
        """The end."""


class ToFunction:
    """Calls a function with the numbers of each probe."""

    def __init__(self, function: Callable[[Metrics], object]) -> None:
        self.function = function

    def write(self, step: int, metrics: Metrics, rows: Sequence[Mapping[str, Any]]) -> None:
        self.function(dict(metrics))

    def check(self) -> None:
        """Nothing."""

    def training(self, step: int, loss: float, rate: float | None) -> None:
        """Nothing: the loop has its own loss."""

    def resume(self) -> None:
        """Nothing."""

    def close(self, status: str, message: str) -> None:
        """Nothing."""


class ToTensorBoard(ToFunction):
    """Writes event files into a folder, in double precision."""

    def __init__(self, folder: str) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            raise ConfigError("TensorBoard files need tensorboard: pip install tensorboard (extra 'watch')") from None
        if not folder:
            raise ConfigError("log='tensorboard:DIR' needs a folder: 'tensorboard:runs/mine'")
        try:
            self._writer = SummaryWriter(folder)
        except OSError as error:
            raise ConfigError(f"{folder} cannot be written: {error.strerror or error}") from None

    def write(self, step: int, metrics: Metrics, rows: Sequence[Mapping[str, Any]]) -> None:
        for name, value in numbers(metrics).items():
            self._writer.add_scalar(name, value, step, new_style=True, double_precision=True)
        if "hesscond/error" in metrics:
            self._writer.add_text("hesscond/error", metrics["hesscond/error"], step)
        self._writer.flush()

    def close(self, status: str, message: str) -> None:
        self._writer.close()


class ToWandb(ToFunction):
    """Adds to the run of Weights & Biases that is open, whose own steps stay as they are, or opens one.

    An open run takes the numbers with the row that it logs next, over the axis ``hesscond/step``.
    """

    def __init__(self) -> None:
        try:
            import wandb
        except ImportError:
            raise ConfigError("log='wandb' needs Weights & Biases: pip install wandb (extra 'watch')") from None
        self._own = wandb.run is None
        self._run = wandb.init(project="hesscond") if wandb.run is None else wandb.run
        self._run.define_metric("hesscond/step")
        self._run.define_metric("hesscond/*", step_metric="hesscond/step")

    def write(self, step: int, metrics: Metrics, rows: Sequence[Mapping[str, Any]]) -> None:
        self._run.log(dict(metrics), commit=self._own)

    def close(self, status: str, message: str) -> None:
        if self._own:
            self._run.finish(exit_code=0 if status == "finished" else 1)


class ToMLflow(ToFunction):
    """Adds to MLflow's active run, or starts one. What is infinite (an unresolved κ) is no metric there."""

    def __init__(self) -> None:
        try:
            import mlflow
        except ImportError:
            raise ConfigError("log='mlflow' needs MLflow: pip install mlflow (extra 'watch')") from None
        from hesscond.export.mlflow import allowed

        self._mlflow, self._allowed = mlflow, allowed
        self._own = mlflow.active_run() is None
        self._id = (mlflow.active_run() or mlflow.start_run()).info.run_id

    def write(self, step: int, metrics: Metrics, rows: Sequence[Mapping[str, Any]]) -> None:
        finite = {self._allowed(name): value for name, value in numbers(metrics).items() if math.isfinite(value)}
        self._mlflow.log_metrics(finite, step=step, run_id=self._id)
        if "hesscond/error" in metrics:
            self._mlflow.MlflowClient().set_tag(self._id, "hesscond.error", metrics["hesscond/error"])

    def close(self, status: str, message: str) -> None:
        if self._own:
            self._mlflow.end_run("FINISHED" if status == "finished" else "FAILED")


class ToRunFolder:
    """Writes a run folder, on which ``figure``, ``table``, ``report`` and ``check`` work as on a study's.

    One that a training left behind is gone on with once `Watch.load_state_dict` has said where.

    Parameters
    ----------
    folder
        New or empty, or that of the training that is gone on with.
    config
        Its ``config.toml``.
    """

    def __init__(self, folder: Path, config: Mapping[str, Any]) -> None:
        self.folder = folder
        self._log: RunLog | None = None
        try:
            if can_be_resumed(folder, config) == "no":
                check_free(folder)
                self._log = RunLog(folder, config)
        except ConfigError as error:
            raise ConfigError(str(error).replace("give another --out", "give another folder as log=")) from None

    def check(self) -> None:
        """Refuse to go on with another training's run."""
        if self._log is None:
            raise ConfigError(
                f"{self.folder} holds the run of an earlier training: call watch.load_state_dict to go on with it, or "
                "give another folder as log="
            )

    def write(self, step: int, metrics: Metrics, rows: Sequence[Mapping[str, Any]]) -> None:
        # infinity is how SQLite and the reports have an unresolved κ
        at = {"iteration": step, "epoch": 0, "data": "batch"}
        assert self._log is not None
        self._log.commit(probe=[at | dict(row) for row in rows])

    def training(self, step: int, loss: float, rate: float | None) -> None:
        assert self._log is not None
        self._log.training(step, 0, loss, rate)

    def resume(self) -> None:
        if self._log is None:
            self._log = RunLog.reopened(self.folder)

    def close(self, status: str, message: str) -> None:
        if self._log is not None:
            self._log.close(status, message)


def destinations(log: Any, config: Callable[[], Mapping[str, Any]]) -> list[Destination]:
    """What is meant by ``log``."""
    if log is None:
        return []
    if isinstance(log, (list, tuple)):
        return [one for part in log for one in destinations(part, config)]
    if callable(log):
        return [ToFunction(log)]
    if log == "wandb":
        return [ToWandb()]
    if log == "mlflow":
        return [ToMLflow()]
    if isinstance(log, str) and log.startswith("tensorboard"):
        return [ToTensorBoard(log.removeprefix("tensorboard").removeprefix(":"))]
    if isinstance(log, str) and (scheme := re.match(r"(\w\w+):", log)):
        raise ConfigError(
            f"log={log!r}: {scheme[1]!r} takes nothing behind a colon; a folder of that name is a pathlib.Path"
        )
    if isinstance(log, (str, os.PathLike)) and str(log):
        return [ToRunFolder(Path(log), config())]
    raise ConfigError(
        f"log must be a function, 'tensorboard:DIR', 'wandb', 'mlflow', a folder, or a list of these, not {log!r}"
    )


def numbers(metrics: Metrics) -> dict[str, float]:
    """The numbers among the values."""
    return {name: float(value) for name, value in metrics.items() if isinstance(value, (int, float))}


def run_config(
    name: str, optimizer: str, rate: float, samples: int, layers: Sequence[str], level: str, loss: str
) -> dict[str, Any]:
    """The ``config.toml`` of a watched training: what a report needs, and no study could repeat it."""
    return {
        "name": name,
        "data": {"name": "watched"},
        "model": {"name": name},
        "training": {"batch_size": samples, "loss": loss},
        "probe": {"layers": list(layers), "units": "all", "levels": [level], "precision": "float64"},
        "run": {
            "method": optimizer,
            "seed": 0,
            "learning_rate": rate,
            "versions": {
                "hesscond": sys.modules["hesscond"].__version__,
                "torch": torch.__version__,
                "python": platform.python_version(),
            },
        },
    }
