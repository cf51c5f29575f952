"""Radiance fields: the colour of a ray from a network of points and directions."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import nn
from torch.nn import functional

from hesscond.errors import ConfigError
from hesscond.models.layers import Layers, glorot_uniform, make_activation
from hesscond.models.transformer import token_normalization

#: Numbers of a ray: origin, direction, begin and end along it, direction of the view.
RAY = (3, 3, 1, 1, 3)
#: The last point of a ray stands for all beyond it.
BEYOND = 1e10


def encoded(p: torch.Tensor, frequencies: int) -> torch.Tensor:
    """γ(p) = (p, sin 2⁰p, cos 2⁰p, …, cos 2^(L−1)p), (…, (1 + 2 L) d) of (…, d)."""
    angles = [2.0**power * p for power in range(frequencies)]
    return torch.cat([p, *(wave for angle in angles for wave in (angle.sin(), angle.cos()))], -1)


def composed(colour: torch.Tensor, density: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """Σ_i T_i (1 − exp(−σ_i δ_i)) c_i with the transmittance T_i = exp(−Σ_{j<i} σ_j δ_j) (eq. 3).

    Parameters
    ----------
    colour
        c, (N, S, C).
    density
        σ ≥ 0, (N, S).
    lengths
        δ, (N, S).

    Returns
    -------
    torch.Tensor
        (N, C).
    """
    depth = density * lengths
    before = functional.pad(depth[:, :-1], (1, 0)).cumsum(1)
    weights = torch.exp(-before) * -torch.expm1(-depth)
    return (weights.unsqueeze(-1) * colour).sum(1)


class RadianceField(nn.Module):
    """``fc1``, …, ``density``, ``feature``, ``view``, ``colour`` at points of each ray, composed to one colour.

    Mildenhall et al., NeRF (ECCV 2020), figure 7 and section 4, with the encoding of the code published with it, which
    has the point itself beside its waves; one network at stratified points, without the second one ("fine") of
    section 5.2. Glorot-uniform weights, biases zero.

    Parameters
    ----------
    input_shape
        (11,): origin, direction, where the ray begins and ends, direction of the view.
    outputs
        Number of outputs, values in (0, 1).
    hidden
        Widths of the hidden layers before the skip.
    after_skip
        Widths of those after it; the first of them sees γ of the point again.
    view
        Width of the layer that sees the direction of the view.
    frequencies
        L of points.
    view_frequencies
        L of directions.
    samples
        Points of a ray.
    jitter
        How much of the distance between them the points are moved at random in training: 1, stratified sampling.
    activation
        One of `hesscond.models.ACTIVATIONS`.
    norm
        ``"layer"`` or ``"none"``, between hidden layer and activation.
    generator
        Source of the initial weights (on the CPU).

    Raises
    ------
    ConfigError
        Inputs that are no rays; an option that does not exist or does not fit.
    """

    def __init__(
        self,
        input_shape: tuple[int, ...],
        outputs: int,
        *,
        hidden: tuple[int, ...] = (256, 256, 256, 256, 256),
        after_skip: tuple[int, ...] = (256, 256, 256),
        view: int = 128,
        frequencies: int = 10,
        view_frequencies: int = 4,
        samples: int = 64,
        jitter: float = 1.0,
        activation: str = "relu",
        norm: str = "none",
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__()
        if tuple(input_shape) != (sum(RAY),):
            raise ConfigError(
                f"this network needs rays of shape ({sum(RAY)},): origin, direction, begin, end and view, "
                f"not inputs of shape {tuple(input_shape)}"
            )
        if not hidden or samples < 2 or jitter > 1:
            raise ConfigError(
                f"hidden must have a layer, samples be 2 at least and jitter 1 at most, got {list(hidden)}, {samples} "
                f"and {jitter}"
            )
        make = Layers(glorot_uniform, generator)
        self.frequencies, self.view_frequencies = frequencies, view_frequencies
        self.samples, self.jitter = samples, jitter
        point, direction = (3 * (1 + 2 * count) for count in (frequencies, view_frequencies))
        self.hidden = len(hidden) + len(after_skip)
        self.skip = len(hidden) + 1 if after_skip else None
        widths = (point, *hidden, *after_skip)
        for i, (before, after) in enumerate(pairwise(widths), 1):
            self.add_module(f"fc{i}", make.dense(before + (point if i == self.skip else 0), after))
            self.add_module(f"norm{i}", token_normalization(norm, after))
        self.activation = make_activation(activation)
        self.density = make.dense(widths[-1], 1)
        self.feature = make.dense(widths[-1], widths[-1])
        self.view = make.dense(widths[-1] + direction, view)
        self.colour = make.dense(view, outputs)

    def forward(self, rays: torch.Tensor) -> torch.Tensor:
        """Colours (N, outputs) of rays (N, 11)."""
        origin, direction, begin, end, view = rays.split(RAY, 1)
        at = self.places(begin, end)
        points = origin.unsqueeze(1) + at.unsqueeze(2) * direction.unsqueeze(1)
        gamma = x = encoded(points, self.frequencies)
        for i in range(1, self.hidden + 1):
            if i == self.skip:
                x = torch.cat([gamma, x], -1)
            x = self.activation(self.get_submodule(f"norm{i}")(self.get_submodule(f"fc{i}")(x)))
        density = functional.relu(self.density(x)).squeeze(-1)
        seen = encoded(view, self.view_frequencies).unsqueeze(1).expand(-1, self.samples, -1)
        x = self.activation(self.view(torch.cat([self.feature(x), seen], -1)))
        lengths = functional.pad(at.diff(dim=1), (0, 1), value=BEYOND) * direction.norm(dim=1, keepdim=True)
        return composed(self.colour(x).sigmoid(), density, lengths)

    def places(self, begin: torch.Tensor, end: torch.Tensor) -> torch.Tensor:
        """Where the points of rays are between begin and end (N, 1) each, ascending: (N, S)."""
        share = torch.linspace(0, 1, self.samples, dtype=begin.dtype, device=begin.device)
        at = begin + (end - begin) * share
        if not self.training or not self.jitter:
            return at
        middles = (at[:, 1:] + at[:, :-1]) / 2
        lower, upper = torch.cat([at[:, :1], middles], 1), torch.cat([middles, at[:, -1:]], 1)
        return at + self.jitter * (lower + (upper - lower) * torch.rand_like(at) - at)
