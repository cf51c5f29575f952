"""Captures of an output layer from a training pass, without a pass of their own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from hesscond.capture.captured import Diagonal, LayerCapture, LayerInputs
from hesscond.capture.curvature import OUTPUT_ROUTE
from hesscond.capture.evaluation import LossFunction
from hesscond.capture.layers import Layer
from hesscond.capture.losses import loss_curvature
from hesscond.errors import NotFiniteError


@dataclass
class Recorder:
    """Forward hooks that keep the input and output of layers while ``armed``; they change nothing.

    The study runner leaves one on the model, so that a probe of the output layer reuses the training forward pass.
    """

    layers: Mapping[str, Layer]
    armed: bool = False
    seen: dict[str, tuple[torch.Tensor, int, torch.Tensor, int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._handles = [layer.register_forward_hook(self._hook(name)) for name, layer in self.layers.items()]

    def _hook(self, name: str) -> Any:
        def keep(module: nn.Module, args: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
            if self.armed:
                h = args[0].detach()
                self.seen[name] = (h, h._version, output, output._version)

        return keep

    def remove(self) -> None:
        """Take the hooks off the model."""
        for handle in self._handles:
            handle.remove()

    def captured(
        self,
        loss_fn: LossFunction,
        output: torch.Tensor,
        target: torch.Tensor,
        units: Mapping[str, tuple[int, ...]],
    ) -> dict[str, LayerCapture] | None:
        """The capture of the pass just seen, if every layer's output is the model's output; else None.

        Raises
        ------
        NotFiniteError
            NaN or infinite activations or curvature.
        """
        for h, before, own, version in self.seen.values():
            if own is not output or own._version != version or h._version != before or h.ndim != 2:
                return None
        if set(self.seen) != set(self.layers):
            return None
        curvature = loss_curvature(loss_fn, output, target)
        if curvature is None:
            return None
        result = {}
        for name, layer in self.layers.items():
            h = self.seen[name][0]
            if not torch.isfinite(h.sum()) and not torch.isfinite(h).all():
                raise NotFiniteError(f"the input of layer {name!r} has NaN or infinite entries")
            root = torch.stack([curvature.diagonal_root(i) for i in units[name]], 1)
            if not torch.isfinite(root.sum()):
                raise NotFiniteError(f"the curvature of the loss at layer {name!r} is NaN or infinite")
            inputs = LayerInputs(layer, ((h, output.shape),), len(h))
            result[name] = LayerCapture(name, inputs, units[name], Diagonal(root, None), OUTPUT_ROUTE)
        self.seen.clear()
        return result
