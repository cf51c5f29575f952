"""PREC: updates under regularization, and what diagonal preconditioners equilibrate. CWO: projected steps."""

import numpy as np
import pytest
import torch
from scipy.optimize import minimize

from hesscond.theorems import verify
from hesscond.theorems.constrained_weights import nearest, projected_step
from tests.theorems.verdicts import check_known, example_of, kappa, tallies


def test_the_counterexample_to_the_minus():
    g, z, d = (
        torch.tensor(row, dtype=torch.float64) for row in example_of(verify("prec-l2-p", trials=1), "minus").matrix
    )
    p, M = d * z, torch.diag(d**2)
    at = z.clone().requires_grad_()
    objective = g @ (d * at) + (d * at) @ (d * at)
    (gradient,) = torch.autograd.grad(objective, at)
    stepped = d * (z - gradient)
    assert torch.equal(stepped, p - M @ (g + 2 * p))
    assert not torch.equal(stepped, p - M @ (g - 2 * p))


@pytest.mark.slow
def test_adaptive():
    verdict = check_known("prec-adaptive", trials=80, seldom=("row equilibration",))
    found = tallies(verdict)
    assert found["Jacobi"].holds > 70
    assert 0.1 < found["Jacobi"].worst < 1
    example = example_of(verdict, "row equilibration")
    H = np.array(example.matrix, dtype=float)

    def scaled(weights):
        return kappa(H / np.sqrt(np.multiply.outer(weights, weights)))

    by_row = scaled(np.linalg.norm(H, axis=1))
    assert by_row / scaled(np.diag(H)) / 2**0.5 == pytest.approx(example.factor, rel=1e-6)


@pytest.mark.parametrize("seed", range(3))
def test_the_projected_step_is_what_a_constrained_solver_finds(seed):
    rng = np.random.default_rng(seed)
    n, c, alpha = int(rng.integers(2, 12)), float(rng.uniform(0.5, 4)), 0.3
    w = rng.standard_normal(n)
    w = (w - w.mean()) * c**0.5 / np.linalg.norm(w - w.mean())
    gradient = rng.standard_normal(n)
    target = w - alpha * gradient
    constraints = [
        {"type": "eq", "fun": lambda v: v @ v - c, "jac": lambda v: 2 * v},
        {"type": "eq", "fun": lambda v: v.sum(), "jac": lambda v: np.ones(n)},
    ]
    found = minimize(
        lambda v: (v - target) @ (v - target),
        w + 0.01 * rng.standard_normal(n),
        jac=lambda v: 2 * (v - target),
        constraints=constraints,
        method="SLSQP",
        options={"ftol": 1e-14, "maxiter": 300},
    )
    assert np.allclose(projected_step(w, gradient, alpha, c), found.x, atol=1e-5)


def test_projections_that_are_none():
    rng = np.random.default_rng(0)
    w = np.array([1.0, -1.0, 0.0])
    assert nearest(rng, w, np.ones(3), 2.0).status == "not-applicable"
    assert nearest(rng, w, 3 * w, 2.0).status == "holds"
    assert nearest(rng, w * (1 + 1e-11), 3 * w, 2.0).status == "unresolved"
