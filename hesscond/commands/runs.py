"""``hesscond runs`` and ``hesscond export``: the stored runs, and tables of their logs as CSV, JSON and Parquet."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING, Annotated, Any

import typer

from hesscond.commands import options, printing
from hesscond.errors import ConfigError, RunError
from hesscond.lazy import optional
from hesscond.runs import store
from hesscond.sheets import duration

if TYPE_CHECKING:
    import pandas as pd

FORMATS = ("csv", "json", "parquet")


def runs(
    folder: Annotated[Path, typer.Argument(help="Folder that holds run folders.")] = Path("runs"),
    as_json: printing.AsJson = False,
) -> None:
    """List the runs at or below a folder, with their status, iterations and last training loss.

    Damaged ones are named on stderr, and the exit code is then 2.

    Example: hesscond runs runs
    """
    rows, damages = [], []
    for place in store.run_folders(folder):
        try:
            rows.append(row_of(store.open_run(place)))
        except RunError as error:
            damages.append(str(error))
    if rows or not damages:
        if rows and not as_json:
            base = folder.parent if rows[0]["run"] == str(folder) else folder
            printing.stdout.print(f"in {base}:", soft_wrap=True)
            rows = [shown(row, base) for row in rows]
        printing.listing(rows, as_json)
    for damage in damages:
        printing.complain(damage)
    if damages:
        raise typer.Exit(printing.BAD_USE)


def row_of(run: store.StoredRun) -> dict[str, Any]:
    """JSON object of a run: numbers as numbers, None where there is none."""
    loss, seconds = run.last_loss, run.seconds
    return {
        "run": str(run.folder),
        "study": run.config["name"],
        "method": run.method,
        "seed": run.seed,
        "learning_rate": run.config["run"]["learning_rate"],
        "status": run.status,
        "iterations": run.iterations,
        "total": run.total,
        "last_loss": loss if math.isfinite(loss) else None,
        "started": run.facts.get("started", ""),
        "seconds": seconds if math.isfinite(seconds) else None,
    }


def shown(row: dict[str, Any], folder: Path) -> dict[str, str]:
    """A row of the table in the terminal, its run as seen from the folder."""
    loss, seconds, total, done = row["last_loss"], row["seconds"], row["total"], row["iterations"]
    return {
        "run": str(Path(row["run"]).relative_to(folder)),
        "status": row["status"],
        "iterations": f"{done}" if done == total else f"{done}/{'?' if total is None else total}",
        "last loss": "–" if loss is None else f"{loss:.3g}",
        "took": "–" if seconds is None else duration(seconds),
    }


def export(
    runs: options.Runs,
    table: Annotated[str, typer.Option(help=" | ".join(store.TABLES))] = "probe",
    format: Annotated[
        str | None, typer.Option(help=f"{' | '.join(FORMATS)}. Default: as the file's name ends, or csv.")
    ] = None,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="File, else standard output.")] = None,
) -> None:
    """Write a table of the log.

    Several runs, or a folder that holds some, give one table with the columns run, study, method, seed and
    learning_rate in front.

    Example: hesscond export runs/fc-digits-1/bnp-seed0 --table probe -o probe.csv

    Example: hesscond export runs --table evaluation -o evaluation.parquet
    """
    options.check_file("--output", output, None if format else [f".{known}" for known in FORMATS])
    ending = "csv" if output is None else output.suffix[1:].lower()
    format = options.choice("--format", format or ending, FORMATS)
    if output is not None and ending in FORMATS and ending != format:
        raise ConfigError(f"--format {format} and --output {output} contradict each other")
    stored = options.collect(runs)
    single = len(runs) == 1 and stored[0].folder == runs[0]
    frame = stored[0].table(table) if single else joint_table(stored, table)
    write_table(frame, format, sys.stdout if output is None else output)


def joint_table(runs: Sequence[store.StoredRun], name: str) -> pd.DataFrame:
    """A table of several runs, with columns run (the folder), study, method, seed and learning_rate in front."""
    import pandas as pd

    frames = []
    for run in runs:
        frame = run.table(name)
        whose = {
            "run": store.printable(str(run.folder)),
            "study": str(run.config["name"]),
            "method": run.method,
            "seed": run.seed,
            "learning_rate": float(run.config["run"]["learning_rate"]),
        }
        for place, (column, value) in enumerate(whose.items()):
            frame.insert(place, column, value)
        frames.append(frame)
    # an empty table has columns of no type, which must not decide that of the others
    return pd.concat([frame for frame in frames if len(frame)] or frames[:1], ignore_index=True)


def write_table(frame: pd.DataFrame, format: str, target: Path | IO[str]) -> None:
    """Write a table to a file, or CSV and JSON to an open stream; numbers are read back to the last bit."""
    if format == "parquet" and not isinstance(target, Path):
        raise ConfigError("parquet is a binary format: give a file with -o")
    try:
        if format == "csv":
            frame.to_csv(target, index=False, lineterminator="\n")
        elif format == "parquet":
            with optional("--format parquet"):
                import pyarrow  # type: ignore[import-untyped]  # noqa: F401  (pandas would not say which package)
            frame.to_parquet(target, index=False, engine="pyarrow")
        else:
            # JSON has neither missing nor infinite (unresolved) values
            rows = [
                {name: None if cell is None or cell != cell or cell == math.inf else cell for name, cell in row.items()}
                for row in frame.astype(object).where(frame.notna(), math.nan).to_dict("records")
            ]
            text = json.dumps(rows, indent=1) + "\n"
            target.write_text(text, encoding="utf-8") if isinstance(target, Path) else target.write(text)
    except BrokenPipeError:
        raise
    except OSError as error:
        name = target if isinstance(target, Path) else "the output"
        raise ConfigError(f"{name} cannot be written: {error.strerror or error}") from None
