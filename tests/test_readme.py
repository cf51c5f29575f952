"""The README is executed: its Python runs and prints what it says, its commands and files exist."""

import contextlib
import io
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_its_python_runs_and_prints_what_it_says(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    namespace: dict[str, object] = {}
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        for block in re.findall(r"```python\n(.*?)```", README, re.DOTALL):
            exec(compile(block, "README.md", "exec"), namespace)
    promised = re.search(r"print\(result\[\"2\"\]\.kappa\[0\]\)\s+# (.*)", README)
    assert promised is not None
    assert printed.getvalue().splitlines()[0] == promised.group(1)
    assert (tmp_path / "kappa.json").is_file()


def test_its_links_exist():
    for target in re.findall(r"\]\(([^)#]+)\)", README):
        assert (ROOT / target).exists(), target


@pytest.mark.parametrize("target", sorted(set(re.findall(r"make ([a-z-]+)", README))))
def test_its_make_targets_exist(target):
    done = subprocess.run(["make", "-n", target], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_its_commands_exist():
    from hesscond.cli import app

    known = {c.name or c.callback.__name__ for c in app.registered_commands} | {g.name for g in app.registered_groups}
    used = set(re.findall(r"hesscond ([a-z]+)", README)) - {"computes"}
    assert {"study", "table", "export", "figure"} <= used
    assert used <= known


def test_its_model_file_is_probed_as_it_says(tmp_path):
    source = re.search(r"```python\n(# mymodel.py\n.*?)```", README, re.DOTALL)
    table = re.search(r"\n(layer kind .*?\n6 .*?)\n```", README, re.DOTALL)
    assert source is not None
    assert table is not None
    (tmp_path / "mymodel.py").write_text(source.group(1), encoding="utf-8")
    command = [sys.executable, "-m", "hesscond", "probe", "mymodel.py:digits", "--figure", "kappa.png"]
    environment = {**os.environ, "COLUMNS": "80"}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert table.group(1) in done.stdout
    assert (tmp_path / "kappa.png").stat().st_size > 10_000
