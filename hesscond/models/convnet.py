"""Plain convolutional networks: 3×3 convolutions, pooling, dense layers."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import torch
from torch import nn
from torch.nn import functional

from hesscond.errors import ConfigError
from hesscond.models import layers
from hesscond.models.registry import register

WEIGHTS: dict[str, layers.Initializer] = {"glorot": layers.glorot_uniform, "he": layers.he_fan_in}
POOLINGS: dict[str, Callable[[torch.Tensor, int], torch.Tensor]] = {
    "max": functional.max_pool2d,
    "average": functional.avg_pool2d,
}
#: Pixels that a 3×3 convolution takes from height and width.
LOST = {"valid": 2, "same": 0}


class ConvNet(nn.Module):
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
        self.convolutions = len(widths)
        self.pooled = frozenset(pooled)
        self.pool = POOLINGS[layers.chosen("pooling", pooling, POOLINGS)]
        lost = LOST[layers.chosen("padding", padding, LOST)]
        channels, height, width = layers.image_shape(input_shape, self.smallest(lost))
        self.average = layers.chosen("head", head, ("flatten", "average")) == "average"
        make = layers.Layers(WEIGHTS[layers.chosen("weights", weights, WEIGHTS)], generator, norm)
        self.activation = layers.make_activation(activation)
        for i, (before, after) in enumerate(pairwise((channels, *widths)), 1):
            self.add_module(f"conv{i}", make.conv(before, after, 3, padding=0 if lost else 1))
            self.add_module(f"norm{i}", make.normalization(after))
        pixels = 1 if self.average else self.remaining(height, lost) * self.remaining(width, lost)
        dense = (widths[-1] * pixels, *hidden, outputs)
        self.dense = len(dense) - 1
        for i, (before, after) in enumerate(pairwise(dense), 1):
            last = i == self.dense
            self.add_module(f"fc{i}", make.dense(before, after, bias=last or norm == "none"))
            if not last:
                self.add_module(f"norm{self.convolutions + i}", make.normalization(after, maps=False))

    def remaining(self, pixels: int, lost: int) -> int:
        """Height or width after all convolutions, each of which takes the ``lost`` pixels."""
        for i in range(1, self.convolutions + 1):
            pixels = (pixels - lost) // (2 if i in self.pooled else 1)
        return pixels

    def smallest(self, lost: int) -> int:
        """Height or width of which one pixel remains."""
        pixels = 1
        for i in range(self.convolutions, 0, -1):
            pixels = pixels * (2 if i in self.pooled else 1) + lost
        return pixels

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Outputs (N, outputs) of images (N, channels, height, width)."""
        for i in range(1, self.convolutions + 1):
            x = self.activated(f"conv{i}", i, x)
            if i in self.pooled:
                x = self.pool(x, 2)
        x = x.mean((2, 3)) if self.average else x.flatten(1)
        for i in range(1, self.dense):
            x = self.activated(f"fc{i}", self.convolutions + i, x)
        return self.get_submodule(f"fc{self.dense}")(x)

    def activated(self, layer: str, number: int, x: torch.Tensor) -> torch.Tensor:
        """A layer, its normalization and the activation."""
        return self.activation(self.get_submodule(f"norm{number}")(self.get_submodule(layer)(x)))


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
