"""Convolutions and transposed convolutions."""

from __future__ import annotations

from math import prod
from typing import Any, ClassVar

import torch
from torch import nn
from torch.nn import functional

from hesscond.capture.kinds import base


class Convolution(base.LayerKind):
    """Kind of the convolutions of torch, whose units are output channels."""

    classes: ClassVar[tuple[type[nn.Module], ...]] = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
    role = "convolution"
    forward_methods = (*base.LayerKind.forward_methods, "_conv_forward")
    arguments = ("_reversed_padding_repeated_twice",)

    def geometry(self, layer: Any) -> base.Geometry:
        fan_in = layer.in_channels // layer.groups * prod(layer.kernel_size)
        return base.Geometry(
            type(layer).__name__,
            layer.out_channels,
            layer.groups,
            fan_in,
            base.has_bias(layer),
            layer.in_channels,
            len(layer.kernel_size),
        )

    def weight_shape(self, layer: Any) -> torch.Size:
        return torch.Size((layer.out_channels, layer.in_channels // layer.groups, *layer.kernel_size))

    def windows(self, layer: Any, x: torch.Tensor, output_shape: torch.Size) -> torch.Tensor:
        dims = len(layer.kernel_size)
        if x.ndim == dims + 1:
            x = x.unsqueeze(0)
        sizes = tuple(output_shape[-dims:])
        x, stride = self.padded(layer, x, sizes)
        x = x.contiguous()
        per_group, steps = x.shape[1] // layer.groups, x.stride()
        return x.as_strided(
            (len(x), *sizes, layer.groups, per_group, *layer.kernel_size),
            (
                steps[0],
                *(steps[2 + a] * stride[a] for a in range(dims)),
                steps[1] * per_group,
                steps[1],
                *(steps[2 + a] * layer.dilation[a] for a in range(dims)),
            ),
        )

    def padded(self, layer: Any, x: torch.Tensor, sizes: tuple[int, ...]) -> tuple[torch.Tensor, list[int]]:
        """Padded input that a kernel is moved over, and its stride, for an output of these sizes."""
        mode = "constant" if layer.padding_mode == "zeros" else layer.padding_mode
        if any(layer._reversed_padding_repeated_twice):
            x = functional.pad(x, layer._reversed_padding_repeated_twice, mode=mode)
        return x, list(layer.stride)


class TransposedConvolution(Convolution):
    """Kind of the transposed convolutions of torch, whose weights have the input channels in front.

    One is the convolution of stride 1 with the flipped kernel over the input spread out by its stride.
    """

    classes = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
    forward_methods = (*Convolution.forward_methods, "_output_padding")
    rows_are_units = False

    def weight_shape(self, layer: Any) -> torch.Size:
        return torch.Size((layer.in_channels, layer.out_channels // layer.groups, *layer.kernel_size))

    def windows(self, layer: Any, x: torch.Tensor, output_shape: torch.Size) -> torch.Tensor:
        return super().windows(layer, x, output_shape).flip(tuple(range(-len(layer.kernel_size), 0)))

    def padded(self, layer: Any, x: torch.Tensor, sizes: tuple[int, ...]) -> tuple[torch.Tensor, list[int]]:
        spread = x.new_zeros(*x.shape[:2], *((s - 1) * t + 1 for s, t in zip(x.shape[2:], layer.stride, strict=True)))
        places: tuple[Any, ...] = tuple(slice(None, None, t) for t in layer.stride)
        spread[(..., *places)] = x
        reach = [d * (k - 1) for d, k in zip(layer.dilation, layer.kernel_size, strict=True)]
        padding = []
        for axis in reversed(range(len(sizes))):
            left = reach[axis] - int(layer.padding[axis])
            padding += [left, sizes[axis] + reach[axis] - left - spread.shape[2 + axis]]
        return functional.pad(spread, padding), [1] * len(sizes)

    def unit_weights(self, layer: Any, weights: torch.Tensor) -> torch.Tensor:
        grouped = weights.reshape(len(weights), layer.groups, -1, weights.shape[2], prod(layer.kernel_size))
        return grouped.transpose(2, 3).reshape(len(weights), layer.out_channels, -1)

    def from_unit_weights(self, layer: Any, rows: torch.Tensor) -> torch.Tensor:
        shape = self.weight_shape(layer)
        grouped = rows.reshape(len(rows), layer.groups, shape[1], -1, prod(layer.kernel_size))
        return grouped.transpose(2, 3).reshape(len(rows), *shape)
