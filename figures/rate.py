"""Measured rates of convergence against the predicted (κ − 1)/(κ + 1): PREC, Theorem 1, on the steps that it takes.

::

    python figures/rate.py -o rate.pdf --trials 30
"""

from __future__ import annotations

import argparse
import sys

from hesscond.errors import HesscondError
from hesscond.report import save_figure
from hesscond.report.margins import STATEMENTS, rate_figure, rate_trials


def main() -> int:
    """Make the trials, draw the figure, return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-o", "--output", required=True, metavar="FILE", help=".pdf, .svg or .png")
    parser.add_argument("--statement", default=STATEMENTS[0], choices=STATEMENTS)
    parser.add_argument("--trials", type=int, default=12)
    options = parser.parse_args()
    try:
        found = rate_trials(options.statement, trials=options.trials)
        save_figure(rate_figure(found, options.statement), options.output)
    except HesscondError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
