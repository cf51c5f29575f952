"""Densely connected convolutional networks for images of CIFAR's size."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from hesscond.errors import ConfigError
from hesscond.models import layers
from hesscond.models.registry import register


class DenseLayer(nn.Module):
    """norm, activation, 1×1; norm, activation, 3×3; appended to the input (section 3, bottleneck layers)."""

    def __init__(self, make: layers.Layers, before: int, growth: int, bottleneck: int, activation: str) -> None:
        super().__init__()
        self.norm1 = make.normalization(before)
        self.conv1 = make.conv(before, bottleneck * growth, 1)
        self.norm2 = make.normalization(bottleneck * growth)
        self.conv2 = make.conv(bottleneck * growth, growth, 3)
        self.activation = layers.make_activation(activation)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(N, before + growth, H, W) of (N, before, H, W)."""
        out = self.conv1(self.activation(self.norm1(x)))
        out = self.conv2(self.activation(self.norm2(out)))
        return torch.cat([x, out], 1)


class Transition(nn.Sequential):
    """norm, activation, 1×1 to half the channels, 2×2 average pooling (section 3, compression θ = 1/2)."""

    def __init__(self, make: layers.Layers, before: int, activation: str) -> None:
        super().__init__()
        self.norm = make.normalization(before)
        self.activation = layers.make_activation(activation)
        self.conv = make.conv(before, before // 2, 1)
        self.pool = nn.AvgPool2d(2)


class DenseNet(nn.Sequential):
    """``conv1``; ``block1.layer1``, …, ``transition1``, …; ``norm``, the mean over pixels, ``fc``.

    DenseNet-BC of Huang, Liu, van der Maaten, Weinberger, Densely Connected Convolutional Networks (CVPR 2017),
    He-normal weights (fan-in). The weight-conditioning paper (Saratchandran, Wang, Lucey, ECCV 2024) trains "a
    DenseNet" on CIFAR; the defaults assume that of P. Lippe's UvA Deep Learning Tutorial 5 (without its bias in
    ``conv1``), as for its Inception network.
    """

    def __init__(
        self,
        input_shape: tuple[int, ...],
        outputs: int,
        *,
        blocks: tuple[int, ...] = (6, 6, 6, 6),  # layers in each dense block
        growth: int = 16,  # channels that a layer adds
        bottleneck: int = 2,  # the 1×1 convolution of a layer has this many times growth channels
        stem: int = 32,  # channels of conv1
        activation: str = "relu",
        norm: str = "batch",
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__()
        if not blocks:
            raise ConfigError("blocks must have the number of layers of at least one dense block")
        channels, _, _ = layers.image_shape(input_shape, 2 ** (len(blocks) - 1))
        make = layers.Layers(layers.he_fan_in, generator, norm)
        self.conv1 = make.conv(channels, stem, 3)
        before = stem
        for i, number in enumerate(blocks, 1):
            block = nn.Sequential()
            for j in range(1, number + 1):
                block.add_module(f"layer{j}", DenseLayer(make, before, growth, bottleneck, activation))
                before += growth
            self.add_module(f"block{i}", block)
            if i < len(blocks):
                self.add_module(f"transition{i}", Transition(make, before, activation))
                before //= 2
        self.norm = make.normalization(before)
        self.activation = layers.make_activation(activation)
        self.mean = layers.Mean()
        self.fc = make.dense(before, outputs)


BC_100: dict[str, Any] = {"blocks": (16, 16, 16), "growth": 12, "bottleneck": 4, "stem": 24}
register("densenet", "small DenseNet-BC for CIFAR", "image", DenseNet)
register("densenet-bc-100-12", "DenseNet-BC of 100 layers with growth 12 for CIFAR", "image", DenseNet, **BC_100)
