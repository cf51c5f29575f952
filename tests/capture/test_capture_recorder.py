"""Captures of training passes that are made together against those made one by one."""

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
def test_captures_made_together_are_those_made_alone_digit_for_digit(name, bias):
    generator = torch.Generator().manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 7), nn.ReLU(), nn.Linear(7, 4, bias=bias))
    recorder = Recorder({"2": model[2]}, armed=True)
    passes = []
    for _ in range(5):
        inputs = torch.randn(6, 5, generator=generator)
        target = torch.randint(4, (6,), generator=generator)
        if name in ("probabilities", "squares"):
            target = torch.rand(6, 4, generator=generator)
        passes.append(recorder.recorded(model(inputs), target))
    in_double, units = deepcopy(LOSSES[name]).double(), {"2": (0, 3)}
    together = passes[0].captures(passes, LOSSES[name], units)
    assert len(together) == len(passes)
    for one, captures in zip(passes, together, strict=True):
        alone, found = one.captures([one], LOSSES[name], units)[0]["2"], captures["2"]
        assert torch.equal(found.H_hat, alone.H_hat)
        assert torch.equal(found.curvature.root, alone.curvature.root)
        assert found.loses_entries == alone.loses_entries
        # the Hessian of the loss of this batch alone, in the outputs
        output = one.output.double()
        target = one.target.double() if one.target.is_floating_point() else one.target
        H = torch.func.hessian(partial(in_double, target=target))(output)
        roots = torch.stack([torch.stack([H[n, i, n, i] for n in range(6)]) for i in units["2"]], 1)
        torch.testing.assert_close(found.curvature.root.square(), roots)
