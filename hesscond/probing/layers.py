"""Hessians of layers and of their units: captured, or by products where the parameters are behind a weight."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import Any

import torch
from torch import nn

from hesscond.capture import STOPPED, Captures, Geometry, Layer, LayerCapture, LayerInputs, capture, checked_units
from hesscond.capture.captured import EPS
from hesscond.capture.forward import COMPLEX
from hesscond.capture.kinds import is_layer, is_turned
from hesscond.capture.layers import stock_class
from hesscond.capture.nonfinite import reasons
from hesscond.errors import CaptureError, ConfigError, HesscondError
from hesscond.hessians import BlockHessian, Chart, Coordinates, HessianOperator, HessianScaling, Preconditioner
from hesscond.hessians.blocks import Block, BlockLayout, Catalogue
from hesscond.hessians.build import layer_hessian, unit_conditions, unit_hessian
from hesscond.hessians.coordinates.parameter_maps import ParameterCoordinates
from hesscond.hessians.factored import FactoredHessian
from hesscond.hessians.formed import CHANGED, EIGENVALUES, FormedHessian
from hesscond.hessians.network_hessian import BlockSource, ZeroPaddedHessian
from hesscond.hessians.network_operator import UnitMatrices
from hesscond.hessians.parameters import Layout, UnitLayout, parameters_of
from hesscond.hessians.streaming import StreamedBlock, stream
from hesscond.methods import Method
from hesscond.methods.inputs import OfInputs
from hesscond.operators.parallel import all_or_none
from hesscond.probing.applied import coordinates_at
from hesscond.probing.check import (
    MARGIN,
    Check,
    CheckDirection,
    ReferenceProducts,
    as_block,
    check_operator,
    in_coordinates,
    is_flat,
    most_curved,
    reference_of,
    refuse_failed,
    rounding_of,
    uncertain,
)
from hesscond.probing.question import Measurement
from hesscond.probing.results import LayerResult, ProbeResult
from hesscond.problem.batches import is_batch
from hesscond.problem.evaluation import Batch
from hesscond.problem.precision import Precision
from hesscond.problem.randomness import gpus_of, untouched_randomness
from hesscond.problem.weighting import Rule, Weights, mass_of
from hesscond.spectra import ConditionNumber
from hesscond.spectra.threads import side_by_side, threads_for

#: Error for a layer whose Hessian over all data differs from the model's.
DIFFERENT_SUM = "the sum over the batches does not agree with the model's own"
#: Largest number of products with the model's Hessian for a layer that cannot be captured otherwise.
PRODUCTS = 20_000
#: Up to this order, a Hessian has too few entries for its asymmetry to show their rounding.
FEW = 3


@dataclass
class LayerProbe(Measurement):
    """Measurement of the Hessians of layers, or of their units."""

    systems: dict[str, Coordinates | OfInputs | None] = field(default_factory=dict)
    blocks: dict[str, Block] = field(default_factory=dict)  # part of each layer that is measured
    reached: set[str] | None = None  # names of the parameters that the loss depends on, once they are known
    precision: Precision | None = None  # precision of the forward pass, once it was observed

    def result(self) -> ProbeResult:
        chosen = self.choice.blocks(self.model)
        self.refuse_little(
            block.width if self.level == "unit" and block.units else block.order for block in chosen.values()
        )
        self._choose(chosen)
        found = self._measured()
        if self.check and self.choice.names is None:
            reached = self._reached() if self.reached is None else self.reached
            self.skipped = unmeasured(self.model, reached, found) | self.skipped
        if not found:
            reasons = "; ".join(f"layer {name!r} cannot be probed: {why}" for name, why in self.skipped.items())
            raise CaptureError(reasons)
        skipped = {name: why for name, why in self.skipped.items() if name not in found}
        precision = "not looked at (check=False)" if self.precision is None else str(self.precision)
        return ProbeResult({name: found[name] for name in self.blocks if name in found}, skipped, precision)

    def _choose(self, chosen: Mapping[str, Block]) -> None:
        """Find the coordinates of the chosen blocks, and the units of layers with a forward pass of their own."""
        for name, block in chosen.items():
            with self.skipping(name, ConfigError):
                part = self.moved(name, block)
                self.systems[name] = self._system(name, part)
                self.blocks[name] = part
        odd = [name for name, own in self.blocks.items() if own.layer is not None and stock_class(own.layer) is None]
        odd = [name for name in odd if not isinstance(self.systems[name], Chart)]
        if self.level == "layer" or not odd:
            return
        # a custom forward pass may use the weight in another way
        self.data = self.data if is_batch(self.data) else list(self.data)
        turned, unclear = self.units_by_use(odd, self.data)
        for name, why in unclear.items():
            if self._named(name):
                raise ConfigError(why)
            self.skipped[name] = why
            del self.blocks[name]
        self.blocks |= turned
        self.systems |= {name: self._system(name, block) for name, block in turned.items()}

    def _measured(self) -> dict[str, LayerResult]:
        """Results of the blocks: of captured layers, of layers in charts, and of other parameters by products."""
        charts = {name: own for name in self.blocks if isinstance(own := self.systems[name], Chart)}
        plain = {name: block for name, block in self.blocks.items() if name not in charts and block.layer is None}
        if (charts or plain) and self.team is not None:
            raise ConfigError(
                f"layer {next(iter(charts | plain))!r} is measured by products, which several processes form together "
                "at level='network' only: start one process"
            )
        captured = {name: b.layer for name, b in self.blocks.items() if name not in charts and b.layer is not None}
        if bool(charts) + bool(captured) + bool(plain) > 1 and not is_batch(self.data):
            # they read the data one after the other
            self.data = list(self.data)
        found = self._captured(captured) if captured else {}
        for name, chart in charts.items():
            with self.skipping(name, CaptureError):
                found[name] = self._in_chart(name, chart)
        return found | (self._by_products(plain) if plain else {})

    # what blocks are measured in

    def _system(self, name: str, block: Block) -> Coordinates | OfInputs | None:
        """Coordinates of a block."""
        if block.layer is not None:
            return coordinates_at(self.method, name)
        if any(self.model.get_parameter(parameter).is_complex() for parameter in block.parameters):
            raise ConfigError(f"layer {name!r} cannot be probed: {COMPLEX}")
        computed = name not in self.choice.groups and is_layer(Catalogue(self.model).module(name))
        if isinstance(self.method, Method) and not computed:
            own: Coordinates | OfInputs | None = self.method.of_parameters(name, block.parameters)
        else:
            own = coordinates_at(self.method, name)
        if own is not None and not isinstance(own, (Chart, HessianScaling, ParameterCoordinates)):
            what = "computed from other parameters" if computed else "no weight matrix"
            raise ConfigError(
                f"layer {name!r} cannot be probed: the coordinates of {own.name} are those of a plain weight, and its "
                f"own is {what}; name others with layers="
            )
        return own

    # layers in charts

    def _in_chart(self, name: str, chart: Chart) -> LayerResult:
        """Measure a layer whose Hessian is known by its products in a chart."""
        source = self.source()
        units = chart.chosen_units(self.model, name, self.units) if self.level == "unit" else ()
        # all of them now: the model may be another one when they are read
        blocks: dict[int | None, BlockHessian] = {}
        made: dict[int | None, HessianOperator] = {}
        for unit in units or [None]:
            blocks[unit], made[unit] = source.block(chart, name, unit), source.latest
        H, block = source.latest, self.blocks[name]
        whole = not units or block.layer is not None
        own = {piece.parameter for piece in block.pieces if whole or piece.rows is not None}
        result = LayerResult(
            name,
            self.level,
            units,
            blocks.__getitem__,
            parameters=[parameter for parameter in H.names if whole or parameter in own],
            n_params=next(iter(blocks.values())).order,
            route=f"products, in {chart.name}",
            rtol=self.rtol,
        )
        if self.check:
            result.check, result.uncertainty, precision = check_operator(H)
            result.uncertain = uncertain(precision)
            self.precision = precision if self.precision is None else self.precision
            refuse_failed(name, result.check, "the operator and a fresh evaluation of the model disagree")
            # the gradient is in a Hessian on a manifold too
            zero = cache(lambda own: rounding_of(own) if is_flat(own) else None)
            result.rounding = {unit: known for unit, own in made.items() if (known := zero(own)) is not None}
        return result

    # blocks of other parameters

    def _by_products(self, blocks: Mapping[str, Block]) -> dict[str, LayerResult]:
        """Measure blocks of any parameters, all by the products of one operator."""
        catalogue, source = Catalogue(self.model), self.source()
        names = dict.fromkeys(name for block in blocks.values() for name in block.parameters)
        try:
            H = source.operator(parameters=list(names))
        except CaptureError as error:
            if len(blocks) > 1 and not isinstance(self.data, Iterator):
                return self._apart(blocks)
            if any(map(self._named, blocks)):
                raise
            self.skipped |= dict.fromkeys(blocks, str(error))
            return {}
        work: dict[str, ByProducts] = {}
        for name, block in (self._by_use(blocks, H, catalogue) if self.level == "unit" else blocks).items():
            with self.skipping(name, HesscondError):
                work[name] = ByProducts.of(self, block, H, catalogue)
        if not work:
            return {}
        reference, directions = reference_of(H, [own.operator for own in work.values()], keeps_products=True)
        noise = reference.noise(directions)
        self.precision = reference.precision if self.precision is None and self.check else self.precision
        zero_tests = reference.zero_tests(directions, noise, H.total_mass)
        matrices = CHANGED if any(self.systems[name] is not None for name in work) else EIGENVALUES
        parts = {name: (own.operator, own.index()) for name, own in work.items() if own.units}
        formed = H.by_units(parts, self.memory - H.held, matrices)
        spare = self.memory - H.held - 8 * sum(own.H.numel() for own in formed.values())
        found = {}
        for (name, own), direction, errors, zero in zip(work.items(), directions, noise, zero_tests, strict=True):
            units = formed.get(name)
            result = found[name] = own.result(
                source, self.systems[name], errors / direction.v.square().mean().sqrt(), units, spare
            )
            rows = dict(zip(own.units, own.index(), strict=True)) if own.units else {None: None}
            result.rounding = {unit: known for unit, at in rows.items() if (known := zero(at)) is not None}
            if not self.check:
                continue
            try:
                result.check = reference.verdict(direction, as_block(own.operator), H.total_mass)
                if units is not None:
                    result.check = replace(result.check, difference=max(result.check.difference, units.difference))
                refuse_failed(name, result.check, "the operator and a fresh evaluation of the model disagree")
            except CaptureError as error:
                if self._named(name):
                    raise
                self.skipped[name] = str(found.pop(name) and error)
                continue
            result.uncertainty = max(reference.uncertainty(direction), direction.cancellation_error / H.total_mass)
            result.uncertain = uncertain(reference.precision)
        return found

    def _apart(self, blocks: Mapping[str, Block]) -> dict[str, LayerResult]:
        """Measure blocks whose common operator failed: without the failing blocks together, or else one by one."""
        parts = {name: [self.model.get_parameter(p) for p in block.parameters] for name, block in blocks.items()}
        batches = [self.data] if is_batch(self.data) else self.data
        failing = reasons(self.model, self.loss_fn, batches, parts, self.dtype)
        for name, reason in failing.items():
            self.skipped[name] = f"no second derivatives: {reason}"
            if self._named(name):
                raise CaptureError(f"layer {name!r} cannot be probed: {self.skipped[name]}")
        fit = {name: block for name, block in blocks.items() if name not in failing}
        if failing:
            return self._by_products(fit) if fit else {}
        return {name: own for block in fit for name, own in self._by_products({block: fit[block]}).items()}

    def units_by_use(self, names: Iterable[str], data: Any) -> tuple[dict[str, Block], dict[str, str]]:
        """Blocks of the layers whose units are not the rows of their weight, and reasons why others have no units."""
        catalogue = Catalogue(self.model)
        found: dict[str, Block] = {}
        reasons: dict[str, str] = {}
        blocks = {name: self.blocks[name] for name in names if not is_turned(self.blocks[name].layer)}
        if not blocks:
            return {}, {}
        parameters = dict.fromkeys(key for own in blocks.values() for key in own.parameters)
        try:
            uses = replace(self, data=data).source().operator(parameters=parameters).uses
        except HesscondError:
            return {}, {}
        for name, block in blocks.items():
            try:
                (own,) = catalogue.by_use(block, uses)
                found |= {} if own == block else {name: replace(own, layer=None)}
            except ConfigError as error:
                reasons[name] = str(error)
        return found, reasons

    def _by_use(self, blocks: Mapping[str, Block], H: HessianOperator, catalogue: Catalogue) -> dict[str, Block]:
        """Blocks by the outputs of their parameters; parameters with other outputs form a block, or are skipped."""
        found: dict[str, Block] = {}
        taken: set[str] = set()
        # a parameter that belongs to the outputs of a module needs no separate block
        for name in sorted(blocks, key=lambda name: catalogue.module(name) is None):
            block = blocks[name]
            if name in self.choice.groups:
                found[name] = block
            if name in self.choice.groups or (
                name in catalogue.parameters and not self._named(name) and taken >= set(block.parameters)
            ):
                continue
            try:
                found[name], *others = catalogue.by_use(block, H.uses)
            except ConfigError as error:
                if self._named(name):
                    raise
                self.skipped[name] = str(error)
                continue
            taken |= {piece.parameter for piece in found[name].pieces if piece.rows is not None}
            for other in others:
                if self._named(name):
                    apart = f"belongs to other outputs than the units of layer {name!r}: name it"
                    self.skipped |= {key: f"parameter {key!r} {apart}, layers=[{key!r}]" for key in other.parameters}
                    continue
                found[other.name], self.blocks[other.name] = other, other
                self.systems[other.name] = self._system(other.name, other)
                taken |= set(other.parameters)
        return {name: found[name] for name in (*blocks, *found) if name in found}

    # layers that are captured

    def capture(
        self, names: Sequence[str], batch: Batch, weights: Weights | None, in_parameters: frozenset[str]
    ) -> Captures:
        """Call `hesscond.capture.capture` with the options of this probe."""
        return capture(
            self.model,
            self.loss_fn,
            batch,
            names,
            optional=True,
            units=None if self.units is None else dict.fromkeys(names, tuple(self.units)),
            whole=self.level == "layer",
            dtype=self.dtype,
            memory=self.memory,
            weights=weights,
            in_parameters=in_parameters,
            # a direction in a whole layer covers all its units
            slopes=self.check and self.level == "unit",
            progress=self.progress,
        )

    def block(self, own: LayerCapture, unit: int | None) -> BlockHessian:
        """Hessian object of a unit, or of the layer."""
        return layer_hessian(own, self.memory) if unit is None else unit_hessian(own, unit, self.memory)

    def _captured(self, layers: Mapping[str, Layer]) -> dict[str, LayerResult]:
        for name, layer in layers.items():
            checked_units(name, layer, self.units)
        if self.units is not None and not self.units:
            raise ConfigError("no unit was named: leave units= out for all of them")
        reference = self._reference(layers) if self.check else None
        run = LayerCapturing(self, layers, reference)
        if is_batch(self.data) and self.team is None:
            sums = run.kept(self.data)
        else:
            # a loader draws from the random state
            with untouched_randomness(gpus_of(list(self.model.parameters()))):
                sums = run.over([self.data] if is_batch(self.data) else self.data)
        found = {}
        for name in sums.routes:
            with self.skipping(name, CaptureError):
                found[name] = run.result(name, sums)
        self.precision = None if reference is None else reference.precision
        self.reached = None if reference is None else reference.reached
        return found

    def _reached(self) -> set[str]:
        """Names of the parameters that the loss depends on, if no layer was captured."""
        reference = self._reference({})
        for batch in [self.data] if is_batch(self.data) else self.data:
            reference.add(batch, [])
        return reference.reached

    def _reference(self, layers: Mapping[str, Layer]) -> ReferenceProducts:
        """Reference products in the layers' parameters, which also record what else the loss depends on."""
        named = {name: p for name, p in self.model.named_parameters() if p.requires_grad and p.is_floating_point()}
        named |= dict(pair for name, layer in layers.items() for pair in parameters_of(self.model, name, layer))
        return ReferenceProducts(self.model, self.loss_fn, named, self.dtype)

    def collect(self, layer: str, inputs: LayerInputs) -> Any:
        """Statistics of a layer's inputs that its coordinates are computed from; None: there are none."""
        own = self.systems[layer]
        return None if own is None else own.collect(layer, inputs)

    def resolved(self, layer: str, statistics: Any, geometry: Geometry) -> Coordinates | None:
        """Coordinates of a layer, from the statistics that were collected of its inputs."""
        own = self.systems[layer]
        return None if own is None else own.resolved(statistics, geometry)


@dataclass(frozen=True)
class ByProducts:
    """Block whose Hessians are known by products."""

    probe: LayerProbe
    block: Block
    live: Block
    operator: HessianOperator
    units: tuple[int, ...]
    tensors: Mapping[str, nn.Parameter]

    @classmethod
    def of(cls, probe: LayerProbe, block: Block, H: HessianOperator, catalogue: Catalogue) -> ByProducts:
        """Block of the parameters of an operator."""
        own = block.name in probe.choice.groups
        missing = [name for name in block.parameters if name not in H.reached]
        if missing and (own or len(missing) == len(block.parameters)):
            what = f"block {block.name!r}" if own else f"layer {block.name!r}"
            raise CaptureError(f"{what} cannot be probed: the loss does not depend on parameter {missing[0]!r}")
        live = occurring(block, H, catalogue.parameters) if block.table else block
        units: tuple[int, ...] = ()
        if probe.level == "unit" and not own:
            absent = [unit for unit in probe.units or () if unit in block.units and unit not in live.units]
            if absent:
                raise ConfigError(
                    f"unit {absent[0]} of layer {block.name!r} does not occur in the data: the loss does not depend "
                    "on it"
                )
            units = block.chosen(probe.units) if probe.units is not None or not block.table else tuple(live.units)
            live = live.at(range(len(live.units)))
            products = len(units) * live.width
            if products > PRODUCTS:
                raise ConfigError(
                    f"layer {block.name!r} has {len(units):,} units, whose Hessians take {products:,} products (up to "
                    f"{PRODUCTS:,} are made): name fewer with units=, or use level='layer'"
                )
        operator = H.restricted(BlockLayout([live], catalogue.parameters))
        return cls(probe, block, live, operator, units, catalogue.parameters)

    def index(self) -> torch.Tensor:
        """Rows (u, w) of the operator that belong to each unit."""
        H = self.operator
        numbers = H.layout.tensors_of(torch.arange(H.order, dtype=torch.float64, device=H.device))
        place = dict(zip(map(id, H.layout.tensors), numbers, strict=True))
        parts = [self._layout(unit) for unit in self.units]
        return torch.stack([part.vector_of([place[id(tensor)] for tensor in part.tensors]) for part in parts]).long()

    def _layout(self, unit: int) -> BlockLayout:
        return BlockLayout([self.live.unit(unit)], self.tensors)

    def result(
        self,
        source: BlockSource,
        own: Coordinates | OfInputs | None,
        noise: torch.Tensor,
        formed: UnitMatrices | None,
        spare: int,
    ) -> LayerResult:
        """Return the Hessians of the block; ``noise`` (n,) is the rounding in each row of the block.

        ``formed`` are the formed Hessians of the units, if any; ``spare`` bytes are left for computations with them.
        """
        H = self.operator
        one = 8 * max(1, self.live.width) ** 2 * (EIGENVALUES if own is None else CHANGED)
        threads = max(1, min(threads_for(H.device), len(self.units), spare // one))
        rows = dict(zip(self.units, self.index(), strict=True)) if self.units else {}

        def rounding(order: int, errors: torch.Tensor) -> float:
            # few entries do not show their rounding in their asymmetry
            return MARGIN * float(errors.norm()) if order <= FEW else 0.0

        def measured(plain: BlockHessian, layout: Layout) -> BlockHessian:
            if isinstance(own, ParameterCoordinates):
                return plain.in_coordinates(own.of(layout))
            return plain.in_coordinates(own.at(plain)) if isinstance(own, HessianScaling) else plain

        def unit_block(unit: int | None) -> BlockHessian:
            if unit is None:
                whole = measured(source.products(H, error=rounding(H.order, noise)), H.layout)
                if self.live is self.block:
                    return whole
                return ZeroPaddedHessian(whole, self.block.order, self._places().to(H.device), source.memory)
            layout, error = self._layout(unit), rounding(self.live.width, noise[rows[unit]])
            if formed is None:
                return measured(source.products(H.restricted(layout), error=error), layout)
            number = self.units.index(unit)
            spread = torch.hypot(formed.spread[number], torch.full_like(noise[:1], error / (16 * EPS)).sqrt())
            H_unit, kept = formed.H[number], spare // threads
            plain = FormedHessian(H_unit, spread, formed.terms[number], vanishing=H.saturated, memory=kept)
            return measured(plain, layout)

        block = cache(unit_block)

        def together() -> list[ConditionNumber]:
            return side_by_side(lambda unit: block(unit).condition_number(rtol=self.probe.rtol), self.units, threads)

        return LayerResult(
            self.block.name,
            "unit" if self.units else "layer",
            self.units,
            block,
            parameters=H.names,
            n_params=self.live.width if self.units else self.block.order,
            route="products, in the parameters themselves"
            + ("" if formed is None else ", through the curvature behind"),
            rtol=self.probe.rtol,
            conditions=None if formed is None else together,
        )

    def _places(self) -> torch.Tensor:
        """Indices of the entries of ``live`` in the vectors of the whole block."""
        found, start = [], 0
        for piece, kept in zip(self.block.pieces, self.live.pieces, strict=True):
            index = kept.index()
            found.append(start + (torch.arange(kept.size) if index is None else index))
            start += piece.size
        return torch.cat(found)


def occurring(block: Block, H: HessianOperator, tensors: Mapping[str, nn.Parameter]) -> Block:
    """Block of a table's rows that the loss depends on: with a nonzero gradient, or a nonzero row of the Hessian."""
    whole = H.restricted(BlockLayout([block], tensors))
    v = torch.randn(whole.order, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    used = (whole.gradient != 0) | (whole @ v.to(whole.device) != 0)
    rows = torch.zeros(len(block.units), dtype=torch.bool, device=used.device)
    start = 0
    for piece in block.pieces:
        outer, _, inner = piece.shape
        rows |= used[start : start + piece.size].view(outer, len(rows), inner).any(2).any(0)
        start += piece.size
    if not rows.any():
        raise CaptureError(f"layer {block.name!r} cannot be probed: the loss depends on none of its rows")
    return block if bool(rows.all()) else block.at(rows.nonzero()[:, 0].tolist())


@dataclass
class LayerCapturing:
    """Captured layers, each compared with the derivatives of the model itself on every batch.

    A layer that disagrees on the first batch is captured again, by double backward in the parameters themselves.
    """

    probe: LayerProbe
    layers: Mapping[str, Layer]
    reference: ReferenceProducts | None
    directions: dict[str, CheckDirection] = field(default_factory=dict)
    verdicts: dict[str, Check] = field(default_factory=dict)
    in_parameters: frozenset[str] = frozenset()
    failed: set[str] = field(default_factory=set)
    without_units: dict[str, str] = field(default_factory=dict)

    def kept(self, batch: Batch) -> LayerSums:
        """Return the Hessians on one batch, from their captures."""
        captures, _ = self._screened(batch, None)
        statistics = {name: self.probe.collect(name, own.inputs) for name, own in captures.items()}
        routes = {name: own.route for name, own in captures.items()}
        return LayerSums({}, statistics, routes, {}, 1.0, captures)

    def over(self, batches: Iterable[Batch]) -> LayerSums:
        """Return the Hessians over a stream of batches together, of all processes."""
        team = self.probe.team
        if team is None:
            return self._sums(batches)
        own, failure = None, None
        try:
            own = self._sums(batches)
        except HesscondError as error:
            failure = error
        return joined(all_or_none(team, own, failure))

    def result(self, name: str, sums: LayerSums) -> LayerResult:
        """Return the result of a layer in its coordinates."""
        probe, geometry, block = self.probe, Geometry.of(self.layers[name]), self.probe.blocks[name]
        moved = {id(probe.model.get_parameter(parameter)) for parameter in block.parameters}
        own = probe.resolved(name, sums.statistics.get(name), geometry)
        captured = sums.captures.get(name)
        made = sums.blocks[name].__getitem__ if captured is None else partial(probe.block, captured)
        source = probe.source(lambda _, unit: made(unit))
        units: Iterable[int | None] = sums.blocks[name] if captured is None else captured.units
        together = None
        if captured is not None and probe.level == "unit" and (own is None or isinstance(own, Preconditioner)):
            together = partial(unit_conditions, captured, own, rtol=probe.rtol, memory=probe.memory)
        result = LayerResult(
            name,
            probe.level,
            [unit for unit in units if unit is not None and probe.level == "unit"],
            partial(source.block, own, name),
            parameters=[p for p in self._parameters(name) if id(probe.model.get_parameter(p)) in moved],
            n_params=block.order // (1 if probe.level == "layer" else geometry.units),
            route=sums.routes[name],
            rtol=probe.rtol,
            conditions=together,
        )
        if self.reference is not None and probe.team is None:
            direction = self.directions[name]
            known = None if captured is None else self.verdicts.get(name)
            result.check = self._verdict(direction, result.block(direction.unit), sums.total, known)
            result.uncertainty = self.reference.uncertainty(direction)
            refuse_failed(name, result.check, DIFFERENT_SUM)
        elif self.reference is not None:
            # each process has checked its share of the data
            result.check, result.uncertainty = sums.checks[name], sums.uncertainties[name]
        if self.reference is not None:
            result.uncertain = uncertain(self.reference.precision)
        return result

    def _sums(self, batches: Iterable[Batch]) -> LayerSums:
        """Return the Hessians over the batches of this process."""
        probe = self.probe
        routes: dict[str, str] = {}
        weights = Weights(probe.model, probe.loss_fn, probe.dtype, probe.reduction, probe.weight)

        def weighed() -> Iterator[tuple[Captures, float]]:
            for batch in batches:
                captures, weight = self._screened(batch, weights)
                routes.update({name: own.route for name, own in captures.items()})
                yield captures, weight

        blocks: dict[str, dict[int | None, BlockHessian]] = {}
        whole = probe.level == "layer"
        hessians, statistics = stream(weighed(), probe.memory, lambda: weights.total, probe.collect, whole=whole)
        for (name, unit), block in hessians.items():
            if name not in self.failed:
                blocks.setdefault(name, {})[unit] = block
        # refuses a stream that is empty, or in which nothing counts
        routes = {name: routes[name] for name in blocks}
        found = LayerSums(blocks, statistics, routes, weights.totals(), weights.total)
        if probe.team is not None and self.reference is not None:
            for name, own in blocks.items():
                direction = self.directions[name]
                found.checks[name] = self._verdict(direction, own[direction.unit], found.total)
                found.uncertainties[name] = self.reference.uncertainty(direction)
                refuse_failed(name, found.checks[name], DIFFERENT_SUM)
        return found

    def _screened(self, batch: Batch, weights: Weights | None) -> tuple[Captures, float]:
        """Capture a batch and return its weight too; layers seen for the first time are compared with the model.

        Layers that do not agree are captured again, in their parameters.
        """
        captures = self._captures(batch, weights)
        weight = 1.0 if captures.mass is None else captures.mass
        if self.reference is None or captures.mass == 0:
            self._note_skipped(captures)
            return captures, weight
        if self.directions or captures.skipped:
            self.reference.add(batch, list(self.directions.values()), weight)
        unseen = {name for name in captures.skipped if self.reference.reached & set(self._parameters(name))}
        if unseen - self.in_parameters:
            # the loss depends on them, though not through their outputs
            self.in_parameters |= unseen
            captures = self._captures(batch, None)
        self._skip_without_units(captures, batch)
        self._note_skipped(captures)
        new = {name: own for name, own in captures.items() if name not in self.directions}
        if new:
            failed = self._failed(batch, captures, new)
            for name in [name for name, verdict in failed.items() if verdict.contradicted]:
                self._skip_wrong(name, failed.pop(name))
                del captures[name], new[name]
            for name, verdict in failed.items():
                self._refuse_expensive(name, captures, verdict)
            if failed and captures.stopped:
                # there is no time to do it again
                for name in failed:
                    del captures[name], new[name]
                    captures.stopped.append(name)
                self._note_skipped(captures)
            elif failed:
                self.in_parameters |= frozenset(failed)
                captures = self._captures(batch, None)
                again = {name: own for name, own in captures.items() if name in failed}
                for name, verdict in self._failed(batch, captures, again).items():
                    refuse_failed(name, verdict, self._reason(captures, verdict))
            for name in new.keys() - self.failed:
                self.directions[name].count(weight)
        for name in captures.keys() & captures.slopes:
            self.directions[name].add_slopes(captures.slopes[name], weight)
        return captures, weight

    def _captures(self, batch: Batch, weights: Weights | None) -> Captures:
        """Capture the layers that have finite second derivatives; the others are left out from now on."""
        names = [name for name in self.layers if name not in self.failed]
        if not names:
            raise CaptureError("; ".join(f"layer {name!r}: {self.probe.skipped[name]}" for name in self.layers))
        captures = self.probe.capture(names, batch, weights, self.in_parameters)
        for name, error in captures.failed.items():
            if self.probe._named(name) or self.probe.team is not None:
                raise type(error)(f"layer {name!r} cannot be probed: {error}")
            self.failed.add(name)
            self.directions.pop(name, None)
            self.probe.skipped[name] = str(error)
        return captures

    def _skip_without_units(self, captures: Captures, batch: Batch) -> None:
        """Leave out layers whose weight is also used elsewhere in a way that its rows are not outputs."""
        odd = captures.in_parameters & captures.keys() - self.directions.keys() - self.without_units.keys()
        odd = {name for name in odd if stock_class(self.layers[name]) is not None}
        if odd and self.probe.level == "unit":
            turned, why = self.probe.units_by_use(odd, batch)
            words = "its weight is used elsewhere, where its rows are no outputs: use level='layer'"
            self.without_units |= why | dict.fromkeys(turned, words)
        for name in self.without_units.keys() & captures.keys():
            del captures[name]
            captures.skipped[name] = self.without_units[name]

    def _parameters(self, name: str) -> list[str]:
        return [parameter for parameter, _ in parameters_of(self.probe.model, name, self.layers[name])]

    def _note_skipped(self, captures: Captures) -> None:
        """Note the layers that a batch does not reach; an error if one was named, and the batch is all the data."""
        if captures.stopped and not is_batch(self.probe.data):
            raise CaptureError("stopped before all batches were read: a stream is measured as a whole")
        self.probe.skipped.update(dict.fromkeys(captures.stopped, STOPPED))
        for name, reason in captures.skipped.items():
            if self.probe._named(name) and is_batch(self.probe.data):
                raise CaptureError(f"layer {name!r} cannot be probed: {reason}")
        self.probe.skipped.update(captures.skipped)

    def _failed(self, batch: Batch, captures: Captures, chosen: Mapping[str, LayerCapture]) -> dict[str, Check]:
        """Checks of the ``chosen`` captures of one batch that do not agree with the model, by layer name."""
        assert self.reference is not None
        self.directions |= self._new_directions(chosen)
        self.reference.add(batch, [self.directions[name] for name in chosen])
        failed = {}
        for name, own in chosen.items():
            direction = self.directions[name]
            trial = replace(direction)
            if name in captures.slopes:
                trial.add_slopes(captures.slopes[name])
            verdict = self.verdicts[name] = self.reference.verdict(trial, self.probe.block(own, direction.unit))
            if not verdict.passed:
                failed[name] = verdict
        return failed

    def _skip_wrong(self, name: str, verdict: Check) -> None:
        """Skip a layer whose second derivatives are wrong in the model; an error if the layer was named."""
        try:
            refuse_failed(name, verdict, "")
        except CaptureError as error:
            if self.probe._named(name):
                raise
            self.probe.skipped[name] = str(error)
            self.layers = {other: layer for other, layer in self.layers.items() if other != name}

    def _refuse_expensive(self, name: str, captures: Captures, verdict: Check) -> None:
        """Raise a CaptureError if a layer was already captured in its parameters, or if that would take too long."""
        why, own = self._reason(captures, verdict), captures[name]
        if name in captures.in_parameters:
            refuse_failed(name, verdict, why)
        products = len(own.units) * own.inputs.geometry.n_params
        if products > PRODUCTS:
            refuse_failed(
                name,
                verdict,
                f"{why}; to measure it by {products:,} products takes too long: name fewer layers with layers=, and "
                "at level='unit' fewer units",
            )

    def _new_directions(self, captures: Mapping[str, LayerCapture]) -> dict[str, CheckDirection]:
        found = {}
        for name, own in captures.items():
            unit = None if self.probe.level == "layer" else most_curved(own)
            layers = {name: self.layers[name]}
            whole = UnitLayout(self.probe.model, layers, None)
            layout = whole if unit is None else UnitLayout(self.probe.model, layers, unit)
            block = self.probe.block(own, unit)
            found[name] = CheckDirection.of(block, layout, whole, unit, dtype=self.probe.dtype)
        return found

    def _verdict(
        self, direction: CheckDirection, block: BlockHessian, total: float, known: Check | None = None
    ) -> Check:
        """Check a block; a check that is ``known`` in plain coordinates is extended to the block's coordinates."""
        assert self.reference is not None
        if known is None:
            return self.reference.verdict(direction, block, total)
        return replace(known, difference=max(known.difference, in_coordinates(block, direction)))

    def _reason(self, captures: Captures, verdict: Check) -> str:
        """Likely reason for a difference from the model, in words."""
        assert self.reference is not None
        if not math.isclose(captures.loss, self.reference.loss, rel_tol=1e-6, abs_tol=1e-300):
            return (
                f"the model gives another loss every time it is run ({captures.loss:.6g}, {self.reference.loss:.6g}): "
                "it keeps a state, or draws random numbers that torch does not know of"
            )
        if verdict.slopes > verdict.bound:
            return (
                "the parameters act otherwise than through the output of their layer: in a derivative that the model "
                "or the loss takes, or in a use that was not seen"
            )
        return "the gradients agree, the second derivatives do not"


@dataclass(frozen=True)
class LayerSums:
    """Captures of one batch, or Hessians summed over a stream, with statistics, weights and checks."""

    blocks: Mapping[str, Mapping[int | None, BlockHessian]]
    statistics: dict[str, Any]
    routes: dict[str, str]
    masses: Mapping[Rule, float]
    total: float
    captures: Mapping[str, LayerCapture] = field(default_factory=dict)
    checks: dict[str, Check] = field(default_factory=dict)
    uncertainties: dict[str, float] = field(default_factory=dict)


def joined(parts: Sequence[LayerSums]) -> LayerSums:
    """Join the results of several processes."""
    everyone = [part.masses for part in parts]
    masses = [mass_of(own, everyone) for own in everyone]
    blocks: dict[str, dict[int | None, BlockHessian]] = {}
    found = LayerSums(blocks, {}, {}, {}, masses[0].total)
    if found.total == 0:
        raise CaptureError("no target in the data of any process counts in the loss: there is no Hessian")
    streamed: dict[tuple[str, int | None], StreamedBlock] = {}
    for part, mass in zip(parts, masses, strict=True):
        for name, own in part.blocks.items():
            found.routes.setdefault(name, part.routes[name])
            for unit, block in own.items():
                into = streamed.setdefault((name, unit), StreamedBlock(block.order, block.units))
                # the rank limit of a streamed factor is that of a loss invariant under a shift of all units
                shift = isinstance(block, FactoredHessian) and block.rank_limit is not None
                into.add(block, mass.value, shift=shift)
        for name, own_statistics in part.statistics.items():
            known = found.statistics.get(name)
            found.statistics[name] = own_statistics if known is None else known.merged(own_statistics)
        for name, check in part.checks.items():
            worst = found.checks.get(name)
            if worst is None or check.difference > worst.difference:
                found.checks[name] = check
            found.uncertainties[name] = max(found.uncertainties.get(name, 0.0), part.uncertainties[name])
    for (name, unit), streamed_block in streamed.items():
        blocks.setdefault(name, {})[unit] = streamed_block.hessian(found.total)
    return found


def unmeasured(model: nn.Module, reached: set[str], found: Mapping[str, LayerResult]) -> dict[str, str]:
    """Modules whose parameters have a gradient but no Hessian in a result, with the way to get it.

    For a measured layer that has further parameters outside its Hessian, these parameters are named.
    """
    names = dict(model.named_parameters(remove_duplicate=False))
    measured = {id(names[name]) for own in found.values() for name in own.parameters}
    missing: dict[str, list[str]] = {}
    for name, parameter in model.named_parameters():
        if name not in reached or not parameter.requires_grad or id(parameter) in measured:
            continue
        owner, _, attribute = name.rpartition(".")
        missing.setdefault(owner.partition(".parametrizations.")[0], []).append(attribute)
    reasons: dict[str, str] = {}
    for owner, attributes in missing.items():
        if (owner or "model") in found:
            reason = f"no part of the weight and bias of layer {owner or 'model'!r}: use level='network'"
            reasons |= {f"{owner}.{attribute}" if owner else attribute: reason for attribute in attributes}
            continue
        kind = type(model.get_submodule(owner)).__name__
        what = f"{kind} with {', '.join(attributes)}, no dense or convolutional layer"
        way = f"name it, layers=[{owner!r}], or use level='network'" if owner else "use level='network'"
        reasons[owner or "model"] = f"{what}: {way}"
    return reasons
