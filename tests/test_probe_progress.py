"""What is told while a probe takes second derivatives, and what is left of one that was stopped."""

import functools
import itertools
import os
import re
import signal
import subprocess
import sys
import time

import pytest
import torch
from torch import nn

import hesscond
from hesscond.errors import CaptureError
from tests.catalogue.parts import Applied

NET = """
import torch
from torch import nn

def make(width=4, size=6, samples=6):
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(1, width, 3, padding=1), nn.BatchNorm2d(width), nn.Tanh(),
        nn.Conv2d(width, width, 3, padding=1), nn.BatchNorm2d(width), nn.Tanh(),
        nn.Conv2d(width, width, 3, padding=1), nn.BatchNorm2d(width), nn.Tanh(),
        nn.Flatten(), nn.Linear(width * size * size, 4),
    )
    return model, nn.CrossEntropyLoss(), (torch.randn(samples, 1, size, size), torch.randint(0, 4, (samples,)))

def long():
    return make(16, 16, 40)
"""
make = {}
exec(NET, make)
CONVOLUTIONS = ("0", "3", "6")


@functools.cache
def told(**options):
    model, loss, batch = make["make"]()
    seen = []
    result = hesscond.probe(model, loss, batch, progress=seen.append, **options)
    return result, seen


def test_steps_are_told_from_the_plan_to_the_end():
    result, seen = told()
    first, last = seen[0], seen[-1]
    assert (first.layer, first.elapsed, first.share) == ("", 0.0, 0.0)
    assert set(first.seconds) == set(CONVOLUTIONS)
    assert first.left == pytest.approx(sum(first.seconds.values()))
    assert (last.share, last.left) == (1.0, 0.0)
    assert all(a.elapsed <= b.elapsed for a, b in itertools.pairwise(seen))
    assert [layer for layer, _ in itertools.groupby(p.layer for p in seen[1:])] == list(CONVOLUTIONS)
    # more than one for each unit of every layer
    assert len(seen) > 3 * 4
    assert set(result) == {*CONVOLUTIONS, "10"}


@pytest.mark.parametrize("level", ["unit", "layer"])
def test_telling_changes_no_number(level):
    model, loss, batch = make["make"]()
    silent = hesscond.probe(model, loss, batch, level=level)
    result, _ = told(level=level)
    assert result.to_frame().equals(silent.to_frame())


def test_what_is_complete_is_kept_after_stop():
    whole, _ = told()
    model, loss, batch = make["make"]()

    def tell(progress):
        if progress.layer == "3":
            progress.stop()

    result = hesscond.probe(model, loss, batch, progress=tell)
    assert list(result) == ["0", "10"]
    assert {name for name, why in result.skipped.items() if why == "stopped before it was measured"} == {"3", "6"}
    for name, layer in result.items():
        assert [k.value for k in layer.kappa] == [k.value for k in whole[name].kappa]


def test_nothing_is_kept_of_a_first_layer_or_a_stream():
    model, loss, batch = make["make"]()
    # not the output layer, whose curvature takes no derivatives
    with pytest.raises(CaptureError, match="stopped before it was measured"):
        hesscond.probe(model, loss, batch, layers=["0"], progress=lambda p: p.stop())
    with pytest.raises(CaptureError, match="stopped before all batches were read"):
        hesscond.probe(model, loss, [batch, batch], layers=["0"], progress=lambda p: p.stop())


def convolutional(*parts, width=3):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, width, 3), *parts, nn.Flatten(), nn.Linear(16 * width, 4))
    return model, nn.CrossEntropyLoss(), (torch.randn(8, 1, 6, 6), torch.randint(0, 4, (8,)))


def reasons(model, loss, batch):
    seen = []
    hesscond.probe(model, loss, batch, progress=seen.append)
    return {progress.reason for progress in seen}


@pytest.mark.parametrize("norm", [nn.BatchNorm2d(3), nn.SyncBatchNorm(3)], ids=["batch", "synchronized"])
def test_batch_normalization_is_the_reason_where_evaluation_mode_takes_no_second_derivatives(norm):
    model, loss, batch = convolutional(norm, nn.ReLU())
    (reason,) = reasons(model, loss, batch)
    assert "BatchNorm in training mode ties all samples together" in reason
    assert reasons(model.eval(), loss, batch) == set()


@pytest.mark.parametrize(
    "parts",
    [
        (nn.BatchNorm2d(3), nn.Tanh()),
        (nn.BatchNorm2d(3, track_running_stats=False),),
        (nn.InstanceNorm2d(3),),
        (nn.BatchNorm2d(3), nn.InstanceNorm2d(3)),
        (nn.BatchNorm2d(3), Applied(lambda x: nn.functional.batch_norm(x, None, None, training=True))),
        (nn.LayerNorm([3, 4, 4]),),
        (nn.GroupNorm(1, 3),),
    ],
    ids=lambda parts: "-".join(type(part).__name__ for part in parts),
)
def test_batch_normalization_is_no_reason_where_evaluation_mode_takes_second_derivatives(parts):
    model, loss, batch = convolutional(*parts)
    assert reasons(model, loss, batch) == {""}
    assert reasons(model.eval(), loss, batch) == {""}


@pytest.mark.parametrize("patience", [0.5, 1e-9], ids=["some units", "one unit"])
def test_a_sample_is_measured_where_all_units_take_too_long(monkeypatch, patience):
    # every look at the clock is a second later; a batch of 4 is compared with a single derivative
    monkeypatch.setattr(time, "perf_counter", itertools.count(0.0).__next__)
    every, seen = told.__wrapped__()
    monkeypatch.setattr("hesscond.probing.entry.PATIENCE", patience * seen[0].left / 5)
    model, loss, batch = make["make"]()
    few = hesscond.probe(model, loss, batch)
    assert "a sample of the units (" in few.scope in str(few)
    assert "units='all'" in few.scope
    assert few["10"].units == every["10"].units
    assert few.keys() | few.skipped.keys() >= every.keys()
    measured = [name for name in few if name != "10"]
    assert measured
    assert all(0 < len(few[name].units) < 4 for name in measured)
    if patience < 1e-6:
        assert len(measured) == 1
        assert all("name it with layers=" in few.skipped[n] for n in {*CONVOLUTIONS} - {*few})
    for name in measured:
        for unit, kappa in zip(few[name].units, few[name].kappa, strict=True):
            assert kappa.value == pytest.approx(every[name].kappa[unit].value, rel=1e-10)
    named = measured[0]
    for options in ({"layers": [named]}, *[{"units": "all"}] * (patience > 1e-6)):
        whole = hesscond.probe(model, loss, batch, **options)
        assert not whole.scope
        assert whole[named].units == every[named].units


def test_units_are_numbers_or_all():
    model, loss, batch = make["make"]()
    with pytest.raises(hesscond.ConfigError, match="units must be whole numbers"):
        hesscond.probe(model, loss, batch, layers=["0"], units="some")


def test_the_estimate_of_the_command(call_cli, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("hesscond.commands.probe.LONG", 0.0)
    source = NET.replace("nn.Tanh()", "nn.ReLU()")
    (tmp_path / "net.py").write_text(source + "def one():\n    return make(2, 4)\n")
    (line,) = [line for line in call_cli("probe", "net.py:one").err.splitlines() if line.startswith("Estimated")]
    assert re.fullmatch(
        r"Estimated time of second derivatives: .+ \(.+ of it for \d\), because BatchNorm in training mode ties all "
        r"samples together: .+ needs no second derivatives\. --layers and --units .+ keeps finished layers\.",
        line,
    )


@pytest.mark.slow
def test_ctrl_c_prints_the_layers_that_are_complete(tmp_path):
    (tmp_path / "net.py").write_text(NET)
    command, env = [sys.executable, "-m", "hesscond", "probe", "net.py:long"], os.environ | {"COLUMNS": "80"}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    process, err = subprocess.Popen(command, cwd=tmp_path, env=env, **pipes), ""
    while "second derivatives" not in err:
        line = process.stderr.readline()
        assert line, f"ended after {err}"
        err += line
    # where the machine is busy, a line that says how long it has taken comes first
    assert "\nEstimated time of second derivatives: " in f"\n{err}"
    time.sleep(1)
    process.send_signal(signal.SIGINT)
    out, rest = process.communicate(timeout=120)
    assert process.returncode == 130, rest
    assert "stopping after the derivatives at work" in rest
    assert rest.endswith("interrupted: the rows are those that were complete\n")
    assert "\n10     Linear" in out
    assert ": stopped before it was measured\n" in out


@pytest.mark.parametrize(("attended", "tick"), [(True, 2.0), (True, 0.0), (False, 2.0)], ids=str)
def test_long_derivatives_are_told_in_a_terminal_and_nothing_in_a_pipe(capsys, monkeypatch, attended, tick):
    model, loss, batch = convolutional(nn.BatchNorm2d(3), nn.ReLU())
    silent = hesscond.probe(model, loss, batch).to_frame()
    monkeypatch.setattr(sys.stderr, "isatty", lambda: attended)
    monkeypatch.setattr(time, "perf_counter", itertools.count(0.0, tick).__next__)
    assert hesscond.probe(model, loss, batch).to_frame().equals(silent)
    said = capsys.readouterr().err
    if not attended or not tick:
        assert said == ""
        return
    assert re.match(r"\r\r\d+ s of second derivatives, because BatchNorm in training mode .+\n", said)
    assert re.search(r"\rsecond derivatives of 0: \d+%, \d+ s left", said)
    *_, line, wiped, end = said.split("\r")
    assert (wiped, end) == (" " * len(line), "")
    hesscond.probe(model, loss, batch, progress=lambda progress: None)
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("attended", [True, False])
def test_products_that_take_long_are_counted_in_a_terminal(capsys, monkeypatch, attended):
    model, loss, batch = convolutional(nn.GELU())
    monkeypatch.setattr(sys.stderr, "isatty", lambda: attended)
    monkeypatch.setattr(time, "perf_counter", itertools.count(0.0, 2.0).__next__)
    found = hesscond.probe(model, loss, batch, level="network", products=30)["network"]
    assert capsys.readouterr().err.count("κ of network") == 0
    assert found.kappa.solver == "Lanczos, 30 products"
    said = capsys.readouterr().err
    if not attended:
        assert said == ""
        return
    *_, line, wiped, end = said.split("\r")
    assert re.fullmatch(r"κ of network: 30 products with the Hessian in \d+ (s|min \d+ s)", line)
    assert (wiped, end) == (" " * len(line), "")
