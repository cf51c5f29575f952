"""Studies with several panels, methods that change the study, and figures of papers beside what came of their runs."""

import contextlib
import copy
import functools
import json
import math
import operator
import tomllib
from functools import partial
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import torch
from scipy import stats

from hesscond.data import load
from hesscond.errors import ConfigError
from hesscond.report.replication import (
    NOT_REPLICATED,
    REPLICATED,
    UNDECIDED,
    Seeds,
    caption,
    interval,
    judged,
    measured,
    replication_figure,
    replication_frame,
    seconds,
)
from hesscond.runs import RunLog, StoredRun
from hesscond.study import StudyConfig, load_study, open_run
from hesscond.study.files import OF_THE_FILE, OF_THE_PANEL, Comparison, StudyFile
from hesscond.study.grid import Overrides, plan_runs
from hesscond.study.listing import contents, studies_folder
from hesscond.study.replication import plan_replication, replication
from tests.cli_targets import changed_study

CPU = torch.device("cpu")

FIGURE = """
name = "mine"
description = "for the tests"

[model]
hidden = [8]

[training]
batch_size = 60
iterations = 3

[[methods]]
name = "SGD"
method = "vanilla"

[[methods]]
name = "wide BNP"
method = "bnp:rho=0.5"
model = { hidden = [12] }
training = { weight_decay = 0.5 }
schedule = { warmup_iterations = 2, warmup_start = 0.1 }

[[learning_rates]]
batch_size = 60
rate = { SGD = 0.1, "wide BNP" = 0.5 }

[replicate]
core_hours = 2.0

[probe]
units = [0]
every = 0
train_every_epochs = 0

[small]
training = { iterations = 2 }

[[panels]]
name = "left"
title = "as it is"
data = { name = "digits" }
paper = [{ of = "test_accuracy", tolerance = 5.0, values = { SGD = 90.0 } }]

[[panels]]
name = "right"
data = { name = "digits", standardize = true }
training = { batch_size = 30 }
methods = ["wide BNP", { name = "SGD", method = "adam" }]
learning_rates = [{ batch_size = 30, rate = { SGD = 0.01, "wide BNP" = 0.2 } }]

[panels.small]
training = { iterations = 1 }

[[claims]]
panels = ["left"]
says = "preconditioning helps"
holds = ["wide BNP > SGD"]
"""


@pytest.fixture
def figure(tmp_path):
    return partial(changed_study, tmp_path / "mine.toml", text=FIGURE)


# --- panels and methods ----------------------------------------------------------------------------------------------


def test_a_panel_is_the_file_with_its_changes(figure):
    path = figure()
    left, right = (load_study(f"{path}/{panel}") for panel in ("left", "right"))
    assert (left.full_name, left.title, left.training.batch_size) == ("mine/left", "as it is", 60)
    assert (right.data.standardize, right.training.batch_size, right.training.iterations) == (True, 30, 3)
    assert [(m.name, m.method) for m in left.methods] == [("SGD", "vanilla"), ("wide BNP", "bnp:rho=0.5")]
    assert [(m.name, m.method) for m in right.methods] == [("wide BNP", "bnp:rho=0.5"), ("SGD", "adam")]
    assert right.learning_rate("SGD", 30) == 0.01
    small = [load_study(f"{path}/{panel}", "small").training.iterations for panel in ("left", "right")]
    assert small == [2, 1]


def test_a_method_brings_its_changes(figure):
    study = load_study(f"{figure()}/left")
    for text in ("wide BNP", "bnp", "bnp:rho=0.5"):
        variant = study.variant(text)
        assert (variant.method, variant.label) == ("bnp:rho=0.5", "wide BNP")
        assert (variant.study.model.hidden, variant.study.training.weight_decay) == ([12], 0.5)
        assert variant.study.learning_rate(text, 60) == 0.5
    assert study.variant("vanilla").study is study
    other = study.variant("bnp:rho=0.9")
    assert (other.label, other.study.model.hidden) == ("", [8])
    with pytest.raises(ConfigError, match=r"unknown method 'BNP'.*'SGD', 'wide BNP'"):
        study.variant("BNP")


def test_versions_of_one_method_are_told_apart(figure):
    path = figure('method = "vanilla"', 'method = "bnp"')
    study = load_study(f"{path}/left")
    # a run is called as it was typed
    assert (study.variant("SGD").label, study.variant("bnp").label) == ("SGD", "")
    assert study.variant("bnp").method == study.variant("SGD").method
    twice = StudyConfig.model_validate(
        study.model_dump(mode="json", exclude_none=True)
        | {"methods": [{"name": name, "method": f"bnp:rho={rho}"} for name, rho in (("a", 0.5), ("b", 0.6))]}
        | {"learning_rates": []}
    )
    with pytest.raises(ConfigError, match="several versions of 'bnp': choose from 'a', 'b'"):
        twice.variant("bnp")


def test_the_command_line_goes_before_the_method(figure, tmp_path):
    study = load_study(f"{figure()}/left")
    (plan,) = plan_runs(study, ["bnp"], [0], tmp_path / "out", CPU, Overrides(batch_size=20, learning_rate=0.3))
    assert (plan.study.training.batch_size, plan.study.training.weight_decay) == (20, 0.5)
    assert (plan.method, plan.label, plan.learning_rate) == ("bnp:rho=0.5", "wide BNP", 0.3)
    with pytest.raises(ConfigError, match="given twice, under two names"):
        plan_runs(study, ["bnp", "wide BNP"], [0], tmp_path / "out", CPU, Overrides())


def test_a_run_says_which_method_it_was(figure, tmp_path, call_cli):
    first = call_cli("study", f"{figure()}/left", "-m", "bnp", "--out", tmp_path / "one")
    assert (first.code, first.err) == (0, "")
    run = open_run(tmp_path / "one")
    assert (run.legend, run.method, run.label) == ("wide BNP", "bnp:rho=0.5", "wide BNP-seed0")
    assert run.config["model"]["hidden"] == [12]
    again = call_cli("study", tmp_path / "one/config.toml", "--lr", 0.25, "--out", tmp_path / "two")
    assert (again.code, again.err) == (0, "")
    assert open_run(tmp_path / "two").config["training"] == run.config["training"]
    refused = call_cli("study", tmp_path / "one/config.toml", "-m", "SGD", "--out", tmp_path / "three")
    assert (refused.code, "take the study" in refused.err) == (2, True)


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ('name = "right"', 'name = "left"', "panel 'left' is there twice"),
        ('name = "right"', 'title = "right"', r": key 'name' is missing in \[\[panels\]\] number 2"),
        ('methods = ["wide BNP", {', 'methods = ["narrow", {', "panel 'right' names a method 'narrow'"),
        ("hidden = [12]", "width = 12", "method 'wide BNP' .* unknown key 'width'"),
        ("hidden = [12]", "hidden = [0]", "hidden"),
        ('method = "vanilla"', 'method = "vanila"', "unknown method 'vanila'"),
        ('rate = { SGD = 0.1, "wide', 'rate = { SDG = 0.1, "wide', "unknown method 'SDG'"),
        ('name = "wide BNP"\nmethod', 'name = "SGD"\nmethod', "'SGD' is there twice"),
        ("hidden = [8]", "hidden = 8", "panel left: model.hidden: must be a list"),
    ],
)
def test_what_is_wrong_with_a_file_of_panels(figure, old, new, words):
    file = StudyFile.read(figure(old, new))
    with pytest.raises(ConfigError, match=words):
        list(map(partial(file.study, scale=None), file.panels))


def places(value, at=()):
    """The path of every value in a TOML document."""
    for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
        yield (*at, key)
        if isinstance(inner, dict | list):
            yield from places(inner, (*at, key))


@pytest.mark.share(4)
@pytest.mark.parametrize("place", list(places(tomllib.loads(FIGURE))), ids=lambda at: ".".join(map(str, at)))
def test_no_value_of_a_file_gives_a_traceback(place, tmp_path, monkeypatch):
    """Whatever stands in the place of a value, or nothing: either the figure is read or refused."""
    nothing = object()
    for wrong in (nothing, 3, -1.5, True, "x", "", [], [3], [[]], [{}], {}, {"name": 3}, {"x": {"y": [1]}}):
        content = copy.deepcopy(tomllib.loads(FIGURE))
        around = functools.reduce(operator.getitem, place[:-1], content)
        if wrong is nothing:
            del around[place[-1]]
        else:
            around[place[-1]] = wrong
        file = StudyFile(tmp_path / "mine.toml", content)
        monkeypatch.setattr(StudyFile, "named", lambda name, file=file: file)
        with contextlib.suppress(ConfigError):
            replication("mine.toml")


def test_a_file_of_panels_asks_for_one(figure):
    with pytest.raises(ConfigError, match=r"several panels: choose from .*mine.toml/left, .*mine.toml/right"):
        load_study(figure())
    with pytest.raises(ConfigError, match="no panel 'middle': choose from left, right"):
        load_study(f"{figure()}/middle")
    with pytest.raises(ConfigError, match="fc-digits has no panel 'x'"):
        load_study("fc-digits/x")


# --- figures ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ('holds = ["wide BNP > SGD"]', 'holds = ["wide BNP >= SGD"]', "is no comparison: use"),
        ('holds = ["wide BNP > SGD"]', 'holds = ["BNP > SGD"]', "panel 'left' has no method 'BNP'"),
        ('panels = ["left"]', 'panels = ["middle"]', "a claim is of the panel 'middle'"),
        ("values = { SGD = 90.0 }", "values = { GN = 90.0 }", "panel 'left' has no method 'GN'"),
        ("core_hours = 2.0", "core_hours = -2.0", "core_hours"),
    ],
)
def test_what_is_wrong_with_a_figure(figure, old, new, words):
    with pytest.raises(ConfigError, match=words):
        replication(str(figure(old, new)))


def test_a_figure_needs_methods():
    with pytest.raises(ConfigError, match="'fc-digits' is of no figure or table"):
        replication("fc-digits")


def test_every_figure_and_table_of_the_papers_is_there():
    found = {content["name"]: content for content in contents() if "replicate" in content}
    wanted = [f"bnp-figure-{n}" for n in range(3, 9)] + ["bnp-table-1"]
    wanted += [f"cwo-table-{n}" for n in range(1, 7)] + [f"wc-table-{n}" for n in range(1, 5)] + ["wc-figure-1"]
    assert set(wanted) <= set(found)
    for one in found.values():
        assert one["source"]
        assert one.get("claims") or any("paper" in table for table in (one, *one.get("panels", [])))


def test_the_runs_of_a_figure(figure, tmp_path):
    found = replication(str(figure()))
    plans = plan_replication(found, 2, tmp_path, CPU, Overrides(probe_every=0))
    assert [plan.folder.name for plan in plans] == [
        f"{name}-seed{seed}" for seed in (0, 1) for name in ("left-SGD", "left-wide-BNP", "right-wide-BNP", "right-SGD")
    ]
    assert [plan.method for plan in plans[:4]] == ["vanilla", "bnp:rho=0.5", "bnp:rho=0.5", "adam"]
    assert [plan.learning_rate for plan in plans[:4]] == [0.1, 0.5, 0.2, 0.01]
    (right,) = replication(f"{figure()}/right").panels
    assert right.name == "right"


@pytest.mark.slow
def test_a_figure_from_the_command_line(figure, tmp_path, call_cli):
    out = tmp_path / "out"
    command = ("replicate", figure(), "--seeds", 2, "--jobs", 1, "--out", out)
    first = call_cli(*command)
    assert first.code == 0
    runs = sorted(path.name for path in out.iterdir() if path.is_dir())
    assert len(runs) == 8
    frame = pd.read_csv(out / "mine.csv")
    assert list(frame["paper"]) == ["SGD 90", "preconditioning helps"]
    assert set(frame["seeds"]) == {2}
    for run in runs:
        assert open_run(out / run).status == "finished"
    accuracy = [100 * open_run(out / f"left-SGD-seed{s}").table("evaluation")["test_accuracy"].iloc[-1] for s in (0, 1)]
    name, mean, _, spread = frame["here"][0].split()
    # shown to two digits of the spread
    assert float(mean) == pytest.approx(np.mean(accuracy), abs=0.1 * np.std(accuracy, ddof=1))
    assert (name, float(spread)) == ("SGD", pytest.approx(np.std(accuracy, ddof=1), rel=0.1))
    assert frame["here"][0] in (out / "mine.md").read_text()
    assert (out / "mine.png").stat().st_size > 10_000
    again = call_cli(*command)
    assert "8 runs, all of them over before; nothing to do" in again.err


def test_the_time_of_a_figure(figure, tmp_path, monkeypatch):
    """BNP's Figure 9: seconds worked until the end of each epoch, breaks left out."""
    found = replication(str(figure("[replicate]", '[replicate]\nfigure = "timing"')) + "/left")
    clock = {"session": [0, 0, 0, 1, 1], "time": [100.0, 101.0, 102.0, 900.0, 903.0], "iterations": [0, 10, 20, 20, 50]}
    plans = plan_replication(found, 1, tmp_path, CPU, Overrides())
    runs = []
    for plan in plans[:1]:
        RunLog(plan.folder, plan.config(load("digits"))).close("finished")
        runs.append(open_run(plan.folder))
    evaluation = pd.DataFrame({"iteration": [0, 25, 50], "epoch": [0, 1, 2], "test_accuracy": [0.1, 0.2, 0.3]})
    training = pd.DataFrame({"iteration": range(50), "epoch": [0] * 25 + [1] * 25, "loss": 1.0, "lr": 0.1})
    tables = {"evaluation": evaluation, "training": training}
    monkeypatch.setattr(StoredRun, "rows", lambda self, name, **_: clock)
    monkeypatch.setattr(StoredRun, "table", lambda self, name: tables[name])
    monkeypatch.setattr(StoredRun, "iterations", 50)
    # 2 s for 20 iterations, then 3 s for 30
    assert list(seconds(runs[0])) == pytest.approx([0.0, 2.5, 5.0])
    drawn = replication_figure(found, {"left": runs})
    (line,) = [line for line in drawn.axes[0].lines if line.get_gid() == "left-SGD-test-mean"]
    assert (drawn.axes[0].get_ylabel(), list(line.get_ydata())) == ("training time (s)", pytest.approx([2.5, 5.0]))
    # of single samples, most losses are far below their mean
    tables["training"] = pd.DataFrame({"iteration": range(400), "epoch": 0, "loss": [1e-9, 1e-9, 1e-9, 8.0] * 100})
    monkeypatch.setattr(StoredRun, "iterations", 400)
    (line,) = [one for one in replication_figure(found, {"left": runs}).axes[1].lines if "SGD-loss" in one.get_gid()]
    assert list(line.get_ydata()) == pytest.approx([2.0] * len(line.get_ydata()), rel=0.4)


@pytest.mark.slow
def test_the_list_of_figures(call_cli):
    rows = {row["name"]: row for row in json.loads(call_cli("replicate", "--list", "--json").out)}
    assert rows["bnp-figure-8"]["runs"] == 2
    assert "cifar10" in rows["bnp-figure-8"]["data"]


# --- verdicts --------------------------------------------------------------------------------------------------------


def seeds(name, *values):
    return Seeds(name, dict(enumerate(values)))


def verdict(text, margin=1.0, **values):
    return judged(Comparison.of(text), {name: seeds(name, *own) for name, own in values.items()}, margin)


def test_an_interval_is_students():
    values = [1.0, 2.0, 4.0, 5.0]
    expected = stats.ttest_1samp(values, 0).confidence_interval(0.95)
    assert interval(values) == pytest.approx((expected.low, expected.high))
    assert interval([3.0]) == (3.0, 3.0)


def test_comparisons_are_paired_by_seed():
    base = np.array([40.0, 50.0, 60.0, 70.0])

    def shifted(*by):
        return base + np.array(by)

    # far apart between seeds, but always 1 ahead
    assert verdict("A > B", A=shifted(1.01, 1, 1, 0.99), B=base) == REPLICATED
    assert verdict("B > A", A=shifted(1.01, 1, 1, 0.99), B=base) == NOT_REPLICATED
    assert verdict("A > B", A=shifted(1, -1, 1, -1), B=base) == UNDECIDED
    assert verdict("A ~ B", A=shifted(0.1, -0.1, 0.1, -0.1), B=base) == REPLICATED
    assert verdict("A ~ B", A=shifted(5.1, 4.9, 5.1, 4.9), B=base) == NOT_REPLICATED
    assert verdict("A ~ B", A=shifted(3, -3, 3, -3), B=base) == UNDECIDED
    assert verdict("A in [40, 70]", A=[50.0, 51.0, 52.0]) == REPLICATED
    assert verdict("A in [40, 45]", A=[50.0, 51.0, 52.0]) == NOT_REPLICATED
    assert verdict("A in [40, 51]", A=[50.0, 51.0, 52.0]) == UNDECIDED


def test_what_diverged_is_worst():
    assert verdict("A > B", A=[50.0, 51.0], B=[-math.inf, -math.inf]) == REPLICATED
    assert verdict("A > B", A=[50.0, 51.0], B=[-math.inf, 50.0]) == REPLICATED
    assert verdict("A > B", A=[50.0, 51.0], B=[-math.inf, 60.0]) == UNDECIDED
    assert verdict("A > B", A=[-math.inf, -math.inf], B=[50.0, 51.0]) == NOT_REPLICATED
    assert verdict("A > B", A=[-math.inf], B=[-math.inf]) == UNDECIDED
    assert str(seeds("A", -math.inf, 50.0)) == "A diverged (1 of 2)"


def test_without_runs_nothing_is_decided(figure):
    frame = replication_frame(replication(str(figure())), {})
    assert set(frame["verdict"]) == {"not measured"}


def test_runs_that_end_within_an_epoch_have_no_time_of_an_epoch():
    evaluation = pd.DataFrame({"epoch": [0], "test_accuracy": [0.1]})
    run = {"status": "finished", "seconds": 2.0, "table": lambda name: evaluation}
    runs = {"batch-16": [SimpleNamespace(legend=name, seed=0, **run) for name in ("BN", "BNP")]}
    (row,) = replication_frame(replication("bnp-table-1/batch-16"), runs).to_dict("records")
    assert (row["here"], row["verdict"]) == ("BNP –; BN –", "not measured")


def test_one_seed_says_so_and_another_experiment_has_no_verdict(figure):
    accuracy = pd.DataFrame({"epoch": [0, 1], "test_accuracy": [0.1, 0.9]})
    run = {"status": "finished", "table": lambda name: accuracy}
    runs = [SimpleNamespace(legend=name, seed=0, **run) for name in ("SGD", "wide BNP")]
    found = replication(f"{figure()}/left")
    assert list(replication_frame(found, {"left": runs})["verdict"]) == [
        "replicated (one seed)",
        "undecided (one seed)",
    ]
    assert "here: one seed; verdicts" in caption(found, replication_frame(found, {"left": runs}))
    other = replication(f"{figure(', tolerance = 5.0', '')}/left")
    assert next(iter(replication_frame(other, {"left": runs})["verdict"])) == "not comparable"
    fastaa = [panel for panel in replication("cwo-table-1").panels if "fastaa" in panel.name]
    assert len(fastaa) == 6
    assert all(row.tolerance is None for panel in fastaa for row in panel.published)


def test_a_quantity_at_its_time():
    accuracy = pd.DataFrame({"epoch": [0, 1, 2, 3], "test_accuracy": [0.1, 0.5, 0.8, 0.7]})
    run = SimpleNamespace(status="finished", table=lambda name: accuracy)
    found = {at: measured(run, "test_accuracy", at) for at in ("end", "best", "first", "mean")}
    assert found == pytest.approx({"end": 70, "best": 80, "first": 50, "mean": 200 / 3})
    assert measured(run, "test_error", "best") == pytest.approx(20)
    diverged = SimpleNamespace(status="diverged")
    assert measured(diverged, "test_accuracy", "end") == -math.inf
    assert measured(diverged, "test_error", "end") == math.inf


def test_the_files_of_the_papers_hold_no_key_that_is_not_read():
    for path in studies_folder().glob("*.toml"):
        content = tomllib.loads(path.read_text())
        assert set(content) <= {*StudyConfig.model_fields, *OF_THE_FILE}
        for panel in content.get("panels", []):
            assert set(panel) <= {*StudyConfig.model_fields, *OF_THE_PANEL}


def test_claims_are_of_what_the_tables_of_the_papers_measure():
    for path in studies_folder().glob("*.toml"):
        layout = StudyFile.read(path).layout
        printed = {row.of for panel in layout.panels for row in panel.paper}
        assert {claim.of for claim in layout.claims} <= printed | {"train_loss"} or not printed, path
