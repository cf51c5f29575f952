"""The command line, in this process: what it prints, what it leaves behind, and how it refuses."""

import csv
import io
import json
import math

import pandas as pd
import pytest
import torch

import hesscond
import hesscond.commands.study as study_command
from hesscond import errors
from hesscond.data import load
from hesscond.data.files import DownloadError
from hesscond.methods import registered
from hesscond.methods.sphere import Sphere
from hesscond.runs import TABLES, RunLog
from hesscond.study import RunPlan, load_study, open_run, run
from hesscond.study.grid import Overrides

STUDY = """
name = "tiny"
description = "for the [/tests]"

[data]
name = "digits"

[model]
hidden = [8]

[training]
batch_size = 60
iterations = 3

[[learning_rates]]
batch_size = 60
rate = { vanilla = 0.1, bnp = 0.5 }

[probe]
layers = ["fc2"]
units = [3]
"""
TINY = ("study", "tiny.toml", "--method", "bnp", "--out", "out")
LONG = 300 * "a"


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """An empty working directory with one study file; no network, no cache, no terminal."""
    for name in ("HESSCOND_DATA_DIR", "FORCE_COLOR", "TTY_COMPATIBLE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "no-cache"))
    monkeypatch.setenv("HOME", str(tmp_path / "no-home"))

    def refuse(*args):
        raise DownloadError("there is no network in a test")

    monkeypatch.setattr("hesscond.data.loading.download_files", refuse)
    work = tmp_path / "work"
    work.mkdir()
    (work / "tiny.toml").write_text(STUDY)
    monkeypatch.chdir(work)
    return work


@pytest.fixture
def run_cli(folder, call_cli):
    """Call hesscond with arguments in the folder: code, out, err."""
    return call_cli


@pytest.fixture
def refused(run_cli, folder):
    """Call hesscond with bad arguments, which must get one sentence with these words and leave no trace."""

    def call(arguments, *words):
        before = sorted(folder.rglob("*"))
        result = run_cli(*arguments)
        assert result.code == 2, result
        assert result.out == ""
        assert result.err.startswith("error: ")
        assert result.err.endswith("\n")
        assert len(result.err.splitlines()) == 1
        assert "Traceback" not in result.err
        for word in words:
            assert word in result.err
        assert sorted(folder.rglob("*")) == before

    return call


@pytest.fixture
def no_figure(monkeypatch):
    """Leave out the drawing, which takes seconds."""
    monkeypatch.setattr(study_command, "save_figure", lambda figure, path: path.write_bytes(b""))


@pytest.fixture
def stored(folder):
    """A finished run in the folder ``done``, without the figure."""
    plan = RunPlan(load_study("tiny.toml"), "bnp", 0, 0.5, folder / "done", torch.device("cpu"))
    run(plan, load("digits"))
    return open_run(folder / "done")


# --- runs that go well -----------------------------------------------------------------------------------------------


def test_one_run_with_its_figure(run_cli, folder):
    result = run_cli(*TINY)
    assert (result.code, result.err) == (0, "")
    assert "\x1b" not in result.out
    assert "tiny · layer fc2, unit 3 · batch size 60" in result.out
    assert "runs:   out\n" in result.out
    names = sorted(path.name for path in (folder / "out").iterdir())
    assert names == ["checkpoints", "config.toml", "equal-loss.pdf", "equal-loss.png", "run.sqlite"]
    assert (folder / "out" / "equal-loss.png").read_bytes().startswith(b"\x89PNG")
    assert (folder / "out" / "equal-loss.pdf").read_bytes().startswith(b"%PDF")
    assert open_run(folder / "out").status == "finished"


@pytest.mark.slow
def test_several_methods_and_seeds(run_cli, folder, no_figure):
    options = ("--iterations", 4, "--lr", 0.05, "--batch-size", 7, "--probe-every", 2, "--device", "cpu")
    result = run_cli("study", "tiny.toml", "-m", "vanilla", "-m", "bnp", "--seed", "0, 5", "--out", "a[/b]", *options)
    assert (result.code, result.err) == (0, "")
    assert "runs:   a[/b]\n" in result.out
    parent = folder / "a[/b]"
    folders = sorted(path.name for path in parent.iterdir() if path.is_dir())
    assert folders == ["bnp-seed0", "bnp-seed5", "vanilla-seed0", "vanilla-seed5"]
    for name in folders:
        stored = open_run(parent / name)
        assert (stored.label, stored.status, stored.iterations) == (name, "finished", 4)
        assert stored.config["run"]["learning_rate"] == 0.05
        assert stored.config["training"]["batch_size"] == 7
        probe = stored.table("probe").query("data == 'batch'")
        assert probe["iteration"].tolist() == [0, 2]
        assert probe["samples"].tolist() == [7, 7]


def test_no_probing_and_whole_epochs(run_cli, folder, no_figure):
    result = run_cli(*TINY, "--epochs", 1, "--probe-every", 0)
    assert (result.code, result.err) == (0, "")
    stored = open_run(folder / "out")
    assert stored.iterations == 1437 // 60
    assert len(stored.table("probe")) == 0


def test_without_out_runs_gather_in_runs(run_cli, folder, no_figure):
    assert run_cli(*TINY[:-2]).code == 0
    (made,) = (folder / "runs").iterdir()
    assert made.name.startswith("tiny-")
    listed = json.loads(run_cli("runs", "--json").out)
    assert [r["run"] for r in listed] == [f"runs/{made.name}"]


@pytest.mark.slow
def test_a_method_without_a_rate_in_the_study_takes_its_own_and_says_so(run_cli, folder, no_figure):
    result = run_cli("study", "tiny.toml", "-m", "bnp", "-m", "sphere", "--out", "out")
    assert result.code == 0
    (line,) = result.err.splitlines()
    assert line == (
        f"study tiny has no learning rate for sphere at batch size 60: taking the method's default, {Sphere.rate:g}"
    )
    assert open_run(folder / "out" / "sphere-seed0").config["run"]["learning_rate"] == Sphere.rate
    swept = run_cli("sweep", "tiny.toml", "-m", "bnp", "--batch-size", "60,6", "--jobs", 1, "--out", "swept")
    assert "has no learning rate for bnp at batch size 6: taking the method's default" in swept.err
    assert "at batch size 60" not in swept.err


def test_a_run_that_diverges_does_not_stop_the_others(run_cli, folder, no_figure):
    (folder / "tiny.toml").write_text(STUDY.replace("vanilla = 0.1", "vanilla = 1e25"))
    result = run_cli("study", "tiny.toml", "-m", "vanilla", "-m", "bnp", "--out", "out")
    assert result.code == 1
    (line,) = result.err.splitlines()
    assert line.startswith("error: tiny vanilla seed 0: ")
    assert "at iteration " in line
    vanilla, bnp = (open_run(folder / "out" / name) for name in ("vanilla-seed0", "bnp-seed0"))
    assert (vanilla.status, bnp.status) == ("diverged", "finished")
    assert f"at iteration {vanilla.iterations}:" in line
    assert bnp.iterations == 3
    assert "diverged" in result.out


def test_a_huge_learning_rate(run_cli, folder, no_figure):
    result = run_cli("study", "fc-digits", "-m", "vanilla", "--lr", "1e12", "--iterations", 30, "--out", "out")
    assert result.code == 1
    assert len(result.err.splitlines()) == 1
    stored = open_run(folder / "out")
    assert stored.status == "diverged"
    assert f"the loss is nan at iteration {stored.iterations}:" in result.err
    assert 1 <= stored.iterations < 30


def test_ctrl_c_while_loading(run_cli, folder, monkeypatch):
    def interrupt(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr(study_command, "load_data", interrupt)
    result = run_cli(*TINY)
    assert (result.code, result.out) == (130, "")
    assert "Traceback" not in result.err
    assert not (folder / "out").exists()


# --- bad use ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("frobnicate",), ["frobnicate"]),
        (("study",), ["name"]),
        (("study", "nope", "-m", "bnp"), ["unknown study 'nope'", "fc-digits"]),
        (("study", "nope.toml", "-m", "bnp"), ["no study file nope.toml"]),
        (("study", f"{LONG}.toml", "-m", "bnp"), ["too long"]),
        (TINY[:2], ["--method", "bnp", "vanilla"]),
        ((*TINY, "--frob", "1"), ["--frob"]),
        ((*TINY, "-m", "adamant"), ["unknown method 'adamant'", "did you mean adam?"]),
        ((*TINY, "-m", "bnp"), ["twice"]),
        ((*TINY, "--seed", "0,0"), ["twice"]),
        ((*TINY, "--seed", "a"), ["--seed", "'a'"]),
        ((*TINY, "--seed", "0,,1"), ["--seed"]),
        ((*TINY, "--seed", "-1"), ["--seed", "-1"]),
        ((*TINY, "--seed", str(2**63)), ["--seed", str(2**63)]),
        ((*TINY, "--iterations", "0"), ["--iterations", "0"]),
        ((*TINY, "--iterations", "x"), ["--iterations"]),
        ((*TINY, "--iterations", 21 * "9"), ["iterations", 21 * "9"]),
        ((*TINY, "--epochs", "0"), ["--epochs", "0"]),
        ((*TINY, "--epochs", "1", "--iterations", "1"), ["--epochs", "--iterations"]),
        ((*TINY, "--batch-size", "0"), ["--batch-size", "0"]),
        ((*TINY, "--batch-size", "1438", "--lr", "1"), ["1438", "1437"]),
        ((*TINY, "--batch-size", 30 * "9", "--lr", "1"), ["batch_size"]),
        ((*TINY, "--lr", "0"), ["--lr"]),
        ((*TINY, "--lr", "nan"), ["--lr", "nan"]),
        ((*TINY, "--lr", "1e39"), ["--lr", "1e+39"]),
        ((*TINY, "--probe-every", "-1"), ["--probe-every", "-1"]),
        ((*TINY, "--device", "cuda:99"), ["cuda:99", "does not exist"]),
        ((*TINY, "--device", "tpu"), ["tpu"]),
        ((*TINY[:-1], "tiny.toml"), ["tiny.toml is a file"]),
        ((*TINY[:-1], "tiny.toml/below"), ["tiny.toml/below", "Not a directory"]),
        ((*TINY[:-1], "/proc/hesscond-test"), ["/proc/hesscond-test", "cannot be written"]),
        ((*TINY[:-1], "."), ["not empty"]),
        (("study", "fc-mnist", *TINY[2:], "--data-dir", "tiny.toml"), ["tiny.toml"]),
        (("study", "fc-mnist", *TINY[2:], "--data-dir", "."), ["hesscond data fetch mnist", "no network"]),
        (("study", "fc-cifar10", *TINY[2:]), ["hesscond data fetch cifar10", "no network"]),
        (("data", "fetch", "imagenet"), ["imagenet", "cifar10"]),
        (("runs", "nowhere"), ["nowhere"]),
        (("runs", "tiny.toml"), ["tiny.toml"]),
        (("export", "nowhere"), ["nowhere"]),
        (("table",), ["kind"]),
        (("table", "summary"), ["runs"]),
        (("table", "poem", "."), ["poem", "summary"]),
        (("table", "summary", "."), ["no run"]),
        (("figure", "conditioning", ".", "-o", "a.pdf"), ["no run"]),
    ],
    ids=lambda value: " ".join(map(str, value))[:60] if isinstance(value, tuple) else "",
)
def test_bad_use(refused, arguments, words):
    refused(arguments, *words)


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ('name = "tiny"', "name = [", ["not valid TOML"]),
        ('name = "tiny"', 'name = "tiny"\nnmae = 1', ["tiny.toml", "unknown key 'nmae'"]),
        ("hidden = [8]", "hidden = [999999999999]", ["999999999999", "cannot be built"]),
        ("vanilla = 0.1", "sgd = 0.1", ["unknown method 'sgd'"]),
        ("vanilla = 0.1", '"van\\nilla" = -0.1', ["greater than 0"]),
    ],
)
def test_bad_study_files(refused, folder, old, new, words):
    assert old in STUDY
    (folder / "tiny.toml").write_text(STUDY.replace(old, new, 1))
    refused(TINY, *words)


def test_study_files_that_are_something_else(refused, folder):
    (folder / "dir.toml").mkdir()
    (folder / "binary.toml").write_bytes(bytes(range(256)))
    for name, word in (("dir.toml", "directory"), ("binary.toml", "not valid TOML")):
        refused(("study", name, "-m", "bnp"), name, word)


def test_an_out_that_holds_another_run(refused, stored):
    for more in ((), ("-m", "vanilla")):
        refused((*TINY[:-1], "done", *more), "done holds a run: add --resume")
    refused((*TINY[:-1], stored.folder.parent), "is a folder of runs (done)")


def test_one_of_several_folders_is_taken(refused, folder, stored):
    stored.folder.rename(folder / "bnp-seed1")
    (folder / "tiny.toml").replace(folder.parent / "tiny.toml")
    refused(
        ("study", "../tiny.toml", "-m", "bnp", "--seed", "0,1", "--out", "."), "bnp-seed1 holds a run: add --resume"
    )


def test_data_that_are_not_the_published_ones(refused, folder):
    batches = folder / "data" / "cifar-10-batches-py"
    batches.mkdir(parents=True)
    cifar = ("study", "fc-cifar10", *TINY[2:], "--data-dir", "data")
    for name in [*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"]:
        refused(cifar, "lacks", name, "hesscond data fetch cifar10")
        (batches / name).write_bytes(b"not CIFAR")
    refused(cifar, "data_batch_1", "md5", "hesscond data fetch cifar10")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("export", "done", "--table", "weights"), ["'weights'", "training, evaluation, probe"]),
        (("export", "done", "--format", "xlsx"), ["'xlsx'", "csv, json"]),
        (("export", "done", "--format", "parquet"), ["-o"]),
        (("export", "done", "--format", "json", "-o", "nowhere/probe.json"), ["nowhere", "No such file"]),
        (("export", "done", "-o", "."), ["directory"]),
        (("figure", "pie", "done", "-o", "a.pdf"), ["'pie'", "conditioning"]),
        (("figure", "conditioning", "done", "-o", "a.docx"), ["a.docx", ".pdf"]),
        (("figure", "conditioning", "done", "-o", "nowhere/a.pdf"), ["nowhere", "no folder"]),
        (("figure", "conditioning", "done"), ["--output"]),
        (("figure", "conditioning", "done", "-o", "a.pdf", "--layer", "fc1"), ["fc1", "fc2"]),
        (("figure", "conditioning", "done", "-o", "a.pdf", "--unit", "-1"), ["-1", "3"]),
        (("figure", "conditioning", "done", "-o", "a.pdf", "--unit", "x"), ["--unit"]),
    ],
    ids=lambda value: " ".join(value)[:60] if isinstance(value, tuple) else "",
)
def test_bad_use_of_a_stored_run(refused, stored, arguments, words):
    refused(arguments, *words)
    assert open_run("done").iterations == 3


@pytest.mark.parametrize(
    "command", [("export", "done"), ("runs", "."), ("table", "summary", "done"), ("runs", ".", "--json")]
)
@pytest.mark.parametrize(
    ("file", "damage", "words"),
    [
        ("run.sqlite", lambda content: content[:5000], ["run.sqlite"]),
        ("run.sqlite", lambda content: b"", ["run.sqlite"]),
        ("run.sqlite", lambda content: bytes(reversed(content)), ["run.sqlite"]),
        ("config.toml", lambda content: content[:30], ["config.toml", "damaged"]),
        ("config.toml", lambda content: content.replace(b"[run]", b"[ruin]"), ["config.toml", "'method'"]),
        ("config.toml", lambda content: b"\xff" + content, ["config.toml", "damaged"]),
    ],
)
def test_damaged_runs(refused, stored, command, file, damage, words):
    path = stored.folder / file
    path.write_bytes(damage(path.read_bytes()))
    refused(command, *words)


def test_a_disk_that_is_full(run_cli, folder, monkeypatch):
    begin = RunLog._open

    def fill(log, folder):
        begin(log, folder)
        pages = log._connection.execute("PRAGMA page_count").fetchone()[0]
        log._connection.execute(f"PRAGMA max_page_count = {pages}")

    monkeypatch.setattr(RunLog, "_open", fill)
    result = run_cli(*TINY, "--iterations", 2000)
    assert (result.code, result.out) == (2, "")
    (line,) = result.err.splitlines()
    assert line.startswith("error: the log out/run.sqlite cannot be written")


# --- help and lists --------------------------------------------------------------------------------------------------


def test_help_and_version(run_cli):
    version = run_cli("--version")
    assert (version.code, version.out.split()[0]) == (0, "hesscond")
    for arguments in (("--help",), ("study", "--help"), ("data", "-h")):
        result = run_cli(*arguments)
        assert (result.code, result.err) == (0, "")
        assert result.out.startswith("Usage: ")
    for arguments in ((), ("data",)):
        result = run_cli(*arguments)
        assert (result.code, result.out) == (2, "")
        assert result.err.startswith("Usage: ")
        assert len(result.err.splitlines()) > 5


def test_lists(run_cli, stored):
    studies, methods, runs = (
        json.loads(run_cli(*c, "--json").out) for c in (("studies",), ("methods",), ("runs", "."))
    )
    assert {s["name"] for s in studies} >= {"fc-cifar10", "fc3-cifar10", "fc-mnist", "fc3-mnist", "fc-digits"}
    assert [m["name"] for m in methods] == [m.name for m in registered()]
    assert {"bnp", "vanilla"} <= {m["name"] for m in methods}
    (row,) = runs
    assert row == {
        "run": "done",
        "study": "tiny",
        "method": "bnp",
        "seed": 0,
        "learning_rate": 0.5,
        "status": "finished",
        "iterations": 3,
        "total": 3,
        "loss": stored.table("training")["loss"].iloc[-1],
        "started": stored.facts["started"],
        "seconds": stored.seconds,
    }
    for command, words in (
        (("studies",), [s["name"] for s in studies]),
        (("methods",), ["bnp", "vanilla"]),
        (("runs", "."), ["done", "finished"]),
    ):
        result = run_cli(*command)
        assert (result.code, result.err) == (0, "")
        assert all(word in result.out for word in words)


def test_no_runs_is_an_empty_list(run_cli, folder):
    assert json.loads(run_cli("runs", ".", "--json").out) == []
    assert run_cli("runs", ".").code == 0


def test_table_and_figure_of_a_stored_run(run_cli, stored, folder):
    result = run_cli("table", "summary", ".")
    assert (result.code, result.err) == (0, "")
    assert "bnp" in result.out
    result = run_cli("figure", "conditioning", "done", "-o", "picture.svg")
    assert (result.code, result.out, result.err) == (0, "picture.svg\n", "")
    assert "<svg" in (folder / "picture.svg").read_text()


# --- export ----------------------------------------------------------------------------------------------------------

COLUMNS = {
    "training": {"iteration", "epoch", "loss"},
    "evaluation": {
        *("iteration", "epoch", "test_loss", "test_accuracy", "test_top5", "test_class_accuracy", "test_psnr"),
        "test_bits_per_character",
    },
    "probe": {
        "iteration",
        "data",
        "layer",
        "unit",
        "kappa",
        "kappa_lower",
        "kappa_upper",
        "kappa_preconditioned",
        "kappa_own",
        "kappa_D",
        "rank",
        "nullity",
        "resolved",
    },
}


@pytest.fixture
def odd(folder):
    """A log with every float that is hard to write."""
    config = load_study("tiny.toml").model_dump(exclude_none=True)
    config["run"] = {"method": "bnp", "seed": 0, "learning_rate": 0.5}
    log = RunLog(folder / "odd", config)
    values = [1 / 3, math.inf, None, 5e-324, 1.7976931348623157e308, 0.1 + 0.2, 123456789.123456789, 1e22, 4.0]
    for iteration, value in enumerate(values):
        log.training(iteration, 0, 1 / (iteration + 3))
        where = {"iteration": iteration, "layer": "fc2", "unit": 3, "rank": iteration}
        batch = where | {"data": "batch", "kappa": value}
        train = where | {"data": "train", "kappa_D": value, "resolved": value != math.inf}
        log.commit(probe=[batch, train])
    log.close("finished")
    return values


def read_csv(path, name):
    """The rows of an exported table, without pandas: missing is None."""
    kinds = {"INTEGER": int, "REAL": float, "TEXT": str}
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    readers = {column: kinds[kind.split()[0]] for column, kind in TABLES[name].items()}
    readers |= {column: {"True": True, "False": False}.get for column in readers if column.startswith("resolved")}
    return [{column: readers[column](text) if text else None for column, text in row.items()} for row in rows]


def same_rows(rows, table):
    assert len(rows) == len(table) >= 2
    for row, wanted in zip(rows, table.to_dict("records"), strict=True):
        assert list(row) == list(wanted)
        for column, value in row.items():
            assert value == wanted[column] or (value is None and pd.isna(wanted[column]))


@pytest.mark.parametrize("name", list(COLUMNS))
def test_csv_is_the_log_to_the_last_bit(run_cli, stored, folder, name):
    to_file = run_cli("export", "done", "--table", name, "--format", "csv", "-o", "table.csv")
    printed = run_cli("export", "done", "--table", name)
    assert (to_file.code, to_file.out, to_file.err, printed.code, printed.err) == (0, "", "", 0, "")
    assert printed.out == (folder / "table.csv").read_text()
    assert "\r" not in printed.out
    rows = read_csv(folder / "table.csv", name)
    assert set(rows[0]) >= COLUMNS[name]
    same_rows(rows, stored.table(name))


@pytest.mark.parametrize("name", list(COLUMNS))
def test_json_is_the_log_to_the_last_bit(run_cli, stored, folder, name):
    run_cli("export", "done", "--table", name, "--format", "json", "-o", "table.json")
    printed = run_cli("export", "done", "--table", name, "--format", "json")
    rows = json.loads((folder / "table.json").read_text())
    assert json.loads(printed.out) == rows
    same_rows(rows, stored.table(name))


def test_infinite_missing_and_extreme_numbers(run_cli, odd, folder):
    run_cli("export", "odd", "--table", "probe", "-o", "odd.csv")
    rows = read_csv(folder / "odd.csv", "probe")
    for data, column in (("batch", "kappa"), ("train", "kappa_D")):
        assert [r[column] for r in rows if r["data"] == data] == odd
    # JSON has no infinity: null, with resolved saying why
    rows = json.loads(run_cli("export", "odd", "--format", "json").out, parse_constant=pytest.fail)
    finite = [None if v == math.inf else v for v in odd]
    assert [r["kappa"] for r in rows if r["data"] == "batch"] == finite
    assert [r["kappa_D"] for r in rows if r["data"] == "train"] == finite
    assert [r["rank"] for r in rows if r["data"] == "batch"] == list(range(len(odd)))
    assert [r["resolved"] for r in rows if r["data"] == "train"] == [v != math.inf for v in odd]
    assert {r["resolved"] for r in rows if r["data"] == "batch"} == {None}


# --- options in numbers ----------------------------------------------------------------------------------------------


def test_overrides_leave_the_rest_alone():
    study = load_study("fc-digits")
    assert Overrides().apply(study) == study
    changed = Overrides(iterations=7, batch_size=6, probe_every=0).apply(study)
    assert (changed.training.iterations, changed.training.epochs, changed.training.batch_size) == (7, None, 6)
    assert (changed.probe.every, changed.probe.train_every_epochs) == (0, 0)
    assert Overrides(epochs=2).apply(changed).training.iterations is None
    assert Overrides(probe_every=3).apply(study).probe.train_every_epochs == study.probe.train_every_epochs


def test_summary_table_as_csv(run_cli, stored):
    rows = list(csv.DictReader(io.StringIO(run_cli("table", "summary", ".", "--format", "csv").out)))
    assert [row["method"] for row in rows] == [stored.method]
    batch = stored.table("probe").query("data == 'batch'")
    assert float(rows[0]["batch_kappa"]) == pytest.approx(batch["kappa"].median(), rel=1e-12)
    assert run_cli("table", "summary", ".", "--format", "docx").code == 2


@pytest.mark.slow
def test_config_toml_of_a_run_repeats_it_without_options(run_cli, folder):
    first = run_cli("study", "tiny.toml", "--method", "bnp", "--seed", "3", "--lr", "0.07", "--out", "first")
    again = run_cli("study", "first/config.toml", "--out", "again")
    assert first.code == again.code == 0
    one, two = open_run(folder / "first"), open_run(folder / "again")
    assert one.config == two.config
    assert two.seed == 3
    assert one.table("training").equals(two.table("training"))
    other = run_cli("study", "first/config.toml", "--method", "vanilla", "--out", "other")
    assert other.code == 0
    assert open_run(folder / "other").config["run"]["learning_rate"] != 0.07


def test_what_is_gone_names_what_serves_instead(refused, monkeypatch):
    monkeypatch.setitem(errors.GONE, "--worst", "sort the table")
    monkeypatch.setitem(errors.GONE, "newton", "use kfac")
    monkeypatch.setitem(errors.GONE, "Newton", "use probe")
    refused(["probe", "model.py:make", "--worst", "3"], "'--worst' is gone: sort the table")
    refused(["study", "fc-digits", "-m", "newton"], "is gone: use kfac")
    with pytest.raises(AttributeError, match="it is gone, use probe"):
        getattr(hesscond, "Newton")  # noqa: B009
