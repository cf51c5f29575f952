"""log10 κ of every probed unit at every iteration, method by method.

::

    hesscond study fc-digits --method vanilla --method bnp --out runs
    python figures/heatmap.py runs -o heatmap.pdf
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
    return FIGURES["heatmap"].draw(runs, page=page)


def make(folder: Path) -> list[StoredRun]:
    """A small run."""
    return small_study(folder, *methods("vanilla", "bnp"))


if __name__ == "__main__":
    sys.exit(main(__doc__, draw, make))
