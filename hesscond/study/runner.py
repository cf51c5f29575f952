"""Trains one network with one method and logs loss, accuracy and condition numbers."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

import numpy
import scipy
import torch
from torch import nn
from torch.nn import functional

import hesscond
from hesscond.data import dataset
from hesscond.data.preparation import chosen
from hesscond.errors import CaptureError, ConfigError, DivergedError, MatrixError, NotFiniteError, RunError
from hesscond.lazy import IN_FILE, own_code, without_folders
from hesscond.methods import Method, parse
from hesscond.models import build
from hesscond.operators.threads import torch_threads
from hesscond.problem import devices, untouched
from hesscond.runs import log as run_log, store
from hesscond.study import datasets, metrics, probing, structure
from hesscond.study.config import StudyConfig
from hesscond.study.sections import ModelConfig

#: A loss that has grown by this factor has diverged where a probe fails.
BLOWN_UP = 10.0
#: Samples in one forward pass of an evaluation: fully connected networks take little memory for each.
EVALUATION_CHUNK = {"any": 250, "vector": 5000, "coordinates": 5000, "image": 250, "points": 250, "tokens": 250}

#: Multiplications of a batch's forward pass from which on a second thread gains (measured: 0.5 to 1.3 million lose by
#: it, 4 million gain).
WORTH_THREADS = 2_500_000

#: Probes whose rows are made together.
WAITING = 32


class CrossEntropy(nn.CrossEntropyLoss):
    """Cross-entropy of the classes, the mean over samples, and over the tokens of each."""

    def forward(self, input: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        """Loss of logits (N, c) and classes (N,), or (N, T, c) and (N, T)."""
        return super().forward(input.flatten(0, -2), target.flatten())


class OneVersusAll(nn.Module):
    """Binary cross-entropy of every class against the others, the mean over samples and classes."""

    def forward(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        """Loss of outputs (N, c), the log-odds of each class, and classes (N,)."""
        wanted = functional.one_hot(target, output.shape[1]).to(output)
        return functional.binary_cross_entropy_with_logits(output, wanted)


class SquaredError(nn.Module):
    """Mean of the squares, also of classes and of several predictions of the same values."""

    def forward(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        """Loss of outputs (N, d) and values (N, d), or classes (N,): 1 for the class, 0 for the others."""
        if not target.is_floating_point():
            target = functional.one_hot(target, output.shape[-1]).to(output)
        if output.ndim == target.ndim:
            return functional.mse_loss(output, target)
        return output.shape[1] * functional.mse_loss(output, target.unsqueeze(1).expand_as(output))


LOSSES: dict[str, Callable[[], nn.Module]] = {
    "cross_entropy": CrossEntropy,
    "binary_cross_entropy": OneVersusAll,
    "mse": SquaredError,
}


@dataclass(frozen=True)
class RunPlan:
    """One run: a study, a method (and its name in the study, if it has one), a seed, and where it goes."""

    study: StudyConfig
    method: str
    seed: int
    learning_rate: float
    folder: Path
    device: torch.device
    label: str = ""

    @property
    def name(self) -> str:
        """The method, by its name in the study if it has one, and the seed."""
        return f"{self.label or without_folders(self.method)} seed {self.seed}"

    def own_code(self) -> AbstractContextManager[None]:
        """Context in which an exception out of a piece of the user's is one sentence."""
        return own_code(self.study.model.name, self.method, *(entry.id for entry in self.study.statements))

    def config(self, data: dataset.Dataset) -> dict[str, Any]:
        """Contents of ``config.toml``: everything needed to repeat the run."""
        study = self.study.model_dump(mode="json", exclude_none=True, exclude={"run"})
        study["data"] |= data.pinned
        study["probe"]["layers"] = list(structure.probed_blocks(self.study))
        study["run"] = {
            "method": self.method,
            **({"label": self.label} if self.label else {}),
            "seed": self.seed,
            "learning_rate": self.learning_rate,
            "device": str(self.device),
            "data_source": data.source,
            "versions": run_log.versions(hesscond, torch, numpy, scipy),
        }
        return study


@dataclass(frozen=True)
class Progress:
    """State of a run after an iteration, for the progress bar; ``row`` is the last probe of a mini-batch."""

    iteration: int
    iterations: int
    loss: float
    row: dict[str, Any] | None


def build_model(plan: RunPlan, data: dataset.Dataset) -> nn.Module:
    """The study's network with initial weights from the run's seed, the same for every method."""
    return build(
        plan.study.model.name,
        input_shape=data.form.input_shape,
        outputs=data.form.outputs,
        generator=torch.Generator().manual_seed(plan.seed),
        **plan.study.model.options,
    ).to(plan.device)


def make_loss(study: StudyConfig) -> nn.Module:
    """Loss function that the study minimizes."""
    kind = study.training.loss
    form = study.data.form
    # the curvature of torch's own losses is known without derivatives; rays have two predictions
    if kind == "mse" and not form.classes and study.model.name != "nerf-rays":
        return nn.MSELoss()
    return nn.CrossEntropyLoss() if kind == "cross_entropy" and not form.tokens else LOSSES[kind]()


def check_plan(plan: RunPlan, data: dataset.Dataset) -> None:
    """Raise an error for a plan that would fail, before anything is written.

    Raises
    ------
    ConfigError
        Data that are not those of the study; a network, loss, layer or unit that does not fit them; a batch larger than
        the training set; a network too large for this machine; a method that does not fit the network or the batch.
    """
    datasets.check_data(plan.study.data, data)
    structure.check_structure(plan.study)
    try:
        model = build_model(plan, data)
    except RuntimeError as error:
        reason = str(error).partition("\n")[0]
        raise ConfigError(f"the network {described(plan.study.model)} cannot be built: {reason}") from None
    rehearse(plan, model, data)
    with plan.own_code():
        method = parse(plan.method).create(model)
        method.check_batch(plan.study.training.batch_size)
        optimizer = method.optimizer(plan.learning_rate, **plan.study.training.optimizer_options)
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ConfigError(f"the optimizer of {plan.method} must be a torch.optim.Optimizer, not {optimizer!r}")
    if method.reads_all_inputs and not isinstance(data.train_inputs, torch.Tensor):
        raise ConfigError(
            f"method {plan.method!r} reads all training inputs at once, but those of {data.name} stay on disk: take "
            "another method, and standardize = true in [data] to standardize them"
        )
    if method.reads_all_inputs and data.form.tokens:
        raise ConfigError(f"method {plan.method!r} reads numbers, but the inputs of {data.name} are tokens")
    samples = len(data.train_targets)
    training = plan.study.training
    iterations = training.iterations or (training.epochs or 0) * (samples // training.batch_size)
    if late := [step for step in plan.study.probe.at if step >= iterations]:
        raise ConfigError(f"probe.at: there is no step {late[0]} in a run of {iterations} iterations, from 0 on")
    for what, wanted in (
        ("batch size", plan.study.training.batch_size),
        ("probe.train_samples", plan.study.probe.train_samples or 1),
    ):
        if wanted > samples:
            raise ConfigError(f"{what} {wanted} exceeds the {samples} training samples of {data.name}")


def rehearse(plan: RunPlan, model: nn.Module, data: dataset.Dataset) -> None:
    """Refuse a network of the user's of which a step without a method would fail; its gradients are spoiled."""
    name, size = plan.study.model.name, plan.study.training.batch_size
    if not IN_FILE.fullmatch(name):
        return
    inputs, targets = (part[:size].to(plan.device) for part in (data.train_inputs, data.train_targets))
    on = f" (inputs {tuple(inputs.shape)}, {str(inputs.dtype).removeprefix('torch.')})"
    with seeded(plan), own_code(name, on=on):
        output = model(inputs)
        shape = tuple(output.shape) if isinstance(output, torch.Tensor) else type(output).__name__
        if isinstance(shape, str) or len(shape) < 2 or (shape[0], shape[-1]) != (len(inputs), data.form.outputs):
            wanted = f"({len(inputs)}, {'context, ' * data.form.tokens}{data.form.outputs})"
            raise ConfigError(f"{without_folders(name)} must return outputs {wanted}, but returned {shape}{on}")
        make_loss(plan.study)(output, targets).backward()


def described(model: ModelConfig) -> str:
    """Name and options of a network."""
    options = ", ".join(f"{name} = {value}" for name, value in model.options.items())
    return f"{model.name!r} with {options}" if options else repr(model.name)


def run(
    plan: RunPlan, data: dataset.Dataset, on_progress: Callable[[Progress], None] | None = None, *, resume: bool = False
) -> None:
    """Train, probe and log one run.

    Iteration k is the state after k optimizer steps; its training loss and mini-batch κ are those of the batch
    that step k + 1 is about to use, and its P the one that step uses. Test accuracy and the κ over the training
    set are measured at iteration 0, after every epoch and at the end. Probing changes nothing: weights are the
    same bit for bit with and without it.

    Parameters
    ----------
    plan
        The run.
    data
        Data set, on the plan's device.
    on_progress
        Called after every iteration.
    resume
        Whether to go on with the run in the folder, if there is one, from its last checkpoint: to the same weights
        and the same log as without the break, bit for bit on one device. One that is over is left as it is, unless
        the plan has more iterations and learning rates that do not depend on how many.

    Raises
    ------
    ConfigError
        The folder is not free, or holds a run of another plan; the plan does not fit the data.
    DivergedError
        The loss became NaN or infinite, or an activation that the probe needs; the log up to there is kept.
    RunError
        The folder cannot be written any more; another process works on it; all checkpoints are damaged.
    """
    check_plan(plan, data)
    config = plan.config(data)
    if run_status(plan, config, resume=resume) == "over":
        return
    with run_log.Checkpoints(plan.folder) as checkpoints, seeded(plan):
        # another process may have done it until now, but cannot any more
        now = run_status(plan, config, resume=resume)
        if now == "over":
            return
        if now == "new":
            log = run_log.RunLog(plan.folder, config, begun=resume)
        else:
            log = run_log.RunLog.reopened(plan.folder, config if now == "longer" else None)
        with closed_at_end(log), plan.own_code():
            training = Training(plan, data, log, on_progress)
            try:
                training.run(checkpoints)
            finally:
                training.flush_probes()


def run_status(plan: RunPlan, config: dict[str, Any], *, resume: bool) -> Literal["new", "begun", "longer", "over"]:
    """State of the run of a plan in its folder; without ``resume`` it can only be "new"."""
    match = run_log.can_be_resumed(plan.folder, config) if resume else "no"
    if match == "longer":
        # what diverged cannot go on
        return "over" if store.open_run(plan.folder).status == "diverged" else "longer"
    if match == "same":
        return "over" if store.open_run(plan.folder).status in store.OVER else "begun"
    run_log.check_free(plan.folder, begun=resume)
    return "new"


@contextmanager
def closed_at_end(log: run_log.RunLog) -> Iterator[None]:
    """Mark in the log how the run in the block ended."""
    try:
        yield
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


@contextmanager
def seeded(plan: RunPlan) -> Iterator[None]:
    """Seed torch's random state (dropout draws from it) with the run's seed, and restore it afterwards."""
    with untouched.untouched_randomness(devices.accelerators_of([torch.empty(0, device=plan.device)])):
        torch.manual_seed(plan.seed)
        yield


def rate(optimizer: torch.optim.Optimizer) -> float:
    """The learning rate of the next step; methods give the same to all groups of parameters."""
    return float(optimizer.param_groups[0]["lr"])


def diverged(quantity: str, value: float, iteration: int, lr: float) -> DivergedError:
    """The error for a loss that is NaN or infinite."""
    if iteration == 0:
        return DivergedError(
            f"the {quantity} is {value:.3g} before the first step: the cause is in the network's initial weights, or "
            "in the data, not in the learning rate; the run stopped, its log is kept"
        )
    return DivergedError(
        f"the {quantity} is {value:.3g} at iteration {iteration}: training has diverged at learning rate {lr:g}, the "
        "run stopped, its log is kept"
    )


@contextmanager
def rehearsal(plan: RunPlan, data: dataset.Dataset) -> Iterator[Training]:
    """The state of a run whose log is thrown away, to measure what it takes."""
    with TemporaryDirectory() as folder:
        training = Training(plan, data, run_log.RunLog(Path(folder) / "run", plan.config(data)), None)
        try:
            yield training
        finally:
            training.log.close("finished")


class Training:
    """The state of a run while it is trained."""

    def __init__(
        self,
        plan: RunPlan,
        data: dataset.Dataset,
        log: run_log.RunLog,
        on_progress: Callable[[Progress], None] | None,
    ) -> None:
        self.plan, self.data, self.log, self.on_progress = plan, data, log, on_progress
        study, config = plan.study, plan.study.training
        self.batch_size = config.batch_size
        self.per_epoch = len(data.train_targets) // config.batch_size
        self.iterations = config.iterations or (config.epochs or 0) * self.per_epoch
        self.model = build_model(plan, data)
        self.loss_fn = make_loss(study)
        self.inputs, self.test_inputs = data.train_inputs, data.test_inputs
        if study.model.architecture.kind == "vector":
            self.inputs, self.test_inputs = self.inputs.flatten(1), self.test_inputs.flatten(1)
        self.targets = data.train_targets
        self.devices = devices.accelerators_of([self.targets])
        self.augment = datasets.Augmentation(study.data.augmentation, data.form, plan.seed)
        self.method: Method = parse(plan.method).create(self.model)
        if isinstance(self.inputs, torch.Tensor):
            self.method.fit(self.inputs)
        self.optimizer = self.method.optimizer(plan.learning_rate, **config.optimizer_options)
        self.schedule = study.schedule.scheduler(self.optimizer, per_epoch=self.per_epoch, iterations=self.iterations)
        blocks = structure.probed_blocks(study)
        self.prober = probing.Prober(
            self.model,
            self.loss_fn,
            self.method,
            study.probe,
            blocks,
            {name: probing.placed(self.method, name) for name in blocks},
            [entry.statement for entry in study.statements],
        )
        self.order = torch.Generator().manual_seed(plan.seed + 1)
        #: The last probe on a mini-batch.
        self.row: dict[str, Any] | None = None
        #: training loss of the first iteration, and the largest one with its iteration
        self.first_loss, self.largest = math.nan, (-math.inf, 0)
        #: Queue of probes whose κ is not computed yet: (iteration, epoch, probe).
        self.waiting: list[tuple[int, int, probing.Probe]] = []

    def run(self, checkpoints: run_log.Checkpoints) -> None:
        """Train through all iterations, from the first or from the last checkpoint."""
        threads = self.threads()
        self.log.mark(total=self.iterations, threads=threads)
        with torch_threads(threads):
            first, permutation = self.restore(checkpoints.latest(self.plan.device))
            if first > 0:
                self.first_loss = float(store.open_run(self.plan.folder).table("training")["loss"].iloc[0])
            saved = time.monotonic()
            for iteration in range(first, self.iterations):
                epoch, position = divmod(iteration, self.per_epoch)
                if position == 0:
                    self.end_of_epoch(iteration, epoch)
                    permutation = self.shuffled()
                batch = permutation[position * self.batch_size : (position + 1) * self.batch_size]
                lr = rate(self.optimizer)
                loss, probes = self.step(iteration, self.augment(self.inputs, batch), self.targets[batch])
                self.record(iteration, epoch, loss, probes, lr)
                if time.monotonic() - saved > self.plan.study.training.checkpoint_seconds:
                    self.flush_probes()
                    checkpoints.save(iteration + 1, self.state(iteration + 1, permutation))
                    saved = time.monotonic()
            self.end_of_epoch(self.iterations, self.iterations // self.per_epoch, last=True)
            checkpoints.save(self.iterations, self.state(self.iterations, permutation))

    def threads(self) -> int:
        """Number of torch threads of the run: one if its iterations are too short to gain from more."""
        if self.plan.device.type != "cpu":
            return torch.get_num_threads()
        sample = self.inputs[torch.zeros(1, dtype=torch.int64, device="cpu")]
        work = self.batch_size * metrics.multiplications(self.model, sample)
        return 1 if work < WORTH_THREADS else torch.get_num_threads()

    @contextmanager
    def explaining(self, iteration: int) -> Iterator[None]:
        """Raise a DivergedError for a probe that failed because training has diverged, else a RunError."""
        try:
            yield
        except (CaptureError, MatrixError) as error:
            loss, peak = self.largest
            if loss > BLOWN_UP * self.first_loss:
                self.log.commit(probe=self.rows_without_kappa(iteration))
                raise diverged("loss", loss, peak, rate(self.optimizer)) from None
            if isinstance(error, (NotFiniteError, MatrixError)):
                raise DivergedError(
                    f"the probe found numbers out of range at iteration {iteration} ({error}): the run stopped, its "
                    "log is kept"
                ) from None
            raise RunError(
                f"the probe failed at iteration {iteration}: {error}; in [probe] of the study choose other layers or "
                "units, take fewer train_samples, or set train_every_epochs (or every) to 0"
            ) from None

    def rows_without_kappa(self, iteration: int) -> list[dict[str, Any]]:
        """Rows of the probe table of a mini-batch that could not be measured."""
        at = {"iteration": iteration, "epoch": iteration // self.per_epoch, "data": "batch"}
        units = self.prober.layers.units.items()
        return [at | {"layer": self.prober.names[place], "unit": unit} for place, numbers in units for unit in numbers]

    def shuffled(self) -> torch.Tensor:
        """The order of the samples in the next epoch."""
        return torch.randperm(len(self.targets), generator=self.order, device="cpu").to(self.targets.device)

    def record(self, iteration: int, epoch: int, loss: float, probes: Sequence[probing.Probe], lr: float) -> None:
        """Log an iteration and report the progress."""
        waits = all(probe.waits for probe in probes)
        if len(self.waiting) >= WAITING or self.log.due or not waits:
            self.flush_probes()
        self.log.training(iteration, epoch, loss, lr)
        self.waiting += [(iteration, epoch, probe) for probe in probes]
        if not waits:
            self.flush_probes()
        if self.on_progress is not None:
            self.on_progress(Progress(iteration + 1, self.iterations, loss, self.row))

    def flush_probes(self) -> None:
        """Compute and log κ for the probes in ``waiting``: in one batch, as training does not depend on them."""
        try:
            self.log_probes(self.prober.rows([probe for *_, probe in self.waiting]))
        except (NotFiniteError, MatrixError):
            # one by one, up to the one that is to blame
            waiting, self.waiting = self.waiting, []
            for entry in waiting:
                with self.explaining(entry[0]):
                    rows = self.prober.rows([entry[-1]])
                self.waiting = [entry]
                self.log_probes(rows)

    def due(self, iteration: int) -> bool:
        """Whether the mini-batch of an iteration is probed."""
        interval = self.plan.study.probe.every
        return interval > 0 and iteration % interval == 0

    def compares(self, iteration: int) -> bool:
        """Whether the probe of an iteration is the first of its epoch, wherever a run was broken off."""
        return (iteration - self.plan.study.probe.every) // self.per_epoch < iteration // self.per_epoch

    def state(self, iteration: int, permutation: torch.Tensor) -> dict[str, Any]:
        """State that decides how the run goes on before ``iteration``, for a checkpoint."""
        return {
            "iteration": iteration,
            "permutation": permutation,
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "method": self.method.state_dict(),
            "schedule": None if self.schedule is None else self.schedule.state_dict(),
            "order": self.order.get_state(),
            "augmentation": self.augment.generator.get_state(),
            "random": torch.get_rng_state(),
            "random_gpu": next((devices.runtime(device).get_rng_state(device) for device in self.devices), None),
        }

    def restore(self, state: dict[str, Any] | None) -> tuple[int, torch.Tensor]:
        """Restore a state; return the next iteration, and the order of the samples in its epoch."""
        if state is None:
            return 0, torch.empty(0, dtype=torch.int64, device="cpu")
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.method.load_state_dict(state["method"])
        if self.schedule is not None:
            self.schedule.load_state_dict(state["schedule"])
        self.order.set_state(state["order"].cpu())
        self.augment.generator.set_state(state["augmentation"].cpu())
        torch.set_rng_state(state["random"].cpu())
        for device in self.devices:
            devices.runtime(device).set_rng_state(state["random_gpu"].cpu(), device)
        return state["iteration"], state["permutation"]

    def step(self, iteration: int, inputs: torch.Tensor, targets: torch.Tensor) -> tuple[float, list[probing.Probe]]:
        """One iteration; returns its loss and its probes."""
        due = self.due(iteration)
        self.prober.layers.recorder.armed = due
        self.optimizer.zero_grad(set_to_none=True)
        again = self.beginning() if due else None
        output = self.model(inputs)
        self.prober.layers.recorder.armed = False
        loss_tensor = self.loss_fn(output, targets)
        self.method.observe(loss_tensor)
        penalty = self.method.penalty(loss_tensor)
        with self.plan.own_code():
            (loss_tensor if penalty is None else loss_tensor + penalty).backward()
        loss = loss_tensor.item()
        self.first_loss = loss if math.isnan(self.first_loss) else self.first_loss
        self.largest = max(self.largest, (loss, iteration))
        if not math.isfinite(loss):
            raise diverged("loss", loss, iteration, rate(self.optimizer))
        self.method.transform_gradients()
        # after the method has seen the batch, before the weights move: the P of this very step
        probes: list[probing.Probe] = []
        if again is not None:
            with self.explaining(iteration):
                probe = self.prober.batch(inputs, targets, output, again=again, check=self.compares(iteration))
                probes.append(probe if probe.waits else probing.Probe(None, self.prober.rows([probe])[0]))
        if iteration in self.plan.study.probe.at:
            with self.explaining(iteration):
                probes.append(self.prober.train(*self.probed_part()))
        self.optimizer.step()
        if self.schedule is not None:
            self.schedule.step()
        self.method.after_step()
        return loss, probes

    def beginning(self) -> Callable[[], AbstractContextManager[None]]:
        """Context in which the model computes what it does now: with this random state and these buffers."""
        # nothing else is seeded in a run
        random, buffers = untouched.RandomState.of_torch(self.devices), list(self.model.buffers())
        before = [buffer.clone() for buffer in buffers]

        def write(values: Sequence[torch.Tensor]) -> None:
            for buffer, value in zip(buffers, values, strict=True):
                buffer.copy_(value)

        @contextmanager
        def again() -> Iterator[None]:
            after = [buffer.clone() for buffer in buffers]
            write(before)
            try:
                with random.again():
                    yield
            finally:
                write(after)

        return again

    def end_of_epoch(self, iteration: int, epoch: int, *, last: bool = False) -> None:
        """Evaluate on the test set, and probe over the training set where it is due."""
        self.flush_probes()
        evaluation = self.evaluate()
        self.log.commit(evaluation=[{"iteration": iteration, "epoch": epoch, **evaluation}])
        test_loss = evaluation["test_loss"]
        assert test_loss is not None
        if not math.isfinite(test_loss):
            raise diverged("test loss", test_loss, iteration, rate(self.optimizer))
        interval = self.plan.study.probe.train_every_epochs
        if interval > 0 and (last or epoch % interval == 0):
            with self.explaining(iteration):
                self.waiting.append((iteration, epoch, self.prober.train(*self.probed_part())))
            self.flush_probes()

    def probed_part(self) -> tuple[dataset.Samples, torch.Tensor]:
        """The part of the training set that is probed."""
        samples = self.plan.study.probe.train_samples
        if samples is None:
            return self.inputs, self.targets
        rows = chosen(self.targets, samples)
        return dataset.selected(self.inputs, rows), self.targets[rows]

    def log_probes(self, probe_rows: Sequence[Sequence[probing.ProbeRow]]) -> None:
        """Log the training rows that wait and the rows of their probes in one transaction."""
        rows: dict[str, list[dict[str, Any]]] = {"probe": [], "readings": [], "statements": []}
        for (iteration, epoch, _), probe in zip(self.waiting, probe_rows, strict=True):
            at = {"iteration": iteration, "epoch": epoch}
            if probe[0].measured["data"] == "batch":
                self.row = probe[0].measured
            for row in probe:
                rows["probe"].append(at | row.measured)
                rows["readings"] += [at | reading for reading in row.readings]
                rows["statements"] += [at | outcome for outcome in row.statements]
        self.log.commit(**rows)
        self.waiting = []

    @torch.no_grad()
    def evaluate(self) -> dict[str, float | None]:
        """Mean loss on the test set, and the metrics of its classes or values."""
        total, right = 0.0, []
        samples, classes = len(self.test_inputs), self.data.classes
        chunk = EVALUATION_CHUNK[self.plan.study.model.architecture.kind]
        self.model.eval()
        for start in range(0, samples, chunk):
            part = slice(start, start + chunk)
            output, targets = self.model(self.test_inputs[part]), self.data.test_targets[part]
            total += self.loss_fn(output, targets).item() * len(targets)
            if classes:
                right.append(metrics.hits(output.flatten(0, -2), targets.flatten()))
        self.model.train()
        loss, targets = total / samples, self.data.test_targets
        if classes:
            scores = metrics.of_classes(torch.cat(right), targets.flatten(), classes)
        else:
            scores = metrics.of_values(loss, targets)
        if self.data.form.tokens:
            scores |= metrics.of_characters(loss)
        return {"test_loss": loss, **scores}
