"""Whatever a forward pass changes is as before, and every evaluation starts from the same state."""

import copy
import functools
import random
from collections import deque
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

import hesscond
from hesscond.errors import CaptureError
from hesscond.problem.untouched import RandomState, untouched
from tests.catalogue.wrong_backward import stale_tanh
from tests.truth import network_truth

GENERATOR = torch.Generator().manual_seed(0)
X, Y = torch.randn(12, 5, generator=GENERATOR), torch.arange(12) % 3
LOSS = nn.CrossEntropyLoss()
DRAWS = {
    "torch": lambda own: torch.rand((), dtype=torch.float32).double(),
    "numpy": lambda own: np.random.rand(),  # noqa: NPY002
    "python": lambda own: random.random(),
    "own torch": lambda own: torch.rand((), generator=own["torch"], dtype=torch.float32).double(),
    "own numpy": lambda own: own["numpy"].random(),
    "own legacy": lambda own: own["legacy"].rand(),
    "own python": lambda own: own["python"].random(),
}


class Stateful(nn.Module):
    """Everything a forward pass can leave behind, and an output that depends on it."""

    def __init__(self, draw):
        super().__init__()
        self.first, self.second, self.draw = nn.Linear(5, 4), nn.Linear(4, 3), draw
        self.register_buffer("counted", torch.zeros(()))
        self.calls, self.seen, self.names, self.queue = 0, [], set(), deque([1], maxlen=2)
        self.average, self.cache, self.holder = torch.ones(()), {"factor": 1.0}, SimpleNamespace(value=1.0)
        self.generators = {
            "torch": torch.Generator().manual_seed(5),
            "numpy": np.random.default_rng(5),
            "legacy": np.random.RandomState(5),
            "python": random.Random(5),
        }

    def forward(self, x):
        self.calls += 1
        self.counted += 1
        self.seen.append(len(self.seen))
        self.names.add(self.calls)
        self.queue.append(self.calls)
        self.average.mul_(1.1)
        self.cache["factor"] *= 1.2
        self.cache[self.calls] = x
        self.holder.value += 0.5
        self.late = self.calls
        self.train(not self.training)
        self.register_forward_hook(lambda *_: None)
        scale = self.calls * (1 + self.counted) + len(self.seen) + len(self.names) + sum(self.queue)
        scale = scale * self.average * self.cache["factor"] * self.holder.value * (1 + self.draw(self.generators))
        return self.second(torch.tanh(self.first(x) * scale / 10))


def make(draw):
    torch.manual_seed(1)
    random.seed(2)
    np.random.seed(3)  # noqa: NPY002
    return Stateful(DRAWS[draw])


def state(model):
    """All of it, as text."""
    own = {name: value for name, value in vars(model).items() if not name.startswith("_") and name != "generators"}
    g, legacy = model.generators, model.generators["legacy"]
    generators = g["torch"].get_state().tolist(), g["numpy"].bit_generator.state, g["python"].getstate()
    everywhere = torch.get_rng_state().tolist(), random.getstate(), numpy_state(np.random), numpy_state(legacy)
    tensors = {name: tensor.tolist() for name, tensor in model.state_dict().items()}
    return repr([own, tensors, generators, everywhere, list(model._forward_hooks)])


def numpy_state(generator):
    return [np.asarray(part).tolist() for part in generator.get_state()]


def true_hessian(model, batch=(X, Y)):
    """In all parameters, from one forward pass of the model in its present state, which it spoils."""
    return network_truth(model.double(), LOSS, (batch[0].double(), batch[1]))


@pytest.mark.share(4)
@pytest.mark.parametrize("draw", DRAWS)
def test_every_evaluation_sees_the_state_that_there_is_and_leaves_it(draw):
    model, expected = make(draw), true_hessian(make(draw))
    make(draw)  # the global generators as they were
    before = state(model)
    H = hesscond.HessianOperator(model, LOSS, (X, Y))
    torch.testing.assert_close(H.to_dense(), expected, rtol=1e-9, atol=1e-12)
    for level in ("unit", "layer", "network"):
        first, second = (hesscond.probe(model, LOSS, (X, Y), level=level) for _ in range(2))
        for name in first:
            unit = {"unit": 1} if level == "unit" else {}
            assert torch.equal(first[name].hessian(**unit), second[name].hessian(**unit))
    torch.testing.assert_close(
        hesscond.probe(model, LOSS, (X, Y), level="layer")["second"].hessian().diagonal().sort().values,
        expected[-15:, -15:].diagonal().sort().values,
    )
    assert state(model) == before


def test_every_batch_of_a_stream_sees_the_same_state():
    model = make("own python")
    expected = sum(true_hessian(make("own python"), (X[rows], Y[rows])) for rows in (slice(6), slice(6, 12))) / 2
    before = state(model)
    stream = [(X[:6], Y[:6]), (X[6:], Y[6:])]
    H = hesscond.HessianOperator(model, LOSS, stream, memory=1)
    torch.testing.assert_close(H.to_dense(), expected, rtol=1e-9, atol=1e-12)
    assert state(model) == before


class Augmented(torch.utils.data.Dataset):
    """Samples with noise from the generators of numpy and Python, anew each time."""

    def __len__(self):
        return 12

    def __getitem__(self, index):
        return X[index] + np.random.rand() + random.random(), Y[index]  # noqa: NPY002


def test_a_data_set_that_draws_from_numpy_and_python_is_read_again_the_same():
    make("torch")
    model = nn.Sequential(nn.Linear(5, 3))
    loader = torch.utils.data.DataLoader(Augmented(), batch_size=4)
    batch = next(iter(torch.utils.data.DataLoader(Augmented(), batch_size=12)))
    make("torch")
    before = RandomState.now([])
    # too little memory to keep the batches
    H = hesscond.HessianOperator(model, LOSS, loader, memory=300)
    assert H.problem.batches._kept is None
    found = H.to_dense()
    torch.testing.assert_close(found, true_hessian(copy.deepcopy(model), batch), rtol=1e-6, atol=1e-9)
    assert repr(RandomState.now([]).host) == repr(before.host)


def test_plain_tensors_written_in_inference_mode_and_gradients_are_left():
    model = nn.Sequential(nn.Linear(5, 3))
    LOSS(model(X), Y).backward()
    gradient = model[0].weight.grad
    with untouched(model, LOSS, "anything"):
        model[0].weight.grad = None
        model[0].bias.requires_grad_(False)
        model.extra = nn.Linear(2, 2)
        del model[0].in_features
    assert model[0].weight.grad is gradient
    assert model[0].bias.requires_grad
    assert not hasattr(model, "extra")
    assert model[0].in_features == 5


def test_statistics_that_are_written_without_being_counted():
    model = nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4)).train()
    before = copy.deepcopy(model.state_dict())
    with untouched(model):
        model(X)
        assert not torch.equal(model[1].running_mean, before["1.running_mean"])
        model[1].running_var.resize_(7)
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)


@pytest.mark.parametrize("what", ["weight", "grad"])
def test_a_loss_that_writes_to_the_model(what):
    """A gradient cannot be given back as it was; a weight is a copy, also in the closure of the loss."""
    model = nn.Sequential(nn.Linear(5, 3))
    LOSS(model(X), Y).backward()
    kept = {"weight": model[0].weight, "grad": model[0].weight.grad}[what]
    before = kept.detach().clone()

    def loss(output, target):
        with torch.no_grad():
            kept.mul_(0.5)
        return LOSS(output, target)

    if what == "grad":
        with pytest.raises(CaptureError, match=r"gradient of '0\.weight'") as caught:
            hesscond.HessianOperator(model, loss, (X, Y))
        assert "\n" not in str(caught.value)
        return
    found = hesscond.HessianOperator(model, loss, (X, Y)).to_dense()
    assert torch.equal(kept, before)
    assert torch.equal(found, hesscond.HessianOperator(model, LOSS, (X, Y)).to_dense())


def test_errors_of_the_model_keep_the_state_and_are_its_own():
    model = make("numpy")
    before = state(model)
    with pytest.raises(ZeroDivisionError):
        hesscond.probe(model, lambda output, target: 1 / 0, (X, Y))
    assert state(model) == before


TABLES = {}


class Keeping(nn.Module):
    """A layer whose weight, or a table in the precision of its inputs, is kept by a function or in a global."""

    def __init__(self, how):
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.how, self.calls = nn.Linear(5, 4), nn.Linear(4, 3), how, np.zeros(1)
        self.closure = functools.cache(lambda: self.a.weight.tanh())
        TABLES.clear()

    @functools.lru_cache(None)  # noqa: B019 - as people write it
    def method(self):
        return self.a.weight.tanh()

    def weight(self, x):
        if self.how == "table":
            TABLES.setdefault("ones", torch.ones(5).to(x))
            return self.a.weight.tanh() * TABLES["ones"]
        return {"method": self.method, "closure": self.closure, "nothing": self.a.weight.tanh}[self.how]()

    def forward(self, x):
        self.calls[0] += 1
        return self.b(torch.tanh(nn.functional.linear(x, self.weight(x), self.a.bias)))


@pytest.mark.parametrize("level", ["unit", "layer", "network"])
@pytest.mark.parametrize("how", ["method", "closure", "table"])
def test_what_functions_keep_from_call_to_call_is_left(how, level):
    batch = X, torch.arange(len(X)) % 3
    expected = hesscond.probe(Keeping("nothing"), LOSS, batch, level=level)
    model = Keeping(how)
    result = hesscond.probe(model, LOSS, batch, level=level)
    for name in expected:
        for unit in expected[name].units if level == "unit" else [None]:
            of = () if level == "network" else (unit,)
            torch.testing.assert_close(result[name].hessian(*of), expected[name].hessian(*of))
    assert not model.calls
    LOSS(model(X), batch[1]).backward()
    assert model.a.weight.grad is not None


@pytest.mark.parametrize("level", ["unit", "layer", "network"])
def test_the_search_for_a_wrong_derivative_leaves_the_random_state(level):
    class Dropping(nn.Sequential):
        def forward(self, x):
            return self[1](nn.functional.dropout(stale_tanh(self[0](x)), 0.3)) * (1 + random.random())

    torch.manual_seed(0)
    model, before = Dropping(nn.Linear(5, 4), nn.Linear(4, 3)).double(), RandomState.now([])
    hesscond.probe(model, LOSS, (X.double(), torch.arange(len(X)) % 3), level=level)
    assert torch.equal(torch.get_rng_state(), before.cpu)
    assert repr(RandomState.now([]).host) == repr(before.host)
