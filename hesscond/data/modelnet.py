"""ModelNet40 from its meshes, ``CLASS/train/*.off`` and ``CLASS/test/*.off``: for those who have it."""

from __future__ import annotations

import os
import zlib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hesscond.data import dataset, files, image_folder, sources
from hesscond.data.preparation import rows_of
from hesscond.errors import CorruptDataError, DataNotFoundError

SPLITS = ("train", "test")


class ModelNet(sources.FolderSource):
    """Points on the meshes of a folder, uniform by area, each cloud centred and scaled into the unit sphere.

    Wu et al., 3D ShapeNets (CVPR 2015), sampled as by Qi, Su, Mo, Guibas, PointNet (CVPR 2017), section 5.1.
    Classes are numbered in the order of their names. A mesh has the same points, from ``seed``, in every part of the
    data set. They are cached in the folder of downloads, since reading 12,311 meshes takes minutes.
    """

    name = "modelnet40"
    options: Mapping[str, Any] = {"folder": "ModelNet40", "points": 1024, "classes": 40, "seed": 0}
    advice = (
        "unpack ModelNet40.zip of modelnet.cs.princeton.edu into {places} (CLASS/train/*.off, CLASS/test/*.off), or "
        "name its folder by folder = … in [data]."
    )

    def form(self, options: Mapping[str, Any]) -> dataset.Form:
        return dataset.Form((options["points"], 3), options["classes"], options["classes"])

    def load(
        self, options: Mapping[str, Any], directories: Sequence[Path], *, samples: sources.Sizes, **how: Any
    ) -> dataset.Dataset:
        folder = self.folder(options["folder"], directories)
        classes = image_folder.class_folders(folder, options["classes"])
        clouds, targets, names = [], [], []
        for split, number in zip(SPLITS, samples, strict=True):
            below = {f"{class_name}/{split}": label for label, class_name in enumerate(classes)}
            meshes, labels = image_folder.listed(folder, below, (".off",))
            if number is not None:
                rows = rows_of(self.name, split, labels, number)
                meshes, labels = [meshes[row] for row in rows.tolist()], labels[rows]
            name = files.fingerprint(f"{options['points']} {options['seed']}", folder, meshes)
            clouds.append(cached(directories[-1] / f"{self.name}-{name}.npy", folder, meshes, options))
            targets.append(labels)
            names.append(name[: files.DIGITS])
        source = f"{folder} (meshes {', '.join(names)})"
        return dataset.Dataset(self.name, clouds[0], targets[0], clouds[1], targets[1], len(classes), source)


def cached(place: Path, folder: Path, meshes: Sequence[str], options: Mapping[str, Any]) -> torch.Tensor:
    """Clouds of all meshes, float32 (N, points, 3), read from the file ``place``, or sampled and written there."""
    # a damaged file is no loss
    with suppress(OSError, ValueError, EOFError):
        array = np.load(place, allow_pickle=False)
        if array.shape == (len(meshes), options["points"], 3):
            return torch.from_numpy(array)
    clouds = np.empty((len(meshes), options["points"], 3), np.float32)
    for cloud, file in zip(clouds, meshes, strict=True):
        # one generator for each mesh, so that its points do not depend on the other meshes
        rng = np.random.default_rng([options["seed"], zlib.crc32(file.encode(errors="surrogateescape"))])
        points = sampled(*read_mesh(folder / file), options["points"], rng)
        centred = points - points.mean(0)
        cloud[:] = centred / np.linalg.norm(centred, axis=1).max()
    # where nothing can be written, the next run reads the meshes again
    with suppress(OSError):
        place.parent.mkdir(parents=True, exist_ok=True)
        partial = place.with_suffix(f".{os.getpid()}.partial.npy")
        np.save(partial, clouds)
        partial.replace(place)
    return torch.from_numpy(clouds)


def read_mesh(path: Path) -> tuple[np.ndarray, np.ndarray]:
    """Vertices float64 (V, 3) and triangles int64 (F, 3) of an OFF file.

    Files of ModelNet may have the numbers of vertices and faces on the line of the word ``OFF``, with nothing between.
    """
    try:
        content = path.read_bytes()
    except OSError as error:
        raise DataNotFoundError(f"{path} cannot be read: {error.strerror}.") from None
    try:
        if not content.startswith(b"OFF"):
            raise ValueError("its first word is not OFF")
        lines = [line for line in content[3:].splitlines() if not line.lstrip().startswith(b"#")]
        numbers = np.array(b" ".join(lines).split(), dtype=np.float64)
        vertices, faces = int(numbers[0]), int(numbers[1])
        places, rest = numbers[3 : 3 + 3 * vertices].reshape(vertices, 3), numbers[3 + 3 * vertices :].astype(np.int64)
        if len(rest) != 4 * faces or (rest[::4] != 3).any():
            raise ValueError(f"{len(rest)} numbers, which are not {faces} triangles")
        triangles = rest.reshape(faces, 4)[:, 1:]
        if not len(triangles) or triangles.min() < 0 or triangles.max() >= vertices or not np.isfinite(places).all():
            raise ValueError("it has no faces, or faces of vertices that are not there")
        if not areas(places, triangles).sum() > 0:
            raise ValueError("its area is zero")
    except (ValueError, IndexError, OverflowError) as error:
        raise CorruptDataError(f"{path} is no mesh in OFF format ({error}): replace or delete it.") from None
    return places, triangles


def areas(vertices: np.ndarray, triangles: np.ndarray) -> np.ndarray:
    """Twice the areas (F,) of the triangles."""
    a, b, c = (vertices[triangles[:, k]] for k in range(3))
    return np.linalg.norm(np.cross(b - a, c - a), axis=1)


def sampled(vertices: np.ndarray, triangles: np.ndarray, points: int, rng: np.random.Generator) -> np.ndarray:
    """Random points (points, 3) on the triangles, uniform by area."""
    weights = areas(vertices, triangles)
    chosen = rng.choice(len(weights), points, p=weights / weights.sum())
    a, b, c = (vertices[triangles[chosen, k]] for k in range(3))
    # the root makes barycentric coordinates uniform (Osada et al., Shape Distributions, 2002, section 4.1)
    root, other = np.sqrt(rng.random((points, 1))), rng.random((points, 1))
    return (1 - root) * a + root * (1 - other) * b + root * other * c


sources.register(ModelNet())
