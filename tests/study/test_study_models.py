"""Every network of the registry, trained and probed by a study file."""

from dataclasses import replace

import numpy as np
import pytest
import tomli_w
import torch

import hesscond
from hesscond.capture import eligible_layers
from hesscond.errors import RunError
from hesscond.models import MODELS
from hesscond.probing import training
from hesscond.study import RunPlan, load_data, load_study, open_run, run
from hesscond.study.runner import LOSSES, build_model
from tests import scenes
from tests.models.reduced import REDUCED
from tests.runs.run_logs import broken_off, latest, same_runs

DATA = {
    "image": {"name": "digits", "train_samples": 30, "test_samples": 20, "standardize": True},
    "points": {"name": "shapes", "train": 15, "test": 10, "points": 7},
    "coordinates": {"name": "image-regression", "every": 40},
}
DATA["vector"] = DATA["image"]
DATA["tokens"] = {"name": "text", "context": 5, "train_samples": 30, "test_samples": 20}
#: Where the reduced network needs larger inputs than the digits are.
SMALLER = {"resnet18": {"stem": "3x3"}}


def written(folder, name, probe=None, **sections):
    """A study file for a network at its reduced size."""
    data = DATA[MODELS[name].kind]
    if name == "nerf-rays":
        data = {"name": "llff", "folder": str(folder / "scene"), "factor": 2}
        scenes.write(folder / "scene", height=3, width=4)
    content = {
        "name": f"tiny-{name}",
        "description": "for the tests",
        "data": data,
        "model": {"name": name, **REDUCED[name][1], **SMALLER.get(name, {})},
        "training": {"batch_size": 6, "iterations": 2, "loss": "mse" if name.startswith("nerf") else "cross_entropy"},
        "probe": {"units": [0, 1], "train_samples": 10, "precision": "float64"} | (probe or {}),
    }
    for section, values in sections.items():
        content[section] = content.get(section, {}) | values
    folder.mkdir(exist_ok=True)
    path = folder / f"{name}.toml"
    path.write_text(tomli_w.dumps(content), encoding="utf-8")
    return path


def trained(path, folder, method="vanilla", resume=False):
    study = load_study(path)
    data = load_data(study.data)
    plan = RunPlan(study, method, 0, 0.01, folder, torch.device("cpu"))
    run(plan, data, resume=resume)
    return plan, data


def first_layer(name):
    shape, options = REDUCED[name]
    model = MODELS[name](input_shape=shape, outputs=3, **options)
    return next(iter(eligible_layers(model)))


def first_batch(plan, data):
    order = torch.randperm(len(data.train_targets), generator=torch.Generator().manual_seed(plan.seed + 1))[:6]
    inputs = data.train_inputs[order]
    return (inputs.flatten(1) if plan.study.model.name == "mlp" else inputs), data.train_targets[order]


@pytest.mark.share(4)
@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_a_study_of_every_network(tmp_path, name):
    """κ of the first batch is what a probe of the network says; the run is the same without any probing."""
    path = written(tmp_path / "study", name, probe={"layers": [first_layer(name)], "every": 2})
    plan, data = trained(path, tmp_path / "probed")
    stored = open_run(tmp_path / "probed")
    assert stored.status == "finished"
    rows = stored.table("probe")
    assert rows["data"].tolist() == ["train", "train", "batch", "batch", "train", "train"]
    assert rows["samples"].tolist() == [10, 10, 6, 6, 10, 10]
    layer = plan.study.probe.layers[0]
    found = hesscond.probe(
        build_model(plan, data), LOSSES[plan.study.training.loss](), first_batch(plan, data), [layer], units=[0, 1]
    )
    own = found.to_frame()
    batch = rows[rows["data"] == "batch"]
    np.testing.assert_allclose(batch["kappa_lower"], own["kappa_lower"], rtol=1e-3)
    np.testing.assert_array_equal(batch["rank"], own["rank"])
    assert (rows["rank"] + rows["nullity"] == rows["n_params"]).all()
    assert (rows["kappa_lower"] >= 1).all()

    trained(written(tmp_path / "bare", name, probe={"every": 0, "train_every_epochs": 0}), tmp_path / "plain")
    one, other = latest(tmp_path / "probed")["model"], latest(tmp_path / "plain")["model"]
    assert all(torch.equal(one[key], other[key]) for key in one)
    accuracy = stored.table("evaluation")["test_accuracy"]
    assert accuracy.isna().all() if name.startswith("nerf") else accuracy.between(0, 1).all()
    psnr = stored.table("evaluation")["test_psnr"]
    assert psnr.notna().all() if name.startswith("nerf") else psnr.isna().all()
    bits = stored.table("evaluation")["test_bits_per_character"]
    assert bits.notna().all() if name == "gpt" else bits.isna().all()


def test_p_of_a_convolution_has_one_mean_and_deviation_for_each_channel(tmp_path):
    """κ(D) and κ in the BNP coordinates against the statistics of the inputs' channels in plain torch."""
    path = written(tmp_path / "study", "cnn5", probe={"layers": ["conv2"]})
    plan, data = trained(path, tmp_path / "run")
    row = open_run(tmp_path / "run").table("probe").query("data == 'batch'").iloc[0]
    model = build_model(plan, data).double()
    inputs, targets = first_batch(plan, data)
    seen = []
    model.conv2.register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    with torch.no_grad():
        model(inputs.double())
    (h,) = seen
    sigma = h.transpose(0, 1).flatten(1).std(1, correction=0)
    ends = torch.cat([sigma[sigma > 0], torch.ones(1)])
    assert row["kappa_D"] == pytest.approx((ends.max() / ends.min()).item(), rel=1e-6)
    found = hesscond.probe(model, LOSSES["cross_entropy"](), (inputs, targets), ["conv2"], method="bnp", units=[0])
    assert row["kappa_preconditioned"] == pytest.approx(float(found["conv2"].kappa[0]), rel=1e-5)


def test_too_little_memory_is_one_sentence(tmp_path, monkeypatch):
    monkeypatch.setattr(training, "MEMORY", 1000)
    original = training.capture
    monkeypatch.setattr(training, "capture", lambda *args, **options: original(*args, memory=1000, **options))
    path = written(tmp_path / "study", "cnn5", probe={"layers": ["conv1"]})
    with pytest.raises(RunError, match=r"the probe failed at iteration 0: .*memory.*train_every_epochs"):
        trained(path, tmp_path / "run")
    assert open_run(tmp_path / "run").status == "failed"


#: All that draws random numbers or has a state, on images with dropout.
LIVELY = {
    "data": {"augmentation": ["crop", "flip"]},
    "model": {"dropout": 0.3},
    "training": {"iterations": 13, "momentum": 0.9, "nesterov": True, "weight_decay": 1e-3, "checkpoint_seconds": 0.0},
    "schedule": {"kind": "cosine", "warmup_iterations": 4},
}


def test_resumed_with_augmentation_schedule_and_dropout_it_is_the_same(tmp_path):
    path = written(tmp_path / "study", "vit-s16", **LIVELY)
    plan, data = trained(path, tmp_path / "whole")
    broken_off(replace(plan, folder=tmp_path / "broken"), data, 7)
    trained(path, tmp_path / "broken", resume=True)
    same_runs(tmp_path / "whole", tmp_path / "broken")


def test_a_batch_is_probed_with_the_dropout_it_is_trained_with(tmp_path):
    """κ of the output layer from the training pass is that from a pass of its own."""
    found = {}
    for precision in ("as-trained", "float64"):
        probe = {"units": [0], "precision": precision, "train_every_epochs": 0}
        path = written(tmp_path / precision, "vit-s16", probe=probe, model={"dropout": 0.5})
        trained(path, tmp_path / f"run-{precision}")
        found[precision] = open_run(tmp_path / f"run-{precision}").table("probe")["lambda_max"]
    np.testing.assert_allclose(found["as-trained"], found["float64"], rtol=1e-4)


def test_a_study_of_nerfs_two_networks(tmp_path):
    """The loss is the sum of both, the test loss and the ratio those of the fine network alone; both have κ."""
    model = {"samples": [5, 4], "jitter": 1.0, "density_noise": 1.0}
    probe = {"layers": ["coarse.colour", "fine.colour"], "every": 1, "train_every_epochs": 0}
    path = written(tmp_path / "study", "nerf-rays", probe=probe, model=model)
    plan, data = trained(path, tmp_path / "run")
    stored = open_run(tmp_path / "run")
    inputs, targets = first_batch(plan, data)
    first = build_model(plan, data)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(plan.seed)
        both = first(inputs)
    own = [(both[:, i] - targets).square().mean().item() for i in range(2)]
    assert stored.table("training")["loss"].iloc[0] == pytest.approx(sum(own), rel=1e-5)
    with torch.no_grad():
        fine = (first.eval()(data.test_inputs) - data.test_targets).square().mean().item()
    evaluation = stored.table("evaluation").iloc[0]
    assert evaluation["test_loss"] == pytest.approx(fine, rel=1e-5)
    assert evaluation["test_psnr"] == pytest.approx(-10 * np.log10(fine), rel=1e-5)
    rows = stored.table("probe")
    assert set(rows["layer"]) == {"coarse.colour", "fine.colour"}
    assert (rows["rank"] > 0).all()


def test_classes_by_squared_error(tmp_path):
    """1 for the class and 0 for the others; the Hessian of an output unit is 2/(N c) ĤᵀĤ."""
    path = written(
        tmp_path / "study", "mlp", training={"loss": "mse"}, probe={"layers": ["fc3"], "units": [1], "every": 1}
    )
    plan, data = trained(path, tmp_path / "run")
    stored = open_run(tmp_path / "run")
    inputs, targets = first_batch(plan, data)
    model, seen = build_model(plan, data), []
    model.fc3.register_forward_pre_hook(lambda _, own: seen.append(own[0]))
    wanted = np.zeros((6, 10))
    wanted[np.arange(6), targets] = 1
    outputs = model(inputs).detach().double().numpy()
    first = stored.table("training").iloc[0]
    assert first["loss"] == pytest.approx(((outputs - wanted) ** 2).mean(), rel=1e-5)
    h = np.hstack([np.ones((6, 1)), seen[0].detach().double().numpy()])
    own = stored.table("probe").query("data == 'batch'").iloc[0]
    assert own["lambda_max"] == pytest.approx(np.linalg.eigvalsh(2 / 60 * h.T @ h)[-1], rel=1e-4)
    assert stored.table("evaluation")["test_accuracy"].between(0, 1).all()
