"""κ of the layers of a model in training, from the passes that its steps make."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn
from torch.nn.utils import parametrize

from hesscond.capture import FeatureStatistics, kinds, recorder
from hesscond.capture.captured import LayerCapture
from hesscond.capture.capturing import capture
from hesscond.capture.statistics import by_shape, channel_statistics_of_each
from hesscond.errors import CaptureError
from hesscond.hessians import CentringScaling, HessianOperator, ParameterMap, factored, parameters
from hesscond.hessians.build import unit_hessian
from hesscond.hessians.coordinates import base
from hesscond.hessians.network_hessian import BlockSource
from hesscond.hessians.streaming import stream
from hesscond.methods.base import Method
from hesscond.methods.bnp import from_statistics
from hesscond.operators.threads import one_thread
from hesscond.probing.check import CheckDirection, ReferenceProducts, agrees, most_curved, refuse_failed
from hesscond.problem import MEMORY, evaluation
from hesscond.spectra import ConditionNumber

#: Largest tensor that a waiting probe keeps.
KEPT = 2**17


#: Makes a context with the random state at the start of a pass.
Again = Callable[[], AbstractContextManager[None]]


class ProbeData(NamedTuple):
    """Data of a probe, with what is needed to make and check Hessians of them."""

    name: str  # ``"batch"`` or ``"train"``
    pairs: evaluation.Batch | Iterable[evaluation.Batch]
    hessian: base.HessianMaker
    checks: Mapping[str, CheckDirection]  # directions along which the Hessian was compared with the model, by layer
    again: Again = nullcontext  # context in which the model is evaluated again


class Inputs(NamedTuple):
    """Statistics of a layer's inputs, and a function that returns ĤU or its triangular factor (no rows if unread)."""

    statistics: FeatureStatistics
    centred: Callable[[], np.ndarray]


class Systems(NamedTuple):
    """Coordinates of a method for a layer at a step, those of its readings, and its diagnostics."""

    own: base.Coordinates | None
    readings: Mapping[str, base.Coordinates | None]
    diagnostics: Mapping[str, Any]

    @property
    def by_name(self) -> dict[str, base.Coordinates | None]:
        """All coordinates, by name."""
        return {"own": self.own, **self.readings}


class Unit(NamedTuple):
    """Unit of a layer and its Hessian, in the plain parameters."""

    data: ProbeData
    place: str
    number: int
    samples: int
    hessian: base.BlockHessian
    inputs: Inputs
    systems: Systems


class TakenProbe(NamedTuple):
    """Probe of a mini-batch before κ is computed, with everything that the next step changes."""

    data: ProbeData
    samples: int
    captured: recorder.Recorded | Mapping[str, LayerCapture]  # the training pass, or captures of the layers
    systems: Mapping[str, Any]  # `Systems` by layer, or snapshots of the method from which they are made
    waits: bool  # κ may be computed after the next steps: it needs neither model nor method


class UnitConditions(NamedTuple):
    """κ of a unit in each of its coordinates, with the trace of its Hessian and P of the raw statistics."""

    unit: Unit
    kappa: Mapping[str, ConditionNumber]  # "plain", "raw", "own", and the method's readings
    trace: float
    raw: CentringScaling


@dataclass(kw_only=True)
class TrainedLayers:
    """Dense and convolutional layers of a model in training, measured unit by unit in the method's coordinates.

    ``layers`` and ``units`` are by place in the model that the method built, ``names`` are those of a study.
    """

    model: nn.Module
    loss_fn: evaluation.LossFunction
    method: Method
    layers: Mapping[str, kinds.Layer]
    units: Mapping[str, tuple[int, ...]]
    names: Mapping[str, str]
    dtype: torch.dtype | None  # of the forward pass; None: that of the training
    rtol: float
    records: bool  # whether the training pass itself is measured where that suffices, not another pass
    keeps_inputs: bool  # whether the centred inputs of the layers are wanted
    evaluates_again: bool  # whether the model is evaluated again for a measured unit

    def __post_init__(self) -> None:
        self.recorder = recorder.Recorder(self.layers)
        self._differentiated: set[str] = set()
        # a probe that waits is not evaluated again, and keeps no inputs: the next batch takes their place in memory
        self._kept = ProbeData("batch", (), self.maker(()), {})
        self._loss_is_known = False

    def maker(self, data: Any) -> base.HessianMaker:
        """Return a function that makes operators of the loss over some data."""
        return partial(HessianOperator, self.model, self.loss_fn, data)

    def take(self, batch: evaluation.Batch, output: torch.Tensor, again: Again, *, check: bool) -> TakenProbe:
        """Take a probe of the mini-batch whose training pass gave ``output`` while the recorder was armed.

        ``again`` restores the random state and buffers of that pass; ``check``: compare captures with the model's own
        derivatives.
        """
        targets = batch[1]
        recorded = self.recorder.recorded(output, targets) if self.records else None
        self.recorder.seen.clear()
        waits = self._loss_is_known and not check and not self.evaluates_again and is_small(recorded)
        if recorded is not None and not self._loss_is_known:
            self._loss_is_known = recorder.Recorded.captures([recorded], self.loss_fn, self.units) is not None
        captured: recorder.Recorded | Mapping[str, LayerCapture] = {}
        if recorded is not None and self._loss_is_known:
            captured = recorded
        elif self.units:
            with again():
                captured = self.capture(*batch)
        checks: dict[str, CheckDirection] = {}
        if check:
            with again():
                checks = self.compared(self._captures([captured])[0], batch)
        systems: dict[str, Any] = {}
        for place in self.units:
            systems[place] = state = self.method.snapshot(place) or self.systems(place)
            if waits and isinstance(state, Systems):
                try:
                    systems[place] = Systems(*copied([*state], KEPT))
                except TypeError:
                    waits = False
        data = self._kept if waits else ProbeData("batch", batch, self.maker(batch), checks, again)
        return TakenProbe(data, len(targets), captured, systems, waits)

    def capture(self, inputs: torch.Tensor, targets: torch.Tensor) -> dict[str, LayerCapture]:
        """Captures of all layers on a batch."""
        names, pair = list(self.units), (inputs, targets)
        return capture(self.model, self.loss_fn, pair, names, units=self.units, dtype=self.dtype)

    def measured(self, probes: Sequence[TakenProbe]) -> list[list[UnitConditions]]:
        """κ of the units of several probes; blocks of one shape are decomposed together, and no digit changes."""
        # how several threads share a sum depends on what is summed up with it
        with one_thread() if all(is_small(probe.captured) for probe in probes) else nullcontext():
            captures = self._captures([probe.captured for probe in probes])
            inputs = [captured.inputs for layers in captures for captured in layers.values()]
            statistics = iter(channel_statistics_of_each(inputs))
        by_probe: list[list[Unit]] = []
        for probe, layers, systems in zip(probes, captures, self._systems_at(probes), strict=True):
            units = []
            for place, captured in layers.items():
                own_statistics = next(statistics)
                centred = partial(centred_rows, captured.h) if self.keeps_inputs else unread
                layer_inputs = Inputs(own_statistics, partial(centred, own_statistics))
                for unit in captured.units:
                    hessian = unit_hessian(captured, unit, MEMORY)
                    units.append(Unit(probe.data, place, unit, probe.samples, hessian, layer_inputs, systems[place]))
            by_probe.append(units)
        conditions = iter(self.conditions([unit for units in by_probe for unit in units]))
        return [[*islice(conditions, len(units))] for units in by_probe]

    def streamed(
        self, chunks: Callable[[], Iterator[tuple[dict[str, LayerCapture], float]]], data: ProbeData, samples: int
    ) -> list[UnitConditions]:
        """κ of the units on data that are read in chunks of captures, each with its weight."""
        hessians, statistics = stream(chunks(), MEMORY) if self.units else ({}, {})
        factors: dict[str, np.ndarray] = {}
        if self.keeps_inputs:
            # once more, now that the means are known: a factor of Ĥ itself would lose digits when it is centred
            for captures, _ in chunks():
                for place, captured in captures.items():
                    rows = centred_rows(captured.h, statistics[place])
                    stacked = np.vstack([factors[place], rows]) if place in factors else rows
                    factors[place] = np.asarray(np.linalg.qr(stacked, mode="r"))
        layer_inputs = {
            place: Inputs(totals, partial(factors.__getitem__, place) if place in factors else partial(unread, totals))
            for place, totals in statistics.items()
        }
        systems = {place: self.systems(place) for place in self.units}
        return self.conditions(
            [
                Unit(data, place, unit, samples, hessian, layer_inputs[place], systems[place])
                for (place, unit), hessian in hessians.items()
                if unit is not None
            ]
        )

    def conditions(self, units: Sequence[Unit]) -> list[UnitConditions]:
        """κ of units in all their coordinates; factors of one shape are decomposed together."""
        rtol = self.rtol
        raws = [self._raw(unit) for unit in units]
        known = [self._by_charts(unit) for unit in units]
        linear = [self._linear(unit, raw, by_chart) for unit, raw, by_chart in zip(units, raws, known, strict=True)]
        # several names may mean one P
        distinct = [list({id(P): P for P in preconditioners.values()}.values()) for preconditioners in linear]
        hessians = {k: u.hessian for k, u in enumerate(units) if isinstance(u.hessian, factored.FactoredHessian)}
        traces = dict(zip(hessians, factored.traces_of([*hessians.values()]), strict=True))
        changed = [hessian.in_coordinates(P) for k, hessian in hessians.items() for P in distinct[k]]
        together = iter(factored.conditions_of(changed, rtol=rtol))
        conditions = []
        for k, unit in enumerate(units):
            if k in hessians:
                kappas, trace = [next(together) for _ in distinct[k]], traces[k]
            else:
                kappas = [unit.hessian.in_coordinates(P).condition_number(rtol=rtol) for P in distinct[k]]
                trace = float(unit.hessian.diagonal().sum())
            numbers = {id(P): kappa for P, kappa in zip(distinct[k], kappas, strict=True)}
            kappa = known[k] | {name: numbers[id(P)] for name, P in linear[k].items()}
            conditions.append(UnitConditions(unit, kappa, trace, raws[k]))
        return conditions

    def compared(self, captures: Mapping[str, LayerCapture], batch: evaluation.Batch) -> dict[str, CheckDirection]:
        """Compare each layer's most curved unit with the model; return the directions of the comparison."""
        directions = {}
        for place, captured in captures.items():
            layer, unit = self.layers[place], most_curved(captured)
            block = unit_hessian(captured, unit, MEMORY)
            with weight_as_parameter(self.model, place, layer) as named:
                layout, whole = (parameters.UnitLayout(self.model, {place: layer}, of, named) for of in (unit, None))
                direction = CheckDirection.of(block, layout, whole, unit, dtype=self.dtype)
                reference = ReferenceProducts(self.model, self.loss_fn, dict(named), self.dtype)
                # whether the model's second derivatives are those of its gradient is a question of its code
                reference.differentiates = place not in self._differentiated
                self._differentiated.add(place)
                reference.add(batch, [direction])
                verdict = reference.verdict(direction, block)
            refuse_failed(self.names[place], verdict, "the capture does not hold for this layer")
            directions[place] = direction
        return directions

    def _captures(
        self, captured: Sequence[recorder.Recorded | Mapping[str, LayerCapture]]
    ) -> list[Mapping[str, LayerCapture]]:
        """Captures of several probes; those of training passes of one form are made together."""
        by_probe = [{} if isinstance(data, recorder.Recorded) else data for data in captured]
        passes = {k: run for k, run in enumerate(captured) if isinstance(run, recorder.Recorded)}
        at = list(passes)
        for members in by_shape([run.output for run in passes.values()], [run.form for run in passes.values()]):
            by_pass = recorder.Recorded.captures([passes[at[k]] for k in members], self.loss_fn, self.units)
            assert by_pass is not None
            for k, captures in zip(members, by_pass, strict=True):
                by_probe[at[k]] = captures
        return by_probe

    def _systems_at(self, probes: Sequence[TakenProbe]) -> list[dict[str, Systems]]:
        """Systems of each layer at each probe."""
        by_probe: list[dict[str, Any]] = [dict(probe.systems) for probe in probes]
        for place in self.units:
            pending_systems = [systems for systems in by_probe if not isinstance(systems[place], Systems)]
            if pending_systems:
                pairs = self.method.from_snapshots(place, [systems[place] for systems in pending_systems])
                for systems, (system, diagnostics) in zip(pending_systems, pairs, strict=True):
                    systems[place] = Systems(system, {}, diagnostics)
        return by_probe

    def systems(self, place: str) -> Systems:
        """Coordinates of the method for a layer at this step."""
        return Systems(
            self.method.checked_coordinates(place), self.method.readings(place), self.method.diagnostics(place)
        )

    def _raw(self, unit: Unit) -> CentringScaling:
        """P of the raw statistics of the inputs that a unit sees."""
        geometry = kinds.Geometry.of(self.layers[unit.place])
        return from_statistics(of_group(unit.inputs.statistics, geometry, unit.number), bias=geometry.bias)

    def _by_charts(self, unit: Unit) -> dict[str, ConditionNumber]:
        """κ in the method's coordinates that are not given by a matrix P, by name."""
        kappas: dict[str, ConditionNumber] = {}
        charts: dict[int, ConditionNumber] = {}
        for name, system in unit.systems.by_name.items():
            if isinstance(system, base.Chart):
                if id(system) not in charts:
                    with unit.data.again():
                        block = BlockSource(unit.data.hessian, MEMORY).block(system, unit.place, unit.number)
                        charts[id(system)] = block.condition_number(rtol=self.rtol)
                kappas[name] = charts[id(system)]
        return kappas

    def _linear(
        self, unit: Unit, raw: CentringScaling, known: Mapping[str, ConditionNumber]
    ) -> dict[str, base.Preconditioner | None]:
        """P of a unit in all coordinates that are not ``known``, checked if the unit has a direction of comparison."""
        direction = unit.data.checks.get(unit.place)
        source = BlockSource(unit.data.hessian, MEMORY, lambda *_: unit.hessian)
        systems: dict[str, base.Coordinates | None] = {"plain": None, "raw": raw, **unit.systems.by_name}
        preconditioners = {}
        for name, system in systems.items():
            if name in known:
                continue
            block = source.block(system, unit.place, unit.number)
            if direction is not None and direction.unit == unit.number and not agrees(block, direction):
                place = self.names[unit.place]
                raise CaptureError(f"layer {place!r}: the Hessian in the coordinates {name!r} is not PᵀHP")
            preconditioners[name] = block.P
        return preconditioners


def is_small(captured: recorder.Recorded | Mapping[str, LayerCapture] | None) -> bool:
    """Whether ``captured`` is a training pass that is small enough to be kept."""
    return isinstance(captured, recorder.Recorded) and captured.size <= KEPT


def copied(value: Any, room: int) -> Any:
    """Copy of coordinates that no step changes; a TypeError if it needs more than ``room`` numbers."""
    if isinstance(value, torch.Tensor):
        if value.numel() > room:
            raise TypeError
        return value.clone()
    if value is None or isinstance(value, (str, int, float)):
        return value
    if type(value) in (list, tuple):
        return type(value)([copied(part, room) for part in value])
    if isinstance(value, dict):
        return {key: copied(part, room) for key, part in value.items()}
    if isinstance(value, (base.Preconditioner, ParameterMap)):
        # a `Chart` evaluates the model
        copy = object.__new__(type(value))
        vars(copy).update(copied(vars(value), room))
        return copy
    raise TypeError


def unread(statistics: FeatureStatistics) -> np.ndarray:
    """(0, k + 1): no rows of [e, H − eμᵀ]."""
    return np.empty((0, 1 + int((~statistics.dead).sum())))


def of_group(statistics: FeatureStatistics, geometry: kinds.Geometry, unit: int) -> FeatureStatistics:
    """Statistics of the inputs that a unit sees: those of its group."""
    if geometry.groups == 1:
        return statistics
    features = slice(geometry.group(unit) * geometry.fan_in, (geometry.group(unit) + 1) * geometry.fan_in)
    parts = (statistics.mu, statistics.sum_squares, statistics.low, statistics.high)
    return FeatureStatistics(statistics.count, *(part[features] for part in parts))


def centred_rows(h: torch.Tensor, statistics: FeatureStatistics) -> np.ndarray:
    """[e, H − eμᵀ] (N, k + 1), features that are constant over all the data left out."""
    centred = (h.to(torch.float64) - statistics.mu)[:, ~statistics.dead]
    return torch.cat([centred.new_ones(len(h), 1), centred], 1).cpu().numpy()


class Shift(nn.Module):
    """Parametrization W + δ with δ = 0: derivatives in δ are derivatives in a weight computed from other parameters."""

    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.zeros_like(weight))

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        """Return the shifted weight."""
        return weight + self.shift


@contextmanager
def weight_as_parameter(model: nn.Module, name: str, layer: kinds.Layer) -> Iterator[list[tuple[str, nn.Parameter]]]:
    """Context that yields the weight and bias of a layer by name; for a parametrized weight, a temporary shift."""
    if not parametrize.is_parametrized(layer, "weight"):
        yield parameters.parameters_of(model, name, layer)
        return
    steps: nn.ModuleList = layer.parametrizations["weight"]  # type: ignore[index, assignment]
    like = next(steps.parameters())
    shift = Shift(torch.zeros(kinds.kind_of(layer).weight_shape(layer), dtype=like.dtype, device=like.device))
    key = str(len(steps))
    steps.add_module(key, shift)
    try:
        named = [(f"{name}.parametrizations.weight.{key}.shift", shift.shift)]
        bias = layer._parameters.get("bias")
        yield named if bias is None else [*named, (f"{name}.bias", bias)]
    finally:
        del steps._modules[key]
