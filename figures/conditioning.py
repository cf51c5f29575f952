"""Loss, κ(H), κ(PᵀHP) and κ(D) over training, from stored runs: Figure 8 of Lange, Helfrich and Ye (2022).

::

    hesscond study fc-cifar10 --method vanilla --method bnp --seed 0,1,2 --out runs
    python figures/conditioning.py runs -o conditioning.pdf
"""

from __future__ import annotations

import argparse
import sys

from rich.console import Console

from hesscond.errors import HesscondError
from hesscond.report import conditioning_figure, save_figure, summary_table
from hesscond.study.store import find_runs


def main() -> int:
    """Draw the figure, print its table, return the exit code."""
    parser = argparse.ArgumentParser(description="Figure 8 of the BNP paper from stored runs.")
    parser.add_argument("runs", nargs="+", help="run folders, or folders of run folders")
    parser.add_argument("-o", "--output", required=True, metavar="FILE", help=".pdf, .svg or .png")
    parser.add_argument("--layer", help="the first probed by default")
    parser.add_argument("--unit", type=int, help="the first probed by default")
    options = parser.parse_args()
    try:
        runs = [run for folder in options.runs for run in find_runs(folder)]
        figure = conditioning_figure(runs, layer=options.layer, unit=options.unit)
        save_figure(figure, options.output)
        Console().print(summary_table(runs, layer=options.layer, unit=options.unit))
    except HesscondError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
