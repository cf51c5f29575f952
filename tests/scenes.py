"""A scene in LLFF's layout: coloured planes seen by cameras that look along −z, a little turned and shifted."""

from pathlib import Path

import numpy as np
from PIL import Image

FOCAL = 20.0


def cameras(number, rng):
    """Camera to world (number, 3, 4) with axes right, up, backwards: nearly the identity."""
    found = []
    for _ in range(number):
        turn, _ = np.linalg.qr(np.eye(3) + 0.05 * rng.normal(size=(3, 3)))
        turn *= np.sign(np.diag(turn))
        found.append(np.concatenate([turn, 0.3 * rng.normal(size=(3, 1))], 1))
    return np.stack(found)


def write(folder: Path, *, views=5, height=6, width=8, factor=2, seed=0, images="images_2"):
    """The cameras and the pixels (views, height, width, 3) that were written; FOCAL is of the full size."""
    rng = np.random.default_rng(seed)
    own = cameras(views, rng)
    # axes down, right, backwards
    poses = np.stack([-own[:, :, 1], own[:, :, 0], own[:, :, 2], own[:, :, 3]], -1)
    size = np.broadcast_to(np.array([[height * factor], [width * factor], [FOCAL]]), (views, 3, 1))
    rows = np.concatenate([poses, size], -1).reshape(views, 15)
    bounds = np.stack([rng.uniform(2, 3, views), rng.uniform(9, 12, views)], 1)
    (folder / images).mkdir(parents=True)
    np.save(folder / "poses_bounds.npy", np.concatenate([rows, bounds], 1))
    pixels = rng.integers(0, 256, (views, height, width, 3), dtype=np.uint8)
    for number, view in enumerate(pixels):
        Image.fromarray(view).save(folder / images / f"IMG_{number:03d}.png")
    return own, pixels, bounds
