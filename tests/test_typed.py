"""The types of the package as a user's mypy sees them."""

import ast
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


def kappa_of(model: nn.Module, x: torch.Tensor, target: torch.Tensor) -> float:
    result: hesscond.ProbeResult = hesscond.probe(model, nn.CrossEntropyLoss(), (x, target), level="layer")
    layer: hesscond.LayerResult = result["0"]
    kappa: hesscond.ConditionNumber = layer.kappa
    if not kappa.resolved:
        print(kappa.reason, kappa.advice)
    return kappa.value


def planned(name: str) -> StudyConfig:
    try:
        return load_study(name)
    except hesscond.ConfigError as error:
        raise SystemExit(str(error)) from None


def rank_of(matrix: torch.Tensor) -> int:
    found = hesscond.condition_number(matrix)
    reveal_type(found)
    reveal_type(hesscond.probe)
    reveal_type(RunPlan)
    return found.rank


def verdict() -> str:
    return hesscond.verify("bnp-theorem-4").status
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


@pytest.mark.parametrize("package", ["hesscond", "hesscond.study"])
def test_what_is_exported_is_what_is_imported_for_type_checkers(package):
    __import__(package)
    module = sys.modules[package]
    tree = ast.parse(Path(module.__file__).read_text(encoding="utf-8"))
    (block,) = (
        node for node in tree.body if isinstance(node, ast.If) and getattr(node.test, "id", "") == "TYPE_CHECKING"
    )
    imported = {alias.name for node in block.body if isinstance(node, ast.ImportFrom) for alias in node.names}
    assert imported == set(module.__all__)


def test_the_wheel_says_that_it_is_typed():
    """hatch takes every file of the package that git does not ignore."""
    assert (Path(hesscond.__file__).parent / "py.typed").read_bytes() == b""
