"""Tables of runs in files: CSV, JSON and Parquet."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from hesscond.errors import ConfigError
from hesscond.lazy import optional
from hesscond.runs import printable

if TYPE_CHECKING:
    import pandas as pd

    from hesscond.runs import StoredRun

FORMATS = ("csv", "json", "parquet")


def joint_table(runs: Sequence[StoredRun], name: str) -> pd.DataFrame:
    """A table of several runs, with columns run (the folder), study, method, seed and learning_rate in front."""
    import pandas as pd

    frames = []
    for run in runs:
        frame = run.table(name)
        whose = {
            "run": printable(str(run.folder)),
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


def json_rows(frame: pd.DataFrame) -> list[dict[str, Any]]:
    """Rows of a table for JSON; missing and infinite (unresolved) values are null, as JSON has neither."""
    return [
        {name: None if cell is None or cell != cell or cell == math.inf else cell for name, cell in row.items()}
        for row in frame.astype(object).where(frame.notna(), math.nan).to_dict("records")
    ]


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
            text = json.dumps(json_rows(frame), indent=1) + "\n"
            target.write_text(text, encoding="utf-8") if isinstance(target, Path) else target.write(text)
    except BrokenPipeError:
        raise
    except OSError as error:
        raise ConfigError(f"{target} cannot be written: {error.strerror or error}") from None
