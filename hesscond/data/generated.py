"""Data sets without files: those that come with scikit-learn, and clouds of points on solids."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from hesscond.data.dataset import Dataset, Form, images_from_bytes
from hesscond.data.sources import Generated, register
from hesscond.errors import ConfigError

PHOTOGRAPHS = ("china", "flower")


def load_digits() -> Dataset:
    """Digits of scikit-learn (N, 1, 8, 8), the 17 grey levels 0 … 16 divided by 16, in a fixed split.

    The set has no published split. This one is stratified and fixed, with 1,437 training and 360 test images:
    ``train_test_split(range(1797), test_size=360, random_state=0, stratify=targets)``.
    """
    from sklearn.datasets import load_digits as load_from_sklearn
    from sklearn.model_selection import train_test_split

    bunch = load_from_sklearn()
    inputs = torch.from_numpy((bunch.images / 16).astype(np.float32)).unsqueeze(1)
    targets = torch.from_numpy(bunch.target.astype(np.int64))
    train, test = (
        torch.from_numpy(indices)
        for indices in train_test_split(np.arange(len(targets)), test_size=360, random_state=0, stratify=bunch.target)
    )
    return Dataset("digits", inputs[train], targets[train], inputs[test], targets[test], 10, "scikit-learn")


def digits_folder() -> Path:
    """Folder in which scikit-learn keeps the digits."""
    import sklearn.datasets

    return Path(sklearn.datasets.__file__).parent / "data"


def load_image_regression(*, photograph: str = "china", every: int = 4) -> Dataset:
    """Pixels of a photograph, ``"china"`` or ``"flower"`` (427 × 640): coordinates, and colours to predict.

    The pixels of every n-th row and column (``every``) are split like the fields of a chessboard into training and test
    samples. Inputs are the pixels' centres (row, column) in (0, 1), targets red, green and blue in [0, 1].
    """
    from sklearn.datasets import load_sample_image

    if photograph not in PHOTOGRAPHS:
        raise ConfigError(f"there is no photograph {photograph!r}: choose one of {', '.join(PHOTOGRAPHS)}.")
    if not 1 <= every <= 100:
        raise ConfigError(f"every must be a number of pixels from 1 to 100, not {every}.")
    pixels = load_sample_image(f"{photograph}.jpg")[::every, ::every]
    rows, columns, _ = pixels.shape
    colours = images_from_bytes([pixels[None]], (rows, columns, 3)).flatten(0, 2)
    row, column = torch.meshgrid(torch.arange(rows, device="cpu"), torch.arange(columns, device="cpu"), indexing="ij")
    centres = torch.stack([(row + 0.5) / rows, (column + 0.5) / columns], -1).flatten(0, 1)
    train = ((row + column) % 2 == 0).flatten()
    source = f"scikit-learn ({photograph}.jpg)"
    return Dataset("image-regression", centres[train], colours[train], centres[~train], colours[~train], 0, source)


register(Generated("digits", load_digits, lambda options: Form((1, 8, 8), 10, 10), digits_folder))
register(Generated("image-regression", load_image_regression, lambda options: Form((2,), 3, 0)))


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
        mask = targets == label
        clouds[mask] = sample((int(mask.sum()), points), generator)
    # a reflection more or less changes none of the solids
    turns = torch.linalg.qr(torch.randn(total, 3, 3, generator=generator, device="cpu")).Q
    clouds = clouds @ turns + noise * torch.randn(clouds.shape, generator=generator, device="cpu")
    source = f"generated, seed {seed}"
    return Dataset("shapes", clouds[:train], targets[:train], clouds[train:], targets[train:], len(SURFACES), source)


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

register(Generated("shapes", load_shapes, lambda options: Form((options["points"], 3), len(SURFACES), len(SURFACES))))
