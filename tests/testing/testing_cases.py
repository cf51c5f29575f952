"""Layers whose condition numbers are known by hand."""

import numpy as np
import torch
from torch import nn


def least_squares(scales, targets=1, samples=40):
    """A linear layer under mean squared error, and κ of its Hessian 2 ĤᵀĤ / (N m) by numpy."""
    torch.manual_seed(0)
    scales = torch.tensor(scales, dtype=torch.float64)
    inputs = torch.randn(samples, len(scales), dtype=torch.float64) * scales
    model = nn.Linear(len(scales), targets).double()
    extended = np.hstack([np.ones((samples, 1)), inputs.numpy()])
    singular = np.linalg.svd(extended, compute_uv=False)
    truth = float((singular[0] / singular[-1]) ** 2)
    return model, nn.MSELoss(), (inputs, torch.randn(samples, targets, dtype=torch.float64)), truth


def with_a_dead_unit():
    """Two layers; unit 1 of the first is never active, so that its Hessian is zero."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 2), nn.ReLU(), nn.Linear(2, 1)).double()
    with torch.no_grad():
        model[0].bias.copy_(torch.tensor([1.0, -1e6]))
    return model, nn.MSELoss(), (torch.randn(30, 3).double(), torch.randn(30, 1).double())
