"""Both ends of the spectrum of an output unit's Hessian along training, and its rank.

::

    hesscond study fc-cifar10 --method vanilla --method bnp --out runs
    python figures/spectra.py runs -o spectra.pdf
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
    return FIGURES["spectra"].draw(runs, page=page)


def make(folder: Path) -> list[StoredRun]:
    """A small run."""
    return small_study(folder, *methods("vanilla", "bnp", "layernorm"), "--seed", "0,1")


if __name__ == "__main__":
    sys.exit(main(__doc__, draw, make))
