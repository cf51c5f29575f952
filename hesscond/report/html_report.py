"""``hesscond report``: one HTML file for a co-author, with figures, tables and verdicts, that loads and runs nothing.

Whatever comes from a run is escaped by the template engine and made visible by `visible`.
"""

from __future__ import annotations

import base64
import hashlib
import io
import math
import re
import unicodedata
import warnings
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tomli_w
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from hesscond.errors import ConfigError
from hesscond.report.registry import FIGURES, TABLES
from hesscond.report.selection import in_order, select
from hesscond.report.series import SHOWN
from hesscond.report.tables import duration
from hesscond.report.verdict import verdict_sentences

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from hesscond.report.registry import FigureKind
    from hesscond.runs import StoredRun

#: Allowed endings of the file's name.
SUFFIXES = (".html", ".htm")


def write_report(
    runs: Sequence[StoredRun],
    path: Path | str,
    *,
    title: str | None = None,
    layer: str | None = None,
    unit: int | None = None,
) -> None:
    """Write one self-contained HTML file about stored runs; a file that is there is replaced.

    Parameters
    ----------
    runs
        Runs of one study, with any methods, seeds, learning rates and batch sizes.
    path
        File to write; its name ends in ``.html`` or ``.htm``.
    title
        Title of the page; study and methods by default.
    layer, unit
        Unit that the figures show; the first that was probed by default.

    Examples
    --------
    >>> write_report([], "report.pdf")
    Traceback (most recent call last):
    hesscond.errors.ConfigError: cannot write a report to report.pdf: its name must end in .html, .htm
    """
    path = Path(path)
    if path.suffix.lower() not in SUFFIXES:
        raise ConfigError(f"cannot write a report to {path}: its name must end in {', '.join(SUFFIXES)}")
    page = render_report(runs, title=title, layer=layer, unit=unit)
    try:
        path.write_bytes(page.encode("utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"the report {path} cannot be written: {getattr(error, 'strerror', None) or error}") from None


def render_report(
    runs: Sequence[StoredRun], *, title: str | None = None, layer: str | None = None, unit: int | None = None
) -> str:
    """HTML of the page of `write_report`, with its arguments; the same runs give the same text."""
    selection = select(runs, layer, unit)
    runs = in_order(runs)
    named = named_runs(runs)
    first = runs[0].config
    methods = list(dict.fromkeys(run.method for run in runs))
    options: dict[str, Any] = {"layer": selection.layer, "unit": selection.unit}
    style = stylesheet()
    return (
        templates()
        .get_template("report.html")
        .render(
            policy=policy(style),
            style=style,
            title=title or f"{selection.study}: {listed(methods)}",
            study=selection.study,
            description=first.get("description", ""),
            source=first.get("source", ""),
            selection=selection,
            runs=named,
            methods=methods,
            seeds=sorted({run.seed for run in runs}),
            configurations=[(one.file, tomli_w.dumps(one.run.config)) for one in named],
            verdict=verdict_sentences(runs, **options),
            pictures=pictures(runs, options),
            sheets=sheets(runs, options),
        )
    )


#: Control, format (bidirectional overrides among them), surrogate, private and unassigned characters, separators.
INVISIBLE = ("Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp")

#: Most characters of one text that a page shows.
LONGEST = 4000


def visible(text: Any) -> str:
    r"""The text with every invisible character written out; long texts are cut.

    Parameters
    ----------
    text
        Any object; text that is marked as safe is returned unchanged.

    Examples
    --------
    >>> visible("study\u202e\x00")
    'study⟨U+202E⟩⟨U+0000⟩'
    """
    if isinstance(text, Markup):
        return text
    text = str(text)
    rest = len(text) - LONGEST
    shown = "".join(
        f"⟨U+{ord(c):04X}⟩" if unicodedata.category(c) in INVISIBLE else c for c in " ".join(text[:LONGEST].split("\n"))
    )
    return f"{shown} … ({rest} more characters)" if rest > 0 else shown


def shortened(text: str, length: int = 60) -> str:
    """The name, cut so that it fits into a legend."""
    return text if len(text) <= length else f"{text[: length - 1]}…"


def count(number: int, noun: str) -> str:
    """A number of things.

    Examples
    --------
    >>> count(1, "run"), count(2, "run")
    ('1 run', '2 runs')
    """
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def listed(items: list[str], most: int = 6) -> str:
    """Items in a sentence, the first few of many.

    Examples
    --------
    >>> listed(["a", "b", "c"], most=2)
    'a, b and 1 more'
    """
    if len(items) <= most:
        return ", ".join(items)
    return f"{', '.join(items[:most])} and {len(items) - most} more"


@dataclass(frozen=True)
class NamedRun:
    """A run with its name on the page, and the file name of its configuration."""

    run: StoredRun
    name: str
    file: str


def named_runs(runs: Sequence[StoredRun]) -> list[NamedRun]:
    """Runs named by method and seed, where these are ambiguous by learning rate, batch size or a number too."""
    plain = [f"{shortened(run.method)}, seed {run.seed}" for run in runs]
    fuller = [
        name
        if plain.count(name) == 1
        else f"{name}, lr {run.config['run']['learning_rate']:g}, batch {run.config['training']['batch_size']}"
        for name, run in zip(plain, runs, strict=True)
    ]
    numbered = [
        name if fuller.count(name) == 1 else f"{name} #{fuller[: place + 1].count(name)}"
        for place, name in enumerate(fuller)
    ]
    files = [re.sub(r"[^A-Za-z0-9._-]+", "-", run.label)[:60].strip("-.") or "run" for run in runs]
    return [
        NamedRun(run, name, file if files.count(file) == 1 else f"{file}-{files[: place + 1].count(file)}")
        for place, (run, name, file) in enumerate(zip(runs, numbered, files, strict=True))
    ]


def templates() -> Environment:
    """Jinja2 environment that escapes everything and writes out invisible characters."""
    made = Environment(
        loader=PackageLoader("hesscond.report"),
        autoescape=True,
        finalize=visible,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.filters |= {"download": download, "number": number, "duration": duration, "count": count}
    return made


def stylesheet() -> Markup:
    """The style of the page, which goes into it as it is."""
    return Markup(resources.files("hesscond.report").joinpath("templates", "report.css").read_text(encoding="utf-8"))


def policy(style: str) -> str:
    """A Content-Security-Policy: pictures inside the page, this style, no script, and nothing from outside."""
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode("ascii")
    return f"default-src 'none'; img-src data:; style-src 'sha256-{digest}'; base-uri 'none'; form-action 'none'"


def data_url(kind: str, content: bytes) -> Markup:
    """A file as a URL; base64 has nothing to escape, and is no text to be cut.

    Examples
    --------
    >>> data_url("text/plain", b"1")
    Markup('data:text/plain;base64,MQ==')
    """
    return Markup(f"data:{kind};base64,{base64.b64encode(content).decode('ascii')}")


def download(toml: str) -> Markup:
    """A configuration as a URL."""
    return data_url("application/toml", toml.encode("utf-8", "surrogatepass"))


def number(value: float, form: str = ".3g") -> str:
    """A number; a dash if there is none."""
    return "–" if math.isnan(value) else format(value, form)


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
        Name and summary of the kind of figure.
    source
        Data URL of the picture.
    words
        Description in numbers of what it shows.
    width, height
        Size in CSS pixels.
    """

    name: str
    summary: str
    source: str
    words: str
    width: int
    height: int


def pictures(runs: Sequence[StoredRun], options: dict[str, Any]) -> list[Picture]:
    """Picture of every kind of figure that can be drawn from these runs.

    Parameters
    ----------
    runs
        Runs of one study.
    options
        layer and unit, for the kinds that take them.
    """
    words = in_numbers(runs, options)
    found = []
    for kind in FIGURES.values():
        own = {key: value for key, value in options.items() if key in kind.options}
        with suppress(ConfigError):
            found.append(drawn(kind, runs, own, words))
    return found


def drawn(kind: FigureKind, runs: Sequence[StoredRun], options: dict[str, Any], words: str) -> Picture:
    """Picture of a figure; without formulas if a name in it has dollar signs around something else."""
    import matplotlib

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
    import matplotlib
    from PIL import Image

    with warnings.catch_warnings(), matplotlib.rc_context({"svg.fonttype": "path", "svg.hashsalt": "hesscond"}):
        # a name in a script that the font does not have is drawn as boxes
        warnings.filterwarnings("ignore", message="Glyph .* missing from")
        # a layout without room for the axes makes a bad picture, which is seen without a warning
        warnings.filterwarnings("ignore", message="constrained_layout not applied")
        vectors, pixels = io.BytesIO(), io.BytesIO()
        figure.savefig(vectors, format="svg", metadata=dict.fromkeys(("Date", "Creator", "Format", "Type")))
        svg = compact(vectors.getvalue().decode("utf-8", "replace"))
        if len(svg) <= LARGEST_SVG:
            return data_url("image/svg+xml", svg)
        figure.set_layout_engine("none")  # the layout is final by now
        figure.savefig(pixels, format="png", dpi=DOTS_PER_INCH)
    small = io.BytesIO()
    Image.open(pixels).convert("RGB").quantize(COLORS, dither=Image.Dither.NONE).save(small, "png", optimize=True)
    return data_url("image/png", small.getvalue())


def compact(svg: str) -> bytes:
    """The SVG with paths to a hundredth of a point, and without characters that XML does not allow."""
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
    """Results of each run in words, for readers who do not see the picture."""
    from hesscond.report.summary import summary_frame

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


#: Most rows of a table that is not folded up.
MOST_ROWS = 25


@dataclass(frozen=True)
class Sheet:
    """A table of the page as HTML, and whether it is so long that it is folded up."""

    name: str
    summary: str
    table: str
    long: bool


def sheets(runs: Sequence[StoredRun], options: dict[str, Any]) -> list[Sheet]:
    """Table of every kind that these runs have something for."""
    found = []
    for kind in TABLES.values():
        own = {key: value for key, value in options.items() if key in kind.options}
        with suppress(ConfigError):
            table = Markup(kind.write(runs, "html", **own))
            found.append(Sheet(kind.name, kind.summary, table, table.count("<tr>") > MOST_ROWS))
    return found
