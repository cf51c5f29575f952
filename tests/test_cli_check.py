"""`hesscond check`, and `--expect` of `hesscond study`."""

import json
import math

import pytest

from hesscond.commands.check import escaped, escaped_property
from tests.expectations.expectation_runs import probe_row
from tests.report_page import logged

MET, FAILED, OPEN = "kappa < 200", "kappa_preconditioned > 50", "kappa_preconditioned < 12"


@pytest.fixture
def write(tmp_path):
    """Write a run of three probed iterations, the last κ(PᵀHP) unresolved."""

    def run(method="bnp", seed=0, unit=3, **ended):
        bounds = enumerate([(10.0, 10.0), (10.0, 10.0), (11.0, math.inf)])
        rows = [probe_row(k, unit=unit, kappa=(100.0, 101.0), pre=own) for k, own in bounds]
        return logged(tmp_path / f"{method}-seed{seed}", method, seed, probes=rows, iterations=3, **ended).folder

    return run


@pytest.fixture(autouse=True)
def not_on_github(monkeypatch):
    monkeypatch.delenv("GITHUB_ACTIONS", raising=False)


@pytest.mark.parametrize(
    ("expressions", "policy", "code"),
    [
        ([MET], "fail", 0),
        ([MET, FAILED], "fail", 1),
        ([MET, OPEN], "fail", 1),
        ([MET, OPEN], "pass", 0),
        ([OPEN, FAILED], "pass", 1),
        (["last(loss) < first(loss) / 1.5 and last(test_accuracy) >= 0.5"], "fail", 0),
    ],
)
def test_the_exit_code_says_whether_all_is_met(call_cli, write, expressions, policy, code):
    options = [part for expression in expressions for part in ("--expect", expression)]
    result = call_cli("check", write(), *options, "--unresolved", policy)
    assert (result.code, result.err) == (code, "")
    for expression in expressions:
        assert expression in result.out
    assert "::" not in result.out


def test_rows_of_whole_layers(call_cli, write):
    result = call_cli("check", write(unit=None), "--expect", OPEN, "--expect", FAILED)
    assert (result.code, result.err) == (1, "")
    assert "as at iteration 2, batch, layer fc3:" in result.out.replace("\n", " ")


def test_json(call_cli, write):
    result = call_cli("check", write(), "--expect", MET, "--expect", OPEN, "--json", "--github")
    assert result.code == 1
    met, unresolved = json.loads(result.out)
    assert (met["status"], met["ok"], met["rows"], met["runs"]) == ("met", True, 3, "bnp-seed0")
    assert (unresolved["status"], unresolved["ok"]) == ("unresolved", False)
    assert (unresolved["met"], unresolved["failed"], unresolved["unresolved"]) == (2, 0, 1)
    assert unresolved["worst"] == {"iteration": 2, "data": "batch", "layer": "fc3", "unit": 3}
    assert unresolved["values"] == {"kappa_preconditioned": [11.0, None]}
    assert result.err.startswith("::error title=unresolved%3A kappa_preconditioned < 12 (bnp-seed0)::undecided")


def test_github(call_cli, write, monkeypatch):
    folder = write()
    options = ["--expect", MET, "--expect", OPEN, "--expect", FAILED, "--unresolved", "pass"]
    monkeypatch.setenv("GITHUB_ACTIONS", "true")
    lines = [line for line in call_cli("check", folder, *options).out.splitlines() if line.startswith("::")]
    assert [line.split(" title=")[0] for line in lines] == ["::warning", "::error"]
    assert "::" not in call_cli("check", folder, *options, "--no-github").out
    assert escaped("a%b\r\nc::d") == "a%25b%0D%0Ac::d"
    assert escaped_property("a:b,c\n") == "a%3Ab%2Cc%0A"


def test_methods_side_by_side(call_cli, write, tmp_path):
    for method in ("bnp", "vanilla"):
        for seed in (0, 1):
            write(method, seed)
    text = "bnp.kappa_preconditioned[iteration < 2] < vanilla.kappa / 2"
    result = call_cli("check", tmp_path, "--expect", text, "--json")
    assert [(one["runs"], one["status"], one["rows"]) for one in json.loads(result.out)] == [
        ("bnp, vanilla seed 0", "met", 2), ("bnp, vanilla seed 1", "met", 2),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("status", "found", "said"),
    [
        ("diverged", "failed", "bnp-seed0 diverged: loss is nan"),
        ("interrupted", "unresolved", "bnp-seed0 is not finished (interrupted)"),
    ],
)
def test_runs_that_did_not_come_to_their_end(call_cli, write, status, found, said):
    result = call_cli("check", write(status=status, message="loss is nan"), "--expect", MET, "--json")
    assert result.code == 1
    (one,) = json.loads(result.out)
    assert (one["status"], one["reason"]) == (found, said)


@pytest.mark.slow
def test_a_study_that_must_meet_something(call_cli, tmp_path, monkeypatch):
    study = ["study", "fc-digits", "--method", "bnp", "--iterations", "3", "--out"]
    monkeypatch.setenv("GITHUB_ACTIONS", "true")
    met = "kappa >= 1 or kappa_preconditioned >= 1"
    done = call_cli(*study, tmp_path / "run", "--expect", met, "--expect", "last(loss) < 0")
    assert done.code == 1
    assert "1 met, 1 failed" in done.out
    assert "::error title=failed%3A last(loss) < 0 (bnp-seed0)::does not hold" in done.out
    assert call_cli("check", tmp_path / "run", "--expect", met).code == 0
    for wrong in ("kapa < 3", "vanilla.loss < 3"):
        refused = call_cli(*study, tmp_path / "never", "--expect", wrong)
        assert refused.code == 2
        assert not (tmp_path / "never").exists()
