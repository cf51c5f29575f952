"""Points in the unit cube, inside or outside of solids with known equations."""

from __future__ import annotations

import torch

from hesscond.data.dataset import Dataset, Form
from hesscond.data.sources import Generated, register

NAME = "occupancy"

#: Centre and radius of two spheres that overlap; the torus and the box touch nothing.
SPHERES = (((0.27, 0.27, 0.27), 0.25), ((0.27, 0.27, 0.55), 0.18))
#: Centre, radius of the circle (around the third axis), radius of the tube.
TORUS = ((0.68, 0.68, 0.25), 0.2, 0.09)
#: Lowest and highest corner.
BOX = ((0.5, 0.5, 0.45), (0.95, 0.95, 0.95))


def load_occupancy(*, train: int = 20_000, test: int = 5_000, seed: int = 0) -> Dataset:
    """Uniform points (N, 3) of the unit cube, of class 1 inside the solids (22 % on average) and 0 outside."""
    points = torch.rand(train + test, 3, generator=torch.Generator().manual_seed(seed), device="cpu")
    targets = inside(points).long()
    return Dataset(NAME, points[:train], targets[:train], points[train:], targets[train:], 2, f"generated, seed {seed}")


def inside(points: torch.Tensor) -> torch.Tensor:
    """Boolean mask (N,) of the ``points`` (N, 3) that lie in the union of two spheres, a torus and a box."""
    found = torch.zeros(len(points), dtype=torch.bool, device=points.device)
    for centre, radius in SPHERES:
        found |= (points - points.new_tensor(centre)).norm(dim=1) < radius
    centre, circle, tube = TORUS
    offset = points - points.new_tensor(centre)
    from_circle = torch.stack([offset[:, :2].norm(dim=1) - circle, offset[:, 2]], 1)
    found |= from_circle.norm(dim=1) < tube
    lowest, highest = (points.new_tensor(corner) for corner in BOX)
    return found | ((points > lowest) & (points < highest)).all(1)


register(Generated(NAME, load_occupancy, lambda options: Form((3,), 2, 2)))
