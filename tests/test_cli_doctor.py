"""The doctor: all well on a sound machine, and every fault that can be imitated is found and named."""

import json
from types import SimpleNamespace

import pytest
import torch
from typer.testing import CliRunner

from hesscond.cli import app
from hesscond.commands import doctor
from hesscond.commands.doctor import Check, examine


def invoked(*arguments):
    return CliRunner().invoke(app, ["doctor", *map(str, arguments)])


def test_all_is_well_here():
    state = torch.get_rng_state()
    checks = list(examine())
    assert [c for c in checks if c.status == "failed"] == []
    assert {c.group for c in checks} == {"versions", "threads", "devices", "self-test"}
    assert all(c.found and c.seconds >= 0 for c in checks)
    assert all(c.advice for c in checks if c.status != "ok")
    assert torch.equal(torch.get_rng_state(), state)


def test_it_shows_groups_and_advice_and_counts(monkeypatch):
    monkeypatch.setattr(doctor, "threads", lambda: Check("warning", "8 of them", "take fewer"))
    done = invoked()
    assert done.exit_code == 0
    lines = done.output.splitlines()
    here = lines.index("threads")
    assert lines[here + 1].split() == ["warning", "threads", "8", "of", "them"]
    assert lines[here + 2].strip() == "→ take fewer"
    assert " warnings, 0 failed, in " in lines[-1]


def test_a_failed_check_is_exit_code_1(monkeypatch):
    def broken():
        raise RuntimeError("no\nluck")

    monkeypatch.setattr(doctor, "packages", broken)
    done = invoked("--json")
    assert done.exit_code == 1
    found = {check["name"]: check for check in json.loads(done.stdout)}
    assert (found["packages"]["status"], found["packages"]["found"]) == ("failed", "RuntimeError: no luck")
    assert found["κ"]["status"] == "ok"


def test_missing_and_old_packages():
    check = doctor.required(["torch>=2", "numpy>=99", "no-such-package>=1", "scipy"])
    assert check.status == "failed"
    assert check.found.endswith("is not >=99; no-such-package is missing")
    assert "torch" not in check.found
    assert check.advice == "pip install 'numpy>=99' 'no-such-package>=1'"
    assert doctor.required(["torch>=2.0", "scipy", "numpy>=1.26"]).status == "ok"


@pytest.mark.parametrize(("allowed", "status"), [(1, "warning"), (2, "ok"), (64, "ok")])
def test_more_threads_than_processors(allowed, status, monkeypatch):
    monkeypatch.setattr(doctor, "processors", lambda: allowed)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    check = doctor.threads()
    assert check.status == status
    assert (f"OMP_NUM_THREADS={allowed}" in check.advice) == (status == "warning")


@pytest.mark.parametrize(("text", "expected"), [("max 100000", 8), ("150000 100000", 2), ("10000 100000", 1), ("?", 8)])
def test_the_quota_of_a_container_counts(text, expected, tmp_path, monkeypatch):
    (tmp_path / "cpu.max").write_text(text)
    monkeypatch.setattr(doctor, "QUOTA", tmp_path / "cpu.max")
    monkeypatch.setattr(doctor.os, "sched_getaffinity", lambda _: set(range(8)), raising=False)
    assert doctor.processors() == expected


def test_a_driver_without_a_torch_that_knows_it(tmp_path, monkeypatch):
    monkeypatch.setattr(doctor, "DRIVER", tmp_path)
    assert doctor.no_gpu().status == "warning"
    monkeypatch.setattr(doctor, "DRIVER", tmp_path / "none")
    assert doctor.no_gpu().status == "ok"


@pytest.mark.parametrize("fault", ["value", "rank"])
def test_a_wrong_condition_number_is_noticed(fault, monkeypatch):
    right = doctor.condition_number

    def wrong(**named):
        found = right(**named)
        # with bounds around it that still hold, or another rank
        facts = {name: getattr(found, name) for name in ("lower", "upper", "rank", "resolved")}
        changed = {"value": found.value * (1 + 1e-8)} if fault == "value" else {"value": found.value, "rank": 6}
        return SimpleNamespace(**facts | changed)

    assert doctor.known_condition_number().status == "ok"
    monkeypatch.setattr(doctor, "condition_number", wrong)
    assert doctor.known_condition_number().status == "failed"


def test_the_truth_of_the_self_test_is_true():
    """In exact rational arithmetic: HᵀH = 8 I, and all entries are dyadic, so that nothing was rounded."""
    sympy = pytest.importorskip("sympy")
    from scipy.linalg import hadamard

    H = sympy.Matrix(hadamard(8).tolist())
    assert sympy.eye(8) * 8 == H.T * H
    assert int(doctor.TRUTH) == 4**48
