"""``hesscond density``, in this process: the numbers are those of the library, and what is wrong gets one sentence."""

import json
import math
import re

import pytest
import torch

from hesscond.commands.density import NEAR_ZERO
from hesscond.commands.target import load_target
from hesscond.hessians import GGNOperator, HessianOperator, network_null_directions
from hesscond.hessians.null_space import combined
from hesscond.spectra.density import density


@pytest.fixture
def run_cli(workplace, call_cli):
    """Call ``hesscond density`` in the folder: code, out, err (without what the file itself prints)."""

    def call(*arguments):
        done = call_cli("density", *arguments)
        done.err = done.err.replace("made in the file\n", "")
        return done

    return call


def expected(kind=HessianOperator, function="make", seed=0, layers=None, dtype=torch.float64, **options):
    target = load_target(f"net.py:{function}", seed=seed)
    arguments = target.model, target.loss_fn, target.data
    operator = kind(*arguments, layers=layers, dtype=dtype)
    null = combined(network_null_directions(operator))
    return density(operator, seed=seed, null_space=null, **options)


@pytest.mark.parametrize(
    ("arguments", "options"),
    [
        (("net.py:make",), {}),
        (("net.py:batches",), {"function": "batches"}),
        (("net.py:make", "--ggn"), {"kind": GGNOperator}),
        (("net.py:make", "-l", "0,4"), {"layers": ["0", "4"]}),
        (("net.py:make", "--layers", "4", "--layers", "0", "--ggn"), {"layers": ["4", "0"], "kind": GGNOperator}),
        (("net.py:wide", "--probes", "3", "--steps", "12"), {"function": "wide", "probes": 3, "steps": 12}),
        (("net.py:wide", "--probes", "1", "--steps", "9"), {"function": "wide", "probes": 1, "steps": 9}),
        (
            ("net.py:random", "--seed", "7", "--probes", "2", "--steps", "4"),
            {"function": "random", "seed": 7, "probes": 2, "steps": 4},
        ),
        (("net.py:make", "--dtype", "as-is"), {"dtype": None}),
        (
            ("net.py:wide", "--memory", "100MB", "--probes", "2", "--steps", "5"),
            {"function": "wide", "probes": 2, "steps": 5},
        ),
    ],
)
def test_json_is_what_the_library_finds(run_cli, arguments, options):
    done = run_cli(*arguments, "--json")
    assert (done.code, done.err) == (0, "")
    found, wanted = json.loads(done.out), expected(**options)
    assert found["matrix"] == ("GGN" if "--ggn" in arguments else "Hessian")
    assert found["layers"] == options.get("layers")
    assert (found["n_params"], found["null"], found["products"]) == (wanted.order, wanted.null, wanted.products)
    assert (found["probes"], found["seed"]) == (wanted.probes, wanted.seed)
    assert torch.equal(torch.tensor(found["nodes"], dtype=torch.float64), wanted.nodes)
    assert torch.equal(torch.tensor(found["weights"], dtype=torch.float64), wanted.weights)

    def number(value):
        return None if value == math.inf else value

    negative, near = wanted.negative, wanted.near_zero(NEAR_ZERO)
    for name, share in (("negative", negative), ("near_zero", near)):
        assert found[name] == share.value
        assert (found[f"{name}_lower"], found[f"{name}_upper"]) == (share.lower, share.upper)
        assert found[f"{name}_error"] == number(share.error)
    assert (found["trace"], found["trace_error"]) == (wanted.trace().value, number(wanted.trace().error))
    assert (found["lambda_min"], found["lambda_max"]) == (wanted.bottom, wanted.top)
    assert found["null"] > 0 or "random" in arguments[0]


def test_the_table(run_cli):
    done = run_cli("net.py:wide", "--probes", "4", "--steps", "10")
    assert (done.code, done.err) == (0, "")
    assert "net.py:wide · 50 samples · Hessian in all parameters" in done.out
    assert "4 probes × 10 Lanczos steps, 40 products · float64 · model in train mode" in done.out
    wanted = expected(function="wide", probes=4, steps=10)
    rows = {line[:24].strip(): line[24:].strip() for line in done.out.splitlines() if line.strip()}
    assert rows["parameters n"] == "1,363"
    assert rows["known null directions"].split()[0] == str(wanted.null)
    assert f"{wanted.top:.6g}" in rows["largest node"]
    assert f"{wanted.bottom:.6g}" in rows["smallest node"]
    assert "±" in rows["trace"]
    assert re.search(r"\d+–\d+ %", rows["eigenvalues below zero"])
    assert "standard error over the probes" in done.out
    assert "more --steps narrow them" in " ".join(done.out.split())
    assert "null directions: layer '2'" in done.out
    assert max(map(len, done.out.splitlines())) <= 80 or "\x1b" not in done.out


def test_small_networks_are_exact(run_cli):
    done = run_cli("net.py:make")
    assert (done.code, done.err) == (0, "")
    assert "all eigenvalues computed, 74 products" in done.out
    assert "largest eigenvalue" in done.out
    assert "±" not in done.out


def test_a_figure(run_cli, workplace):
    done = run_cli("net.py:wide", "--probes", "2", "--steps", "8", "--figure", "density.pdf")
    assert done.code == 0
    assert "figure: density.pdf" in done.out
    assert (workplace / "density.pdf").read_bytes().startswith(b"%PDF")
    done = run_cli("net.py:make", "--json", "--figure", "density.png")
    assert json.loads(done.out)["n_params"] == 74
    assert (workplace / "density.png").stat().st_size > 5000


def test_the_traceback_on_request(run_cli):
    done = run_cli("net.py:bad_forward", "--traceback")
    assert done.code == 2
    assert "net.py" in done.err
    assert "NameError" in done.err
