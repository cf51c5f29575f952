"""The Hessian of a whole network: one block of all its parameters."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import accumulate
from typing import Any

import torch
from torch import nn

from hesscond.capture import Batch, LossFunction, eligible_layers
from hesscond.capture.layers import ELIGIBLE, chosen_modules, is_computed
from hesscond.capture.weighting import BatchWeight, mass_of
from hesscond.check import check_operator, refuse_failed
from hesscond.coordinates import ProbeMethod, layer_coordinates
from hesscond.errors import ConfigError, HesscondError
from hesscond.hessians import (
    Chart,
    HessianOperator,
    NetworkHessian,
    NullDirections,
    PulledInverse,
    combined,
    coordinates_of,
    network_inverse,
    network_null_directions,
    remaining,
)
from hesscond.methods import Method
from hesscond.operators import Congruence, SymmetricOperator
from hesscond.operators.parallel import DataParallel, Team, all_or_none
from hesscond.results import NETWORK, NetworkResult, ProbeResult
from hesscond.spectra import Effort, Known

Facts = Callable[[], tuple[Sequence[NullDirections], Known]]


def probe_network(
    model: nn.Module,
    loss_fn: LossFunction,
    data: Batch | Iterable[Batch],
    layers: Sequence[str] | None,
    method: ProbeMethod,
    *,
    dtype: torch.dtype | None,
    rtol: float,
    memory: int,
    reduction: str | None,
    weight: BatchWeight | None,
    team: Team | None,
    check: bool,
    lift_casts: bool,
) -> ProbeResult:
    """The Hessian in all parameters that require a gradient, or in those of some layers together.

    The arguments are those of `hesscond.probe`.

    Raises
    ------
    ConfigError
        Coordinates of a method where parameters belong to no layer; processes with different models.
    CaptureError
        What `HessianOperator` raises, here or in another process.
    """
    options: dict[str, Any] = {"dtype": dtype, "reduction": reduction, "weight": weight, "lift_casts": lift_casts}
    # the other half, and what is left of this one, is for the vectors and matrices of the solvers
    options["memory"] = memory / 2

    def local(**wanted: Any) -> HessianOperator:
        return HessianOperator(model, loss_fn, data, **options, **wanted)

    def measured(
        operator: SymmetricOperator, H: HessianOperator, parts: Mapping[str, Sequence[slice]], route: str, known: Facts
    ) -> ProbeResult:
        block = NetworkHessian(operator, known, Effort(memory=max(memory - H.held, memory // 2)))
        return with_check(NetworkResult(block, parts, H.names, route, rtol), H, check)

    chart = network_chart(method, layers, model)
    if chart is not None:
        if team is not None:
            raise ConfigError(f"{chart.name} of a network are measured by one process: start one only")
        made: list[HessianOperator] = []

        def make(**wanted: Any) -> HessianOperator:
            made.append(local(**wanted))
            return made[-1]

        operator, rows = chart.network(make)
        parts = {name: [where] for name, where in rows.items()}
        return measured(operator, made[-1], parts, f"products, in {chart.name}", nothing_known)
    names = layers_with_everything(model) if method is not None and layers is None else layers
    modules = {} if names is None else chosen_modules(model, names)
    odd = next((name for name, m in modules.items() if not isinstance(m, ELIGIBLE) or is_computed(m)), None)
    if odd is not None and method is not None:
        raise ConfigError(
            f"the coordinates of a method are those of a plain weight, which layer {odd!r} does not have: name others"
        )
    prefixes = {name: "" if module is model else f"{name}." for name, module in modules.items()}
    inside = {f"{prefixes[name]}{key}": name for name, m in modules.items() for key, _ in m.named_parameters()}
    wanted = {"layers": names} if odd is None else {"parameters": list(inside)}
    H = local(**wanted) if team is None else agreed(team, lambda: local(**wanted))
    whole = H if team is None else shared(H, team)
    route = f"products, {H.retained[0]} of {H.retained[1]} graphs kept"
    if method is not None:
        assert names is not None
        change = coordinates_of(H, layer_coordinates(method, H, team=team))
        ends = list(accumulate(change.columns))
        parts = {name: [slice(end - k, end)] for name, k, end in zip(names, change.columns, ends, strict=True)}
        # the null space and the inverse are those of the plain coordinates
        return measured(Congruence(whole, change), H, parts, route, nothing_known)
    parts = {}
    for name, where in H.parts.items():
        owner = inside.get(name, name) if names is not None else name.rpartition(".")[0] or "model"
        parts.setdefault(owner, []).append(where)
    # what is null for the share of one process need not be so for that of another
    known = partial(all_known, H) if team is None else lambda: ((), Known(None, network_inverse(H)))
    return measured(whole, H, parts, route, known)


def nothing_known() -> tuple[Sequence[NullDirections], Known]:
    """What is known beforehand of a Hessian in other coordinates."""
    return (), Known()


def all_known(H: HessianOperator) -> tuple[Sequence[NullDirections], Known]:
    """Null directions of a Hessian, and an approximate inverse in what is left without them."""
    found = network_null_directions(H)
    inverse = network_inverse(H, null_space=combined(found))
    Z, null = remaining(found, H.order, dtype=H.dtype, device=H.device)
    return found, Known(null, PulledInverse(inverse, Z), Z)


def with_check(result: NetworkResult, H: HessianOperator, check: bool) -> ProbeResult:
    """The result with the check of the operator that it is made of, on the data of this process, if that is wanted.

    Raises
    ------
    CaptureError
        It does not agree with the model.
    """
    precision = "not looked at (check=False)"
    if check:
        result.check, result.uncertainty, seen = check_operator(H)
        precision = str(seen)
        refuse_failed(NETWORK, result.check, "the operator and a fresh evaluation of the model disagree")
    return ProbeResult({NETWORK: result}, {}, precision)


def network_chart(method: ProbeMethod, layers: Sequence[str] | None, model: nn.Module) -> Chart | None:
    """The chart in which a method has all parameters of its network, if it has one.

    Raises
    ------
    ConfigError
        Only some layers were named.
    """
    if isinstance(method, Chart):
        return method
    if not isinstance(method, Method):
        return None
    charts = [own for name in eligible_layers(model) if isinstance(own := method.probed(name), Chart)]
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
