"""The gain κ(H)/κ(PᵀHP) against κ(D)², which section 3.3 of Lange, Helfrich and Ye (JMLR 2022) expects it to be about.

::

    hesscond study fc-cifar10 --method vanilla --method bnp --out runs
    python figures/gain_scatter.py runs -o gain_scatter.pdf
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
    return FIGURES["gain"].draw(runs, page=page)


def make(folder: Path) -> list[StoredRun]:
    """A small run."""
    return small_study(folder, *methods("vanilla", "bnp"))


if __name__ == "__main__":
    sys.exit(main(__doc__, draw, make))
