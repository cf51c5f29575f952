import copy

import numpy as np
import pytest
import torch
from torch import nn

from hesscond.errors import CaptureError, ConfigError
from hesscond.methods import BNP
from hesscond.probing import probe


def model_of(dtype=torch.float64, bias=True, seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 5, bias=bias), nn.Tanh(), nn.Linear(5, 3, bias=bias)).to(dtype)


def batch_of(samples, dtype=torch.float64, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(samples, 6, generator=generator, dtype=torch.float64).to(dtype)
    return x, torch.randint(0, 3, (samples,), generator=generator)


def backward(model, x, y):
    model.zero_grad()
    loss = nn.functional.cross_entropy(model(x), y)
    loss.backward()
    return loss


class Algorithm2:
    """The paper's Algorithm 2 written out entry by entry in numpy, as THEORY pins it."""

    def __init__(self, width):
        self.mu, self.var = np.zeros(width), np.ones(width)

    def step(self, H, G_w, G_b):
        N, n = H.shape
        if N == 1:
            mu_B, var_B = H[0].copy(), (H[0] - self.mu) ** 2
        else:
            mu_B = sum(H) / N
            var_B = sum((h - mu_B) ** 2 for h in H) / N
        self.mu = 0.99 * self.mu + 0.01 * mu_B
        self.var = 0.99 * self.var + 0.01 * var_B
        tilde = self.var + 1e-2 * max(self.var) + 1e-4
        q2 = max(n / N, 1)
        new_w, new_b = np.empty_like(G_w), np.empty_like(G_b)
        for i in range(len(G_b)):
            for j in range(n):
                new_w[i, j] = (G_w[i, j] - self.mu[j] * G_b[i]) / tilde[j] / q2
            new_b[i] = G_b[i] / q2 - sum(new_w[i, j] * self.mu[j] for j in range(n))
        return new_w, new_b


@pytest.mark.parametrize("samples", [1, 2, 4, 60])
def test_gradients_are_those_of_algorithm_2_over_many_steps(samples):
    model = model_of()
    method = BNP(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    reference = {0: Algorithm2(6), 2: Algorithm2(5)}
    for step in range(6):
        x, y = batch_of(samples, seed=step)
        backward(model, x, y)
        inputs = {0: x.numpy(), 2: torch.tanh(model[0](x)).detach().numpy()}
        raw = {i: (model[i].weight.grad.numpy().copy(), model[i].bias.grad.numpy().copy()) for i in (0, 2)}
        method.transform_gradients()
        for i in (0, 2):
            G_w, G_b = reference[i].step(inputs[i], *raw[i])
            np.testing.assert_allclose(model[i].weight.grad.numpy(), G_w, rtol=1e-12, atol=1e-14)
            np.testing.assert_allclose(model[i].bias.grad.numpy(), G_b, rtol=1e-12, atol=1e-14)
        optimizer.step()


@pytest.mark.parametrize("samples", [1, 3, 60])
@pytest.mark.parametrize("bias", [True, False])
def test_transformed_gradient_is_P_Pt_gradient(samples, bias):
    model = model_of(bias=bias)
    method = BNP(model)
    x, y = batch_of(samples)
    backward(model, x, y)
    before = {i: (model[i].weight.grad.clone(), model[i].bias.grad.clone() if bias else None) for i in (0, 2)}
    method.transform_gradients()
    for i in (0, 2):
        width = model[i].in_features
        P = method.preconditioner(str(i)).matrix(width + bias)
        w, b = before[i]
        g = w if b is None else torch.cat([b[:, None], w], 1)
        truth = g @ P @ P.T
        own = model[i].weight.grad if b is None else torch.cat([model[i].bias.grad[:, None], model[i].weight.grad], 1)
        assert torch.allclose(own, truth, rtol=1e-12, atol=1e-14)


def test_step_5_with_the_old_gradient_would_not_be_a_preconditioner():
    """The other reading of the paper's step 5 is not P Pᵀ g; the difference is plain."""
    model = model_of()
    method = BNP(model)
    x, y = batch_of(4)
    backward(model, x, y)
    G_w, G_b = model[2].weight.grad.clone(), model[2].bias.grad.clone()
    method.transform_gradients()
    state = method.layers["2"]
    wrong = G_b / state.q_squared - G_w @ state.mu
    assert not torch.allclose(model[2].bias.grad, wrong, rtol=1e-3)


OPTIMIZERS = [
    (torch.optim.SGD, {"lr": 0.1}),
    (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "weight_decay": 1e-3}),
    (torch.optim.Adam, {"lr": 0.01}),
    (torch.optim.AdamW, {"lr": 0.01}),
    (torch.optim.RMSprop, {"lr": 0.01}),
    (torch.optim.Adagrad, {"lr": 0.1}),
    (torch.optim.NAdam, {"lr": 0.01}),
]


@pytest.mark.parametrize(("optimizer", "options"), OPTIMIZERS)
def test_attached_to_any_optimizer_it_is_the_explicit_call(optimizer, options):
    ways = []
    for attached in (True, False):
        model = model_of()
        method, steps = BNP(model), optimizer(model.parameters(), **options)
        if attached:
            method.attach(steps)
        for step in range(4):
            backward(model, *batch_of(8, seed=step))
            if not attached:
                method.transform_gradients()
            steps.step()
        ways.append(model)
    assert all(torch.equal(a, b) for a, b in zip(*(m.parameters() for m in ways), strict=True))
    untouched = model_of()
    assert not torch.equal(untouched[0].weight, ways[0][0].weight)


def test_evaluating_and_probing_do_not_touch_the_statistics():
    model = model_of()
    method = BNP(model)
    x, y = batch_of(20)
    backward(model, x, y)
    other, labels = batch_of(9, seed=5)
    model(other)
    with torch.no_grad():
        model(other)
    probe(model, nn.CrossEntropyLoss(), (other, labels))
    probe(model, nn.CrossEntropyLoss(), (other, labels), dtype=None)
    method.transform_gradients()
    alone = model_of()
    expected = BNP(alone)
    backward(alone, x, y)
    expected.transform_gradients()
    probe(model, nn.CrossEntropyLoss(), (other, labels), dtype=None, method=method)
    assert torch.equal(model[0].weight.grad, alone[0].weight.grad)
    assert torch.equal(method.layers["2"].variance, expected.layers["2"].variance)


def test_accumulated_batches_count_together():
    x, y = batch_of(20)
    whole, parts = model_of(), model_of()
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
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.frozen, self.norm = nn.Linear(6, 4), nn.Linear(4, 4), nn.LayerNorm(4)
            self.head = nn.Linear(4, 3)
            self.frozen.requires_grad_(False)
            self.unused = nn.Linear(4, 4)

        def forward(self, x):
            return self.head(self.norm(self.frozen(self.embed(x)))).mean(1)

    torch.manual_seed(0)
    model = Model().double()
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
    assert torch.allclose(method.layers["embed"].mu, 0.01 * rows.mean(0), rtol=1e-12)
    assert torch.allclose(model.embed.weight.grad, (raw @ P @ P.T)[:, 1:], rtol=1e-11, atol=1e-14)


def test_state_saves_and_loads():
    model = model_of()
    method, optimizer = BNP(model), torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        backward(model, *batch_of(8, seed=step))
        method.transform_gradients()
        optimizer.step()
    twin = copy.deepcopy(model)
    for module in twin.modules():
        module._forward_hooks.clear()
    restored = BNP(twin)
    restored.load_state_dict(method.state_dict())
    for m, b in ((model, method), (twin, restored)):
        backward(m, *batch_of(8, seed=9))
        b.transform_gradients()
    assert torch.equal(model[0].weight.grad, twin[0].weight.grad)
    with pytest.raises(ConfigError, match="layers"):
        restored.load_state_dict({"nope": {}})


def test_detached_it_leaves_the_model_alone():
    model = model_of()
    method = BNP(model)
    method.detach()
    assert not any(m._forward_hooks for m in model.modules())
    backward(model, *batch_of(4))
    with pytest.raises(CaptureError, match="no forward pass"):
        method.transform_gradients()


def test_a_model_without_layers_is_refused():
    with pytest.raises(ConfigError, match="no dense or convolutional layer"):
        BNP(nn.LayerNorm(3))
