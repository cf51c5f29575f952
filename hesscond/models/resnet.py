"""Residual networks: the original ones, with pre-activation, and wide."""

from __future__ import annotations

from collections import OrderedDict
from itertools import pairwise
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from hesscond.errors import ConfigError
from hesscond.models import layers
from hesscond.models.registry import register


class PaddedShortcut(nn.Module):
    """Option A of He et al. (CVPR 2016, section 3.3): every stride-th pixel, further channels zero; no parameters."""

    def __init__(self, before: int, after: int, stride: int) -> None:
        super().__init__()
        self.further = after - before
        self.stride = stride

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(N, after, H / stride, W / stride) of (N, before, H, W)."""
        return functional.pad(x[:, :, :: self.stride, :: self.stride], (0, 0, 0, 0, 0, self.further))


def make_shortcut(
    make: layers.Layers, kind: str, before: int, after: int, stride: int, *, normalized: bool
) -> nn.Module:
    """Shortcut from the input of a block to its output: the identity wherever shapes allow."""
    if before == after and stride == 1:
        return nn.Identity()
    if layers.chosen("shortcut", kind, ("pad", "projection")) == "pad":
        if after < before:
            raise ConfigError(f"padded shortcuts need widths that do not fall, got {before} before {after}")
        return PaddedShortcut(before, after, stride)
    projection = make.conv(before, after, 1, stride=stride)
    if not normalized:
        return projection
    return nn.Sequential(OrderedDict(conv=projection, norm=make.normalization(after)))


class ResidualBlock(nn.Module):
    """Convolutions, each with a normalization, and a shortcut (He et al., CVPR 2016, figures 2 and 5).

    Two 3×3 ones, or as a bottleneck 1×1, 3×3 and 1×1 to four times the width. There the stride is in the 3×3
    convolution, as in all later code; the paper has it in the first 1×1.
    """

    def __init__(
        self,
        make: layers.Layers,
        before: int,
        width: int,
        stride: int,
        shortcut: str,
        activation: str,
        *,
        expansion: int,
        branch_gamma: float,
    ) -> None:
        super().__init__()
        after = width * expansion
        # channels before and after, kernel, stride
        plan = [(before, width, 3, stride), (width, width, 3, 1)]
        if expansion > 1:
            plan = [(before, width, 1, 1), (width, width, 3, stride), (width, after, 1, 1)]
        self.depth = len(plan)
        for i, (fan_in, fan_out, kernel, step) in enumerate(plan, 1):
            self.add_module(f"conv{i}", make.conv(fan_in, fan_out, kernel, stride=step))
            last = i == self.depth
            norm = make.last_normalization(fan_out, branch_gamma) if last else make.normalization(fan_out)
            self.add_module(f"norm{i}", norm)
        self.shortcut = make_shortcut(make, shortcut, before, after, stride, normalized=True)
        self.activation = layers.make_activation(activation)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(N, expansion · width, H / stride, W / stride) of (N, before, H, W)."""
        out = x
        for i in range(1, self.depth + 1):
            out = self.get_submodule(f"norm{i}")(self.get_submodule(f"conv{i}")(out))
            out = self.activation(out if i < self.depth else out + self.shortcut(x))
        return out


class PreActBlock(nn.Module):
    """Normalization and activation before each of two 3×3 convolutions (He et al., ECCV 2016, figure 1b).

    ``shared``: whether the shortcut, too, starts after the first activation.
    """

    def __init__(
        self,
        make: layers.Layers,
        before: int,
        width: int,
        stride: int,
        shortcut: str,
        activation: str,
        *,
        shared: bool,
        branch_gamma: float,
    ) -> None:
        super().__init__()
        self.shared = shared
        self.norm1 = make.normalization(before)
        self.conv1 = make.conv(before, width, 3, stride=stride)
        self.norm2 = make.last_normalization(width, branch_gamma)
        self.conv2 = make.conv(width, width, 3)
        self.shortcut = make_shortcut(make, shortcut, before, width, stride, normalized=False)
        self.activation = layers.make_activation(activation)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(N, width, H / stride, W / stride) of (N, before, H, W)."""
        start = self.activation(self.norm1(x))
        out = self.conv2(self.activation(self.norm2(self.conv1(start))))
        return out + self.shortcut(start if self.shared else x)


#: Kinds of blocks, and how many times the width their outputs have as channels.
BLOCKS = {"basic": 1, "bottleneck": 4}
#: Kernel and stride of the first convolution.
STEMS = {"3x3": (3, 1), "7x7": (7, 2)}


class ResNet(nn.Sequential):
    """``conv1``, stages ``stage1.block1``, …, the mean over pixels, ``fc``.

    He, Zhang, Ren, Sun, Deep Residual Learning for Image Recognition (CVPR 2016): sections 3.3 and 4.1 for ImageNet,
    4.2 for CIFAR (6n + 2 layers: n blocks in each of three stages, padded shortcuts). He-normal weights (fan-out);
    normalizations begin at 1 and 0. Every stage but the first halves height and width.
    """

    def __init__(
        self,
        input_shape: tuple[int, ...],
        outputs: int,
        *,
        blocks: tuple[int, ...] = (3, 3, 3),  # blocks in each stage
        # channels of each stage's 3×3 convolutions; the first is that of conv1, too
        widths: tuple[int, ...] = (16, 32, 64),
        block: str = "basic",  # "basic" or "bottleneck" (with four times as many channels between blocks)
        shortcut: str = "pad",  # where shapes change: "pad" (option A) or "projection" (option B)
        stem: str = "3x3",  # "3x3", or "7x7" with stride 2 and max pooling (ImageNet)
        activation: str = "relu",
        norm: str = "batch",
        branch_gamma: float = 1.0,  # initial γ of the last normalization of each residual branch (Goyal et al.: 0)
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__()
        layers.same_length("blocks", blocks, "widths", widths)
        kernel, stride = STEMS[layers.chosen("stem", stem, STEMS)]
        expansion = BLOCKS[layers.chosen("block", block, BLOCKS)]
        channels, _, _ = layers.image_shape(input_shape, 2 ** (len(blocks) - 1) * stride**2)
        make = layers.Layers(layers.he_fan_out, generator, norm)
        self.conv1 = make.conv(channels, widths[0], kernel, stride=stride)
        self.norm1 = make.normalization(widths[0])
        self.activation = layers.make_activation(activation)
        self.pool = nn.MaxPool2d(3, 2, padding=1) if stem == "7x7" else nn.Identity()
        before = widths[0]
        for s, (number, width) in enumerate(zip(blocks, widths, strict=True), 1):
            stage = nn.Sequential()
            for b in range(1, number + 1):
                stride = 2 if b == 1 and s > 1 else 1
                residual = ResidualBlock(
                    make, before, width, stride, shortcut, activation, expansion=expansion, branch_gamma=branch_gamma
                )
                stage.add_module(f"block{b}", residual)
                before = width * expansion
            self.add_module(f"stage{s}", stage)
        self.mean = layers.Mean()
        self.fc = make.dense(before, outputs)


class PreActResNet(nn.Sequential):
    """``conv1``, stages ``stage1.block1``, … with pre-activation, ``norm``, the mean over pixels, ``fc``.

    He, Zhang, Ren, Sun, Identity Mappings in Deep Residual Networks (ECCV 2016) with padded shortcuts, where the very
    first shortcut starts after the first activation (appendix); and Zagoruyko and Komodakis, Wide Residual Networks
    (BMVC 2016, table 1) with projections, which start after it as well. He-normal weights (fan-out); normalizations
    begin at 1 and 0. Every stage but the first halves height and width.
    """

    def __init__(
        self,
        input_shape: tuple[int, ...],
        outputs: int,
        *,
        blocks: tuple[int, ...] = (3, 3, 3),  # blocks in each stage
        stem: int = 16,  # channels of conv1
        widths: tuple[int, ...] = (16, 32, 64),  # channels of each stage
        shortcut: str = "pad",  # where shapes change: "pad" or "projection"
        activation: str = "relu",
        norm: str = "batch",
        branch_gamma: float = 1.0,  # initial γ of the last normalization of each residual branch; not 0
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__()
        if not branch_gamma:
            why = "the ReLU after the last normalization of a branch has derivative 0 at 0, and the branch never trains"
            raise layers.OptionError("branch_gamma", f"branch_gamma = 0 in a network with pre-activation: {why}")
        layers.same_length("blocks", blocks, "widths", widths)
        channels, _, _ = layers.image_shape(input_shape, 2 ** (len(blocks) - 1))
        make = layers.Layers(layers.he_fan_out, generator, norm)
        self.conv1 = make.conv(channels, stem, 3)
        for s, (number, (before, width)) in enumerate(zip(blocks, pairwise((stem, *widths)), strict=True), 1):
            stage = nn.Sequential()
            for b in range(1, number + 1):
                enters, stride = (before, 2 if s > 1 else 1) if b == 1 else (width, 1)
                changes = enters != width or stride != 1
                shared = changes if shortcut == "projection" else b == s == 1
                block = PreActBlock(
                    make, enters, width, stride, shortcut, activation, shared=shared, branch_gamma=branch_gamma
                )
                stage.add_module(f"block{b}", block)
            self.add_module(f"stage{s}", stage)
        self.norm = make.normalization(widths[-1])
        self.activation = layers.make_activation(activation)
        self.mean = layers.Mean()
        self.fc = make.dense(widths[-1], outputs)


IMAGENET: dict[str, Any] = {"widths": (64, 128, 256, 512), "shortcut": "projection", "stem": "7x7"}
WIDE: dict[str, Any] = {"blocks": (4, 4, 4), "widths": (160, 320, 640), "shortcut": "projection"}
for depth, n in ((20, 3), (56, 9), (110, 18)):
    register(f"resnet{depth}", f"ResNet-{depth} for CIFAR", "image", ResNet, blocks=(n, n, n))
    summary = f"pre-activation ResNet-{depth} for CIFAR"
    register(f"preact-resnet{depth}", summary, "image", PreActResNet, blocks=(n, n, n))
register("resnet18", "ResNet-18 for ImageNet", "image", ResNet, blocks=(2, 2, 2, 2), **IMAGENET)
register("resnet50", "ResNet-50 for ImageNet", "image", ResNet, blocks=(3, 4, 6, 3), block="bottleneck", **IMAGENET)
register("wrn-28-10", "wide ResNet-28-10 for CIFAR", "image", PreActResNet, **WIDE)
