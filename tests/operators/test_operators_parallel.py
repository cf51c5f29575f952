"""Operators of several processes, each with its share of the data: processes are really started."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest


def run_processes(count, *command):
    """What the first of ``count`` processes prints."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={count}"]
    # without network interfaces the rendezvous still finds the machine itself
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run([*launcher, *map(str, command)], capture_output=True, text=True, env=environment, timeout=300)
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def found():
    return json.loads(run_processes(3, Path(__file__).with_name("parallel_worker.py")))


@pytest.mark.parametrize(
    "what", ["together", "led", "sum", "without data", "shifted", "of two operators", "still in step"]
)
def test_products_are_the_weighted_sum_over_the_processes(found, what):
    assert found[what] < 1e-13


def test_one_process_decides_for_all(found):
    assert len(set(found["drawn"])) == 1


def test_a_failure_anywhere_is_an_error_everywhere(found):
    last = len(found["drawn"]) - 1
    assert all("the disk is full" in message for message in found["broken share"])
    assert all(f"process {last}" in message for message in found["broken share"])
    assert found["errors"][0].startswith("ZeroDivisionError")
    assert all("ZeroDivisionError" in message for message in found["errors"][1:])


def test_what_does_not_fit_together_is_refused(found):
    assert "different orders: 2, 3" in found["orders"]
    assert "no process has data" in found["no data"]


def test_a_destroyed_group_is_not_kept_alive(found):
    assert found["destroyed"].startswith("CaptureError: the process group was destroyed")


def test_positive_semidefinite_only_if_every_share_is(found):
    assert found["psd"] is False
