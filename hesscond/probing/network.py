"""Hessian of a whole network: one block of all its parameters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import accumulate

from hesscond.capture import eligible_layers
from hesscond.errors import CaptureError, ConfigError, NoDerivativeError, refuse_large
from hesscond.hessians import HessianOperator
from hesscond.hessians.blocks import Block
from hesscond.hessians.catalogue import Catalogue, Choice
from hesscond.hessians.coordinates import base
from hesscond.hessians.coordinates.linear import UnitCoordinates, coordinates_of
from hesscond.hessians.differenced import DifferencedOperator
from hesscond.hessians.network_hessian import NetworkHessian
from hesscond.hessians.null_space import NullSpaceAndPreconditioner
from hesscond.hessians.parameters import BlockLayout
from hesscond.hessians.roles import NETWORK
from hesscond.methods.by_parameter import ByParameter
from hesscond.operators import Congruence, SymmetricOperator
from hesscond.probing import applied, check, results
from hesscond.probing.products import difference_check
from hesscond.probing.question import Measurement, Question
from hesscond.spectra import bounded


def network_result(question: Question) -> results.ProbeResult:
    """Result of the Hessian in all parameters that require a gradient, or in those of some layers together."""
    probe = NetworkProbe(question)
    probe.refuse_large()
    chart = network_chart(question)
    if chart is not None:
        return probe.in_chart(chart)
    try:
        return probe.plain_or_linear()
    except NoDerivativeError as error:
        if not question.takes_differences:
            raise
        try:
            return NetworkProbe(question, DifferencedOperator).plain_or_linear()
        except CaptureError as other:
            raise CaptureError(f"{error}; by differences of the gradient: {other}") from None


class NetworkProbe:
    """Measurement of the Hessian of a network, one block of all its parameters or of those of some layers."""

    def __init__(self, question: Question, kind: type[HessianOperator] = HessianOperator) -> None:
        self.question, self.model, self.method = question, question.model, question.method
        self.choice = question.choice
        self.measurement, self.source = Measurement(question), question.source(kind=kind)

    def in_chart(self, chart: base.Chart | base.HessianScaling) -> results.ProbeResult:
        """Return the result in a chart of all parameters."""
        if isinstance(chart, base.HessianScaling):
            H = self.source.operator()
            plain, rows = self.source.products(H), H.parts
            block = plain.in_coordinates(chart.at(plain))
        else:
            operator, rows = chart.network(self.source.operator)
            block = self.source.products(operator)
        parts = {name: [where] for name, where in rows.items()}
        return self._checked(block, self.source.latest, parts, f"products, in {chart.name}")

    def plain_or_linear(self) -> results.ProbeResult:
        """Return the result in plain coordinates, or in those that a matrix P defines."""
        named, by_parameter = self.choice.names, False
        if isinstance(self.method, ByParameter):
            blocks = self._moved()
            by_parameter = any(block.layer is None for block in blocks.values())
        else:
            if self.method is not None and named is None:
                named = tuple(applied.layers_with_everything(self.model))
            blocks = {} if named is None else replace(self.choice, names=named).blocks(self.model)
        H = self._operator(blocks)
        route, products = H.route, self.source.products
        if self.method is not None and not by_parameter:
            systems = applied.layer_coordinates(self.method, H)
            if self.choice.names is None and not isinstance(self.method, ByParameter):
                # without frozen parameters, as they are not in the plain Hessian
                layers = eligible_layers(self.model)
                systems = {name: applied.of_trained(name, P, layers[name]) for name, P in systems.items()}
            change = coordinates_of(H, systems)
            ends = list(accumulate(change.columns))
            columns = {name: [slice(end - k, end)] for name, k, end in zip(blocks, change.columns, ends, strict=True)}
            # the null space and the inverse are those of the plain coordinates
            return self._checked(products(Congruence(H, change)), H, columns, route)
        parts: dict[str, list[slice]] = {}
        for name, where in H.parts.items():
            owner = name if self.choice.names is not None else name.rpartition(".")[0] or "model"
            parts.setdefault(owner, []).append(where)
        if by_parameter:
            return self._checked(products(in_parameters(self.method, H)), H, parts, route)
        if not H.layout.whole:
            return self._checked(products(H), H, parts, route)
        return self._checked(products(H, partial(NullSpaceAndPreconditioner.of, H)), H, parts, route)

    def _moved(self) -> dict[str, Block]:
        """Parts of the blocks, or of the network, that the method's steps move: plain layers, and other blocks."""
        choice, catalogue = self.choice, Catalogue(self.model)
        if choice.names is None:
            choice = Choice(tuple(catalogue.natural))
        parts = {}
        for name, block in choice.blocks(self.model).items():
            with self.measurement.skipping(name, ConfigError):
                part = self.measurement.moved(name, block)
                if self.choice.names is None:
                    part = catalogue.trained(part)
                parts[name] = part if part.order == block.order else replace(part, layer=None)
        return parts

    def _operator(self, blocks: Mapping[str, Block]) -> HessianOperator:
        """Hessian in all parameters, or in those of the blocks named."""
        odd = next((name for name, block in blocks.items() if block.layer is None), None)
        if odd is not None and not isinstance(self.method, ByParameter | None):
            raise ConfigError(
                f"the coordinates of a method are those of a plain weight, which layer {odd!r} does not have: name "
                "others"
            )

        # products alone need nothing that null directions and inverses are computed from
        source, watch = self.source, self.question.products is None or self.method is not None
        if odd is None:
            return source.operator(layers=list(blocks) or None, watch=watch)
        catalogue = Catalogue(self.model)
        catalogue.refuse_overlap(blocks.values())
        layout = BlockLayout(list(blocks.values()), catalogue.parameters)
        if self.choice.names is None:
            names = [name for name, _ in self.model.named_parameters() if name in layout.names]
            return source.operator(parameters=names, watch=watch)
        return source.operator(parameters=layout.names, watch=watch).restricted(layout)

    def _checked(
        self, block: NetworkHessian, H: HessianOperator, parts: Mapping[str, Sequence[slice]], route: str
    ) -> results.ProbeResult:
        """Return the result, with the check of the Hessian H behind the block, if wanted."""
        question, operator = self.question, block.operator
        entries = None if route.startswith("products, in") else lambda _: H.layout.entries(self.model)
        result = results.NetworkResult(block, parts, H.names, route, question.rtol, entries)
        precision = "not looked at (check=False)"
        if isinstance(H, DifferencedOperator):
            result.check, precision = difference_check(NETWORK, H), str(H.precision)
        elif question.check:
            result.check, uncertainty, arithmetic = check.check_operator(H)
            result.uncertainty, result.uncertain = in_coordinates(uncertainty, operator), check.uncertain(arithmetic)
            # in a chart zero only if the gradient is negligible too
            linear = isinstance(operator, (HessianOperator, Congruence))
            if (linear or check.is_flat(H)) and (zero := check.rounding_of(H)) is not None:
                result.rounding = {None: zero}
            precision = str(arithmetic)
            check.refuse_failed(NETWORK, result.check)
        return results.ProbeResult({NETWORK: result}, self.measurement.skipped, precision)

    def refuse_large(self) -> None:
        """Raise an error, before any computation, if no vector of the network fits, or not those of the products."""
        question = self.question
        parameters = [p for p in self.model.parameters() if p.requires_grad]
        itemsize = max(((question.dtype or p.dtype).itemsize for p in parameters), default=1)
        order = sum(p.numel() for p in parameters)
        if self.choice.names is not None:
            order = sum(block.order for block in self.choice.blocks(self.model).values())
        question.refuse_little([order])
        least = 2 * bounded.LEAST_VECTORS * order * itemsize
        if question.products is not None:
            what = f"{question.products} products with the Hessian of {order:,} parameters"
            what += f", half of their memory for {bounded.LEAST_VECTORS} vectors, take at least"
            advice = "raise it, or keep the precision of the model (dtype=None)"
            refuse_large(what, least, question.memory, advice, CaptureError)


def in_parameters(method: ByParameter, H: HessianOperator) -> Congruence:
    """Congruence PᵀHP with the P of a method that has one for all parameters."""
    P = method.of_parameters(NETWORK, H.names).of(H.layout)
    return Congruence(H, UnitCoordinates(P, range(1), H.order, dtype=H.dtype, device=H.device))


def in_coordinates(error: float, operator: SymmetricOperator) -> float:
    """Bound of the error of PᵀHP, in the 2-norm, if that of H is ``error``."""
    return error * operator.stretch if error > 0 and isinstance(operator, Congruence) else error


def network_chart(question: Question) -> base.Chart | base.HessianScaling | None:
    """Coordinates of all parameters of the network together, if the method is no P of its layers; else None."""
    if isinstance(question.method, ByParameter):
        return None
    systems = [applied.coordinates_at(question.method, name) for name in eligible_layers(question.model)]
    charts = [system for system in systems if isinstance(system, (base.Chart, base.HessianScaling))]
    if not charts:
        return None
    if question.choice.names is not None:
        raise ConfigError(f"{charts[0].name}: of some layers together they are not defined, leave out layers=")
    return charts[0]
