"""Radiance fields: the colour of a ray from a network of points and directions."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import nn
from torch.nn import functional

from hesscond.errors import ConfigError
from hesscond.models import layers
from hesscond.models.registry import register
from hesscond.models.transformer import token_normalization

#: Numbers of a ray: origin, direction, begin and end along it, direction of the view.
RAY = (3, 3, 1, 1, 3)
#: The last point of a ray stands for all beyond it.
BEYOND = 1e10


def encoded(p: torch.Tensor, frequencies: int) -> torch.Tensor:
    """γ(p) = (p, sin 2⁰p, cos 2⁰p, …, cos 2^(L−1)p), (…, (1 + 2 L) d) of (…, d)."""
    angles = [2.0**power * p for power in range(frequencies)]
    return torch.cat([p, *(wave for angle in angles for wave in (angle.sin(), angle.cos()))], -1)


def visible(density: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """Weights w_i = T_i (1 − exp(−σ_i δ_i)), (N, S), with the transmittance T_i = exp(−Σ_{j<i} σ_j δ_j) (eq. 3)."""
    depth = density * lengths
    before = functional.pad(depth[:, :-1], (1, 0)).cumsum(1)
    return torch.exp(-before) * -torch.expm1(-depth)


def resampled(at: torch.Tensor, weights: torch.Tensor, share: torch.Tensor) -> torch.Tensor:
    """Points (N, F) at which the distribution function of a density along each ray is ``share`` (section 5.2).

    The density is constant between the middles of neighbouring points and proportional there to the weight of the
    point, of all points but the first and the last, plus 1e-5, as in the code published with the paper.
    """
    edges = (at[:, 1:] + at[:, :-1]) / 2
    weights = weights[:, 1:-1] + 1e-5
    below = functional.pad(weights.cumsum(1) / weights.sum(1, keepdim=True), (1, 0))
    step = torch.searchsorted(below, share.contiguous(), right=True).clamp(1, weights.shape[1])
    low, high = below.gather(1, step - 1), below.gather(1, step)
    return torch.lerp(edges.gather(1, step - 1), edges.gather(1, step), ((share - low) / (high - low)).clamp(0, 1))


class Field(nn.Module):
    """``fc1``, …, ``density``, ``feature``, ``view``, ``colour``: a colour and a density at each point.

    Mildenhall et al., NeRF (ECCV 2020), figure 7.
    """

    def __init__(
        self,
        outputs: int,
        *,
        hidden: tuple[int, ...],
        after_skip: tuple[int, ...],
        view: int,
        frequencies: int,
        view_frequencies: int,
        activation: str,
        norm: str,
        generator: torch.Generator | None,
    ) -> None:
        super().__init__()
        make = layers.Layers(layers.glorot_uniform, generator)
        self.frequencies, self.view_frequencies = frequencies, view_frequencies
        point, direction = (3 * (1 + 2 * count) for count in (frequencies, view_frequencies))
        self.hidden = len(hidden) + len(after_skip)
        self.skip = len(hidden) + 1 if after_skip else None
        widths = (point, *hidden, *after_skip)
        for i, (before, after) in enumerate(pairwise(widths), 1):
            self.add_module(f"fc{i}", make.dense(before + (point if i == self.skip else 0), after))
            self.add_module(f"norm{i}", token_normalization(norm, after))
        self.activation = layers.make_activation(activation)
        self.density = make.dense(widths[-1], 1)
        self.feature = make.dense(widths[-1], widths[-1])
        self.view = make.dense(widths[-1] + direction, view)
        self.colour = make.dense(view, outputs)

    def forward(self, points: torch.Tensor, view: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Colours (N, S, outputs) and densities (N, S) before their ReLU, of points (N, S, 3) seen along (N, 3)."""
        gamma = x = encoded(points, self.frequencies)
        for i in range(1, self.hidden + 1):
            if i == self.skip:
                x = torch.cat([gamma, x], -1)
            x = self.activation(self.get_submodule(f"norm{i}")(self.get_submodule(f"fc{i}")(x)))
        density = self.density(x).squeeze(-1)
        directions = encoded(view, self.view_frequencies).unsqueeze(1).expand(-1, points.shape[1], -1)
        x = self.activation(self.view(torch.cat([self.feature(x), directions], -1)))
        return self.colour(x).sigmoid(), density


class RadianceField(nn.Module):
    """``coarse`` and ``fine``, a `Field` each, at points of each ray, composed to one colour.

    Mildenhall et al., NeRF (ECCV 2020), sections 4 and 5.2, figure 7, with the encoding of the code published with it,
    which also contains the point itself. The coarse network is evaluated at stratified points; the fine one at
    these and at more of them, drawn where the coarse one sees something. Glorot-uniform weights, biases zero.
    """

    def __init__(
        self,
        input_shape: tuple[int, ...],
        outputs: int,
        *,
        hidden: tuple[int, ...] = (256, 256, 256, 256, 256),  # widths of the hidden layers before the skip
        # widths of those after it; the first of them sees γ of the point again
        after_skip: tuple[int, ...] = (256, 256, 256),
        view: int = 128,  # width of the layer that sees the direction of the view
        frequencies: int = 10,  # L of points
        view_frequencies: int = 4,  # L of directions
        # points of a ray: of the coarse network, and how many more of the fine one; one number: no fine network
        samples: tuple[int, ...] = (64, 128),
        # how much of the distance between them the points are moved at random in training: 1, stratified sampling,
        # and random points for the fine network
        jitter: float = 1.0,
        # standard deviation of the noise on densities before their ReLU in training; 1 in the paper on real scenes
        density_noise: float = 0.0,
        activation: str = "relu",
        norm: str = "none",  # "layer" or "none", between hidden layer and activation
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__()
        if tuple(input_shape) != (sum(RAY),):
            raise ConfigError(
                f"this network needs rays of shape ({sum(RAY)},): origin, direction, begin, end and view, "
                f"not inputs of shape {tuple(input_shape)}"
            )
        if not hidden or jitter > 1:
            raise ConfigError(f"hidden must have a layer and jitter be 1 at most, got {list(hidden)} and {jitter}")
        if len(samples) not in (1, 2) or samples[0] < 3:
            raise ConfigError(
                "samples must be the points of the coarse network, 3 at least, and how many more the fine one has, if "
                f"there is one, got {list(samples)}"
            )
        self.samples, self.jitter, self.density_noise = samples, jitter, density_noise
        fields = [
            Field(
                outputs,
                hidden=hidden,
                after_skip=after_skip,
                view=view,
                frequencies=frequencies,
                view_frequencies=view_frequencies,
                activation=activation,
                norm=norm,
                generator=generator,
            )
            for _ in samples
        ]
        self.coarse, self.fine = fields[0], fields[1] if len(samples) == 2 else None

    def forward(self, rays: torch.Tensor) -> torch.Tensor:
        """Colours (N, outputs) of rays (N, 11); of two networks in training both, (N, 2, outputs), else the fine."""
        begin, end = rays[:, 6:7], rays[:, 7:8]
        at = self.places(begin, end)
        coarse, weights = self.rendered(self.coarse, rays, at)
        if self.fine is None:
            return coarse
        # further points, drawn by the weights of the coarse network
        share = torch.linspace(0, 1, self.samples[1], dtype=at.dtype, device=at.device).repeat(len(at), 1)
        if self.training and self.jitter:
            share = torch.lerp(share, torch.rand_like(share), self.jitter)
        at = torch.cat([at, resampled(at, weights.detach(), share)], 1).sort(1).values
        fine, _ = self.rendered(self.fine, rays, at)
        return torch.stack([coarse, fine], 1) if self.training else fine

    def rendered(self, field: Field, rays: torch.Tensor, at: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Colours (N, outputs) by a network at places (N, S), and what each place counts in them, (N, S)."""
        origin, direction, _, _, view = rays.split(RAY, 1)
        colour, density = field(origin.unsqueeze(1) + at.unsqueeze(2) * direction.unsqueeze(1), view)
        if self.training and self.density_noise:
            density = density + self.density_noise * torch.randn_like(density)
        lengths = functional.pad(at.diff(dim=1), (0, 1), value=BEYOND) * direction.norm(dim=1, keepdim=True)
        weights = visible(functional.relu(density), lengths)
        return (weights.unsqueeze(-1) * colour).sum(1), weights

    def places(self, begin: torch.Tensor, end: torch.Tensor) -> torch.Tensor:
        """Where the points of rays are between begin and end (N, 1) each, ascending: (N, S)."""
        share = torch.linspace(0, 1, self.samples[0], dtype=begin.dtype, device=begin.device)
        at = begin + (end - begin) * share
        if not self.training or not self.jitter:
            return at
        middles = (at[:, 1:] + at[:, :-1]) / 2
        lower, upper = torch.cat([at[:, :1], middles], 1), torch.cat([middles, at[:, -1:]], 1)
        return at + self.jitter * (lower + (upper - lower) * torch.rand_like(at) - at)


register("nerf-rays", "NeRF on rays, volume rendering included", "coordinates", RadianceField)
