"""The doctor: all well on a sound machine, and faults are found and named."""

import json

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
