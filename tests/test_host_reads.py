"""How often numbers are read from tensors: on a GPU each time waits for it, so loops must not do so."""

from collections import Counter
from contextlib import contextmanager

import pytest
import torch

from hesscond.data import load
from hesscond.runs import RunLog
from hesscond.study import RunPlan, StudyConfig, load_study
from hesscond.study.runner import Training

READS = ("item", "tolist", "numpy", "cpu", "nonzero", "__bool__", "__float__", "__int__", "__index__")


@contextmanager
def counted(monkeypatch):
    """Counts reads of tensors; one within another counts once."""
    found, depth = Counter(), [0]

    def counting(name, own):
        def read(self, *args, **kwargs):
            found[name] += depth[0] == 0
            depth[0] += 1
            try:
                return own(self, *args, **kwargs)
            finally:
                depth[0] -= 1

        return read

    with monkeypatch.context() as patched:
        for name in READS:
            patched.setattr(torch.Tensor, name, counting(name, getattr(torch.Tensor, name)))
        yield found


@pytest.mark.parametrize("method", ["vanilla", "bnp", "whitening", "equilibration", "sphere", "batchnorm"])
def test_a_training_step_reads_its_loss(method, monkeypatch, tmp_path):
    data, study = load("digits"), load_study("fc-digits")
    study = StudyConfig.model_validate(dict(study) | {"probe": dict(study.probe) | {"every": 0}})
    plan = RunPlan(study, method, 0, 0.01, tmp_path / "run", torch.device("cpu"))
    training = Training(plan, data, RunLog(plan.folder, plan.config(data)), None)

    def step(iteration):
        part = slice(60 * iteration, 60 * iteration + 60)
        training.step(iteration, training.inputs[part], training.targets[part])

    step(0)
    with counted(monkeypatch) as found:
        for iteration in range(1, 6):
            step(iteration)
    training.log.close("finished")
    assert found == {"item": 5}
