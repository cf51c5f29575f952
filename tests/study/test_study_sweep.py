"""A grid's runs: their names, what the folder says of them, and how a sweep deals with whatever happens to a run."""

import os
import signal
import threading
from concurrent.futures import Executor, Future
from itertools import product

import pandas as pd
import pytest
import torch
from hypothesis import given, strategies as st
from threadpoolctl import threadpool_limits

from hesscond.errors import ConfigError
from hesscond.report.sweeps import best_frame, cells_frame
from hesscond.runs import Checkpoints
from hesscond.study import load_study, open_run, run
from hesscond.study.grid import (
    Overrides,
    SweepConfig,
    parse_settings,
    plan_sweep,
    read_sweep,
    with_settings,
    write_sweep,
)
from hesscond.study.sections import validated
from hesscond.study.sweep import Outcome, WorkerProcesses, prepare_sweep, shared_files, sweep, work
from tests.runs.run_logs import same_runs

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def no_long_pause(monkeypatch):
    monkeypatch.setattr("hesscond.study.sweep.AGAIN", 0.1)


def tiny(iterations=30, **settings):
    study = with_settings(load_study("fc-digits"), {"model.hidden": [12, 10], **settings})
    return Overrides(iterations=iterations, probe_every=10).apply(study)


def config_of(study=None, **axes):
    given = {"methods": ["vanilla", "bnp"], "seeds": [0, 1], "rates": [0.1, 0.01], "batch_sizes": [60], **axes}
    return validated(SweepConfig, {"study": (study or tiny()).model_dump(mode="json", exclude_none=True), **given})


def prepared(config, out, data):
    return prepare_sweep(config, plan_sweep(config, out, CPU), {("digits", ()): data}, out)


@pytest.fixture(scope="module")
def files(digits):
    with shared_files({("digits", ()): digits}) as (_, files):
        yield files


def no_matter(outcome):
    """Take no notice of the end of a run."""


class Here(Executor):
    """Calls in this process, at once; a stand-in may take the place of the work."""

    def __init__(self, instead=None):
        self.instead, self.closed = instead, False

    def submit(self, fn, /, *args):
        future = Future()
        try:
            future.set_result((self.instead or fn)(*args))
        except Exception as error:
            future.set_exception(error)
        return future

    def shutdown(self, wait=True, *, cancel_futures=False):
        self.closed = True


def starts(folder):
    """How often a run was begun or gone on with."""
    return max(open_run(folder).rows("clock")["session"])


def test_every_point_of_the_grid_is_one_run_with_a_name_that_says_it(tmp_path):
    config = config_of(rates=[0.1, 1e-05], batch_sizes=[60, 6], settings={"training.momentum": [0, 0.9]})
    plans = plan_sweep(config, tmp_path, CPU)
    assert len(plans) == 2 * 2 * 2 * 2 * 2 == len({plan.folder for plan in plans})
    points = {
        (p.method, p.seed, p.learning_rate, p.study.training.batch_size, p.study.training.momentum) for p in plans
    }
    assert points == set(product(["vanilla", "bnp"], [0, 1], [0.1, 1e-05], [60, 6], [0, 0.9]))
    for p in plans:
        momentum = "0.9" if p.study.training.momentum else "0"
        size = p.study.training.batch_size
        assert p.folder == tmp_path / f"{p.method}-b{size}-lr{p.learning_rate!r}-momentum{momentum}-seed{p.seed}"
    assert [p.seed for p in plans] == [0] * 16 + [1] * 16
    assert plan_sweep(config, tmp_path, CPU) == plans


def test_rates_of_the_study_and_of_its_grid(tmp_path):
    study = tiny()
    own = plan_sweep(config_of(rates="study", seeds=[0]), tmp_path, CPU)
    assert {p.method: p.learning_rate for p in own} == {m: study.learning_rate(m, 60) for m in ("vanilla", "bnp")}
    with_grid = study.model_dump(mode="json", exclude_none=True)
    with_grid["learning_rates"][0]["grid"] = [0.3, 0.03]
    config = validated(
        SweepConfig, {"study": with_grid, "methods": ["vanilla"], "seeds": [0], "rates": "grid", "batch_sizes": [60]}
    )
    assert [p.learning_rate for p in plan_sweep(config, tmp_path, CPU)] == [0.03, 0.3]


scalars = st.one_of(
    st.integers(-(10**6), 10**6),
    st.booleans(),
    st.floats(allow_nan=False, allow_infinity=False),
    st.from_regex(r"[a-z]{1,8}", fullmatch=True),
)


@given(
    st.lists(scalars, min_size=1, max_size=4).filter(lambda xs: not {"true", "false", "inf", "nan"} & set(map(str, xs)))
)
def test_settings_are_read_as_they_are_written(values):
    text = ",".join(str(v).lower() if isinstance(v, bool) else str(v) for v in values)
    assert parse_settings([f"a.b={text}"]) == {"a.b": values}


@pytest.mark.parametrize(
    ("texts", "words"),
    [
        (["momentum"], "KEY=VALUE"),
        (["training.batch_size=6"], "use --batch-size"),
        (["run.seed=1"], "what a run was"),
        (["a=1", "a=2"], "given twice"),
    ],
)
def test_settings_that_cannot_be(texts, words):
    with pytest.raises(ConfigError, match=words):
        parse_settings(texts)


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("training.momentun", 0.9, "unknown key 'momentun' .*did you mean 'momentum'"),
        ("training.momentum", "much", r"training\.momentum: .*got 'much'"),
        ("training.momentum.deep", 1, "momentum is not a table"),
    ],
)
def test_settings_are_checked_like_the_file(tmp_path, key, value, words):
    with pytest.raises(ConfigError, match=words):
        plan_sweep(config_of(settings={key: [value]}), tmp_path, CPU)


@pytest.mark.parametrize(
    ("axes", "words"),
    [
        ({"methods": []}, "methods"),
        ({"seeds": [0, 0]}, "only once"),
        ({"threads": 0}, "threads"),
        ({"colour": "red"}, "unknown key 'colour'"),
    ],
)
def test_axes_that_cannot_be(axes, words):
    with pytest.raises(ConfigError, match=words):
        config_of(**axes)


def test_two_runs_of_one_name_are_refused(tmp_path):
    config = config_of(settings={"description": ["a b", "a/b"]})
    with pytest.raises(ConfigError, match=r"would have the name vanilla-b60-lr0.1-descriptiona-b-seed0"):
        plan_sweep(config, tmp_path, CPU)


def test_the_description_in_the_folder_reads_back(tmp_path):
    config = config_of(settings={"training.momentum": [0, 0.9], "model.hidden": [[12], [10, 10]]}, threads=3)
    config = config.model_copy(update={"study": tiny()})
    write_sweep(config, tmp_path)
    assert read_sweep(tmp_path) == config
    (tmp_path / "sweep.toml").write_text("methods = 3")
    with pytest.raises(ConfigError, match=r"sweep\.toml: "):
        read_sweep(tmp_path)


def test_a_grid_may_grow_but_not_change(tmp_path, digits):
    prepared(config_of(), tmp_path, digits)
    assert len(prepared(config_of(seeds=[0, 1, 2]), tmp_path, digits).left) == 12
    for other, words in (
        (config_of(), "without bnp-b60-lr0.01-seed2, "),
        (config_of(tiny(31), seeds=[0, 1, 2]), r"another sweep \(study\)"),
        (config_of(seeds=[0, 1, 2], threads=2), r"another sweep \(threads\)"),
    ):
        with pytest.raises(ConfigError, match=words):
            prepared(other, tmp_path, digits)
    assert read_sweep(tmp_path).seeds == [0, 1, 2]


def test_a_folder_with_anything_else_is_left_alone(tmp_path, digits):
    (tmp_path / "thesis.tex").write_text("precious")
    with pytest.raises(ConfigError, match="not empty and holds no sweep"):
        prepared(config_of(), tmp_path, digits)
    with pytest.raises(ConfigError, match="is a file"):
        prepared(config_of(), tmp_path / "thesis.tex", digits)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


def test_what_would_fail_is_found_before_anything_is_written(tmp_path, digits):
    with pytest.raises(ConfigError, match="batch size 2000 exceeds"):
        prepared(config_of(batch_sizes=[60, 2000]), tmp_path / "out", digits)
    assert not (tmp_path / "out").exists()


@pytest.fixture
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    with threadpool_limits(1):
        yield
    torch.set_num_threads(before)


@pytest.mark.slow
def test_two_processes_come_to_what_separate_runs_come_to(tmp_path, digits, one_thread):
    config = config_of(seeds=[0])
    ready = prepared(config, tmp_path / "sweep", digits)
    ended_outcomes = []
    with shared_files({("digits", ()): digits}) as (scratch, files):
        outcomes = sweep(ready.left, WorkerProcesses([CPU] * 2, scratch), ended_outcomes.append, threads=1, files=files)
    assert not scratch.exists()
    assert [outcome.status for outcome in outcomes.values()] == ["finished"] * 4
    assert sorted(outcome.name for outcome in ended_outcomes) == sorted(outcomes)
    pids = set()
    for plan in plan_sweep(config, tmp_path / "alone", CPU):
        run(plan, digits)
        same_runs(plan.folder, tmp_path / "sweep" / plan.folder.name)
        pids.add(open_run(tmp_path / "sweep" / plan.folder.name).facts["pid"])
    assert len(pids) == 2
    again = prepared(config, tmp_path / "sweep", digits)
    assert (again.left, set(again.done)) == ([], set(outcomes))


def test_a_diverged_run_is_recorded_and_not_repeated(tmp_path, digits, files):
    config = config_of(methods=["vanilla"], seeds=[0], rates=[0.1, 1e30])
    outcomes = sweep(prepared(config, tmp_path, digits).left, Here(), no_matter, threads=1, files=files)
    assert outcomes["vanilla-b60-lr1e+30-seed0"].status == "diverged"
    assert outcomes["vanilla-b60-lr0.1-seed0"].status == "finished"
    ready = prepared(config, tmp_path, digits)
    assert ready.left == []
    assert ready.done["vanilla-b60-lr1e+30-seed0"] == outcomes["vanilla-b60-lr1e+30-seed0"]


def test_what_goes_wrong_in_one_run_does_not_stop_the_others(tmp_path, digits, files):
    config = config_of(methods=["vanilla"], seeds=[0, 1, 2])
    ready = prepared(config, tmp_path, digits)
    (tmp_path / "vanilla-b60-lr0.1-seed1").mkdir()
    (tmp_path / "vanilla-b60-lr0.1-seed1" / "thesis.tex").write_text("in the way")
    with pytest.raises(ConfigError, match=r"vanilla-b60-lr0\.1-seed1 is not empty and holds no run"):
        prepared(config, tmp_path, digits)
    outcomes = sweep(ready.left, Here(), no_matter, threads=1, files=files)
    assert {name: o.status for name, o in outcomes.items() if o.status != "finished"} == {
        "vanilla-b60-lr0.1-seed1": "failed"
    }
    assert "is not empty" in outcomes["vanilla-b60-lr0.1-seed1"].message


def test_an_error_of_the_program_leaves_a_traceback(tmp_path, digits, monkeypatch, files):
    def broken(*_, **__):
        raise ZeroDivisionError("so it goes\nand on")

    monkeypatch.setattr("hesscond.study.runner.run", broken)
    ready = prepared(config_of(methods=["vanilla"], seeds=[0], rates=[0.1]), tmp_path, digits)
    (outcome,) = sweep(ready.left, Here(), no_matter, threads=1, files=files).values()
    trace = tmp_path / f"{outcome.name}.traceback"
    assert (outcome.status, outcome.message) == ("failed", f"ZeroDivisionError: so it goes (see {trace})")
    assert "def broken" in trace.read_text() or "in broken" in trace.read_text()


def test_a_run_whose_worker_breaks_down_has_failed_and_no_other(tmp_path, digits, files):
    ready = prepared(config_of(methods=["vanilla"], seeds=[0, 1], rates=[0.1]), tmp_path, digits)

    def unlucky(plan, *_):
        if plan.seed == 0:
            raise RuntimeError("the worker was killed")
        return Outcome(plan.folder.name, "finished")

    executor = Here(unlucky)
    outcomes = sweep(ready.left, executor, no_matter, threads=1, files=files)
    assert outcomes["vanilla-b60-lr0.1-seed1"].status == "finished"
    assert outcomes["vanilla-b60-lr0.1-seed0"].status == "failed"
    assert "its worker broke down (RuntimeError: the worker was killed)" in outcomes["vanilla-b60-lr0.1-seed0"].message
    assert executor.closed


def test_a_run_that_another_process_works_on_is_left_out(tmp_path, digits, files):
    config = config_of(methods=["vanilla"], seeds=[0, 1], rates=[0.1])
    ready = prepared(config, tmp_path, digits)
    name = "vanilla-b60-lr0.1-seed0"
    with Checkpoints(tmp_path / name):
        assert [p.folder.name for p in prepared(config, tmp_path, digits).left] == [p.folder.name for p in ready.left]
        outcomes = sweep(ready.left, Here(), no_matter, threads=1, files=files)
    assert {n: o.status for n, o in outcomes.items()} == {name: "busy", "vanilla-b60-lr0.1-seed1": "finished"}
    assert not (tmp_path / name / "run.sqlite").exists()


def test_two_sweeps_in_one_folder_do_each_run_once(tmp_path, digits, one_thread, files):
    """Both are handed all runs at the same time; threads of this process stand for processes."""
    config = config_of(methods=["vanilla"], seeds=[0, 1, 2, 3], rates=[0.1])
    ready = prepared(config, tmp_path, digits)
    found = {}

    def one(number):
        found[number] = sweep(ready.left, Here(), no_matter, threads=1, files=files)

    both = [threading.Thread(target=one, args=(number,)) for number in range(2)]
    for thread in both:
        thread.start()
    for thread in both:
        thread.join()
    for plan in ready.left:
        assert starts(plan.folder) == 1
        assert open_run(plan.folder).status == "finished"
        assert "finished" in {found[number][plan.folder.name].status for number in found}


def test_a_run_that_is_told_to_end_goes_on_to_the_same(tmp_path, digits, one_thread, monkeypatch, files):
    study = tiny(60, **{"training.checkpoint_seconds": 0.0})
    config = config_of(study, methods=["bnp"], seeds=[0], rates=[0.1])
    (plan,) = prepared(config, tmp_path / "sweep", digits).left
    own = Checkpoints.save

    def told(self, iteration, state):
        own(self, iteration, state)
        if iteration == 25:
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(Checkpoints, "save", told)
    task = (plan, files["digits", ()], 1)
    assert work(*task).status == "interrupted"
    monkeypatch.undo()
    assert open_run(plan.folder).status == "interrupted"
    assert len(open_run(plan.folder).table("training")) == 25
    assert work(*task) == Outcome(plan.folder.name, "finished")
    (alone,) = plan_sweep(config, tmp_path / "alone", CPU)
    run(alone, digits)
    same_runs(alone.folder, plan.folder)
    assert starts(plan.folder) == 2


def frame_of(rows):
    keys = ("method", "learning_rate", "seed", "status", "loss")
    frame = pd.DataFrame([dict(zip(keys, row, strict=True)) for row in rows])
    extra = {"batch_size": 60, "accuracy": 0.9, "seconds": 1.0, "collapsed": False, "run": frame.index.astype(str)}
    return frame.assign(**extra)


def test_the_best_rate_is_that_of_the_smallest_mean_and_none_that_diverged():
    rows = [("a", rate, seed, "finished", loss + seed)
            for rate, loss in ((0.01, 3.0), (0.1, 1.0), (1.0, 2.0)) for seed in (0, 1)]  # fmt: skip
    rows += [("a", 10.0, 0, "finished", 0.1), ("a", 10.0, 1, "diverged", 0.1)]
    rows += [("b", rate, 0, "finished", loss) for rate, loss in ((0.1, 1.0), (1.0, 0.5))]
    rows += [("c", rate, 0, "diverged", 1.0) for rate in (0.1, 1.0)]
    rows += [("d", 0.1, 0, "finished", 1.0), ("d", 0.1, 1, "diverged", 0.1)]
    a, b, c, d = best_frame(frame_of(rows), cells_frame([])).to_dict("records")
    assert (a["learning_rate"], a["edge"], a["seeds"], a["rates"], a["diverged"]) == (0.1, "", 2, 4, 1)
    assert (a["loss"], a["loss_min"], a["loss_max"]) == (1.5, 1.0, 2.0)
    assert (b["learning_rate"], b["edge"], b["seeds"]) == (1.0, "highest", 1)
    assert c["learning_rate"] != c["learning_rate"]
    assert (c["seeds"], c["diverged"]) == (0, 2)
    # where every rate lost a seed, the others have results
    assert (d["learning_rate"], d["loss"], d["seeds"], d["diverged"]) == (0.1, 1.0, 1, 1)
