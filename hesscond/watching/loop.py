"""The watch of a training loop: when it measures and what it reports, without disturbing the training."""

from __future__ import annotations

import logging
import math
import random
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.optim import Optimizer

from hesscond.errors import ConfigError, HesscondError, one_line, out_of_memory
from hesscond.methods.optimizers import named
from hesscond.operators.operator import as_number
from hesscond.problem import evaluation, wrappers
from hesscond.problem.devices import runtime
from hesscond.runs import log as run_log, place_name, store
from hesscond.sheets import CONDITION
from hesscond.watching.destinations import Destination, destinations
from hesscond.watching.measuring import Measuring, Row, rates_of

if TYPE_CHECKING:
    import pandas as pd
    from torch.distributed import ProcessGroup

logger = logging.getLogger("hesscond")

#: Largest multiple of ``every`` to which a budget lengthens it before blocks are left out.
LONGEST = 10

#: Columns of a block that are reported under its name.
SHOWN = (*(name for name in CONDITION if name not in ("nullity", "resolved", "solver")), "kappa_own")
#: Share of the time that measuring may take if neither ``every`` nor a budget is given.
DEFAULT_BUDGET = 0.05
#: Share of the time, and seconds of a probe, above which the cost of ``every`` is logged.
NOTICED = 0.1, 1.0


def watch(
    model: nn.Module,
    loss_fn: evaluation.LossFunction | None,
    probe_batch: evaluation.Batch | Iterable[evaluation.Batch],
    optimizer: Optimizer | Sequence[Optimizer] | Callable[[nn.Parameter], Any] | None = None,
    every: int | Callable[[int], bool] | None = None,
    layers: Iterable[str] | str | None = None,
    level: str = "layer",
    log: Any = None,
    budget: float | None = None,
    strict: bool = False,
    *,
    units: Sequence[int] | None = None,
    rtol: float = 1e-4,
    memory: float | str | None = None,
    seed: int = 0,
    group: ProcessGroup | None = None,
    name: str = "watch",
) -> Watch:
    """Measure κ, the ends of the spectrum and the preconditioned sharpness while a loop of your own trains.

    Training with and without the watch is the same, bit for bit: weights, optimizer, buffers and random state.

    Parameters
    ----------
    model, loss_fn, probe_batch
        As `hesscond.probe` takes them. The batch, or small stream of batches, is copied and stays the same. The model
        is measured in the mode that it is in, dropout with the same draws at each probe.
    optimizer
        Optimizer in whose coordinates κ is measured too: P with M = P Pᵀ of its last step −η M g, see
        `hesscond.methods.optimizers`. Several may be given; or a function of a parameter that returns M of a step −M g.
        Where M is not known (L-BFGS, your own) the watch goes on in plain coordinates, and the log says so once.
    every
        Number of optimizer steps between probes; or a function of the
        number of steps that says whether to measure. None: 200, and, unless one is given, a budget of 0.05.
    layers, level, units, rtol, memory
        As `hesscond.probe` takes them.
    log
        Destination of the numbers: a function of the dict that `Watch.step` returns, ``"tensorboard:DIR"``,
        ``"wandb"``, ``"mlflow"``, the folder of a run as studies write it, or a list of these.
    budget
        The largest share of the time that measuring may take, 0.05 say. A probe waits until enough time has passed
        since the last one; where that would be ten times ``every``, layers (or units of the one layer) are left out,
        chosen by ``seed``. Both are logged.
    strict
        Whether an error inside the watch is raised. Otherwise it is logged once as a warning, and is in the row.
    seed
        Seed of dropout's draws during measurements, and of the choice of what a budget leaves out.
    group
        Processes that all call the watch, each with its share of the probe batch. None: in a distributed training the
        process of rank 0 alone measures, on its own batch, and in the others `Watch.step` returns None.
    name
        Name of the training in a run folder.

    Raises
    ------
    ConfigError
        An argument that makes no sense; an optimizer of another model; a batch that the model does not run on; a
        package that a destination needs; a folder that is not free.

    Examples
    --------
    >>> import hesscond
    >>> _ = torch.manual_seed(0)
    >>> model = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3))
    >>> batch = torch.randn(20, 5), torch.randint(0, 3, (20,))
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> with hesscond.watch(model, nn.CrossEntropyLoss(), batch, optimizer, every=2) as watching:
    ...     for _ in range(4):
    ...         optimizer.zero_grad()
    ...         nn.functional.cross_entropy(model(batch[0]), batch[1]).backward()
    ...         optimizer.step()
    ...         row = watching.step()
    >>> row["hesscond/step"], row["hesscond/0/rank"]
    (4, 24)
    >>> list(watching.to_frame()["step"])
    [2, 2, 4, 4]
    """
    if every is None:
        every, budget = 200, DEFAULT_BUDGET if budget is None else budget
    wrappers.check_group(group)
    check_arguments(every, budget, seed, strict, name)
    due = every if callable(every) else lambda step, every=every: step % every == 0
    processes = torch.distributed.is_available() and torch.distributed.is_initialized()
    rank = group.rank() if group is not None else torch.distributed.get_rank() if processes else 0
    if group is None and rank != 0:
        # one of the processes of a distributed training that only train
        return Watch(None, optimizer, due)
    measuring = Measuring(
        model,
        loss_fn,
        probe_batch,
        optimizer,
        layers=layers,
        level=level,
        units=units,
        rtol=rtol,
        memory=memory,
        seed=seed,
        group=group,
    )
    length = every if isinstance(every, int) else None
    watching = Watch(measuring, optimizer, due, length, budget, strict=strict, seed=seed)
    if rank == 0:
        watching._destinations = destinations(log, lambda: watching._config(name))
    return watching


def check_arguments(every: Any, budget: Any, seed: Any, strict: Any, name: Any) -> None:
    """Raise a ConfigError for an argument of `watch` that makes no sense."""
    if budget is not None and (isinstance(budget, bool) or not isinstance(budget, (int, float)) or not 0 < budget < 1):
        raise ConfigError(f"budget must be a share of the time between 0 and 1, not {budget!r}")
    if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed < 2**63:
        raise ConfigError(f"seed must be a whole number from 0 on, not {seed!r}")
    if not isinstance(strict, bool):
        raise ConfigError(f"strict must be True or False, not {strict!r}")
    if not isinstance(name, str) or not name.strip() or not name.isprintable():
        raise ConfigError(f"name must be a name of the training, not {name!r}")
    if not callable(every) and (isinstance(every, bool) or not isinstance(every, int) or every < 1):
        raise ConfigError(
            f"every must be a positive whole number of steps, or a function of their number, not {every!r}"
        )


class Watch:
    """Watch of a training loop, which `watch` makes; a context manager that closes it.

    Attributes
    ----------
    steps
        Number of optimizer steps counted.
    left_out
        Names of blocks or units that are no longer measured, to keep the budget.
    seconds
        Time that all probes took, in seconds.
    """

    def __init__(
        self,
        measuring: Measuring | None,
        optimizer: Any,
        due: Callable[[int], bool],
        every: int | None = None,
        budget: float | None = None,
        strict: bool = False,
        seed: int = 0,
    ) -> None:
        self._idle = measuring is None
        if measuring is not None:
            self._measuring = measuring
        self._optimizer, self._due, self._every = optimizer, due, every
        self.budget, self.strict, self._seed = budget, strict, seed
        self.steps, self.seconds = 0, 0.0
        self.left_out: tuple[str, ...] = ()
        self._rows: list[Row] = []
        self._warned: set[str] = set()
        self._closed = False
        self._free_since = time.perf_counter()
        self._last_step, self._last_cost = 0, 0.0
        self._destinations: list[Destination] = []

    def _config(self, name: str) -> dict[str, Any]:
        """Contents of ``config.toml`` for a run folder: what a report needs; no study can repeat the run."""
        measuring, loss_fn = self._measuring, self._measuring.loss_fn
        loss = type(loss_fn).__name__ if isinstance(loss_fn, nn.Module) else getattr(loss_fn, "__name__", "loss")
        probe = {"layers": list(measuring.blocks), "units": "all", "levels": [measuring.level], "precision": "float64"}
        return {
            "name": name,
            "data": {"name": store.WATCHED},
            "model": {"name": name},
            "training": {"batch_size": measuring.samples, "loss": loss},
            "probe": probe,
            "run": {
                "method": named(self._optimizer) if isinstance(self._optimizer, Optimizer) else "watched",
                "seed": 0,
                "learning_rate": self._rate or 0.0,
                "versions": run_log.versions(sys.modules["hesscond"], torch),
            },
        }

    @property
    def _rate(self) -> float | None:
        """The largest learning rate."""
        return None if self._optimizer is None else max(map(float, rates_of(self._optimizer)), default=None)

    def __enter__(self) -> Watch:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, *_: object) -> None:
        if isinstance(error, KeyboardInterrupt):
            self._close("interrupted", "stopped by the user")
        elif error is not None:
            self._close("failed", one_line(error))
        else:
            self.close()

    def step(self, loss: torch.Tensor | float | None = None) -> dict[str, Any] | None:
        """Count an optimizer step, and measure if it is due: call it after every ``optimizer.step()``.

        Parameters
        ----------
        loss
            Loss of the step, for a run folder.

        Returns
        -------
        dict or None
            None if nothing was due. Else ``hesscond/step``, ``hesscond/seconds`` and for each block, LAYER or
            LAYER.UNIT, ``hesscond/LAYER/kappa``, ``kappa_lower``, ``kappa_upper``, ``rank``, ``negative`` (missing
            where they were not all counted), ``lambda_max``, ``lambda_min``, and with an optimizer ``kappa_own``, in
            its coordinates; and ``hesscond/sharpness_times_rate``: λ_max(PᵀHP) η, the largest over the layers, which
            bounds that of the network from below. A probe that failed has ``hesscond/error`` instead.

        Raises
        ------
        ConfigError
            The watch is closed; the loss is no number; its run folder holds an earlier training.
        """
        self._open("it takes no more steps")
        number = loss.detach() if isinstance(loss, torch.Tensor) else loss
        value = None if isinstance(number, bool) else as_number(number)
        if value is None and loss is not None:
            description = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, torch.Tensor) else repr(loss)
            raise ConfigError(f"watch.step takes the loss of the step, a number, not {description}")
        self.steps += 1
        if self._idle:
            return None
        self._training(value)
        return self._guarded(lambda: self._probed() if self._due(self.steps) and self._affordable() else {}) or None

    def _open(self, consequence: str) -> None:
        """Raise an error if the watch is closed."""
        if self._closed:
            raise ConfigError(f"the watch is closed: {consequence}")

    def _training(self, value: float | None) -> None:
        for destination in self._destinations:
            destination.check()
        if value is not None and self._destinations:
            rate = self._rate
            self._guarded(lambda: self._each(lambda receiver: receiver.training(self.steps, value, rate)))

    def _each(self, act: Callable[[Destination], None]) -> dict[str, Any]:
        """Let every destination act."""
        for destination in self._destinations:
            act(destination)
        return {}

    def _affordable(self) -> bool:
        """Whether a probe now keeps the budget; all processes of a group get the same answer."""
        if self.budget is None or self._last_step == 0:
            return True
        free = time.perf_counter() - self._free_since
        wanted = self._last_cost * (1 - self.budget) / self.budget
        answer = free >= wanted
        if not answer:
            done = self.steps - self._last_step
            step = max(free / done, 1e-9)
            needed = math.ceil(wanted / step)
            self._warn_once(
                "budget",
                f"a probe takes {self._last_cost:.3g} s, as long as {self._last_cost / step:.3g} steps: "
                f"to keep budget={self.budget:g} it is made about every {needed} steps",
            )
            if self._every is not None and needed > LONGEST * self._every:
                self._leave_out(LONGEST * self._every / needed)
        return self._measuring.agreed(answer)

    def _leave_out(self, share: float) -> None:
        """Measure only a share of the blocks, or of the units of the one block that is left."""
        measuring, draw = self._measuring, random.Random(self._seed)
        if measuring.level == "network" or (len(measuring.blocks) == 1 and measuring.level != "unit"):
            return
        single = len(measuring.blocks) == 1
        places: Sequence[Any] = measuring.seen_units if single else measuring.blocks
        if len(places) < 2:
            return
        kept = [places[k] for k in sorted(draw.sample(range(len(places)), max(1, int(share * len(places)))))]
        out = [place_name(measuring.blocks[0], left) if single else left for left in places if left not in kept]
        if single:
            measuring.units = measuring.seen_units = kept
        else:
            measuring.blocks = kept
        measuring.names = tuple(measuring.blocks)
        self.left_out += tuple(out)
        self._last_cost *= share
        self._warn_once(
            f"left out {len(self.left_out)}",
            f"budget={self.budget:g} does not allow for all blocks: from step {self.steps} on left out, chosen "
            f"by seed {self._seed}: {', '.join(out)}",
        )

    def _guarded(self, act: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Return what ``act`` returns; turn its exception into one warning and a row, unless strict."""
        try:
            return act()
        except Exception as error:
            if self.strict:
                raise
            sentence = str(error) if isinstance(error, HesscondError) else one_line(error)
            full = out_of_memory(error.__cause__ or error)
        # the frames of the exception are gone now, and with them what they held
        if full:
            sentence = f"out of memory, the probe is skipped: {sentence}"
            for device in self._measuring.devices:
                runtime(device).empty_cache()
        self._warn_once(sentence, f"step {self.steps}: {sentence}")
        metrics = {"hesscond/step": self.steps, "hesscond/error": sentence}
        self._rows.append({"step": self.steps, "error": sentence})
        for destination in self._destinations:
            try:
                destination.write(self.steps, metrics, [])
            except Exception as error:
                self._warn_once(type(destination).__name__, f"step {self.steps}: {one_line(error)}")
        return metrics

    def _warn_once(self, key: str, sentence: str) -> None:
        """Log a warning once."""
        if key not in self._warned:
            self._warned.add(key)
            logger.warning("hesscond.watch: %s", sentence)

    def _probed(self) -> dict[str, Any]:
        """Measure, write and return a probe."""
        began = time.perf_counter()
        step = (began - self._free_since) / (self.steps - self._last_step)
        try:
            rows, notes = self._measuring.rows()
        finally:
            self._free_since = time.perf_counter()
            self._last_step, self._last_cost = self.steps, self._free_since - began
            self.seconds += self._last_cost
        spent = self._last_cost / (self._last_cost + step * (self._every or math.inf))
        if self.budget is None and spent > NOTICED[0] and self._last_cost > NOTICED[1]:
            self._warn_once(
                "cost",
                f"a probe takes {self._last_cost:.3g} s, as long as {self._last_cost / step:,.0f} steps: with "
                f"every={self._every} that is {spent:.0%} of the time; budget=0.05 makes it less, or fewer layers=",
            )
        for note in notes:
            self._warn_once(note, note)
        metrics: dict[str, Any] = {"hesscond/step": self.steps, "hesscond/seconds": self._last_cost}
        for row in rows:
            place = place_name(row["layer"], row["unit"])
            metrics |= {f"hesscond/{place}/{key}": row[key] for key in SHOWN if row.get(key) is not None}
        sharp = [row["sharpness_times_rate"] for row in rows if "sharpness_times_rate" in row]
        if sharp:
            metrics["hesscond/sharpness_times_rate"] = max(sharp)
        self._rows += [{"step": self.steps, **row} for row in rows]
        self._each(lambda receiver: receiver.write(self.steps, metrics, rows))
        return metrics

    def to_frame(self) -> pd.DataFrame:
        """A row for each block at each probe: step, layer, unit and the columns of `hesscond.ProbeResult.to_frame`;
        with an optimizer also those in its coordinates; ``error`` for a probe that failed.
        """
        import pandas as pd

        first = ["step", "layer", "unit", "kappa", "kappa_lower", "kappa_upper"]
        frame = pd.DataFrame(self._rows)
        return frame.reindex(columns=[*first, *(name for name in frame.columns if name not in first)])

    def close(self) -> None:
        """Close the watch and its destinations; closing twice does nothing."""
        self._close("finished", "")

    def _close(self, status: str, message: str) -> None:
        if self._closed:
            return
        self._closed = True
        self._guarded(lambda: self._each(lambda receiver: receiver.close(status, message)))

    def state_dict(self) -> dict[str, Any]:
        """State from which a training can go on, without the arguments, for `torch.save`."""
        return {
            "steps": self.steps,
            "left_out": list(self.left_out),
            "names": None if self._idle or self._measuring.names is None else list(self._measuring.names),
            "units": None if self._idle or self._measuring.units is None else list(self._measuring.units),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from the state of a watch with the same arguments.

        Raises
        ------
        ConfigError
            It is not the state of a watch; the watch is closed.
        """
        self._open("it goes on with nothing")
        try:
            steps, names, units, left_out = int(state["steps"]), state["names"], state["units"], state["left_out"]
        except (KeyError, TypeError, ValueError):
            raise ConfigError("this is not the state of a watch: give what watch.state_dict() returned") from None
        if steps < 0:
            raise ConfigError(f"this is not the state of a watch: it has {steps} steps")
        self.steps = steps
        if left_out:
            self.left_out, self._measuring.names, self._measuring.units = tuple(left_out), tuple(names), units
            self._measuring.blocks = list(names)
        for destination in self._destinations:
            destination.resume()
