"""Softmax: against automatic differentiation."""

import pytest
import torch

from hesscond.theorems import verify
from tests.theorems.verdicts import example_of


def test_the_competing_classes_of_the_example():
    example = example_of(verify("softmax-row-blocks", trials=1), "any weights")
    logits = torch.tensor(example.matrix[0], dtype=torch.float64).log()

    def loss(w):
        return torch.nn.functional.cross_entropy(w[None], torch.tensor([0]))

    H = torch.autograd.functional.hessian(loss, logits)
    assert example.factor == pytest.approx(float(H[0, 1].abs() / H[0, 0]) * len(logits) / 2)
