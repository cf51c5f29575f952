"""The Hessian of a whole network: one block of all its parameters."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import accumulate

from torch import nn

from hesscond.applied import Measured, coordinates_at, layer_coordinates
from hesscond.capture import eligible_layers
from hesscond.capture.weighting import mass_of
from hesscond.check import check_operator, refuse_failed
from hesscond.errors import ConfigError, HesscondError
from hesscond.hessians import (
    Block,
    BlockLayout,
    BlockSource,
    Catalogue,
    Coordinates,
    HessianOperator,
    LinearCoordinates,
    NetworkHessian,
    NullDirections,
    PulledInverse,
    combined,
    coordinates_of,
    network_inverse,
    network_null_directions,
    remaining,
)
from hesscond.hessians.source import nothing_known
from hesscond.measurement import Measurement
from hesscond.methods.inputs import OfInputs
from hesscond.operators import Congruence
from hesscond.operators.parallel import DataParallel, Team, all_or_none
from hesscond.results import NETWORK, NetworkResult, ProbeResult
from hesscond.spectra import Known


class NetworkProbe(Measurement):
    """The Hessian in all parameters that require a gradient, or in those of some layers together."""

    def result(self) -> ProbeResult:
        source = self.source()
        named = self.choice.names
        chart = network_chart(self.method, named, self.model)
        if chart is not None:
            if self.team is not None:
                raise ConfigError(f"{chart.name} of a network are measured by one process: start one only")
            operator, rows = chart.network(source.operator)
            parts: dict[str, list[slice]]
            parts = {name: [where] for name, where in rows.items()}
            block = source.products(operator, nothing_known)
            return self._checked(block, source.latest, parts, f"products, in {chart.name}")
        if self.method is not None and named is None:
            named = tuple(layers_with_everything(self.model))
        blocks = {} if named is None else replace(self.choice, names=named).blocks(self.model)
        H = self._operator(source, blocks)
        whole = H if self.team is None else shared(H, self.team)
        route = f"products, {H.retained[0]} of {H.retained[1]} graphs kept"
        if self.method is not None:
            change = coordinates_of(H, layer_coordinates(self.method, H, team=self.team))
            ends = list(accumulate(change.columns))
            parts = {name: [slice(end - k, end)] for name, k, end in zip(blocks, change.columns, ends, strict=True)}
            # the null space and the inverse are those of the plain coordinates
            return self._checked(source.products(Congruence(whole, change), nothing_known), H, parts, route)
        parts = {}
        for name, where in H.parts.items():
            owner = name if blocks else name.rpartition(".")[0] or "model"
            parts.setdefault(owner, []).append(where)
        if isinstance(H.layout, BlockLayout) and not H.layout.whole:
            return self._checked(source.products(whole, nothing_known), H, parts, route)
        # what is null for the share of one process need not be so for that of another
        known = partial(all_known, H) if self.team is None else lambda: ((), Known(None, network_inverse(H)))
        return self._checked(source.products(whole, known), H, parts, route)

    def _operator(self, source: BlockSource, blocks: Mapping[str, Block]) -> HessianOperator:
        """The Hessian in all parameters, or in those of the blocks named."""
        odd = next((name for name, block in blocks.items() if block.layer is None), None)
        if odd is not None and self.method is not None:
            raise ConfigError(
                f"the coordinates of a method are those of a plain weight, which layer {odd!r} does not have: name "
                "others"
            )

        def make() -> HessianOperator:
            if odd is None:
                return source.operator(layers=list(blocks) or None)
            layout = self._layout(blocks)
            return source.operator(parameters=layout.names).restricted(layout)

        return make() if self.team is None else agreed(self.team, make)

    def _layout(self, blocks: Mapping[str, Block]) -> BlockLayout:
        """Blocks one after another.

        Raises
        ------
        ConfigError
            Two of them share parameters.
        """
        catalogue = Catalogue(self.model)
        catalogue.refuse_overlap(blocks.values())
        return BlockLayout(list(blocks.values()), catalogue.parameters)

    def _checked(
        self, block: NetworkHessian, H: HessianOperator, parts: Mapping[str, Sequence[slice]], route: str
    ) -> ProbeResult:
        """The result, with the check of the operator that it is made of on the data of this process, if wanted.

        Raises
        ------
        CaptureError
            It does not agree with the model.
        """
        result = NetworkResult(block, parts, H.names, route, self.rtol)
        precision = "not looked at (check=False)"
        if self.check:
            result.check, result.uncertainty, seen = check_operator(H)
            precision = str(seen)
            refuse_failed(NETWORK, result.check, "the operator and a fresh evaluation of the model disagree")
        return ProbeResult({NETWORK: result}, {}, precision)


def all_known(H: HessianOperator) -> tuple[Sequence[NullDirections], Known]:
    """Null directions of a Hessian, and an approximate inverse in what is left without them."""
    found = network_null_directions(H)
    inverse = network_inverse(H, null_space=combined(found))
    Z, null = remaining(found, H.order, dtype=H.dtype, device=H.device)
    return found, Known(null, PulledInverse(inverse, Z), Z)


def network_chart(method: Measured, layers: Sequence[str] | None, model: nn.Module) -> Coordinates | None:
    """The coordinates of all parameters of the network together, where ``method`` is no P of its layers.

    Raises
    ------
    ConfigError
        Only some layers were named.
    """
    found = [coordinates_at(method, name) for name in eligible_layers(model)]
    charts = [own for own in found if own is not None and not isinstance(own, (LinearCoordinates, OfInputs))]
    if not charts:
        return None
    if layers is not None:
        raise ConfigError(f"{charts[0].name}: of some layers together they are not defined, leave out layers=")
    return charts[0]


def layers_with_everything(model: nn.Module) -> list[str]:
    """The layers of a model all of whose trained parameters belong to layers.

    Raises
    ------
    ConfigError
        Some do not.
    """
    layers = eligible_layers(model)
    inside = {id(p) for layer in layers.values() for p in layer.parameters(recurse=False)}
    outside = [name for name, p in model.named_parameters() if p.requires_grad and id(p) not in inside]
    if outside:
        raise ConfigError(
            f"the coordinates of a method are those of layers, and {outside[0]!r} belongs to none: name the layers to "
            "measure with layers="
        )
    return list(layers)


def agreed(team: Team, make: Callable[[], HessianOperator]) -> HessianOperator:
    """The operator of each process, once it is known that all could make theirs, of the same model.

    Raises
    ------
    ConfigError
        Their models differ.
    CaptureError
        One of them could not.
    """
    operator, failure = None, None
    try:
        operator = make()
        _ = operator.problem.masses  # may be refused too
    except HesscondError as error:
        failure = error
    all_or_none(team, None, failure)
    assert operator is not None
    fingerprint = hashlib.sha256(operator.point.cpu().numpy().tobytes()).hexdigest()
    if len(set(team.gathered(fingerprint))) > 1:
        raise ConfigError(
            "the processes have different parameters: make the model with the same random seed in each, or load it"
        )
    return operator


def shared(operator: HessianOperator, team: Team) -> DataParallel:
    """The operator of the data of all processes, each of which has made its own."""
    masses = operator.problem.masses
    return DataParallel(operator, mass_of(masses, team.gathered(masses)).share, team)
