"""All networks by name, and one way to build them."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import nn

from hesscond.errors import ConfigError, did_you_mean
from hesscond.models.convnet import ConvNet
from hesscond.models.densenet import DenseNet
from hesscond.models.dgcnn import DGCNN
from hesscond.models.inception import GoogLeNet, Inception
from hesscond.models.layers import OptionError
from hesscond.models.mlp import CoordinateMLP, mlp
from hesscond.models.nerf import RadianceField
from hesscond.models.resnet import PreActResNet, ResNet
from hesscond.models.transformer import GPT, VisionTransformer

#: Shapes of one input: any, flattened; (channels, height, width); (points, d); (d,); (context,), of integers.
Kind = Literal["vector", "image", "points", "coordinates", "tokens"]


@dataclass(frozen=True)
class Architecture:
    """A network at its published size; calling it builds one.

    Attributes
    ----------
    summary
        One line for people.
    kind
        What its inputs are.
    make
        ``make(input_shape, outputs, *, generator, **options)``.
    preset
        The options in which it differs from the defaults of ``make``.
    """

    summary: str
    kind: Kind
    make: Callable[..., nn.Module]
    preset: Mapping[str, Any] = field(default_factory=dict)

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
        for option, value in options.items():
            if option not in known:
                raise OptionError(option, f"unknown option {option!r}: choose from {', '.join(known)}")
            options[option] = checked_option(option, value, known[option])
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


def checked_option(option: str, value: Any, like: Any) -> Any:
    """``value``, if it is of the kind of ``like``: positive integers, several of them, numbers from 0, or words.

    Raises
    ------
    OptionError
        It is not.
    """
    if isinstance(like, tuple):
        fits = isinstance(value, (list, tuple)) and all(is_count(v) for v in value)
        expected = "a list of positive integers"
    elif isinstance(like, str):
        fits, expected = isinstance(value, str), "a word"
    elif isinstance(like, float):
        fits = isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value < math.inf
        expected = "a number that is not negative"
    else:
        fits, expected = is_count(value), "a positive integer"
    if not fits:
        raise OptionError(option, f"option {option!r} must be {expected}, got {value!r}")
    return tuple(value) if isinstance(like, tuple) else value


def is_count(value: Any) -> bool:
    """Whether a value is an integer from 1."""
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


_THREES = {
    "widths": (64, 64, 64, 128, 128, 128, 256, 256, 256),
    "padding": "same",
    "pooled": (3, 6),
    "pooling": "average",
    "hidden": (),
    "head": "average",
    "weights": "he",
    "norm": "batch",
}
_WIDE = {"blocks": (4, 4, 4), "widths": (160, 320, 640), "shortcut": "projection"}
_IMAGENET = {"widths": (64, 128, 256, 512), "shortcut": "projection", "stem": "7x7"}

#: A further network is a further entry.
MODELS: dict[str, Architecture] = {
    "mlp": Architecture("fully connected network", "vector", mlp),
    "cnn5": Architecture("5-layer CNN of the BNP paper", "image", ConvNet),
    "cnn9": Architecture("CNN of nine convolutions of the CWO paper", "image", ConvNet, _THREES),
    "resnet20": Architecture("ResNet-20 for CIFAR", "image", ResNet),
    "resnet56": Architecture("ResNet-56 for CIFAR", "image", ResNet, {"blocks": (9, 9, 9)}),
    "resnet110": Architecture("ResNet-110 for CIFAR", "image", ResNet, {"blocks": (18, 18, 18)}),
    "preact-resnet20": Architecture("pre-activation ResNet-20 for CIFAR", "image", PreActResNet),
    "preact-resnet56": Architecture("pre-activation ResNet-56 for CIFAR", "image", PreActResNet, {"blocks": (9, 9, 9)}),
    "preact-resnet110": Architecture(
        "pre-activation ResNet-110 for CIFAR", "image", PreActResNet, {"blocks": (18, 18, 18)}
    ),
    "resnet18": Architecture("ResNet-18 for ImageNet", "image", ResNet, {"blocks": (2, 2, 2, 2), **_IMAGENET}),
    "resnet50": Architecture(
        "ResNet-50 for ImageNet", "image", ResNet, {"blocks": (3, 4, 6, 3), "block": "bottleneck", **_IMAGENET}
    ),
    "wrn-28-10": Architecture("wide ResNet-28-10 for CIFAR", "image", PreActResNet, _WIDE),
    "inception": Architecture("small Inception network for CIFAR", "image", Inception),
    "googlenet": Architecture("GoogLeNet for CIFAR", "image", GoogLeNet, {"blocks": (2, 5, 2), "stem": 192}),
    "densenet": Architecture("small DenseNet-BC for CIFAR", "image", DenseNet),
    "densenet-bc-100-12": Architecture(
        "DenseNet-BC of 100 layers with growth 12 for CIFAR",
        "image",
        DenseNet,
        {"blocks": (16, 16, 16), "growth": 12, "bottleneck": 4, "stem": 24},
    ),
    "vit-s16": Architecture("ViT-S/16", "image", VisionTransformer),
    "vit-b16": Architecture("ViT-B/16", "image", VisionTransformer, {"width": 768, "heads": 12, "hidden": 3072}),
    "nerf": Architecture("NeRF's MLP on any coordinates", "coordinates", CoordinateMLP),
    "nerf-rays": Architecture("NeRF on rays, volume rendering included", "coordinates", RadianceField),
    "occupancy-mlp": Architecture(
        "MLP for solids as functions, logits inside and outside",
        "coordinates",
        CoordinateMLP,
        {"hidden": (256,) * 8, "after_skip": (), "frequencies": 6, "output": "linear"},
    ),
    "dgcnn": Architecture("DGCNN on point clouds", "points", DGCNN),
    "gpt": Architecture("decoder-only transformer, as small as nanoGPT", "tokens", GPT),
}


def build(
    name: str,
    *,
    input_shape: tuple[int, ...],
    outputs: int,
    generator: torch.Generator | None = None,
    **options: Any,
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
    if name not in MODELS:
        raise ConfigError(f"unknown model {name!r}: {did_you_mean(name, MODELS)}")
    try:
        return MODELS[name](input_shape=input_shape, outputs=outputs, generator=generator, **options)
    except ConfigError as error:
        raise ConfigError(f"model {name!r}: {error}") from None
