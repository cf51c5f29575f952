"""Networks on point clouds."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import nn

from hesscond.errors import ConfigError
from hesscond.models import layers
from hesscond.models.registry import register


def nearest(x: torch.Tensor, k: int) -> torch.Tensor:
    """Indices (N, P, k) of the k points nearest to each of x (N, C, P), itself among them."""
    x = x.detach()
    squares = x.square().sum(1)
    return (2 * x.transpose(1, 2) @ x - squares.unsqueeze(1)).topk(k, dim=-1).indices


class EdgeConv(nn.Module):
    """x_i' = max over the neighbours j of σ(conv(x_j − x_i, x_i)), neighbours in the space of the x's (eq. 8)."""

    def __init__(self, make: layers.Layers, before: int, after: int, k: int, activation: str) -> None:
        super().__init__()
        self.k = k
        self.conv = make.conv(2 * before, after, 1)
        self.norm = make.normalization(after)
        self.activation = layers.make_activation(activation)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(N, after, P) of (N, before, P)."""
        indices = nearest(x, self.k).flatten(1).unsqueeze(1).expand(-1, x.shape[1], -1)
        neighbours = x.gather(2, indices).unflatten(2, (-1, self.k))
        centres = x.unsqueeze(-1).expand_as(neighbours)
        edges = torch.cat([neighbours - centres, centres], 1)
        return self.activation(self.norm(self.conv(edges))).amax(-1)


class DGCNN(nn.Module):
    """``edge1.conv``, …; all their outputs together through ``conv``; maximum and mean over the points; ``fc1``, ….

    Wang et al., Dynamic Graph CNN for Learning on Point Clouds (ACM TOG 2019, section 4.1, figure 3), without the
    spatial transformer, as in the authors' code, with torch's default weights as there.
    """

    def __init__(
        self,
        input_shape: tuple[int, ...],
        outputs: int,
        *,
        widths: tuple[int, ...] = (64, 64, 128, 256),  # channels of the edge convolutions
        k: int = 20,  # neighbours, the point itself among them
        embedding: int = 1024,  # channels of conv
        hidden: tuple[int, ...] = (512, 256),  # widths of the hidden dense layers
        dropout: float = 0.0,  # probability after the hidden dense layers (0.5 in the paper)
        activation: str = "leaky-relu",
        norm: str = "batch",
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__()
        if len(input_shape) != 2 or input_shape[0] < k:
            raise ConfigError(
                f"this network needs point clouds (points, d) of at least k = {k} points, not inputs of shape "
                f"{tuple(input_shape)}"
            )
        if not widths:
            raise ConfigError("widths must have the channels of at least one edge convolution")
        make = layers.Layers(layers.uniform_fan_in, generator, norm)
        self.edges = [f"edge{i}" for i in range(1, len(widths) + 1)]
        for name, (before, after) in zip(self.edges, pairwise((input_shape[1], *widths)), strict=True):
            self.add_module(name, EdgeConv(make, before, after, k, activation))
        self.conv = make.conv(sum(widths), embedding, 1)
        self.norm = make.normalization(embedding)
        self.activation = layers.make_activation(activation)
        self.dropout = layers.make_dropout(dropout)
        self.hidden = len(hidden)
        for i, (before, after) in enumerate(pairwise((2 * embedding, *hidden)), 1):
            # the authors' second dense layer has a bias, although a normalization follows
            self.add_module(f"fc{i}", make.dense(before, after, bias=i > 1 or norm == "none"))
            self.add_module(f"norm{i}", make.normalization(after, maps=False))
        self.add_module(f"fc{self.hidden + 1}", make.dense((2 * embedding, *hidden)[-1], outputs))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Outputs (N, outputs) of point clouds (N, points, d)."""
        x = x.transpose(1, 2)
        features = []
        for edge in self.edges:
            x = self.get_submodule(edge)(x)
            features.append(x)
        # as an image of height P and width 1
        x = torch.cat(features, 1).unsqueeze(-1)
        x = self.activation(self.norm(self.conv(x))).squeeze(-1)
        x = torch.cat([x.amax(-1), x.mean(-1)], 1)
        for i in range(1, self.hidden + 1):
            x = self.activation(self.get_submodule(f"norm{i}")(self.get_submodule(f"fc{i}")(x)))
            x = self.dropout(x)
        return self.get_submodule(f"fc{self.hidden + 1}")(x)


register("dgcnn", "DGCNN on point clouds", "points", DGCNN)
