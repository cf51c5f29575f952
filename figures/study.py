"""The picture that the README begins with, from the run that ``make study`` makes: loss, and κ with and without P.

``python figures/study.py`` makes the run and draws docs/images/study.png; ``python figures/study.py RUN…`` draws yours.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from gallery import hesscond, shrink
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, LogLocator, NullFormatter

from hesscond.report import Page, loss_axes, method_colors, save_figure
from hesscond.study import StoredRun, find_runs

PICTURE = Path(__file__).parents[1] / "docs" / "images" / "study.png"
#: At the 300 dots an inch of a PNG, twice the 800 pixels that a page shows.
WIDTH = 5.35
QUANTITIES = {"kappa": ("-", "o"), "kappa_preconditioned": ((0, (3, 1.5)), "s")}
ABOVE, BELOW = r"$\kappa(H)$, the Hessian as it is", r"$\kappa(P^{\top}HP)$, preconditioned by BNP's $P$"


def draw(runs: list[StoredRun]) -> Figure:
    """Training and test loss beside the condition numbers over the training set."""
    page = Page(WIDTH)
    with page.styled():
        figure = page.figure(2.25)
        left, right = figure.subplots(1, 2, width_ratios=(1, 1.25))
        loss_axes(left, runs)
        left.set_title("loss: training dashed, test solid", loc="left")
        draw_kappas(right, runs)
        colors = method_colors(run.method for run in runs)
        for place, (method, color) in enumerate(colors.items()):
            style = {"color": color, "weight": "bold", "ha": "right", "transform": left.transAxes}
            left.text(0.97, 0.93 - 0.085 * place, method, **style)
        for ax in (left, right):
            ax.spines[["top", "right"]].set_visible(False)
            ax.set_xlabel("iteration")
            ax.xaxis.set_major_locator(FixedLocator([0, 250, 500, 750, 1000]))
    return figure


def draw_kappas(ax: Axes, runs: list[StoredRun]) -> None:
    """κ(H) and κ(PᵀHP) of the probed unit over the training set, every five epochs."""
    colors = method_colors(run.method for run in runs)
    for run in runs:
        probe = run.table("probe")
        train = probe[(probe["data"] == "train") & (probe["resolved"] == 1) & (probe["resolved_preconditioned"] == 1)]
        for quantity, (dash, marker) in QUANTITIES.items():
            style = {"marker": marker, "ms": 3.6, "mew": 0.4, "mec": "white", "lw": 1.0, "ls": dash}
            ax.plot(train["iteration"], train[quantity], color=colors[run.method], **style)
    ax.set_yscale("log")
    ax.set_ylim(1e2, 1e14)
    ax.yaxis.set_major_locator(LogLocator(numticks=7))
    ax.yaxis.set_minor_formatter(NullFormatter())
    ax.grid(axis="y", color="0.92", lw=0.4)
    ax.set_title("condition number of an output unit's Hessian", loc="left")
    ax.text(0.03, 0.93, ABOVE, transform=ax.transAxes)
    ax.text(0.97, 0.06, BELOW, transform=ax.transAxes, ha="right")


def main(names: list[str]) -> None:
    """Draw the runs, or those of ``make study``: a minute."""
    with tempfile.TemporaryDirectory() as folder:
        if not names:
            hesscond("study", "fc-digits", "--method", "vanilla", "--method", "bnp", "--out", folder)
        save_figure(draw([run for name in names or [folder] for run in find_runs(name)]), PICTURE)
    shrink(PICTURE)
    print(PICTURE)


if __name__ == "__main__":
    main(sys.argv[1:])
