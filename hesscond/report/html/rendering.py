"""The page itself: content, template, and a policy that forbids everything from outside."""

from __future__ import annotations

import math
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from hesscond.errors import ConfigError
from hesscond.report.html.configuration import configurations, differences, environment
from hesscond.report.html.curves import charts
from hesscond.report.html.embedding import json_block, policy
from hesscond.report.html.findings import findings, unresolved
from hesscond.report.html.naming import named_runs
from hesscond.report.html.pictures import pictures
from hesscond.report.html.tables import sheets
from hesscond.report.html.text import count, listed, visible
from hesscond.report.html.verdicts import MEANING, verdicts
from hesscond.report.selection import select

if TYPE_CHECKING:
    from hesscond.study.store import StoredRun

#: How the file's name may end.
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
        Of one study: any methods, seeds, learning rates and batch sizes.
    path
        Ends in ``.html``.
    title
        Of the page; study and methods by default.
    layer, unit
        Which unit the curves and figures show; the first that was probed by default.

    Raises
    ------
    ConfigError
        The runs are of different studies; the unit was not probed; the file's name ends otherwise, or it cannot be
        written.

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
    """The page of `write_report`: the same runs give the same text.

    Parameters
    ----------
    runs, title, layer, unit
        As for `write_report`.

    Returns
    -------
    str
        HTML.

    Raises
    ------
    ConfigError
        The runs are of different studies; the unit was not probed.
    """
    selection = select(runs, layer, unit)
    named = named_runs(runs)
    first = runs[0].config
    methods = list(dict.fromkeys(run.method for run in runs))
    options = {"layer": selection.layer, "unit": selection.unit}
    checked = verdicts(named)
    style, script = asset("report.css"), asset("report.js")
    return (
        templates()
        .get_template("report.html")
        .render(
            policy=policy(style, script),
            style=style,
            script=script,
            title=title or f"{selection.study}: {listed(methods)}",
            study=selection.study,
            description=first.get("description", ""),
            source=first.get("source", ""),
            selection=selection,
            runs=named,
            methods=methods,
            seeds=sorted({run.seed for run in runs}),
            findings=findings(named, checked),
            configurations=configurations(named),
            differences=differences(named),
            environment=environment(named),
            charts=charts(named, selection.layer, selection.unit),
            pictures=pictures(runs, options),
            sheets=sheets(runs, options),
            verdicts=checked,
            meaning=MEANING,
            unresolved=unresolved(named),
        )
    )


def templates() -> Environment:
    """Jinja2 that escapes everything, and writes out what is invisible."""
    made = Environment(
        loader=PackageLoader("hesscond.report.html"),
        autoescape=True,
        finalize=visible,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.filters |= {"embedded": json_block, "number": number, "duration": duration, "count": count}
    return made


def asset(name: str) -> Markup:
    """A file of the package that goes into the page as it is."""
    return Markup(resources.files("hesscond.report.html").joinpath("templates", name).read_text(encoding="utf-8"))


def number(value: float, form: str = ".3g") -> str:
    """A number; a dash if there is none."""
    return "–" if math.isnan(value) else format(value, form)


def duration(seconds: float) -> str:
    """Seconds in words.

    Examples
    --------
    >>> duration(42.0), duration(130.0), duration(4000.0)
    ('42 s', '2 min 10 s', '1 h 6 min')
    """
    if math.isnan(seconds):
        return "–"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    return f"{whole // 60} min {whole % 60} s" if whole < 3600 else f"{whole // 3600} h {whole % 3600 // 60} min"
