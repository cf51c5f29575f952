"""Rows of the probe table: κ of a block, or of a unit of it, on named data, in several coordinates."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from hesscond.capture import (
    FeatureStatistics,
    Geometry,
    LayerCapture,
    Recorded,
    Recorder,
    capture,
    channel_statistics_of_each,
    eligible_layers,
    is_layer,
)
from hesscond.capture.curvature import OUTPUT_ROUTE
from hesscond.capture.kinds import kind_of
from hesscond.capture.stacking import by_shape, stacked
from hesscond.data import Samples, SampleStream
from hesscond.errors import CaptureError, ConfigError, MatrixError, RunError
from hesscond.hessians import BlockHessian, CentringScaling, Chart, Coordinates, HessianOperator, LinearCoordinates
from hesscond.hessians.blocks import Block, Catalogue, Choice
from hesscond.hessians.build import unit_hessian
from hesscond.hessians.coordinates.base import HessianMaker
from hesscond.hessians.coordinates.from_hessian import best_kronecker, semidefinite
from hesscond.hessians.coordinates.parameter_maps import ParameterMap
from hesscond.hessians.coordinates.statistics import scaling_conditions
from hesscond.hessians.factored import FactoredHessian, conditions_of, forms_of, traces_of
from hesscond.hessians.network_hessian import BlockSource
from hesscond.hessians.parameters import UnitLayout
from hesscond.hessians.roles import NETWORK
from hesscond.hessians.streaming import stream
from hesscond.methods import Method
from hesscond.methods.bnp import from_statistics, regularized
from hesscond.probing.check import (
    TOLERANCE,
    CheckDirection,
    ReferenceProducts,
    in_coordinates,
    most_curved,
    refuse_failed,
    weight_as_parameter,
)
from hesscond.probing.layers import layer_results
from hesscond.probing.network import network_result
from hesscond.probing.question import Question
from hesscond.probing.results import LayerResult
from hesscond.problem import MEMORY
from hesscond.problem.evaluation import Batch, LossFunction
from hesscond.problem.randomness import gpus_of, untouched_randomness
from hesscond.scaling import optimal_diagonal_scaling
from hesscond.spectra import ConditionNumber
from hesscond.spectra.threads import one_thread
from hesscond.study.config import ProbeConfig
from hesscond.theorems import LayerNetwork, LayerStatement, Observation, Outcome

#: Samples in one chunk of the training set: 4096 × 3072 float64 inputs are 100 MB. Below, LAPACK's QR is half as fast.
CHUNK = 4096
#: Largest number of activations of a chunk: half a gigabyte in float64.
ROOM = 2**26
#: Largest tensor that a waiting probe keeps.
KEPT = 2**17


class ProbeRow(NamedTuple):
    """Row of the probe table, and rows of the tables of readings and of statements."""

    measured: dict[str, Any]
    readings: list[dict[str, Any]]
    statements: list[dict[str, Any]]


#: Makes a context with the random state at the start of a pass.
Again = Callable[[], AbstractContextManager[None]]


class ProbeData(NamedTuple):
    """Data of a probe, with what is needed to make and check Hessians of them."""

    name: str  # ``"batch"`` or ``"train"``
    pairs: Batch | Iterable[Batch]
    hessian: HessianMaker
    checks: Mapping[str, CheckDirection]  # directions along which the Hessian was compared with the model, by layer
    again: Again = nullcontext  # context in which the model is evaluated again


class Inputs(NamedTuple):
    """Statistics of a layer's inputs, and a function that returns ĤU or its triangular factor (no rows if unread)."""

    statistics: FeatureStatistics
    centred: Callable[[], np.ndarray]


class Systems(NamedTuple):
    """Coordinates of a method for a layer at a step, those of its readings, and its diagnostics."""

    own: Coordinates | None
    readings: Mapping[str, Coordinates | None]
    diagnostics: Mapping[str, Any]

    @property
    def by_name(self) -> dict[str, Coordinates | None]:
        """All coordinates, by name."""
        return {"own": self.own, **self.readings}


class Unit(NamedTuple):
    """Unit of a layer and its Hessian, in the plain parameters."""

    data: ProbeData
    place: str
    unit: int
    samples: int
    hessian: BlockHessian
    inputs: Inputs
    systems: Systems


class Probe(NamedTuple):
    """Probe of a mini-batch before κ is computed, with everything that the next step changes."""

    data: ProbeData
    samples: int
    captured: Recorded | Mapping[str, LayerCapture]  # the training pass, or captures of the layers
    systems: Mapping[str, Any]  # `Systems` by layer, or snapshots of the method from which they are made
    others: list[ProbeRow]  # rows that are complete already
    waits: bool  # rows may be made after the next steps: they need neither model nor method


class Prober:
    """Measures the blocks that a study names, on mini-batches and over the training set.

    Units of dense and convolutional layers are captured in the training pass, or streamed; other blocks are measured
    as by `hesscond.probe`. ``places`` are the blocks' names in the model that the method built.
    """

    def __init__(
        self,
        model: nn.Module,
        loss_fn: LossFunction,
        method: Method,
        config: ProbeConfig,
        blocks: Mapping[str, Block],
        places: Mapping[str, str],
        statements: Sequence[LayerStatement] = (),
    ) -> None:
        self.model, self.loss_fn, self.method, self.config = model, loss_fn, method, config
        self.statements = list(statements)
        self._reads_inputs = any(one.inputs for one in self.statements)
        self.names = {place: name for name, place in places.items()}
        self.blocks = {places[name]: block for name, block in blocks.items()}
        dense = {place for place, block in self.blocks.items() if block.layer is not None}
        layers = {place: layer for place, layer in eligible_layers(model).items() if place in dense}
        self.further: dict[str, list[str]] = {}
        if "unit" in config.levels:
            self.further["unit"] = [place for place in self.blocks if place not in dense]
        else:
            layers = {}
        if "layer" in config.levels:
            self.further["layer"] = list(self.blocks)
        self.units = {place: self.blocks[place].chosen(self._wanted) for place in layers}
        self.recorder = Recorder(layers)
        # names of the blocks that are neither captured in the training pass nor streamed
        self._by_products = [self.names[place] for places in self.further.values() for place in places]
        self._by_products += [NETWORK] * ("network" in config.levels)
        self._as_trained = config.precision == "as-trained" and bool(self.units)
        self._snapshots = {place: method.snapshots(place) for place in self.units}
        self._differentiated: set[str] = set()
        # a probe that waits is not evaluated again, and keeps no inputs: the next batch takes their place in memory
        self._kept = ProbeData("batch", (), self._maker(()), {})
        self._loss_is_known = False

    @property
    def _wanted(self) -> tuple[int, ...] | None:
        """Units to be measured; None: all."""
        return None if isinstance(self.config.units, str) else tuple(self.config.units)

    @property
    def _dtype(self) -> torch.dtype | None:
        """Precision of the forward pass; None: that of the training."""
        return torch.float64 if self.config.precision == "float64" else None

    def batch(
        self,
        inputs: torch.Tensor,
        targets: torch.Tensor,
        output: torch.Tensor,
        *,
        again: Again = nullcontext,
        check: bool = False,
    ) -> Probe:
        """Probe of the mini-batch whose training pass gave ``output`` while the recorder was armed, for `rows`.

        ``again`` restores the random state of that pass; ``check``: compare captures with the model's own derivatives.
        """
        pair = inputs, targets
        recorded = self.recorder.recorded(output, targets) if self._as_trained else None
        self.recorder.seen.clear()
        waits = self._loss_is_known and not check and not self.statements and is_small(recorded)
        if recorded is not None and not self._loss_is_known:
            self._loss_is_known = Recorded.captures([recorded], self.loss_fn, self.units) is not None
        captured: Recorded | Mapping[str, LayerCapture] = {}
        if recorded is not None and self._loss_is_known:
            captured = recorded
        elif self.units:
            with again():
                captured = self._capture(*pair)
        checks: dict[str, CheckDirection] = {}
        if check:
            with again():
                checks = self._compared(self._captures([captured])[0], pair)
        others: list[ProbeRow] = []
        if self._by_products:
            with again():
                others = [*self._others("batch", pair, len(targets))]
        systems: dict[str, Any] = {}
        for place, snapshots in self._snapshots.items():
            systems[place] = own = self._systems(place) if snapshots is None else snapshots.take()
            if waits and snapshots is None:
                try:
                    systems[place] = Systems(*copied([*own], KEPT))
                except TypeError:
                    waits = False
        data = self._kept if waits else ProbeData("batch", pair, self._maker(pair), checks, again)
        return Probe(data, len(targets), captured, systems, others, waits)

    def _captures(self, captured: Sequence[Recorded | Mapping[str, LayerCapture]]) -> list[Mapping[str, LayerCapture]]:
        """Captures of several probes; those of training passes of one form are made together."""
        found = [{} if isinstance(own, Recorded) else own for own in captured]
        passes = {k: own for k, own in enumerate(captured) if isinstance(own, Recorded)}
        at = list(passes)
        for members in by_shape([own.output for own in passes.values()], [own.form for own in passes.values()]):
            made = Recorded.captures([passes[at[k]] for k in members], self.loss_fn, self.units)
            assert made is not None
            for k, captures in zip(members, made, strict=True):
                found[at[k]] = captures
        return found

    def rows(self, probes: Sequence[Probe]) -> list[list[ProbeRow]]:
        """Rows of several probes; blocks of one shape are decomposed together, without any change of digits."""
        # how several threads share a sum depends on what is summed up with it
        with one_thread() if all(is_small(probe.captured) for probe in probes) else nullcontext():
            captures = self._captures([probe.captured for probe in probes])
            inputs = [captured.inputs for own in captures for captured in own.values()]
            statistics = iter(channel_statistics_of_each(inputs))
        found: list[list[Unit]] = []
        for probe, own, systems in zip(probes, captures, self._systems_at(probes), strict=True):
            units = []
            for place, captured in own.items():
                own_statistics = next(statistics)
                centred = partial(centred_rows, captured.h) if self._reads_inputs else unread
                layer_inputs = Inputs(own_statistics, partial(centred, own_statistics))
                for unit in captured.units:
                    hessian = unit_hessian(captured, unit, MEMORY)
                    units.append(Unit(probe.data, place, unit, probe.samples, hessian, layer_inputs, systems[place]))
            found.append(units)
        rows = iter(self._rows([unit for units in found for unit in units]))
        return [
            self._in_order([*islice(rows, len(units)), *probe.others])
            for units, probe in zip(found, probes, strict=True)
        ]

    def _systems_at(self, probes: Sequence[Probe]) -> list[dict[str, Systems]]:
        """Systems of each layer at each probe."""
        found = [dict(probe.systems) for probe in probes]
        for place, snapshots in self._snapshots.items():
            if snapshots is not None and found:
                made = snapshots.made([own[place] for own in found])
                for own, (system, diagnostics) in zip(found, made, strict=True):
                    own[place] = Systems(system, {}, diagnostics)
        return found

    def _systems(self, place: str) -> Systems:
        return Systems(self.method.coordinates(place), self.method.readings(place), self.method.diagnostics(place))

    def train_rows(self, inputs: Samples, targets: torch.Tensor) -> list[ProbeRow]:
        """Rows for the training set, streamed through the model as it is now."""
        samples = len(inputs)
        chunk = min(CHUNK, max(1, ROOM // activations(self.model, inputs[:1])))
        parts = [slice(start, start + chunk) for start in range(0, samples, chunk)]

        checks: dict[str, CheckDirection] = {}

        def chunks() -> Iterator[tuple[dict[str, LayerCapture], float]]:
            for part in parts:
                captures = self._capture(inputs[part], targets[part])
                if not checks:
                    checks.update(self._compared(captures, (inputs[part], targets[part])))
                if len(parts) > 1:
                    self._refuse_coupled(captures, chunk)
                yield captures, len(targets[part]) / samples

        if self._by_products and len(parts) > 1 and self._couples:
            raise RunError(self._coupled(self._by_products[0], chunk))
        hessians, statistics = stream(chunks(), MEMORY) if self.units else ({}, {})
        pairs: Any = SampleStream(inputs, targets, parts)
        if isinstance(inputs, torch.Tensor):
            pairs = list(pairs)
        data = ProbeData("train", pairs, self._maker(pairs), checks)
        factors: dict[str, np.ndarray] = {}
        if self._reads_inputs:
            # once more, now that the means are known: a factor of Ĥ itself would lose digits when it is centred
            for captures, _ in chunks():
                for place, captured in captures.items():
                    rows = centred_rows(captured.h, statistics[place])
                    stacked = np.vstack([factors[place], rows]) if place in factors else rows
                    factors[place] = np.asarray(np.linalg.qr(stacked, mode="r"))
        layer_inputs = {
            place: Inputs(own, partial(factors.__getitem__, place) if place in factors else partial(unread, own))
            for place, own in statistics.items()
        }
        systems = {place: self._systems(place) for place in self.units}
        found = [
            Unit(data, place, unit, samples, hessian, layer_inputs[place], systems[place])
            for (place, unit), hessian in hessians.items()
            if unit is not None
        ]
        whole = (inputs[parts[0]], targets[parts[0]]) if len(parts) == 1 else None
        weights = None if whole else [len(targets[part]) for part in parts]
        return self._in_order([*self._rows(found), *self._others("train", whole or pairs, samples, weights)])

    # blocks that are not captured

    def _others(
        self, name: str, pairs: Batch | Iterable[Batch], samples: int, weights: list[int] | None = None
    ) -> Iterator[ProbeRow]:
        """Rows of all blocks that are not captured, and of the network; ``weights``: of the batches of a stream."""
        asked = Question(
            model=self.model,
            loss_fn=self.loss_fn,
            data=pairs,
            choice=Choice(),
            level="layer",
            dtype=self._dtype,
            rtol=self.config.rtol,
            weight=weights,
        )
        for level, places in self.further.items():
            # of embedding tables all units that occur are measured: only the data tell which these are
            groups: dict[bool, list[str]] = {False: [], True: []}
            for place in places:
                groups[self.blocks[place].table and level == "unit"].append(place)
            for table, chosen in groups.items():
                if not chosen:
                    continue
                units = None if table or level == "layer" else self._wanted
                question = replace(asked, level=level, units=units, choice=Choice(tuple(chosen)))
                plain = layer_results(question)
                moved = [place for place in chosen if self._has_coordinates(place)]
                in_own = replace(question, method=self.method, choice=Choice(tuple(moved)))
                own = layer_results(in_own) if moved else {}
                for place in chosen:
                    yield from self._rows_of(name, samples, plain[place], own.get(place))
        if "network" in self.config.levels:
            network = replace(asked, level="network", products=self.config.products)
            yield self._network_row(name, samples, network)

    def _has_coordinates(self, place: str) -> bool:
        """Whether the method has coordinates of a block other than the plain ones."""
        block = self.blocks[place]
        try:
            if block.layer is not None:
                return self.method.probed(place) is not None
            return self.method.of_parameters(place, Catalogue(self.model).block(place).parameters) is not None
        except ConfigError:
            return False

    def _rows_of(self, name: str, samples: int, plain: LayerResult, own: LayerResult | None) -> Iterator[ProbeRow]:
        """Rows of the units of a block, or the row of the whole block."""
        units: Sequence[int | None] = plain.units if plain.level == "unit" else (None,)
        in_own = plain.conditions if own is None else own.conditions
        for unit, kappa, kappa_own in zip(units, plain.conditions, in_own, strict=True):
            if unit is not None and self._wanted is not None and unit not in self._wanted:
                continue
            block = plain.block(unit)
            row = {
                "data": name,
                "layer": self.names[plain.name],
                "unit": unit,
                "samples": samples,
                "n_params": block.order,
                "coordinates": "plain" if own is None or (P := own.block(unit).P) is None else P.name,
            }
            row |= kappa_columns(kappa, kappa_own) | {"trace": float(block.diagonal().sum())}
            best = optima(block.plain) if unit is None and block.order <= self.config.optima else {}
            yield ProbeRow(row | best, [], [])

    def _network_row(self, name: str, samples: int, question: Question) -> ProbeRow:
        """Row of all parameters together; the own coordinates are left empty where they are not defined."""
        plain = network_result(question)[NETWORK]
        kappa = plain.conditions[0]
        row = {"data": name, "layer": NETWORK, "unit": None, "samples": samples, "n_params": plain.n_params}
        row |= kappa.columns
        try:
            self.method.check_network()
            systems = [self.method.probed(place) for place in eligible_layers(self.model)]
            moved = dict.fromkeys(own.name for own in systems if own is not None)
            in_own = replace(question, method=self.method)
            own = network_result(in_own)[NETWORK].conditions[0] if moved else kappa
        except ConfigError as error:
            return ProbeRow(row | {"coordinates": f"not defined: {error}"}, [], [])
        return ProbeRow(row | kappa_columns(kappa, own) | {"coordinates": " and ".join(moved) or "plain"}, [], [])

    def _in_order(self, rows: list[ProbeRow]) -> list[ProbeRow]:
        """Sort rows by the blocks' order in the study, the network last."""
        order = {name: number for number, name in enumerate([*self.names.values(), NETWORK])}
        return sorted(rows, key=lambda row: order[row.measured["layer"]])

    # layers that are captured

    def _refuse_coupled(self, captures: Mapping[str, LayerCapture], chunk: int) -> None:
        """Raise a RunError where batch statistics follow a layer: its Hessian is not the sum over chunks."""
        if not self._couples:
            return
        for place, captured in captures.items():
            if captured.route != OUTPUT_ROUTE:
                raise RunError(self._coupled(self.names[place], chunk))

    @property
    def _couples(self) -> bool:
        """Whether batch statistics are taken in the model."""
        return any(m.training and getattr(m, "running_mean", None) is not None for m in self.model.modules())

    def _coupled(self, layer: str, chunk: int) -> str:
        return (
            f"behind layer {layer!r} the batch is normalized, so that its Hessian over the training set needs all "
            f"samples at once: in [probe] take at most {chunk} of them, train_samples = {chunk}, or set "
            "train_every_epochs = 0, or measure the output layer"
        )

    def _maker(self, data: Any) -> HessianMaker:
        return partial(HessianOperator, self.model, self.loss_fn, data)

    def _capture(self, inputs: torch.Tensor, targets: torch.Tensor) -> dict[str, LayerCapture]:
        names, pair = list(self.units), (inputs, targets)
        return capture(self.model, self.loss_fn, pair, names, units=self.units, dtype=self._dtype)

    def _compared(self, captures: Mapping[str, LayerCapture], batch: Batch) -> dict[str, CheckDirection]:
        """Compare each layer's most curved unit with the model; return the directions of the comparison."""
        dtype = self._dtype
        found = {}
        for place, own in captures.items():
            layer, unit = self.recorder.layers[place], most_curved(own)
            block = unit_hessian(own, unit, MEMORY)
            with weight_as_parameter(self.model, place, layer) as named:
                layout, whole = (UnitLayout(self.model, {place: layer}, of, named) for of in (unit, None))
                direction = CheckDirection.of(block, layout, whole, unit, dtype=dtype)
                reference = ReferenceProducts(self.model, self.loss_fn, dict(named), dtype)
                # whether the model's second derivatives are those of its gradient is a question of its code
                reference.differentiates = place not in self._differentiated
                self._differentiated.add(place)
                reference.add(batch, [direction])
                verdict = reference.verdict(direction, block)
            refuse_failed(self.names[place], verdict, "the capture does not hold for this layer")
            found[place] = direction
        return found

    def _rows(self, units: Sequence[Unit]) -> list[ProbeRow]:
        """Rows of units; factors of one shape are decomposed together."""
        rtol = self.config.rtol
        raws = [self._raw(one) for one in units]
        known = [self._by_charts(one) for one in units]
        linear = [self._linear(one, raw, own) for one, raw, own in zip(units, raws, known, strict=True)]
        # several names may mean one P
        distinct = [list({id(P): P for P in own.values()}.values()) for own in linear]
        hessians = {k: one.hessian for k, one in enumerate(units) if isinstance(one.hessian, FactoredHessian)}
        forms = forms_of([*hessians.values()], [distinct[k] for k in hessians])
        traces = dict(zip(hessians, traces_of([*hessians.values()]), strict=True))
        together = dict(zip(hessians, conditions_of(forms, rtol=rtol), strict=True))
        rows = []
        for k, (one, own, columns) in enumerate(zip(units, known, scaling_columns(raws), strict=True)):
            if k in together:
                kappas, trace = together[k], traces[k]
            else:
                kappas = one.hessian.condition_numbers(distinct[k], rtol=rtol)
                trace = float(one.hessian.diagonal().sum())
            numbers = {id(P): kappa for P, kappa in zip(distinct[k], kappas, strict=True)}
            found = own | {name: numbers[id(P)] for name, P in linear[k].items()}
            rows.append(self._row(one, columns | {"trace": trace}, found))
        return rows

    def _raw(self, one: Unit) -> CentringScaling:
        """P of the raw statistics of the inputs that a unit sees."""
        geometry = Geometry.of(self.recorder.layers[one.place])
        return from_statistics(of_group(one.inputs.statistics, geometry, one.unit), bias=geometry.bias)

    def _by_charts(self, one: Unit) -> dict[str, ConditionNumber]:
        """κ in the method's coordinates that are not given by a matrix P, by name."""
        found: dict[str, ConditionNumber] = {}
        charts: dict[int, ConditionNumber] = {}
        for name, system in one.systems.by_name.items():
            if isinstance(system, Chart):
                if id(system) not in charts:
                    with one.data.again():
                        block = BlockSource(one.data.hessian, MEMORY).block(system, one.place, one.unit)
                        charts[id(system)] = block.condition_number(rtol=self.config.rtol)
                found[name] = charts[id(system)]
        return found

    def _linear(
        self, one: Unit, raw: CentringScaling, known: Mapping[str, ConditionNumber]
    ) -> dict[str, LinearCoordinates | None]:
        """P of a unit in all coordinates that are not ``known``, checked if the unit has a direction of comparison."""
        direction = one.data.checks.get(one.place)
        source = BlockSource(one.data.hessian, MEMORY, lambda *_: one.hessian)
        systems: dict[str, Coordinates | None] = {"plain": None, "raw": raw, **one.systems.by_name}
        found = {}
        for name, system in systems.items():
            if name in known:
                continue
            block = source.block(system, one.place, one.unit)
            if direction is not None and direction.unit == one.unit and in_coordinates(block, direction) > TOLERANCE:
                place = self.names[one.place]
                raise CaptureError(f"layer {place!r}: the Hessian in the coordinates {name!r} is not PᵀHP")
            found[name] = block.P
        return found

    def _row(self, one: Unit, columns: dict[str, Any], found: Mapping[str, ConditionNumber]) -> ProbeRow:
        """Row of a unit, from κ in the plain coordinates, those of the raw statistics, and the method's."""
        own, inputs, hessian = one.systems.own, one.inputs, one.hessian
        at = {"data": one.data.name, "layer": self.names[one.place], "unit": one.unit}
        row = at | {
            "samples": one.samples,
            "n_params": hessian.order,
            "coordinates": "plain" if own is None else own.name,
        }
        row |= columns | found["raw"].columns_in("preconditioned") | kappa_columns(found["plain"], found["own"])
        readings = [at | {"coordinates": name} | reading_columns(found[name]) for name in one.systems.readings]
        checked = []
        first = one.unit == self.units[one.place][0]
        if wanted := [statement for statement in self.statements if first or statement.by_unit]:
            observation = Observation(
                inputs.centred(),
                *live(inputs.statistics),
                inputs.statistics.count,
                self.recorder.layers[one.place].weight.detach().to(torch.float64).flatten(1).cpu().numpy(),
                found["plain"],
                found["raw"],
                inputs.statistics.mu.cpu().numpy(),
                one.unit,
                hessian,
                LayerNetwork(self.model, self.loss_fn, one.data.pairs, one.place, self._dtype),
            )
            with one.data.again():
                checked = [at | outcome for statement in wanted for outcome in outcomes(statement, observation)]
        return ProbeRow(row | dict(one.systems.diagnostics), readings, checked)


def is_small(captured: Recorded | Mapping[str, LayerCapture] | None) -> bool:
    """Whether ``captured`` is a training pass that is small enough to be kept."""
    return isinstance(captured, Recorded) and captured.size <= KEPT


def placed(method: Method, name: str) -> str:
    """Name that a module, parameter or part of a study's network has in the model that a method built."""
    base, bracket, part = name.partition("[")
    if base not in dict(method.model.named_modules()) and "." in base:
        owner, _, attribute = base.rpartition(".")
        return f"{method.layer(owner)}.{attribute}{bracket}{part}"
    return method.layer(base) + bracket + part


def optima(hessian: BlockHessian) -> dict[str, float]:
    """Columns with bounds of the smallest κ in any diagonal and any Kronecker coordinates, of a layer's Hessian.

    Empty where it has negative eigenvalues, or no factor is known: it is then defined, but no method is known for it.
    """
    try:
        own = semidefinite(hessian, "diagonal")
        factor = own.factor()
        diagonal = optimal_diagonal_scaling(factor, side="column")
        kronecker = best_kronecker(own, factor)
    except (ConfigError, MatrixError):
        return {}
    return {
        "kappa_diagonal_lower": diagonal.lower**2,
        "kappa_diagonal_upper": diagonal.upper**2,
        "kappa_kronecker_lower": kronecker.lower**2,
        "kappa_kronecker_upper": kronecker.upper**2,
    }


def kappa_columns(plain: ConditionNumber, own: ConditionNumber) -> dict[str, Any]:
    """Columns of κ in the plain parameters and in the method's own coordinates."""
    both = {"lambda_max_own": own.lambda_max, "solver": f"{plain.solver}; {own.solver}"}
    return plain.columns | own.columns_in("own") | both


def scaling_columns(raws: Sequence[CentringScaling]) -> list[dict[str, Any]]:
    """Columns of D from raw statistics."""
    found: list[dict[str, Any]] = [{} for _ in raws]
    for members in by_shape([P.sigma for P in raws], [P.bias for P in raws]):
        sigma, bias = stacked([raws[k].sigma for k in members]), raws[members[0]].bias
        raw = scaling_conditions(sigma, bias=bias)
        with_epsilons = scaling_conditions(regularized(sigma.square()).sqrt_(), bias=bias)
        dead = (sigma == 0).sum(1).tolist()
        for k, *columns in zip(members, raw, with_epsilons, dead, strict=True):
            found[k] = dict(zip(("kappa_D", "kappa_D_eps", "dead"), columns, strict=True))
    return found


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
    if isinstance(value, (LinearCoordinates, ParameterMap)):
        # a `Chart` evaluates the model
        copy = object.__new__(type(value))
        vars(copy).update(copied(vars(value), room))
        return copy
    raise TypeError


def unread(statistics: FeatureStatistics) -> np.ndarray:
    """(0, k + 1): no rows of [e, H − eμᵀ]."""
    return np.empty((0, 1 + int((~statistics.dead).sum())))


def of_group(statistics: FeatureStatistics, geometry: Geometry, unit: int) -> FeatureStatistics:
    """Statistics of the inputs that a unit sees: those of its group."""
    if geometry.groups == 1:
        return statistics
    own = slice(geometry.group(unit) * geometry.fan_in, (geometry.group(unit) + 1) * geometry.fan_in)
    parts = (statistics.mu, statistics.sum_squares, statistics.low, statistics.high)
    return FeatureStatistics(statistics.count, *(part[own] for part in parts))


def activations(model: nn.Module, inputs: torch.Tensor) -> int:
    """Number of values that the modules of a model output for ``inputs``; nested modules are not counted twice."""
    return inputs.numel() + summed(model, inputs, lambda module, output: output.numel())


def multiplications(model: nn.Module, inputs: torch.Tensor) -> int:
    """Number of multiplications of a forward pass in the dense and convolutional layers of a model."""

    def own(module: nn.Module, output: torch.Tensor) -> int:
        return output.numel() * kind_of(module).weight_shape(module)[1:].numel() if is_layer(module) else 0

    return summed(model, inputs, own)


@torch.no_grad()
def summed(model: nn.Module, inputs: torch.Tensor, count: Callable[[nn.Module, torch.Tensor], int]) -> int:
    """Sum over the innermost modules of a model of ``count`` applied to their outputs."""
    counts = [0]

    def add(module: nn.Module, args: Any, output: Any) -> None:
        counts.append(count(module, output) if isinstance(output, torch.Tensor) else 0)

    handles = [m.register_forward_hook(add) for m in model.modules() if not any(m.children())]
    training = model.training
    model.eval()
    with untouched_randomness(gpus_of([inputs])):
        model(inputs)
    model.train(training)
    for handle in handles:
        handle.remove()
    return sum(counts)


def centred_rows(h: torch.Tensor, statistics: FeatureStatistics) -> np.ndarray:
    """[e, H − eμᵀ] (N, k + 1), features that are constant over all the data left out."""
    centred = (h.to(torch.float64) - statistics.mu)[:, ~statistics.dead]
    return torch.cat([centred.new_ones(len(h), 1), centred], 1).cpu().numpy()


def live(statistics: FeatureStatistics) -> tuple[np.ndarray, np.ndarray]:
    """(k,) means and standard deviations of the features that are not constant."""
    kept = ~statistics.dead
    return statistics.mu[kept].cpu().numpy(), statistics.sigma[kept].cpu().numpy()


def outcomes(one: LayerStatement, observation: Observation) -> Iterator[dict[str, Any]]:
    """Rows of the table of statements; a layer that cannot be measured is not resolved."""
    try:
        found = one.observe(observation)
    except MatrixError as error:
        found = [Outcome("unresolved", reason=str(error))] * len(one.claims)
    for claim, outcome in zip(one.claims, found, strict=True):
        yield {
            "statement": one.id,
            "claim": claim.name,
            "known": int(claim.true),
            "status": outcome.status,
            "used": None if math.isnan(outcome.used) else outcome.used,
            "reason": outcome.reason,
        }


def reading_columns(kappa: ConditionNumber) -> dict[str, Any]:
    """Columns of a further reading, which has no eigenvalues."""
    return {name: value for name, value in kappa.columns.items() if not name.startswith("lambda")}
