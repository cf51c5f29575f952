"""Inception networks for images of CIFAR's size."""

from __future__ import annotations

from typing import ClassVar, NamedTuple

import torch
from torch import nn
from torch.nn import functional

from hesscond.errors import ConfigError
from hesscond.models import layers
from hesscond.models.registry import register


class Branches(NamedTuple):
    """Channels of a block: of the four branches, and of the reductions before the 3×3 and the 5×5 convolution."""

    one: int
    reduce_three: int
    three: int
    reduce_five: int
    five: int
    pool: int

    def scaled(self, width: float) -> Branches:
        """All channels times ``width``, at least one each."""
        return Branches(*(max(1, round(channels * width)) for channels in self))


Stages = tuple[tuple[Branches, ...], ...]

#: The eight blocks of the small network, by stage.
SMALL: Stages = (
    (Branches(16, 32, 32, 16, 8, 8), Branches(24, 32, 48, 16, 12, 12)),
    (
        Branches(24, 32, 48, 16, 12, 12),
        Branches(16, 32, 48, 16, 16, 16),
        Branches(16, 32, 48, 16, 16, 16),
        Branches(32, 32, 48, 16, 24, 24),
    ),
    (Branches(32, 48, 64, 16, 16, 16), Branches(32, 48, 64, 16, 16, 16)),
)

#: The nine of GoogLeNet (table 1 of the paper), 3a to 5b.
PUBLISHED: Stages = (
    (Branches(64, 96, 128, 16, 32, 32), Branches(128, 128, 192, 32, 96, 64)),
    (
        Branches(192, 96, 208, 16, 48, 64),
        Branches(160, 112, 224, 24, 64, 64),
        Branches(128, 128, 256, 24, 64, 64),
        Branches(112, 144, 288, 32, 64, 64),
        Branches(256, 160, 320, 32, 128, 128),
    ),
    (Branches(256, 160, 320, 32, 128, 128), Branches(384, 192, 384, 48, 128, 128)),
)


class ConvNorm(nn.Sequential):
    """``conv``, ``norm``, activation."""

    def __init__(self, make: layers.Layers, before: int, after: int, kernel: int, activation: str) -> None:
        super().__init__()
        self.conv = make.conv(before, after, kernel)
        self.norm = make.normalization(after)
        self.activation = layers.make_activation(activation)


class InceptionBlock(nn.Module):
    """Four branches side by side: 1×1; 1×1 and 3×3; 1×1 and 5×5; 3×3 max pooling and 1×1 (figure 2b of the paper)."""

    def __init__(self, make: layers.Layers, before: int, branches: Branches, activation: str) -> None:
        super().__init__()
        self.one = ConvNorm(make, before, branches.one, 1, activation)
        self.reduce_three = ConvNorm(make, before, branches.reduce_three, 1, activation)
        self.three = ConvNorm(make, branches.reduce_three, branches.three, 3, activation)
        self.reduce_five = ConvNorm(make, before, branches.reduce_five, 1, activation)
        self.five = ConvNorm(make, branches.reduce_five, branches.five, 5, activation)
        self.pool = ConvNorm(make, before, branches.pool, 1, activation)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(N, after, H, W) of (N, before, H, W)."""
        one = self.one(x)
        three = self.three(self.reduce_three(x))
        five = self.five(self.reduce_five(x))
        pool = self.pool(functional.max_pool2d(x, 3, 1, padding=1))
        return torch.cat([one, three, five, pool], 1)


class Inception(nn.Sequential):
    """``stem``, ``stage1.block1``, … with max pooling between stages, the mean over pixels, ``fc``.

    Szegedy et al., Going Deeper with Convolutions (CVPR 2015), made small for CIFAR. The weight-conditioning paper
    (Saratchandran, Wang, Lucey, ECCV 2024) trains "an Inception network" on CIFAR; assumed: the eight blocks of the
    modified GoogLeNet of P. Lippe's UvA Deep Learning Tutorial 5, normalization after each convolution, He-normal
    weights (fan-in).
    """

    published: ClassVar[Stages] = SMALL

    def __init__(
        self,
        input_shape: tuple[int, ...],
        outputs: int,
        *,
        # number of blocks of each stage: up to 2, 4 and 2; for `GoogLeNet` 2, 5 and 2
        blocks: tuple[int, ...] = (2, 4, 2),
        stem: int = 64,  # channels of the first convolution, 3×3
        width: float = 1.0,  # factor of all other channels
        activation: str = "relu",
        norm: str = "batch",
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__()
        most = [len(stage) for stage in self.published]
        if not 1 <= len(blocks) <= len(most) or any(n > limit for n, limit in zip(blocks, most, strict=False)):
            raise ConfigError(
                f"blocks must be up to {most[0]}, {most[1]} and {most[2]} in the three stages, got {list(blocks)}"
            )
        channels, _, _ = layers.image_shape(input_shape, 2 ** (len(blocks) - 1))
        make = layers.Layers(layers.he_fan_in, generator, norm)
        self.stem = ConvNorm(make, channels, stem, 3, activation)
        before = stem
        for s, (number, group) in enumerate(zip(blocks, self.published, strict=False), 1):
            if s > 1:
                self.add_module(f"pool{s}", nn.MaxPool2d(3, 2, padding=1))
            stage = nn.Sequential()
            for b, full in enumerate(group[:number], 1):
                branches = full.scaled(width)
                stage.add_module(f"block{b}", InceptionBlock(make, before, branches, activation))
                before = branches.one + branches.three + branches.five + branches.pool
            self.add_module(f"stage{s}", stage)
        self.mean = layers.Mean()
        self.fc = make.dense(before, outputs)


class GoogLeNet(Inception):
    """The nine blocks of GoogLeNet behind one convolution of 3 × 3, for CIFAR.

    Szegedy et al., Going Deeper with Convolutions (CVPR 2015), table 1, from block 3a on. In place of the layers
    before, which make images 8 times smaller, one convolution of 192 channels; without auxiliary classifiers and
    dropout, and normalized after each convolution. What Saratchandran, Wang and Lucey (ECCV 2024) changed for
    CIFAR-100 their paper does not say.
    """

    published: ClassVar[Stages] = PUBLISHED


register("inception", "small Inception network for CIFAR", "image", Inception)
register("googlenet", "GoogLeNet for CIFAR", "image", GoogLeNet, blocks=(2, 5, 2), stem=192)
