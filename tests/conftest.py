import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from zlib import crc32

import pytest
import torch

from hesscond.data import load
from hesscond.data.files import DownloadError
from hesscond.errors import HesscondError
from hesscond.methods.optimizers import reading
from tests import cli_targets

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # a shell's background job ignores Ctrl-C, and so would the processes that tests start and interrupt
    signal.signal(signal.SIGINT, signal.default_int_handler)


def share_of_head():
    """The number that picks the cases of tests marked `share`: another for every commit; "0" without git."""
    ask = ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short=7", "HEAD"]
    try:
        return str(int(subprocess.run(ask, capture_output=True, text=True, check=True).stdout, 16))
    except (OSError, ValueError, subprocess.CalledProcessError):
        return "0"


def pytest_configure(config):
    # the workers of pytest-xdist inherit it
    os.environ.setdefault("HESSCOND_SHARE", share_of_head())


def pytest_collection_modifyitems(config, items):
    share = os.environ["HESSCOND_SHARE"]
    if share == "all":
        return
    chosen = [is_in_share(item, int(share)) for item in items]
    config.hook.pytest_deselected(items=[item for item, own in zip(items, chosen, strict=True) if not own])
    items[:] = [item for item, own in zip(items, chosen, strict=True) if own]


def is_in_share(item, share):
    """Whether a case runs: all of a test that is not marked `share`, and one in n of one that is."""
    n = max((mark.args[0] for mark in item.iter_markers("share")), default=1)
    return (crc32(item.name.encode()) - share) % n == 0


def pytest_terminal_summary(terminalreporter):
    share = os.environ["HESSCOND_SHARE"]
    terminalreporter.line(f"tests marked `share`: HESSCOND_SHARE={share} runs the same cases again, =all every one")


@pytest.fixture(scope="session")
def cifar10():
    """Real CIFAR-10, or a skip that says what is missing."""
    folder = os.environ.get("HESSCOND_DATA_DIR")
    if not folder:
        pytest.skip("HESSCOND_DATA_DIR is not set: it must name a folder with cifar-10-batches-py")
    try:
        return load("cifar10", folder, download=False)
    except HesscondError as error:
        pytest.skip(f"no CIFAR-10: {error}")


@pytest.fixture(autouse=True)
def readers_of_optimizers():
    """A reader that a test registers is gone after it: pages print the list of all."""
    before = dict(reading._READERS)
    yield
    reading._READERS.clear()
    reading._READERS.update(before)


@pytest.fixture(params=["cpu", "cuda"])
def device(request):
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("no GPU on this machine")
    return torch.device(request.param)


@pytest.fixture
def call_cli(monkeypatch, capsys):
    """Call hesscond with arguments: code, out, err."""
    from hesscond import cli

    def call(*arguments):
        monkeypatch.setattr(sys, "argv", ["hesscond", *map(str, arguments)])
        capsys.readouterr()
        with pytest.raises(SystemExit) as exit:
            cli.main()
        out, err = capsys.readouterr()
        return SimpleNamespace(code=exit.value.code, out=out, err=err)

    return call


@pytest.fixture
def workplace(tmp_path, monkeypatch):
    """A working directory with a study and a model, `tiny.toml` and `net.py`; no network, no cache, no terminal."""
    for name in ("HESSCOND_DATA_DIR", "FORCE_COLOR", "TTY_COMPATIBLE", "COLUMNS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "no-cache"))
    monkeypatch.setenv("HOME", str(tmp_path / "no-home"))

    def refuse(*args):
        raise DownloadError("there is no network in a test")

    monkeypatch.setattr("hesscond.data.files.download_files", refuse)
    work = tmp_path / "work"
    work.mkdir()
    (work / "tiny.toml").write_text(cli_targets.STUDY)
    (work / "net.py").write_text(cli_targets.NET)
    monkeypatch.chdir(work)
    return work


@pytest.fixture(scope="session")
def trained(tmp_path_factory):
    """The folder of a finished run of `tiny.toml`."""
    from hesscond.study import RunPlan, load_study, run

    place = tmp_path_factory.mktemp("trained")
    (place / "tiny.toml").write_text(cli_targets.STUDY)
    plan = RunPlan(load_study(str(place / "tiny.toml")), "bnp", 0, 0.5, place / "done", torch.device("cpu"))
    run(plan, load("digits"))
    return plan.folder


@pytest.fixture
def stored(workplace, trained):
    """That run, in the folder `done`."""
    from hesscond.study import open_run

    shutil.copytree(trained, workplace / "done")
    return open_run(workplace / "done")


@pytest.fixture
def refused(call_cli):
    """Call hesscond with bad arguments, which must get one sentence with these words and leave no trace."""

    def call(arguments, *words):
        before = sorted(Path.cwd().rglob("*"))
        result = call_cli(*arguments)
        err = result.err.replace("made in the file\n", "")
        assert (result.code, result.out) == (2, ""), result
        assert err.startswith("error: ")
        assert err.endswith("\n")
        assert err.count("\n") == 1
        assert "Traceback" not in err
        for word in words:
            assert word in err
        assert sorted(Path.cwd().rglob("*")) == before

    return call
