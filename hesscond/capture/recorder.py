"""Captures of an output layer from a training pass, without an extra forward pass."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional

from hesscond.capture.captured import DiagonalS, LayerCapture, LayerInputs
from hesscond.capture.curvature import OUTPUT_ROUTE
from hesscond.capture.curved import normalized
from hesscond.capture.kinds import Layer
from hesscond.capture.statistics import stacked
from hesscond.errors import NotFiniteError
from hesscond.problem import evaluation


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

    def recorded(self, output: torch.Tensor, target: torch.Tensor) -> Recorded | None:
        """Return the record of the pass that gave the ``output``, if that is every layer's output; else None."""
        for h, before, layer_output, version in self.seen.values():
            if layer_output is not output or layer_output._version != version or h._version != before or h.ndim != 2:
                return None
        if set(self.seen) != set(self.layers):
            return None
        return Recorded(self.layers, {name: h for name, (h, *_) in self.seen.items()}, output.detach(), target)


class Recorded(NamedTuple):
    """Record of a training pass, from which `captures` makes captures at any later time.

    ``layers`` are those whose output is that of the model, with inputs (N, n); the output is (N, c), the target (N,) or
    (N, c).
    """

    layers: Mapping[str, Layer]
    inputs: Mapping[str, torch.Tensor]
    output: torch.Tensor
    target: torch.Tensor

    @property
    def form(self) -> tuple[object, ...]:
        """Shapes and dtypes of the tensors."""
        return tuple((part.shape, part.dtype) for part in (self.output, self.target, *self.inputs.values()))

    @property
    def size(self) -> int:
        """Number of entries that the record keeps."""
        return self.output.numel() + sum(h.numel() for h in self.inputs.values())

    @staticmethod
    def captures(
        passes: Sequence[Recorded], loss_fn: evaluation.LossFunction, units: Mapping[str, tuple[int, ...]]
    ) -> list[dict[str, LayerCapture]] | None:
        """Captures of the layers at passes of one `form`; None: the curvature of the loss is not known by its type."""
        output, target = stacked([record.output for record in passes]), stacked([record.target for record in passes])
        roots = output_roots(loss_fn, output, target)
        if roots is None:
            return None
        captures: list[dict[str, LayerCapture]] = [{} for _ in passes]
        for name, layer in passes[0].layers.items():
            h = stacked([record.inputs[name] for record in passes])
            if not evaluation.is_finite(h):
                raise NotFiniteError(f"the input of layer {name!r} has NaN or infinite entries")
            root = torch.stack([roots(i) for i in units[name]], -1)
            if not evaluation.is_finite(root):
                raise NotFiniteError(f"the curvature of the loss at layer {name!r} is NaN or infinite")
            rows = h.flatten(0, 1)
            inputs = LayerInputs(layer, ((rows, output.flatten(0, 1).shape),), len(rows))
            capture = LayerCapture(name, inputs, units[name], DiagonalS(root.flatten(0, 1), None), OUTPUT_ROUTE)
            for by_layer, captured in zip(captures, capture.split(len(passes)), strict=True):
                by_layer[name] = captured
        return captures


def output_roots(
    loss_fn: evaluation.LossFunction, output: torch.Tensor, target: torch.Tensor
) -> Callable[[int], torch.Tensor] | None:
    """Roots √S (…, N) of a loss known to be convex in the output (…, N, c), as a function of the unit; None: unknown.

    Known are cross-entropy and squared error; no entry is formed by subtraction.
    """
    output = output.detach().to(torch.float64)
    if type(loss_fn) is nn.MSELoss or loss_fn is functional.mse_loss:
        reduction = getattr(loss_fn, "reduction", "mean")
        if target.shape != output.shape or reduction == "none":
            return None
        scale = 2.0 / output.shape[-2:].numel() if reduction == "mean" else 2.0
        same = torch.full(output.shape[:-1], math.sqrt(scale), dtype=torch.float64, device=output.device)
        return lambda unit: same
    if type(loss_fn) is nn.CrossEntropyLoss:
        options = loss_fn
    elif loss_fn is functional.cross_entropy:
        options = nn.CrossEntropyLoss()
    else:
        return None
    if options.reduction == "none":
        return None
    weight = cross_entropy_weights(options, output, target)
    # not torch.log_softmax, which wakes every thread even for a few numbers
    log_p = normalized(output)

    def softmax_root(unit: int) -> torch.Tensor:
        # √(w p_i (1 − p_i)), with 1 − p_i summed over the other classes: saturation costs no digits
        others = torch.cat([log_p[..., :unit], log_p[..., unit + 1 :]], -1)
        half_log = 0.5 * (log_p[..., unit] + torch.logsumexp(others, -1))
        return half_log.exp_().mul_(weight.sqrt())

    return softmax_root


def cross_entropy_weights(loss: nn.CrossEntropyLoss, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Weights (…, N) of each sample's log-softmax Hessian: class weights, smoothing, ignored samples."""
    samples, classes = output.shape[-2:]
    smoothing = loss.label_smoothing
    if target.is_floating_point():
        q = (1 - smoothing) * target.to(output) + smoothing / classes
        coefficient = (q if loss.weight is None else q * loss.weight.to(output)).sum(-1)
        return coefficient / samples if loss.reduction == "mean" else coefficient
    if loss.weight is None and smoothing == 0 and loss.ignore_index < 0 and target.min() >= 0:
        return output.new_full(output.shape[:-1], 1 / samples if loss.reduction == "mean" else 1.0)
    class_weight = output.new_ones(classes) if loss.weight is None else loss.weight.to(output)
    counted = (target != loss.ignore_index).to(output)
    target_weight = class_weight[target.where(target != loss.ignore_index, 0)] * counted
    coefficient = (1 - smoothing) * target_weight + smoothing / classes * class_weight.sum() * counted
    return coefficient / target_weight.sum(-1, keepdim=True) if loss.reduction == "mean" else coefficient
