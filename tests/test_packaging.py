"""What a repository has: versions, extras and make targets that agree with each other."""

import os
import re
import subprocess
import sys
import tomllib
from importlib import import_module
from pathlib import Path

import pytest

import hesscond
from hesscond.errors import ConfigError
from hesscond.lazy import OPTIONAL, optional

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
EXTRAS = PROJECT["optional-dependencies"]
PAGES = [
    *ROOT.glob("*.md"),
    *(p for p in (ROOT / "docs").rglob("*.md") if p.parent.name not in ("methods", "statements")),
]
MODEL = """
import torch
from torch import nn

def make():
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))
    return model, nn.MSELoss(), (torch.rand(8, 4), torch.rand(8, 3))
"""
#: Runs the lines that it is given one after another where no optional package can be imported.
COMMANDS = f"""
import sys
for name in {list(OPTIONAL)}:
    sys.modules[name] = None
from hesscond.cli import main
for line in sys.argv[1:]:
    sys.argv = ["hesscond", *line.split()]
    try:
        main()
    except SystemExit as end:
        print("exit code", end.code or 0, file=sys.stderr)
"""
#: Extras of those who work on hesscond.
WORK = {"dev", "docs", "bench", "support"}


def requirements(extra):
    """The names of what an extra installs, and the extras that it refers to."""
    names, others = set(), {extra}
    for text in EXTRAS[extra]:
        itself = re.fullmatch(r"hesscond\[([\w,]+)\]", text)
        for other in itself[1].split(",") if itself else []:
            more, further = requirements(other)
            names, others = names | more, others | further
        if not itself:
            names.add(re.match(r"[\w-]+", text)[0])
    return names, others


def test_all_has_what_a_user_may_want():
    names, others = requirements("all")
    assert {"tensorboard", "mlflow", "parquet", "images", "lightning", "transformers"} <= others
    assert not others & WORK
    assert "torchvision" not in names
    assert all(text.startswith("hesscond[") for text in EXTRAS["all"])


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_install_lines_and_extras_of_a_page_work(path):
    text = path.read_text(encoding="utf-8")
    assert not re.search(r"pip install [^\n`]*hesscond\[", text), "no index has hesscond"
    for names in re.findall(r"pip install '[^']*\[([\w,]+)\]'", text):
        assert set(names.split(",")) <= set(EXTRAS)
    for names in re.findall(r"[Ee]xtras? `(\w+)`(?: and `(\w+)`)?|# extra (\w+)", text):
        assert set(names) - {""} <= set(EXTRAS), names
    for version in re.findall(r"hesscond-([\d.]+)-py3", text):
        assert version == hesscond.__version__


def test_the_page_on_installing_has_every_extra_of_users():
    page = (ROOT / "docs" / "quickstart.md").read_text(encoding="utf-8").partition("\n## Run")[0]
    table = re.findall(r"^\| (`.*)$", page, re.MULTILINE)
    assert set(re.findall(r"`(\w+)`", "\n".join(table))) == set(EXTRAS) - WORK


@pytest.mark.parametrize(("module", "advice"), OPTIONAL.items())
def test_an_optional_package_is_named_with_an_extra_that_has_it(module, advice, monkeypatch):
    packages, extra = advice
    assert set(packages.split()) <= requirements(extra)[0]
    monkeypatch.setitem(sys.modules, module, None)
    sentence = rf"^a task needs {module}: pip install {packages} \(extra '{extra}'\)$"
    with pytest.raises(ConfigError, match=sentence), optional("a task"):
        import_module(module)


def test_what_is_required_suffices_to_measure_and_verify(tmp_path):
    """With every optional package blocked: probes, statements and lists work; studies and figures are a sentence."""
    (tmp_path / "mymodel.py").write_text(MODEL, encoding="utf-8")
    works = ["probe mymodel.py:make", "verify van-der-sluis --trials 5", "studies", "methods bnp"]
    refused = [
        "study fc-digits --method vanilla",
        "probe mymodel.py:make --figure kappa.png",
        "verify van-der-sluis --figure v.png",
    ]
    command = [sys.executable, "-c", COMMANDS, *works, *refused]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=False)
    assert done.returncode == 0, done.stderr
    lines = done.stderr.splitlines()
    assert lines[: len(works)] == ["exit code 0"] * len(works)
    assert lines[len(works) + 1 :: 2] == ["exit code 2"] * len(refused)
    assert all("needs matplotlib: pip install" in line for line in lines[len(works) :: 2])
    assert "checked:" not in done.stdout.rpartition("options:")[2]  # refused before anything is measured


@pytest.mark.parametrize("command", ["methods bnp", "verify van-der-sluis --trials 5 --json"])
def test_a_closed_pipe_is_no_error(command):
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "w") as closed:
        done = subprocess.run(
            [sys.executable, "-m", "hesscond", *command.split()], stdout=closed, stderr=subprocess.PIPE, check=False
        )
    assert (done.returncode, done.stderr) == (0, b"")
