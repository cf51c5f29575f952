"""Parameters that act in more ways than through one layer's pre-activations: the Hessian is still the exact one."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import hesscond
from tests.catalogue import case
from tests.catalogue.truths import Truth
from tests.truth import packed


def normal(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


Y = torch.tensor([0, 1, 2, 0, 1, 2, 2])
#: Cases, and their layers whose parameters act in several ways.
SHARED = {
    "tied": ["0", "2"],
    "tied-convolutions": ["0", "2"],
    "tied-to-an-embedding": ["2"],
    "tied-bias": ["0", "2"],
    "borrowed": ["lent"],
    "borrowed-never-called": ["lent"],
    "attention-by-its-weight": ["attention.out_proj", "head"],
}


@pytest.mark.parametrize("name", SHARED)
def test_shared_parameters_have_their_exact_hessian(name):
    model, loss_fn, batch = case(name).make()
    result = hesscond.probe(model, loss_fn, batch, level="layer")
    by_unit = hesscond.probe(model, loss_fn, batch)
    everything = Truth(model, loss_fn, batch)
    for layer in SHARED[name]:
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
