"""Batch normalization with ghost batches, channel groups, decay of γ and β, and example statistics at inference.

The details (decay of γ towards 1, order of the groups) are those of the authors' code.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

from hesscond.errors import ConfigError
from hesscond.hessians import Coordinates
from hesscond.methods import base, batchnorm
from hesscond.methods.normalization import Normalization, Site, checked_groups


class GhostNorm(nn.Module):
    """Normalization over ghost batches and groups of channels; takes activations (N, C, *positions)."""

    running_mean: torch.Tensor
    running_square: torch.Tensor

    def __init__(
        self,
        channels: int,
        groups: int,
        *,
        ghost: int,
        example_weight: float,
        momentum: float,
        eps: float,
        affine: bool,
    ) -> None:
        super().__init__()
        self.groups, self.ghost, self.example_weight = groups, ghost, example_weight
        self.momentum, self.eps, self.track_running_stats = momentum, eps, True
        self.weight = nn.Parameter(torch.ones(channels, device="cpu")) if affine else None
        self.bias = nn.Parameter(torch.zeros(channels, device="cpu")) if affine else None
        self.register_buffer("running_mean", torch.zeros(channels, device="cpu"))
        self.register_buffer("running_square", torch.ones(channels, device="cpu"))

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        """Normalize by the statistics of ghost batches; in evaluation mode by running averages and the example's."""
        by_group = h.reshape(len(h), self.groups, -1)
        normalized = (self._training(by_group, h) if self.training else self._inference(by_group)).reshape(h.shape)
        if self.weight is None or self.bias is None:
            return normalized
        by_channel = (-1, *[1] * (h.ndim - 2))
        return torch.addcmul(self.bias.view(by_channel), normalized, self.weight.view(by_channel))

    def _training(self, by_group: torch.Tensor, h: torch.Tensor) -> torch.Tensor:
        if self.track_running_stats:
            values = h.detach()
            self.running_mean.lerp_(values.mean(batchnorm.over_samples(h)), self.momentum)
            self.running_square.lerp_(values.square().mean(batchnorm.over_samples(h)), self.momentum)
        # none smaller than asked for: one of a single sample would have no variance
        parts = by_group.tensor_split(max(len(h) // self.ghost, 1))
        return torch.cat([functional.batch_norm(part, None, None, training=True, eps=self.eps) for part in parts])

    def _inference(self, h: torch.Tensor) -> torch.Tensor:
        """Normalize h (N, G, values) by moments that mix the running ones (1 − w) with those of the example (w)."""
        moments = []
        for running, powers in ((self.running_mean, h), (self.running_square, h.square())):
            of_group = running.reshape(1, self.groups, -1).mean(-1, keepdim=True)
            moments.append(torch.lerp(of_group, powers.mean(-1, keepdim=True), self.example_weight))
        mean, square = moments
        # a mixture has a variance ≥ 0, but for rounding
        variance = (square - mean.square()).clamp_min(0)
        return (h - mean) * torch.rsqrt(variance + self.eps)


@base.register
class FourThings(Normalization):
    """Batch normalization with the four changes of Summers and Dinneen.

    1. Inference example weighting: at inference the moments E[h], E[h²] are (1 − w) times the running averages plus w
       times those of the example itself (over its positions), and σ² = E[h²] − E[h]².
    2. Ghost batches: in training, statistics are over ⌊N/ghost⌋ parts of the batch (at least one) of ``ghost``
       samples or, where that does not divide N, as few more as can be.
    3. Decay: the loss gets (λ/2) (‖γ − 1‖² + ‖β‖²); the weights themselves are not decayed.
    4. For small batches: with ``groups``, statistics are over the samples of the ghost batch and the channels of a
       group, in training and at inference; ``ghost=1`` is then group normalization.
    """

    name = "four-things-batchnorm"
    summary = "batch normalization with ghost batches, channel groups, decay of γ and β, example statistics"
    source = "Summers, Dinneen, ICLR 2020, section 3"

    ghost: int = base.option(16, "Samples in a ghost batch.", least=1)
    groups: int | None = base.option(None, "Number of channel groups; None: every channel by itself.")
    example_weight: float = base.option(
        0.05, "w, which the paper tunes on validation data; 0: running averages alone.", least=0, most=1
    )
    weight_decay: float = base.option(1e-4, "λ.", least=0)
    momentum: float = base.option(
        0.01, "Share of the batch in the running averages, 0.01 in the authors' code.", above=0, most=1
    )

    def check_options(self) -> None:
        self.of_batch = self.groups is None
        if self.groups is None and self.ghost < 2:
            raise ConfigError(f"a ghost batch of {self.ghost} has no statistics: choose 2 samples or more, or groups")

    def normalization(self, site: Site) -> nn.Module:
        groups = site.channels if self.groups is None else checked_groups(site, self.groups)
        names = ("ghost", "example_weight", "momentum", "eps", "affine")
        return GhostNorm(site.channels, groups, **{name: getattr(self, name) for name in names})

    def penalty(self, loss: torch.Tensor) -> torch.Tensor | None:
        norms = [module for module in self.model.modules() if isinstance(module, GhostNorm)]
        pairs = [(norm.weight, norm.bias) for norm in norms if norm.weight is not None and norm.bias is not None]
        if not pairs or not self.weight_decay:
            return None
        return torch.stack([(g - 1).square().sum() + b.square().sum() for g, b in pairs]).sum() * (
            self.weight_decay / 2
        )

    def probed(self, layer: str) -> Coordinates | None:
        """The plain coordinates: γ and β, which the penalty is on, belong to no layer."""
        return self.coordinates(layer)

    def check_network(self) -> None:
        """Refuse a probe of all parameters together where there is a penalty on γ and β."""
        if self.penalty(torch.zeros((), device="cpu")) is not None:
            raise ConfigError(
                f"{self.name} adds a penalty on γ and β, whose Hessian is not a part of the network's here: give the "
                "option weight_decay=0, or name layers to measure"
            )
