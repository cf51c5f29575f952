"""Schedules against torch's own, and in every method's optimizer."""

from dataclasses import replace
from functools import partial

import pytest
import tomli_w
import torch
from pydantic import ValidationError
from torch.optim import lr_scheduler

from hesscond.errors import ConfigError
from hesscond.runs import RunLog
from hesscond.study import RunPlan, load_study, open_run, run
from hesscond.study.runner import Training, check_plan
from hesscond.study.sections import ScheduleConfig, sentence

PER_EPOCH, ITERATIONS = 10, 60


def by_torch(make):
    """Rates of a scheduler of torch that is stepped after every iteration, from a rate of 1."""
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    schedule = make(optimizer)
    rates = []
    for _ in range(ITERATIONS):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    return rates


def by_ours(**keys):
    factor = ScheduleConfig(**keys).factors(per_epoch=PER_EPOCH, iterations=ITERATIONS)
    return [factor(k) for k in range(ITERATIONS)]


@pytest.mark.parametrize(
    ("keys", "make"),
    [
        (
            {"kind": "steps", "milestones": [2.0, 3.5], "factor": 0.1},
            lambda o: lr_scheduler.MultiStepLR(o, [20, 35], 0.1),
        ),
        ({"kind": "exponential", "factor": 0.5}, lambda o: lr_scheduler.ExponentialLR(o, 0.5 ** (1 / PER_EPOCH))),
        ({"kind": "cosine"}, lambda o: lr_scheduler.CosineAnnealingLR(o, ITERATIONS)),
        ({"kind": "cosine", "end": 0.2}, lambda o: lr_scheduler.CosineAnnealingLR(o, ITERATIONS, 0.2)),
        ({"kind": "linear"}, lambda o: lr_scheduler.LinearLR(o, 1.0, 0.0, ITERATIONS)),
        ({"kind": "linear", "end": 0.5}, lambda o: lr_scheduler.LinearLR(o, 1.0, 0.5, ITERATIONS)),
        ({}, lambda o: lr_scheduler.ConstantLR(o, 1.0)),
        (
            {"kind": "cosine", "warmup_iterations": 5},
            lambda o: lr_scheduler.LambdaLR(
                o,
                lambda k: (k + 1) / 5 if k < 5 else 0.5 + 0.5 * torch.cos(torch.tensor(torch.pi * (k - 5) / 55)).item(),
            ),
        ),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "",
)
def test_rates_are_those_of_torch(keys, make):
    assert by_ours(**keys) == pytest.approx(by_torch(make), rel=1e-6, abs=1e-7)


@pytest.mark.parametrize("keys", [{"warmup_iterations": 5}, {"warmup_epochs": 0.5}])
def test_warm_up_is_linear(keys):
    assert by_ours(**keys) == pytest.approx([0.2, 0.4, 0.6, 0.8] + [1.0] * 56)
    assert by_ours(kind="steps", milestones=[1.0], factor=0.1, **keys)[3:12] == pytest.approx(
        [0.8, *[1.0] * 6, 0.1, 0.1]
    )


def test_a_warm_up_begins_where_it_is_told_to():
    grown = by_ours(warmup_iterations=4, warmup_start=0.1)
    assert grown == pytest.approx([0.1, 0.325, 0.55, 0.775] + [1.0] * 56)
    assert by_ours(warmup_iterations=3, warmup_start=0.1, warmup="constant") == pytest.approx([0.1] * 3 + [1.0] * 57)


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"kind": "steps", "factor": 0.1}, "kind = 'steps' needs milestones"),
        ({"kind": "cosine", "factor": 0.1}, "factor: belongs to kind = 'steps' or 'exponential', not to 'cosine'"),
        ({"kind": "steps", "milestones": [3.0, 2.0], "factor": 0.1}, "milestones: must ascend"),
        ({"warmup_epochs": 1.0, "warmup_iterations": 2}, "either warmup_epochs or warmup_iterations"),
        ({"kind": "sawtooth"}, "kind: must be 'constant', 'steps', 'cosine', 'linear' or 'exponential'"),
        ({"warmups": 3}, "unknown key 'warmups': did you mean 'warmup'? allowed: kind"),
        ({"warmup_start": 0.1}, "warmup_start: needs the length of the warm-up"),
        ({"warmup": "constant", "warmup_epochs": 1.0}, "warmup: a constant warm-up needs warmup_start"),
    ],
)
def test_what_does_not_fit_is_named(keys, words):
    with pytest.raises(ValidationError) as error:
        ScheduleConfig.model_validate(keys)
    assert words in sentence(error.value)


STUDY = {
    "name": "scheduled",
    "description": "for the tests",
    "data": {"name": "digits"},
    "model": {"hidden": [12]},
    "training": {"batch_size": 60, "iterations": 8, "weight_decay": 0.01},
    "schedule": {"kind": "linear", "warmup_iterations": 3},
    "probe": {"units": [0], "every": 0, "train_every_epochs": 0},
}


def planned(folder, method="vanilla", rate=0.01, training=None, **sections):
    """A run of the study with changes."""
    content = STUDY | sections | ({"training": {"iterations": 3, "batch_size": 60} | training} if training else {})
    (folder / "study.toml").write_text(tomli_w.dumps(content), encoding="utf-8")
    return RunPlan(load_study(folder / "study.toml"), method, 0, rate, folder / method, torch.device("cpu"))


def training_of(plan, data):
    log = RunLog(plan.folder, plan.config(data))
    training = Training(plan, data, log, None)
    log.close("finished")
    return training


@pytest.mark.parametrize(
    "method", ["vanilla", "sphere", "bnp", "adam", "rmsprop", "adagrad", "equilibration+batchnorm"]
)
def test_every_method_s_optimizer_follows(tmp_path, digits, method):
    training = training_of(planned(tmp_path, method), digits)
    rates = []
    for k in range(8):
        rates.append([group["lr"] for group in training.optimizer.param_groups])
        training.step(k, training.inputs[:60], training.targets[:60])
    expected = [1 / 3, 2 / 3, 1, 1, 0.8, 0.6, 0.4, 0.2]
    for found, factor in zip(rates, expected, strict=True):
        assert found == [pytest.approx(0.01 * factor)] * len(found)
    groups = training.optimizer.param_groups
    decayed = {id(p) for group in groups if group["weight_decay"] for p in group["params"]}
    held = training.method.without_decay()
    assert {id(p) for p in training.model.parameters()} == decayed | held
    assert not decayed & held
    assert bool(held) is (method == "sphere")


def test_the_log_has_the_rate_of_every_step(tmp_path, digits):
    plan = planned(tmp_path)
    run(plan, digits)
    expected = [0.01 * factor for factor in (1 / 3, 2 / 3, 1, 1, 0.8, 0.6, 0.4, 0.2)]
    assert open_run(plan.folder).table("training")["lr"].tolist() == pytest.approx(expected)


@pytest.mark.parametrize(
    ("options", "peer"),
    [
        (
            {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1},
            partial(torch.optim.SGD, momentum=0.9, nesterov=True, weight_decay=0.1),
        ),
        ({"optimizer": "adam", "weight_decay": 0.1}, partial(torch.optim.Adam, weight_decay=0.1)),
        ({"optimizer": "adamw", "weight_decay": 0.3}, partial(torch.optim.AdamW, weight_decay=0.3)),
        ({"optimizer": "adamw"}, partial(torch.optim.AdamW, weight_decay=0.0)),
    ],
    ids=str,
)
def test_optimizers_are_those_of_torch(tmp_path, digits, options, peer):
    plan = planned(tmp_path, rate=0.1, training=options, schedule={})
    own, twin = (training_of(replace(plan, folder=tmp_path / name), digits) for name in ("own", "twin"))
    optimizer = peer(twin.model.parameters(), lr=0.1)
    for k in range(3):
        own.step(k, own.inputs[:60], own.targets[:60])
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(twin.model(own.inputs[:60]), own.targets[:60]).backward()
        optimizer.step()
    for one, other in zip(own.model.parameters(), twin.model.parameters(), strict=True):
        assert torch.equal(one, other)


def test_a_method_that_is_an_optimizer_keeps_it(tmp_path, digits):
    for method, expected in [("rmsprop", torch.optim.RMSprop), ("l2+rmsprop", torch.optim.RMSprop)]:
        plan = planned(tmp_path, method, training={"optimizer": "adam"})
        assert type(training_of(plan, digits).optimizer) is expected


@pytest.mark.parametrize("optimizer", ["adam", "adamw"])
def test_a_momentum_is_of_sgd(tmp_path, digits, optimizer):
    plan = planned(tmp_path, "bnp", training={"optimizer": optimizer, "momentum": 0.9})
    with pytest.raises(ConfigError, match=f"optimizer '{optimizer}' has no momentum of its own: set momentum to 0"):
        check_plan(plan, digits)
