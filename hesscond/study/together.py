"""Seeds of one network trained together: one pass over stacked weights for all, and a run folder for each.

What is done once for all of them is the pass, its gradients and the optimizer's step. The rest is that of separate
runs: data order, augmentation, probes, evaluations, log and checkpoints. Nothing in a pass mixes seeds, and the
optimizer treats every weight by itself; the numbers differ from those of separate runs by rounding only, as products of
stacked matrices are summed in another order.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from hesscond.capture.randomness import RandomState, gpus_of
from hesscond.data import Dataset
from hesscond.errors import ConfigError, DivergedError
from hesscond.spectra.threads import one_thread
from hesscond.study.checkpoint import Checkpoints
from hesscond.study.probing import ProbeRow
from hesscond.study.runner import (
    Progress,
    RunPlan,
    Training,
    check_plan,
    closed_at_end,
    diverged,
    probing,
    rate,
    seeded,
)
from hesscond.study.schedule import scheduler
from hesscond.study.stacking import JointPass, obstacle, recorded_pass, stacked_state
from hesscond.study.store import RunLog, check_free

#: Multiplications of a forward pass below which several threads gain nothing, and lose tenfold beside other work.
WORTH_THREADS = 10**8


@dataclass(frozen=True)
class JointProgress(Progress):
    """How far the first of the runs is that is not over.

    Attributes
    ----------
    each
        Tells it of every run, None of one that is over: made up when asked for.
    """

    each: Callable[[], list[Progress | None]]


def run_together(
    plans: Sequence[RunPlan], data: Dataset, on_progress: Callable[[JointProgress], None] | None = None
) -> list[DivergedError | None]:
    """Train, probe and log the runs of several seeds, in one pass an iteration.

    Each writes its own run folder, the same as `hesscond.study.run` writes up to rounding. One that diverges is over;
    the others go on. Runs that were broken off go on by ``run(plan, data, resume=True)``, each by itself.

    Parameters
    ----------
    plans
        They differ in seed and folder only.
    data
        On the plans' device.
    on_progress
        Called after every iteration.

    Returns
    -------
    list of DivergedError or None
        How each run diverged, if it did.

    Raises
    ------
    ConfigError
        The plans differ in more, do not fit the data, or cannot be trained together (`obstacle`); a folder is not free.
    RunError
        A folder cannot be written any more; another process works on it. All runs stop.
    """
    check_alike(plans)
    for plan in plans:
        check_plan(plan, data)
    if reason := obstacle(plans[0], data):
        raise ConfigError(f"seeds of method {plans[0].method!r} cannot be trained together: {reason}")
    with ExitStack() as all_runs:
        seeds = [Seed.begun(plan, data, all_runs.enter_context(ExitStack())) for plan in plans]
        together = Together(seeds, on_progress)
        with one_thread() if together.small else nullcontext():
            together.run()
    return [seed.ended for seed in seeds]


def is_new(plan: RunPlan) -> bool:
    """Whether a run has not begun: its folder is free."""
    try:
        check_free(plan.folder)
    except ConfigError:
        return False
    return True


def check_alike(plans: Sequence[RunPlan]) -> None:
    """Refuse plans that differ in more than seed and folder.

    Raises
    ------
    ConfigError
        They do, or two have the same folder, or there is none.
    """
    if not plans:
        raise ConfigError("there is no run to train: give at least one plan")
    if any(replace(plan, seed=plans[0].seed, folder=plans[0].folder) != plans[0] for plan in plans):
        raise ConfigError("runs that are trained together differ in seed and folder only: give others apart")
    if len({Path(plan.folder).absolute() for plan in plans}) < len(plans):
        raise ConfigError("two of the runs have the same folder: give each its own")


@dataclass
class Seed:
    """One of the runs.

    Attributes
    ----------
    training
        Its state, as of a run by itself.
    checkpoints
        Its own.
    random
        Torch's random state in it: nothing draws from it.
    life
        Closes its log and gives its folder free.
    ended
        How it diverged.
    loss
        Of its last iteration.
    """

    training: Training
    checkpoints: Checkpoints
    random: RandomState
    life: ExitStack
    ended: DivergedError | None = None
    loss: float = math.nan

    @classmethod
    def begun(cls, plan: RunPlan, data: Dataset, life: ExitStack) -> Seed:
        """A run in a free folder, before its first iteration."""
        check_free(plan.folder)
        checkpoints = life.enter_context(Checkpoints(plan.folder))
        log = RunLog(plan.folder, plan.config(data))
        life.enter_context(closed_at_end(log))
        with seeded(plan):
            training = Training(plan, data, log, None)
            return cls(training, checkpoints, RandomState.now(gpus_of([training.targets])), life)

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Of what this run does by itself, a divergence ends this run only."""
        try:
            with self.random.again():
                yield
        except DivergedError as error:
            self.ended = error
            self.life.__exit__(type(error), error, error.__traceback__)


class Together:
    """Runs while they are trained.

    Parameters
    ----------
    seeds
        Their networks' parameters become views into stacked ones.
    on_progress
        See `run_together`.
    """

    def __init__(self, seeds: Sequence[Seed], on_progress: Callable[[JointProgress], None] | None) -> None:
        self.seeds, self.on_progress = seeds, on_progress
        first = self.first = seeds[0].training
        # which of the network's parameters the optimizer has in which of its groups
        names = {id(parameter): name for name, parameter in first.model.named_parameters()}
        self.parameters, self.buffers = stacked_state([seed.training.model for seed in seeds])
        self.trained = [p for p in self.parameters.values() if p.requires_grad]
        groups = [
            {**group, "params": [self.parameters[names[id(p)]] for p in group["params"]]}
            | {"lr": group.get("initial_lr", group["lr"])}
            for group in first.optimizer.param_groups
        ]
        kind: Any = type(first.optimizer)
        self.optimizer: torch.optim.Optimizer = kind(groups)
        self.schedule = scheduler(
            self.optimizer, first.plan.study.schedule, per_epoch=first.per_epoch, iterations=first.iterations
        )
        self.joint: JointPass | None = None

    @property
    def small(self) -> bool:
        """Whether a forward pass of a fully connected network takes too few multiplications for several threads."""
        # stacked: a matrix has 3 dimensions, kernels of a convolution more, and are used many times a sample
        if any(p.dim() > 3 for p in self.parameters.values()):
            return False
        return sum(p.numel() for p in self.parameters.values()) * self.first.batch_size < WORTH_THREADS

    def alive(self) -> list[Seed]:
        """The runs that are not over; the weights of the others stay in the stack, and nothing reads them."""
        return [seed for seed in self.seeds if seed.ended is None]

    def run(self) -> None:
        """All iterations."""
        first, saved = self.first, time.monotonic()
        for seed in self.seeds:
            seed.training.log.mark(total=first.iterations)
        for iteration in range(first.iterations):
            epoch, position = divmod(iteration, first.per_epoch)
            if position == 0:
                self.end_of_epoch(iteration, epoch)
                permutations = torch.stack([seed.training.shuffled() for seed in self.seeds])
            if not self.alive():
                return
            batches = permutations[:, position * first.batch_size : (position + 1) * first.batch_size]
            lr = rate(self.optimizer)
            for seed, loss, rows in self.step(iteration, self.augmented(batches), first.targets[batches]):
                seed.training.record(iteration, epoch, loss, rows, lr)
                seed.loss = loss
            if self.on_progress is not None and self.alive():
                self.on_progress(self.progress(iteration + 1))
            if time.monotonic() - saved > first.plan.study.training.checkpoint_seconds:
                self.save(iteration + 1, permutations)
                saved = time.monotonic()
        self.end_of_epoch(first.iterations, first.iterations // first.per_epoch, last=True)
        self.save(first.iterations, permutations)

    def progress(self, iteration: int) -> JointProgress:
        """How far the runs are."""

        def of(seed: Seed) -> Progress:
            return Progress(iteration, self.first.iterations, seed.loss, seed.training.row)

        def each() -> list[Progress | None]:
            return [of(seed) if seed.ended is None else None for seed in self.seeds]

        return JointProgress(**vars(of(self.alive()[0])), each=each)

    def augmented(self, batches: torch.Tensor) -> torch.Tensor:
        """The inputs of the runs' mini-batches (n, N), each changed from its own run's generator."""
        # faster than indexing with (n, N) at once
        inputs = self.first.inputs.index_select(0, batches.flatten()).unflatten(0, batches.shape)
        if not self.first.augment.changes:
            return inputs
        return torch.stack([seed.training.augment(own) for seed, own in zip(self.seeds, inputs, strict=True)])

    def step(
        self, iteration: int, inputs: torch.Tensor, targets: torch.Tensor
    ) -> list[tuple[Seed, float, list[ProbeRow]]]:
        """One iteration; returns the runs that are not over after it, their losses and their probes' rows."""
        if self.joint is None:
            model, loss_fn = self.first.model, self.first.loss_fn
            self.joint = recorded_pass(model, loss_fn, self.parameters, self.buffers, inputs, targets)
        with torch.no_grad():
            losses, gradients = self.joint(self.parameters, self.buffers, inputs, targets)
        for parameter, gradient in zip(self.trained, gradients, strict=True):
            parameter.grad = gradient
        found = []
        for number, (seed, loss) in enumerate(zip(self.seeds, losses.tolist(), strict=True)):
            if seed.ended is None:
                rows = self.probed(seed, iteration, loss, inputs[number], targets[number])
            if seed.ended is None:
                found.append((seed, loss, rows))
        self.optimizer.step()
        if self.schedule is not None:
            self.schedule.step()
        return found

    def probed(
        self, seed: Seed, iteration: int, loss: float, inputs: torch.Tensor, targets: torch.Tensor
    ) -> list[ProbeRow]:
        """The probe's rows of one run's mini-batch; one whose loss or numbers are not finite is over."""
        rows: list[ProbeRow] = []
        finite = math.isfinite(loss)
        if finite and not self.first.due(iteration):
            return rows
        with seed.alone():
            if not finite:
                raise diverged("loss", loss, iteration)
            with probing(iteration):
                # the recorder has seen no pass of this run, so the output is not asked for
                training = seed.training
                rows = training.prober.batch_rows(inputs, targets, targets, check=training.compares(iteration))
        return rows

    def end_of_epoch(self, iteration: int, epoch: int, *, last: bool = False) -> None:
        """As each run does it."""
        for seed in self.alive():
            with seed.alone():
                seed.training.end_of_epoch(iteration, epoch, last=last)

    def save(self, iteration: int, permutations: torch.Tensor) -> None:
        """A checkpoint of each run, from which it goes on by itself."""
        for number, seed in enumerate(self.seeds):
            if seed.ended is not None:
                continue
            training = seed.training
            training.optimizer.load_state_dict(self.optimizer_state(number))
            if training.schedule is not None and self.schedule is not None:
                training.schedule.load_state_dict(self.schedule.state_dict())
            with seed.random.again():
                state = training.state(iteration, permutations[number].clone())
            # torch would save the whole stack with a view into it
            state["model"] = {name: value.clone() for name, value in state["model"].items()}
            training.log.commit()
            seed.checkpoints.save(iteration, state)

    def optimizer_state(self, number: int) -> dict[str, Any]:
        """What the optimizer of one run would give by itself."""
        state = self.optimizer.state_dict()
        stacked = [parameter for group in self.optimizer.param_groups for parameter in group["params"]]

        def own(index: int, value: Any) -> Any:
            if not isinstance(value, torch.Tensor):
                return value
            return (value[number] if value.shape == stacked[index].shape else value).clone()

        moments = {i: {key: own(i, value) for key, value in held.items()} for i, held in state["state"].items()}
        return {**state, "state": moments}
