"""Parser of ``--method``: methods with options, joined by a plus sign; and several methods on one model."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, get_args, get_origin

import torch
from torch import nn

from hesscond import hessians
from hesscond.errors import ConfigError
from hesscond.hessians.coordinates.parameter_maps import ParameterMaps
from hesscond.lazy import without_folders
from hesscond.methods import base
from hesscond.methods.regularization import Penalized


def in_turn(hook: str) -> Callable[..., None]:
    """Hook of `Composed` that calls that of each part, in their order."""

    def call(self: Composed, *arguments: Any) -> None:
        for part in self.parts:
            getattr(part, hook)(*arguments)

    return call


class Composed(base.Method):
    """Methods one after another: they build the network, transform the gradient and follow the step in this order.

    Not registered: ``--method bnp+groupnorm`` makes one, with this text as its name. At most one of them preconditions,
    and at most one has coordinates other than the plain ones at a layer.
    """

    source = "-"

    def __init__(self, model: nn.Module, name: str, parts: Sequence[tuple[type[base.Method], dict[str, Any]]]) -> None:
        super().__init__(model)
        self.name, self.summary = name, " and ".join(method.summary for method, _ in parts)  # type: ignore[misc]
        optimizers = [m.name for m, _ in parts if m.optimizer is not base.Method.optimizer]
        if len(optimizers) > 1:
            raise ConfigError(f"{' and '.join(optimizers)} both choose the optimizer: take one of them")
        self.parts = [method(model, **options) for method, options in parts]
        for part in self.parts:
            part.whole = self

    fit, check_batch, follow, observe = map(in_turn, ("fit", "check_batch", "follow", "observe"))
    transform_gradients, after_step = in_turn("transform_gradients"), in_turn("after_step")
    check_network, detach = in_turn("check_network"), in_turn("detach")

    @property
    def reads_all_inputs(self) -> bool:
        return any(part.reads_all_inputs for part in self.parts)

    def optimizer(self, lr: float, **options: Any) -> torch.optim.Optimizer:
        """Optimizer of the part that is itself an optimizer, otherwise the one that is asked for."""
        parts = [part for part in self.parts if type(part).optimizer is not base.Method.optimizer]
        optimizer = (parts[0].optimizer if parts else super().optimizer)(lr, **options)
        self.follow(optimizer)
        return optimizer

    def without_decay(self) -> set[int]:
        return set().union(*(part.without_decay() for part in self.parts))

    def penalty(self, loss: torch.Tensor) -> torch.Tensor | None:
        penalties = [p for part in self.parts if (p := part.penalty(loss)) is not None]
        return torch.stack(penalties).sum() if penalties else None

    def preconditioner(self, layer: str) -> hessians.Preconditioner | None:
        """Preconditioner of the layer, if its `coordinates` are linear; otherwise None."""
        coordinates = self.coordinates(layer)
        return coordinates if isinstance(coordinates, hessians.Preconditioner) else None

    def coordinates(self, layer: str) -> hessians.Coordinates | None:
        """Coordinates of the one part that has coordinates other than the plain ones; None: no part has."""
        pairs = [(part.name, coords) for part in self.parts if (coords := part.coordinates(layer)) is not None]
        if len(pairs) > 1:
            raise ConfigError(
                f"{' and '.join(name for name, _ in pairs)} both have coordinates of layer {layer!r}: which decide "
                "together is not known; probe it with one of them"
            )
        return pairs[0][1] if pairs else None

    def probed(self, layer: str) -> hessians.Coordinates | None:
        """Coordinates of the part that adds a penalty, which include those of the others; otherwise `coordinates`."""
        each = [part.probed(layer) for part in self.parts]
        return next((coords for coords in each if isinstance(coords, Penalized)), self.coordinates(layer))

    def of_parameters(self, block: str, names: Sequence[str]) -> ParameterMaps | None:
        """Coordinates of the first part that has coordinates for these parameters; None: no part has."""
        candidates = [part.of_parameters(block, names) for part in self.parts]
        return next((maps for maps in candidates if maps is not None), None)

    def unmoved(self, names: Sequence[str]) -> dict[str, str]:
        return {name: why for part in self.parts for name, why in part.unmoved(names).items()}

    def preconditioned(self, gradients: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """M g by the part that preconditions; if there is none, as in `Method`."""
        parts = [part for part in self.parts if part.preconditions]
        return parts[0].preconditioned(gradients) if parts else super().preconditioned(gradients)

    def readings(self, layer: str) -> Mapping[str, hessians.Coordinates | None]:
        return {name: coords for part in self.parts for name, coords in part.readings(layer).items()}

    def diagnostics(self, layer: str) -> dict[str, float]:
        return {column: value for part in self.parts for column, value in part.diagnostics(layer).items()}

    def state_dict(self) -> dict[str, Any]:
        return {part.name: part.state_dict() for part in self.parts}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if set(state) != {part.name for part in self.parts}:
            raise ConfigError(f"the state is of {', '.join(state)}, not of {self.name}")
        for part in self.parts:
            part.load_state_dict(state[part.name])


@dataclass(frozen=True)
class Spec:
    """Choice of ``--method``: its ``text`` as given, and ``parts``, class and options of one method or of several."""

    text: str
    parts: tuple[tuple[type[base.Method], dict[str, Any]], ...]

    @property
    def plain(self) -> str:
        """The names without options."""
        return "+".join(method.name for method, _ in self.parts)

    @property
    def rate(self) -> float:
        """The learning rate if none is given: the smallest of all."""
        return min(method.rate for method, _ in self.parts)

    @property
    def folder(self) -> str:
        """A name for a folder."""
        return "".join("-" if c in ":,=/" else c for c in without_folders(self.text))

    def without(self, left_out: Callable[[type[base.Method]], bool]) -> Spec | None:
        """The methods that are not left out; None: there are none."""
        texts = self.text.split("+")
        kept = [(text, part) for text, part in zip(texts, self.parts, strict=True) if not left_out(part[0])]
        return Spec("+".join(text for text, _ in kept), tuple(part for _, part in kept)) if kept else None

    def create(self, model: nn.Module) -> base.Method:
        """The method at work on ``model``, which it may change; a `ConfigError` if it does not fit the model."""
        if len(self.parts) == 1:
            method, options = self.parts[0]
            return method(model, **options)
        return Composed(model, self.text, self.parts)


def parse(text: str) -> Spec:
    """``NAME``, ``NAME:option=value,option=value`` or several joined by ``+``; a NAME may be ``FILE.py:CLASS``.

    Raises
    ------
    ConfigError
        No such method or option, a value of another kind, a method twice, or two that exclude each other.
    """
    parts = []
    for part in text.split("+"):
        # FILE.py:CLASS has a colon of its own
        file, dot_py, inside = part.rpartition(".py:")
        name, colon, rest = inside.partition(":")
        method = base.method_class(f"{file}{dot_py}{name}")
        parts.append((method, options_in(text, method, rest.split(",") if colon else ())))
    names = [method.name for method, _ in parts]
    if len(set(names)) < len(names):
        raise ConfigError(f"{text!r} has a method twice")
    both, computed, held = (
        [method.name for method, _ in parts if getattr(method, what)]
        for what in ("preconditions", "reparametrizes", "constrains")
    )
    for methods, what in ((both, "precondition the gradient"), (computed, "compute weights from other parameters")):
        if len(methods) > 1:
            raise ConfigError(f"{' and '.join(methods)} both {what}: choose one of them")
    if computed and held:
        raise ConfigError(f"{held[0]} constrains the weights, which {computed[0]} computes from others: choose one")
    if computed and both:
        raise ConfigError(
            f"{both[0]} preconditions the weights, which {computed[0]} computes from other parameters: choose one"
        )
    return Spec(text, tuple(parts))


def options(method: type[base.Method]) -> dict[str, inspect.Parameter]:
    """The options of a method, with their types: those declared, and the keyword arguments of its constructor."""
    parameters = inspect.signature(method, eval_str=True).parameters
    return {name: p for name, p in parameters.items() if p.kind is inspect.Parameter.KEYWORD_ONLY}


def options_in(text: str, method: type[base.Method], items: Sequence[str]) -> dict[str, Any]:
    """Values of a method's options that are given as ``option=value``, as the constructor's annotations say."""
    known = options(method)
    values = {}
    for item in items:
        name, _, value = map(str.strip, item.partition("="))
        if not name or not value:
            raise ConfigError(f"{text!r} is not of the form NAME:option=value,option=value")
        if name not in known:
            raise ConfigError(f"method {method.name!r} has no option {name!r}: it has {', '.join(known) or 'none'}")
        values[name] = converted(f"option {name!r} of method {method.name!r}", value, known[name].annotation)
    return values


def converted(what: str, text: str, kind: Any) -> Any:
    """A text as a value of a type, as pydantic reads it; ``none``, where it may be, and several words by slashes."""
    from pydantic import TypeAdapter, ValidationError

    if text == "none" and type(None) in get_args(kind):
        return None
    if any(get_origin(annotation) is tuple for annotation in (kind, *get_args(kind))):
        return tuple(text.split("/"))
    try:
        return TypeAdapter(kind).validate_python(text)
    except ValidationError as error:
        expected = error.errors()[0]["msg"].replace("Input should", "must").partition(", unable")[0]
        raise ConfigError(f"{what} {expected}, not {text!r}") from None


def shown_options(method: type[base.Method]) -> str:
    """The options of a method with their defaults, as they are given."""
    defaults = {name: option.default for name, option in options(method).items()}
    return ", ".join(f"{name}={as_given(value)}" for name, value in defaults.items())


def as_given(value: Any) -> str:
    """An option's value as ``--method`` takes it."""
    if isinstance(value, tuple):
        return "/".join(value)
    return str(value).lower() if value is None or isinstance(value, bool) else str(value)
