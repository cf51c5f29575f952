"""Curvature of losses known by their type, each entry formed without subtraction."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional

LossFunction = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def log_tail_sums(log_p: torch.Tensor) -> torch.Tensor:
    """Logarithms (…, c) of the tail sums s_k = Σ_{l≥k} p_l, from the logarithms (…, c) of p."""
    return torch.flip(torch.logcumsumexp(torch.flip(log_p, [-1]), -1), [-1])


def stick_breaking_columns(log_p: torch.Tensor, tail: torch.Tensor, r: torch.Tensor) -> torch.Tensor:
    """Columns r (k,), r < c − 1, of the lower triangular L with L Lᵀ = diag(p) − p pᵀ, for k distributions: (…, k, c).

    With tail sums s_k = Σ_{l≥k} p_l, L is √(p_r s_{r+1}/s_r) on the diagonal and −p_i √(p_r/(s_r s_{r+1})) below it. It
    is computed from ``log_p`` and its `log_tail_sums`, both (…, k, c), so that p of 1e-600 still counts.
    """
    index = r[:, None].expand(*log_p.shape[:-1], 1)
    p_r, s_r, s_next = log_p.gather(-1, index), tail.gather(-1, index), tail.gather(-1, index + 1)
    classes = torch.arange(log_p.shape[-1], device=log_p.device)
    below = -(log_p + 0.5 * (p_r - s_r - s_next)).exp()
    columns = torch.where(classes > r[:, None], below, 0.0)
    return columns.scatter(-1, index, (0.5 * (p_r + s_next - s_r)).exp())


@dataclass(frozen=True)
class SoftmaxCurvature:
    """Hessian C_j = w_j (diag(p_j) − p_j p_jᵀ) of softmax cross-entropy in the logits of sample j."""

    log_p: torch.Tensor  # (…, N, c) float64
    weight: torch.Tensor  # w (…, N) float64 of the samples in the loss of their batch: 1/N for a plain mean

    def diagonal_root(self, unit: int) -> torch.Tensor:
        """Roots √(w p_i (1 − p_i)) (…, N), with 1 − p_i summed over the other classes: saturation costs no digits."""
        others = torch.cat([self.log_p[..., :unit], self.log_p[..., unit + 1 :]], -1)
        half_log = 0.5 * (self.log_p[..., unit] + torch.logsumexp(others, -1))
        return half_log.exp_().mul_(self.weight.sqrt())


@dataclass(frozen=True)
class SquaredErrorCurvature:
    """Hessian C_j = w I of the squared error in the outputs of a sample (w = 2/(N c) for the mean)."""

    samples: torch.Size
    weight: float
    device: torch.device

    def diagonal_root(self, unit: int) -> torch.Tensor:
        """Roots √w (…, N), the same for every sample."""
        return torch.full(self.samples, math.sqrt(self.weight), dtype=torch.float64, device=self.device)


LossCurvature = SoftmaxCurvature | SquaredErrorCurvature


def loss_curvature(loss_fn: LossFunction, output: torch.Tensor, target: torch.Tensor) -> LossCurvature | None:
    """Curvature of a loss known to be convex in the output, for each of several batches; None for any other loss.

    Known: ``torch.nn.CrossEntropyLoss`` and ``MSELoss`` with reduction mean or sum and every other option, and
    ``torch.nn.functional.cross_entropy`` and ``mse_loss`` themselves. ``output`` is (…, N, c), ``target`` (…, N) class
    indices, or (…, N, c) probabilities or values.
    """
    output = output.detach().to(torch.float64)
    if type(loss_fn) is nn.MSELoss or loss_fn is functional.mse_loss:
        reduction = getattr(loss_fn, "reduction", "mean")
        if target.shape != output.shape or reduction == "none":
            return None
        scale = 2.0 / output.shape[-2:].numel() if reduction == "mean" else 2.0
        return SquaredErrorCurvature(output.shape[:-1], scale, output.device)
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
    shifted = output - output.amax(-1, keepdim=True)
    return SoftmaxCurvature(shifted - torch.logsumexp(shifted, -1, keepdim=True), weight)


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
    own = class_weight[target.where(target != loss.ignore_index, 0)] * counted
    coefficient = (1 - smoothing) * own + smoothing / classes * class_weight.sum() * counted
    return coefficient / own.sum(-1, keepdim=True) if loss.reduction == "mean" else coefficient
