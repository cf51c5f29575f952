"""Adam on quadratics, softmax: against scipy and automatic differentiation."""

import numpy as np
import pytest
import torch

from hesscond.theorems import verify
from hesscond.theorems.curvature_structure import AdamDiagonal
from tests.theorems.verdicts import example_of


def test_the_preconditioner_is_that_of_the_first_step_of_adam():
    g = np.array([3.0, -1e-3, 20.0])
    p = torch.zeros(3, dtype=torch.float64, requires_grad=True)
    p.grad = torch.from_numpy(g)
    torch.optim.Adam([p], lr=0.1, betas=(0.0, 0.999), eps=0.0).step()
    assert np.allclose(p.detach().numpy(), -0.1 * AdamDiagonal().preconditioner(g) * g)


def test_the_competing_classes_of_the_example():
    example = example_of(verify("softmax-row-blocks", trials=1), "any weights")
    logits = torch.tensor(example.matrix[0], dtype=torch.float64).log()

    def loss(w):
        return torch.nn.functional.cross_entropy(w[None], torch.tensor([0]))

    H = torch.autograd.functional.hessian(loss, logits)
    assert example.factor == pytest.approx(float(H[0, 1].abs() / H[0, 0]) * len(logits) / 2)
