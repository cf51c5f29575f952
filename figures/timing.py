"""What an iteration of each method costs, relative to plain SGD.

::

    hesscond compare fc-digits --out runs
    python figures/timing.py runs -o timing.pdf
"""

from __future__ import annotations

import sys
from pathlib import Path

from matplotlib.figure import Figure
from small import main, methods, small_comparison

from hesscond.report import FIGURES, Page
from hesscond.study import StoredRun


def draw(runs: list[StoredRun], page: Page) -> Figure:
    """The figure."""
    return FIGURES["timing"].draw(runs, page=page)


def make(folder: Path) -> list[StoredRun]:
    """A small run."""
    return small_comparison(
        folder, *methods("vanilla", "bnp", "batchnorm", "sphere"), "--rates", "0.1", "--iterations", "30"
    )


if __name__ == "__main__":
    sys.exit(main(__doc__, draw, make))
