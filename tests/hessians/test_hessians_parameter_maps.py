"""P of factors that mix parameters: their rounding is not taken for curvature."""

import pytest
import torch
from torch import nn

import hesscond
from hesscond.methods import parse


@pytest.mark.parametrize("method", ["soap", "shampoo", "kfac", "muon"])
def test_a_dead_feature_stays_one_in_coordinates_that_mix_features(method):
    """H is singular: κ is that of the eigenvalues that are left, which a dense decomposition knows as well.

    The product of a column of zeros with an eigenvector is round-off, and P may be large there.
    """
    generator = torch.Generator().manual_seed(1)
    layer = nn.Linear(9, 4)
    with torch.no_grad():
        layer.weight.copy_(torch.randn(4, 9, generator=generator) / 3)
        layer.bias.zero_()
    model, loss_fn = nn.Sequential(layer), nn.CrossEntropyLoss()
    x = torch.randn(40, 9, generator=generator).relu()
    x[:, 2] = 0.0
    targets = torch.randint(4, (40,), generator=generator)
    at_work = parse(method).create(model)
    optimizer = at_work.optimizer(0.01)
    for _ in range(3):
        optimizer.zero_grad()
        loss = loss_fn(model(x), targets)
        at_work.observe(loss)
        loss.backward()
        at_work.transform_gradients()
        optimizer.step()
    plain = hesscond.probe(model, loss_fn, (x, targets), level="layer")["0"].kappa
    own = hesscond.probe(model, loss_fn, (x, targets), level="layer", method=at_work)["0"]
    # three of four units, since softmax knows no common shift, and nine of ten features with the bias
    assert plain.rank == own.kappa.rank == 27
    assert own.kappa.resolved
    values = torch.linalg.eigvalsh(own.hessian()).abs().sort(descending=True).values
    assert float(values[27]) < 1e-10 * float(values[26])
    assert own.kappa.value == pytest.approx(float(values[0] / values[26]), rel=1e-5)
