"""Data sets that are generated: deterministic, and what geometry says of them."""

import math

import numpy as np
import pytest
import torch
from sklearn.datasets import load_sample_image

from hesscond.data import fetch, generated as solids, load, names
from hesscond.data.sources import SOURCES, Generated
from hesscond.errors import ConfigError

GENERATED = [name for name, own in SOURCES.items() if isinstance(own, Generated) and "file" not in own.options]
TENSORS = ("train_inputs", "train_targets", "test_inputs", "test_targets")


def drawn(sample, count=200_000, seed=0):
    return sample((count,), torch.Generator().manual_seed(seed)).double()


def share(condition):
    return condition.double().mean().item()


@pytest.mark.parametrize("name", GENERATED)
def test_the_same_whatever_the_global_random_state(name, requested_urls):
    state = torch.get_rng_state()
    first = load(name, download=False)
    assert torch.equal(torch.get_rng_state(), state)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(99)
        again = load(name)
    assert all(torch.equal(getattr(first, tensor), getattr(again, tensor)) for tensor in TENSORS)
    assert first.name == name
    assert first.train_inputs.dtype == torch.float32
    assert requested_urls == []


@pytest.mark.parametrize("name", [name for name in GENERATED if name != "digits"])
def test_they_are_listed_and_there_is_nothing_to_fetch(name):
    assert name in names()
    with pytest.raises(ConfigError, match=f"'{name}' is generated, or a file of yours: there is nothing to fetch"):
        fetch(name)


def test_the_photograph_can_be_put_together_again():
    data = load("image-regression")
    photograph = load_sample_image("china.jpg")[::4, ::4]
    rows, columns, _ = photograph.shape
    again = np.zeros_like(photograph)
    for coordinates, colours in ((data.train_inputs, data.train_targets), (data.test_inputs, data.test_targets)):
        i, j = (coordinates.double() * torch.tensor([rows, columns])).floor().long().unbind(1)
        again[i, j] = (colours * 255).round().to(torch.uint8)
    assert np.array_equal(again, photograph)
    assert len(data.train_inputs) + len(data.test_inputs) == rows * columns
    assert data.classes == 0
    assert data.train_targets.shape == (rows * columns // 2, 3)


def test_the_other_photograph_and_what_does_not_exist():
    flower = load("image-regression", photograph="flower", every=20)
    assert flower.source == "scikit-learn (flower.jpg)"
    assert len(flower.train_inputs) + len(flower.test_inputs) == 22 * 32
    with pytest.raises(ConfigError, match="there is no photograph 'lena': choose one of china, flower"):
        load("image-regression", photograph="lena")
    with pytest.raises(ConfigError, match="every must be a number of pixels from 1 to 100, not 101"):
        load("image-regression", every=101)


def test_shapes_are_balanced_clouds_in_the_unit_ball():
    data = load("shapes")
    assert data.train_inputs.shape == (1_000, 128, 3)
    assert data.test_inputs.shape == (250, 128, 3)
    assert torch.bincount(data.train_targets).tolist() == [200] * 5
    assert torch.bincount(data.test_targets).tolist() == [50] * 5
    clean = load("shapes", train=50, test=5, noise=0.0)
    assert clean.train_inputs.norm(dim=-1).max() < 1 + 1e-6
    spheres = clean.train_inputs[clean.train_targets == 0]
    torch.testing.assert_close(spheres.norm(dim=-1), torch.ones(10, 128))
    noisy = data.train_inputs[data.train_targets == 0].norm(dim=-1) - 1
    assert noisy.std().item() == pytest.approx(0.02, rel=0.05)


def test_clouds_are_turned():
    clean = load("shapes", train=500, test=1, noise=0.0)
    cylinders = clean.train_inputs[clean.train_targets == 4]
    axes = torch.linalg.eigh(cylinders.transpose(1, 2) @ cylinders).eigenvectors[:, :, -1]
    assert (axes.abs().mean(0) > 0.35).all()


def cylinder_end(points):
    return (points[:, 2].abs() - solids.CYLINDER[1] / 2).abs() < 1e-6


#: Share of the base in the surface of a cone.
BASE = solids.CONE[0] / (solids.CONE[0] + math.hypot(*solids.CONE))
#: Points of a surface, a part of it, and the share of its area.
UNIFORM = {
    # Archimedes: each coordinate is uniform
    "cap": (solids.sphere, lambda x: x[:, 1] < 0.4, 0.7),
    "face": (solids.cube, lambda x: (x[:, 2] / solids.CUBE - 1).abs() < 1e-6, 1 / 6),
    "base": (solids.cone, lambda points: (points[:, 2] - (1 - solids.CONE[1])).abs() < 1e-6, BASE),
    "base and half of the rest": (solids.cone, lambda x: x[:, 2] < 1 - solids.CONE[1] / math.sqrt(2), (1 + BASE) / 2),
    # area of the outer half: 2π r (π R + 2 r) of 4π² R r
    "outer half": (
        solids.torus,
        lambda x: x[:, :2].norm(dim=1) > solids.TORUS[0],
        0.5 + solids.TORUS[1] / (math.pi * solids.TORUS[0]),
    ),
    "ends": (solids.cylinder, cylinder_end, solids.CYLINDER[0] / sum(solids.CYLINDER)),
}


@pytest.mark.parametrize("part", UNIFORM)
def test_parts_of_a_surface_have_their_share_of_the_points(part):
    sample, within, expected = UNIFORM[part]
    assert share(within(drawn(sample))) == pytest.approx(expected, abs=5e-3)
