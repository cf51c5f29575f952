"""How much of what BNP's Theorem 4 allows is used on the activations of a network in training.

::

    hesscond study fc-digits --method vanilla --method bnp --statement bnp-theorem-4 --out runs
    python figures/margins.py runs -o margins.pdf
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
    return FIGURES["margins"].draw(runs, page=page)


def make(folder: Path) -> list[StoredRun]:
    """A small run."""
    return small_study(folder, *methods("vanilla", "bnp"), "--statement", "bnp-theorem-4")


if __name__ == "__main__":
    sys.exit(main(__doc__, draw, make))
