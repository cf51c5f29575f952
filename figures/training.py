"""Training and test curves, mean and range over seeds: train dashed, test solid, as the papers show them.

::

    hesscond study fc-cifar10 --method vanilla --method bnp --method batchnorm --seed 0,1,2,3,4 --out runs
    python figures/training.py runs -o training.pdf
"""

from __future__ import annotations

import sys
from pathlib import Path

from matplotlib.figure import Figure
from small import main, methods, small_study

from hesscond.report import FIGURES, Page
from hesscond.study import StoredRun


def draw(runs: list[StoredRun], page: Page) -> Figure:
    """The figure."""
    return FIGURES["training"].draw(runs, page=page)


def make(folder: Path) -> list[StoredRun]:
    """A small run."""
    return small_study(folder, *methods("vanilla", "bnp", "batchnorm"), "--seed", "0,1,2")


if __name__ == "__main__":
    sys.exit(main(__doc__, draw, make))
