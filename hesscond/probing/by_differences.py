"""Hessians of blocks by differences of gradients, where torch has no second derivatives or wrong ones."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch

from hesscond.capture import Layer
from hesscond.capture.layers import checked_units
from hesscond.errors import CaptureError, HesscondError
from hesscond.hessians import HessianOperator, HessianScaling, Preconditioner
from hesscond.hessians.blocks import Block
from hesscond.hessians.catalogue import Catalogue
from hesscond.hessians.differenced import GRADIENTS, DifferencedOperator
from hesscond.hessians.network_hessian import NetworkHessian, ZeroPaddedHessian
from hesscond.hessians.parameters import UnitLayout
from hesscond.probing.check import Check
from hesscond.probing.products import ByProducts, blocks_by_use
from hesscond.probing.question import Measurement
from hesscond.probing.results import LayerResult

#: Largest number of columns of the Hessians of a block.
COLUMNS = 1000
#: Difference from those of the loss that needs no explanation.
TOLERANCE = 1e-6


def by_differences(m: Measurement) -> dict[str, LayerResult]:
    """Results of the blocks that have no second derivatives."""
    found: dict[str, LayerResult] = {}
    while m.differenced:
        name, why = m.differenced.popitem()
        try:
            found |= {own.name: own for own in results_of(m, name, m.blocks[name])}
        except HesscondError as error:
            m.skipped[name] = f"{why}; by differences of its gradient: {error}"
            if m.question.named(name):
                raise CaptureError(f"layer {name!r} cannot be probed: {m.skipped[name]}") from None
    return found


def results_of(m: Measurement, name: str, block: Block) -> list[LayerResult]:
    """Result of a block, and those of its parameters that belong to other outputs."""
    question, catalogue, source = m.question, Catalogue(m.question.model), m.question.source(kind=DifferencedOperator)
    H = source.operator(parameters=list(block.parameters))
    if block.layer is not None:
        return [layer_result(m, name, block.layer, H)]
    chosen = blocks_by_use(m, {name: block}, H, catalogue) if question.level == "unit" else {name: block}
    found = []
    for one, part in chosen.items():
        own = ByProducts.of(question, part, H, catalogue)
        refuse_many(len(own.units) * own.live.width or own.operator.order)
        noise = torch.zeros(own.operator.order, dtype=torch.float64, device=H.device)
        found.append(checked(m, own.result(source, m.systems[one], noise, None, source.memory)))
    return found


def layer_result(m: Measurement, name: str, layer: Layer, H: HessianOperator) -> LayerResult:
    """Result of a dense or convolutional layer, its parameters in the order of one that is captured."""
    question, system = m.question, m.systems[name]
    if not isinstance(system, Preconditioner | HessianScaling | None):
        raise CaptureError(f"in the coordinates {system.name!r} they are not formed: leave method= out")
    units = checked_units(name, layer, question.units) if question.level == "unit" else ()
    chosen: list[int | None] = [*units] or [None]
    made = {unit: H.restricted(UnitLayout(question.model, {name: layer}, unit)) for unit in chosen}
    refuse_many(sum(own.order for own in made.values()))
    source = question.source(lambda _, unit: source.products(made[unit]), DifferencedOperator)
    source.latest = H
    result = LayerResult(
        name,
        question.level,
        units,
        partial(source.block, system, name),
        parameters=H.names,
        n_params=next(iter(made.values())).order,
        route=DifferencedOperator.route,
        rtol=question.rtol,
        entries=lambda unit: made[unit].layout.entries(question.model),
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


def difference_check(name: str, H: DifferencedOperator) -> Check:
    """Comparison of vᵀHv, along a random direction, with differences of the loss; a CaptureError if they differ."""
    refuse_many(H.order)
    v = H.sizes * torch.rand(H.order, generator=torch.Generator().manual_seed(0), dtype=torch.float64, device="cpu").to(
        H.point
    )
    built = float(v @ (H @ v))
    own, error = H.curvature(v)
    whole = float((H.to_dense() * v * v[:, None]).norm()) or 1.0
    bound = max(TOLERANCE, (error + H.error * float(v @ v)) / whole)
    if not abs(built - own) <= bound * whole:
        raise CaptureError(
            f"vᵀHv is {built:.6g} by them and {own:.6g} by differences of the loss, so that the gradient in layer "
            f"{name!r} is not that of the loss: let the backward of each autograd.Function be the derivative of its "
            "forward"
        )
    return Check(abs(built - own) / whole, bound, built, own, reference="differences of the loss")


def refuse_many(columns: int) -> None:
    """Raise a CaptureError for Hessians of too many columns."""
    if columns > COLUMNS:
        raise CaptureError(
            f"its Hessians have {columns:,} columns, of {GRADIENTS} gradients each, and up to {COLUMNS:,} are formed: "
            "name fewer units (units=), smaller parts (layers=), or level='unit'"
        )
