"""The pytest plugin, run by pytest on a small test file."""

import importlib.util
import json
import subprocess
import sys
from importlib.metadata import entry_points
from xml.etree import ElementTree

import pytest

pytest_plugins = ["pytester"]

FILE = """
import unittest
import pytest
import torch
from torch import nn
from hesscond import probe
from hesscond.testing import assert_condition_number

torch.manual_seed(0)
CASE = nn.Linear(3, 1).double(), nn.MSELoss(), (torch.randn(20, 3).double(), torch.randn(20, 1).double())
KAPPA = probe(*CASE)["model"].kappa[0]
MIDDLE = (KAPPA.lower + KAPPA.upper) / 2

def test_passes():
    assert_condition_number(*CASE, below=1e6)

def test_fails():
    assert_condition_number(*CASE, above=1e6)

def test_open():
    assert_condition_number(*CASE, below=MIDDLE)

@pytest.mark.hesscond(unresolved="skip")
def test_marked():
    assert_condition_number(*CASE, below=MIDDLE)

def test_caught():
    with pytest.raises(AssertionError):
        assert_condition_number(*CASE, above=1e6)

@pytest.mark.xfail
def test_expected_to_fail():
    assert_condition_number(*CASE, above=1e6)

def test_let_go():
    assert_condition_number(*CASE, below=MIDDLE, unresolved="pass")

class TestCase(unittest.TestCase):
    def test_unittest(self):
        with self.assertRaises(AssertionError):
            assert_condition_number(*CASE, above=1e6)
"""


@pytest.fixture
def run(pytester):
    """Run pytest on FILE; it finds the plugin by itself where hesscond is installed with it."""
    pytester.makepyfile(test_kappa=FILE)
    installed = any(one.name == "hesscond" for one in entry_points(group="pytest11"))
    plugin = () if installed else ("-p", "_hesscond_pytest.plugin")

    def call(*options):
        return pytester.runpytest_inprocess(*plugin, "-p", "no:randomly", "-W", "ignore", *options)

    return call


def test_outcomes_and_the_summary(run, pytester):
    first = run("--junitxml=report.xml")
    first.assert_outcomes(passed=4, failed=2, skipped=1, xfailed=1)
    out = first.stdout.str()
    assert "expected κ > 1e+06, and the bounds decide against it: 0 of 1 units hold" in out
    assert "conditions.py" not in out  # frames of hesscond are hidden
    first.stdout.fnmatch_lines(
        [
            "*- condition numbers -*",
            "failed     test_kappa.py::test_fails: κ > 1e+06: 0 of 1 units hold; *",
            "unresolved test_kappa.py::test_open: *1 undecided; *",
            "unresolved test_kappa.py::test_marked: *1 undecided; *",
            "unresolved test_kappa.py::test_let_go: *1 undecided; *",
            "assertions about condition numbers: 1 failed, 3 unresolved",
        ]
    )
    properties = ElementTree.parse(pytester.path / "report.xml").getroot().iter("property")
    records = [json.loads(one.get("value")) for one in properties if one.get("name") == "hesscond"]
    assert sorted(one["outcome"] for one in records) == ["failed", "passed", *["unresolved"] * 3]


def test_where_all_passed_nothing_is_said(run):
    assert "condition numbers" not in run("-k", "passes or caught or unittest or expected", "-v").stdout.str()


def test_the_policy_comes_from_marker_then_option_then_ini(run, pytester):
    chosen = ("-k", "open or marked")
    run(*chosen, "--hesscond-unresolved=pass").assert_outcomes(passed=1, skipped=1)
    pytester.makeini("[pytest]\nhesscond_unresolved = skip\n")
    run(*chosen).assert_outcomes(skipped=2)
    run(*chosen, "--hesscond-unresolved=fail").assert_outcomes(failed=1, skipped=1)


def test_bad_settings_are_refused_before_anything_runs(run, pytester):
    assert run("--hesscond-unresolved=maybe").ret == pytest.ExitCode.USAGE_ERROR
    pytester.makepyfile(test_kappa=FILE.replace('unresolved="skip"', 'unresolved="maybe"'))
    refused = run()
    assert refused.ret == pytest.ExitCode.USAGE_ERROR
    assert "is one of fail, warn, skip, pass, not 'maybe'" in refused.stderr.str() + refused.stdout.str()
    pytester.makepyfile(test_kappa=FILE)
    pytester.makeini("[pytest]\nhesscond_unresolved = maybe\n")
    assert run().ret == pytest.ExitCode.USAGE_ERROR


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("xdist") is None, reason="pytest-xdist is not installed")
def test_several_processes(run):
    found = run("-n", "2")
    found.assert_outcomes(passed=4, failed=2, skipped=1, xfailed=1)
    found.stdout.fnmatch_lines(["assertions about condition numbers: 1 failed, 3 unresolved"])


@pytest.mark.slow
def test_the_plugin_starts_without_torch_and_the_assertions_without_pytest():
    for module, other in (("_hesscond_pytest.plugin", "torch"), ("hesscond.testing", "pytest")):
        code = f"import sys, {module}; print({other!r} in sys.modules)"
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        assert done.stdout.strip() == "False"
