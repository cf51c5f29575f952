"""Dense layers."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from hesscond.capture.kinds import base


class Dense(base.LayerKind):
    """Kind of `torch.nn.Linear`."""

    classes = (nn.Linear,)

    def geometry(self, layer: Any) -> base.Geometry:
        n = layer.in_features
        return base.Geometry(type(layer).__name__, layer.out_features, 1, n, base.has_bias(layer), channels=n)

    def weight_shape(self, layer: Any) -> torch.Size:
        return torch.Size((layer.out_features, layer.in_features))

    def windows(self, layer: Any, x: torch.Tensor, output_shape: torch.Size) -> torch.Tensor:
        return x.reshape(len(x) if x.ndim > 1 else 1, -1, 1, layer.in_features)
