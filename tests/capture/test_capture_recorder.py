"""Captures of training passes."""

from copy import deepcopy
from functools import partial

import pytest
import torch
from torch import nn

from hesscond.capture import Recorder

LOSSES = {
    "cross entropy": nn.CrossEntropyLoss(),
    "weighted, smoothed": nn.CrossEntropyLoss(weight=torch.tensor([1.0, 0.5, 2.0, 3.0]), label_smoothing=0.1),
    "sum, some ignored": nn.CrossEntropyLoss(reduction="sum", ignore_index=2),
    "probabilities": nn.CrossEntropyLoss(),
    "squares": nn.MSELoss(),
}


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("name", LOSSES)
def test_the_curvature_of_a_recorded_pass_is_that_of_its_loss(name, bias):
    generator = torch.Generator().manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 7), nn.ReLU(), nn.Linear(7, 4, bias=bias))
    recorder, inputs = Recorder({"2": model[2]}, armed=True), torch.randn(6, 5, generator=generator)
    target = torch.randint(4, (6,), generator=generator)
    if name in ("probabilities", "squares"):
        target = torch.rand(6, 4, generator=generator)
    output, units = model(inputs), (0, 3)
    found = recorder.captures(output, target, LOSSES[name], {"2": units})["2"]
    assert torch.equal(found.h, model[:2](inputs).double())
    target = target.double() if target.is_floating_point() else target
    loss = partial(deepcopy(LOSSES[name]).double(), target=target)
    H = torch.func.hessian(loss)(output.double())
    roots = torch.stack([torch.stack([H[n, i, n, i] for n in range(6)]) for i in units], 1)
    torch.testing.assert_close(found.curvature.root.square(), roots)
