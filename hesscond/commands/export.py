"""``hesscond export``: logs of runs as tables."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from hesscond.commands import options
from hesscond.errors import ConfigError
from hesscond.export import FORMATS, joint_table, write_table
from hesscond.runs import TABLES


def export(
    runs: options.Runs,
    table: Annotated[str, typer.Option(help=" | ".join(TABLES))] = "probe",
    format: Annotated[str, typer.Option(help=" | ".join(FORMATS))] = "csv",
    output: Annotated[Path | None, typer.Option("--output", "-o", help="File, else standard output.")] = None,
) -> None:
    """Write a table of the log.

    Several runs, or a folder that holds some, give one table with the columns run, study, method, seed and
    learning_rate in front.

    Example: hesscond export runs/fc-digits-1/bnp-seed0 --table probe -o probe.csv

    Example: hesscond export runs --table evaluation --format parquet -o evaluation.parquet
    """
    options.choice("--format", format, FORMATS)
    if table not in TABLES:
        raise ConfigError(f"unknown table {table!r}: choose from {', '.join(TABLES)}")
    stored = options.collect(runs)
    single = len(runs) == 1 and stored[0].folder == runs[0]
    frame = stored[0].table(table) if single else joint_table(stored, table)
    write_table(frame, format, sys.stdout if output is None else output)
