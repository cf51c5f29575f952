"""Volume rendering against the sum written as a loop, and where the points of rays are."""

import math

import pytest
import torch

from hesscond.models.nerf import composed, encoded
from tests.models.reduced import batch, reduced


def test_composition_front_to_back():
    generator = torch.Generator().manual_seed(0)
    colour, density, lengths = (
        torch.rand(4, 6, *own, generator=generator, dtype=torch.float64) for own in ((3,), (), ())
    )
    found = composed(colour, 3 * density, lengths)
    for n in range(4):
        light, total = 1.0, torch.zeros(3, dtype=torch.float64)
        for i in range(6):
            opacity = 1 - math.exp(-3 * float(density[n, i] * lengths[n, i]))
            total += light * opacity * colour[n, i]
            light *= 1 - opacity
        torch.testing.assert_close(found[n], total)


def test_a_dense_fog_shows_its_nearest_colour_and_none_shows_black():
    colour = torch.rand(2, 5, 3, generator=torch.Generator().manual_seed(0))
    lengths = torch.ones(2, 5)
    torch.testing.assert_close(composed(colour, torch.full((2, 5), 1e6), lengths), colour[:, 0])
    assert composed(colour, torch.zeros(2, 5), lengths).abs().max() == 0


def test_the_encoding():
    p = torch.tensor([[0.3, -1.0]])
    expected = [0.3, -1, math.sin(0.3), math.sin(-1), math.cos(0.3), math.cos(-1)]
    expected += [math.sin(0.6), math.sin(-2), math.cos(0.6), math.cos(-2)]
    torch.testing.assert_close(encoded(p, 2), torch.tensor([expected]))


@pytest.mark.parametrize("training", [True, False])
def test_points_are_stratified_in_training_only(training):
    model = reduced("nerf-rays", jitter=1.0, samples=4).train(training)
    begin, end = torch.full((3000, 1), 2.0), torch.full((3000, 1), 5.0)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        at = model.places(begin, end)
    if not training:
        torch.testing.assert_close(at, torch.tensor([2.0, 3, 4, 5]).expand(3000, 4))
        return
    for number, (low, high) in enumerate(((2, 2.5), (2.5, 3.5), (3.5, 4.5), (4.5, 5))):
        own = at[:, number]
        assert low <= own.min() < low + 0.02
        assert high - 0.02 < own.max() <= high
        assert own.mean().item() == pytest.approx((low + high) / 2, abs=0.03)


def test_the_direction_of_the_view_changes_the_colour_and_not_the_density():
    model = reduced("nerf-rays").eval()
    _, (rays, _) = batch("nerf-rays")
    seen = []
    model.density.register_forward_hook(lambda _, __, output: seen.append(output))
    other = rays.clone()
    other[:, 8:] += 1
    assert not torch.equal(model(rays), model(other))
    assert torch.equal(*seen)
