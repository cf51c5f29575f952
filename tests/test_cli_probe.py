"""``hesscond probe``, in this process: the numbers are those of hesscond.probe, and what is wrong gets one sentence."""

import csv
import io
import json
import math
import re
import time

import pytest
import torch
from rich.cells import cell_len

import hesscond
from hesscond.commands.options import integers
from hesscond.commands.printing import sign_of_life
from hesscond.commands.target import load_target
from hesscond.errors import ConfigError
from tests.cli_targets import NET
from tests.test_probe_levels import COLUMNS


@pytest.fixture
def run_cli(workplace, call_cli, monkeypatch):
    """Call hesscond with arguments in the folder: code, out, err (without what the file itself prints)."""
    # on a busy machine a small probe is foretold to take long
    monkeypatch.setattr("hesscond.commands.probe.LONG", math.inf)

    def call(*arguments):
        done = call_cli(*arguments)
        done.err = done.err.replace("made in the file\n", "")
        return done

    return call


def expected(*arguments, **options):
    target = load_target("net.py:make", seed=0)
    return hesscond.probe(target.model, target.loss_fn, target.data, *arguments, **options).to_frame()


def same(rows, frame):
    assert len(rows) == len(frame) > 0
    for row, wanted in zip(rows, frame.to_dict("records"), strict=True):
        assert list(row) == list(wanted) == COLUMNS
        for name, value in row.items():
            assert value == (None if wanted[name] == math.inf else wanted[name]), name


# --- what it prints --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "options"),
    [
        ((), {}),
        (("--layers", "2,4"), {"layers": ["2", "4"]}),
        (("-l", "4", "-l", "0"), {"layers": ["4", "0"]}),
        (("-l", "0", "--units", "4,0-2"), {"layers": ["0"], "units": (4, 0, 1, 2)}),
        (("-l", "*", "--level", "layer"), {"layers": "*", "level": "layer"}),
        (("-l", "0[1:3],*.bias"), {"layers": ["0[1:3]", "*.bias"]}),
        (("-m", "bnp"), {"method": "bnp"}),
        (("--dtype", "as-is", "--rtol", "1e-4"), {"dtype": None, "rtol": 1e-4}),
    ],
)
def test_json_is_what_probe_returns(run_cli, arguments, options):
    result = run_cli("probe", "net.py:make", "--json", *arguments)
    assert (result.code, result.err) == (0, "")
    same(json.loads(result.out, parse_constant=pytest.fail), expected(**options))


def test_a_number_of_products(run_cli):
    arguments = ("probe", "net.py:make", "--level", "network", "--products", "30")
    wanted = expected(level="network", products=30)
    result = run_cli(*arguments, "--json")
    assert (result.code, result.err) == (0, "")
    (row,) = json.loads(result.out, parse_constant=pytest.fail)
    ends = row.pop("top_lower"), row.pop("top_upper")
    same([row], wanted)
    assert row["kappa_lower"] > 1
    assert not row["resolved"]
    target = load_target("net.py:make", seed=0)
    H = hesscond.HessianOperator(target.model, target.loss_fn, target.data).to_dense()
    values = torch.linalg.eigvalsh((H + H.T) / 2)
    assert ends[0] <= float(values[values.abs().argmax()]) <= ends[1]
    printed = run_cli(*arguments)
    assert (printed.code, printed.err) == (0, "")
    assert "level network: all parameters together, 30 products" in printed.out
    assert f"eigenvalue of the largest size: {ends[0]:.9g} to {ends[1]:.9g}" in printed.out
    assert "≥" in printed.out
    # advice names the option of the command
    assert "--products 74" in printed.out
    assert "products=" not in printed.out


def test_csv_is_what_probe_returns(run_cli):
    result = run_cli("probe", "net.py:make", "--csv")
    assert (result.code, result.err) == (0, "")
    rows = list(csv.DictReader(io.StringIO(result.out)))
    frame = expected()
    assert list(rows[0]) == COLUMNS
    for name in ("lambda_max", "kappa", "kappa_lower", "kappa_upper"):
        assert [float(row[name]) for row in rows] == frame[name].tolist()
    assert [row["resolved"] == "True" for row in rows] == frame["resolved"].tolist()


@pytest.mark.parametrize("width", [80, 120])
def test_table(run_cli, monkeypatch, width):
    monkeypatch.setenv("COLUMNS", str(width))
    result = run_cli("probe", "net.py:make")
    assert (result.code, result.err) == (0, "")
    assert "\x1b" not in result.out
    assert "made in the file" not in result.out
    assert max(cell_len(line) for line in result.out.splitlines()) <= width
    assert "net.py:make · 20 samples · level unit" in result.out
    assert "plain coordinates · forward pass in float64 · model in train mode" in result.out
    rows = [line.split() for line in result.out.splitlines() if re.match(r"\d +Linear ", line)]
    assert [row[:4] for row in rows] == [
        ["0", "Linear", "5", "7"],
        ["2", "Linear", "4", "6"],
        ["4", "Linear", "3", "5"],
    ]
    words = "zero, 1 of 12 κ (0): the Hessian is zero: the loss does not depend on its parameters to second order"
    assert words in " ".join(result.out.split())
    assert "S of 4: loss curvature of the output" in result.out
    assert re.search(r"^κ of 4: .*Gram", result.out, re.MULTILINE)


def test_files(run_cli, workplace):
    result = run_cli("probe", "net.py:make", "-o", "rows.csv", "--figure", "k[bold].svg")
    assert (result.code, result.err) == (0, "")
    assert "figure: k[bold].svg\n" in result.out
    assert "<svg" in (workplace / "k[bold].svg").read_text()
    printed = run_cli("probe", "net.py:make", "--csv").out
    assert (workplace / "rows.csv").read_text() == printed
    result = run_cli("probe", "net.py:make", "--json", "--output", "rows.txt", "--figure", "k.png")
    assert (result.code, result.out, result.err) == (0, "", "")
    same(json.loads((workplace / "rows.txt").read_text()), expected())
    assert (workplace / "k.png").read_bytes().startswith(b"\x89PNG")
    run_cli("probe", "net.py:make", "-o", "rows.json")
    assert (workplace / "rows.json").read_text() == (workplace / "rows.txt").read_text()


def test_seed_and_model_are_the_files_own(run_cli, workplace):
    (workplace / "net.py").write_text(NET.replace("    torch.manual_seed(1)\n", ""))
    outs = [run_cli("probe", "net.py:make", "--json", "--seed", seed).out for seed in (0, 0, 1)]
    assert outs[0] == outs[1] != outs[2]


# --- what it hands to the engine, also where that is not there yet ---------------------------------------------------


def test_a_fault_of_ours_is_not_blamed_on_the_file(run_cli, monkeypatch):
    def broken(self):
        raise TypeError("ours")

    monkeypatch.setattr(hesscond.ProbeResult, "to_frame", broken)
    # raised in this file, which is neither the user's nor hesscond's
    assert "net.py:make raised TypeError: ours" in run_cli("probe", "net.py:make").err
    code = compile("def broken(self):\n    raise TypeError('ours')", hesscond.__file__, "exec")
    exec(code, place := {})
    monkeypatch.setattr(hesscond.ProbeResult, "to_frame", place["broken"])
    fault = run_cli("probe", "net.py:make")
    assert fault.code == 2
    assert "by a fault of hesscond (hesscond/__init__.py:2; --traceback shows all): TypeError: ours" in fault.err
    assert "Traceback" in run_cli("probe", "net.py:make", "--traceback").err


@pytest.mark.parametrize("name", ["fail", "bad_forward", "bad_shape"])
def test_traceback_on_request(run_cli, name):
    result = run_cli("probe", f"net.py:{name}", "--traceback")
    assert result.code == 2
    assert result.err.startswith("Traceback")
    assert result.err.splitlines()[-1].startswith("error: ")
    if name != "bad_shape":  # no code of the file is on the way to that one
        assert "net.py" in result.err


# --- options ---------------------------------------------------------------------------------------------------------


def test_integers_and_ranges_of_them():
    assert integers("--units", "0,1,5-9") == [0, 1, 5, 6, 7, 8, 9]
    assert integers("--units", " 3 , 1 - 3 ") == [3, 1, 2, 3]
    assert integers("--seed", "0:3,7, 9:11") == [0, 1, 2, 7, 9, 10]
    for bad in ("", "1,", "-1", "1-", "1--2", "1.5", "٣", "1-2-3", "0-100000", "5:5", "9" * 20, "9" * 5000):
        with pytest.raises(ConfigError, match="--units"):
            integers("--units", bad)


def test_a_sign_of_life_every_half_minute_outside_of_a_terminal(monkeypatch, capsys):
    monkeypatch.setattr("hesscond.commands.printing.BEAT", 0.05)
    with sign_of_life("running [/x]") as say:
        say("layer 1", 0.5, 60)
        time.sleep(0.2)
    lines = capsys.readouterr().err.splitlines()
    assert 1 <= len(lines) <= 4
    assert lines[0].startswith("layer 1, 1 min 0 s left, ")


@pytest.mark.parametrize("terminal", [True, False])
def test_sign_of_life_only_in_a_terminal(monkeypatch, terminal):
    from rich.console import Console

    from hesscond.commands import printing

    written = io.StringIO()
    monkeypatch.setattr(printing, "stderr", Console(file=written, force_terminal=terminal, width=80))
    monkeypatch.setattr(printing, "PATIENCE", 0.0)
    with sign_of_life("running [/x]") as say:
        say("probing [/x]")
        time.sleep(0.3)
    assert ("probing [/x]" in written.getvalue()) == terminal
    monkeypatch.setattr(printing, "PATIENCE", 60.0)
    written.truncate(0)
    with sign_of_life("running"):
        pass
    assert written.getvalue().strip("\0") == ""
