"""Networks by name, and one way to build them; the module of each registers it."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import nn

from hesscond.errors import ANY, ConfigError, unfit
from hesscond.lazy import Registry, defaults, own_code
from hesscond.models.layers import OptionError

#: Shapes of one input: any; any, flattened; (channels, height, width); (points, d); (d,); (context,), of integers.
Kind = Literal["any", "vector", "image", "points", "coordinates", "tokens"]


@dataclass(frozen=True)
class Architecture:
    """A network at its published size; calling it builds one."""

    summary: str  # one line for people
    kind: Kind  # of its inputs
    make: Callable[..., nn.Module]  # ``make(input_shape, outputs, *, generator, **options)``
    preset: Mapping[str, Any] = field(default_factory=dict)  # options in which it differs from the defaults of ``make``
    least: float = 1  # the smallest value of integers among the options

    @property
    def options(self) -> dict[str, Any]:
        """The options with their values at the published size.

        Every network has ``init_scale``, by which the initial weights of all its convolutions and dense layers are
        multiplied.
        """
        parameters = inspect.signature(self.make).parameters.values()
        defaults = {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY and p.name != "generator"}
        return defaults | dict(self.preset) | {"init_scale": 1.0}

    def __call__(
        self, *, input_shape: tuple[int, ...], outputs: int, generator: torch.Generator | None = None, **options: Any
    ) -> nn.Module:
        """A network for inputs (N, *input_shape), its weights from the generator.

        The outputs of the network are (N, outputs), for tokens (N, context, outputs).
        """
        known = self.options
        options = {option: self.checked(option, value) for option, value in options.items()}
        shape = checked_option("input_shape", input_shape, ())
        wanted = known | options
        scale = wanted.pop("init_scale")
        if scale == 0:
            raise OptionError("init_scale", "init_scale must be positive, got 0: weights of zero do not train")
        model = self.make(shape, checked_option("outputs", outputs, 1), generator=generator, **wanted)
        for layer in model.modules():
            if isinstance(layer, (nn.Linear, nn.Conv2d)):
                layer.weight.data.mul_(scale)
        return model

    def checked(self, option: str, value: Any) -> Any:
        """The value of an option; an `OptionError` if it is of another kind than the default, or out of range."""
        if option not in (known := self.options):
            raise OptionError(option, f"unknown option {option!r}: choose from {', '.join(known)}")
        return checked_option(option, value, known[option], 1 if option == "init_scale" else self.least)


def checked_option(option: str, value: Any, like: Any, least: float = 1) -> Any:
    """``value``, if it is of the kind of ``like``, or an `OptionError`."""
    if expected := unfit(value, like, least):
        raise OptionError(option, f"option {option!r} must be {expected}, got {value!r}")
    return tuple(value) if isinstance(like, tuple) else value


def in_file(name: str, function: Any) -> Architecture:
    """Network of ``FILE.py:FUNCTION``, where FUNCTION(input_shape, outputs, **options) returns a module.

    Weights are drawn from the run's seed.
    """
    if not callable(function):
        raise ConfigError(f"{name} is no function of input_shape and outputs that returns a torch.nn.Module")

    def make(
        shape: tuple[int, ...], outputs: int, *, generator: torch.Generator | None = None, **options: Any
    ) -> nn.Module:
        with torch.random.fork_rng(devices=[]):
            if generator is not None:
                torch.manual_seed(int(torch.randint(2**62, (), generator=generator, device="cpu")))
            with own_code(name, on=f" (input_shape {shape}, outputs {outputs})"):
                model = function(shape, outputs, **options)
        if not isinstance(model, nn.Module):
            raise ConfigError(f"{name} returned {type(model).__name__}, not a torch.nn.Module")
        return model

    extras = list(inspect.signature(function).parameters.values())[2:]
    if missing := [p.name for p in extras if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]:
        raise ConfigError(f"{name} takes input_shape and outputs, and options with defaults: give {missing[0]!r} one")
    preset = defaults([p for p in extras if p.default is not p.empty])
    return Architecture(inspect.getdoc(function) or name, "any", make, preset, ANY)


#: All networks by name; packages that bring some name modules that register them as entry points of the group.
MODELS: Registry[Architecture] = Registry("model", "hesscond.models", in_file)


def register(name: str, summary: str, kind: Kind, make: Callable[..., nn.Module], **preset: Any) -> None:
    """Make a network known by its name; parameters as for `Architecture`."""
    MODELS.add(name, Architecture(summary, kind, make, preset))


def build(
    name: str, *, input_shape: tuple[int, ...], outputs: int, generator: torch.Generator | None = None, **options: Any
) -> nn.Module:
    """The network called ``name``, at its published size unless options say otherwise.

    Parameters
    ----------
    name
        One of `MODELS`.
    input_shape
        Shape of one input, without the batch: what the network's ``kind`` says.
    outputs
        Number of outputs (classes, values).
    generator
        Source of the initial weights, on the CPU; nothing else is drawn from. None: torch's global random state.
    **options
        Any of ``MODELS[name].options``.

    Returns
    -------
    torch.nn.Module
        On the CPU, in float32.

    Raises
    ------
    ConfigError
        An unknown network or option, or inputs or values that do not fit.

    Examples
    --------
    >>> net = build("resnet20", input_shape=(3, 32, 32), outputs=10, generator=torch.Generator().manual_seed(0))
    >>> sum(p.numel() for p in net.parameters())
    269722
    """
    architecture = MODELS.find(name)
    try:
        return architecture(input_shape=input_shape, outputs=outputs, generator=generator, **options)
    except ConfigError as error:
        raise ConfigError(f"model {name!r}: {error}") from None
