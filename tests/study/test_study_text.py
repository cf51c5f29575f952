"""Studies of texts: what is logged, which text a run goes on with, and what does not fit characters."""

import math

import pytest
import tomli_w
import torch

from hesscond.data import text as texts
from hesscond.errors import ConfigError, CorruptDataError
from hesscond.study import RunPlan, load_data, load_study, open_run, run
from tests.runs.run_logs import latest

pytestmark = pytest.mark.slow

LAYERS = [f"block1.{name}" for name in ("attention.q", "attention.k", "attention.v", "attention.out", "fc1", "fc2")]
TINY = {
    "name": "tiny",
    "description": "for the tests",
    "data": {"name": "text", "context": 6, "train_samples": 40, "test_samples": 300},
    "model": {"name": "gpt", "width": 8, "depth": 1, "heads": 2, "dropout": 0.2},
    "training": {"batch_size": 8, "iterations": 13, "checkpoint_seconds": 0.0},
    "schedule": {"kind": "cosine", "warmup_iterations": 3},
    "probe": {"layers": ["block1.attention.*", "fc"], "units": [0, 2], "every": 4, "train_samples": 4},
}


def study_of(folder, **sections):
    """The tiny study with changes; a table with a name is another one."""
    content = TINY | {key: own if "name" in own else TINY.get(key, {}) | own for key, own in sections.items()}
    path = folder / "tiny.toml"
    path.write_text(tomli_w.dumps(content), encoding="utf-8")
    return load_study(path)


def trained(study, folder, method="adamw", watch=None, resume=False):
    run(RunPlan(study, method, 0, 0.01, folder, torch.device("cpu")), load_data(study.data), watch, resume=resume)
    return open_run(folder)


def test_a_run_on_characters(tmp_path):
    """Loss, accuracy and bits of the last evaluation from the weights that it left behind."""
    study = study_of(tmp_path, model={"dropout": 0.0})
    stored = trained(study, tmp_path / "run")
    data = load_data(study.data)
    model = study.model.architecture(input_shape=(6,), outputs=data.classes, **study.model.options)
    model.load_state_dict(latest(tmp_path / "run")["model"])
    with torch.no_grad():
        log_p = model.double()(data.test_inputs).log_softmax(-1)
    nats = -log_p.gather(-1, data.test_targets[..., None]).mean().item()
    last = stored.table("evaluation").iloc[-1]
    assert last["test_loss"] == pytest.approx(nats, rel=1e-5)
    assert last["test_bits_per_character"] == pytest.approx(nats / math.log(2), rel=1e-5)
    assert last["test_accuracy"] == pytest.approx((log_p.argmax(-1) == data.test_targets).double().mean().item())
    probe = stored.table("probe")
    # of one batch and of four windows, wherever the run stands
    assert probe.groupby("data")["samples"].unique().map(list).to_dict() == {"batch": [8], "train": [4]}
    assert set(probe["layer"]) == {*LAYERS[:4], "fc"}
    assert stored.config["probe"]["layers"] == [*LAYERS[:4], "fc"]


def test_no_run_goes_on_with_another_text(tmp_path, monkeypatch):
    trained(study_of(tmp_path), tmp_path / "run")
    config = tmp_path / "run" / "config.toml"
    again = load_study(config)
    assert load_data(again.data).pinned["sha256"] == again.data.options["sha256"]
    monkeypatch.setattr(texts, "topics", lambda: "another text " * 3000)
    monkeypatch.setattr(texts, "TOPICS_SHA256", {})
    with pytest.raises(CorruptDataError, match=r"pydoc_data.topics of Python .* is not the text that is meant"):
        load_data(again.data)
    with pytest.raises(
        ConfigError, match=r"holds a run of another configuration \(data.sha256: .*\): give another --out"
    ):
        trained(study_of(tmp_path), tmp_path / "run", resume=True)
