import pytest
import torch
from torch import nn

from hesscond.methods import BNP
from hesscond.probing.entry import probe
from tests.catalogue.parts import Net
from tests.methods.first_layers import dense, vectors


def backward(model, x, y):
    model.zero_grad()
    loss = nn.functional.cross_entropy(model(x), y)
    loss.backward()
    return loss


@pytest.mark.parametrize(
    ("optimizer", "options"),
    [(torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "weight_decay": 1e-3}), (torch.optim.Adam, {"lr": 0.01})],
)
def test_attached_to_any_optimizer_it_is_the_explicit_call(optimizer, options):
    ways = []
    for attached in (True, False):
        model = dense()
        method, steps = BNP(model), optimizer(model.parameters(), **options)
        if attached:
            method.attach(steps)
        for step in range(4):
            backward(model, *vectors(8, seed=step))
            if not attached:
                method.transform_gradients()
            steps.step()
        ways.append(model)
    assert all(torch.equal(a, b) for a, b in zip(*(m.parameters() for m in ways), strict=True))
    untouched = dense()
    assert not torch.equal(untouched[0].weight, ways[0][0].weight)


def test_evaluating_and_probing_do_not_touch_the_statistics():
    model = dense()
    method = BNP(model)
    x, y = vectors(20)
    backward(model, x, y)
    other, labels = vectors(9, seed=5)
    model(other)
    with torch.no_grad():
        model(other)
    probe(model, nn.CrossEntropyLoss(), (other, labels))
    probe(model, nn.CrossEntropyLoss(), (other, labels), dtype=None)
    method.transform_gradients()
    alone = dense()
    expected = BNP(alone)
    backward(alone, x, y)
    expected.transform_gradients()
    probe(model, nn.CrossEntropyLoss(), (other, labels), dtype=None, method=method)
    assert torch.equal(model[0].weight.grad, alone[0].weight.grad)
    assert torch.equal(method.states["2"].variance, expected.states["2"].variance)


def test_accumulated_batches_count_together():
    x, y = vectors(20)
    whole, parts = dense(), dense()
    one, two = BNP(whole), BNP(parts)
    backward(whole, x, y)
    parts.zero_grad()
    for start, stop in ((0, 8), (8, 20)):
        loss = nn.functional.cross_entropy(parts(x[start:stop]), y[start:stop], reduction="sum") / 20
        loss.backward()
    one.transform_gradients()
    two.transform_gradients()
    assert torch.allclose(whole[0].weight.grad, parts[0].weight.grad, rtol=1e-12, atol=1e-15)


def test_sequences_frozen_layers_and_other_modules():
    torch.manual_seed(0)
    parts = {"embed": nn.Linear(6, 4), "frozen": nn.Linear(4, 4).requires_grad_(False), "norm": nn.LayerNorm(4)}
    parts |= {"head": nn.Linear(4, 3), "unused": nn.Linear(4, 4)}
    model = Net(lambda m, x: m.head(m.norm(m.frozen(m.embed(x)))).mean(1), **parts).double()
    method = BNP(model)
    x, y = torch.randn(5, 7, 6, dtype=torch.float64), torch.tensor([0, 1, 2, 0, 1])
    backward(model, x, y)
    norm_gradient = model.norm.weight.grad.clone()
    raw = torch.cat([model.embed.bias.grad[:, None], model.embed.weight.grad], 1)
    method.transform_gradients()
    assert torch.equal(model.norm.weight.grad, norm_gradient)
    assert model.unused.weight.grad is None
    P = method.preconditioner("embed").matrix(7)
    rows = x.reshape(-1, 6)
    assert torch.allclose(method.states["embed"].mu, 0.01 * rows.mean(0), rtol=1e-12)
    assert torch.allclose(model.embed.weight.grad, (raw @ P @ P.T)[:, 1:], rtol=1e-11, atol=1e-14)
