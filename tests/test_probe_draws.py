"""Random numbers that a model or its loss draws: the same in every pass, or one sentence."""

import random
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import hesscond
from hesscond.errors import CaptureError
from tests.catalogue.parts import Net
from tests.truth import network_truth

torch.manual_seed(0)
BATCH = torch.randn(12, 4, dtype=torch.float64), torch.randint(0, 3, (12,))
RNG, PYTHON, SOBOL = np.random.default_rng(4), random.Random(5), torch.quasirandom.SobolEngine(1, True, seed=6)


def network(forward=None):
    torch.manual_seed(1)
    forward = forward or (lambda m, x: m.b(torch.tanh(m.a(x))))
    return Net(forward, a=nn.Linear(4, 4), b=nn.Linear(4, 3)).double()


def helper():
    return float(RNG.random())


def from_closure():
    own = torch.Generator().manual_seed(3)
    return lambda o, t: F.cross_entropy(o * (1 + torch.rand([], generator=own, dtype=torch.float64)), t)


def scaled(o, t, *, generator):
    return F.cross_entropy(o * (1 + generator.random()), t)


LOSSES = {
    "closure": from_closure(),
    "global": lambda o, t: F.cross_entropy(o * (1 + RNG.random()), t),
    "helper": lambda o, t: F.cross_entropy(o * (1 + helper()), t),
    "nested": lambda o, t: F.cross_entropy(o * (1 + (lambda: PYTHON.random())()), t),
    "partial": partial(lambda o, t: scaled(o, t, generator=PYTHON)),
    "engine": lambda o, t: F.cross_entropy(o * (1 + SOBOL.draw(1).double()), t),
    "numpy": lambda o, t: F.cross_entropy(o * (1 + np.random.rand()), t),  # noqa: NPY002
    "python": lambda o, t: F.cross_entropy(o * (1 + random.random()), t),
}


@pytest.mark.parametrize("name", LOSSES)
def test_draws_are_the_same_in_every_pass(name):
    loss, model = LOSSES[name], network()
    result = hesscond.probe(model, loss, BATCH, level="network")["network"]
    again = hesscond.probe(model, loss, BATCH, level="network")["network"]
    # the generator is as it was, so that the truth draws the same
    true = network_truth(model, loss, BATCH)
    assert torch.equal(result.hessian(), again.hessian())
    assert torch.allclose(result.hessian(), true, rtol=1e-9, atol=1e-12)


NOISE = {
    "randn": lambda h: h * torch.randn(h.shape),
    "normal": lambda h: h + torch.normal(0.0, 0.5, h.shape),
    "uniform_": lambda h: h * torch.empty_like(h).uniform_(0.5, 2),
    "bernoulli_": lambda h: h * h.new_empty(len(h), 1).bernoulli_(0.7),
    "bernoulli_ of probabilities": lambda h: h * torch.empty_like(h).bernoulli_(torch.sigmoid(h.detach())),
    "bernoulli": lambda h: h * torch.bernoulli(torch.sigmoid(h.detach())),
    "dropout": lambda h: F.dropout(h, 0.3),
    "dropout2d in place": lambda h: F.dropout2d((2 * h)[..., None, None], 0.3, True, True)[..., 0, 0],
    "all dropped": lambda h: h + F.dropout(h, 1.0),
}


@pytest.mark.share(2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", NOISE)
def test_noise_is_that_of_the_users_own_run(name, dtype):
    model = network(lambda m, x: m.b(torch.tanh(NOISE[name](m.a(x))))).to(dtype)
    x, state = BATCH[0].to(dtype), torch.get_rng_state()
    result = hesscond.probe(model, F.cross_entropy, (x, BATCH[1]), level="network")["network"]
    torch.set_rng_state(state)
    true = network_truth(model, F.cross_entropy, (x, BATCH[1]))
    assert torch.allclose(result.hessian(), true.double(), rtol=1e-4, atol=1e-6)


def test_a_float32_model_draws_the_numbers_of_its_own_run():
    """LayerDrop by torch.rand([]), as in Wav2Vec2; float64 would draw others."""

    def forward(m, x):
        for layer in m.layers:
            if torch.rand([]) < 0.5:
                x = torch.tanh(layer(x)) * torch.rand(4)
        return m.b(x)

    def made():
        torch.manual_seed(1)
        return Net(forward, layers=nn.ModuleList(nn.Linear(4, 4) for _ in range(6)), b=nn.Linear(4, 3))

    model, twin = made(), made().double()
    state = torch.get_rng_state()
    result = hesscond.probe(model, F.cross_entropy, (BATCH[0].float(), BATCH[1]), level="network")["network"]
    torch.set_rng_state(state)
    assert torch.allclose(
        result.hessian(),
        network_truth(twin, F.cross_entropy, (BATCH[0].float().double(), BATCH[1])),
        rtol=1e-9,
        atol=1e-12,
    )


def unseeded():
    return np.random.default_rng().random()


COUNT = iter(range(10**9))
UNKNOWN = {
    "a generator made in every pass": lambda m, x: m.b(torch.tanh(m.a(x)) * (1 + unseeded())),
    "a counter": lambda m, x: m.b(torch.tanh(m.a(x)) * (1 + next(COUNT))),
}


@pytest.mark.parametrize("level", ["unit", "layer", "network"])
@pytest.mark.parametrize("name", UNKNOWN)
def test_other_draws_in_every_pass_are_refused(name, level):
    with pytest.raises(
        CaptureError, match=r"another loss every time it is run \([\d.]+, [\d.]+\): it keeps a state, or"
    ):
        hesscond.probe(network(UNKNOWN[name]), F.cross_entropy, BATCH, level=level)


@pytest.mark.parametrize("level", ["unit", "layer"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_cast_that_rounds_widens_intervals_and_is_not_refused(dtype, level):
    model = network(lambda m, x: m.b(torch.tanh(m.a(x)).to(dtype).to(x.dtype)))
    exact = hesscond.probe(network(), F.cross_entropy, BATCH, level=level)
    result = hesscond.probe(model, F.cross_entropy, BATCH, level=level)
    assert sorted(result) == ["a", "b"]
    assert str(dtype).removeprefix("torch.") in result.precision
    for name, own in result.items():
        for kappa, true in zip(own.conditions, exact[name].conditions, strict=True):
            assert kappa.lower <= true.value <= kappa.upper
            assert kappa.width > 1e-4
