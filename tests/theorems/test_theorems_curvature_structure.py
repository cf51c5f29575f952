"""Adam on quadratics, layers, linear networks, width, softmax: against scipy and automatic differentiation."""

import math

import numpy as np
import pytest
import scipy.linalg
import torch
from scipy import integrate, stats
from scipy.optimize import minimize

from hesscond.theorems import verify
from hesscond.theorems.curvature_structure import (
    AdamDiagonal,
    GaussNewtonLinear,
    LayerwiseGaussNewton,
    LinearLayers,
)
from tests.theorems.verdicts import example_of, kappa

IDS = [
    "adam-diagonal",
    "adam-blocks",
    "layerwise-gauss-newton",
    "gauss-newton-linear",
    "width-copies",
    "softmax-row-blocks",
]


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


@pytest.mark.parametrize("seed", range(3))
def test_no_block_diagonal_preconditioner_beats_that_of_two_layers(seed):
    rng = np.random.default_rng(seed)
    layers = [rng.standard_normal((8, 2)), rng.standard_normal((8, 2))]
    Q = np.hstack([LayerwiseGaussNewton().orthonormal(F) for F in layers])
    rho = math.cos(scipy.linalg.subspace_angles(*layers).min())
    own = np.linalg.cond(Q) ** 2
    assert own == pytest.approx((1 + rho) / (1 - rho), rel=1e-9)

    def factor(z):
        return np.linalg.cond(Q @ scipy.linalg.block_diag(z[:4].reshape(2, 2), z[4:].reshape(2, 2))) ** 2

    for start in (np.tile(np.eye(2).ravel(), 2), np.tile(np.eye(2).ravel(), 2) + 0.5 * rng.standard_normal(8)):
        found = minimize(factor, start, method="Nelder-Mead", options={"maxiter": 4000, "maxfev": 4000}).fun
        assert found >= own * (1 - 1e-9)


@pytest.mark.parametrize("seed", range(3))
def test_the_gauss_newton_matrix_is_the_hessian_without_residuals(seed):
    rng = np.random.default_rng(seed)
    weights = tuple(rng.standard_normal(shape) for shape in ((3, 2), (3, 3), (2, 3)))
    network = LinearLayers(weights, rng.standard_normal((6, 2)))
    x, shapes = torch.from_numpy(network.inputs), [W.shape for W in weights]

    def output(flat):
        h = x
        for part, shape in zip(flat.split([m * n for m, n in shapes]), shapes, strict=True):
            h = h @ part.view(shape).T
        return h

    theta = torch.from_numpy(np.concatenate([W.ravel() for W in weights]))
    target = output(theta)
    H = torch.autograd.functional.hessian(lambda t: ((output(t) - target) ** 2).sum(1).mean() / 2, theta).numpy()
    J = network.jacobian()
    assert np.allclose(J.T @ J, H)
    low, high = GaussNewtonLinear().kappa(network)
    values = np.sort(np.linalg.eigvalsh(H))[-4:]
    assert low * (1 - 1e-9) <= values[-1] / values[0] <= high * (1 + 1e-9)


def test_two_copies_of_the_example():
    example = example_of(verify("width-copies", trials=1), "κ")
    (v, w), x, r = (torch.tensor(row, dtype=torch.float64) for row in example.matrix)

    def output(theta):
        a = x[:, None] * theta[:, 1]
        return ((a + a**2) * theta[:, 0]).mean(1)

    kappas = []
    for units in (1, 2):
        theta = torch.stack([v, w]).repeat(units, 1)
        target = output(theta) - r
        H = torch.autograd.functional.hessian(
            lambda flat, target=target: ((output(flat.view(-1, 2)) - target) ** 2).sum() / 2, theta.flatten()
        )
        kappas.append(kappa(H.numpy()))
    assert example.factor == pytest.approx(kappas[1] / kappas[0], rel=1e-5)


def test_the_competing_classes_of_the_example():
    example = example_of(verify("softmax-row-blocks", trials=1), "any weights")
    logits = torch.tensor(example.matrix[0], dtype=torch.float64).log()

    def loss(w):
        return torch.nn.functional.cross_entropy(w[None], torch.tensor([0]))

    H = torch.autograd.functional.hessian(loss, logits)
    assert example.factor == pytest.approx(float(H[0, 1].abs() / H[0, 0]) * len(logits) / 2)
