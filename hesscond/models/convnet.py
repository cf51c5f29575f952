"""Plain convolutional networks: 3×3 convolutions, pooling, dense layers."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise

import torch
from torch import nn

from hesscond.errors import ConfigError
from hesscond.models import layers
from hesscond.models.registry import register

WEIGHTS: dict[str, layers.Initializer] = {"glorot": layers.glorot_uniform, "he": layers.he_fan_in}
POOLINGS: dict[str, Callable[[int], nn.Module]] = {"max": nn.MaxPool2d, "average": nn.AvgPool2d}
#: Modules between the convolutions and the dense layers.
HEADS: dict[str, Callable[[], nn.Module]] = {"flatten": nn.Flatten, "average": layers.Mean}
#: Pixels that a 3×3 convolution takes from height and width.
LOST = {"valid": 2, "same": 0}


class ConvNet(nn.Sequential):
    """Layers ``conv1``, …, then dense ``fc1``, …; each but the last followed by ``normI`` and the activation.

    The defaults are the 5-layer CNN of Lange, Helfrich, Ye, Batch Normalization Preconditioning (JMLR 2022,
    appendix B): convolutions with 32, 64 and 32 channels, two dense layers, Glorot weights. What the paper takes from
    TensorFlow's tutorial on convolutional networks (2019): no padding, max pooling after the first two convolutions,
    a hidden dense layer of 64.

    The 9-layer CNN of Ikami, Irie, Shibata, Constrained Weight Optimization for Learning without Activation
    Normalization (WACV 2021, section 4.1), has three padded convolutions each with 64, 128 and 256 channels, average
    pooling between the threes, the mean over the pixels before the output layer, He weights (fan-in).
    """

    def __init__(
        self,
        input_shape: tuple[int, ...],
        outputs: int,
        *,
        widths: tuple[int, ...] = (32, 64, 32),  # channels of the 3×3 convolutions
        padding: str = "valid",  # "valid", none, or "same", by zeros that keep height and width
        pooled: tuple[int, ...] = (1, 2),  # after which of them (1, 2, …) there is a 2×2 pooling
        pooling: str = "max",  # "max" or "average"
        hidden: tuple[int, ...] = (64,),  # widths of the hidden dense layers
        # input of the dense layers: "flatten", all pixels, or "average", the mean of each channel
        head: str = "flatten",
        weights: str = "glorot",  # "glorot" (uniform) or "he" (normal, fan-in)
        activation: str = "relu",
        norm: str = "none",
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__()
        if not widths or not set(pooled) <= set(range(1, len(widths) + 1)):
            raise ConfigError(
                f"pooled must name convolutions from 1 to the number of widths, got {list(pooled)} for {list(widths)}"
            )
        pool = POOLINGS[layers.chosen("pooling", pooling, POOLINGS)]
        lost = LOST[layers.chosen("padding", padding, LOST)]
        channels, *sides = layers.image_shape(input_shape, smallest(len(widths), pooled, lost))
        to_dense = HEADS[layers.chosen("head", head, HEADS)]()
        make = layers.Layers(WEIGHTS[layers.chosen("weights", weights, WEIGHTS)], generator, norm)
        for i, (before, after) in enumerate(pairwise((channels, *widths)), 1):
            self.add_module(f"conv{i}", make.conv(before, after, 3, padding=0 if lost else 1))
            self.add_module(f"norm{i}", make.normalization(after))
            self.add_module(f"activation{i}", layers.make_activation(activation))
            sides = [side - lost for side in sides]
            if i in pooled:
                self.add_module(f"pool{i}", pool(2))
                sides = [side // 2 for side in sides]
        self.head = to_dense
        dense = (widths[-1] * (math.prod(sides) if head == "flatten" else 1), *hidden, outputs)
        for i, (before, after) in enumerate(pairwise(dense), 1):
            last, number = i == len(dense) - 1, len(widths) + i
            self.add_module(f"fc{i}", make.dense(before, after, bias=last or norm == "none"))
            if not last:
                self.add_module(f"norm{number}", make.normalization(after, maps=False))
                self.add_module(f"activation{number}", layers.make_activation(activation))


def smallest(convolutions: int, pooled: tuple[int, ...], lost: int) -> int:
    """Height or width of which one pixel remains after convolutions that take the ``lost`` pixels each."""
    pixels = 1
    for i in range(convolutions, 0, -1):
        pixels = pixels * (2 if i in pooled else 1) + lost
    return pixels


register("cnn5", "5-layer CNN of the BNP paper", "image", ConvNet)
register(
    "cnn9",
    "CNN of nine convolutions of the CWO paper",
    "image",
    ConvNet,
    widths=(64, 64, 64, 128, 128, 128, 256, 256, 256),
    padding="same",
    pooled=(3, 6),
    pooling="average",
    hidden=(),
    head="average",
    weights="he",
    norm="batch",
)
