"""A Hessian that is zero is a result, at every level; one that is tiny is not zero."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional

import hesscond
from tests.catalogue import CATALOGUE
from tests.catalogue.parts import Net, drawn
from tests.truth import unit_truth

CE = nn.CrossEntropyLoss()
ACTIVATIONS = {"relu": nn.ReLU(), "tanh": nn.Tanh(), "gelu": nn.GELU()}


def batch(samples=12):
    return drawn(samples, 5, classes=4)


def sequences():
    x, target = drawn(8, 12)
    return x.view(8, 3, 4), target


def normalized(layer, norm, units):
    return Net(lambda m, x: m.out(torch.tanh(m.norm(m.zero(x)))), zero=layer, norm=norm, out=nn.Linear(units, 4))


def brier(output, target):
    return (output.softmax(-1) - functional.one_hot(target, output.shape[-1])).square().mean()


def focal(output, target):
    log_p = output.log_softmax(-1).gather(1, target[:, None])
    return -((1 - log_p.exp()).square() * log_p).mean()


#: Constructions, each with its layers that the loss does not depend on to second order.
ZEROS = {
    "shift": ("softmax_shift", "softmax_shift_-30", "softmax_shift_30", "softmax_shift_stream", "softmax_shift_only",
              "pairwise_ranking", "contrastive_shift", "average_of_logits"),
    "0": ("softmax_sum", "ratio", "curved_0_scale_2"), "hidden out": ("softmax_shift_deep",),
    "query key": ("equal_values",), "value": ("dueling_policy",), "0 2": ("odd_pairs",),
    "part": ("difference_of_twins",), "two": ("zero_part_of_units",),
    # named by the construction itself
    "": ("softmax_shift_float32", "softmax_shift_adam", "softmax_shift_products", "key_bias", "instance_norm"),
}  # fmt: skip
ZEROS = {name: layers.split() for layers, names in ZEROS.items() for name in names}


def measured(name, level, loss=None):
    """The layers without an effect of a construction, with another loss or its own."""
    torch.manual_seed(0)
    model, own, data = CATALOGUE[name].build()
    options = CATALOGUE[name].arguments(model, own, data)
    if ZEROS[name]:
        options["layers"] = ZEROS[name]
    return hesscond.probe(model, loss or own, data, level=level, **options)


def assert_zero(result):
    assert len(result)
    for layer in result.values():
        for kappa in layer.conditions:
            assert kappa.is_zero, f"{layer.name}: {kappa}"
            assert (kappa.resolved, kappa.rank, kappa.lambda_max) == (False, 0, 0.0)
            assert "the Hessian is zero: the loss does not depend on its parameters to second order" in str(kappa)
    frame = result.to_frame()
    assert (frame["rank"] == 0).all()
    assert frame["reason"].str.startswith("the Hessian is zero: the loss does not depend on").all()


@pytest.mark.share(4)
@pytest.mark.parametrize(("name", "level"), [(name, level) for name in ZEROS for level in CATALOGUE[name].levels])
def test_what_the_loss_does_not_depend_on_has_a_hessian_of_zero(name, level):
    assert_zero(measured(name, level))


@pytest.mark.parametrize("level", ["unit", "layer", "network"])
@pytest.mark.parametrize("loss", [brier, focal])
def test_other_losses_of_a_softmax_see_no_shift_either(loss, level):
    assert_zero(measured("softmax_shift_deep", level, loss))


@pytest.mark.parametrize("level", ["unit", "layer", "network"])
@pytest.mark.parametrize("method", ["bnp", "sphere"])
def test_zero_in_all_coordinates(method, level):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(5, 3), nn.Tanh(), nn.Linear(3, 1))
    model = Net(lambda m, x: m.net(x).expand(-1, 4), net=net)
    layers = ["net.0", "net.2"] if method == "bnp" else None
    assert_zero(hesscond.probe(model, CE, batch(), layers=layers, level=level, method=method))


def one_layer(act):
    """Value and advantages from one layer, of which unit 0 is the value."""

    def forward(m, x):
        h = m.head(m.act(m.trunk(x)))
        return h[:, :1] + m.act(h[:, 1:])

    return Net(forward, trunk=nn.Linear(5, 6), head=nn.Linear(6, 5), act=act).double()


def sizes_of(model, data, layer, unit):
    """|λ| of a unit's Hessian, descending."""
    return torch.linalg.eigvalsh(unit_truth(model, CE, data, layer, unit)).abs().sort(descending=True).values.numpy()


@pytest.mark.share(4)
@pytest.mark.parametrize("act", ["tanh", "gelu"])
@pytest.mark.parametrize("streamed", [False, True])
def test_one_unit_of_a_layer(act, streamed):
    torch.manual_seed(1)
    model, (x, target) = one_layer(ACTIVATIONS[act]), batch(40)
    data = x.double(), target
    given = [tuple(part[:13] for part in data), tuple(part[13:] for part in data)] if streamed else data
    first, *others = hesscond.probe(model, CE, given, layers="head")["head"].kappa
    assert first.is_zero
    assert "the Hessian is zero" in first.reason
    for unit, kappa in enumerate(others, 1):
        sizes = sizes_of(model, data, "head", unit)
        assert kappa.resolved
        assert kappa.value == pytest.approx(sizes[0] / sizes[-1], rel=1e-6)


def test_the_bias_of_keys_alone():
    """Of query, key and value in one tensor: a bias of the keys adds the same number to all scores of a query."""
    torch.manual_seed(0)
    parts = {"mixing": nn.MultiheadAttention(4, 2, batch_first=True), "out": nn.Linear(4, 3)}
    model = Net(lambda m, x: m.out(m.mixing(x, x, x)[0].mean(1)), **parts)
    nn.init.normal_(model.mixing.in_proj_bias)
    kappas = hesscond.probe(model, CE, sequences(), layers="mixing.in_proj_bias")["mixing.in_proj_bias"].kappa
    assert [kappa.is_zero for kappa in kappas] == 4 * [False] + 4 * [True] + 4 * [False]
    assert all(kappa.resolved for kappa in (*kappas[:4], *kappas[8:]))


@pytest.mark.share(4)
@pytest.mark.parametrize("act", ["relu", "tanh"])
@pytest.mark.parametrize("size", [1e-9, 1e-20, 1e-30])
def test_a_unit_of_tiny_curvature_is_not_zero(act, size):
    torch.manual_seed(0)
    model, (x, target) = nn.Sequential(nn.Linear(5, 4), ACTIVATIONS[act], nn.Linear(4, 4)).double(), batch(40)
    with torch.no_grad():
        model[2].weight[:, 1] *= size
    data = x.double(), target
    for unit, kappa in enumerate(hesscond.probe(model, CE, data, layers="0")["0"].kappa):
        sizes = sizes_of(model, data, "0", unit)
        assert kappa.resolved
        assert kappa.value == pytest.approx(sizes[0] / sizes[-1], rel=1e-6)


@pytest.mark.share(4)
@pytest.mark.parametrize("level", ["unit", "layer", "network"])
def test_saturation_is_not_zero(level):
    """tanh′(400) is no double: the loss depends on the layer, though no product shows it."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 4)).double()
    with torch.no_grad():
        model[0].bias.fill_(400.0)
    x, target = batch()
    for kappa in next(
        iter(hesscond.probe(model, CE, (x.double(), target), layers="0", level=level).values())
    ).conditions:
        assert not kappa.resolved
        assert not kappa.is_zero


def test_a_check_that_tells_nothing_resolves_nothing():
    """Two features, normalized without eps, are ±1: what is left inside the kernel is round-off."""
    torch.manual_seed(0)
    model = normalized(nn.Linear(5, 2), nn.LayerNorm(2, eps=0.0), 2)
    for level in ("unit", "layer", "network"):
        result = hesscond.probe(model, CE, batch(), layers="zero", level=level)
        assert not any(kappa.resolved for kappa in next(iter(result.values())).conditions)
