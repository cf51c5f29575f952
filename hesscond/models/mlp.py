"""Fully connected networks."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import nn

from hesscond.errors import ConfigError

ACTIVATIONS: dict[str, type[nn.Module]] = {
    "relu": nn.ReLU,
    "tanh": nn.Tanh,
    "sigmoid": nn.Sigmoid,
    "gelu": nn.GELU,
}


class MLP(nn.Module):
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
        ``"relu"``, ``"tanh"``, ``"sigmoid"`` or ``"gelu"``.
    generator
        Source of the initial weights (on the CPU).

    Raises
    ------
    ConfigError
        Unknown activation, or a width below 1.
    """

    def __init__(
        self,
        in_features: int,
        hidden: Sequence[int],
        out_features: int,
        *,
        activation: str = "relu",
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__()
        if activation not in ACTIVATIONS:
            raise ConfigError(f"unknown activation {activation!r}: choose from {', '.join(ACTIVATIONS)}")
        widths = [in_features, *hidden, out_features]
        if min(widths) < 1:
            raise ConfigError(f"layer widths must be at least 1, got {widths}")
        self.activation = ACTIVATIONS[activation]()
        self.depth = len(widths) - 1
        for i, (before, after) in enumerate(pairwise(widths), 1):
            layer = nn.utils.skip_init(nn.Linear, before, after)
            nn.init.xavier_uniform_(layer.weight, generator=generator)
            nn.init.zeros_(layer.bias)
            self.add_module(f"fc{i}", layer)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Outputs (N, out_features) of inputs (N, …)."""
        x = x.flatten(1)
        for i in range(1, self.depth):
            x = self.activation(self.get_submodule(f"fc{i}")(x))
        return self.get_submodule(f"fc{self.depth}")(x)
