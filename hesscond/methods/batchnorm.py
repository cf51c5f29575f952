"""Batch normalization before or after activations, with and without gradient through the statistics; renormalized."""

from __future__ import annotations

import math
from typing import Any, Literal

import torch
from torch import nn
from torch.nn import functional
from torch.nn.modules.batchnorm import _BatchNorm

from hesscond.errors import ConfigError
from hesscond.methods.base import option, register
from hesscond.methods.normalization import EPS, Normalization, Site


class OwnBatchNorm(_BatchNorm):
    """Batch normalization that keeps its running averages itself; takes activations (N, C, *positions)."""

    running_mean: torch.Tensor
    running_var: torch.Tensor
    num_batches_tracked: torch.Tensor
    momentum: float

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
            self.num_batches_tracked.add_(1)
            self.running_mean.lerp_(mean, self.momentum)
            self.running_var.lerp_(variance if self.biased else variance * (count / (count - 1)), self.momentum)
        return self._normalized(h, mean, variance)

    def _normalized(self, h: torch.Tensor, mean: torch.Tensor, variance: torch.Tensor) -> torch.Tensor:
        """Activations h normalized in training mode, given the statistics (C,) of the batch as constants."""
        return functional.batch_norm(h, None, None, self.weight, self.bias, training=True, eps=self.eps)


class StopGradientBatchNorm(OwnBatchNorm):
    """Batch normalization whose statistics are constants to the derivatives; the same numbers forward."""

    def _normalized(self, h: torch.Tensor, mean: torch.Tensor, variance: torch.Tensor) -> torch.Tensor:
        return functional.batch_norm(h, mean, variance, self.weight, self.bias, training=False, eps=self.eps)


def over_samples(h: torch.Tensor) -> list[int]:
    """All dimensions of activations (N, C, *positions) but that of the channels."""
    return [0, *range(2, h.ndim)]


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
    of_batch = True

    gradient_through_statistics: bool = option(
        True,
        "Whether μ and σ depend on the parameters in derivatives (`torch.nn.BatchNorm1d` to ``3d``) or are constants "
        "to them (`StopGradientBatchNorm`).",
    )
    momentum: float = option(0.1, "Share of the batch in the running averages.", above=0, most=1)
    running_variance: Literal["unbiased", "tensorflow"] = option(
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
            kind = OwnBatchNorm if self.gradient_through_statistics else StopGradientBatchNorm
            return kind(site.channels, biased=biased, **options)
        kinds = {0: nn.BatchNorm1d, 1: nn.BatchNorm1d, 2: nn.BatchNorm2d, 3: nn.BatchNorm3d}
        return kinds[site.dimensions](site.channels, **options)


class BatchRenorm(nn.Module):
    """One layer of batch renormalization; takes activations (N, C, *positions). See `BatchRenormalization`."""

    running_mean: torch.Tensor
    running_std: torch.Tensor
    moving_mean: torch.Tensor
    moving_variance: torch.Tensor
    num_batches_tracked: torch.Tensor

    def __init__(
        self,
        channels: int,
        *,
        r_max: float,
        d_max: float,
        start: int,
        r_end: int,
        d_end: int,
        momentum: float,
        eps: float,
        affine: bool,
        debias: bool = False,
        second_average: bool = False,
    ) -> None:
        super().__init__()
        self.debias, self.second_average = debias, second_average
        self.r_max, self.d_max, self.start, self.r_end, self.d_end = r_max, d_max, start, r_end, d_end
        self.momentum, self.eps, self.track_running_stats = momentum, eps, True
        self.weight = nn.Parameter(torch.ones(channels, device="cpu")) if affine else None
        self.bias = nn.Parameter(torch.zeros(channels, device="cpu")) if affine else None
        self.register_buffer("running_mean", torch.zeros(channels, device="cpu"))
        self.register_buffer("running_std", torch.ones(channels, device="cpu"))
        self.register_buffer("num_batches_tracked", torch.zeros((), dtype=torch.int64, device="cpu"))
        if second_average:
            self.register_buffer("moving_mean", torch.zeros(channels, device="cpu"))
            self.register_buffer("moving_variance", torch.ones(channels, device="cpu"))

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        """Normalize with the corrections; in evaluation mode, by the running statistics or their averages."""
        if not self.training:
            averages = self.running_mean, self.running_std.square(), self.weight, self.bias
            if self.second_average:
                averages = self.moving_mean, self.moving_variance, self.weight, self.bias
            return functional.batch_norm(h, *averages, eps=self.eps if self.second_average else 0.0)
        variance, mean = torch.var_mean(h.detach(), over_samples(h), correction=0)
        std = (variance + self.eps).sqrt()
        r, d = self.correction(mean, std)
        if self.track_running_stats:
            self.num_batches_tracked.add_(1)
            # debiased, the first batch is all of the average, and the share falls to the momentum
            share = self.momentum / self._counted() if self.debias else self.momentum
            self.running_mean.lerp_(mean, share)
            self.running_std.lerp_(std, share)
            if self.second_average:
                self.moving_mean.lerp_(self.running_mean, self.momentum)
                self.moving_variance.lerp_(self.running_std.square() - self.eps, self.momentum)
        # γ (x̂ r + d) + β with x̂ by torch's own function
        if self.weight is not None and self.bias is not None:
            r, d = self.weight * r, torch.addcmul(self.bias, self.weight, d)
        return functional.batch_norm(h, None, None, r, d, training=True, eps=self.eps)

    def correction(self, mean: torch.Tensor, std: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(C,) r = clip(σ_B / σ) and d = clip((μ_B − μ) / σ), in the bounds of the present batch."""
        r_max = 1 + (self.r_max - 1) * self._progress(self.r_end)
        d_max = self.d_max * self._progress(self.d_end)
        mu, sigma = self.running_mean, self.running_std
        if self.debias:
            counted = self._counted()
            mu, sigma = torch.lerp(mean, mu, counted), torch.lerp(std, sigma, counted)
        r = torch.minimum(torch.maximum(std / sigma, 1 / r_max), r_max)
        d = torch.minimum(torch.maximum((mean - mu) / sigma, -d_max), d_max)
        return r, d

    def _counted(self) -> torch.Tensor:
        """Total weight of all batches so far in a running average that starts from zero: 1 − (1−α)ᵗ."""
        return (1 - (1 - self.momentum) ** self.num_batches_tracked.to(torch.float64)).to(self.running_std.dtype)

    def _progress(self, end: int) -> torch.Tensor:
        """Progress of the schedule, 0 before its start, 1 at its end; a tensor, as reading it would wait for a GPU."""
        done = (self.num_batches_tracked - self.start).to(self.running_std.dtype)
        return (done / (end - self.start)).clamp(0, 1) if end > self.start else (done >= 0).to(done.dtype)


@register
class BatchRenormalization(Normalization):
    """Batch renormalization: y = γ ((h − μ_B) / σ_B · r + d) + β, with r and d constants to the derivatives.

    r = clip(σ_B / σ, 1/r_max, r_max) and d = clip((μ_B − μ) / σ, −d_max, d_max), where μ_B and σ_B = √(var + ε) are of
    the batch and μ and σ running averages of these, from before the batch. Where nothing is clipped, training and
    inference compute the same function. A study probes the function of its training pass; another probe after that pass
    sees μ and σ after it.

    ``clip=false,debias=true,second_average=true`` is TensorFlow 1.13's with its default arguments and, with
    ``position=post``, that of Lange, Helfrich and Ye (JMLR 2022). It can diverge: on three hidden layers of 100 units,
    CIFAR-10 in [0, 1], batch 6, rate 0.05, four of five seeds did (after 886 to 4,624 iterations), on standardized
    inputs none in 20 epochs.
    """

    name = "batchrenorm"
    summary = "batch renormalization before or after the activations of hidden layers"
    source = "Ioffe, NeurIPS 2017, Algorithm 1"
    of_batch = True

    clip: bool = option(
        True, "Whether r and d are clipped, as ``r_max`` to ``d_end`` say. Without, there is no warm-up either."
    )
    debias: bool = option(
        False,
        "Whether the running averages start from the first batch: at batch t + 1, with c = 1 − (1−α)ᵗ, μ is c times "
        "the average of batches 1 to t, their weights divided by c, plus 1 − c times the mean of the batch itself; σ "
        "alike. At inference there is no such second term. False: from μ = 0, σ = 1.",
    )
    second_average: bool = option(
        False,
        "Whether inference is by running averages, from 0 and 1, of μ and of σ² − ε as they are after each batch; then "
        "training and inference compute different functions. False: by μ and σ.",
    )
    r_max: float = option(3.0, "Final bound of r.", least=1)
    d_max: float = option(5.0, "Final bound of d.", least=0)
    start: int = option(
        5000, "Number of training batches with r_max = 1 and d_max = 0: plain batch normalization.", least=0
    )
    r_end: int = option(
        40000,
        "Number of the batch up to which r_max grows linearly to its final value; not beyond ``start``: at once. The "
        "defaults of the schedule are the paper's; a fixed bound from the first step is ``start=0,r_end=0,d_end=0``.",
        least=0,
    )
    d_end: int = option(25000, "The same for d_max.", least=0)
    momentum: float = option(0.01, "Share α of the batch in the running averages, 0.01 in the paper.", above=0, most=1)
    eps: float = option(1e-3)

    def normalization(self, site: Site) -> nn.Module:
        names = ("eps", "affine", "momentum", "debias", "second_average", "r_max", "d_max", "start", "r_end", "d_end")
        unclipped = {} if self.clip else {"r_max": math.inf, "d_max": math.inf, "start": 0, "r_end": 0, "d_end": 0}
        return BatchRenorm(site.channels, **({name: getattr(self, name) for name in names} | unclipped))
