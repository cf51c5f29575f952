"""Clouds of points on the surfaces of five solids."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from hesscond.data.dataset import Dataset, Form
from hesscond.data.sources import Generated, register

NAME = "shapes"

#: All solids fit into the unit ball.
CUBE = 3**-0.5  # half its edge
CONE = (0.8, 1.6)  # radius of the base, height
TORUS = (0.7, 0.3)  # radius of the circle, of the tube
CYLINDER = (2**-0.5, 2**0.5)  # radius, height


def load_shapes(
    *, train: int = 1_000, test: int = 250, points: int = 128, noise: float = 0.02, seed: int = 0
) -> Dataset:
    """Clouds of points (N, points, 3), uniform on a surface, rotated at random, with normal noise in each coordinate.

    Classes: 0 sphere, 1 cube, 2 cone, 3 torus, 4 cylinder; the numbers of their clouds differ by one at most. The
    solids are centred and lie within the unit ball.
    """
    generator = torch.Generator().manual_seed(seed)
    total = train + test
    targets = torch.arange(total, device="cpu") % len(SURFACES)
    clouds = torch.empty(total, points, 3, device="cpu")
    for label, sample in enumerate(SURFACES.values()):
        own = targets == label
        clouds[own] = sample((int(own.sum()), points), generator)
    # a reflection more or less changes none of the solids
    turns = torch.linalg.qr(torch.randn(total, 3, 3, generator=generator, device="cpu")).Q
    clouds = clouds @ turns + noise * torch.randn(clouds.shape, generator=generator, device="cpu")
    source = f"generated, seed {seed}"
    return Dataset(NAME, clouds[:train], targets[:train], clouds[train:], targets[train:], len(SURFACES), source)


def sphere(shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    """Uniform points on the unit sphere, shape (*shape, 3)."""
    return torch.nn.functional.normalize(torch.randn(*shape, 3, generator=generator, device="cpu"), dim=-1)


def cube(shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    """Uniform points on the faces of a cube, shape (*shape, 3)."""
    points = 2 * torch.rand(*shape, 3, generator=generator, device="cpu") - 1
    axis = torch.randint(3, (*shape, 1), generator=generator, device="cpu")
    side = points.gather(-1, axis)
    return CUBE * points.scatter(-1, axis, torch.where(side < 0, -1.0, 1.0))


def cone(shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    """Uniform points on base and mantle of a cone, shape (*shape, 3)."""
    radius, height = CONE
    slant = math.hypot(radius, height)
    # on both, the area within a distance from the middle is proportional to its square
    outward = torch.rand(shape, generator=generator, device="cpu").sqrt()
    on_mantle = torch.rand(shape, generator=generator, device="cpu") < slant / (slant + radius)
    z = torch.where(on_mantle, 1 - height * outward, torch.full(shape, 1 - height, device="cpu"))
    return around(radius * outward, z, generator)


def torus(shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    """Uniform points on a torus, shape (*shape, 3)."""
    circle, tube = TORUS
    angle = 2 * math.pi * torch.rand(shape, generator=generator, device="cpu")
    # the density 1 + (r/R) cos θ of the tube's angle: of θ and π − θ, which together have a constant one, either
    stays = 2 * torch.rand(shape, generator=generator, device="cpu") < 1 + tube / circle * angle.cos()
    angle = torch.where(stays, angle, math.pi - angle)
    return around(circle + tube * angle.cos(), tube * angle.sin(), generator)


def cylinder(shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    """Uniform points on mantle and ends of a cylinder, shape (*shape, 3)."""
    radius, height = CYLINDER
    on_mantle = torch.rand(shape, generator=generator, device="cpu") < height / (height + radius)
    outward = torch.where(
        on_mantle, torch.ones(shape, device="cpu"), torch.rand(shape, generator=generator, device="cpu").sqrt()
    )
    along = 2 * torch.rand(shape, generator=generator, device="cpu") - 1
    z = torch.where(on_mantle, along, torch.where(along < 0, -1.0, 1.0))
    return around(radius * outward, height / 2 * z, generator)


def around(distance: torch.Tensor, z: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Points at a distance from the third axis and a height along it, at a uniform angle."""
    angle = 2 * math.pi * torch.rand(z.shape, generator=generator, device="cpu")
    return torch.stack([distance * angle.cos(), distance * angle.sin(), z], -1)


SURFACES: dict[str, Callable[[tuple[int, ...], torch.Generator], torch.Tensor]] = {
    "sphere": sphere,
    "cube": cube,
    "cone": cone,
    "torus": torus,
    "cylinder": cylinder,
}

register(Generated(NAME, load_shapes, lambda options: Form((options["points"], 3), len(SURFACES), len(SURFACES))))
