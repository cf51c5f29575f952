"""Rows of the probe table: κ of a block, or of a unit of it, on named data, in several coordinates."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch import nn

from hesscond.capture import LayerCapture, eligible_layers
from hesscond.capture.curvature import OUTPUT_ROUTE
from hesscond.capture.statistics import by_shape, stacked
from hesscond.data import dataset
from hesscond.errors import ConfigError, MatrixError, RunError
from hesscond.hessians import catalogue
from hesscond.hessians.blocks import Block
from hesscond.hessians.coordinates.from_hessian import optima
from hesscond.hessians.coordinates.linear import scaling_conditions
from hesscond.hessians.roles import NETWORK
from hesscond.methods import Method
from hesscond.methods.bnp import regularized
from hesscond.probing import training
from hesscond.probing.check import CheckDirection
from hesscond.probing.layers import layer_results
from hesscond.probing.network import network_result
from hesscond.probing.question import Question
from hesscond.probing.results import LayerResult
from hesscond.problem import evaluation
from hesscond.spectra import ConditionNumber
from hesscond.study.config import ProbeConfig
from hesscond.study.metrics import activations
from hesscond.theorems import LayerNetwork, LayerStatement, Observation, Outcome
from hesscond.theorems.base import checked_outcomes

#: Samples in one chunk of the training set: 4096 × 3072 float64 inputs are 100 MB. Below, LAPACK's QR is half as fast.
CHUNK = 4096
#: Largest number of activations of a chunk: half a gigabyte in float64.
ROOM = 2**26


class ProbeRow(NamedTuple):
    """Row of the probe table, and rows of the tables of readings and of statements."""

    measured: dict[str, Any]
    readings: list[dict[str, Any]]
    statements: list[dict[str, Any]]


class Probe(NamedTuple):
    """Probe before κ of its captured layers is computed; ``taken`` is None where all its rows are complete."""

    taken: training.TakenProbe | None
    others: list[ProbeRow]

    @property
    def waits(self) -> bool:
        """Whether κ may be computed after the next steps."""
        return self.taken is not None and self.taken.waits


class Prober:
    """Measures the blocks that a study names, on mini-batches and over the training set.

    Units of dense and convolutional layers are captured in the training pass, or streamed; other blocks are measured
    as by `hesscond.probe`. ``places`` are the blocks' names in the model that the method built.
    """

    def __init__(
        self,
        model: nn.Module,
        loss_fn: evaluation.LossFunction,
        method: Method,
        config: ProbeConfig,
        blocks: Mapping[str, Block],
        places: Mapping[str, str],
        statements: Sequence[LayerStatement] = (),
    ) -> None:
        self.model, self.loss_fn, self.method, self.config = model, loss_fn, method, config
        self.statements = list(statements)
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
        units = {place: self.blocks[place].chosen(self._wanted) for place in layers}
        self.layers = training.TrainedLayers(
            model=model,
            loss_fn=loss_fn,
            method=method,
            layers=layers,
            units=units,
            names=self.names,
            dtype=self._dtype,
            rtol=config.rtol,
            records=config.precision == "as-trained" and bool(units),
            keeps_inputs=any(statement.inputs for statement in self.statements),
            evaluates_again=bool(self.statements),
        )
        # names of the blocks that are neither captured in the training pass nor streamed
        self._by_products = [self.names[place] for places in self.further.values() for place in places]
        self._by_products += [NETWORK] * ("network" in config.levels)

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
        again: training.Again = nullcontext,
        check: bool = False,
    ) -> Probe:
        """Probe, for `rows`, of the mini-batch whose training pass gave ``output`` while the recorder was armed."""
        pair = inputs, targets
        layer_probe = self.layers.take(pair, output, again, check=check)
        others: list[ProbeRow] = []
        if self._by_products:
            with again():
                others = [*self._others("batch", pair, len(targets))]
        return Probe(layer_probe, others)

    def rows(self, probes: Sequence[Probe]) -> list[list[ProbeRow]]:
        """Rows of several probes."""
        measured = self.layers.measured([probe.taken for probe in probes if probe.taken is not None])
        rows, counts = iter(self._rows([unit for units in measured for unit in units])), map(len, measured)
        return [
            probe.others if probe.taken is None else self._in_order([*islice(rows, next(counts)), *probe.others])
            for probe in probes
        ]

    def train(self, inputs: dataset.Samples, targets: torch.Tensor) -> Probe:
        """Complete probe of the training set, streamed through the model as it is now."""
        samples = len(inputs)
        chunk = min(CHUNK, max(1, ROOM // activations(self.model, inputs[:1])))
        parts = [slice(start, start + chunk) for start in range(0, samples, chunk)]

        checks: dict[str, CheckDirection] = {}

        def chunks() -> Iterator[tuple[dict[str, LayerCapture], float]]:
            for part in parts:
                captures = self.layers.capture(inputs[part], targets[part])
                if not checks:
                    checks.update(self.layers.compared(captures, (inputs[part], targets[part])))
                for place, captured in captures.items() if len(parts) > 1 and self._couples else ():
                    if captured.route != OUTPUT_ROUTE:
                        raise RunError(self._coupled(self.names[place], chunk))
                yield captures, len(targets[part]) / samples

        if self._by_products and len(parts) > 1 and self._couples:
            raise RunError(self._coupled(self._by_products[0], chunk))
        pairs: Any = dataset.SampleStream(inputs, targets, parts)
        if isinstance(inputs, torch.Tensor):
            pairs = list(pairs)
        data = training.ProbeData("train", pairs, self.layers.maker(pairs), checks)
        conditions = self.layers.streamed(chunks, data, samples)
        whole = (inputs[parts[0]], targets[parts[0]]) if len(parts) == 1 else None
        weights = None if whole else [len(targets[part]) for part in parts]
        rows = [*self._rows(conditions), *self._others("train", whole or pairs, samples, weights)]
        return Probe(None, self._in_order(rows))

    # blocks that are not captured

    def _others(
        self,
        name: str,
        pairs: evaluation.Batch | Iterable[evaluation.Batch],
        samples: int,
        weights: list[int] | None = None,
    ) -> Iterator[ProbeRow]:
        """Rows of all blocks that are not captured, and of the network; ``weights``: of the batches of a stream."""
        template = Question(
            model=self.model,
            loss_fn=self.loss_fn,
            data=pairs,
            choice=catalogue.Choice(),
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
                question = replace(template, level=level, units=units, choice=catalogue.Choice(tuple(chosen)))
                plain = layer_results(question)
                own_places = [place for place in chosen if self._has_coordinates(place)]
                in_own = replace(question, method=self.method, choice=catalogue.Choice(tuple(own_places)))
                own_results = layer_results(in_own) if own_places else {}
                for place in chosen:
                    yield from self._rows_of(name, samples, plain[place], own_results.get(place))
        if "network" in self.config.levels:
            network = replace(template, level="network", products=self.config.products)
            yield self._network_row(name, samples, network)

    def _has_coordinates(self, place: str) -> bool:
        """Whether the method has coordinates of a block other than the plain ones."""
        block = self.blocks[place]
        try:
            if block.layer is not None:
                return self.method.probed(place) is not None
            return self.method.of_parameters(place, catalogue.Catalogue(self.model).block(place).parameters) is not None
        except ConfigError:
            return False

    def _rows_of(self, name: str, samples: int, plain: LayerResult, result: LayerResult | None) -> Iterator[ProbeRow]:
        """Rows of the units of a block, or the row of the whole block."""
        in_own = plain.conditions if result is None else result.conditions
        for unit, kappa, kappa_own in zip(plain.blocks, plain.conditions, in_own, strict=True):
            if unit is not None and self._wanted is not None and unit not in self._wanted:
                continue
            block = plain.block(unit)
            row = {
                "data": name,
                "layer": self.names[plain.name],
                "unit": unit,
                "samples": samples,
                "n_params": block.order,
                "coordinates": "plain" if result is None or (P := result.block(unit).P) is None else P.name,
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
            names = dict.fromkeys(system.name for system in systems if system is not None)
            in_own = replace(question, method=self.method)
            kappa_own = network_result(in_own)[NETWORK].conditions[0] if names else kappa
        except ConfigError as error:
            return ProbeRow(row | {"coordinates": f"not defined: {error}"}, [], [])
        return ProbeRow(row | kappa_columns(kappa, kappa_own) | {"coordinates": " and ".join(names) or "plain"}, [], [])

    def _in_order(self, rows: list[ProbeRow]) -> list[ProbeRow]:
        """Sort rows by the blocks' order in the study, the network last."""
        order = {name: number for number, name in enumerate([*self.names.values(), NETWORK])}
        return sorted(rows, key=lambda row: order[row.measured["layer"]])

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

    # layers that are captured

    def _rows(self, measured: Sequence[training.UnitConditions]) -> list[ProbeRow]:
        raws, rows = [unit.raw for unit in measured], [{"trace": unit.trace} for unit in measured]
        for members in by_shape([P.sigma for P in raws], [P.bias for P in raws]):
            sigma, bias = stacked([raws[k].sigma for k in members]), raws[members[0]].bias
            raw = scaling_conditions(sigma, bias=bias)
            with_epsilons = scaling_conditions(regularized(sigma.square()).sqrt_(), bias=bias)
            dead = (sigma == 0).sum(1).tolist()
            for k, *columns in zip(members, raw, with_epsilons, dead, strict=True):
                rows[k] |= dict(zip(("kappa_D", "kappa_D_eps", "dead"), columns, strict=True))
        return [self._row(unit, row) for unit, row in zip(measured, rows, strict=True)]

    def _row(self, measured: training.UnitConditions, columns: dict[str, Any]) -> ProbeRow:
        """Row of a unit, from κ in the plain coordinates, those of the raw statistics, and the method's."""
        unit, kappas = measured.unit, measured.kappa
        system, inputs, hessian = unit.systems.own, unit.inputs, unit.hessian
        at = {"data": unit.data.name, "layer": self.names[unit.place], "unit": unit.number}
        row = at | {
            "samples": unit.samples,
            "n_params": hessian.order,
            "coordinates": "plain" if system is None else system.name,
        }
        row |= columns | kappas["raw"].columns_in("preconditioned") | kappa_columns(kappas["plain"], kappas["own"])
        # a further reading has no eigenvalues
        readings = [
            at | {"coordinates": name} | {k: v for k, v in kappas[name].columns.items() if not k.startswith("lambda")}
            for name in unit.systems.readings
        ]
        checked = []
        first = unit.number == self.layers.units[unit.place][0]
        if wanted := [statement for statement in self.statements if first or statement.by_unit]:
            live = ~inputs.statistics.dead
            observation = Observation(
                inputs.centred(),
                inputs.statistics.mu[live].cpu().numpy(),
                inputs.statistics.sigma[live].cpu().numpy(),
                inputs.statistics.count,
                self.layers.layers[unit.place].weight.detach().to(torch.float64).flatten(1).cpu().numpy(),
                kappas["plain"],
                kappas["raw"],
                inputs.statistics.mu.cpu().numpy(),
                unit.number,
                hessian,
                LayerNetwork(self.model, self.loss_fn, unit.data.pairs, unit.place, self._dtype),
            )
            with unit.data.again():
                checked = [at | outcome for statement in wanted for outcome in outcomes(statement, observation)]
        return ProbeRow(row | dict(unit.systems.diagnostics), readings, checked)


def placed(method: Method, name: str) -> str:
    """Name that a module, parameter or part of a study's network has in the model that a method built."""
    base, bracket, part = name.partition("[")
    if base not in dict(method.model.named_modules()) and "." in base:
        owner, _, attribute = base.rpartition(".")
        return f"{method.layer(owner)}.{attribute}{bracket}{part}"
    return method.layer(base) + bracket + part


def kappa_columns(plain: ConditionNumber, kappa_own: ConditionNumber) -> dict[str, Any]:
    """Columns of κ in the plain parameters and in the method's own coordinates."""
    both = {"lambda_max_own": kappa_own.lambda_max, "solver": f"{plain.solver}; {kappa_own.solver}"}
    return plain.columns | kappa_own.columns_in("own") | both


def outcomes(statement: LayerStatement, observation: Observation) -> Iterator[dict[str, Any]]:
    """Rows of the table of statements; a layer that cannot be measured is not resolved."""
    try:
        observed = checked_outcomes(statement, "observe", statement.observe(observation))
    except MatrixError as error:
        observed = [Outcome("unresolved", reason=str(error))] * len(statement.claims)
    for claim, outcome in zip(statement.claims, observed, strict=True):
        yield {
            "statement": statement.id,
            "claim": claim.name,
            "known": int(claim.true),
            "status": outcome.status,
            "used": None if math.isnan(outcome.used) else outcome.used,
            "reason": outcome.reason,
        }
