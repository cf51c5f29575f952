"""`hesscond verify` and `hesscond statements`, and statements attached to a study."""

import io
import json

import numpy as np
import pandas as pd
import pytest

from hesscond.errors import ConfigError
from hesscond.study import open_run
from hesscond.theorems import Claim, Outcome, Statement, register, statement, statements
from hesscond.theorems.base import _REGISTRY


@pytest.fixture
def false_statement():
    """One that is believed to hold, and does not."""

    @register
    class Wrong(Statement):
        id, title, source, text = "wrong", "a mistake", "nobody", "All numbers are below one half."
        hypotheses = ("the number is not 0.3 or so",)
        claims = (Claim("small", "x ≤ 1/2", True),)

        def trial(self, rng: np.random.Generator):
            x = rng.random()
            if 0.25 < x < 0.35:
                return [Outcome("not-applicable", reason="0.3 or so")]
            return [Outcome("holds" if x <= 0.5 else "violated", 2 * x)]

    yield
    del _REGISTRY["wrong"]


def test_the_table_and_the_counterexample(call_cli):
    result = call_cli("verify", "wc-theorem-1", "van-der-sluis", "--trials", "3")
    assert (result.code, result.err) == (0, "")
    assert "three rows or more" in result.out
    assert "certified counterexample, factor 1." in result.out
    assert "[[" in result.out


def test_json(call_cli):
    result = call_cli("verify", "wc-proposition-1", "--trials", "4", "--seed", "3", "--json")
    (verdict,) = json.loads(result.out)
    assert (verdict["id"], verdict["status"], verdict["expected"], verdict["ok"]) == (
        "wc-proposition-1", "violated", "violated", True,
    )  # fmt: skip
    assert (verdict["trials"], verdict["seed"]) == (4, 3)
    assert [c["known_to_hold"] for c in verdict["claims"]] == [False, True, False, False, True]
    assert verdict["counterexamples"][0]["factor"] > 1


def test_a_violated_statement_that_should_hold_is_exit_code_1(call_cli, false_statement):
    assert call_cli("verify", "wrong", "--trials", "30").code == 1


def test_other_ids_of_a_statement(call_cli):
    result = call_cli("verify", "prec-theorem-2", "van-der-sluis", "bnp-lemma-a1", "--trials", "2", "--json")
    (verdict,) = json.loads(result.out)
    assert verdict["id"] == "van-der-sluis"
    assert verdict["aliases"] == ["prec-theorem-2", "bnp-lemma-a1"]
    assert type(statement("prec-theorem-2")) is type(statement("van-der-sluis"))
    assert "prec-theorem-2" not in [s.id for s in statements()]
    listed = {s["id"]: s["aliases"] for s in json.loads(call_cli("statements", "--json").out)}
    assert listed["van-der-sluis"] == {"prec-theorem-2": "rows", "bnp-lemma-a1": "columns"}
    assert call_cli("statements").out.count("prec-theorem-2") == 1
    assert "also:    bnp-lemma-a1, columns" in call_cli("statements", "van-der-sluis").out


@pytest.mark.parametrize(("id", "others"), [("van-der-sluis", {}), ("new", {"prec-theorem-2": "all"})])
def test_an_id_that_is_taken(id, others):
    wrong = type("Wrong", (Statement,), {"id": id, "aliases": others})
    with pytest.raises(ConfigError, match="is registered already"):
        register(wrong)
    assert "new" not in _REGISTRY


def test_the_lists(call_cli):
    shown = call_cli("statements")
    listed = json.loads(call_cli("statements", "--json").out)
    assert [s["id"] for s in listed] == [s.id for s in statements()]
    for one in listed:
        assert one["id"] in shown.out
        assert one["source"]
        assert len(one["text"]) > 60
        assert one["claims"]
        assert one["hypotheses"]


STUDY = """
name = "tiny"
description = "for the tests"
[data]
name = "digits"
[model]
hidden = [8, 6]
[training]
batch_size = 40
iterations = 6
[probe]
layers = ["fc2", "fc3"]
units = [3, 0]
every = 3
train_every_epochs = 1
[[statements]]
id = "bnp-theorem-4"
"""


@pytest.mark.slow
def test_attached_to_a_study(call_cli, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny.toml").write_text(STUDY)
    # one that is attached by several ids is checked once
    attached = [word for id in ("wc-theorem-1", "prec-theorem-2", "bnp-lemma-a1") for word in ("--statement", id)]
    result = call_cli("study", "tiny.toml", "-m", "vanilla", "--lr", "0.1", *attached, "--out", "out")
    assert (result.code, result.err) == (0, "")
    assert "three rows or more" in result.out
    run = open_run("out")
    assert [own["id"] for own in run.config["statements"]] == ["bnp-theorem-4", "wc-theorem-1", "van-der-sluis"]
    table = run.table("statements")
    # two layers, the first unit, at two iterations of the batch and two of the training set, 4 + 6 + 2 claims
    assert len(table) == 2 * (2 + 2) * 12
    assert set(table["unit"]) == {3}
    whole = table.query("data == 'train' and claim == 'scaling'")
    assert set(whole["status"]) == {"holds"}
    assert whole["used"].between(0, 1).all()
    false = table.query("claim == 'three rows or more'")
    assert set(false["known"]) == {0}
    summary = call_cli("table", "statements", "out", "--format", "csv")
    assert summary.code == 0
    rows = pd.read_csv(io.StringIO(summary.out))
    assert list(rows)[:7] == ["run", "data", "layer", "unit", "statement", "claim", "known"]
    assert len(rows) == 2 * 2 * 12
    assert rows["checked"].sum() == len(table)
    exported = call_cli("export", "out", "--table", "statements", "--format", "json")
    assert len(json.loads(exported.out)) == len(table)


def test_what_does_not_speak_of_a_layer_cannot_be_attached(call_cli, tmp_path, monkeypatch, false_statement):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny.toml").write_text(STUDY)
    for id, sentence in (("wrong", "does not speak of a layer"), ("nothing", "unknown statement")):
        result = call_cli("study", "tiny.toml", "-m", "vanilla", "--lr", "0.1", "--statement", id, "--out", "out")
        assert result.code == 2
        assert sentence in result.err
    assert not (tmp_path / "out").exists()
