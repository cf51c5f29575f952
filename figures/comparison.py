"""Methods side by side, each at its best learning rate: the final loss and accuracy against the median κ.

::

    hesscond compare fc-digits --out runs
    python figures/comparison.py runs -o comparison.pdf
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
    return FIGURES["comparison"].draw(runs, page=page)


def make(folder: Path) -> list[StoredRun]:
    """A small run."""
    names = methods("vanilla", "bnp", "batchnorm", "layernorm", "sphere")
    return small_comparison(folder, *names, "--rates", "0.1,0.5", "--iterations", "60")


if __name__ == "__main__":
    sys.exit(main(__doc__, draw, make))
