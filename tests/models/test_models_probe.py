"""Every network is probed: its Hessians are those of torch.func.hessian, its κ's resolved or honestly not."""

import math

import pytest
import torch

import hesscond
from hesscond.capture import dense_layers, eligible_layers
from hesscond.models import MODELS
from tests.models.reduced import batch, reduced
from tests.truth import unit_truth

GPT_LAYERS = ("attention.q", "attention.k", "attention.v", "attention.out", "fc1", "fc2")


def ends(model):
    """The first layer and the last dense one."""
    return [next(iter(eligible_layers(model))), list(dense_layers(model))[-1]]


def close_to_truth(model, loss, data, layer, unit=0):
    truth = unit_truth(model, loss, data, layer, unit)
    found = hesscond.probe(model, loss, data, [layer], units=[unit])[layer].hessian(unit=unit)
    assert truth.abs().max() > 0
    torch.testing.assert_close(found, truth, rtol=1e-9, atol=1e-9 * truth.abs().max().item())


@pytest.mark.share(8)
@pytest.mark.parametrize("norm", ["published", "none"])
@pytest.mark.parametrize("name", MODELS)
def test_kappa_of_the_first_and_the_last_layer(name, norm):
    model = reduced(name) if norm == "published" else reduced(name, norm=norm)
    loss, data = batch(name)
    result = hesscond.probe(model, loss, data, ends(model), units=[0])
    assert not result.skipped
    for layer in ends(model):
        kappa = result[layer].kappa[0]
        assert 1 <= kappa.lower < math.inf
        assert kappa.lower <= kappa.upper
        assert kappa.rank >= 1
        if kappa.resolved:
            assert kappa.lower <= kappa.value <= kappa.upper < math.inf


@pytest.mark.share(8)
@pytest.mark.parametrize("name", MODELS)
def test_hessians_of_the_first_and_the_last_layer(name):
    model = reduced(name).double()
    loss, data = batch(name)
    for layer in ends(model):
        close_to_truth(model, loss, data, layer)


@pytest.mark.share(6)
@pytest.mark.parametrize(
    ("name", "layer"),
    [
        ("cnn5", "conv2"),
        ("cnn5", "fc1"),
        ("resnet20", "stage1.block1.conv2"),
        ("resnet50", "stage2.block1.shortcut.conv"),
        ("wrn-28-10", "stage2.block1.shortcut"),
        ("preact-resnet20", "stage2.block1.conv1"),
        ("inception", "stage2.block1.reduce_five.conv"),
        ("densenet", "transition1.conv"),
        ("vit-s16", "block1.attention.q"),
        ("vit-s16", "block2.attention.k"),
        ("vit-s16", "block1.attention.v"),
        ("vit-s16", "block2.attention.out"),
        ("vit-s16", "block1.fc1"),
        ("nerf", "fc3"),
        ("dgcnn", "edge2.conv"),
        ("dgcnn", "conv"),
        *(("gpt", f"block2.{layer}") for layer in GPT_LAYERS),
    ],
)
def test_hessians_of_layers_in_between(name, layer):
    loss, data = batch(name)
    close_to_truth(reduced(name).double(), loss, data, layer, unit=1)


@pytest.mark.share(6)
@pytest.mark.parametrize("layer", [f"block1.{layer}" for layer in GPT_LAYERS])
@pytest.mark.parametrize("norm", ["rms:eps=1e-5", "none"])
def test_hessians_of_a_decoder_with_other_normalizations(norm, layer):
    loss, data = batch("gpt")
    close_to_truth(reduced("gpt", norm=norm).double(), loss, data, layer, unit=1)


@pytest.mark.share(5)
@pytest.mark.parametrize("layer", [f"block1.{layer}" for layer in (*GPT_LAYERS[:4], "fc1")])
def test_what_a_causal_mask_hides_leaves_nothing_open(layer):
    """The null directions of a decoder are found, though probabilities of hidden tokens are zero."""
    loss, data = batch("gpt")
    model = reduced("gpt", norm="layer:eps=1e-5").double()
    kappa = hesscond.probe(model, loss, data, [layer], units=[1])[layer].kappa[0]
    values = torch.linalg.eigvalsh(unit_truth(model, loss, data, layer, 1)).abs()
    assert kappa.resolved
    assert kappa.rank == int((values > 1e-13 * values.max()).sum())
    assert kappa.value == pytest.approx(float(values.max() / values.sort().values[-kappa.rank]), rel=1e-5)
