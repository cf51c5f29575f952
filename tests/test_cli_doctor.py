"""The doctor: all well on a sound machine, and faults are found and named."""

import json
from types import SimpleNamespace

import pytest
import torch

from hesscond.commands import doctor


def test_all_is_well_here(call_cli):
    state = torch.get_rng_state()
    done = call_cli("doctor", "--json")
    assert done.code == 0
    checks = json.loads(done.out)
    assert [check["name"] for check in checks] == ["packages", "threads", "devices", "κ"]
    assert "failed" not in {check["status"] for check in checks}
    assert f"torch {torch.__version__}, " in checks[0]["found"]
    assert torch.equal(torch.get_rng_state(), state)


def test_a_failed_check_is_exit_code_1(call_cli, monkeypatch):
    def broken():
        raise RuntimeError("no\nluck")

    monkeypatch.setitem(doctor.CHECKS, "devices", broken)
    done = call_cli("doctor")
    assert done.code == 1
    assert "RuntimeError: no luck" in done.out


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
