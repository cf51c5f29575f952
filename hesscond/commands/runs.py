"""``hesscond runs`` and ``hesscond export``: what run folders hold."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from hesscond.commands.printing import AsJson, json_rows, listing
from hesscond.errors import ConfigError
from hesscond.study import find_runs, open_run
from hesscond.study.store import TABLES


def runs(
    folder: Annotated[Path, typer.Argument(help="Where to look.")] = Path("runs"), as_json: AsJson = False
) -> None:
    """List the runs at or below a folder."""
    listing(
        [
            {
                "run": str(r.folder),
                "study": r.config["name"],
                "method": r.method,
                "seed": r.seed,
                "status": r.status,
                "iterations": r.iterations,
                "started": r.facts.get("started", ""),
            }
            for r in find_runs(folder)
        ],
        as_json,
    )


def export(
    run: Annotated[Path, typer.Argument(help="A run folder.")],
    table: Annotated[str, typer.Option(help=" | ".join(TABLES))] = "probe",
    format: Annotated[str, typer.Option(help="csv | json | parquet")] = "csv",
    output: Annotated[Path | None, typer.Option("--output", "-o", help="File; standard output if absent.")] = None,
) -> None:
    """Write a table of a run's log.

    Example: hesscond export runs/fc-digits-1/bnp-seed0 --table probe --format csv -o probe.csv
    """
    frame = open_run(run).table(table)
    if format == "parquet" and output is None:
        raise ConfigError("parquet is a binary format: give a file with -o")
    target: Any = sys.stdout if output is None else output
    try:
        if format == "csv":
            frame.to_csv(target, index=False, lineterminator="\n")
        elif format == "json":
            text = json.dumps(json_rows(frame), indent=1)
            sys.stdout.write(text + "\n") if output is None else output.write_text(text, encoding="utf-8")
        elif format == "parquet":
            frame.to_parquet(target, index=False)
        else:
            raise ConfigError(f"unknown format {format!r}: choose from csv, json, parquet")
    except ImportError:
        raise ConfigError("parquet needs pyarrow: pip install pyarrow, or use --format csv") from None
    except BrokenPipeError:
        raise
    except OSError as error:
        raise ConfigError(f"{output} cannot be written: {error.strerror or error}") from None
