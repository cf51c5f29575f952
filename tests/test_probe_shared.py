"""Parameters that act in more ways than through one layer's pre-activations: the Hessian is still the exact one."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import hesscond
from tests.catalogue.truths import Truth
from tests.truth import packed


class Borrowed(nn.Module):
    """A weight used by its layer, or not, and once more behind its back."""

    def __init__(self, *, called):
        super().__init__()
        self.first, self.lent, self.head, self.called = nn.Linear(5, 5), nn.Linear(5, 5), nn.Linear(5, 3), called

    def forward(self, x):
        h = torch.relu(self.first(x))
        if self.called:
            h = torch.tanh(self.lent(h))
        return self.head(F.linear(h, self.lent.weight))


def tied():
    model = nn.Sequential(nn.Linear(5, 5), nn.ReLU(), nn.Linear(5, 5), nn.ReLU(), nn.Linear(5, 3))
    model[2].weight = model[0].weight
    return model


def tied_convolutions():
    model = nn.Sequential(
        nn.ConvTranspose2d(2, 2, 1), nn.Tanh(), nn.ConvTranspose2d(2, 2, 1, bias=False), nn.Flatten(), nn.Linear(18, 3)
    )
    model[2].weight = model[0].weight
    return model


def tied_to_an_embedding():
    """A language model's output layer: its weight is the embedding's."""
    model = nn.Sequential(nn.Embedding(6, 4), nn.Tanh(), nn.Linear(4, 6))
    model[2].weight = model[0].weight
    return model


def tied_bias():
    model = nn.Sequential(nn.Linear(5, 5), nn.ReLU(), nn.Linear(5, 5), nn.ReLU(), nn.Linear(5, 3))
    model[2].bias = model[0].bias
    return model


def attention():
    """Uses the weight of its output projection without calling it."""

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.attention, self.head = nn.MultiheadAttention(4, 2, batch_first=True), nn.Linear(4, 3)

        def forward(self, x):
            return self.head(self.attention(x, x, x, need_weights=False)[0].mean(1))

    return Block()


def normal(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


Y = torch.tensor([0, 1, 2, 0, 1, 2, 2])
SHARED = {
    "tied": (tied, normal(7, 5), ["0", "2"]),
    "tied-convolutions": (tied_convolutions, normal(7, 2, 3, 3), ["0", "2"]),
    "tied-to-an-embedding": (tied_to_an_embedding, torch.tensor([0, 1, 2, 3, 4, 5, 1]), ["2"]),
    "tied-bias": (tied_bias, normal(7, 5), ["0", "2"]),
    "borrowed": (lambda: Borrowed(called=True), normal(7, 5), ["lent"]),
    "borrowed-never-called": (lambda: Borrowed(called=False), normal(7, 5), ["lent"]),
    "attention": (attention, normal(7, 3, 4), ["attention.out_proj", "head"]),
}


@pytest.mark.parametrize("name", SHARED)
def test_shared_parameters_have_their_exact_hessian(name):
    build, inputs, layers = SHARED[name]
    torch.manual_seed(0)
    model = build().double()
    result = hesscond.probe(model, nn.CrossEntropyLoss(), (inputs, Y), level="layer")
    by_unit = hesscond.probe(model, nn.CrossEntropyLoss(), (inputs, Y))
    everything = Truth(model, nn.CrossEntropyLoss(), (inputs, Y))
    for layer in layers:
        # double backward, wherever the parameters appear
        truth = everything.at(everything.units(layer, by_unit[layer].parameters).flatten())
        n = by_unit[layer].n_params
        assert (result[layer].hessian() - truth).norm() <= 1e-12 * truth.norm()
        for unit in by_unit[layer].units:
            own = slice(unit * n, (unit + 1) * n)
            block = by_unit[layer].hessian(unit=unit)
            assert (block - truth[own, own]).norm() <= 1e-12 * truth.norm()
        eigenvalues = torch.linalg.eigvalsh(truth).abs()
        kappa = result[layer].kappa
        if kappa.resolved:
            nonzero = eigenvalues[eigenvalues > 1e-11 * eigenvalues.max()]
            assert kappa.rank == len(nonzero)
            assert float(kappa) == pytest.approx(float(nonzero.max() / nonzero.min()), rel=1e-6)


def test_a_module_with_two_names_is_left_as_it_was():
    """torch 2.13's functional_call puts its own copies into such a module when it ties weights."""
    torch.manual_seed(0)
    layer = nn.Linear(5, 5)
    model = nn.Sequential(layer, nn.Tanh(), layer, nn.ReLU(), nn.Linear(5, 3)).double()
    weight, bias = layer.weight, layer.bias
    before = weight.clone()
    result = hesscond.probe(model, nn.CrossEntropyLoss(), (normal(7, 5), Y), level="layer")
    assert layer.weight is weight
    assert layer.bias is bias
    assert torch.equal(weight, before)
    assert list(result) == ["0", "4"]

    def loss(theta):
        h = torch.tanh(normal(7, 5) @ theta[:, 1:].T + theta[:, 0])
        h = torch.relu(h @ theta[:, 1:].T + theta[:, 0])
        return F.cross_entropy(model[4](h), Y)

    theta = packed(layer).detach()
    truth = torch.autograd.functional.hessian(lambda v: loss(v.reshape(theta.shape)), theta.flatten())
    assert (result["0"].hessian() - truth).norm() <= 1e-12 * truth.norm()
