"""Destinations of the rows of a watch: functions, TensorBoard, Weights & Biases, MLflow, and run folders.

A new one is a subclass of `Destination` with a name, in a module of this package or anywhere else: ``log="NAME"`` or
``log="NAME:PLACE"`` opens it once its module is imported, as entry points of the group ``hesscond.destinations`` are.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from hesscond.errors import ConfigError, did_you_mean
from hesscond.lazy import imported, load_installed, optional
from hesscond.runs import log as run_log

Metrics = dict[str, Any]

#: Characters that MLflow does not allow in names.
FORBIDDEN = r"[^\w/. :-]"


class Destination:
    """Receiver of the results of a watch; what a kind of receiver has no use for does nothing.

    ``name``: what ``log`` opens it by (none: by an object of another kind); ``takes_place``: whether a text follows it
    behind a colon, which the class is then called with.
    """

    name: ClassVar[str] = ""
    takes_place: ClassVar[bool] = False
    named: ClassVar[dict[str, type[Destination]]] = {}

    def __init_subclass__(cls) -> None:
        if cls.name:
            Destination.named[cls.name] = cls

    def write(self, step: int, metrics: Metrics, rows: Sequence[Mapping[str, Any]]) -> None:
        """Write a probe: its numbers by name, and a row for each block."""

    def check(self) -> None:
        """Raise an error if a step cannot be written here."""

    def training(self, step: int, loss: float, rate: float | None) -> None:
        """Write the loss of a training step."""

    def resume(self) -> None:
        """Continue what earlier steps have written here."""

    def close(self, status: str, message: str) -> None:
        """Finish the writing, with the status of the training and a message."""


class ToFunction(Destination):
    """Destination that calls a function with the numbers of each probe."""

    def __init__(self, function: Callable[[Metrics], object]) -> None:
        self.function = function

    def write(self, step: int, metrics: Metrics, rows: Sequence[Mapping[str, Any]]) -> None:
        self.function(dict(metrics))


class ToTensorBoard(Destination):
    """Destination that writes event files into a folder, as scalars in single precision."""

    name, takes_place = "tensorboard", True

    def __init__(self, folder: str) -> None:
        with optional("log='tensorboard'"):
            from torch.utils.tensorboard import SummaryWriter
        if not folder:
            raise ConfigError("log='tensorboard:DIR' needs a folder: 'tensorboard:runs/mine'")
        try:
            self._writer = SummaryWriter(folder)
        except OSError as error:
            raise ConfigError(f"{folder} cannot be written: {error.strerror or error}") from None

    def write(self, step: int, metrics: Metrics, rows: Sequence[Mapping[str, Any]]) -> None:
        for name, value in numbers(metrics).items():
            self._writer.add_scalar(name, value, step)
        if "hesscond/error" in metrics:
            self._writer.add_text("hesscond/error", metrics["hesscond/error"], step)
        self._writer.flush()

    def close(self, status: str, message: str) -> None:
        self._writer.close()


class ToWandb(Destination):
    """Destination that adds to the open run of Weights & Biases, keeping its steps as they are, or opens one."""

    name = "wandb"

    def __init__(self) -> None:
        with optional("log='wandb'"):
            import wandb
        self._own = wandb.run is None
        self._run = wandb.init(project="hesscond") if wandb.run is None else wandb.run
        self._run.define_metric("hesscond/step")
        self._run.define_metric("hesscond/*", step_metric="hesscond/step")

    def write(self, step: int, metrics: Metrics, rows: Sequence[Mapping[str, Any]]) -> None:
        self._run.log(dict(metrics), commit=self._own)

    def close(self, status: str, message: str) -> None:
        if self._own:
            self._run.finish(exit_code=0 if status == "finished" else 1)


class ToMLflow(Destination):
    """Destination that adds to MLflow's active run, or starts one; infinite values (unresolved κ) are left out."""

    name = "mlflow"

    def __init__(self) -> None:
        with optional("log='mlflow'"):
            import mlflow
        self._mlflow = mlflow
        self._own = mlflow.active_run() is None
        self._id = (mlflow.active_run() or mlflow.start_run()).info.run_id

    def write(self, step: int, metrics: Metrics, rows: Sequence[Mapping[str, Any]]) -> None:
        finite = {re.sub(FORBIDDEN, "-", name): n for name, n in numbers(metrics).items() if math.isfinite(n)}
        self._mlflow.log_metrics(finite, step=step, run_id=self._id)
        if "hesscond/error" in metrics:
            self._mlflow.MlflowClient().set_tag(self._id, "hesscond.error", metrics["hesscond/error"])

    def close(self, status: str, message: str) -> None:
        if self._own:
            self._mlflow.end_run("FINISHED" if status == "finished" else "FAILED")


class ToRunFolder(Destination):
    """Destination that writes a run folder, for ``figure``, ``table``, ``report`` and ``check``."""

    def __init__(self, folder: Path, config: Mapping[str, Any]) -> None:
        self.folder = folder
        self._log: run_log.RunLog | None = None
        try:
            if run_log.can_be_resumed(folder, config) == "no":
                self._log = run_log.RunLog(folder, config)
        except ConfigError as error:
            raise ConfigError(str(error).replace("give another --out", "give another folder as log=")) from None

    def check(self) -> None:
        """Refuse to continue the run of another training."""
        if self._log is None:
            raise ConfigError(
                f"{self.folder} holds the run of an earlier training: call watch.load_state_dict to go on with it, or "
                "give another folder as log="
            )

    def write(self, step: int, metrics: Metrics, rows: Sequence[Mapping[str, Any]]) -> None:
        # SQLite and the reports represent an unresolved κ by infinity
        at = {"iteration": step, "epoch": 0, "data": "batch"}
        assert self._log is not None
        self._log.commit(probe=[at | dict(row) for row in rows])

    def training(self, step: int, loss: float, rate: float | None) -> None:
        assert self._log is not None
        self._log.training(step, 0, loss, rate)

    def resume(self) -> None:
        if self._log is None:
            self._log = run_log.RunLog.reopened(self.folder)

    def close(self, status: str, message: str) -> None:
        if self._log is not None:
            self._log.close(status, message)


def destinations(log: Any, config: Callable[[], Mapping[str, Any]]) -> list[Destination]:
    """Destinations that ``log`` means."""
    if log is None:
        return []
    if isinstance(log, (list, tuple)):
        return [destination for part in log for destination in destinations(part, config)]
    if callable(log):
        return [ToFunction(log)]
    if isinstance(log, str):
        name, colon, place = log.partition(":")
        if name not in Destination.named:
            imported(__package__)
            load_installed("hesscond.destinations")
        kind: Any = Destination.named.get(name)
        if kind is not None and (kind.takes_place or not colon):
            return [kind(place) if kind.takes_place else kind()]
        # one letter is a drive
        if re.match(r"\w\w+:", log):
            placed = (known for known, kind in Destination.named.items() if kind.takes_place)
            hint = did_you_mean(name, placed, otherwise="a folder of that name is a pathlib.Path")
            raise ConfigError(f"log={log!r}: {name!r} takes nothing behind a colon; {hint}")
    if isinstance(log, (str, os.PathLike)) and str(log):
        return [ToRunFolder(Path(log), config())]
    raise ConfigError(
        f"log must be a function, 'tensorboard:DIR', 'wandb', 'mlflow', a folder, or a list of these, not {log!r}"
    )


def numbers(metrics: Metrics) -> dict[str, float]:
    """The numbers among the values."""
    return {name: float(value) for name, value in metrics.items() if isinstance(value, (int, float))}
