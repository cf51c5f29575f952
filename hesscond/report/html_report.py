"""``hesscond report``: one HTML file for a co-author, with verdict, tables and figures, that loads and runs nothing.

Whatever comes from a run is escaped by the template engine.
"""

from __future__ import annotations

import base64
import io
import warnings
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tomli_w
from jinja2 import Environment, PackageLoader, StrictUndefined

from hesscond.errors import ConfigError
from hesscond.lazy import load_installed
from hesscond.report import registry
from hesscond.report.selection import in_order, select
from hesscond.report.tables import shown_cells
from hesscond.report.verdict import verdict_sentences
from hesscond.sheets import duration

if TYPE_CHECKING:
    from hesscond.runs import StoredRun

#: Allowed endings of the file's name.
SUFFIXES = (".html", ".htm")
#: Most rows of a table that is not folded up.
MOST_ROWS = 25
#: Twice the pixels of a screen: sharp when enlarged, and a report of all figures stays below 2 MB.
DOTS_PER_INCH = 200


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
        # names of folders need not be text
        path.write_bytes(page.encode("utf-8", "backslashreplace"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"the report {path} cannot be written: {getattr(error, 'strerror', None) or error}") from None


def render_report(
    runs: Sequence[StoredRun], *, title: str | None = None, layer: str | None = None, unit: int | None = None
) -> str:
    """HTML of the page of `write_report`, with its arguments; the same runs give the same text."""
    selection = select(runs, layer, unit)
    runs = in_order(runs)
    methods = list(dict.fromkeys(run.method for run in runs))
    options: dict[str, Any] = {"layer": selection.layer, "unit": selection.unit}
    templates = Environment(
        loader=PackageLoader("hesscond.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    templates.filters |= {"duration": duration, "toml": tomli_w.dumps}
    return templates.get_template("report.html").render(
        title=title or f"{selection.study}: {', '.join(methods)}",
        selection=selection,
        config=runs[0].config,
        runs=runs,
        methods=methods,
        seeds=sorted({run.seed for run in runs}),
        verdict=verdict_sentences(runs, **options),
        pictures=pictures(runs, options),
        tables=tables(runs, options),
        most_rows=MOST_ROWS,
    )


def pictures(runs: Sequence[StoredRun], options: dict[str, Any]) -> list[dict[str, Any]]:
    """Name, summary, data URL and size in CSS pixels of every figure that can be drawn from these runs."""
    images = []
    load_installed(registry.GROUP)
    # the figure that the verdict is about comes first
    for kind in sorted(registry.FIGURES.values(), key=lambda kind: kind.name != "equal-loss"):
        # matplotlib raises a ValueError for a name in which dollar signs enclose no formula
        with suppress(ConfigError, ValueError), warnings.catch_warnings():
            # characters that the font does not have, and panels that leave no room, are seen without a warning
            warnings.filterwarnings("ignore", message="Glyph .* missing from|constrained_layout not applied")
            figure = kind.draw(runs, **{name: options[name] for name in kind.options if name in options})
            pixels = io.BytesIO()
            figure.savefig(pixels, format="png", dpi=DOTS_PER_INCH)
            source = f"data:image/png;base64,{base64.b64encode(pixels.getvalue()).decode('ascii')}"
            width, height = (round(96 * inches) for inches in figure.get_size_inches())
            images.append({"kind": kind, "source": source, "width": width, "height": height})
    return images


def tables(runs: Sequence[StoredRun], options: dict[str, Any]) -> list[dict[str, Any]]:
    """Columns, rows of cells and caption of every table that these runs have something for."""
    entries = []
    for kind in registry.TABLES.values():
        with suppress(ConfigError):
            frame = kind.frame(runs, **{name: options[name] for name in kind.options if name in options})
            columns = kind.columns(frame)
            rows = [shown_cells(row, columns) for row in frame.to_dict("records")]
            entries.append({"kind": kind, "columns": columns, "rows": rows, "caption": kind.explained(frame)})
    return entries
