"""Hessians of layers that are captured: of dense layers and convolutions, from their inputs Ĥ and curvatures S."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from hesscond.capture import LayerInputs, capturing, kinds
from hesscond.capture.captured import LayerCapture
from hesscond.capture.layers import checked_units, stock_class
from hesscond.capture.progress import STOPPED
from hesscond.errors import CaptureError, ConfigError, NoDerivativeError, TooLargeError
from hesscond.hessians import build, parameters, streaming
from hesscond.hessians.coordinates import base
from hesscond.methods.inputs import OfInputs
from hesscond.probing import check
from hesscond.probing.products import PRODUCTS, units_by_use
from hesscond.probing.question import Measurement, Question
from hesscond.probing.results import LayerResult
from hesscond.problem.containers import is_batch
from hesscond.problem.devices import accelerators_of
from hesscond.problem.evaluation import Batch
from hesscond.problem.untouched import untouched_randomness
from hesscond.problem.weighting import Weights

#: Error for a layer whose Hessian over all data differs from the model's.
DIFFERENT_SUM = "the sum over the batches does not agree with the model's own"


def captured_results(m: Measurement, layers: Mapping[str, kinds.Layer]) -> dict[str, LayerResult]:
    """Results of layers with a weight matrix of their own, or of their units."""
    question = m.question
    for name, layer in layers.items():
        checked_units(name, layer, question.units)
    if question.units is not None and not question.units:
        raise ConfigError("no unit was named: leave units= out for all of them")
    if question.level == "layer" and not is_batch(question.data):
        fitting = {}
        for name, layer in layers.items():
            with m.skipping(name, TooLargeError):
                streaming.refuse_layer(name, kinds.Geometry.of(layer), question.memory)
                fitting[name] = layer
        if not fitting:
            return {}
        layers = fitting
    reference = reference_for(question, layers) if question.check else None
    run = LayerCapturing(m, layers, reference)
    if is_batch(question.data):
        sums = run.kept(question.data)
    else:
        # a loader draws from the random state
        with untouched_randomness(accelerators_of(question.model.parameters())):
            sums = run.summed(question.batches)
    results = {}
    for name in sums.routes:
        with m.skipping(name, CaptureError):
            results[name] = run.result(name, sums)
    m.precision = None if reference is None else reference.precision
    m.reached = None if reference is None else (reference.reached, reference.first)
    return results


def reached(question: Question) -> tuple[set[str], Batch | None]:
    """Parameters that the loss depends on, and the first batch."""
    reference = reference_for(question, {})
    for batch in question.batches:
        reference.add(batch, [])
    return reference.reached, reference.first


def reference_for(question: Question, layers: Mapping[str, kinds.Layer]) -> check.ReferenceProducts:
    """Reference products in the layers' parameters, which also record what else the loss depends on."""
    model = question.model
    named = {name: p for name, p in model.named_parameters() if p.requires_grad and p.is_floating_point()}
    named |= dict(pair for name, layer in layers.items() for pair in parameters.parameters_of(model, name, layer))
    return check.ReferenceProducts(model, question.loss_fn, named, question.dtype)


@dataclass(frozen=True)
class LayerSums:
    """Captures of one batch, or Hessians summed over a stream, with statistics and the divisor of the weights."""

    blocks: Mapping[str, Mapping[int | None, base.BlockHessian]]
    statistics: Mapping[str, Any]
    routes: Mapping[str, str]
    total: float = 1.0
    captures: Mapping[str, LayerCapture] = field(default_factory=dict)


@dataclass
class LayerCapturing:
    """Captured layers, each compared with the derivatives of the model itself on every batch."""

    measurement: Measurement
    layers: Mapping[str, kinds.Layer]
    reference: check.ReferenceProducts | None
    directions: dict[str, check.CheckDirection] = field(default_factory=dict)
    verdicts: dict[str, check.Check] = field(default_factory=dict)
    in_parameters: frozenset[str] = frozenset()
    failed: set[str] = field(default_factory=set)
    without_units: dict[str, str] = field(default_factory=dict)

    @property
    def question(self) -> Question:
        """Question that the layers are captured for."""
        return self.measurement.question

    @property
    def _sample(self) -> dict[str, tuple[int, ...]]:
        """Units of the layers of which a sample is measured; none of layers that are left out."""
        return self.question.progress.sample

    def kept(self, batch: Batch) -> LayerSums:
        """Return the Hessians on one batch, from their captures."""
        captures, _ = self._screened(batch, None)
        left_out = [name for name, units in self._sample.items() if not units]
        self.measurement.skipped |= dict.fromkeys(left_out, self.question.progress.left_out)
        statistics = {name: self._collect(name, capture.inputs) for name, capture in captures.items()}
        routes = {name: capture.route for name, capture in captures.items()}
        return LayerSums({}, statistics, routes, captures=captures)

    def result(self, name: str, sums: LayerSums) -> LayerResult:
        """Return the result of a layer in its coordinates."""
        question, geometry, block = self.question, kinds.Geometry.of(self.layers[name]), self.measurement.blocks[name]
        parameter_ids = {id(question.model.get_parameter(parameter)) for parameter in block.parameters}
        system = self.measurement.systems[name]
        coordinates = system.resolved(sums.statistics.get(name), geometry) if isinstance(system, OfInputs) else system
        assert coordinates is None or isinstance(coordinates, base.Coordinates)
        captured = sums.captures.get(name)
        block_of = sums.blocks[name].__getitem__ if captured is None else partial(self.block, captured)
        source = question.source(lambda _, unit: block_of(unit))
        units: Iterable[int | None] = sums.blocks[name] if captured is None else captured.units
        together = None
        if (
            captured is not None
            and question.level == "unit"
            and (coordinates is None or (isinstance(coordinates, base.Preconditioner) and coordinates.same_for_units))
        ):
            together = partial(build.unit_conditions, captured, coordinates, rtol=question.rtol, memory=question.memory)
        result = LayerResult(
            name,
            question.level,
            [unit for unit in units if unit is not None and question.level == "unit"],
            partial(source.block, coordinates, name),
            parameters=[p for p in self._parameters(name) if id(question.model.get_parameter(p)) in parameter_ids],
            n_params=block.order // (1 if question.level == "layer" else geometry.units),
            route=sums.routes[name],
            rtol=question.rtol,
            conditions=together,
            entries=lambda unit: parameters.UnitLayout(question.model, {name: self.layers[name]}, unit).entries(
                question.model
            ),
        )
        self._compare(result, sums)
        return result

    def _compare(self, result: LayerResult, sums: LayerSums) -> None:
        """Compare a result over all the data with the model, if that is asked for."""
        if self.reference is None:
            if self.question.level == "layer":
                result.block(None)  # what is too large is refused now
            return
        name, result.uncertain = result.name, check.uncertain(self.reference.precision)
        direction, known = self.directions[name], self.verdicts.get(name) if name in sums.captures else None
        block = result.block(direction.unit)
        if known is None:
            result.check = self.reference.verdict(direction, block, sums.total)
        else:
            # known in plain coordinates
            result.check = replace(known, difference=max(known.difference, check.in_coordinates(block, direction)))
        result.uncertainty = self.reference.uncertainty(direction)
        check.refuse_failed(name, result.check, DIFFERENT_SUM)

    def summed(self, batches: Iterable[Batch]) -> LayerSums:
        """Return the Hessians over a stream of batches together."""
        question = self.question
        routes: dict[str, str] = {}
        weights = Weights(question.model, question.loss_fn, question.dtype, question.reduction, question.weight)

        def weighed() -> Iterator[tuple[capturing.Captures, float]]:
            for batch in batches:
                captures, weight = self._screened(batch, weights)
                routes.update({name: capture.route for name, capture in captures.items()})
                yield captures, weight

        blocks: dict[str, dict[int | None, base.BlockHessian]] = {}
        whole = question.level == "layer"
        hessians, statistics = streaming.stream(
            weighed(), question.memory, lambda: weights.total, self._collect, whole=whole
        )
        for (name, unit), block in hessians.items():
            if name not in self.failed:
                blocks.setdefault(name, {})[unit] = block
        # refuses a stream that is empty, or in which nothing counts
        return LayerSums(blocks, statistics, {name: routes[name] for name in blocks}, weights.total)

    def _screened(self, batch: Batch, weights: Weights | None) -> tuple[capturing.Captures, float]:
        """Capture a batch and return its weight too; layers seen for the first time are compared with the model."""
        captures = self._captures(batch, weights)
        weight = 1.0 if captures.mass is None else captures.mass
        if self.reference is None or captures.mass == 0:
            self._note_skipped(captures)
            return captures, weight
        if self.directions or captures.skipped:
            self.reference.add(batch, list(self.directions.values()), weight)
            self.reference.refuse_another(captures.loss)
        # layers that the loss depends on, though not through their outputs
        unseen = {name for name in captures.skipped if self.reference.reached & set(self._parameters(name))}
        if unseen - self.in_parameters:
            self.in_parameters |= unseen
            captures = self._captures(batch, None)
        self._skip_without_units(captures, batch)
        self._note_skipped(captures)
        new = {name: capture for name, capture in captures.items() if name not in self.directions}
        if new:
            captures = self._agreeing(batch, captures, new)
            for name in new.keys() - self.failed:
                self.directions[name].count(weight)
        for name in captures.keys() & captures.slopes:
            self.directions[name].add_slopes(captures.slopes[name], weight)
        return captures, weight

    def _agreeing(self, batch: Batch, captures: capturing.Captures, new: dict[str, LayerCapture]) -> capturing.Captures:
        """Captures in which the ``new`` layers agree with the model: others leave, or are in their parameters."""
        failed = self._failed(batch, captures, new)
        for name in [name for name, verdict in failed.items() if verdict.contradicted]:
            # second derivatives that are wrong in the model: an error if the layer was named
            with self.measurement.skipping(name, CaptureError):
                check.refuse_failed(name, failed.pop(name), "")
            self.layers = {other: layer for other, layer in self.layers.items() if other != name}
            del captures[name], new[name]
        for name, verdict in failed.items():
            why, capture = self._reason(verdict), captures[name]
            if name in captures.in_parameters:
                check.refuse_failed(name, verdict, why)
            products = len(capture.units) * capture.inputs.geometry.n_params
            if products > PRODUCTS:
                why += f"; to measure it by {products:,} products takes too long: name fewer layers with layers=, and "
                check.refuse_failed(name, verdict, f"{why}at level='unit' fewer units")
        if failed and captures.stopped:
            # there is no time to do it again
            for name in failed:
                del captures[name], new[name]
                captures.stopped.append(name)
            self._note_skipped(captures)
        elif failed:
            self.in_parameters |= frozenset(failed)
            captures = self._captures(batch, None)
            again = {name: capture for name, capture in captures.items() if name in failed}
            for name, verdict in self._failed(batch, captures, again).items():
                check.refuse_failed(name, verdict, self._reason(verdict))
        return captures

    def block(self, capture: LayerCapture, unit: int | None) -> base.BlockHessian:
        """Hessian object of a unit, or of the layer."""
        memory = self.question.memory
        return build.layer_hessian(capture, memory) if unit is None else build.unit_hessian(capture, unit, memory)

    def _collect(self, layer: str, inputs: LayerInputs) -> Any:
        """Statistics of a layer's inputs that its coordinates are computed from; None: there are none."""
        system = self.measurement.systems[layer]
        return system.collect(layer, inputs) if isinstance(system, OfInputs) else None

    def _captures(self, batch: Batch, weights: Weights | None) -> capturing.Captures:
        """Capture the layers that have finite second derivatives; the others are left out from now on."""
        names = [name for name in self.layers if name not in self.failed and self._sample.get(name) != ()]
        if not names:
            why = self.measurement.differenced | self.measurement.skipped
            raise NoDerivativeError("; ".join(f"layer {name!r}: {why[name]}" for name in self.layers if name in why))
        question = self.question
        captures = capturing.capture(
            question.model,
            question.loss_fn,
            batch,
            names,
            optional=True,
            units=self._sample if question.units is None else dict.fromkeys(names, tuple(question.units)),
            whole=question.level == "layer",
            dtype=question.dtype,
            memory=question.memory,
            weights=weights,
            in_parameters=self.in_parameters,
            # a direction in a whole layer covers all its units
            slopes=question.check and question.level == "unit",
            progress=question.progress,
        )
        for name, error in captures.failed.items():
            self.failed.add(name)
            self.directions.pop(name, None)
            with self.measurement.skipping(name, CaptureError):
                unnamed = isinstance(error, TooLargeError) or not question.named(name)
                raise type(error)(str(error) if unnamed else f"layer {name!r} cannot be probed: {error}")
        return captures

    def _skip_without_units(self, captures: capturing.Captures, batch: Batch) -> None:
        """Leave out layers whose weight is also used elsewhere in a way that its rows are not outputs."""
        odd = captures.in_parameters & captures.keys() - self.directions.keys() - self.without_units.keys()
        odd = {name for name in odd - captures.differentiated if stock_class(self.layers[name]) is not None}
        if odd and self.question.level == "unit":
            turned, why = units_by_use(self.measurement, odd, batch)
            words = "its weight is used elsewhere, where its rows are no outputs: use level='layer'"
            self.without_units |= why | dict.fromkeys(turned, words)
        for name in self.without_units.keys() & captures.keys():
            del captures[name]
            captures.skipped[name] = self.without_units[name]

    def _parameters(self, name: str) -> list[str]:
        return [parameter for parameter, _ in parameters.parameters_of(self.question.model, name, self.layers[name])]

    def _note_skipped(self, captures: capturing.Captures) -> None:
        """Note the layers that a batch does not reach; an error if one was named, and the batch is all the data."""
        if captures.stopped and not is_batch(self.question.data):
            raise CaptureError("stopped before all batches were read: a stream is measured as a whole")
        self.measurement.skipped.update(dict.fromkeys(captures.stopped, STOPPED))
        for name, reason in captures.skipped.items():
            if self.question.named(name) and is_batch(self.question.data):
                raise CaptureError(f"layer {name!r} cannot be probed: {reason}")
        self.measurement.skipped.update(captures.skipped)

    def _failed(
        self, batch: Batch, captures: capturing.Captures, chosen: Mapping[str, LayerCapture]
    ) -> dict[str, check.Check]:
        """Checks of the ``chosen`` captures of one batch that do not agree with the model, by layer name."""
        assert self.reference is not None
        self.directions |= self._new_directions(chosen)
        for name in chosen.keys() - self.directions.keys():
            self.failed.add(name)
            del captures[name]
        chosen = {name: capture for name, capture in chosen.items() if name in captures}
        self.reference.add(batch, [self.directions[name] for name in chosen])
        self.reference.refuse_another(captures.loss)
        failed = {}
        for name, capture in chosen.items():
            direction = self.directions[name]
            trial = replace(direction)
            if name in captures.slopes:
                trial.add_slopes(captures.slopes[name])
            verdict = self.verdicts[name] = self.reference.verdict(trial, self.block(capture, direction.unit))
            if not verdict.passed:
                failed[name] = verdict
        return failed

    def _new_directions(self, captures: Mapping[str, LayerCapture]) -> dict[str, check.CheckDirection]:
        directions = {}
        for name, capture in captures.items():
            unit = None if self.question.level == "layer" else check.most_curved(capture)
            layers = {name: self.layers[name]}
            whole = parameters.UnitLayout(self.question.model, layers, None)
            layout = whole if unit is None else parameters.UnitLayout(self.question.model, layers, unit)
            with self.measurement.skipping(name, TooLargeError):
                block = self.block(capture, unit)
                directions[name] = check.CheckDirection.of(block, layout, whole, unit, dtype=self.question.dtype)
        return directions

    @staticmethod
    def _reason(verdict: check.Check) -> str:
        """Likely reason for a difference from the model, in words."""
        if verdict.slopes > verdict.bound:
            return (
                "the parameters act otherwise than through the output of their layer: in a derivative that the model "
                "or the loss takes, or in a use that was not seen"
            )
        return "the gradients agree, the second derivatives do not"
