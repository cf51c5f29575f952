"""The scripts of figures/ run, on small runs, and the gallery has a picture of each."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

FIGURES = Path(__file__).parents[1] / "figures"
SCRIPTS = [path.stem for path in sorted(FIGURES.glob("*.py")) if path.stem not in ("small", "make_gallery", "gain")]
#: They train, and take ten seconds and more each.
TRAINING = [name for name in SCRIPTS if name not in ("conditioning", "rate")]


def run_script(name: str, *words: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(FIGURES / f"{name}.py"), *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_the_gallery_shows_every_script() -> None:
    page = (FIGURES / "gallery" / "README.md").read_text(encoding="utf-8")
    pictures = {path.name for path in (FIGURES / "gallery").glob("*.png")}
    for name in SCRIPTS:
        assert f"## {name}\n" in page, name
    assert pictures == {part.split(")")[0] for part in page.split("](") if part.split(")")[0].endswith(".png")}


@pytest.mark.slow
def test_rates_without_a_run(tmp_path: Path) -> None:
    done = run_script("rate", "-o", tmp_path / "rate.svg", "--trials", 3)
    assert done.returncode == 0, done.stderr
    assert "measured decay" in (tmp_path / "rate.svg").read_text(encoding="utf-8")
    bad = run_script("rate", "-o", tmp_path / "rate.bmp", "--trials", 1)
    assert (bad.returncode, bad.stderr.count("\n")) == (2, 1)


@pytest.mark.slow
@pytest.mark.parametrize("name", TRAINING)
def test_a_script_makes_its_own_small_runs(tmp_path: Path, name: str) -> None:
    done = run_script(name, "-o", tmp_path / "figure.pdf")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "figure.pdf").read_bytes().startswith(b"%PDF")
