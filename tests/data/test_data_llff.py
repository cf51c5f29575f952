"""Rays of a scene in LLFF's layout: projected back they hit their pixels; and what is said where something is wrong."""

import numpy as np
import pytest
import torch
from PIL import Image

from hesscond.data import fetch, form, load
from hesscond.data.llff import CLOSEST, about_their_mean, normalized_rays, read_cameras
from hesscond.errors import ConfigError, CorruptDataError, DataNotFoundError
from tests import scenes


@pytest.fixture
def scene(tmp_path):
    return tmp_path / "fern"


def loaded(scene, **arguments):
    return load("llff", folder=str(scene), **{"factor": 2, "holdout": 4} | arguments)


def test_colours_and_the_views_held_out(scene):
    _, pixels, _ = scenes.write(scene)
    data = loaded(scene)
    assert data.form == form("llff")
    assert (data.classes, data.form.kind) == (0, "coordinates")
    # views 0 and 4 of five are held out
    for colours, views in ((data.train_targets, [1, 2, 3]), (data.test_targets, [0, 4])):
        np.testing.assert_array_equal(colours, (pixels[views] / np.float32(255)).reshape(-1, 3))
    assert data.train_inputs.shape == (3 * 48, 11)
    assert len(loaded(scene, train_samples=7).train_inputs) == 7
    assert loaded(scene, holdout=2).test_inputs.shape == (3 * 48, 11)


def test_cameras_are_seen_from_their_mean(scene):
    own, _, bounds = scenes.write(scene)
    cameras, focal, nearest = read_cameras(scene)
    np.testing.assert_array_equal(cameras, own)
    assert (focal, nearest) == (scenes.FOCAL, bounds.min())
    seen = about_their_mean(cameras, nearest)
    np.testing.assert_allclose(seen[:, :, 3].mean(0), 0, atol=1e-12)
    back = seen[:, :, 2].sum(0)
    np.testing.assert_allclose(back / np.linalg.norm(back), [0, 0, 1], atol=1e-12)
    assert abs(seen[:, :, 1].sum(0)[0]) < 1e-12
    # a motion and a scale: what cameras see of each other stays
    for one, other in ((0, 1), (2, 4)):
        between = [c[one, :, :3].T @ (c[other, :, 3] - c[one, :, 3]) for c in (own, seen)]
        np.testing.assert_allclose(between[0] * CLOSEST / nearest, between[1], atol=1e-12)
        turns = [c[one, :, :3].T @ c[other, :, :3] for c in (own, seen)]
        np.testing.assert_allclose(*turns, atol=1e-12)


def test_points_of_a_ray_project_onto_its_pixel():
    """Undone, o + t d is a point that the camera sees at the pixel; from the plane z = −1 to infinity."""
    camera = about_their_mean(scenes.cameras(3, np.random.default_rng(3)), 1.0)[1]
    height, width, focal = 5, 7, 9.0
    rays = normalized_rays(camera, height, width, focal).astype(np.float64)
    assert rays.shape == (height, width, 11)
    np.testing.assert_array_equal(rays[..., 6:8], np.broadcast_to([0, 1], (height, width, 2)))
    rows, columns = np.mgrid[:height, :width]
    for t in (0.0, 0.3, 0.9):
        x, y, z = np.moveaxis(rays[..., :3] + t * rays[..., 3:6], -1, 0)
        # the projection solved for the point
        depth = 2 / (z - 1)
        points = np.stack([-x * depth * width / (2 * focal), -y * depth * height / (2 * focal), depth], -1)
        if t == 0:
            np.testing.assert_allclose(depth, -1, rtol=1e-5)
        seen = (points - camera[:, 3]) @ camera[:, :3]
        np.testing.assert_allclose(seen[..., 0] / -seen[..., 2] * focal + width / 2, columns, atol=1e-4)
        np.testing.assert_allclose(-seen[..., 1] / -seen[..., 2] * focal + height / 2, rows, atol=1e-4)
        along = (points - camera[:, 3]) / np.linalg.norm(points - camera[:, 3], axis=-1, keepdims=True)
        np.testing.assert_allclose(along, rays[..., 8:], atol=1e-5)
    np.testing.assert_allclose(rays[..., 2] + rays[..., 5], 1, atol=1e-6)


def test_full_views_are_made_smaller(scene):
    _, pixels, _ = scenes.write(scene, height=12, width=16, factor=1, images="images")
    data = loaded(scene, factor=4)
    blocks = pixels[1].reshape(3, 4, 4, 4, 3).mean((1, 3)).reshape(-1, 3)
    # Pillow rounds columns, then rows
    np.testing.assert_allclose(255 * data.train_targets[:12], blocks, atol=1.01)
    quarter, whole = (loaded(scene, factor=f).train_inputs for f in (4, 1))
    # the pixel of row 0 and column 0 looks the same way
    torch.testing.assert_close(quarter[0], whole[0])


def test_what_is_wrong_is_one_sentence(scene, tmp_path):
    with pytest.raises(DataNotFoundError, match=r"no folder .*fern: unpack nerf_llff_data\.zip"):
        loaded(scene)
    with pytest.raises(ConfigError, match="llff is not for download: unpack"):
        fetch("llff", tmp_path)
    scenes.write(scene)
    with pytest.raises(ConfigError, match="of 5 views holdout = 1 leaves none"):
        loaded(scene, holdout=1)
    with pytest.raises(DataNotFoundError, match="has neither images_3 nor images"):
        loaded(scene, factor=3)
    Image.new("RGB", (3, 3)).save(scene / "images_2" / "IMG_000.png")
    with pytest.raises(CorruptDataError, match="differ in size"):
        loaded(scene)
    (scene / "images_2" / "IMG_000.png").write_bytes(b"no picture")
    with pytest.raises(CorruptDataError, match=r"IMG_000\.png is no picture"):
        loaded(scene)
    (scene / "images_2" / "IMG_000.png").unlink()
    with pytest.raises(CorruptDataError, match="has 4 images for 5 cameras"):
        loaded(scene)
    np.save(scene / "poses_bounds.npy", np.zeros((5, 17)))
    with pytest.raises(CorruptDataError, match="a depth that is not positive"):
        loaded(scene)
    for rows in (np.zeros((5, 16)), np.full((5, 17), np.nan), np.zeros((0, 17))):
        np.save(scene / "poses_bounds.npy", rows)
        with pytest.raises(CorruptDataError, match="no array of 17 numbers for each view"):
            loaded(scene)
    (scene / "poses_bounds.npy").unlink()
    with pytest.raises(DataNotFoundError, match=r"poses_bounds\.npy is not there"):
        loaded(scene)
