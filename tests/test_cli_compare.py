"""`hesscond compare`: the grid, the best rate, the table, and what is refused."""

import pandas as pd
import pytest

from hesscond.data import load
from hesscond.errors import ConfigError
from hesscond.study import load_study, open_run
from hesscond.study.comparison import compare
from hesscond.study.config import StudyConfig

STUDY = """
name = "tiny"
description = "for the tests"
[data]
name = "digits"
[model]
hidden = [8]
[training]
batch_size = 60
iterations = 12
[probe]
layers = ["fc2"]
units = [3]
every = 4
train_every_epochs = 0
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    (tmp_path / "tiny.toml").write_text(STUDY)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_best_rate_is_that_of_the_smallest_loss(folder, call_cli):
    result = call_cli(
        "compare", "tiny.toml", "-m", "vanilla", "-m", "bnp", "--iterations", "12", "--rates", "0.001,0.5,0.1",
        "--probe-every", "4", "--out", "out",
    )  # fmt: skip
    assert (result.code, result.err) == (0, "")
    table = pd.read_csv("out/comparison.csv")
    assert list(table["method"]) == ["vanilla", "bnp"]
    for row in table.to_dict("records"):
        losses = {}
        for rate in (0.001, 0.1, 0.5):
            losses[rate] = open_run(f"out/grid/{row['method']}-lr{rate:g}").table("training")["loss"].tail(1).mean()
        assert row["learning_rate"] == min(losses, key=losses.get)
        assert row["at_edge"] == (row["learning_rate"] != 0.1)
        probed = open_run(f"out/{row['method']}-seed0")
        probe = probed.table("probe")
        assert list(probe["iteration"]) == [0, 4, 8]
        assert row["kappa_own"] == pytest.approx(probe["kappa_own"].median(), rel=1e-12)
        assert (row["kappa_own"] == row["kappa"]) == (row["method"] == "vanilla")
        assert row["kappa"] == pytest.approx(probe["kappa"].median(), rel=1e-12)
        assert row["test_accuracy"] == probed.table("evaluation")["test_accuracy"].iloc[-1]
        assert 0.2 < row["time"] < 20
        assert row["method"] in result.out


def test_finished_runs_are_not_repeated_and_others_refused(folder):
    study, data = load_study("tiny.toml"), load("digits")
    said = []

    def call(config: StudyConfig):
        options = {"rates": [0.1], "seed": 0, "out": folder / "out", "device": data.train_inputs.device}
        return list(compare(config, ["vanilla"], data, on_run=said.append, **options))

    call(study)
    log = folder / "out" / "vanilla-seed0" / "run.sqlite"
    before = log.stat().st_mtime_ns
    call(study)
    assert log.stat().st_mtime_ns == before
    changed = study.model_copy(update={"training": study.training.model_copy(update={"iterations": 13})})
    with pytest.raises(ConfigError, match="another configuration"):
        call(changed)


def test_a_method_that_diverges_everywhere_says_so(folder, call_cli):
    result = call_cli("compare", "tiny.toml", "-m", "vanilla", "--iterations", "12", "--rates", "1e30", "--out", "out")
    assert result.code == 0
    assert "diverged at every" in result.out
    assert pd.read_csv("out/comparison.csv")["refusal"].tolist() == ["diverged at every learning rate"]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--rates", "much"], "--rates takes numbers"),
        (["--rates", "-1"], "must be positive"),
        (["-m", "nothing"], "unknown method 'nothing'"),
        (["-m", "bnp", "-m", "bnp"], "given twice"),
        (["--probe-every", "0"], "at least 1"),
        (["--seed", "-1"], "--seed must be"),
        (["--iterations", "0"], "--iterations must be at least 1"),
    ],
)
def test_bad_use_is_one_sentence(folder, call_cli, arguments, sentence):
    result = call_cli("compare", "tiny.toml", "--out", "out", *arguments)
    assert result.code == 2
    assert sentence in result.err
    assert result.err.count("\n") == 1
    assert not (folder / "out").exists()
