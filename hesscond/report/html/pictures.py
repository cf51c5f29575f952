"""Figures as pictures inside the page, with texts that stand for them."""

from __future__ import annotations

import io
import math
import re
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import matplotlib
from markupsafe import Markup
from PIL import Image

from hesscond.errors import ConfigError
from hesscond.report.html.embedding import data_url
from hesscond.report.registry import FIGURES
from hesscond.report.series import SHOWN
from hesscond.report.summary import summary_frame

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from hesscond.report.kinds import FigureKind
    from hesscond.study.store import StoredRun

#: A figure whose SVG is larger than this (bytes), as scatters are, is embedded as PNG.
LARGEST_SVG = 150_000
DOTS_PER_INCH = 200
#: Colours of a PNG: curves, their blends with white, and type in shades of grey need no more.
COLORS = 128


@dataclass(frozen=True)
class Picture:
    """A figure of the page.

    Attributes
    ----------
    name, summary
        Of its kind.
    source
        A data URL; empty if it cannot be drawn.
    words
        What it shows, in numbers.
    width, height
        In CSS pixels.
    reason
        Why it cannot be drawn from these runs.
    """

    name: str
    summary: str
    source: str = ""
    words: str = ""
    width: int = 0
    height: int = 0
    reason: str = ""


def pictures(runs: Sequence[StoredRun], options: dict[str, Any]) -> list[Picture]:
    """Every kind of figure, those that cannot be drawn from these runs with the reason.

    Parameters
    ----------
    runs
        Of one study.
    options
        layer and unit, for the kinds that take them.
    """
    words = in_numbers(runs, options)
    found = []
    for kind in FIGURES.values():
        own = {key: value for key, value in options.items() if key in kind.options}
        try:
            found.append(drawn(kind, runs, own, words))
        except ConfigError as error:
            found.append(Picture(kind.name, kind.summary, reason=str(error)))
    return found


def drawn(kind: FigureKind, runs: Sequence[StoredRun], options: dict[str, Any], words: str) -> Picture:
    """A figure, its formulas as they are typed if a name in it has dollar signs around what is no formula.

    Raises
    ------
    ConfigError
        It cannot be drawn from these runs.
    """

    def draw() -> Picture:
        figure = kind.draw(runs, **options)
        width, height = (round(96 * inches) for inches in figure.get_size_inches())
        return Picture(kind.name, kind.summary, picture(figure), words, width, height)

    try:
        return draw()
    except ConfigError:
        raise
    except ValueError:
        with matplotlib.rc_context({"text.parse_math": False}):
            return draw()


def picture(figure: Figure) -> Markup:
    """The figure as SVG with its text as outlines, which looks the same everywhere; as PNG where that is smaller."""
    with warnings.catch_warnings(), matplotlib.rc_context({"svg.fonttype": "path", "svg.hashsalt": "hesscond"}):
        # a name in a script that the font does not have is drawn as boxes
        warnings.filterwarnings("ignore", message="Glyph .* missing from")
        # one that leaves no room for the axes makes a bad picture, which says so itself
        warnings.filterwarnings("ignore", message="constrained_layout not applied")
        vectors, pixels = io.BytesIO(), io.BytesIO()
        figure.savefig(vectors, format="svg", metadata=dict.fromkeys(("Date", "Creator", "Format", "Type")))
        svg = compact(vectors.getvalue().decode("utf-8", "replace"))
        if len(svg) <= LARGEST_SVG:
            return data_url("image/svg+xml", svg)
        figure.set_layout_engine("none")  # everything has its place by now
        figure.savefig(pixels, format="png", dpi=DOTS_PER_INCH)
    small = io.BytesIO()
    Image.open(pixels).convert("RGB").quantize(COLORS, dither=Image.Dither.NONE).save(small, "png", optimize=True)
    return data_url("image/png", small.getvalue())


def compact(svg: str) -> bytes:
    """The SVG with paths to a hundredth of a point, and without the characters that no XML may have."""
    short = re.sub(r' d="([^"]*)"', lambda match: f' d="{rounded(match[1])}"', svg)
    forbidden = [*range(0x20), 0xFFFE, 0xFFFF]
    return short.translate(dict.fromkeys(code for code in forbidden if code not in (9, 10, 13))).encode("utf-8")


def rounded(path: str) -> str:
    r"""A path of SVG with two digits after the point.

    Examples
    --------
    >>> rounded("M 36.572974 288.352602 \nL 36.991284 287.8 \n")
    'M 36.57 288.35 L 36.99 287.8'
    """
    return " ".join(re.sub(r"-?\d+\.\d+", lambda match: f"{float(match[0]):.2f}".rstrip("0").rstrip("."), path).split())


def in_numbers(runs: Sequence[StoredRun], options: dict[str, Any]) -> str:
    """What came of each run, for whoever does not see the picture."""
    parts = []
    for row in summary_frame(runs, **options).to_dict("records"):
        facts = [f"loss {row['training_loss_tail_mean']:.3g}"]
        if not math.isnan(row["test_accuracy"]):
            facts.append(f"test accuracy {100 * row['test_accuracy']:.1f} %")
        for data, shown in (("batch", "mini-batch median"), ("train", "training set")):
            for quantity, symbol in SHOWN.items():
                value, lower = row[f"{data}_{quantity}"], row[f"{data}_{quantity}_lower"]
                if not math.isnan(value):
                    facts.append(f"{symbol} {value:.3g} ({shown})")
                elif not math.isnan(lower):
                    facts.append(f"{symbol} unresolved, above {lower:.3g} ({shown})")
        parts.append(f"{row['method']}, seed {row['seed']}: {', '.join(facts)}")
    return "; ".join(parts) + "."
