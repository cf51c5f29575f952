"""Hessians of layers, or of their units: each is captured, or measured by products."""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import replace

from hesscond.capture import Layer
from hesscond.capture.forward import COMPLEX
from hesscond.capture.layers import stock_class
from hesscond.errors import CaptureError, ConfigError, NoDerivativeError
from hesscond.hessians import Chart
from hesscond.hessians.blocks import Block
from hesscond.hessians.catalogue import ROOT, Catalogue, Choice
from hesscond.probing import products, results
from hesscond.probing.applied import block_coordinates
from hesscond.probing.captured import captured_results, reached
from hesscond.probing.question import Measurement, Question
from hesscond.problem.evaluation import Batch
from hesscond.sheets import duration, listed

#: Largest number of blocks that a reason names one by one.
MOST = 4
#: Scope of a probe that names no layers, of a model in which no dense or convolutional layer can be measured.
EVERYTHING = "no dense or convolutional layer to measure: all other parameters are measured instead"


def layer_results(question: Question) -> results.ProbeResult:
    """Results of the layers that a question names, or of their units."""
    m, scope = Measurement(question), ""
    layers = chosen_results(m)
    if not layers and question.choice.names is None and not (m.blocks and isinstance(question.data, Iterator)):
        scope, others = EVERYTHING, Choice.of(question.model, "*", None, question.level)
        m.question = replace(m.question, choice=others.without(m.skipped))
        layers = chosen_results(m)
    elif question.check and question.choice.names is None:
        m.skipped = unmeasured(m, layers) | m.skipped
    if not layers:
        raise CaptureError(together(m.skipped))
    if question.level == "unit":
        m.skipped = without_unit(m, layers) | m.skipped
    skipped = {name: why for name, why in m.skipped.items() if name not in layers}
    precision = "not looked at (check=False)" if m.precision is None else str(m.precision)
    result = results.ProbeResult({name: layers[name] for name in m.blocks if name in layers}, skipped, precision)
    result.scope = scope or sampled(question)
    return result


def without_unit(m: Measurement, layers: Mapping[str, results.LayerResult]) -> dict[str, str]:
    """Trained parameters of measured layers that are in none of their units, each with the reason."""
    measured_ones = {parameter for layer in layers.values() for parameter in layer.parameters}
    return {
        parameter: f"belongs to no unit of layer {name!r}: use level='layer'"
        for name, block in m.blocks.items()
        for parameter in (block.parameters if name in layers else ())
        if parameter not in measured_ones and m.question.model.get_parameter(parameter).requires_grad
    }


def sampled(question: Question) -> str:
    """Units that were measured where all would have taken too long, in words; empty: all were."""
    progress, natural = question.progress, Catalogue(question.model).natural
    shares = {f"{len(units)} of {len(natural[name].units)}": 0 for name, units in progress.sample.items() if units}
    if not progress.sample:
        return ""
    return (
        f"a sample of the units ({', '.join(shares)} of a layer): all take about {duration(progress.whole)}, "
        "units='all'" + (progress.reason and f", {progress.reason}")
    )


def together(skipped: Mapping[str, str]) -> str:
    """Reasons for layers that are not measured, each once, in words."""
    layers: dict[str, list[str]] = {}
    for name, why in skipped.items():
        layers.setdefault(why, []).append(repr(name))
    return "; ".join(
        f"layer{'s' if len(names) > 1 else ''} {listed(names)} cannot be probed: {why}" for why, names in layers.items()
    )


def chosen_results(m: Measurement) -> dict[str, results.LayerResult]:
    """Results of the blocks that the question of a measurement names."""
    chosen, units = m.question.choice.blocks(m.question.model), m.question.level == "unit"
    m.question.refuse_little(block.width if units and block.units else block.order for block in chosen.values())
    choose(m, chosen)
    return measured(m)


def choose(m: Measurement, chosen: Mapping[str, Block]) -> None:
    """Find the coordinates of the chosen blocks, and the units of layers with a forward pass of their own."""
    question = m.question
    for name, block in chosen.items():
        with m.skipping(name, ConfigError):
            part = m.moved(name, block)
            m.systems[name] = block_coordinates(question, name, part)
            m.blocks[name] = part
    odd = [name for name, block in m.blocks.items() if block.layer is not None and stock_class(block.layer) is None]
    odd = [name for name in odd if not isinstance(m.systems[name], Chart)]
    if question.level == "layer" or not odd:
        return
    # a custom forward pass may use the weight in another way
    m.keep_data()
    turned, unclear = products.units_by_use(m, odd, m.question.data)
    for name, why in unclear.items():
        if question.named(name):
            raise ConfigError(why)
        m.blocks[name] = replace(m.blocks[name].whole(why), layer=None)
    m.blocks |= turned
    m.systems |= {name: block_coordinates(question, name, block) for name, block in turned.items()}


def measured(m: Measurement) -> dict[str, results.LayerResult]:
    """Results of the blocks: of captured layers, of layers in charts, and of other parameters by products."""
    charts = {name: system for name in m.blocks if isinstance(system := m.systems[name], Chart)}
    plain = {name: block for name, block in m.blocks.items() if name not in charts and block.layer is None}
    captured = {name: b.layer for name, b in m.blocks.items() if name not in charts and b.layer is not None}
    if bool(charts) + bool(captured) + bool(plain) > 1:
        # they read the data one after the other
        m.keep_data()
    layers = captured_apart(m, captured) if captured else {}
    turned = {name: replace(m.blocks[name], layer=None) for name in m.multiplied}
    plain |= turned
    m.blocks |= turned
    for name, chart in charts.items():
        with m.skipping(name, CaptureError):
            layers[name] = products.in_chart(m, name, chart)
    layers |= products.by_products(m, plain) if plain else {}
    for name in turned.keys() & layers.keys():
        layers[name].remark = f"by products alone: {m.multiplied[name]}"
    return layers | products.by_differences(m)


def captured_apart(m: Measurement, layers: Mapping[str, Layer]) -> dict[str, results.LayerResult]:
    """Results of captured layers: together, or one by one if second derivatives are missing that all of them share."""
    try:
        return captured_results(m, layers)
    except NoDerivativeError as error:
        if isinstance(m.question.data, Iterator):
            raise
        over = {*m.differenced, *m.skipped, *m.multiplied}
        left = {name: layer for name, layer in layers.items() if name not in over}
        if len(left) <= 1:
            for name in left:
                with m.skipping(name, CaptureError):
                    raise error
            return {}
    return {key: result for name in left for key, result in captured_apart(m, {name: left[name]}).items()}


def unmeasured(m: Measurement, layers: Mapping[str, results.LayerResult]) -> dict[str, str]:
    """Modules whose parameters have a gradient but no Hessian in a result, with the way to get it or the obstacle."""
    parameters, first = reached(m.question) if m.reached is None else m.reached
    catalogue = Catalogue(m.question.model)
    # no derivatives are taken in complex parameters, which may or may not be reached
    imaginary = {key for key, p in catalogue.parameters.items() if p.is_complex() and p.requires_grad}
    left = left_out(m, catalogue, layers, {*parameters, *imaginary})
    real = {name: catalogue.natural[name] for name, keys in left.items() if not imaginary.intersection(keys)}
    failing, undivided = trial(m, real, first)
    failing |= dict.fromkeys(left.keys() - real.keys(), COMPLEX)
    owners: dict[str, list[str]] = {}
    for name, keys in left.items():
        owner = owner_of(keys[0])
        inside = owner in layers or (owner == ROOT and name != ROOT)
        owners.setdefault(keys[0] if inside else owner, []).append(name)
    reasons = {}
    for owner, names in owners.items():
        what = described(owner, [key for name in names for key in left[name]], catalogue, layers)
        fit = [owner if name in layers else name for name in names if name not in failing]
        way = f"name it, layers={fit if len(fit) <= MOST else [f'{owner}*']}"
        way += ", level='layer'" * bool({*fit} & undivided)
        reasons[owner] = f"{what}: {way if fit else failing[names[0]]}"
    return reasons


def left_out(
    m: Measurement, catalogue: Catalogue, layers: Mapping[str, results.LayerResult], names: Container[str]
) -> dict[str, list[str]]:
    """Parameters among the ``names`` that are in no result, by block; of blocks that are not skipped."""
    measured = {id(catalogue.parameters[name]) for layer in layers.values() for name in layer.parameters}
    missing = {key for key, p in catalogue.parameters.items() if key in names and id(p) not in measured}
    by_block = {name: [key for key in block.parameters if key in missing] for name, block in catalogue.natural.items()}
    return {name: keys for name, keys in by_block.items() if keys and name not in m.skipped}


def described(owner: str, keys: Sequence[str], catalogue: Catalogue, layers: Container[str]) -> str:
    """Description of a module, with the attributes that some parameters of it have, or of a single parameter."""
    if catalogue.module(owner) is None:
        kind = catalogue.kind(place := owner_of(owner))
        if place in layers:
            return f"no part of the weight and bias of layer {place!r}, a {kind}"
        return f"parameter of {kind}, {results.OTHER}"
    inner = (key.removeprefix(f"{owner}." * (owner != ROOT)).split(".") for key in keys)
    attributes = dict.fromkeys(parts[1] if parts[0] == "parametrizations" else ".".join(parts) for parts in inner)
    return f"{catalogue.kind(owner)} with {', '.join(attributes)}, {results.OTHER}"


def owner_of(parameter: str) -> str:
    """Name of the module that a parameter belongs to; for one of a parametrization that of the parametrized module."""
    return f".{parameter}".rpartition(".")[0].partition(".parametrizations.")[0][1:] or ROOT


def trial(m: Measurement, blocks: Mapping[str, Block], batch: Batch | None) -> tuple[dict[str, str], set[str]]:
    """Reasons why some blocks cannot be measured by products, on one batch, and blocks that units do not divide."""
    if not blocks or batch is None:
        return {}, set()
    question, catalogue = replace(m.question, data=batch), Catalogue(m.question.model)
    names = dict.fromkeys(key for block in blocks.values() for key in block.parameters)
    try:
        uses = question.source().operator(parameters=list(names)).uses
    except CaptureError as error:
        if isinstance(error, NoDerivativeError) and question.takes_differences:
            return {}, set()
        failing = products.causes(question, blocks) or dict.fromkeys(blocks, str(error))
        others, undivided = trial(m, {name: block for name, block in blocks.items() if name not in failing}, batch)
        return failing | others, undivided
    undivided = set()
    for name, block in blocks.items() if question.level == "unit" else ():
        try:
            catalogue.by_use(block, uses)
        except ConfigError:
            undivided.add(name)
    return {}, undivided
