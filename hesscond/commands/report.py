"""``hesscond report``: stored runs as one file that can be sent to somebody."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from hesscond.commands.options import check_file, collect
from hesscond.commands.printing import stdout
from hesscond.report.html_report import SUFFIXES, write_report


def report(
    runs: Annotated[
        list[Path],
        typer.Argument(help="Run folders of one study, or folders that hold run folders."),
    ],
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
    check_file("--output", output, SUFFIXES)
    write_report(collect(runs), output, title=title, layer=layer, unit=unit)
    stdout.print(str(output), soft_wrap=True)
