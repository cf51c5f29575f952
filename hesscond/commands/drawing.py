"""``hesscond figure``, ``table`` and ``report``: from stored runs, and from what other commands wrote."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Collection
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from hesscond.commands import options, printing
from hesscond.errors import ConfigError, did_you_mean
from hesscond.lazy import IN_FILE, own_code
from hesscond.report import page as pages, registry
from hesscond.report.tables import FORMATS

#: Figure that is not drawn from runs but from the trials of a statement.
RATE = "rate"

Layer = Annotated[str | None, typer.Option(help="Layer. Default: the first probed one.")]
Unit = Annotated[int | None, typer.Option(help="Output unit. Default: the first probed one.")]
Quantity = Annotated[str | None, typer.Option(help=f"Of blocks: {' | '.join(registry.QUANTITIES)}.")]


def one_of(what: str, names: Collection[str], *others: str) -> Callable[[str], str]:
    """Check that a figure, table or format is one of ``names``, before other arguments are missed."""

    def check(name: str) -> str:
        # FILE.py:NAME is read by the command
        if not IN_FILE.fullmatch(name) and name not in others and name not in names:
            raise ConfigError(f"unknown {what} {name!r}: {did_you_mean(name, [*names, *others])}")
        return name

    return check


def figure(
    kind: Annotated[
        str,
        typer.Argument(help=" | ".join([*registry.FIGURES, RATE]), callback=one_of("figure", registry.FIGURES, RATE)),
    ],
    output: Annotated[Path, typer.Option("--output", "-o", help=f"A {', '.join(pages.METADATA)} file.")],
    runs: Annotated[
        list[str] | None,
        typer.Argument(
            help=f"Run folders, or folders that hold some; for rate a statement ({', '.join(registry.RATED)})."
        ),
    ] = None,
    layer: Layer = None,
    unit: Unit = None,
    quantity: Quantity = None,
    preset: Annotated[
        str | None, typer.Option(help="Size and type of a venue's template: neurips2024, icml2024, jmlr2001, …")
    ] = None,
    width: Annotated[str, typer.Option(help="column, or full: across both columns of the template.")] = "column",
    font_size: Annotated[float | None, typer.Option(help="Size of the type, in points.")] = None,
    size: Annotated[str | None, typer.Option(help="Width, or width and height, in inches: 5 or 5x3.")] = None,
) -> None:
    """Draw a figure from stored runs.

    Example: hesscond figure conditioning runs/fc-digits-1 -o conditioning.pdf --preset icml2024
    """
    if width != "column" and preset is None:
        raise ConfigError("--width needs a --preset: it is that of a template")
    page = pages.COLUMN if preset is None else pages.venue_page(preset, width)  # type: ignore[arg-type]
    page = sized(page, font_size, size)
    options.check_file("--output", output, pages.METADATA)
    names = runs or []
    known = () if kind == RATE else registry.FIGURES[kind].options
    arguments = taken(f"figure {kind}", known, layer=layer, unit=unit, quantity=quantity)
    if kind == RATE:
        from hesscond.report import margins

        id, *others = names or registry.RATED[:1]
        if others or Path(id).is_dir():
            raise ConfigError(f"{RATE} takes one statement: {', '.join(registry.RATED)}")
        with printing.sign_of_life(id) as say, own_code(id):
            trials = margins.rate_trials(id, on_trial=lambda number: say(f"{id}, trial {number}"))
        drawn = margins.rate_figure(trials, id, page=page)
    else:
        if not names:
            raise ConfigError(f"figure {kind} takes {registry.FIGURES[kind].needs}: name at least one run folder")
        stored = options.collect([Path(name) for name in names])
        with own_code(kind):
            drawn = registry.FIGURES[kind].draw(stored, page=page, **arguments)
        if not hasattr(drawn, "savefig"):
            raise ConfigError(f"{kind}: draw must return a figure of matplotlib, not {drawn!r}")
    pages.save_figure(drawn, output)
    printing.stdout.print(str(output), soft_wrap=True)


def sized(page: pages.Page, font_size: float | None, size: str | None) -> pages.Page:
    """Page with another size of the type, in points, and another width and height, in inches, as "5x3"."""
    if font_size is not None:
        if not 1 <= font_size <= 100:
            raise ConfigError(f"--font-size takes points from 1 to 100, not {font_size:g}")
        page = replace(page, template=pages.resized(page.template, font_size), fixed_sizes=True)
    if size is not None:
        match = re.fullmatch(r"(\d+\.?\d*)(?:x(\d+\.?\d*))?", size, re.ASCII)
        inches = [float(part) for part in match.groups() if part] if match else []
        if not inches or not all(1 <= length <= 100 for length in inches):
            raise ConfigError(f"--size takes inches from 1 to 100, a width or width and height as 5x3, not {size!r}")
        page = replace(page, width=inches[0], height=inches[1] if len(inches) > 1 else None)
    return page


def table(
    kind: Annotated[str, typer.Argument(help=" | ".join(registry.TABLES), callback=one_of("table", registry.TABLES))],
    runs: options.Runs,
    format: Annotated[str, typer.Option(help=" | ".join(FORMATS), callback=one_of("format", FORMATS))] = "text",
    layer: Layer = None,
    unit: Unit = None,
) -> None:
    """Print a table of stored runs; LaTeX needs the package booktabs.

    Example: hesscond table seeds runs/fc-digits-1 --format latex
    """
    chosen = registry.TABLES[kind]
    arguments = taken(f"table {kind}", chosen.options, layer=layer, unit=unit)
    stored = options.collect(runs)
    with own_code(kind):
        if format == "text":
            printing.print_table(chosen.print(stored, **arguments))
        else:
            sys.stdout.write(chosen.write(stored, format, **arguments))  # type: ignore[arg-type]


def taken(what: str, known: tuple[str, ...], **given: Any) -> dict[str, Any]:
    """Options that were given; a ConfigError for one that this figure or table does not have."""
    arguments = {name: value for name, value in given.items() if value is not None}
    for name in arguments:
        if name not in known:
            reason = ": it shows all that were probed" if known and name in registry.UNIT else ""
            raise ConfigError(f"{what} has no --{name}{reason}")
    return arguments


def report(
    runs: Annotated[list[Path], typer.Argument(help="Run folders of one study, or folders that hold run folders.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="An .html file; an existing one is replaced.")] = Path(
        "report.html"
    ),
    title: Annotated[str | None, typer.Option(help="Title of the page. Default: study and methods.")] = None,
    layer: Annotated[str | None, typer.Option(help="Layer of the figures; the first one probed if absent.")] = None,
    unit: Annotated[int | None, typer.Option(help="Output unit of them; the first one probed if absent.")] = None,
) -> None:
    """Write one HTML file about stored runs that loads and runs nothing: verdict, tables, figures, configurations.

    Example: hesscond report runs/fc-digits-1 -o report.html
    """
    from hesscond.report import html_report

    options.check_file("--output", output, html_report.SUFFIXES)
    html_report.write_report(options.collect(runs), output, title=title, layer=layer, unit=unit)
    printing.stdout.print(str(output), soft_wrap=True)
