"""Batch normalization before or after the activations, with and without gradient through the statistics.

Source: Ioffe and Szegedy, *Batch Normalization: Accelerating Deep Network Training by Reducing Internal Covariate
Shift*, ICML 2015, Algorithm 1.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import nn
from torch.nn import functional
from torch.nn.modules.batchnorm import _BatchNorm

from hesscond.errors import ConfigError
from hesscond.methods.normalization import EPS, Normalization, Site
from hesscond.methods.options import option
from hesscond.methods.registry import register

RunningVariance = Literal["unbiased", "tensorflow"]


class OwnBatchNorm(_BatchNorm):
    """Batch normalization that keeps its running averages itself; takes activations (N, C, *positions)."""

    def __init__(self, channels: int, *, biased: bool = False, **options: Any) -> None:
        super().__init__(channels, **options)
        self.biased = biased

    def _check_input_dim(self, input: torch.Tensor) -> None:
        if input.ndim < 2:
            raise ValueError(f"expected activations (N, C, *positions), not of shape {tuple(input.shape)}")

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        """Normalize by the statistics of the batch; in evaluation mode, by the running averages."""
        self._check_input_dim(h)
        if not self.training:
            return super().forward(h)
        count = h.numel() // h.shape[1]
        if count == 1:
            raise ValueError("expected more than one value per channel in training mode")
        variance, mean = torch.var_mean(h.detach(), over_samples(h), correction=0)
        if self.track_running_stats:
            self._track(mean, variance, count)
        return self._normalized(h, mean, variance)

    def _normalized(self, h: torch.Tensor, mean: torch.Tensor, variance: torch.Tensor) -> torch.Tensor:
        """Activations h normalized in training mode, given the statistics (C,) of the batch as constants."""
        return functional.batch_norm(h, None, None, self.weight, self.bias, training=True, eps=self.eps)

    def _track(self, mean: torch.Tensor, variance: torch.Tensor, count: int) -> None:
        assert self.running_mean is not None
        assert self.running_var is not None
        assert self.num_batches_tracked is not None
        assert self.momentum is not None
        self.num_batches_tracked.add_(1)
        self.running_mean.lerp_(mean, self.momentum)
        self.running_var.lerp_(variance if self.biased else variance * (count / (count - 1)), self.momentum)


class StopGradientBatchNorm(OwnBatchNorm):
    """Batch normalization whose statistics are constants to the derivatives; the same numbers forward."""

    def _normalized(self, h: torch.Tensor, mean: torch.Tensor, variance: torch.Tensor) -> torch.Tensor:
        return functional.batch_norm(h, mean, variance, self.weight, self.bias, training=False, eps=self.eps)


def over_samples(h: torch.Tensor) -> list[int]:
    """All dimensions of activations (N, C, *positions) but that of the channels."""
    return [0, *range(2, h.ndim)]


def refuse_single_samples(name: str, samples: int) -> None:
    """Refuse a batch of one, which has no variance."""
    if samples < 2:
        raise ConfigError(f"method {name!r} normalizes by the statistics of the batch: choose a batch size above 1")


@register
class BatchNormalization(Normalization):
    """Batch normalization: every channel to mean 0 and variance 1 over the samples (and positions) of the mini-batch.

    y = γ (h − μ) / √(σ² + ε) + β, with the μ and σ² of the batch in training mode and running averages in evaluation
    mode. In training mode the samples are coupled. With ``gradient_through_statistics=False`` its derivatives,
    Hessians among them, are those at fixed μ and σ.

    Lange, Helfrich and Ye (JMLR 2022) normalize after the activations, h_l = g(W B(h_{l−1}) + b), with the defaults of
    TensorFlow 1.13 in their fully connected networks and the CNN of five layers:
    ``batchnorm:position=post,eps=0.001,momentum=0.01,running_variance=tensorflow``; their ResNets have those of torch.
    """

    name = "batchnorm"
    summary = "batch normalization before or after the activations of hidden layers"
    source = "Ioffe, Szegedy, ICML 2015, Algorithm 1"

    gradient_through_statistics: bool = option(
        True,
        "Whether μ and σ depend on the parameters in derivatives (`torch.nn.BatchNorm1d` to ``3d``) or are constants "
        "to them (`StopGradientBatchNorm`).",
    )
    momentum: float = option(0.1, "Share of the batch in the running averages.", above=0, most=1)
    running_variance: RunningVariance = option(
        "unbiased",
        "What inference divides by. In training σ² is the variance of the N values with 1/N. ``unbiased``: the running "
        "average uses variances with 1/(N−1), as in torch. ``tensorflow``: the same after convolutions (TensorFlow's "
        "fused path), but 1/N after dense layers. At batch 6 this changed the test accuracy on CIFAR-10 by −0.3 to 0.7 "
        "points (six runs of three hidden layers of 100 units).",
    )
    eps: float = option(EPS, "ε; it may be 0 for constant statistics only, as torch's modules refuse that.", least=0)

    def check_options(self) -> None:
        # with no ε a unit that is constant in a batch is divided by 0; Proposition 7 of BNP has none
        if self.eps == 0 and self.gradient_through_statistics:
            raise ConfigError("method 'batchnorm': eps must be above 0 where the gradient goes through the statistics")

    def normalization(self, site: Site) -> nn.Module:
        options: dict[str, Any] = {"eps": self.eps, "momentum": self.momentum, "affine": self.affine}
        biased = self.running_variance == "tensorflow" and not site.dimensions
        if biased or not self.gradient_through_statistics:
            own = OwnBatchNorm if self.gradient_through_statistics else StopGradientBatchNorm
            return own(site.channels, biased=biased, **options)
        kinds = {0: nn.BatchNorm1d, 1: nn.BatchNorm1d, 2: nn.BatchNorm2d, 3: nn.BatchNorm3d}
        return kinds[site.dimensions](site.channels, **options)

    def check_batch(self, samples: int) -> None:
        refuse_single_samples(self.name, samples)
