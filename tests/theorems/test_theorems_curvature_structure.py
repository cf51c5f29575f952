"""Adam on quadratics, softmax: against scipy and automatic differentiation."""

import math

import numpy as np
import pytest
import torch
from scipy import integrate, stats

from hesscond.theorems import verify
from hesscond.theorems.curvature_structure import AdamDiagonal
from tests.theorems.verdicts import example_of


@pytest.mark.parametrize("d", [2, 7, 50])
@pytest.mark.parametrize("delta", [0.02, 0.1, 0.5])
def test_the_bound_for_a_gaussian_start_holds_with_the_exact_probability(d, delta):
    """P(max|x_i| ≤ b min|x_i|) = d ∫ f(s) (F(bs) − F(s))^(d−1) ds, f and F of |x_i|."""
    b = 2 * d / delta * math.sqrt(2 / math.pi) * math.sqrt(2 * math.log(2 * d / delta))
    law = stats.halfnorm
    within, _ = integrate.quad(lambda s: d * law.pdf(s) * (law.cdf(b * s) - law.cdf(s)) ** (d - 1), 0, 1, limit=500)
    beyond, _ = integrate.quad(lambda s: d * law.pdf(s) * (law.cdf(b * s) - law.cdf(s)) ** (d - 1), 1, 12)
    assert 1 - delta <= within + beyond <= 1 + 1e-6


def test_the_preconditioner_is_that_of_the_first_step_of_adam():
    g = np.array([3.0, -1e-3, 20.0])
    p = torch.zeros(3, dtype=torch.float64, requires_grad=True)
    p.grad = torch.from_numpy(g)
    torch.optim.Adam([p], lr=0.1, betas=(0.0, 0.999), eps=0.0).step()
    assert np.allclose(p.detach().numpy(), -0.1 * AdamDiagonal().preconditioner(g) * g)


@pytest.mark.parametrize("most", [1.5, 30.0, 1e4])
def test_gradient_descent_from_that_start_is_no_faster(most):
    """The iteration itself, over a grid of step sizes."""
    values = np.array([most, 1.0])
    for eta in np.append(np.linspace(0.01, 3, 40), 1.0) * 2 / (most + 1):
        theta = (np.array([1.0, most]) / (1 + most) / values) ** 0.5
        losses = []
        for _ in range(6):
            losses.append(values @ theta**2)
            theta = theta - eta * values * theta
        ratios = np.array(losses[1:]) / losses[:-1]
        assert (ratios >= (1 - 2 / (most + 1)) ** 2 * (1 - 1e-12)).all()


def test_the_competing_classes_of_the_example():
    example = example_of(verify("softmax-row-blocks", trials=1), "any weights")
    logits = torch.tensor(example.matrix[0], dtype=torch.float64).log()

    def loss(w):
        return torch.nn.functional.cross_entropy(w[None], torch.tensor([0]))

    H = torch.autograd.functional.hessian(loss, logits)
    assert example.factor == pytest.approx(float(H[0, 1].abs() / H[0, 0]) * len(logits) / 2)
