"""A Hessian that is zero is a result, at every level; one that is tiny is not zero."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

import hesscond
from tests.cases import Net
from tests.truth import unit_truth

CE = nn.CrossEntropyLoss()
ACTIVATIONS = {"relu": nn.ReLU(), "tanh": nn.Tanh(), "gelu": nn.GELU()}


def batch(samples: int = 12, features: int = 5, classes: int = 4, seed: int = 0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(samples, features, generator=generator)
    return x, torch.randint(0, classes, (samples,), generator=generator)


def sequences():
    x, target = batch(8, 12, 3)
    return x.view(8, 3, 4), target


def number(act):
    return nn.Sequential(nn.Linear(5, 3), act, nn.Linear(3, 1))


def shifted(act, classes=4):
    """Logits, all of them shifted by one number."""
    return Net(lambda m, x: m.main(x) + m.zero(x), main=nn.Linear(5, classes), zero=number(act))


def equal(act):
    """The same number for every class."""
    return Net(lambda m, x: m.zero(x).expand(-1, 4), zero=number(act))


def equal_rows(act, apart=0.0):
    """An output layer with equal rows, or with rows so far apart."""
    parts = {"zero": nn.Linear(5, 6), "out": nn.Linear(6, 4), "act": act}
    model = Net(lambda m, x: m.out(m.act(m.zero(x.double()))), **parts).double()
    with torch.no_grad():
        model.out.weight.copy_(model.out.weight[:1] + apart * torch.randn(4, 6, dtype=torch.float64))
    return model


def queries():
    """Attention over values that are all equal."""

    def forward(m, x):
        q, k = m.zero(x).chunk(2, -1)
        values = m.value(x.mean(1, keepdim=True)).expand_as(x)
        return m.out(((q @ k.mT / 2).softmax(-1) @ values).mean(1))

    return Net(forward, zero=nn.Linear(4, 8), value=nn.Linear(4, 4), out=nn.Linear(4, 3))


def normalized(layer, norm, units=3):
    def forward(m, x):
        h = m.norm(m.zero(x))
        return m.out(torch.tanh(h.flatten(2).mean(2) if h.ndim == 4 else h))

    return Net(forward, zero=layer, norm=norm, out=nn.Linear(units, 4))


def brier(output, target):
    return (output.softmax(-1) - functional.one_hot(target, output.shape[-1])).square().mean()


def focal(output, target):
    log_p = output.log_softmax(-1).gather(1, target[:, None])
    return -((1 - log_p.exp()).square() * log_p).mean()


#: Model, loss, data, and the parameters that the loss does not depend on.
ZEROS = {
    **{
        f"shift, {act}, {name}": (lambda f=f: shifted(f), loss, batch, "zero.")
        for act, f in ACTIVATIONS.items()
        for name, loss in {"cross-entropy": CE, "Brier": brier, "focal": focal}.items()
    },
    **{f"rows, {act}": (lambda f=f: equal_rows(f), CE, batch, "zero.") for act, f in ACTIVATIONS.items()},
    **{f"equal, {act}": (lambda f=f: equal(f), CE, batch, "zero.") for act, f in ACTIVATIONS.items()},
    "two classes": (lambda: shifted(nn.ReLU(), 2), CE, lambda: batch(classes=2), "zero."),
    "queries": (queries, CE, sequences, "zero."),
}  # fmt: skip


def made(name):
    torch.manual_seed(0)
    make, loss, data, zero = ZEROS[name]
    model = make()
    named = dict(model.named_parameters())
    blocks = [zero] if zero in named else list(dict.fromkeys(n.rpartition(".")[0] for n in named if n.startswith(zero)))
    return model, loss, data(), zero, blocks


def is_constant(model, loss, data, zero):
    """Whether the loss does not depend on the parameters at all: no derivative is asked."""
    model, (x, target) = copy.deepcopy(model).double(), data
    x = x.double()
    with torch.no_grad():
        before = float(loss(model(x), target))
        for name, parameter in model.named_parameters():
            if name.startswith(zero):
                parameter.add_(torch.randn_like(parameter))
        return abs(float(loss(model(x), target)) - before) <= 1e-12 * abs(before)


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
@pytest.mark.parametrize("level", ["unit", "layer", "network"])
@pytest.mark.parametrize("name", ZEROS)
def test_what_the_loss_does_not_depend_on_has_a_hessian_of_zero(name, level):
    model, loss, data, zero, blocks = made(name)
    assert is_constant(model, loss, data, zero)
    result = hesscond.probe(model, loss, data, layers=blocks, level=level)
    assert_zero(result)


@pytest.mark.share(4)
@pytest.mark.parametrize("level", ["unit", "layer", "network"])
@pytest.mark.parametrize("name", ["shift, relu, cross-entropy", "queries"])
@pytest.mark.parametrize("how", ["as it is", "1e-30", "1e30", "stream", "blocks"])
def test_precision_scale_and_batches_do_not_make_a_hessian(name, level, how):
    model, loss, data, _, blocks = made(name)
    options = {"level": level, "layers": blocks}
    if how == "as it is":
        options["dtype"] = None
    elif how == "stream":
        data = [tuple(part[start:stop] for part in data) for start, stop in ((0, 5), (5, 6), (6, 12))]
    elif how == "blocks":
        options = {"level": "layer" if level == "unit" else level, "blocks": {"mine": blocks}}
        if level == "network":
            options = {"level": level, "layers": blocks, "products": 20}
    else:
        scale = float(how)
        assert_zero(hesscond.probe(model, lambda o, t: scale * loss(o, t), data, **options))
        return
    assert_zero(hesscond.probe(model, loss, data, **options))


@pytest.mark.share(4)
@pytest.mark.parametrize("level", ["unit", "layer", "network"])
@pytest.mark.parametrize("method", ["bnp", "sphere"])
@pytest.mark.parametrize("act", ["relu", "tanh"])
def test_zero_in_all_coordinates(act, method, level):
    model, loss, data, _, blocks = made(f"equal, {act}")
    assert_zero(
        hesscond.probe(model, loss, data, layers=None if method == "sphere" else blocks, level=level, method=method)
    )


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
@pytest.mark.parametrize("apart", [1e-3, 1e-6])
@pytest.mark.parametrize("act", ["relu", "tanh"])
@pytest.mark.parametrize("level", ["unit", "layer", "network"])
def test_rows_that_are_nearly_equal_have_a_hessian(act, apart, level):
    torch.manual_seed(0)
    result = hesscond.probe(equal_rows(ACTIVATIONS[act], apart), CE, batch(), layers="zero", level=level)
    assert not any(kappa.is_zero and kappa.cutoff for kappa in next(iter(result.values())).conditions)


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


@pytest.mark.share(4)
@pytest.mark.parametrize("level", ["unit", "layer", "network"])
@pytest.mark.parametrize("act", ["identity", "tanh"])
@pytest.mark.parametrize("streamed", [False, True])
def test_samples_without_curvature_add_no_rank(act, level, streamed):
    """Eleven of fourteen samples have equal factors for all classes; the features are over six decades."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(14, 5, generator=generator, dtype=torch.float64) * torch.logspace(0, -6, 5, dtype=torch.float64)
    a = torch.randn(14, 4, generator=generator, dtype=torch.float64)
    target = torch.randint(0, 4, (14,), generator=generator)
    flat = torch.randperm(14, generator=generator)[:11]
    a[flat] = a[flat, :1] * 0.3
    torch.manual_seed(0)
    parts = {"f": nn.Linear(5, 1), "act": {"identity": nn.Identity(), "tanh": nn.Tanh()}[act]}
    # one number a sample, times what the data give for each class
    model = Net(lambda m, x, a: m.act(m.f(x)) * a, **parts).double()
    data = (x, a), target
    stream = [((x[i:j], a[i:j]), target[i:j]) for i, j in ((0, 5), (5, 11), (11, 14))]
    result = hesscond.probe(model, CE, stream if streamed else data, level=level)
    (kappa,) = next(iter(result.values())).conditions

    # the truth in the curvature of the logit's one factor, from the three samples that have it
    z = model.f(x)[:, 0].detach().requires_grad_()
    loss = functional.cross_entropy(model.act(z)[:, None] * a, target, reduction="none") / 14
    slope = torch.autograd.grad(loss.sum(), z, create_graph=True)[0]
    S = torch.autograd.grad(slope.sum(), z)[0]
    curved = torch.tensor(sorted(set(range(14)) - set(flat.tolist())))
    H_hat = torch.cat([torch.ones(14, 1, dtype=torch.float64), x], 1)[curved].numpy()
    # of three rows: the eigenvalues of S^½ĤĤᵀS^½, and with signs
    gram = H_hat @ H_hat.T
    values = np.abs(np.linalg.eigvals(np.diag(S[curved].numpy()) @ gram))
    assert (kappa.rank, kappa.nullity, kappa.rank_decision) == (3, 3, "numerical")
    assert kappa.value == pytest.approx(values.max() / values.min(), rel=1e-4)
