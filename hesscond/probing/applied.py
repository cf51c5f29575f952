"""Application of a method to a probe: the network that it builds, and the coordinates at each of its layers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from hesscond.capture import eligible_layers, inputs_of, kinds
from hesscond.capture.forward import COMPLEX
from hesscond.capture.layers import device_of
from hesscond.errors import ConfigError
from hesscond.hessians import Chart, Coordinates, Preconditioner, Scaling
from hesscond.hessians.blocks import Block
from hesscond.hessians.catalogue import ROOT, Catalogue
from hesscond.hessians.coordinates.base import HessianScaling
from hesscond.hessians.coordinates.parameter_maps import ParameterMaps
from hesscond.hessians.network_operator import NetworkOperator
from hesscond.hessians.roles import NETWORK
from hesscond.methods import Method, Spec, Vanilla, parse
from hesscond.methods.base import no_step
from hesscond.methods.by_parameter import ByParameter
from hesscond.methods.inputs import OfInputs
from hesscond.methods.optimizers import at_work, moves
from hesscond.methods.regularization import Regularization
from hesscond.methods.wrapping import place_of
from hesscond.probing.rebuilt import BY_HAND, rebuilt, take_first_step
from hesscond.probing.results import ProbeResult
from hesscond.sheets import listed

if TYPE_CHECKING:
    from hesscond.probing.question import Measured, Question, System

#: Types that `hesscond.probe` takes as a method.
ProbeMethod = (
    str
    | Spec
    | Method
    | torch.optim.Optimizer
    | Sequence[torch.optim.Optimizer]
    | Callable[[nn.Parameter], Any]
    | Coordinates
    | None
)


@dataclass(frozen=True)
class Applied:
    """Question for the network as a method builds it, with a description of the measurement."""

    question: Question  # its ``method`` is a `Measured`
    what: str
    given: nn.Module

    @property
    def model(self) -> nn.Module:
        """Model that is measured."""
        return self.question.model

    def place(self, name: str) -> str:
        """Return the name, in the copy, of a module, parameter or part of the model that was given."""
        base, bracket, part = name.partition("[")
        known = dict(self.given.named_modules())
        if base in known or base == ROOT:
            path = base if base not in known else place_of(self.model, base)
        else:
            owner, _, attribute = base.rpartition(".")
            around = place_of(self.model, owner) if owner else ""
            path = f"{around}.{attribute}" if around else attribute
        return path + bracket + part

    def original(self, place: str) -> str:
        """Return the name that a module or parameter of the copy has, or would have, in the model that was given."""
        names = {place_of(self.model, name): name for name, _ in self.given.named_modules() if name}
        place, bracket, part = place.partition("[")
        head, tail = place, ""
        while head and head not in names:
            head, _, last = head.rpartition(".")
            tail = f".{last}{tail}"
        return (names[head] + tail if head else place) + bracket + part

    def renamed(self, result: ProbeResult) -> ProbeResult:
        """Rename the layers of a result of the copy as in the model that was given."""
        if self.model is not self.given:
            result.rename(self.original)
        result.coordinates, catalogue = self.what, Catalogue(self.given)
        for name, layer in result.items():
            layer.kind = "" if layer.level == NETWORK else catalogue.kind(name)
        return result


def applied(question: Question) -> Applied:
    """Question for the model, coordinates and data that ``question.method`` stands for, as in `hesscond.probe`."""
    model, method = question.model, question.method
    if isinstance(method, (str, Spec)):
        return by_name(question, parse(method) if isinstance(method, str) else method)
    if method is None or isinstance(method, Coordinates):
        return Applied(question, described(None if method is None else method.name), model)
    if moves(method):
        method = at_work(model, method)
    if isinstance(method, Method):
        whole = question.level == "network" and question.choice.names is None
        measured, what = in_coordinates_of(model, method, whole=whole)
        return Applied(replace(question, method=measured), what, model)
    raise ConfigError(
        "method must be a name, a Method at work, an optimizer, a function of a parameter that returns M, a "
        f"Preconditioner or a Chart, not {'the class ' * isinstance(method, type)}"
        f"{getattr(method, '__name__', type(method).__name__)}"
    )


def by_name(question: Question, spec: Spec) -> Applied:
    """Question for the model itself, or for a copy that the named methods rebuild, in their coordinates."""
    from_data = [part for part in spec.parts if part[0].needs_statistics]
    if len(from_data) > 1:
        names = " and ".join(part.name for part, _ in from_data)
        raise ConfigError(f"{names} both have coordinates of their own: name one of them")
    chosen = OfInputs(*from_data[0], spec.text) if from_data else None
    building = spec.without(lambda part: part.needs_statistics or part is Vanilla)
    if building is None:
        return Applied(replace(question, method=chosen), described(None, chosen), question.model)
    if any(part.preconditions_in_step for part, _ in building.parts):
        raise no_step(spec.text)
    built_in, data = rebuilt(question, building)
    changing = building.without(lambda part: part.of_first_step)
    of_step = changing is None or len(changing.parts) < len(building.parts)
    copied = replace(question, model=built_in.model, method=built_in, data=data)
    if of_step:
        take_first_step(copied, spec.text)
    application = applied(copied)
    what = f"{application.what}, of a first step on the data" if of_step else application.what
    changed = ""
    if changing is not None:
        penalties = all(issubclass(part, Regularization) for part, _ in changing.parts)
        changed = f"{'loss' if penalties else 'network rebuilt'} with {changing.text}"
        what = f"{changed}, {what}"
    built = replace(application, given=question.model, what=what)
    built = replace(built, question=replace(built.question, choice=question.choice.placed(built.place)))
    if chosen is None:
        return built
    if application.question.method is not None:
        together = f", or give both at work, {BY_HAND.format(spec.text)}, after steps with them"
        raise ConfigError(
            f"{chosen.part.name} and {building.text} both have coordinates of their own: name one of them"
            + ("" if any(other.constrains for other, _ in building.parts) else together)
        )
    placed = chosen.placed(built.model)
    return replace(built, question=replace(built.question, method=placed), what=f"{changed}, {described(None, placed)}")


def in_coordinates_of(model: nn.Module, method: Method, *, whole: bool) -> tuple[Method | None, str]:
    """Method at work if it has coordinates for the model, and the description of a measurement in them."""
    if not {id(p) for p in method.model.parameters()} & {id(p) for p in model.parameters()}:
        raise ConfigError(f"method {method.name!r} is at work on another model than the one to probe")
    if whole:
        method.check_network()
    trained = [name for name, p in model.named_parameters() if p.requires_grad]
    still = method.unmoved(trained)
    names, plain, refusal = coordinates_of_layers(model, method)
    if isinstance(method, ByParameter) and set(outside_of_layers(model)) - set(still):
        names[method.coordinates_name] = None
    if refusal is not None and not names:
        raise refusal
    if not names and any(part.preconditions for part in getattr(method, "parts", [method])):
        raise no_step(method.whole.name)
    what = described(" and ".join(names))
    if names and plain:
        what += f", and plain ones in {listed(plain)}"
    if still:
        moved_names = [name for name in trained if name not in still]
        what += f", of the parameters moved by {method.name}: {listed(moved_names)}"
    return method if names else None, what


def coordinates_of_layers(model: nn.Module, method: Method) -> tuple[dict[str, None], list[str], ConfigError | None]:
    """Names of a method's coordinates at the layers that have some, layers in plain ones, and the first refusal."""
    names: dict[str, None] = {}
    plain: list[str] = []
    refusals: list[ConfigError] = []
    for name in eligible_layers(model):
        try:
            coordinates = method.probed(name)
        except ConfigError as refusal:
            # raised only if such a layer is asked for, or if no layer has coordinates
            refusals.append(refusal)
        else:
            names |= {} if coordinates is None else {coordinates.name: None}
            plain += [name] if coordinates is None else []
    return names, plain, refusals[0] if refusals else None


def outside_of_layers(model: nn.Module) -> list[str]:
    """Names of the trained parameters that belong to no dense or convolutional layer."""
    inside = {id(p) for layer in eligible_layers(model).values() for p in layer.parameters(recurse=False)}
    return [name for name, p in model.named_parameters() if p.requires_grad and id(p) not in inside]


def described(name: str | None, chosen: OfInputs | None = None) -> str:
    """Description of coordinates in words."""
    if chosen is not None:
        layers = chosen.options.get("layers")
        where = f" in {listed(layers)}, and plain ones in other layers" if layers is not None else ""
        return f"coordinates of {chosen.part.name}{where}, from the statistics of the data"
    return f"coordinates: {name}" if name else "plain coordinates"


def coordinates_at(method: Measured, layer: str) -> Coordinates | OfInputs | None:
    """Coordinates that a layer is measured in by ``method``, as returned by `applied`."""
    return method.probed(layer) if isinstance(method, Method) else method


def block_coordinates(question: Question, name: str, block: Block) -> System:
    """Coordinates of a block."""
    if block.layer is not None:
        return coordinates_at(question.method, name)
    if any(question.model.get_parameter(parameter).is_complex() for parameter in block.parameters):
        raise ConfigError(f"layer {name!r} cannot be probed: {COMPLEX}")
    computed = name not in question.choice.groups and kinds.is_layer(Catalogue(question.model).module(name))
    if isinstance(question.method, Method) and not computed:
        system: System = question.method.of_parameters(name, block.parameters)
    else:
        system = coordinates_at(question.method, name)
    if system is not None and not isinstance(system, (Chart, HessianScaling, ParameterMaps)):
        what = "computed from other parameters" if computed else "no weight matrix"
        raise ConfigError(
            f"layer {name!r} cannot be probed: the coordinates of {system.name} are those of a plain weight, and its "
            f"own is {what}; name others with layers="
        )
    return system


def layer_coordinates(method: Measured, operator: NetworkOperator) -> Mapping[str, Preconditioner | None]:
    """P of each layer of an operator, from the statistics of its inputs over all the data."""
    chosen = operator.unit_layout.layers
    statistics: dict[str, Any] = {}
    if isinstance(method, OfInputs):
        for _, linearization in operator.linearizations():
            calls = linearization.evaluation.calls
            for name, layer in chosen.items():
                given = [(call.inputs, call.delta.shape) for call in calls.get(name, ())]
                of_batch = method.collect(name, inputs_of(layer, given))
                if of_batch is not None:
                    statistics[name] = statistics[name].merged(of_batch) if name in statistics else of_batch
    preconditioners: dict[str, Preconditioner | None] = {}
    for name, layer in chosen.items():
        system = coordinates_at(method, name)
        P = system.resolved(statistics.get(name), kinds.Geometry.of(layer)) if isinstance(system, OfInputs) else system
        if P is not None and not isinstance(P, Preconditioner):
            raise ConfigError(f"{P.name} belongs to the Hessian of one layer: it is no P of a whole network")
        preconditioners[name] = P
    return preconditioners


def of_trained(name: str, P: Preconditioner | None, layer: kinds.Layer) -> Preconditioner | None:
    """P without the rows of the frozen parameters of a layer."""
    trained = {key: p.requires_grad for key, p in layer.named_parameters(recurse=False)}
    if all(trained.values()):
        return P
    geometry = kinds.Geometry.of(layer)
    kept = torch.full(
        (geometry.n_params,), float(trained.get("weight", True)), dtype=torch.float64, device=device_of(layer)
    )
    if geometry.bias:
        kept[0] = float(trained.get("bias", True))
    rows = Scaling(kept, "trained")
    if P is None:
        return rows
    if P.unstructured:
        raise ConfigError(
            f"layer {name!r} has frozen parameters, and {P.name} acts across them: name the layers to measure (layers=)"
        )
    return rows @ P


def layers_with_everything(model: nn.Module) -> list[str]:
    """Layers with trained parameters; a ConfigError if a trained parameter belongs to no layer."""
    outside = outside_of_layers(model)
    if outside:
        raise ConfigError(
            f"the coordinates of a method are those of layers, and {outside[0]!r} belongs to none: name the layers to "
            "measure with layers="
        )
    layers = eligible_layers(model)
    return [name for name, layer in layers.items() if any(p.requires_grad for p in layer.parameters())]
