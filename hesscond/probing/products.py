"""Hessians of layers by products, in charts or in parameters that no layer is captured in, or by differences."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache, partial

import torch
from torch import nn

from hesscond.capture import kinds
from hesscond.capture.layers import checked_units
from hesscond.capture.nonfinite import reasons
from hesscond.errors import CaptureError, ConfigError, HesscondError
from hesscond.hessians import HessianOperator
from hesscond.hessians.blocks import Block
from hesscond.hessians.catalogue import Catalogue
from hesscond.hessians.coordinates import base
from hesscond.hessians.coordinates.parameter_maps import ParameterMaps
from hesscond.hessians.differenced import GRADIENTS, DifferencedOperator
from hesscond.hessians.formed import CHANGED, EIGENVALUES, FormedHessian, UnitMatrices, unit_matrices
from hesscond.hessians.network_hessian import BlockSource, NetworkHessian, ZeroPaddedHessian
from hesscond.hessians.parameters import BlockLayout, Layout, UnitLayout
from hesscond.operators.operator import MARGIN
from hesscond.operators.threads import side_by_side, threads_for
from hesscond.probing import check as checks
from hesscond.probing.applied import block_coordinates
from hesscond.probing.question import Measurement, Question, System
from hesscond.probing.results import LayerResult
from hesscond.problem.evaluation import Batch
from hesscond.spectra import condition

#: Largest number of products with the model's Hessian for a layer that cannot be captured otherwise.
PRODUCTS = 20_000
#: Products that bound κ of a block that is too large to be formed and has no approximate inverse to iterate with.
BOUNDING = 24
#: Up to this order, a Hessian has too few entries for its asymmetry to show their rounding.
FEW = 3


def in_chart(m: Measurement, name: str, chart: base.Chart) -> LayerResult:
    """Measure a layer whose Hessian is known by its products in a chart."""
    question = m.question
    source = question.source()
    units = chart.chosen_units(question.model, name, question.units) if question.level == "unit" else ()
    # all of them now: the model may be another one when they are read
    blocks: dict[int | None, base.BlockHessian] = {}
    operators: dict[int | None, HessianOperator] = {}
    for unit in units or [None]:
        blocks[unit], operators[unit] = source.block(chart, name, unit), source.latest
    H, block = source.latest, m.blocks[name]
    whole = not units or block.layer is not None
    names = {piece.parameter for piece in block.pieces if whole or piece.rows is not None}
    # else the coordinates are no entries of parameters
    named = all(isinstance(part, NetworkHessian) and part.operator is operators[unit] for unit, part in blocks.items())
    result = LayerResult(
        name,
        question.level,
        units,
        blocks.__getitem__,
        parameters=[parameter for parameter in H.names if whole or parameter in names],
        n_params=next(iter(blocks.values())).order,
        route=f"products, in {chart.name}",
        rtol=question.rtol,
        entries=(lambda unit: operators[unit].layout.entries(question.model)) if named else None,
    )
    if question.check:
        result.check, result.uncertainty, precision = checks.check_operator(H)
        result.uncertain = checks.uncertain(precision)
        m.precision = precision if m.precision is None else m.precision
        checks.refuse_failed(name, result.check)
        # the gradient is in a Hessian on a manifold too
        zero = cache(lambda operator: checks.rounding_of(operator) if checks.is_flat(operator) else None)
        known = {unit: zero(operator) if chart.keeps_zeros else None for unit, operator in operators.items()}
        result.rounding = {unit: at for unit, at in known.items() if at is not None or not chart.keeps_zeros}
    return result


def by_products(m: Measurement, blocks: Mapping[str, Block]) -> dict[str, LayerResult]:
    """Results of blocks of any parameters, all by the products of one operator."""
    question, source = m.question, m.question.source()
    catalogue = Catalogue(question.model)
    names = dict.fromkeys(name for block in blocks.values() for name in block.parameters)
    try:
        H = source.operator(parameters=list(names))
    except CaptureError as error:
        if len(blocks) > 1 and not isinstance(question.data, Iterator):
            return apart(m, blocks)
        for name in blocks:
            with m.skipping(name, CaptureError):
                raise error
        return {}
    work: dict[str, ByProducts] = {}
    chosen = blocks_by_use(m, blocks, H, catalogue) if question.level == "unit" else blocks
    for name, block in chosen.items():
        with m.skipping(name, HesscondError):
            work[name] = ByProducts.of(question, block, H, catalogue)
    return results_of(m, source, work) if work else {}


def results_of(m: Measurement, source: BlockSource, work: Mapping[str, ByProducts]) -> dict[str, LayerResult]:
    """Results of blocks of the operator of a source, each compared with the model if the question asks for that."""
    H, check, memory = source.latest, m.question.check, m.question.memory
    reference, directions = checks.reference_of(H, [block.operator for block in work.values()], keeps_products=True)
    noise = reference.noise(directions)
    m.precision = reference.precision if m.precision is None and check else m.precision
    zero_tests = reference.zero_tests(directions, noise, H.total_mass)
    matrices = CHANGED if any(m.systems[name] is not None for name in work) else EIGENVALUES
    parts = {name: (block.operator, block.index()) for name, block in work.items() if block.units}
    formed = unit_matrices(H, parts, memory - H.held, matrices)
    spare = memory - H.held - 8 * sum(hessians.H.numel() for hessians in formed.values())
    results = {}
    for (name, block), direction, errors, zero in zip(work.items(), directions, noise, zero_tests, strict=True):
        units, errors = formed.get(name), errors / direction.v.square().mean().sqrt()
        result = block.result(source, m.systems[name], errors, units, spare)
        rows = dict(zip(block.units, block.index(), strict=True)) if block.units else {None: None}
        result.rounding = {unit: known for unit, at in rows.items() if (known := zero(at)) is not None}
        with m.skipping(name, CaptureError):
            if check:
                result.check = reference.verdict(direction, checks.as_block(block.operator), H.total_mass)
                if units is not None:
                    result.check = replace(result.check, difference=max(result.check.difference, units.difference))
                checks.refuse_failed(name, result.check)
                result.uncertainty = max(reference.uncertainty(direction), direction.cancellation_error / H.total_mass)
                result.uncertain = checks.uncertain(reference.precision)
            results[name] = result
    return results


def apart(m: Measurement, blocks: Mapping[str, Block]) -> dict[str, LayerResult]:
    """Measure blocks whose common operator failed: without the failing blocks together, or else one by one."""
    failing = causes(m.question, blocks)
    m.skipped |= failing
    for name, reason in failing.items():
        if m.question.named(name):
            raise CaptureError(f"layer {name!r} cannot be probed: {reason}")
    fit = {name: block for name, block in blocks.items() if name not in failing}
    if failing:
        return by_products(m, fit) if fit else {}
    return {name: result for block in fit for name, result in by_products(m, {block: fit[block]}).items()}


def causes(question: Question, blocks: Mapping[str, Block]) -> dict[str, str]:
    """Reasons why blocks have no second derivatives, by name."""
    parts = {name: [question.model.get_parameter(p) for p in block.parameters] for name, block in blocks.items()}
    messages = reasons(question.model, question.loss_fn, question.batches, parts, question.dtype)
    return {name: f"no second derivatives: {reason}" for name, reason in messages.items()}


def units_by_use(
    m: Measurement, names: Iterable[str], data: Batch | Iterable[Batch]
) -> tuple[dict[str, Block], dict[str, str]]:
    """Blocks of the layers whose units are not the rows of their weight, and reasons why others have no units."""
    question = m.question
    catalogue = Catalogue(question.model)
    parts: dict[str, Block] = {}
    reasons: dict[str, str] = {}
    blocks = {name: m.blocks[name] for name in names if not kinds.is_turned(m.blocks[name].layer)}
    if not blocks:
        return {}, {}
    parameters = dict.fromkeys(key for block in blocks.values() for key in block.parameters)
    try:
        uses = replace(question, data=data).source().operator(parameters=parameters).uses
    except HesscondError:
        return {}, {}
    for name, block in blocks.items():
        try:
            (part,) = catalogue.by_use(block, uses)
            parts |= {} if part == block else {name: replace(part, layer=None)}
        except ConfigError as error:
            reasons[name] = str(error)
    return parts, reasons


def blocks_by_use(
    m: Measurement, blocks: Mapping[str, Block], H: HessianOperator, catalogue: Catalogue
) -> dict[str, Block]:
    """Blocks by the outputs of their parameters; parameters with other outputs form a block, or are skipped."""
    question = m.question
    parts: dict[str, Block] = {}
    assigned_names: set[str] = set()
    # a parameter that belongs to the outputs of a module needs no separate block
    for name in sorted(blocks, key=lambda name: catalogue.module(name) is None):
        block = blocks[name]
        if name in question.choice.groups:
            parts[name] = block
        if name in question.choice.groups or (
            name in catalogue.parameters and not question.named(name) and assigned_names >= set(block.parameters)
        ):
            continue
        try:
            parts[name], *others = catalogue.by_use(block, H.uses)
        except ConfigError as error:
            if question.named(name):
                raise
            if question.units is not None:
                m.skipped[name] = str(error)
                continue
            parts[name], others = block.whole(str(error)), []
        part = parts[name]
        assigned_names |= {piece.parameter for piece in part.pieces if piece.rows is not None or not part.units}
        for other in others:
            if question.named(name):
                apart = f"belongs to other outputs than the units of layer {name!r}: name it"
                m.skipped |= {key: f"parameter {key!r} {apart}, layers=[{key!r}]" for key in other.parameters}
                continue
            parts[other.name], m.blocks[other.name] = other, other
            m.systems[other.name] = block_coordinates(m.question, other.name, other)
            assigned_names |= set(other.parameters)
    optional = question.choice.optional | (parts.keys() - blocks.keys())
    m.question = replace(question, choice=replace(question.choice, optional=optional))
    return {name: parts[name] for name in (*blocks, *parts) if name in parts}


def chosen_units(question: Question, block: Block, live: Block) -> tuple[int, ...]:
    """Units of a block that are measured: those asked for, or all; of a table those of its ``live`` part."""
    if question.units is None and block.table:
        return tuple(live.units)
    absent = [unit for unit in question.units or () if unit in block.units and unit not in live.units]
    if absent:
        raise ConfigError(
            f"unit {absent[0]} of layer {block.name!r} does not occur in the data: the loss does not depend on it"
        )
    return block.chosen(question.units)


@dataclass(frozen=True)
class ByProducts:
    """Block whose Hessians are known by products."""

    question: Question
    block: Block
    live: Block
    operator: HessianOperator
    units: tuple[int, ...]
    tensors: Mapping[str, nn.Parameter]

    @classmethod
    def of(cls, question: Question, block: Block, H: HessianOperator, catalogue: Catalogue) -> ByProducts:
        """Block of the parameters of an operator."""
        is_group = block.name in question.choice.groups
        missing = [name for name in block.parameters if name not in H.reached]
        if missing and (is_group or len(missing) == len(block.parameters)):
            what = f"block {block.name!r}" if is_group else f"layer {block.name!r}"
            raise CaptureError(f"{what} cannot be probed: the loss does not depend on parameter {missing[0]!r}")
        live = occurring(block, H, catalogue.parameters) if block.table else block
        units: tuple[int, ...] = ()
        divided = block.units or question.units is not None or question.named(block.name)
        if question.level == "unit" and divided and not is_group:
            units = chosen_units(question, block, live)
            live = live.at(range(len(live.units)))
            products = len(units) * live.width
            if products > PRODUCTS:
                raise ConfigError(
                    f"layer {block.name!r} has {len(units):,} units, whose Hessians take {products:,} products (up to "
                    f"{PRODUCTS:,} are made): name fewer with units=, or use level='layer'"
                )
        operator = H.restricted(BlockLayout([live], catalogue.parameters))
        return cls(question, block, live, operator, units=units, tensors=catalogue.parameters)

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
        system: System,
        noise: torch.Tensor,
        formed: UnitMatrices | None,
        spare: int,
    ) -> LayerResult:
        """Return the Hessians of the block; ``noise`` (n,) is the rounding in each row of the block.

        ``formed`` are the formed Hessians of the units, if any; ``spare`` bytes are left for computations with them.
        """
        H = self.operator
        per_unit = 8 * max(1, self.live.width) ** 2 * (EIGENVALUES if system is None else CHANGED)
        threads = max(1, min(threads_for(H.device), len(self.units), spare // per_unit))
        rows = dict(zip(self.units, self.index(), strict=True)) if self.units else {}

        def rounding(order: int, errors: torch.Tensor) -> float:
            # few entries do not show their rounding in their asymmetry
            return MARGIN * float(errors.norm()) if order <= FEW else 0.0

        def measured(plain: base.BlockHessian, layout: Layout) -> base.BlockHessian:
            if isinstance(system, ParameterMaps):
                return plain.in_coordinates(system.of(layout))
            return plain.in_coordinates(system.at(plain)) if isinstance(system, base.HessianScaling) else plain

        def unit_block(unit: int | None) -> base.BlockHessian:
            if unit is None:
                error = rounding(H.order, noise)
                whole = measured(source.products(H, error=error, unformed=BOUNDING), H.layout)
                if self.live is self.block:
                    return whole
                return ZeroPaddedHessian(whole, self.block.order, self._places().to(H.device), source.memory)
            layout, error = self._layout(unit), rounding(self.live.width, noise[rows[unit]])
            if formed is None:
                return measured(source.products(H.restricted(layout), error=error), layout)
            number = self.units.index(unit)
            spread = torch.hypot(formed.spread[number], torch.full_like(noise[:1], error / (16 * condition.EPS)).sqrt())
            H_unit, kept = formed.H[number], spare // threads
            plain = FormedHessian(H_unit, spread, formed.terms[number], vanishing=H.saturated, memory=kept)
            return measured(plain, layout)

        block = cache(unit_block)

        def together() -> list[condition.ConditionNumber]:
            return side_by_side(lambda unit: block(unit).condition_number(rtol=self.question.rtol), self.units, threads)

        result = LayerResult(
            self.block.name,
            "unit" if self.units else "layer",
            self.units,
            block,
            parameters=H.names,
            n_params=self.live.width if self.units else self.block.order,
            route="products, in the parameters themselves"
            + ("" if formed is None else ", through the curvature behind"),
            rtol=self.question.rtol,
            conditions=None if formed is None else together,
            entries=lambda unit: BlockLayout(
                [self.block if unit is None else self.live.unit(unit)], self.tensors
            ).entries(self.question.model),
        )
        if self.question.level == "unit" and self.block.name not in self.question.choice.groups and not self.units:
            reason = re.split(r"; |: use level", self.block.undivided)[0]
            result.remark = reason and f"{reason}: measured as a whole"
        return result

    def _places(self) -> torch.Tensor:
        """Indices of the entries of ``live`` in the vectors of the whole block."""
        indices, start = [], 0
        for piece, kept in zip(self.block.pieces, self.live.pieces, strict=True):
            index = kept.index()
            indices.append(start + (torch.arange(kept.size, device="cpu") if index is None else index))
            start += piece.size
        return torch.cat(indices)


def occurring(block: Block, H: HessianOperator, tensors: Mapping[str, nn.Parameter]) -> Block:
    """Block of a table's rows that the loss depends on: with a nonzero gradient, or a nonzero row of the Hessian."""
    whole = H.restricted(BlockLayout([block], tensors))
    v = torch.randn(whole.order, generator=torch.Generator().manual_seed(0), dtype=torch.float64, device="cpu")
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


#: Largest number of columns of the Hessians of a block.
COLUMNS = 1000
#: Difference from those of the loss that needs no explanation.
TOLERANCE = 1e-6


def by_differences(m: Measurement) -> dict[str, LayerResult]:
    """Results of the blocks that have no second derivatives."""
    results: dict[str, LayerResult] = {}
    while m.differenced:
        name, why = m.differenced.popitem()
        try:
            results |= {result.name: result for result in differenced_results(m, name, m.blocks[name])}
        except HesscondError as error:
            m.skipped[name] = f"{why}; by differences of its gradient: {error}"
            if m.question.named(name):
                raise CaptureError(f"layer {name!r} cannot be probed: {m.skipped[name]}") from None
    return results


def differenced_results(m: Measurement, name: str, block: Block) -> list[LayerResult]:
    """Result of a block, and those of its parameters that belong to other outputs."""
    question, catalogue, source = m.question, Catalogue(m.question.model), m.question.source(kind=DifferencedOperator)
    H = source.operator(parameters=list(block.parameters))
    if block.layer is not None:
        return [layer_result(m, name, block.layer, H)]
    chosen = blocks_by_use(m, {name: block}, H, catalogue) if question.level == "unit" else {name: block}
    results = []
    for key, part in chosen.items():
        hessian = ByProducts.of(question, part, H, catalogue)
        refuse_many(len(hessian.units) * hessian.live.width or hessian.operator.order)
        noise = torch.zeros(hessian.operator.order, dtype=torch.float64, device=H.device)
        results.append(checked(m, hessian.result(source, m.systems[key], noise, None, source.memory)))
    return results


def layer_result(m: Measurement, name: str, layer: kinds.Layer, H: HessianOperator) -> LayerResult:
    """Result of a dense or convolutional layer, its parameters in the order of one that is captured."""
    question, system = m.question, m.systems[name]
    if not isinstance(system, base.Preconditioner | base.HessianScaling | None):
        raise CaptureError(f"in the coordinates {system.name!r} they are not formed: leave method= out")
    units = checked_units(name, layer, question.units) if question.level == "unit" else ()
    chosen: list[int | None] = [*units] or [None]
    operators = {unit: H.restricted(UnitLayout(question.model, {name: layer}, unit)) for unit in chosen}
    refuse_many(sum(operator.order for operator in operators.values()))
    source = question.source(lambda _, unit: source.products(operators[unit]), DifferencedOperator)
    source.latest = H
    result = LayerResult(
        name,
        question.level,
        units,
        partial(source.block, system, name),
        parameters=H.names,
        n_params=next(iter(operators.values())).order,
        route=DifferencedOperator.route,
        rtol=question.rtol,
        entries=lambda unit: operators[unit].layout.entries(question.model),
    )
    return checked(m, result)


def checked(m: Measurement, result: LayerResult) -> LayerResult:
    """Result with its Hessians formed, each compared with differences of the loss."""
    result.route = DifferencedOperator.route
    for unit in result.blocks:
        block = result.block(unit)
        plain = (block.inner if isinstance(block, ZeroPaddedHessian) else block).plain
        assert isinstance(plain, NetworkHessian)
        assert isinstance(plain.operator, DifferencedOperator)
        check = replace(difference_check(result.name, plain.operator), unit=unit)
        m.precision = m.precision or plain.operator.precision
        if result.check is None or check.difference > result.check.difference:
            result.check = check
    return result


def difference_check(name: str, H: DifferencedOperator) -> checks.Check:
    """Comparison of vᵀHv, along a random direction, with differences of the loss; a CaptureError if they differ."""
    refuse_many(H.order)
    v = H.sizes * torch.rand(H.order, generator=torch.Generator().manual_seed(0), dtype=torch.float64, device="cpu").to(
        H.point
    )
    built = float(v @ (H @ v))
    form, error = H.curvature(v)
    whole = float((H.to_dense() * v * v[:, None]).norm()) or 1.0
    bound = max(TOLERANCE, (error + H.error * float(v @ v)) / whole)
    if not abs(built - form) <= bound * whole:
        raise CaptureError(
            f"vᵀHv is {built:.6g} by them and {form:.6g} by differences of the loss, so that the gradient in layer "
            f"{name!r} is not that of the loss: let the backward of each autograd.Function be the derivative of its "
            "forward"
        )
    return checks.Check(abs(built - form) / whole, bound, built, form, reference="differences of the loss")


def refuse_many(columns: int) -> None:
    """Raise a CaptureError for Hessians of too many columns."""
    if columns > COLUMNS:
        raise CaptureError(
            f"its Hessians have {columns:,} columns, of {GRADIENTS} gradients each, and up to {COLUMNS:,} are formed: "
            "name fewer units (units=), smaller parts (layers=), or level='unit'"
        )
