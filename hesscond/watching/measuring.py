"""Measurements of a watch at one moment of a training: κ in plain coordinates and in the optimizer's."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from hesscond.errors import ConfigError, HesscondError, out_of_memory
from hesscond.hessians.catalogue import Catalogue
from hesscond.methods import optimizers
from hesscond.probing import results
from hesscond.probing.entry import probe
from hesscond.problem import devices, evaluation, untouched, wrappers
from hesscond.problem.containers import is_batch
from hesscond.spectra import ConditionNumber, lanczos

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

#: One measured block: columns of the probe table, and further ones.
Row = dict[str, Any]


class Measuring:
    """A model, its loss and a batch that stays the same, measured repeatedly."""

    def __init__(
        self,
        model: nn.Module,
        loss_fn: evaluation.LossFunction | None,
        data: evaluation.Batch | Iterable[evaluation.Batch],
        optimizer: Any,
        *,
        layers: Iterable[str] | str | None,
        level: str,
        units: Sequence[int] | None,
        rtol: float,
        memory: float | str | None,
        seed: int,
        group: ProcessGroup | None,
    ) -> None:
        loss_fn = wrappers.checked_loss(model, loss_fn)
        # a replica of DistributedDataParallel would wait for the others
        self.model = model if group is not None else wrappers.unwrapped(model)
        self.loss_fn, self.optimizer, self.group = loss_fn, optimizer, group
        self.level, self.units, self.rtol, self.memory, self.seed = level, units, rtol, memory, seed
        if isinstance(layers, Iterable):
            layers = (layers,) if isinstance(layers, str) else tuple(layers)
        self.names: tuple[str, ...] | None = layers
        self.devices = devices.accelerators_of([*model.parameters(), *model.buffers()])
        # a schedule that begins with a warm-up may begin with a rate of 0
        if self.optimizer is not None and any(rates_of(self.optimizer) or [1]):
            with suppress(optimizers.UnknownOptimizerError):
                optimizers.at_work(wrappers.measurable(model), self.optimizer)
        with untouched.untouched_randomness(self.devices, untouched.generators_of(data)):
            batches = [data] if is_batch(data) else list(data)
        copies = [evaluation.converted(batch, None, copy=True) for batch in batches]
        self.data: Any = copies[0] if is_batch(data) else copies
        self.samples = sum(evaluation.samples_of(self.model, evaluation.checked_batch(batch)[0]) for batch in copies)
        self.seen_units: list[int] = []
        self._try()

    def _try(self) -> None:
        """Raise an error now for what would fail in every probe; nothing is decomposed yet."""
        try:
            with self.apart():
                self.blocks = list(self._probe(None))
        except HesscondError:
            raise
        except Exception as error:
            if out_of_memory(error):
                raise
            reason = (str(error).strip().splitlines() or [""])[0]
            raise ConfigError(
                f"the model and its loss do not run on the probe batch ({type(error).__name__}: {reason}): give one "
                "like those that it is trained on, on the model's device"
            ) from error

    @contextmanager
    def apart(self) -> Iterator[None]:
        """Run the block without the loop's contexts (autocast, no_grad), with the same random draws each time."""
        with ExitStack() as stack:
            # a random state of its own, so that two probes differ by the weights alone
            stack.enter_context(untouched.untouched_randomness(self.devices))
            torch.default_generator.manual_seed(self.seed)
            for device in self.devices:
                state = torch.Generator(device).manual_seed(self.seed).get_state()
                devices.runtime(device).set_rng_state(state, device)
            if torch.is_inference_mode_enabled():
                stack.enter_context(torch.inference_mode(False))
            stack.enter_context(torch.enable_grad())
            for kind in {"cpu", *(p.device.type for p in self.model.parameters())}:
                stack.enter_context(torch.autocast(kind, enabled=False))
            yield

    def rows(self) -> tuple[list[Row], list[str]]:
        """A row for each block, or unit of it, and notes on what is missing."""
        notes: list[str] = []
        method = self._at_work(notes)
        # where M = c I, κ is the same in both coordinates, and one probe has all
        c = None if method is None else method.multiple_of_identity()
        with self.apart():
            probe_result: results.ProbeResult | None = None
            plain: Mapping[str, results.LayerResult]
            whole = True
            if method is not None and c is None:
                try:
                    names, whole = self._moved(method, notes)
                    probe_result = self._probe(method, names)
                except ConfigError as error:
                    # the plain numbers may exist all the same, as those of a network with tied weights
                    notes.append(f"nothing is measured in the optimizer's coordinates: {error}")
                    method = None
            if probe_result is None:
                probe_result = plain = self._probe(None)
            elif self.level == "network" or not whole or not set(self.blocks) <= set(probe_result):
                plain = self._probe(None)
            else:
                plain = {name: result.plain for name, result in probe_result.items()}
            rows = []
            for name, given in plain.items():
                self.seen_units = list(given.units)
                result = probe_result.get(name)
                others = given.conditions if result is None else result.conditions
                for unit, kappa, kappa_own in zip(given.blocks, given.conditions, others, strict=True):
                    row = self._row(given, unit, kappa)
                    if method is not None and result is not None:
                        value, bound = largest(result, unit, kappa_own)
                        # in these coordinates the Hessian is c times that of the result
                        rate = method.rate * (1.0 if c is None else c)
                        row |= kappa_own.columns_in("own") | {
                            "coordinates": method.name,
                            "sharpness_times_rate": value * rate,
                            "sharpness_times_rate_lower": max(0.0, value - bound) * rate,
                        }
                        row["coordinates"] += "" if result.n_params == given.n_params else ", of what it moves"
                    rows.append(row)
        for name, why in probe_result.skipped.items():
            apart = name not in getattr(plain, "skipped", probe_result.skipped)
            where = " in the optimizer's coordinates" if apart else ""
            notes.append(f"{name} is not measured{where}: {why}")
        return rows, notes

    def agreed(self, answer: bool) -> bool:
        """Answer of the first process of the group, the same for all processes."""
        if self.group is None:
            return answer
        box = [answer]
        torch.distributed.broadcast_object_list(box, group=self.group, group_src=0)
        return box[0]

    def _at_work(self, notes: list[str]) -> optimizers.AtWork | optimizers.Given | None:
        """Coordinates of the optimizer; None, with a note, if it has none or none yet."""
        if self.optimizer is None:
            return None
        try:
            method = optimizers.at_work(wrappers.measurable(self.model), self.optimizer)
            method.refuse_no_step()
        except ConfigError as error:
            notes.append(f"nothing is measured in the optimizer's coordinates: {error}")
            return None
        return method

    def _moved(
        self, method: optimizers.AtWork | optimizers.Given, notes: list[str]
    ) -> tuple[tuple[str, ...] | None, bool]:
        """Layers in which the optimizer moves something, and whether it moves all that is measured."""
        if self.level == "network":
            return self.names, True
        catalogue = Catalogue(wrappers.measurable(self.model))
        parameters = {name: catalogue.block(name).parameters for name in self.blocks}
        still = {name: why for name, keys in parameters.items() if (why := method.unmoved(keys))}
        left = {name: next(iter(why.values())) for name, why in still.items() if len(why) == len(parameters[name])}
        names = tuple(name for name in self.blocks if name not in left)
        if names:
            notes += [f"{name} is not measured in the optimizer's coordinates: it {why}" for name, why in left.items()]
        return (names or tuple(self.blocks), False) if still else (self.names, True)

    def _probe(
        self, method: optimizers.AtWork | optimizers.Given | None, names: tuple[str, ...] | None = None
    ) -> results.ProbeResult:
        return probe(
            self.model,
            self.loss_fn,
            self.data,
            self.names if names is None else names,
            self.level,
            method=method,
            units="all" if self.units is None else self.units,
            rtol=self.rtol,
            memory=self.memory,
            group=self.group,
        )

    def _row(self, result: results.LayerResult, unit: int | None, kappa: ConditionNumber) -> Row:
        """The columns in plain coordinates."""
        return {
            "layer": result.name,
            "unit": unit,
            "samples": self.samples,
            "n_params": kappa.rank + kappa.nullity,
            "lambda_max_error": self.rtol * kappa.lambda_max + result.error(unit),
            "coordinates": "plain",
            **kappa.columns,
        }


def largest(result: results.LayerResult, unit: int | None, kappa: ConditionNumber) -> tuple[float, float]:
    """Largest eigenvalue (0 if none is positive), and a bound of its error."""
    if isinstance(result, results.NetworkResult):
        top = lanczos(result.operator, 1, "top", tol=1e-6)
        value = float(top.eigenvalues[0])
        return max(0.0, value), value - float(top.lower[0]) + result.uncertainty
    value = kappa.lambda_max
    if kappa.counted_negative != 0:
        value = float(next(iter(result.block(unit).eigenvalues()), 0.0))
    value = max(0.0, value)
    return value, 1e-8 * kappa.lambda_max + result.error(unit)


def rates_of(optimizer: Any) -> list[Any]:
    """Learning rates of the parameter groups of one or several optimizers, as far as there are any."""
    several = optimizer if isinstance(optimizer, (list, tuple)) else [optimizer]
    if not several:
        raise ConfigError("no optimizer was given: leave optimizer= out, or name those that train the model")
    groups = [group for candidate in several for group in getattr(candidate, "param_groups", ())]
    return [group["lr"] for group in groups if "lr" in group]
