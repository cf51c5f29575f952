"""Parts that all networks share: layers with initial weights from one generator, activations, normalizations."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import nn

from hesscond.errors import ConfigError

#: LeakyReLU has the slope 0.2 of DGCNN.
ACTIVATIONS: dict[str, Callable[[], nn.Module]] = {
    "relu": nn.ReLU,
    "tanh": nn.Tanh,
    "sigmoid": nn.Sigmoid,
    "gelu": nn.GELU,
    "leaky-relu": partial(nn.LeakyReLU, 0.2),
}


class OptionError(ConfigError):
    """The value of the option of a network that is called ``option``."""

    def __init__(self, option: str, message: str) -> None:
        super().__init__(message)
        self.option = option


#: Largest number of float32.
LARGEST = torch.finfo(torch.float32).max
#: Normalizations, with the names of their options.
NORMALIZATIONS: dict[str, tuple[str, ...]] = {
    "batch": ("eps", "momentum"),
    "group": ("groups", "size", "eps"),
    "layer": ("eps",),
    "rms": ("eps",),
    "none": (),
}
#: Normalizations of convolutions and dense layers; token sequences have others.
OF_CHANNELS = ("batch", "group", "layer", "none")
#: The type of these options, their bound, and both in words.
NORMALIZATION_OPTIONS: dict[str, tuple[type[int] | type[float], float, str]] = {
    "eps": (float, LARGEST, "a positive number"),
    "momentum": (float, 1.0, "a number above 0, up to 1"),
    "groups": (int, LARGEST, "a positive integer"),
    "size": (int, LARGEST, "a positive integer"),
}


class Mean(nn.Module):
    """Mean of each channel of (N, C, H, W) over the pixels."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(N, C)."""
        return x.mean((2, 3))


Initializer = Callable[[nn.Linear | nn.Conv2d, torch.Generator | None], None]


def uniform_fan_in(layer: nn.Linear | nn.Conv2d, generator: torch.Generator | None) -> None:
    """U(±1/√fan-in) for weights and bias, the default of torch."""
    bound = layer.weight[0].numel() ** -0.5
    nn.init.uniform_(layer.weight, -bound, bound, generator=generator)
    if layer.bias is not None:
        nn.init.uniform_(layer.bias, -bound, bound, generator=generator)


def zero_bias(fill: Callable[..., Any]) -> Initializer:
    """Initializer that fills the weight with a function of torch, and sets the bias to zero, if there is one."""

    def initialize(layer: nn.Linear | nn.Conv2d, generator: torch.Generator | None) -> None:
        fill(layer.weight, generator=generator)
        if layer.bias is not None:
            nn.init.zeros_(layer.bias)

    return initialize


#: U(±√(6 / (fan-in + fan-out))), bias 0 (Glorot and Bengio, AISTATS 2010, eq. 16; the default of Keras).
glorot_uniform = zero_bias(nn.init.xavier_uniform_)
#: N(0, 0.02²), bias 0 (Radford et al., Language Models are Unsupervised Multitask Learners, 2019, and its code).
normal = zero_bias(partial(nn.init.normal_, std=0.02))
#: N(0, 0.02²) truncated at ±2, bias 0 (the transformers' custom since BERT).
truncated_normal = zero_bias(partial(nn.init.trunc_normal_, std=0.02))


def he_normal(
    layer: nn.Linear | nn.Conv2d, generator: torch.Generator | None, *, mode: Literal["fan_in", "fan_out"]
) -> None:
    """N(0, 2/fan) for convolutions, bias 0 (He et al., ICCV 2015, eqs. 10 and 14).

    The dense output layers have U(±1/√fan-in), bias 0, as in the code published with the residual networks.
    """
    if isinstance(layer, nn.Linear):
        uniform_fan_in(layer, generator)
        if layer.bias is not None:
            nn.init.zeros_(layer.bias)
    else:
        zero_bias(partial(nn.init.kaiming_normal_, mode=mode, nonlinearity="relu"))(layer, generator)


he_fan_in: Initializer = partial(he_normal, mode="fan_in")
he_fan_out: Initializer = partial(he_normal, mode="fan_out")


@dataclass(frozen=True)
class Layers:
    """Makes the layers of one network, each with its initial weights."""

    initialize: Initializer  # sets the initial weights and bias
    generator: torch.Generator | None  # generator, on the CPU, of the initial weights; nothing else is random
    # what `normalization` makes, as `normalization_of` takes it. A layer before a normalization has no bias, except
    # with "none"
    norm: str = "none"

    def dense(self, before: int, after: int, *, bias: bool = True) -> nn.Linear:
        """A dense layer."""
        # the constructor itself would draw from the global random state
        layer = nn.utils.skip_init(nn.Linear, before, after, bias=bias, device=torch.get_default_device())
        self._fill(layer)
        return layer

    def conv(
        self, before: int, after: int, kernel: int, *, stride: int = 1, padding: int | None = None, bias: bool = False
    ) -> nn.Conv2d:
        """A convolution; padded by half the kernel unless given otherwise; with a bias if asked, or if norm is none."""
        layer = nn.utils.skip_init(
            nn.Conv2d,
            before,
            after,
            kernel,
            stride=stride,
            padding=kernel // 2 if padding is None else padding,
            bias=bias or self.norm == "none",
            device=torch.get_default_device(),
        )
        self._fill(layer)
        return layer

    def _fill(self, layer: nn.Linear | nn.Conv2d) -> None:
        # on the meta device a network has a structure but no values
        if not layer.weight.is_meta:
            self.initialize(layer, self.generator)

    def normalization(self, channels: int, *, maps: bool = True) -> nn.Module:
        """The normalization of (N, channels, H, W), or of (N, channels) without ``maps``."""
        kind, options = normalization_of(self.norm)
        if kind == "batch":
            return (nn.BatchNorm2d if maps else nn.BatchNorm1d)(channels, **options)
        if kind == "group":
            groups = number_of_groups(channels, options.pop("groups", None), options.pop("size", None), maps=maps)
            return nn.GroupNorm(groups, channels, **options)
        if kind == "layer":
            return nn.GroupNorm(1, channels, **options)
        return nn.Identity()

    def last_normalization(self, channels: int, gamma: float) -> nn.Module:
        """The last normalization of a residual branch, whose γ begins at ``gamma``."""
        norm = self.normalization(channels)
        if gamma != 1:
            weight = getattr(norm, "weight", None)
            if weight is None:
                raise OptionError("branch_gamma", f"branch_gamma is an initial γ, and norm {self.norm!r} has none")
            nn.init.constant_(weight, gamma)
        return norm


def normalization_of(text: str, kinds: Collection[str] = OF_CHANNELS) -> tuple[str, dict[str, Any]]:
    """Kind and options of a normalization.

    ``"batch:eps=0.001,momentum=0.01"``; ``"group:groups=16"``, the number of groups, or ``"group:size=4"``, channels
    per group; ``"layer:eps=0.001"``; ``"none"``. Options that are not given have torch's defaults; the number of groups
    is then that of `number_of_groups`.
    """
    kind, colon, rest = text.partition(":")
    known = NORMALIZATIONS[chosen("norm", kind, kinds)]
    options: dict[str, Any] = {}
    for item in rest.split(",") if colon else ():
        name, _, given = item.partition("=")
        if name not in known:
            choices = ", ".join(known) or "its word alone"
            raise OptionError("norm", f"norm {text!r}: {kind!r} has no option {name!r}, only {choices}")
        type_of, bound, expected = NORMALIZATION_OPTIONS[name]
        try:
            options[name] = type_of(given)
        except ValueError:
            options[name] = math.nan
        if not 0 < options[name] <= bound:
            raise OptionError("norm", f"norm {text!r}: {name} must be {expected}, got {given!r}")
    if {"groups", "size"} <= options.keys():
        raise OptionError("norm", f"norm {text!r}: give either the number of groups or their size, in channels")
    return kind, options


def number_of_groups(channels: int, groups: int | None = None, size: int | None = None, *, maps: bool = True) -> int:
    """The groups that channels split into: ``groups``, or as many as have ``size`` channels each.

    Neither given: 32 (Wu and He, ECCV 2018, section 3.1), fewer where a group would have less than four channels.
    """
    if size is not None:
        count, wanted = channels / size, f"groups of {size}"
    elif groups is not None:
        count, wanted = groups, f"{groups} groups of the same size"
    else:
        return next(n for n in range(min(32, max(1, channels // 4)), 0, -1) if channels % n == 0)
    if count != int(count) or channels % count or (not maps and count == channels):
        alone = "" if maps else ", of two at least"
        raise OptionError("norm", f"the {channels} channels of a layer do not split into {wanted}{alone}")
    return int(count)


def make_activation(name: str) -> nn.Module:
    """The activation called ``name``."""
    return ACTIVATIONS[chosen("activation", name, ACTIVATIONS)]()


def make_dropout(probability: float) -> nn.Module:
    """Dropout, or nothing at all for probability 0: a network without dropout draws no random numbers."""
    if not 0 <= probability < 1:
        raise OptionError("dropout", f"dropout must be a probability from 0 to below 1, got {probability}")
    return nn.Dropout(probability) if probability else nn.Identity()


def chosen(option: str, value: str, choices: Collection[str]) -> str:
    """``value``, if it is one of the choices."""
    if value not in choices:
        raise OptionError(option, f"unknown {option} {value!r}: choose from {', '.join(choices)}")
    return value


def image_shape(input_shape: tuple[int, ...], at_least: int = 1) -> tuple[int, int, int]:
    """(channels, height, width), if the inputs are images of at least this height and width."""
    if len(input_shape) != 3 or min(input_shape[1:]) < at_least:
        raise ConfigError(
            f"this network needs images (channels, height, width) of at least {at_least} x {at_least} pixels, "
            f"not inputs of shape {tuple(input_shape)}"
        )
    channels, height, width = input_shape
    return channels, height, width


def same_length(first: str, numbers: tuple[int, ...], second: str, other: tuple[int, ...]) -> None:
    """Refuse two options that say something for each stage, but for different numbers of them, or for none."""
    if not numbers or len(numbers) != len(other):
        raise ConfigError(
            f"{first} and {second} must have one number for each stage, got {list(numbers)} and {list(other)}"
        )
