"""Normalization of activations by torch's modules: what they share, and layer and group normalization."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn

from hesscond.capture import Geometry
from hesscond.errors import ConfigError
from hesscond.methods import base, wrapping

Position = Literal["pre", "post"]
EPS = 1e-5


@dataclass(frozen=True)
class Site:
    """Place of a normalization in a model."""

    name: str  # name of the layer
    channels: int  # C of the activations (N, C, *positions) there, or of the features (N, …, C) at a dense layer
    dimensions: int  # number of spatial dimensions of the activations: 0 at a dense layer


class FeaturesLast(nn.Module):
    """Adapter of activations (N, …, C) for a module that takes (N, C) or (N, C, positions)."""

    def __init__(self, normalization: nn.Module) -> None:
        super().__init__()
        self.normalization = normalization

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        """Normalize features (N, …, C)."""
        if h.ndim == 2:
            return self.normalization(h)
        return self.normalization(h.flatten(1, -2).movedim(-1, 1)).movedim(1, -1).reshape(h.shape)


class Normalization(base.Method):
    """Base of the methods that insert normalizations of activations into a model; the coordinates are the plain ones.

    Dense and convolutional layers of the model must be registered in the order in which they are called.
    """

    #: Whether the statistics are those of each channel over the samples, of which one has no variance.
    of_batch: bool = False

    position: Position = base.option(
        "pre",
        '``"pre"``: after the layer and before its activation, for all layers but the last; ``"post"``: on what enters '
        "the layer, that is after the activation (and pooling) ahead of it, for all layers but the first.",
    )
    affine: bool = base.option(True, "Whether γ and β are trained; else they are 1 and 0.")
    eps: float = base.option(EPS, "ε.", above=0)
    layers: tuple[str, ...] | None = base.option(
        None, "Names of any layers, in place of those that ``position`` selects; None: these."
    )

    def __init__(self, model: nn.Module, **options: Any) -> None:
        super().__init__(model, **options)
        self.check_options()
        named, pre = self.layers is not None, self.position == "pre"
        chosen = wrapping.layers_of(model, self.layers, first=named or pre, output=named or not pre)
        geometries = {name: Geometry.of(layer) for name, layer in chosen.items()}
        sites = [Site(name, shape.units if pre else shape.channels, shape.dims) for name, shape in geometries.items()]
        # all of them before the first is put in: a model that is refused stays as it is
        modules = [(site, self.normalization(site)) for site in sites]
        for site, module in modules:
            # torch.nn.LayerNorm takes the features last as they are
            fits = site.dimensions or isinstance(module, nn.LayerNorm)
            wrapping.wrap(model, site.name, module if fits else FeaturesLast(module), after=pre)

    @abstractmethod
    def normalization(self, site: Site) -> nn.Module:
        """The module for a site; at a dense layer it gets features (N, C), or (N, C, positions) of (N, …, C)."""

    def check_options(self) -> None:
        """Refuse options that do not go together, before the model is changed."""
        return

    def check_batch(self, samples: int) -> None:
        if self.of_batch and samples < 2:
            what = "normalizes by the statistics of the batch"
            raise ConfigError(f"method {self.name!r} {what}: choose a batch size above 1")


def checked_groups(site: Site, groups: int) -> int:
    """``groups``, or a ConfigError if a site's channels do not split into as many groups of two values at least."""
    # a convolution's channel has many positions
    least = 1 if site.dimensions else 2
    choices = [n for n in range(1, site.channels // least + 1) if site.channels % n == 0]
    where, what = f"the {site.channels} channels at layer {site.name!r}", f"{groups} groups of the same size"
    if not choices:
        raise ConfigError(f"{where} cannot be normalized in {what}: a group needs two values")
    if groups not in choices:
        raise ConfigError(
            f"{where} do not split into {what}, of two values at least: choose groups among "
            f"{', '.join(map(str, choices))}"
        )
    return groups


@base.register
class LayerNormalization(Normalization):
    """Layer normalization: each sample's activations to mean 0 and variance 1 over all channels.

    y = γ (h − μ_j) / √(σ_j² + ε) + β with the mean μ_j and variance σ_j² of sample j. At a dense layer this is
    `torch.nn.LayerNorm` over the features (of each token by itself). At a convolution, the statistics are over
    channels and positions and γ, β are by channel: `torch.nn.GroupNorm` with one group, as the size of the images is
    not known beforehand.
    """

    name = "layernorm"
    summary = "layer normalization before or after the activations of hidden layers"
    source = "Ba, Kiros, Hinton, Layer Normalization, 2016, eq. (3)"

    def normalization(self, site: Site) -> nn.Module:
        checked_groups(site, 1)
        if site.dimensions:
            return nn.GroupNorm(1, site.channels, eps=self.eps, affine=self.affine)
        return nn.LayerNorm(site.channels, eps=self.eps, elementwise_affine=self.affine)


@base.register
class GroupNormalization(Normalization):
    """Group normalization: each sample's activations to mean 0 and variance 1 over groups of channels.

    y = γ (h − μ_jg) / √(σ_jg² + ε) + β with the mean and variance over the channels of group g and all positions (or
    tokens) of sample j; γ, β by channel. `torch.nn.GroupNorm`.
    """

    name = "groupnorm"
    summary = "group normalization before or after the activations of hidden layers"
    source = "Wu, He, Group Normalization, ECCV 2018, eqs. (1), (2), (7)"

    groups: int = base.option(
        2, "Number of groups, of the same size and of two values at least. The paper has 32 for 64 channels and more."
    )

    def normalization(self, site: Site) -> nn.Module:
        return nn.GroupNorm(checked_groups(site, self.groups), site.channels, eps=self.eps, affine=self.affine)
