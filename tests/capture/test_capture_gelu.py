"""GELU with the digits of its tail: value and derivatives against mpmath, and what a probe finds in it."""

import mpmath
import pytest
import torch
from torch import nn

import hesscond
from hesscond.problem.formulas import gelu
from tests.truth import unit_truth


@pytest.mark.parametrize("x", [-37.0, -20.0, -9.0, -7.0, -6.0, -2.5, -1e-3, 0.5, 4.0, 12.0])
def test_value_and_derivatives(x):
    at = torch.tensor(x, dtype=torch.float64, requires_grad=True)
    value = gelu(at)
    (first,) = torch.autograd.grad(value, at, create_graph=True)
    (second,) = torch.autograd.grad(first, at)
    with mpmath.workdps(500):
        t = mpmath.mpf(x)
        below, density = mpmath.erfc(-t / mpmath.sqrt(2)) / 2, mpmath.npdf(t)
        truth = t * below, below + t * density, density * (2 - t**2)
        for found, wanted in zip((value, first, second), truth, strict=True):
            assert abs(found.item() - wanted) <= 1e-15 * (1 + x**2) * abs(wanted)


def test_null_directions_are_found_behind_a_tail():
    """Features that sum up to zero, as layer normalization gives them, and some pre-activations below −6."""
    generator = torch.Generator().manual_seed(0)
    model = nn.Sequential(nn.LayerNorm(5), nn.Linear(5, 4), nn.GELU(), nn.Linear(4, 3)).double()
    with torch.no_grad():
        for parameter in model[1:].parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
        model[1].bias -= 4
    batch = torch.randn(40, 5, generator=generator, dtype=torch.float64), torch.arange(40) % 3
    assert (model[:2](batch[0]) < -6).any(0).all()
    found = hesscond.probe(model, nn.CrossEntropyLoss(), batch, ["1"])["1"]
    for unit, kappa in enumerate(found.kappa):
        truth = unit_truth(model, nn.CrossEntropyLoss(), batch, "1", unit)
        sizes = torch.linalg.eigvalsh(truth).abs().sort().values
        assert (kappa.rank, kappa.nullity, kappa.resolved) == (5, 1, True)
        assert kappa.value == pytest.approx(float(sizes[-1] / sizes[1]), rel=1e-6)
        torch.testing.assert_close(found.hessian(unit=unit), truth, rtol=1e-10, atol=1e-10 * float(sizes[-1]))


@pytest.mark.parametrize("approximate", ["none", "tanh"])
def test_a_model_is_the_function_that_it_is(approximate):
    model = nn.Sequential(nn.Linear(3, 4), nn.GELU(approximate), nn.Linear(4, 2))
    batch = torch.linspace(-3, 3, 24).view(8, 3), torch.arange(8) % 2
    found = hesscond.probe(model, nn.CrossEntropyLoss(), batch, ["0"])["0"]
    truth = unit_truth(model, nn.CrossEntropyLoss(), batch, "0", 0)
    torch.testing.assert_close(found.hessian(unit=0), truth, rtol=1e-10, atol=1e-12)
