"""κ of every layer along training, method by method, over all probed units.

::

    hesscond study fc-digits --method vanilla --method bnp --out runs
    python figures/layers.py runs -o layers.pdf
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
    return FIGURES["layers"].draw(runs, page=page)


def make(folder: Path) -> list[StoredRun]:
    """A small run."""
    return small_study(folder, *methods("vanilla", "bnp", "batchnorm"), "--seed", "0,1")


if __name__ == "__main__":
    sys.exit(main(__doc__, draw, make))
