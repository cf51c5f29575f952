"""ModelNet40 from a tiny folder of its layout: points on known meshes, and what is said where something is wrong."""

import numpy as np
import pooch
import pytest
import torch

from hesscond.data import fetch, form, load, locate, options
from hesscond.data.modelnet import read_mesh, sampled
from hesscond.errors import ConfigError, CorruptDataError, DataNotFoundError

TETRAHEDRON = np.array([[0, 0, 0], [1, 0, 0], [0, 1, 0], [0, 0, 1.5]])
FACES = np.array([[0, 1, 2], [0, 1, 3], [0, 2, 3], [1, 2, 3]])
SMALL = {"points": 50, "classes": 2}


def off(vertices, faces, *, glued=False):
    """A mesh as text; ``glued``: the numbers on the line of the word OFF, as some files of ModelNet40 have it."""
    head = f"OFF{'' if glued else chr(10)}{len(vertices)} {len(faces)} 0\n"
    corners = (f"{len(face)} {' '.join(map(str, face))}" for face in faces)
    return head + "\n".join([*(" ".join(map(str, v)) for v in vertices), *corners]) + "\n"


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Stretched tetrahedra of two classes."""
    monkeypatch.setattr(pooch, "os_cache", lambda project: tmp_path / "cache")
    place = tmp_path / "ModelNet40"
    for label, name in enumerate(("chair", "airplane")):
        for split, number in (("train", 3), ("test", 2)):
            own = place / name / split
            own.mkdir(parents=True)
            for k in range(number):
                stretched = TETRAHEDRON * [1 + k, 2 + label, 3] + 100 * label
                (own / f"{name}_{k:04d}.off").write_text(off(stretched, FACES, glued=k == 1))
            (own / "notes.txt").write_text("no mesh")
    return place


def loaded(folder, **arguments):
    return load("modelnet40", folder=str(folder), **{**SMALL, **arguments})


def test_clouds_and_classes(folder):
    data = loaded(folder)
    assert data.form == form("modelnet40", **SMALL)
    assert form("modelnet40").input_shape == (1024, 3)
    assert data.train_inputs.shape == (6, 50, 3)
    assert data.train_inputs.dtype == torch.float32
    assert data.train_targets.tolist() == [0, 0, 0, 1, 1, 1]
    assert data.test_targets.tolist() == [0, 0, 1, 1]
    for clouds in (data.train_inputs, data.test_inputs):
        torch.testing.assert_close(clouds.mean(1), torch.zeros(len(clouds), 3), rtol=0, atol=1e-6)
        torch.testing.assert_close(clouds.norm(dim=2).amax(1), torch.ones(len(clouds)))
    assert options("modelnet40")["points"] == 1024


def test_points_lie_on_the_surface(folder):
    """Undone, each cloud has its points on a face of its tetrahedron: a barycentric coordinate of each is 0."""
    vertices, triangles = read_mesh(folder / "chair" / "train" / "chair_0001.off")
    np.testing.assert_array_equal(vertices, TETRAHEDRON * [2, 2, 3])
    np.testing.assert_array_equal(triangles, FACES)
    points = sampled(vertices, triangles, 500, np.random.default_rng(0))
    homogeneous = np.linalg.solve(np.vstack([vertices.T, np.ones(4)]), np.vstack([points.T, np.ones(500)]))
    assert (np.abs(homogeneous).min(0) < 1e-12).all()
    assert homogeneous.min() > -1e-12


def test_points_are_uniform_by_area():
    """Two triangles, one three times the other: shares, and mean and covariance of the uniform distribution on one."""
    vertices = np.array([[0, 0, 0], [1, 0, 0], [0, 1, 0], [-3.0, 0, 0]])
    points = sampled(vertices, np.array([[0, 1, 2], [0, 2, 3]]), 40_000, np.random.default_rng(1))
    small = points[points[:, 0] > 0]
    assert len(small) / 40_000 == pytest.approx(1 / 4, abs=0.01)
    np.testing.assert_allclose(small.mean(0), [1 / 3, 1 / 3, 0], atol=0.01)
    np.testing.assert_allclose(np.cov(small[:, :2].T), [[1 / 18, -1 / 36], [-1 / 36, 1 / 18]], atol=0.002)


def test_a_mesh_has_the_same_points_in_every_part_and_from_the_cache(folder, tmp_path):
    whole = loaded(folder)
    kept = sorted(path.name for path in (tmp_path / "cache").iterdir())
    assert len(kept) == 2
    small = loaded(folder, train_samples=2, test_samples=2)
    assert small.train_targets.tolist() == [0, 1]
    assert torch.equal(small.train_inputs, whole.train_inputs[[0, 3]])
    assert torch.equal(loaded(folder).train_inputs, whole.train_inputs)
    (tmp_path / "cache" / kept[0]).write_bytes(b"damaged")
    (tmp_path / "cache" / kept[1]).unlink()
    again = loaded(folder)
    assert torch.equal(again.train_inputs, whole.train_inputs)
    assert torch.equal(again.test_inputs, whole.test_inputs)
    assert again.source == whole.source
    other = loaded(folder, seed=1)
    assert not torch.equal(other.train_inputs, whole.train_inputs)
    assert other.source != whole.source
    state = torch.get_rng_state()
    loaded(folder, seed=2)
    assert torch.equal(torch.get_rng_state(), state)


def test_where_it_is_looked_for(folder, tmp_path):
    (tmp_path / "cache").mkdir()
    with pytest.raises(
        DataNotFoundError, match=r"no folder ModelNet40: unpack ModelNet40\.zip .* into .*/cache/ModelN"
    ):
        load("modelnet40", **SMALL, data_dir=tmp_path / "cache")
    assert torch.equal(load("modelnet40", **SMALL, data_dir=tmp_path).train_inputs, loaded(folder).train_inputs)
    assert locate("modelnet40", tmp_path) == folder
    with pytest.raises(ConfigError, match="modelnet40 is not for download: unpack"):
        fetch("modelnet40")


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("PLY\n1 1 0\n", "its first word is not OFF"),
        ("OFF\n3 1 0\n0 0 0\n1 0 0\n0 1 0\n", "0 numbers, which are not 1 triangles"),
        ("OFF\n3 1 0\n0 0 0\n1 0 0\n0 1 0\n3 0 1 3\n", "vertices that are not there"),
        ("OFF\n3 1 0\n0 0 0\n1 0 0\n2 0 0\n3 0 1 2\n", "its area is zero"),
        ("OFF\n3 1 0\n0 0 0\n1 nan 0\n0 1 0\n3 0 1 2\n", "not there"),
        ("OFF\n3 1 0\n0 0 0\n1 x 0\n0 1 0\n3 0 1 2\n", "could not convert"),
        ("OFF\n3 1 0\n0 0 0\n1 0 0\n0 1 0\n3 0 1 2 255\n", "5 numbers, which are not 1 triangles"),
        ("OFF", "index 0 is out of bounds"),
    ],
)
def test_damaged_meshes(folder, text, reason):
    (folder / "chair" / "test" / "chair_0000.off").write_text(text)
    with pytest.raises(CorruptDataError, match=rf"chair_0000\.off is no mesh in OFF format \(.*({reason})"):
        loaded(folder)


def test_classes_that_lack_something(folder):
    with pytest.raises(ConfigError, match="has 2 folders of classes, not 40: complete it, or set classes = 2"):
        load("modelnet40", folder=str(folder))
    with pytest.raises(ConfigError, match="points must be an integer from 1"):
        loaded(folder, points=0)
    with pytest.raises(ConfigError, match="train_samples = 7 exceeds"):
        loaded(folder, train_samples=7)
    for mesh in (folder / "chair" / "test").glob("*.off"):
        mesh.unlink()
    with pytest.raises(CorruptDataError, match=r"the class .*/chair/test has no files \.off"):
        loaded(folder)
