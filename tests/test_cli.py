"""The command line, in this process: what it prints, and what it leaves behind."""

import json
import re
import shlex

import pytest

from hesscond.commands import performing
from hesscond.methods import registered
from hesscond.methods.sphere import Sphere
from hesscond.report import page
from hesscond.runs import RunLog
from hesscond.study import load_study, open_run
from hesscond.study.grid import Overrides
from tests.cli_targets import STUDY

TINY = ("study", "tiny.toml", "--method", "bnp", "--out", "out")


@pytest.fixture
def no_figure(monkeypatch):
    """Leave out the drawing, which takes seconds."""
    monkeypatch.setattr(page, "save_figure", lambda figure, path: path.write_bytes(b""))


# --- runs that go well -----------------------------------------------------------------------------------------------


def test_one_run_with_its_figure(call_cli, workplace):
    result = call_cli(*TINY)
    assert (result.code, result.err) == (0, "")
    assert "\x1b" not in result.out
    assert "tiny · layer fc2, unit 3 · batch size 60" in result.out
    assert "runs:   out\n" in result.out
    names = sorted(path.name for path in (workplace / "out").iterdir())
    assert names == ["checkpoints", "config.toml", "equal-loss.pdf", "equal-loss.png", "run.sqlite"]
    assert (workplace / "out" / "equal-loss.png").read_bytes().startswith(b"\x89PNG")
    assert (workplace / "out" / "equal-loss.pdf").read_bytes().startswith(b"%PDF")
    assert open_run(workplace / "out").status == "finished"


@pytest.mark.slow
def test_several_methods_and_seeds(call_cli, workplace, no_figure):
    options = ("--iterations", 4, "--lr", 0.05, "--batch-size", 7, "--probe-every", 2, "--device", "cpu")
    result = call_cli("study", "tiny.toml", "-m", "vanilla", "-m", "bnp", "--seed", "0, 5", "--out", "a[/b]", *options)
    assert (result.code, result.err) == (0, "")
    assert "runs:   a[/b]\n" in result.out
    parent = workplace / "a[/b]"
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


def test_without_out_runs_gather_in_runs(call_cli, workplace, no_figure):
    assert call_cli(*TINY[:-2]).code == 0
    (made,) = (workplace / "runs").iterdir()
    assert made.name.startswith("tiny-")
    listed = json.loads(call_cli("runs", "--json").out)
    assert [r["run"] for r in listed] == [f"runs/{made.name}"]


@pytest.mark.slow
def test_a_method_without_a_rate_in_the_study_takes_its_own_and_says_so(call_cli, workplace, no_figure):
    result = call_cli("study", "tiny.toml", "-m", "bnp", "-m", "sphere", "--out", "out")
    assert result.code == 0
    (line,) = result.err.splitlines()
    assert line == (
        f"study tiny has no learning rate for sphere at batch size 60: taking the method's default, {Sphere.rate:g}"
    )
    assert open_run(workplace / "out" / "sphere-seed0").config["run"]["learning_rate"] == Sphere.rate
    swept = call_cli("sweep", "tiny.toml", "-m", "bnp", "--batch-size", "60,6", "--jobs", 1, "--out", "swept")
    assert "has no learning rate for bnp at batch size 6: taking the method's default" in swept.err
    assert "at batch size 60" not in swept.err


def test_a_run_that_diverges_does_not_stop_the_others(call_cli, workplace, no_figure):
    (workplace / "tiny.toml").write_text(STUDY.replace("vanilla = 0.1", "vanilla = 1e25"))
    result = call_cli("study", "tiny.toml", "-m", "vanilla", "-m", "bnp", "--out", "out")
    assert result.code == 1
    (line,) = result.err.splitlines()
    assert line.startswith("error: tiny vanilla seed 0: ")
    assert "at iteration " in line
    vanilla, bnp = (open_run(workplace / "out" / name) for name in ("vanilla-seed0", "bnp-seed0"))
    assert (vanilla.status, bnp.status) == ("diverged", "finished")
    assert f"at iteration {vanilla.iterations}:" in line
    assert bnp.iterations == 3
    assert "diverged" in result.out


def test_ctrl_c_while_loading(call_cli, workplace, monkeypatch):
    def interrupt(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr(performing, "load_data", interrupt)
    result = call_cli(*TINY)
    assert (result.code, result.out) == (130, "")
    assert "Traceback" not in result.err
    assert not (workplace / "out").exists()


@pytest.mark.parametrize(
    ("command", "more"),
    [
        ("study tiny.toml -m bnp -m vanilla --epochs 2 --out 'my runs'", r" --resume"),
        ("study tiny.toml -m bnp --seed 0,1", r" --out runs/tiny-[\d-]+ --resume"),
        ("study done/config.toml --iterations 9 --resume", ""),
        ("sweep tiny.toml -m bnp --data-dir . -j 1 --out 'my runs'", ""),
        ("replicate paper.toml --seeds 2 --epochs 1 --jobs 1 --out 'my runs'", ""),
    ],
)
def test_ctrl_c_says_the_command_that_resumes(call_cli, stored, workplace, monkeypatch, command, more):
    def interrupt(*args, **options):
        raise KeyboardInterrupt

    (workplace / "paper.toml").write_text(STUDY.replace("3\n", '3\n[[methods]]\nname = "bnp"\nmethod = "bnp"\n', 1))
    monkeypatch.setattr(performing, "run", interrupt)
    monkeypatch.setattr("hesscond.study.sweep.sweep", interrupt)
    result = call_cli(*shlex.split(command))
    assert (result.code, result.out) == (130, "")
    *_, said = result.err.strip().partition("resume with: ")
    assert re.fullmatch(re.escape(f"hesscond {command}") + more, said)


def test_a_disk_that_is_full(call_cli, workplace, monkeypatch):
    begin = RunLog._open

    def fill(log, folder):
        begin(log, folder)
        pages = log._connection.execute("PRAGMA page_count").fetchone()[0]
        log._connection.execute(f"PRAGMA max_page_count = {pages}")

    monkeypatch.setattr(RunLog, "_open", fill)
    result = call_cli(*TINY, "--iterations", 2000)
    assert (result.code, result.out) == (2, "")
    (line,) = result.err.splitlines()
    assert line.startswith("error: the log out/run.sqlite cannot be written")


# --- help and lists --------------------------------------------------------------------------------------------------


def test_help_and_version(call_cli):
    version = call_cli("--version")
    assert (version.code, version.out.split()[0]) == (0, "hesscond")
    for arguments in (("--help",), ("study", "--help"), ("data", "-h")):
        result = call_cli(*arguments)
        assert (result.code, result.err) == (0, "")
        assert result.out.startswith("Usage: ")
    for arguments in ((), ("data",)):
        result = call_cli(*arguments)
        assert (result.code, result.out) == (2, "")
        assert result.err.startswith("Usage: ")
        assert len(result.err.splitlines()) > 5


def test_lists(call_cli, stored):
    studies, methods, runs = (
        json.loads(call_cli(*c, "--json").out) for c in (("studies",), ("methods",), ("runs", "."))
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
        "last_loss": stored.table("training")["loss"].iloc[-1],
        "started": stored.facts["started"],
        "seconds": stored.seconds,
    }
    for command, words in (
        (("studies",), [s["name"] for s in studies]),
        (("methods",), ["bnp", "vanilla"]),
        (("runs", "."), ["done", "finished"]),
    ):
        result = call_cli(*command)
        assert (result.code, result.err) == (0, "")
        assert all(word in result.out for word in words)


# --- options in numbers ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "command",
    ["methods bnp", "methods equilibration", "statements bnp-theorem-4", "check done --expect kappa_own<1",
     "probe net.py:make --method bnp", "sweep tiny.toml --method no-such-method-of-this-name --out nowhere/at/all"],
)  # fmt: skip
def test_a_terminal_gets_the_words_of_a_pipe_in_lines_that_fit(command, call_cli, stored, monkeypatch):
    pipe = call_cli(*command.split())
    monkeypatch.setenv("FORCE_COLOR", "1")
    terminal = call_cli(*command.split())
    text = re.sub(r"\x1b\[[\d;?]*[A-Za-z]", "", terminal.out + terminal.err)
    assert text.split() == (pipe.out + pipe.err).split()
    assert [line for line in text.splitlines() if len(line) > 80 and " " in line.strip()] == []


def test_overrides_leave_the_rest_alone():
    study = load_study("fc-digits")
    assert Overrides().apply(study) == study
    changed = Overrides(iterations=7, batch_size=6, probe_every=0).apply(study)
    assert (changed.training.iterations, changed.training.epochs, changed.training.batch_size) == (7, None, 6)
    assert (changed.probe.every, changed.probe.train_every_epochs) == (0, 0)
    assert Overrides(epochs=2).apply(changed).training.iterations is None
    assert Overrides(probe_every=3).apply(study).probe.train_every_epochs == study.probe.train_every_epochs
