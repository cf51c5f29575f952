"""``hesscond runs``: the stored runs and their status."""

from __future__ import annotations

import math
from datetime import timedelta
from pathlib import Path
from typing import Annotated, Any

import typer

from hesscond.commands.exits import BAD_USE
from hesscond.commands.printing import AsJson, complain, listing, stdout
from hesscond.errors import RunError
from hesscond.runs import StoredRun, open_run, run_folders


def runs(
    folder: Annotated[Path, typer.Argument(help="Folder that holds run folders.")] = Path("runs"),
    as_json: AsJson = False,
) -> None:
    """List the runs at or below a folder, with their status, iterations and last training loss.

    Damaged ones are named on stderr, and the exit code is then 2.

    Example: hesscond runs runs
    """
    rows, damages = [], []
    for place in run_folders(folder):
        try:
            rows.append(standing(open_run(place)))
        except RunError as error:
            damages.append(str(error))
    if rows or not damages:
        if rows and not as_json:
            base = folder.parent if rows[0]["run"] == str(folder) else folder
            stdout.print(f"in {base}:", soft_wrap=True)
            rows = [shown(row, base) for row in rows]
        listing(rows, as_json)
    for damage in damages:
        complain(damage)
    if damages:
        raise typer.Exit(BAD_USE)


def standing(run: StoredRun) -> dict[str, Any]:
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
        "seconds": None if math.isnan(seconds) else seconds,
    }


def shown(row: dict[str, Any], folder: Path) -> dict[str, str]:
    """A row of the table in the terminal, its run as seen from the folder."""
    loss, seconds, total, done = row["last_loss"], row["seconds"], row["total"], row["iterations"]
    return {
        "run": str(Path(row["run"]).relative_to(folder)),
        "status": row["status"],
        "iterations": f"{done}" if done == total else f"{done}/{'?' if total is None else total}",
        "last loss": "–" if loss is None else f"{loss:.3g}",
        "took": "–" if seconds is None else clock_time(seconds),
    }


def clock_time(seconds: float) -> str:
    """Hours, minutes and seconds, as 1:01:01."""
    return str(timedelta(seconds=round(min(max(0.0, seconds), 8.64e13))))
