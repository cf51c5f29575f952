"""Views of a scene with known cameras in LLFF's layout, as rays with their colours: for those who have them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hesscond.data import dataset, sources
from hesscond.data.image_folder import SUFFIXES
from hesscond.data.pictures import decoded
from hesscond.errors import ConfigError, CorruptDataError, DataNotFoundError
from hesscond.lazy import optional

#: Numbers of a ray: its origin, its direction, where it begins and ends, and the direction of the view.
RAY = 3 + 3 + 2 + 3
#: The nearest point of the scene comes to this depth, beyond the plane of depth 1 in front of which nothing is.
CLOSEST = 1 / 0.75


class LLFF(sources.FolderSource):
    """Rays through all pixels of the views, in normalized device coordinates, with their colours.

    Mildenhall et al., NeRF (ECCV 2020), appendix C, and the code published with it: ``poses_bounds.npy`` has a row for
    each view (camera to world, height, width and focal length, nearest and farthest depth). ``images_8``, or another
    factor, has the views in the order of their names; if there is none, those in ``images`` are made smaller. Views
    have 1/``factor`` of their height and width; every ``holdout``-th one, from the first on, is for testing.
    """

    name = "llff"
    options: Mapping[str, Any] = {"folder": "nerf_llff_data/fern", "factor": 8, "holdout": 8}
    advice = (
        "unpack nerf_llff_data.zip of the authors of NeRF, so that there is {places} (poses_bounds.npy and images_8 or "
        "images), or name the folder of a scene by folder = … in [data]."
    )

    def form(self, options: Mapping[str, Any]) -> dataset.Form:
        return dataset.Form((RAY,), 3, 0)

    def load(self, options: Mapping[str, Any], directories: Sequence[Path], **how: Any) -> dataset.Dataset:
        folder = self.folder(options["folder"], directories)
        cameras, focal, nearest = read_cameras(folder)
        views, scale = read_views(folder, options["factor"], len(cameras))
        height, width = views.shape[1:3]
        cameras = about_their_mean(cameras, nearest)
        rays = np.stack([normalized_rays(camera, height, width, focal * scale) for camera in cameras])
        held_out = np.arange(len(cameras)) % options["holdout"] == 0
        if held_out.all():
            raise ConfigError(
                f"of {len(cameras)} views holdout = {options['holdout']} leaves none to train on: take more."
            )
        colours = views.astype(np.float32) / np.float32(255)
        train, train_targets, test, test_targets = (
            torch.from_numpy(array[chosen].reshape(-1, array.shape[-1]))
            for chosen in (~held_out, held_out)
            for array in (rays, colours)
        )
        source = f"{folder} ({len(cameras)} views of {height} × {width} pixels)"
        return dataset.Dataset(self.name, train, train_targets, test, test_targets, 0, source)


def read_cameras(folder: Path) -> tuple[np.ndarray, float, float]:
    """Cameras (N, 3, 4) with the axes right, up and backwards; the focal length in pixels; the nearest depth."""
    path = folder / "poses_bounds.npy"
    if not path.is_file():
        raise DataNotFoundError(f"{path} is not there: a scene in LLFF's layout has it next to its images.")
    try:
        rows = np.load(path, allow_pickle=False)
    except (OSError, ValueError, EOFError):
        rows = np.empty(0)
    if rows.ndim != 2 or rows.shape[1] != 17 or not len(rows) or not np.isfinite(rows.astype(np.float64)).all():
        raise CorruptDataError(f"{path} is no array of 17 numbers for each view: replace it.")
    poses, bounds = rows[:, :15].astype(np.float64).reshape(-1, 3, 5), rows[:, 15:]
    if not bounds.min() > 0:
        raise CorruptDataError(f"{path} has a depth that is not positive: replace it.")
    # LLFF has the axes down, right and backwards
    cameras = np.stack([poses[:, :, 1], -poses[:, :, 0], poses[:, :, 2], poses[:, :, 3]], -1)
    return cameras, float(poses[0, 2, 4]), float(bounds.min())


def read_views(folder: Path, factor: int, number: int) -> tuple[np.ndarray, float]:
    """Views, uint8 (N, H, W, 3), and the width of a pixel of the original as a share of one of theirs."""
    with optional("llff"):
        from PIL import Image
    small = folder / f"images_{factor}"
    place = small if factor > 1 and small.is_dir() else folder / "images"
    if not place.is_dir():
        raise DataNotFoundError(f"{folder} has neither {small.name} nor images: a scene in LLFF's layout has one.")
    files = sorted(path for path in place.iterdir() if path.suffix.lower() in SUFFIXES)
    if len(files) != number:
        raise CorruptDataError(f"{place} has {len(files)} images for {number} cameras: complete it.")
    views = []
    for path in files:
        image = decoded(path)
        if place != small and factor > 1:
            sides = (max(1, round(side / factor)) for side in image.size)
            image = image.resize((next(sides), next(sides)), Image.Resampling.BOX)
        views.append(np.asarray(image))
    if len({view.shape for view in views}) > 1:
        raise CorruptDataError(f"the images of {place} differ in size: they must be views of one camera.")
    return np.stack(views), 1 / factor


def about_their_mean(cameras: np.ndarray, nearest: float) -> np.ndarray:
    """Cameras (N, 3, 4) in the axes of their mean, with the nearest depth at 4/3."""
    cameras = cameras.copy()
    cameras[:, :, 3] *= CLOSEST / nearest
    back = unit(cameras[:, :, 2].sum(0))
    right = unit(np.cross(cameras[:, :, 1].sum(0), back))
    mean = np.stack([right, np.cross(back, right), back], 1)
    origin = cameras[:, :, 3].mean(0)
    turned = mean.T @ np.concatenate([cameras[:, :, :3], (cameras[:, :, 3] - origin)[..., None]], 2)
    return np.asarray(turned)


def unit(vector: np.ndarray) -> np.ndarray:
    """Vector scaled to length 1."""
    return vector / np.linalg.norm(vector)


def normalized_rays(camera: np.ndarray, height: int, width: int, focal: float) -> np.ndarray:
    """Rays through the pixels of a view, float32 (H, W, 11), in normalized device coordinates from 0 to 1.

    The projection (x, y, z) → (−f/(W/2)·x/z, −f/(H/2)·y/z, 1 + 2/z) maps lines to lines, the plane z = −1 to −1 and
    points at infinity to 1 (appendix C, eqs. 25 and 26).
    """
    column, row = np.meshgrid(np.arange(width), np.arange(height), indexing="xy")
    across = np.stack([(column - width / 2) / focal, -(row - height / 2) / focal, -np.ones((height, width))], -1)
    direction = across @ camera[:, :3].T
    start = camera[:, 3]
    # on the plane z = -1
    origin = start + (-(1 + start[2]) / direction[..., 2:]) * direction
    x, y, z = np.moveaxis(origin, -1, 0)
    dx, dy, dz = np.moveaxis(direction, -1, 0)
    wide, high = -2 * focal / width, -2 * focal / height
    rays = [
        *(wide * x / z, high * y / z, 1 + 2 / z),
        *(wide * (dx / dz - x / z), high * (dy / dz - y / z), -2 / z),
        *(np.zeros_like(x), np.ones_like(x)),
        *np.moveaxis(direction / np.linalg.norm(direction, axis=-1, keepdims=True), -1, 0),
    ]
    return np.stack(rays, -1).astype(np.float32)


sources.register(LLFF())
