"""``hesscond export``: logs of runs as tables, and their curves to TensorBoard and MLflow."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from hesscond.commands import options
from hesscond.commands.printing import stdout
from hesscond.errors import ConfigError
from hesscond.export import FORMATS, CurveWriter, MLflowRun, TensorBoardFiles, joint_table, transfer, write_table
from hesscond.runs import TABLES, StoredRun

#: Formats that take whole runs.
CURVES = ("tensorboard", "mlflow")


def export(
    runs: options.Runs,
    table: Annotated[
        str | None,
        typer.Option(help=f"{' | '.join(TABLES)}; default: probe."),
    ] = None,
    format: Annotated[str, typer.Option(help=" | ".join(FORMATS + CURVES))] = "csv",
    output: Annotated[
        str | None,
        typer.Option(
            "--output",
            "-o",
            help="File, else standard output; for tensorboard a log folder; for mlflow a folder or tracking URI.",
        ),
    ] = None,
    follow: Annotated[
        bool, typer.Option("--follow", help="tensorboard, mlflow: continue while the runs are being written.")
    ] = False,
) -> None:
    """Write a table of the log, or send all curves to TensorBoard or MLflow.

    Several runs, or a folder that holds some, give one table with the columns run, study, method, seed and
    learning_rate in front. Curves go to one TensorBoard folder, or MLflow run, for each run: they are seen with
    tensorboard --logdir tb, or mlflow ui --backend-store-uri sqlite:///mlflow/mlflow.db.

    Example: hesscond export runs/fc-digits-1/bnp-seed0 --table probe -o probe.csv

    Example: hesscond export runs --table evaluation --format parquet -o evaluation.parquet

    Example: hesscond export runs/fc-digits-1 --format tensorboard -o tb --follow

    Example: hesscond export runs --format mlflow -o mlflow
    """
    options.choice("--format", format, FORMATS + CURVES)
    if format not in CURVES:
        if follow:
            raise ConfigError(f"--follow is for {' and '.join(CURVES)}: {format} is written once")
        name = table or "probe"
        if name not in TABLES:
            raise ConfigError(f"unknown table {name!r}: choose from {', '.join(TABLES)}")
        stored = options.collect(runs)
        single = len(runs) == 1 and stored[0].folder == runs[0]
        frame = stored[0].table(name) if single else joint_table(stored, name)
        write_table(frame, format, sys.stdout if output is None else Path(output))
        return
    if table is not None:
        raise ConfigError(f"--format {format} takes whole runs: leave out --table")
    if output is None:
        raise ConfigError(f"--format {format} needs a place: give it with -o")
    stored = options.collect(runs)
    writer_of: Callable[[StoredRun], CurveWriter] = (
        partial(MLflowRun, output) if format == "mlflow" else event_files(stored, Path(output))
    )
    points = transfer(stored, writer_of, follow=follow)
    stdout.print(f"{points} points of {len(stored)} {'run' if len(stored) == 1 else 'runs'} → {output}", soft_wrap=True)


def event_files(runs: list[StoredRun], output: Path) -> Callable[[StoredRun], CurveWriter]:
    """Factory of TensorBoard folders: ``output`` for a single run, else the run's relative path below it."""
    folders = {run.folder: run.folder.absolute() for run in runs}
    common = Path(os.path.commonpath(folders.values())) if len(runs) > 1 else folders[runs[0].folder]
    return lambda run: TensorBoardFiles(output / folders[run.folder].relative_to(common), run)
