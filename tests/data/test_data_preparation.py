"""Parts of data sets, standardization and augmentation against what plain numpy and torch say."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st

from hesscond.data import load, part, standardized
from hesscond.data.preparation import (
    AUGMENTATIONS,
    PADDING,
    boxes,
    chosen,
    crop,
    cutout,
    flip,
    jitter,
    resized_crop,
    rotation,
)
from hesscond.errors import ConfigError


@given(st.lists(st.integers(0, 4), min_size=1, max_size=40), st.data())
def test_as_many_of_each_class_as_there_are(labels, data):
    """The classes with enough samples differ by one at most; the others are there whole; each from its first sample."""
    samples = data.draw(st.integers(1, len(labels)))
    rows = chosen(torch.tensor(labels), samples).tolist()
    assert rows == sorted(set(rows))
    assert len(rows) == samples
    taken, there = (np.bincount(np.take(labels, own), minlength=5) for own in (rows, range(len(labels))))
    cut = taken[taken < there]
    if len(cut):
        assert cut.max() - cut.min() <= 1
        assert taken.max() <= cut.min() + 1
    for label in set(labels):
        own = [k for k, other in enumerate(labels) if other == label]
        assert [k for k in rows if labels[k] == label] == own[: taken[label]]


@given(st.integers(1, 50), st.data())
def test_values_are_taken_at_even_distances(total, data):
    samples = data.draw(st.integers(1, total))
    rows = chosen(torch.zeros(total, 2), samples).numpy()
    gaps = np.diff([*rows, total])
    assert rows[0] == 0
    assert set(gaps) <= {total // samples, total // samples + 1}


def test_samples_with_several_classes_are_taken_at_even_distances():
    assert chosen(torch.zeros(10, 3, dtype=torch.int64), 4).tolist() == [0, 2, 5, 7]


def test_a_part_does_not_depend_on_anything():
    data = load("digits")
    state = torch.get_rng_state()
    small = part(data, train=30, test=11)
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.bincount(small.train_targets).tolist() == [3] * 10
    assert sorted(torch.bincount(small.test_targets).tolist()) == [1] * 9 + [2]
    again = part(part(data, train=60), train=30)
    assert torch.equal(again.train_inputs, small.train_inputs)
    assert torch.equal(part(data).test_inputs, data.test_inputs)
    with pytest.raises(ConfigError, match="train_samples = 1438 exceeds the 1437 train samples of digits"):
        part(data, train=1438)


@pytest.mark.parametrize(("name", "axes"), [("digits", (0, 2, 3)), ("shapes", (0, 1)), ("image-regression", (0,))])
def test_standardized_channels(name, axes):
    data = load(name)
    new = standardized(data)
    x, test = (own.double().numpy() for own in (data.train_inputs, data.test_inputs))
    mean, deviation = x.mean(axes, keepdims=True), x.std(axes, keepdims=True)
    np.testing.assert_allclose(new.train_inputs, (x - mean) / deviation, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(new.test_inputs, (test - mean) / deviation, rtol=1e-4, atol=1e-5)
    assert new.train_inputs.dtype == torch.float32


def test_a_constant_coordinate_is_only_centred():
    data = load("image-regression")
    data.train_inputs[:, 1] = 0.5
    assert (standardized(data).train_inputs[:, 1] == 0).all()


def clouds(samples=6):
    return torch.rand(samples, 40, 3, generator=torch.Generator().manual_seed(0)) - 0.5


def images(samples=200):
    return torch.randn(samples, 2, 6, 5, generator=torch.Generator().manual_seed(0))


def test_crops_are_windows_of_the_padded_image():
    x = images()
    y = crop(x, torch.Generator().manual_seed(1))
    padded = torch.nn.functional.pad(x, (PADDING,) * 4)
    moves = []
    for before, after in zip(padded, y, strict=True):
        moves += [
            (i, j)
            for i in range(9)
            for j in range(9)
            if (i, j) not in ((0, 0),) and torch.equal(before[:, i : i + 6, j : j + 5], after) and after.any()
        ]
    assert len(moves) >= 190
    # every move of both directions comes about
    assert {i for i, _ in moves} == {j for _, j in moves} == set(range(9))


def test_flips_mirror_about_half():
    x = images(2000)
    y = flip(x, torch.Generator().manual_seed(1))
    same = (y == x).flatten(1).all(1)
    mirrored = (y == x.flip(3)).flatten(1).all(1)
    assert (same ^ mirrored).all()
    assert 900 < int(same.sum()) < 1100


@pytest.mark.parametrize(("kind", "name"), [(kind, name) for kind, own in AUGMENTATIONS.items() for name in own])
def test_only_its_own_generator_is_drawn_from(kind, name):
    state = torch.get_rng_state()
    inputs = images() if kind == "image" else clouds()
    first, again = (AUGMENTATIONS[kind][name](inputs, torch.Generator().manual_seed(5)) for _ in range(2))
    assert not torch.equal(first, inputs)
    assert torch.equal(first, again)
    assert torch.equal(torch.get_rng_state(), state)


def test_cutout_is_a_rectangle_about_a_pixel():
    """Of 32 × 32 pixels 16 × 16 are zero, less where the middle is near the border; every middle comes about."""
    y = cutout(torch.ones(6000, 3, 32, 24), torch.Generator().manual_seed(1))
    zero = y == 0
    assert torch.equal(zero, zero[:, :1].expand_as(zero))
    places = set()
    for own in zero[:, 0]:
        rows, columns = (torch.nonzero(own.any(d)).flatten().tolist() for d in (1, 0))
        assert own[rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1].all()
        assert int(own.sum()) == len(rows) * len(columns)
        places.add((rows[0], rows[-1], columns[0], columns[-1]))
    # from half of 16 at an edge on, to all of it, and one pixel less at the other edge
    assert {(top, bottom) for top, bottom, _, _ in places} == {(max(0, m - 8), min(31, m + 7)) for m in range(32)}
    assert {(left, right) for _, _, left, right in places} == {(max(0, m - 6), min(23, m + 5)) for m in range(24)}


def test_rotations_are_about_the_third_axis():
    x = clouds(500)
    y = rotation(x, torch.Generator().manual_seed(1))
    torch.testing.assert_close(y[..., 2], x[..., 2], rtol=0, atol=0)
    # as complex numbers: one factor of modulus 1 for all points of a cloud
    before, after = (torch.view_as_complex(own[..., :2].double().contiguous()) for own in (x, y))
    factor = after / before
    torch.testing.assert_close(factor, factor[:, :1].expand_as(factor), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(factor.abs(), torch.ones_like(factor.abs()), rtol=1e-5, atol=1e-5)
    quarters = torch.histc(factor[:, 0].angle(), 4, -math.pi, math.pi)
    assert quarters.min() > 90


def test_jitter_is_normal_noise_of_a_hundredth():
    noise = jitter(clouds(500), torch.Generator().manual_seed(1)) - clouds(500)
    assert noise.std().item() == pytest.approx(0.01, rel=0.02)
    assert abs(noise.mean().item()) < 1e-4
    assert noise.abs().max() < 0.05 + 1e-6


def test_resized_crops_are_those_of_torch():
    """Each image against `interpolate` of the very crop that was drawn; crops of all kinds come about."""
    x = torch.rand(300, 2, 24, 30, generator=torch.Generator().manual_seed(0))
    y = resized_crop(x, torch.Generator().manual_seed(1))
    drawn = torch.stack(boxes(*torch.tensor([[24, 30]] * 300).T, torch.Generator().manual_seed(1)))
    for before, after, (top, left, high, wide) in zip(x, y, drawn.T.tolist(), strict=True):
        own = before[None, :, top : top + high, left : left + wide]
        assert own.shape[2:] == (high, wide)
        wanted = torch.nn.functional.interpolate(own, (24, 30), mode="bilinear", antialias=True)[0]
        torch.testing.assert_close(after, wanted, rtol=0, atol=2e-5)
    _, _, high, wide = drawn.double()
    area, aspect = high * wide / (24 * 30), wide / high
    # rounding moves a side by half a pixel
    assert 0.07 < area.min() < 0.15
    assert area.max() > 0.85
    assert 0.68 < aspect.min() < 0.8
    assert 1.25 < aspect.max() < 1.5


def test_where_crops_are():
    """Uniform among those that fit; where the image is too long for any draw, the largest about the middle."""
    samples = 40_000
    top, left, high, wide = boxes(*torch.full((2, samples), 50), torch.Generator().manual_seed(3))
    assert (top >= 0).all()
    assert (left >= 0).all()
    assert (top + high <= 50).all()
    assert (left + wide <= 50).all()
    for first, size in ((top, high), (left, wide)):
        for spare in (10, 20):
            own = first[size == 50 - spare].double()
            assert {0, spare} <= set(own.tolist())
            assert own.mean() == pytest.approx(spare / 2, abs=5 * spare / math.sqrt(12 * len(own)))
    area = torch.rand(samples, generator=torch.Generator().manual_seed(4)).mul(0.92).add(0.08)
    # the area is uniform but for draws that do not fit, which are the larger ones
    assert area.mean() - 0.1 < (high * wide / 2500).mean() < area.mean()
    # 0.08 of 2 × 60 pixels, 4/3 as wide as high, are 2.7 pixels high
    sides = torch.tensor([(2, 60), (60, 2)] * 50).T
    drawn = torch.stack(boxes(*sides, torch.Generator())).T.tolist()
    assert drawn == [[0, 28, 2, 3], [28, 0, 3, 2]] * 50
