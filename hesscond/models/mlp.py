"""Fully connected networks: of any inputs, and of coordinates (images as functions)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import nn

from hesscond.errors import ConfigError
from hesscond.models import layers
from hesscond.models.registry import register

#: What comes after the output layer of a network of coordinates: values in (0, 1), or anything.
RANGES = {"sigmoid": nn.Sigmoid, "linear": nn.Identity}


class MLP(nn.Sequential):
    """A fully connected network on flattened inputs with dense layers ``fc1``, ``fc2``, …; the last is the output.

    Weights are Glorot-uniform, biases zero, drawn from the given generator only.

    Parameters
    ----------
    in_features
        Number of inputs after flattening.
    hidden
        Widths of the hidden layers.
    out_features
        Number of outputs.
    activation
        One of `hesscond.models.ACTIVATIONS`.
    norm
        One of `hesscond.models.NORMALIZATIONS`: modules ``norm1``, … before the activations.
    generator
        Source of the initial weights (on the CPU).

    Raises
    ------
    ConfigError
        Unknown activation or normalization, or a width below 1.
    """

    def __init__(
        self,
        in_features: int,
        hidden: Sequence[int],
        out_features: int,
        *,
        activation: str = "relu",
        norm: str = "none",
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__()
        widths = [in_features, *hidden, out_features]
        if min(widths) < 1:
            raise ConfigError(f"layer widths must be at least 1, got {widths}")
        make = layers.Layers(layers.glorot_uniform, generator, norm)
        self.flatten = nn.Flatten()
        for i, (before, after) in enumerate(pairwise(widths), 1):
            last = i == len(widths) - 1
            self.add_module(f"fc{i}", make.dense(before, after, bias=norm == "none" or last))
            if not last:
                if norm != "none":
                    self.add_module(f"norm{i}", make.normalization(after, maps=False))
                self.add_module(f"activation{i}", layers.make_activation(activation))


def mlp(
    input_shape: tuple[int, ...],
    outputs: int,
    *,
    hidden: tuple[int, ...] = (100, 100),
    activation: str = "relu",
    norm: str = "none",
    generator: torch.Generator | None = None,
) -> MLP:
    """The `MLP` for inputs of a shape."""
    return MLP(math.prod(input_shape), hidden, outputs, activation=activation, norm=norm, generator=generator)


class CoordinateMLP(nn.Module):
    """A fully connected network ``fc1``, … on γ(p) = (…, sin(2^l π p), cos(2^l π p), …), l = 0, …, L − 1.

    Mildenhall et al., NeRF (ECCV 2020, section 5.1, eq. 4; the network is the density branch of figure 7, with as many
    outputs as asked). Glorot-uniform weights, biases zero, as in the published code.
    """

    scales: torch.Tensor

    def __init__(
        self,
        input_shape: tuple[int, ...],
        outputs: int,
        *,
        hidden: tuple[int, ...] = (256, 256, 256, 256, 256),  # widths of the hidden layers before the skip
        # widths of those after it; the first of them sees γ(p) again. None: there is no skip
        after_skip: tuple[int, ...] = (256, 256, 256),
        frequencies: int = 10,  # L
        output: str = "sigmoid",  # "sigmoid" for values in (0, 1), "linear" for any, or for logits
        activation: str = "relu",
        norm: str = "none",
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__()
        if len(input_shape) != 1:
            raise ConfigError(f"this network needs coordinates of shape (d,), not inputs of shape {tuple(input_shape)}")
        if not hidden:
            raise ConfigError("hidden must have the width of at least one layer")
        make = layers.Layers(layers.glorot_uniform, generator, norm)
        # not a buffer of the state: it is no more than the definition of γ
        scales = torch.tensor([math.pi * 2.0**power for power in range(frequencies)])
        self.register_buffer("scales", scales, persistent=False)
        encoded = 2 * frequencies * input_shape[0]
        self.hidden = len(hidden) + len(after_skip)
        self.skip = len(hidden) + 1 if after_skip else None
        for i, (before, after) in enumerate(pairwise((encoded, *hidden, *after_skip)), 1):
            again = encoded if i == self.skip else 0
            self.add_module(f"fc{i}", make.dense(before + again, after, bias=norm == "none"))
            self.add_module(f"norm{i}", make.normalization(after, maps=False))
        self.activation = layers.make_activation(activation)
        self.add_module(f"fc{self.hidden + 1}", make.dense((*hidden, *after_skip)[-1], outputs))
        self.output = RANGES[layers.chosen("output", output, RANGES)]()

    def forward(self, p: torch.Tensor) -> torch.Tensor:
        """Outputs (N, outputs) at points (N, d)."""
        gamma = x = self.encoded(p)
        for i in range(1, self.hidden + 1):
            if i == self.skip:
                x = torch.cat([gamma, x], 1)
            x = self.activation(self.get_submodule(f"norm{i}")(self.get_submodule(f"fc{i}")(x)))
        return self.output(self.get_submodule(f"fc{self.hidden + 1}")(x))

    def encoded(self, p: torch.Tensor) -> torch.Tensor:
        """γ(p), (N, 2 L d)."""
        angles = (p.unsqueeze(-1) * self.scales).flatten(1)
        return torch.cat([angles.sin(), angles.cos()], 1)


register("mlp", "fully connected network", "vector", mlp)
register("nerf", "NeRF's MLP on any coordinates", "coordinates", CoordinateMLP)
