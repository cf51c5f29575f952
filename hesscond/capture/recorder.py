"""Captures of an output layer from a training pass, without an extra forward pass."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge
from torch.nn import functional

from hesscond.capture.captured import DiagonalS, LayerCapture, LayerInputs
from hesscond.capture.curvature import OUTPUT_ROUTE
from hesscond.capture.curved import curved_nodes
from hesscond.capture.kinds import Layer
from hesscond.errors import NotFiniteError
from hesscond.problem import evaluation, weighting

#: Losses whose curvature is read from their graph without a look at the model.
KNOWN = (nn.MSELoss, functional.mse_loss, nn.CrossEntropyLoss, functional.cross_entropy)


@dataclass
class Recorder:
    """Set of forward hooks that keep the input and output of layers while ``armed``; they change nothing.

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
        """Remove the hooks from the model."""
        for handle in self._handles:
            handle.remove()

    def captures(
        self,
        output: torch.Tensor,
        target: torch.Tensor,
        loss_fn: evaluation.LossFunction,
        units: Mapping[str, tuple[int, ...]],
    ) -> dict[str, LayerCapture] | None:
        """Captures in the pass that gave the ``output`` (N, c), of layers with that output and inputs (N, n).

        None: the output is another layer's, or the curvature of the loss is not known by its type.
        """
        for h, before, own, version in self.seen.values():
            if own is not output or own._version != version or h._version != before or h.ndim != 2:
                return None
        roots = output_roots(loss_fn, output, target) if set(self.seen) == set(self.layers) else None
        if roots is None:
            return None
        found = {}
        for name, (h, *_) in self.seen.items():
            root = roots[:, list(units[name])]
            if not evaluation.is_finite(h):
                raise NotFiniteError(f"the input of layer {name!r} has NaN or infinite entries")
            if not evaluation.is_finite(root):
                raise NotFiniteError(f"the curvature of the loss at layer {name!r} is NaN or infinite")
            inputs = LayerInputs(self.layers[name], ((h, output.shape),), len(h))
            found[name] = LayerCapture(name, inputs, units[name], DiagonalS(root, None), OUTPUT_ROUTE)
        return found


def output_roots(loss_fn: evaluation.LossFunction, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor | None:
    """Roots √S (N, c) of a loss of torch that is known to be convex in the output (N, c); None: another loss."""
    if not weighting.made_by(loss_fn, KNOWN):
        return None
    leaf = output.detach().to(torch.float64).requires_grad_()
    with torch.enable_grad():
        loss = evaluation.in_precision(loss_fn, torch.float64)(leaf, evaluation.converted(target, torch.float64))
    curved = curved_nodes(loss) if loss.numel() == 1 else None
    if not curved or curved[0].shape != leaf.shape or curved[0].edge.node is not get_gradient_edge(leaf).node:
        return None
    return curved[0].entry_roots()
