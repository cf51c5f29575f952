"""Initial weights have the distribution of the papers."""

import math

import pytest
import torch

from hesscond.errors import ConfigError
from hesscond.methods import Sphere
from hesscond.models import build
from hesscond.models.layers import number_of_groups


def weights(name, layer, **options):
    model = build(name, generator=torch.Generator().manual_seed(3), **options)
    return model.get_submodule(layer)


@pytest.mark.share(3)
@pytest.mark.parametrize(
    ("name", "layer", "expected"),
    [
        ("resnet20", "stage2.block1.conv1", math.sqrt(2 / (9 * 32))),  # 16 channels before, 32 after: fan-out
        ("resnet50", "stage1.block1.conv3", math.sqrt(2 / 256)),
        ("wrn-28-10", "stage2.block1.conv1", math.sqrt(2 / (9 * 320))),
        ("cnn9", "conv4", math.sqrt(2 / (9 * 64))),  # 64 before, 128 after: fan-in
        ("densenet", "block1.layer1.conv1", math.sqrt(2 / 32)),
        ("inception", "stage1.block1.three.conv", math.sqrt(2 / (9 * 32))),
        ("vit-s16", "block1.attention.q", 0.02),
        ("vit-s16", "patches", 0.02),
        ("vit-s16", "fc", 0.02),
        ("gpt", "block2.attention.q", 0.02),
        ("gpt", "block1.fc1", 0.02),
        ("gpt", "block2.attention.out", 0.02 / math.sqrt(8)),
        ("gpt", "block1.fc2", 0.02 / math.sqrt(8)),
        ("gpt", "embedding", 0.02),
        ("gpt", "positions", 0.02),
    ],
)
def test_normal_weights(name, layer, expected):
    weight = weights(name, layer, input_shape=(64,) if name == "gpt" else (3, 32, 32), outputs=10).weight
    assert weight.std().item() == pytest.approx(expected, rel=5 / math.sqrt(weight.numel()))
    assert abs(weight.mean().item()) < 5 * expected / math.sqrt(weight.numel())


@pytest.mark.parametrize(
    ("name", "layer", "shape", "bound"),
    [
        ("mlp", "fc1", (784,), math.sqrt(6 / 884)),
        ("cnn5", "conv2", (3, 32, 32), math.sqrt(6 / (9 * 96))),
        ("nerf", "fc2", (2,), math.sqrt(6 / 512)),
        ("resnet20", "fc", (3, 32, 32), 1 / 8),
        ("dgcnn", "edge2.conv", (64, 3), 1 / math.sqrt(128)),
    ],
)
def test_uniform_weights(name, layer, shape, bound):
    weight = weights(name, layer, input_shape=shape, outputs=10).weight
    assert weight.abs().max().item() <= bound
    assert weight.abs().max().item() == pytest.approx(bound, rel=0.02)
    assert weight.std().item() == pytest.approx(bound / math.sqrt(3), rel=5 / math.sqrt(weight.numel()))


def test_biases_are_zero_but_for_torchs_own_initialization():
    assert weights("cnn5", "fc2", input_shape=(3, 32, 32), outputs=10).bias.abs().max() == 0
    assert weights("vit-s16", "patches", input_shape=(3, 32, 32), outputs=10).bias.abs().max() == 0
    assert 0 < weights("dgcnn", "fc3", input_shape=(64, 3), outputs=10).bias.abs().max() <= 1 / 16


def test_groups_divide_and_have_at_least_four_channels():
    assert [number_of_groups(c) for c in (1, 3, 4, 16, 18, 64, 128, 256, 640)] == [1, 1, 1, 4, 3, 16, 32, 32, 32]
    assert all(c % number_of_groups(c) == 0 for c in range(1, 300))


def residual(name, **options):
    options = {"input_shape": (3, 8, 8), "outputs": 10, "blocks": (2, 1), "widths": (4, 6)} | options
    return build(name, generator=torch.Generator().manual_seed(0), **options)


@pytest.mark.parametrize("on_spheres", [False, True])
@pytest.mark.parametrize(
    ("name", "last", "scale"),
    [("resnet20", "norm2", 0.0), ("resnet50", "norm3", 0.0), ("wrn-28-10", "norm2", 0.25)],
)
def test_branches_begin_at_their_gamma(name, last, scale, on_spheres):
    """The share of a branch in the sum is γ: its convolutions do not count at 0, and count by γ elsewhere."""
    own, plain = (residual(name, branch_gamma=gamma).eval() for gamma in (scale, 1.0))
    x = torch.randn(5, 3, 8, 8, generator=torch.Generator().manual_seed(1))
    if on_spheres:
        Sphere(own), Sphere(plain)
    for model, expected in ((own, scale), (plain, 1.0)):
        gammas = {key: p.detach() for key, p in model.named_parameters() if p.ndim == 1 and key.endswith("weight")}
        assert {float(p.unique()) for key, p in gammas.items() if f".{last}." in key} == {expected}
        assert {float(p.unique()) for key, p in gammas.items() if f".{last}." not in key} == {1.0}
    # beyond the first block shapes do not change
    block, same = own.stage1.block2, plain.stage1.block2
    y = torch.randn(5, own.stage1.block1(own.conv1(x)).shape[1], 4, 4)
    if hasattr(block, "shared"):
        torch.testing.assert_close(block(y) - block.shortcut(y), scale * (same(y) - same.shortcut(y)))
    else:
        torch.testing.assert_close(block(y), block.shortcut(y).relu())


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("wrn-28-10", {"branch_gamma": 0.0}, "derivative 0 at 0"),
        ("resnet20", {"branch_gamma": 0.0, "norm": "none"}, "norm 'none' has none"),
    ],
)
def test_initial_gamma_that_cannot_be(name, options, words):
    with pytest.raises(ConfigError, match=words):
        residual(name, **options)
