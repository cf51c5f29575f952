"""The types of the package as a user's mypy sees them."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import hesscond

PROJECT = """
import torch
from torch import nn

import hesscond
from hesscond.study import RunPlan, StudyConfig, load_study

result: hesscond.ProbeResult = hesscond.probe(nn.Linear(3, 2), nn.MSELoss(), (torch.rand(4, 3), torch.rand(4, 2)))
kappa: hesscond.ConditionNumber = hesscond.condition_number(torch.eye(3))
study: StudyConfig = load_study("fc-digits")
status: str = hesscond.verify("bnp-theorem-4").status
reveal_type(hesscond.condition_number(torch.eye(3)))
reveal_type(hesscond.probe)
reveal_type(RunPlan)
"""
WRONG = """

hesscond.probe(level="layer")
hesscond.nothing
"""


def checked(folder: Path, text: str) -> subprocess.CompletedProcess[str]:
    (folder / "user.py").write_text(text)
    environment = {**os.environ, "PYTHONPATH": str(Path(hesscond.__file__).parents[1])}
    command = [sys.executable, "-m", "mypy", "--strict", "--ignore-missing-imports", "user.py"]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)


@pytest.mark.slow
def test_a_users_mypy_sees_the_types(tmp_path):
    """mypy reads a package that is installed only where it has a py.typed."""
    pytest.importorskip("mypy")
    done = checked(tmp_path, PROJECT)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "hesscond.spectra.condition.ConditionNumber" in done.stdout
    assert "def (model: torch.nn.modules.module.Module, loss_fn:" in done.stdout
    assert "-> hesscond.probing.results.ProbeResult" in done.stdout
    assert "hesscond.study.runner.RunPlan" in done.stdout
    done = checked(tmp_path, PROJECT + WRONG)
    assert done.returncode == 1
    assert 'Missing positional arguments "model", "loss_fn", "data"' in done.stdout
    assert 'Module has no attribute "nothing"' in done.stdout


def test_the_wheel_says_that_it_is_typed():
    """hatch takes every file of the package that git does not ignore."""
    assert (Path(hesscond.__file__).parent / "py.typed").read_bytes() == b""
