"""Hessians of layers, or of their units: each is captured, or measured by products."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from hesscond.capture.layers import stock_class
from hesscond.errors import CaptureError, ConfigError
from hesscond.hessians import Chart
from hesscond.hessians.blocks import Block
from hesscond.probing.applied import block_coordinates
from hesscond.probing.captured import captured_results, reached
from hesscond.probing.products import by_products, in_chart, units_by_use
from hesscond.probing.question import Measurement, Question
from hesscond.probing.results import LayerResult, ProbeResult


def layer_results(question: Question) -> ProbeResult:
    """Results of the layers that a question names, or of their units."""
    m = Measurement(question)
    chosen = question.choice.blocks(question.model)
    units = question.level == "unit"
    question.refuse_little(block.width if units and block.units else block.order for block in chosen.values())
    choose(m, chosen)
    found = measured(m)
    if question.check and question.choice.names is None:
        names = reached(m.question) if m.reached is None else m.reached
        m.skipped = unmeasured(question.model, names, found) | m.skipped
    if not found:
        raise CaptureError("; ".join(f"layer {name!r} cannot be probed: {why}" for name, why in m.skipped.items()))
    skipped = {name: why for name, why in m.skipped.items() if name not in found}
    precision = "not looked at (check=False)" if m.precision is None else str(m.precision)
    return ProbeResult({name: found[name] for name in m.blocks if name in found}, skipped, precision)


def choose(m: Measurement, chosen: Mapping[str, Block]) -> None:
    """Find the coordinates of the chosen blocks, and the units of layers with a forward pass of their own."""
    question = m.question
    for name, block in chosen.items():
        with m.skipping(name, ConfigError):
            part = m.moved(name, block)
            m.systems[name] = block_coordinates(question, name, part)
            m.blocks[name] = part
    odd = [name for name, own in m.blocks.items() if own.layer is not None and stock_class(own.layer) is None]
    odd = [name for name in odd if not isinstance(m.systems[name], Chart)]
    if question.level == "layer" or not odd:
        return
    # a custom forward pass may use the weight in another way
    m.keep_data()
    turned, unclear = units_by_use(m, odd, m.question.data)
    for name, why in unclear.items():
        if question.named(name):
            raise ConfigError(why)
        m.skipped[name] = why
        del m.blocks[name]
    m.blocks |= turned
    m.systems |= {name: block_coordinates(question, name, block) for name, block in turned.items()}


def measured(m: Measurement) -> dict[str, LayerResult]:
    """Results of the blocks: of captured layers, of layers in charts, and of other parameters by products."""
    charts = {name: own for name in m.blocks if isinstance(own := m.systems[name], Chart)}
    plain = {name: block for name, block in m.blocks.items() if name not in charts and block.layer is None}
    if (charts or plain) and m.question.team is not None:
        raise ConfigError(
            f"layer {next(iter(charts | plain))!r} is measured by products, which several processes form together "
            "at level='network' only: start one process"
        )
    captured = {name: b.layer for name, b in m.blocks.items() if name not in charts and b.layer is not None}
    if bool(charts) + bool(captured) + bool(plain) > 1:
        # they read the data one after the other
        m.keep_data()
    found = captured_results(m, captured) if captured else {}
    for name, chart in charts.items():
        with m.skipping(name, CaptureError):
            found[name] = in_chart(m, name, chart)
    return found | (by_products(m, plain) if plain else {})


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
