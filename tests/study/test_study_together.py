"""Seeds trained together: each run as if it had been run by itself, up to rounding."""

from copy import deepcopy
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from hesscond.data import load
from hesscond.errors import ConfigError, DivergedError
from hesscond.methods import Method, registry
from hesscond.study import (
    RunPlan,
    StudyConfig,
    load_study,
    obstacle,
    open_run,
    run,
    run_together,
    stacking,
)
from hesscond.study import runner as runner_module
from hesscond.study.checkpoint import Checkpoints

CPU = torch.device("cpu")
#: Rounding is 6e-8 and 1e-16; a few dozen steps amplify it, and so does a small eigenvalue.
RTOL = {torch.float32: 1e-4, torch.float64: 1e-8}


@pytest.fixture(scope="module")
def digits():
    return load("digits")


class Adam(Method):
    """An optimizer with a state of its own, and nothing else."""

    name, summary, source = "test-adam", "-", "-"

    def optimizer(self, lr, *, momentum=0.0, nesterov=False, weight_decay=0.0):
        return torch.optim.AdamW(self.parameter_groups(weight_decay), lr=lr, eps=1e-3)


class Whole(Adam):
    name = "test-whole"

    def optimizer(self, lr, *, momentum=0.0, nesterov=False, weight_decay=0.0):
        return torch.optim.LBFGS(self.model.parameters(), lr=lr)


class Rebuilt(Method):
    """Puts a module behind the network's activation."""

    source = summary = "-"
    module = nn.Identity

    def __init__(self, model):
        super().__init__(model)
        hidden = next(name for name, module in model.named_modules() if isinstance(module, nn.ReLU))
        parent, _, child = hidden.rpartition(".")
        setattr(model.get_submodule(parent), child, self.module())


class Counting(nn.Module):
    passes = 0

    def forward(self, h):
        self.passes += 1
        return h / self.passes


class Replacing(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(()))

    def forward(self, h):
        self.mean = 0.9 * self.mean + 0.1 * h.detach().mean()
        return h - self.mean


class Branching(nn.Module):
    def forward(self, h):
        return h if h.sum() > 0 else -h


class Tracing(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_forward_hook(lambda *_: None)

    def forward(self, h):
        return h.relu()


REBUILT = [
    type(name, (Rebuilt,), {"name": f"test-{name}", "module": module})
    for name, module in {
        "dropout": nn.Dropout,
        "counting": Counting,
        "replacing": Replacing,
        "branching": Branching,
        "tracing": Tracing,
    }.items()
]


@pytest.fixture(autouse=True)
def further_methods(monkeypatch):
    for method in (Adam, Whole, *REBUILT):
        monkeypatch.setitem(registry._REGISTRY, method.name, method)


@pytest.fixture
def double(monkeypatch):
    """Networks and data of float64, where rounding cannot hide a mistake or bring a ReLU over its kink."""
    own = runner_module.build_model
    for module in (runner_module, stacking):
        monkeypatch.setattr(module, "build_model", lambda plan, data: own(plan, data).double())


def in_double(data):
    return replace(data, train_inputs=data.train_inputs.double(), test_inputs=data.test_inputs.double())


def plans_for(folder, method="vanilla", *, seeds=(0, 1, 2), iterations=30, rate=0.1, **sections):
    """A study of small networks on digits, a little more than an epoch."""
    study = load_study("fc-digits")
    training = {"iterations": iterations, "epochs": None} | sections.pop("training", {})
    changed = {
        "model": dict(study.model) | {"hidden": [12, 10]},
        "training": dict(study.training) | training,
        "probe": dict(study.probe) | {"every": 7, "train_every_epochs": 1},
    } | sections
    study = StudyConfig.model_validate(dict(study) | changed)
    return [RunPlan(study, method, seed, rate, folder / f"seed{seed}", CPU) for seed in seeds]


def checkpoint(folder):
    with Checkpoints(folder) as checkpoints:
        return checkpoints.latest(CPU)


def assert_same_run(one, other, rtol):
    """Logs and last checkpoints agree."""
    for table in ("training", "evaluation", "probe"):
        a, b = open_run(one).table(table), open_run(other).table(table)
        assert list(a.columns) == list(b.columns)
        assert len(a) == len(b) > 0, table
        for column in a.columns:
            if a[column].dtype.kind == "f":
                np.testing.assert_allclose(a[column], b[column], rtol=rtol, err_msg=f"{table}.{column}")
            else:
                assert a[column].equals(b[column]), (table, column)
    a, b = checkpoint(one), checkpoint(other)
    assert a.keys() == b.keys()
    assert a["iteration"] == b["iteration"]
    for name in ("order", "augmentation", "random", "permutation"):
        assert torch.equal(a[name], b[name]), name
    assert a["schedule"] == b["schedule"]
    assert a["optimizer"]["param_groups"] == b["optimizer"]["param_groups"]
    pairs = [(a["model"][name], value) for name, value in b["model"].items()]
    assert a["optimizer"]["state"].keys() == b["optimizer"]["state"].keys()
    for index, own in b["optimizer"]["state"].items():
        assert a["optimizer"]["state"][index].keys() == own.keys()
        pairs += [(a["optimizer"]["state"][index][k], v) for k, v in own.items() if isinstance(v, torch.Tensor)]
    for x, y in pairs:
        # the gradient in a bias ahead of a normalization is nothing but rounding
        torch.testing.assert_close(x, y, rtol=rtol, atol=rtol)


def assert_same_as_apart(tmp_path, dataset, rtol, *arguments, **options):
    together = plans_for(tmp_path / "together", *arguments, **options)
    apart = plans_for(tmp_path / "apart", *arguments, **options)
    before = torch.get_rng_state()
    assert run_together(together, dataset) == [None] * len(together)
    assert torch.equal(torch.get_rng_state(), before)
    for one, other in zip(together, apart, strict=True):
        run(other, dataset)
        assert_same_run(one.folder, other.folder, rtol)
    assert open_run(together[0].folder).status == "finished"


@pytest.mark.parametrize(
    ("method", "options"),
    [
        ("vanilla", {}),
        ("batchnorm", {}),
        ("batchrenorm", {}),
        ("layernorm", {}),
        ("groupnorm:groups=2", {}),
        ("weightnorm", {}),
        ("vanilla", {"training": {"momentum": 0.9, "nesterov": True, "weight_decay": 0.01}}),
        ("batchnorm", {"training": {"momentum": 0.9}, "schedule": {"kind": "cosine", "warmup_iterations": 5}}),
        ("vanilla", {"data": {"name": "digits", "augmentation": ["crop", "flip"]}}),
        ("vanilla", {"probe": dict(load_study("fc-digits").probe) | {"every": 3, "layers": ["fc2", "fc3"]}}),
        ("test-adam", {}),
    ],
)
def test_the_same_runs_as_apart_in_float64(tmp_path, digits, double, method, options):
    assert_same_as_apart(tmp_path, in_double(digits), RTOL[torch.float64], method, **options)


def test_the_same_runs_as_apart_in_float32(tmp_path, digits):
    # few iterations and seeds known to bring no ReLU over its kink by rounding
    assert_same_as_apart(tmp_path, digits, RTOL[torch.float32], iterations=26, rate=0.01)


def test_the_joint_step_is_that_of_separate_steps(digits):
    """Losses, gradients and running statistics of four networks against torch's own passes."""
    generator = torch.Generator().manual_seed(0)
    models = []
    for _ in range(4):
        parts = nn.Linear(64, 9), nn.BatchNorm1d(9), nn.Tanh(), nn.Linear(9, 7, bias=False), nn.ReLU(), nn.Linear(7, 10)
        model = nn.Sequential(*parts).double()
        for parameter in model.parameters():
            nn.init.uniform_(parameter, -0.4, 0.4, generator=generator)
        model[3].weight.requires_grad_(False)
        models.append(model)
    inputs = digits.train_inputs.flatten(1).double()[:44].unflatten(0, (4, 11))
    targets = digits.train_targets[:44].unflatten(0, (4, 11))
    loss_fn = nn.CrossEntropyLoss()
    apart = deepcopy(models)
    parameters, buffers = stacking.stacked_state(models)
    joint = stacking.recorded_pass(models[0], loss_fn, parameters, buffers, inputs, targets)
    for _ in range(3):
        with torch.no_grad():
            losses, gradients = joint(parameters, buffers, inputs, targets)
        names = [name for name, p in parameters.items() if p.requires_grad]
        assert "3.weight" not in names
        for number, model in enumerate(apart):
            loss = loss_fn(model(inputs[number]), targets[number])
            trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
            own = dict(zip(trained, torch.autograd.grad(loss, list(trained.values())), strict=True))
            torch.testing.assert_close(losses[number], loss.detach(), rtol=1e-12, atol=0)
            for name, gradient in zip(names, gradients, strict=True):
                torch.testing.assert_close(gradient[number], own[name], rtol=1e-12, atol=1e-13)
                models[number].get_parameter(name).data.sub_(0.5 * gradient[number])
                trained[name].data.sub_(0.5 * own[name])
            # what the stack holds is what each network sees
            for name, value in model.state_dict().items():
                torch.testing.assert_close(models[number].state_dict()[name], value, rtol=1e-12, atol=1e-13)


class Stop(Exception):
    """Whatever ends a process."""


@pytest.mark.parametrize(("how", "status"), [(KeyboardInterrupt, "interrupted"), (Stop, "failed")])
def test_each_run_goes_on_by_itself(tmp_path, digits, double, how, status):
    data = in_double(digits)
    options = {"training": {"momentum": 0.9, "checkpoint_seconds": 0.0}, "schedule": {"kind": "linear"}}
    broken = plans_for(tmp_path / "broken", "batchnorm", **options)
    whole = plans_for(tmp_path / "whole", "batchnorm", **options)

    def watch(progress):
        if progress.iteration == 27:
            raise how

    with pytest.raises(how):
        run_together(broken, data, watch)
    for one, other in zip(broken, whole, strict=True):
        assert open_run(one.folder).status == status
        assert checkpoint(one.folder)["iteration"] == 26
        run(one, data, resume=True)
        run(other, data)
        assert_same_run(one.folder, other.folder, RTOL[torch.float64])


def test_a_checkpoint_holds_one_network(tmp_path, digits):
    """torch would save the whole stack with a view into it."""
    together, apart = plans_for(tmp_path / "together", seeds=range(6)), plans_for(tmp_path / "apart", seeds=[0])
    run_together(together, digits)
    run(apart[0], digits)
    one, other = (max((p[0].folder / "checkpoints").glob("*.pt")).stat().st_size for p in (together, apart))
    assert one < 1.1 * other


def test_a_run_that_diverges_ends_alone(tmp_path, digits, monkeypatch):
    own = runner_module.build_model

    def explosive(plan, data):
        model = own(plan, data).double()
        if plan.seed == 1:
            for parameter in model.parameters():
                parameter.data.mul_(100.0)
        return model

    monkeypatch.setattr(runner_module, "build_model", explosive)
    monkeypatch.setattr(stacking, "build_model", explosive)
    data = in_double(digits)
    options = {
        "probe": dict(load_study("fc-digits").probe) | {"every": 0, "train_every_epochs": 0},
        "model": dict(load_study("fc-digits").model) | {"hidden": [12, 10], "activation": "leaky-relu"},
    }
    together, apart = (plans_for(tmp_path / name, rate=0.05, **options) for name in ("together", "apart"))
    seen = []
    ends = run_together(together, data, lambda progress: seen.append((progress, progress.each())))
    assert [type(end) for end in ends] == [type(None), DivergedError, type(None)]
    with pytest.raises(DivergedError) as alone:
        run(apart[1], data)
    assert str(ends[1]) == str(alone.value)
    stored = [open_run(plan.folder) for plan in together]
    assert [one.status for one in stored] == ["finished", "diverged", "finished"]
    assert 0 < len(stored[1].table("training")) == len(open_run(apart[1].folder).table("training")) < 30
    assert [progress.iteration for progress, _ in seen] == list(range(1, 31))
    for number, one in enumerate(stored):
        told = [each[number].loss for _, each in seen if each[number] is not None]
        assert told == one.table("training")["loss"].tolist()
    assert all(progress.loss == each[0].loss for progress, each in seen)
    for number in (0, 2):
        run(apart[number], data)
        assert_same_but_probe(together[number].folder, apart[number].folder)


def assert_same_but_probe(one, other):
    for table, column in (("training", "loss"), ("evaluation", "test_loss")):
        a, b = open_run(one).table(table)[column], open_run(other).table(table)[column]
        np.testing.assert_allclose(a, b, rtol=1e-9)


def test_all_diverge(tmp_path, digits):
    plans = plans_for(tmp_path, rate=1e30, probe=dict(load_study("fc-digits").probe) | {"every": 0})
    assert [type(end) for end in run_together(plans, digits)] == [DivergedError] * 3
    assert {open_run(plan.folder).status for plan in plans} == {"diverged"}


@pytest.mark.parametrize(
    ("method", "reason"),
    [
        ("bnp", "bnp takes part in every step (transform_gradients)"),
        ("bnp+layernorm", "bnp takes part in every step"),
        ("l2", "l2 takes part in every step"),
        ("adam", "adam takes part in every step"),
        ("sphere", "takes part in every step"),
        ("test-whole", "LBFGS is not known to treat every weight by itself"),
        ("test-dropout", "draws random numbers"),
        ("test-counting", "keeps what is no buffer between passes"),
        ("test-replacing", "replaces a buffer instead of changing it"),
        ("test-branching", "does not run on stacked weights"),
        ("test-tracing", "a hook"),
    ],
)
def test_what_cannot_be_trained_together(tmp_path, digits, method, reason):
    plans = plans_for(tmp_path, method)
    assert reason in obstacle(plans[0], digits)
    with pytest.raises(ConfigError, match="cannot be trained together") as refused:
        run_together(plans, digits)
    assert reason in str(refused.value)
    assert "\n" not in str(refused.value)
    assert not any(tmp_path.iterdir())


def test_plans_that_differ(tmp_path, digits):
    plans = plans_for(tmp_path)
    for wrong, reason in (
        ([], "no run"),
        ([plans[0], replace(plans[1], learning_rate=0.2)], "differ in seed and folder only"),
        ([plans[0], replace(plans[1], method="layernorm")], "differ in seed and folder only"),
        ([plans[0], replace(plans[1], folder=plans[0].folder)], "same folder"),
    ):
        with pytest.raises(ConfigError, match=reason):
            run_together(wrong, digits)


def test_from_the_command_line(tmp_path, call_cli):
    options = ["--seed", "0,1", "--iterations", "8", "--method", "vanilla", "--method", "bnp"]
    done = call_cli("study", "fc-digits", *options, "--together", "--out", tmp_path / "runs")
    assert done.code == 0, done.err
    assert "bnp: its seeds are trained one after another, as bnp takes part" in done.err
    assert "vanilla" not in done.err
    for name in ("vanilla-seed0", "vanilla-seed1", "bnp-seed0", "bnp-seed1"):
        stored = open_run(tmp_path / "runs" / name)
        assert stored.status == "finished"
        assert len(stored.table("training")) == 8


def test_from_the_command_line_begun_runs_go_on_and_new_ones_are_trained_together(tmp_path, call_cli, monkeypatch):
    passes = []

    def watched(plans, *arguments):
        passes.append([plan.seed for plan in plans])
        return run_together(plans, *arguments)

    monkeypatch.setattr("hesscond.commands.study.run_together", watched)
    options = ["--iterations", "8", "--method", "vanilla", "--together", "--out", tmp_path / "runs"]
    assert call_cli("study", "fc-digits", *options, "--seed", "0,1").code == 0
    before = [(tmp_path / "runs" / f"vanilla-seed{seed}" / "run.sqlite").read_bytes() for seed in (0, 1)]
    done = call_cli("study", "fc-digits", *options, "--seed", "0,1,2,3", "--resume")
    assert done.code == 0, done.err
    assert passes == [[0, 1], [2, 3]]
    assert "vanilla seeds 0,1: begun before, each goes on by itself" in done.err
    assert before == [(tmp_path / "runs" / f"vanilla-seed{seed}" / "run.sqlite").read_bytes() for seed in (0, 1)]
    assert {open_run(tmp_path / "runs" / f"vanilla-seed{seed}").status for seed in range(4)} == {"finished"}
