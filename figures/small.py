"""What the scripts of this folder share: run folders from the command line, or a small run on scikit-learn's digits."""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from matplotlib.figure import Figure
from PIL import Image

from hesscond.errors import HesscondError, RunError
from hesscond.report import COLUMN, Page, save_figure, venue_page
from hesscond.study import StoredRun, find_runs

Draw = Callable[[list[StoredRun], Page], Figure]

#: A study of seconds: three units of every layer at every second iteration, and over the training set.
STUDY = """
name = "small"
description = "scikit-learn's digits, two hidden layers of 30"

[data]
name = "digits"

[model]
hidden = [30, 30]
activation = "relu"

[training]
batch_size = 60
iterations = 120

[[learning_rates]]
batch_size = 60
rate = { vanilla = 0.1, bnp = 0.5, batchnorm = 0.5, layernorm = 0.3, sphere = 0.3, equilibration = 0.3 }

[probe]
layers = ["fc3", "fc2", "fc1"]
units = [0, 3, 7]
every = 2
train_every_epochs = 2
"""


def hesscond(*command: str | Path) -> None:
    """Run a command line of hesscond.

    Raises
    ------
    RunError
        It failed.
    """
    done = subprocess.run([sys.executable, "-m", "hesscond", *map(str, command)], capture_output=True, text=True)
    if done.returncode:
        raise RunError(f"hesscond {command[0]} failed: {done.stderr.strip()}")


def small_study(folder: Path, *options: str) -> list[StoredRun]:
    """Runs of `STUDY` with these options of ``hesscond study``."""
    (folder / "small.toml").write_text(STUDY, encoding="utf-8")
    hesscond("study", folder / "small.toml", *options, "--out", folder / "runs")
    return list(find_runs(folder / "runs"))


def small_comparison(folder: Path, *options: str) -> list[StoredRun]:
    """Runs of ``hesscond compare`` on `STUDY`."""
    (folder / "small.toml").write_text(STUDY, encoding="utf-8")
    hesscond("compare", folder / "small.toml", *options, "--out", folder / "runs")
    return list(find_runs(folder / "runs"))


def methods(*names: str) -> list[str]:
    """As options."""
    return [word for name in names for word in ("--method", name)]


def main(doc: str | None, draw: Draw, make: Callable[[Path], list[StoredRun]]) -> int:
    """Draw the figure of the runs that are named, or of those that ``make`` makes; returns the exit code."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="*", help="run folders, or folders of run folders; a small run if none")
    parser.add_argument("-o", "--output", required=True, metavar="FILE", help=".pdf, .svg or .png")
    parser.add_argument("--preset", help="a venue: neurips2024, icml2024, jmlr2001, …")
    options = parser.parse_args()
    try:
        page = COLUMN if options.preset is None else venue_page(options.preset)
        with tempfile.TemporaryDirectory() as folder:
            named = [run for path in options.runs for run in find_runs(path)]
            save_figure(draw(named or make(Path(folder)), page), options.output)
        if options.output.endswith(".png"):
            # the repository keeps it, at a third of the size
            Image.open(options.output).convert("RGB").quantize(128, dither=Image.Dither.NONE).save(
                options.output, optimize=True
            )
    except HesscondError as error:
        print(error, file=sys.stderr)
        return 2
    return 0
