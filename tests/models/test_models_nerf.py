"""Volume rendering against the sum written as a loop, where the points of rays are, and the two networks."""

import math

import numpy as np
import pytest
import torch

from hesscond.models.nerf import encoded, resampled, visible
from hesscond.study.runner import SquaredError
from tests.models.reduced import batch, reduced


def test_what_is_seen_front_to_back():
    generator = torch.Generator().manual_seed(0)
    density, lengths = (torch.rand(4, 6, generator=generator, dtype=torch.float64) for _ in range(2))
    found = visible(3 * density, lengths)
    for n in range(4):
        light, seen = 1.0, []
        for i in range(6):
            opacity = 1 - math.exp(-3 * float(density[n, i] * lengths[n, i]))
            seen.append(light * opacity)
            light *= 1 - opacity
        torch.testing.assert_close(found[n], torch.tensor(seen, dtype=torch.float64))


def test_a_dense_fog_shows_its_nearest_point_and_none_shows_nothing():
    torch.testing.assert_close(visible(torch.full((1, 5), 1e6), torch.ones(1, 5)), torch.eye(5)[:1])
    assert visible(torch.zeros(2, 5), torch.ones(2, 5)).abs().max() == 0


def test_more_points_have_the_distribution_of_what_was_seen():
    """Against numpy's interpolation of the distribution function, and the counts of many random points."""
    generator = torch.Generator().manual_seed(0)
    at = torch.rand(3, 7, generator=generator, dtype=torch.float64).sort(1).values
    weights = torch.rand(3, 7, generator=generator, dtype=torch.float64)
    weights[:, 3] = 0
    share = torch.rand(3, 20000, generator=generator, dtype=torch.float64)
    share[:, 0], share[:, 1] = 0, 1
    found = resampled(at, weights, share).numpy()
    for n in range(3):
        edges = (at[n, 1:] + at[n, :-1]).numpy() / 2
        mass = weights[n, 1:-1].numpy() + 1e-5
        mass /= mass.sum()
        np.testing.assert_allclose(found[n], np.interp(share[n], np.append(0, mass.cumsum()), edges), rtol=1e-9)
        counts, _ = np.histogram(found[n], edges)
        np.testing.assert_allclose(counts / 20000, mass, atol=0.012)


def two_networks(**options):
    return reduced("nerf-rays", samples=(5, 4), jitter=1.0, **options)


def test_the_fine_network_sees_the_points_of_the_coarse_one_and_more():
    model = two_networks().eval()
    _, (rays, _) = batch("nerf-rays")
    seen = {}
    for name in ("coarse", "fine"):
        model.get_submodule(name).register_forward_hook(lambda _, own, out, name=name: seen.update({name: (own, out)}))
    found = model(rays)
    origin, direction, begin, end = rays[:, :3], rays[:, 3:6], rays[:, 6:7], rays[:, 7:8]
    at = begin + (end - begin) * torch.linspace(0, 1, 5)
    length = direction.norm(dim=1, keepdim=True)

    def seen_along(at, density):
        return visible(density.relu(), torch.cat([at.diff(dim=1), torch.full((6, 1), 1e10)], 1) * length)

    own, (_, density) = seen["coarse"]
    torch.testing.assert_close(own[0], origin[:, None] + at[:, :, None] * direction[:, None])
    more = resampled(at, seen_along(at, density), torch.linspace(0, 1, 4).expand(6, 4))
    all_of_them = torch.cat([at, more], 1).sort(1).values
    own, (colour, density) = seen["fine"]
    torch.testing.assert_close(own[0], origin[:, None] + all_of_them[:, :, None] * direction[:, None])
    torch.testing.assert_close(found, (seen_along(all_of_them, density)[:, :, None] * colour).sum(1))


def test_both_networks_learn_the_colours_each_from_its_own_error():
    model, (rays, colours) = two_networks().train(), batch("nerf-rays")[1]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        both = model(rays)
    assert both.shape == (6, 2, 3)
    loss = SquaredError()(both, colours)
    apart = [(both[:, i] - colours).square().mean() for i in range(2)]
    torch.testing.assert_close(loss, apart[0] + apart[1])
    for network, own in zip((model.coarse, model.fine), apart, strict=True):
        weights = list(network.parameters())
        of_all, of_own = (torch.autograd.grad(value, weights, retain_graph=True) for value in (loss, own))
        assert all(torch.allclose(a, b, atol=1e-9) for a, b in zip(of_all, of_own, strict=True))
        assert any(own.abs().max() > 0 for own in of_own)


def test_noise_on_densities_is_of_training_only():
    _, (rays, _) = batch("nerf-rays")
    plain, noisy = (reduced("nerf-rays", density_noise=noise) for noise in (0.0, 1.0))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        assert not torch.allclose(plain.train()(rays), noisy.train()(rays), atol=1e-3)
    assert torch.equal(plain.eval()(rays), noisy.eval()(rays))


def test_the_encoding():
    p = torch.tensor([[0.3, -1.0]])
    expected = [0.3, -1, math.sin(0.3), math.sin(-1), math.cos(0.3), math.cos(-1)]
    expected += [math.sin(0.6), math.sin(-2), math.cos(0.6), math.cos(-2)]
    torch.testing.assert_close(encoded(p, 2), torch.tensor([expected]))


@pytest.mark.parametrize("training", [True, False])
def test_points_are_stratified_in_training_only(training):
    model = reduced("nerf-rays", jitter=1.0, samples=(4,)).train(training)
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
    model.coarse.density.register_forward_hook(lambda _, __, output: seen.append(output))
    other = rays.clone()
    other[:, 8:] += 1
    assert not torch.equal(model(rays), model(other))
    assert torch.equal(*seen)
