"""Trains one network with one method and logs loss, accuracy and condition numbers."""

from __future__ import annotations

import math
import platform
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy
import scipy
import torch
from torch import nn
from torch.nn import functional

import hesscond
from hesscond.capture import checked_units, dense_layers
from hesscond.data import Dataset
from hesscond.errors import CaptureError, ConfigError, DivergedError, MatrixError
from hesscond.methods import Method, method_class
from hesscond.models import MLP
from hesscond.study.config import StudyConfig
from hesscond.study.probing import Prober
from hesscond.study.store import RunLog

#: Test samples in one forward pass of an evaluation.
EVALUATION_CHUNK = 5000


@dataclass(frozen=True)
class RunPlan:
    """One run: a study, a method, a seed, and where it goes."""

    study: StudyConfig
    method: str
    seed: int
    learning_rate: float
    folder: Path
    device: torch.device

    def config(self, data: Dataset) -> dict[str, Any]:
        """Everything needed to repeat the run, for ``config.toml``."""
        study = self.study.model_dump(mode="json", exclude_none=True, exclude={"run"})
        study["run"] = {
            "method": self.method,
            "seed": self.seed,
            "learning_rate": self.learning_rate,
            "device": str(self.device),
            "data_source": data.source,
            "versions": {
                "hesscond": hesscond.__version__,
                "torch": torch.__version__,
                "numpy": numpy.__version__,
                "scipy": scipy.__version__,
                "python": platform.python_version(),
            },
        }
        return study


@dataclass(frozen=True)
class Progress:
    """What the progress bar shows after an iteration; κ's are the last measured on a mini-batch."""

    iteration: int
    iterations: int
    loss: float
    row: dict[str, Any] | None


def build_model(plan: RunPlan, data: Dataset) -> MLP:
    """The study's network with initial weights from the run's seed, the same for every method."""
    return MLP(
        data.train_inputs[0].numel(),
        plan.study.model.hidden,
        data.classes,
        activation=plan.study.model.activation,
        generator=torch.Generator().manual_seed(plan.seed),
    ).to(plan.device)


def check_plan(plan: RunPlan, data: Dataset) -> None:
    """Find what would fail before anything is written.

    Raises
    ------
    ConfigError
        A unit out of range, a batch larger than the training set, or a network too large for this machine.
    """
    try:
        model = build_model(plan, data)
    except RuntimeError as error:
        reason = str(error).partition("\n")[0]
        raise ConfigError(f"a network with hidden layers {plan.study.model.hidden} cannot be built: {reason}") from None
    layers = dense_layers(model)
    for name in plan.study.probe.layers:
        checked_units(name, layers[name], plan.study.probe.units)
    batch_size, samples = plan.study.training.batch_size, len(data.train_targets)
    if batch_size > samples:
        raise ConfigError(f"batch size {batch_size} exceeds the {samples} training samples of {data.name}")


def run(plan: RunPlan, data: Dataset, on_progress: Callable[[Progress], None] | None = None) -> None:
    """Train, probe and log one run.

    Iteration k is the state after k optimizer steps; its training loss and mini-batch κ are those of the batch
    that step k + 1 is about to use, and its P the one that step uses. Test accuracy and the κ over the training
    set are measured at iteration 0, after every epoch and at the end. Probing changes nothing: weights are the
    same bit for bit with and without it.

    Parameters
    ----------
    plan
        What to run.
    data
        On the plan's device.
    on_progress
        Called after every iteration.

    Raises
    ------
    ConfigError
        The folder is not free, or the plan does not fit the data.
    DivergedError
        The loss became NaN or infinite, or an activation that the probe needs; the log up to there is kept.
    """
    check_plan(plan, data)
    log = RunLog(plan.folder, plan.config(data))
    try:
        training = Training(plan, data, log, on_progress)
        training.run()
    except KeyboardInterrupt:
        log.close("interrupted", "stopped by the user")
        raise
    except DivergedError as error:
        log.close("diverged", str(error))
        raise
    except BaseException as error:
        log.close("failed", f"{type(error).__name__}: {error}")
        raise
    log.close("finished")


def diverged(quantity: str, value: float, iteration: int) -> DivergedError:
    """The error for a loss that is NaN or infinite."""
    return DivergedError(f"the {quantity} is {value} at iteration {iteration}: the run stopped, its log is kept")


@contextmanager
def probing(iteration: int) -> Iterator[None]:
    """The networks of a study can always be measured, unless something in them is no longer finite."""
    try:
        yield
    except (CaptureError, MatrixError) as error:
        raise DivergedError(
            f"the probe found numbers out of range at iteration {iteration} ({error}): the run stopped, its log is kept"
        ) from None


class Training:
    """The state of a run while it is trained."""

    def __init__(
        self,
        plan: RunPlan,
        data: Dataset,
        log: RunLog,
        on_progress: Callable[[Progress], None] | None,
    ) -> None:
        self.plan, self.data, self.log, self.on_progress = plan, data, log, on_progress
        config = plan.study.training
        self.batch_size = config.batch_size
        self.per_epoch = len(data.train_targets) // config.batch_size
        self.iterations = config.iterations or (config.epochs or 0) * self.per_epoch
        self.model = build_model(plan, data)
        self.loss_fn = nn.CrossEntropyLoss()
        self.method: Method = method_class(plan.method)(self.model)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=plan.learning_rate, momentum=config.momentum)
        layers = dense_layers(self.model)
        self.prober = Prober(
            self.model,
            self.loss_fn,
            self.method,
            plan.study.probe,
            {name: layers[name] for name in plan.study.probe.layers},
        )
        self.order = torch.Generator().manual_seed(plan.seed + 1)
        self.inputs = data.train_inputs.flatten(1)
        self.targets = data.train_targets
        self.test_inputs = data.test_inputs.flatten(1)

    def run(self) -> None:
        """All iterations, from the first."""
        row = None
        permutation = torch.empty(0, dtype=torch.int64)
        for iteration in range(self.iterations):
            epoch, position = divmod(iteration, self.per_epoch)
            if position == 0:
                self.end_of_epoch(iteration, epoch)
                permutation = torch.randperm(len(self.targets), generator=self.order).to(self.targets.device)
            batch = permutation[position * self.batch_size : (position + 1) * self.batch_size]
            loss, rows = self.step(iteration, self.inputs[batch], self.targets[batch])
            self.log.training(iteration, epoch, loss)
            if rows:
                row = rows[0]
                self.log.commit("probe", [{"iteration": iteration, "epoch": epoch, **r} for r in rows])
            if self.on_progress is not None:
                self.on_progress(Progress(iteration + 1, self.iterations, loss, row))
        self.end_of_epoch(self.iterations, self.iterations // self.per_epoch, last=True)

    def step(self, iteration: int, inputs: torch.Tensor, targets: torch.Tensor) -> tuple[float, list[dict[str, Any]]]:
        """One iteration; returns its loss and the probe's rows."""
        every = self.plan.study.probe.every
        due = every > 0 and iteration % every == 0
        self.prober.recorder.armed = due
        self.optimizer.zero_grad(set_to_none=True)
        output = self.model(inputs)
        self.prober.recorder.armed = False
        loss_tensor = self.loss_fn(output, targets)
        loss_tensor.backward()
        loss = loss_tensor.item()
        if not math.isfinite(loss):
            raise diverged("loss", loss, iteration)
        self.method.transform_gradients()
        # after the method has seen the batch, before the weights move: the P of this very step
        with probing(iteration):
            rows = self.prober.batch_rows(inputs, targets, output) if due else []
        self.optimizer.step()
        return loss, rows

    def end_of_epoch(self, iteration: int, epoch: int, *, last: bool = False) -> None:
        """Evaluate on the test set, and probe over the training set where it is due."""
        evaluation = self.evaluate()
        self.log.commit("evaluation", [{"iteration": iteration, "epoch": epoch, **evaluation}])
        if not math.isfinite(evaluation["test_loss"]):
            raise diverged("test loss", evaluation["test_loss"], iteration)
        every = self.plan.study.probe.train_every_epochs
        if every > 0 and (last or epoch % every == 0):
            with probing(iteration):
                rows = self.prober.train_rows(self.inputs, self.targets)
            self.log.commit("probe", [{"iteration": iteration, "epoch": epoch, **r} for r in rows])

    @torch.no_grad()
    def evaluate(self) -> dict[str, float]:
        """Mean loss and accuracy on the test set."""
        total, correct = 0.0, 0
        for start in range(0, len(self.test_inputs), EVALUATION_CHUNK):
            part = slice(start, start + EVALUATION_CHUNK)
            output, targets = self.model(self.test_inputs[part]), self.data.test_targets[part]
            total += functional.cross_entropy(output, targets, reduction="sum").item()
            correct += int((output.argmax(1) == targets).sum())
        samples = len(self.test_inputs)
        return {"test_loss": total / samples, "test_accuracy": correct / samples}
