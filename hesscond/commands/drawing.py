"""``hesscond figure`` and ``hesscond table``: from stored runs."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from hesscond.commands.options import collect
from hesscond.commands.printing import print_table, stdout
from hesscond.errors import ConfigError
from hesscond.report import (
    conditioning_figure,
    gain_figure,
    save_figure,
    statement_frame,
    statement_table,
    summary_frame,
    summary_table,
)

#: What ``hesscond figure`` draws.
FIGURES = {"conditioning": conditioning_figure, "gain": gain_figure}


def figure(
    kind: Annotated[str, typer.Argument(help=" | ".join(FIGURES))],
    runs: Annotated[list[Path], typer.Argument(help="Run folders, or folders that hold some.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="A .pdf, .png or .svg file.")],
    layer: Annotated[str | None, typer.Option(help="Layer; the first one probed if not given.")] = None,
    unit: Annotated[int | None, typer.Option(help="Output unit; the first one probed if not given.")] = None,
) -> None:
    """Draw a figure from stored runs.

    Example: hesscond figure conditioning runs/fc-digits-1 -o conditioning.pdf
    """
    if kind not in FIGURES:
        raise ConfigError(f"unknown figure {kind!r}: choose from {', '.join(FIGURES)}")
    save_figure(FIGURES[kind](collect(runs), layer=layer, unit=unit), output)
    stdout.print(str(output), soft_wrap=True)


def table(
    kind: Annotated[str, typer.Argument(help="summary | statements")],
    runs: Annotated[list[Path], typer.Argument(help="Run folders, or folders that hold some.")],
    format: Annotated[str, typer.Option(help="text | csv")] = "text",
    layer: Annotated[str | None, typer.Option(help="Layer; the first one probed if not given.")] = None,
    unit: Annotated[int | None, typer.Option(help="Output unit; the first one probed if not given.")] = None,
) -> None:
    """Print a table of stored runs.

    Example: hesscond table summary runs/fc-digits-1
    """
    if kind not in ("summary", "statements"):
        raise ConfigError(f"unknown table {kind!r}: choose from summary, statements")
    stored = collect(runs)
    if format == "text":
        if kind == "summary":
            stdout.print(summary_table(stored, layer=layer, unit=unit))
        else:
            print_table(statement_table(stored))
    elif format == "csv":
        frame = summary_frame(stored, layer=layer, unit=unit) if kind == "summary" else statement_frame(stored)
        frame.to_csv(sys.stdout, index=False, lineterminator="\n")
    else:
        raise ConfigError(f"unknown format {format!r}: choose from text, csv")
