"""Tables of the statements that a study checked."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from hesscond.errors import ConfigError
from hesscond.report.registry import TableKind
from hesscond.report.tables import Column, TextTable, number, numbers, words

if TYPE_CHECKING:
    import pandas as pd

    from hesscond.runs import StoredRun


def statement_frame(runs: Sequence[StoredRun]) -> pd.DataFrame:
    """One row for each claim of each statement, layer, unit and kind of data of each run.

    Parameters
    ----------
    runs
        Stored runs, also of several studies.

    Returns
    -------
    pandas.DataFrame
        run (METHOD-seedS), data, layer, unit, statement, claim, known (whether it is known to be true), checked (number
        of checks), applicable, held, violated, unresolved, worst (largest ratio of measured value to claimed bound),
        first_violation (its iteration, missing if there is none).
    """
    import pandas as pd

    rows = []
    keys = ["data", "layer", "unit", "statement", "claim", "known"]
    for run in runs:
        for key, group in run.table("statements").groupby(keys, sort=False):
            counts = group["status"].value_counts()
            rows.append(
                {
                    "run": run.label,
                    **dict(zip(keys, key, strict=True)),
                    "checked": len(group),
                    "applicable": len(group) - int(counts.get("not-applicable", 0)),
                    "held": int(counts.get("holds", 0)),
                    **measure_of(group),
                }
            )
    columns = ["run", *keys, "checked", "applicable", "held", "violated", "unresolved", "worst", "first_violation"]
    return pd.DataFrame(rows, columns=columns).astype({"first_violation": "Int64", "known": bool})


def measure_of(checks: pd.DataFrame) -> dict[str, Any]:
    """Number of unresolved checks, largest ratio of value to bound, and first violation (NaN: none)."""
    violated = checks.loc[checks["status"] == "violated", "iteration"]
    first = float(violated.min()) if len(violated) else math.nan
    unresolved = int((checks["status"] == "unresolved").sum())
    return {
        "unresolved": unresolved,
        "violated": len(violated),
        "worst": float(checks["used"].max()),
        "first_violation": first,
    }


def caption(frame: pd.DataFrame) -> str:
    """Remark on a table of claims: what its columns are, as far as something is in them."""
    parts = [
        "held, of the checks that apply; worst: largest ratio of measured value to claimed bound, violated above 1"
    ]
    if (frame["violated"] > 0).any():
        parts.append("first: iteration of the first violation")
    if not frame["known"].all():
        parts.append("known false: wrong, whether it was published or only looks plausible")
    return "; ".join(parts)


def statement_columns(frame: pd.DataFrame) -> list[Column]:
    """Columns of `statement_frame` as they are written."""
    return [
        words("run", "run"),
        words("data", "data"),
        Column("layer", lambda row: f"{row['layer']}/{row['unit']}", left=True),
        words("statement", "statement"),
        words("claim", "claim"),
        Column("known", lambda row: "true" if row["known"] else "false", left=True),
        Column("held", lambda row: f"{row['held']} / {row['applicable']}"),
        numbers("unres.", "unresolved", "d"),
        numbers("worst", "worst", ".3g"),
        Column("first", lambda row: number(float(row["first_violation"]) if row["violated"] else math.nan, "d")),
    ]


def checked_statements(runs: Sequence[StoredRun]) -> pd.DataFrame:
    """`statement_frame`; a ConfigError if no statement was checked along the runs."""
    frame = statement_frame(runs)
    if frame.empty:
        raise ConfigError("no statement was checked along the runs: train with --statement ID (hesscond statements)")
    return frame


def claim_frame(runs: Sequence[StoredRun]) -> pd.DataFrame:
    """One row for each claim of each statement, over all runs, layers and units."""
    import pandas as pd

    rows = []
    tables = [table for run in runs if len(table := run.table("statements"))]
    together = pd.concat(tables) if tables else pd.DataFrame(columns=["statement", "claim", "known"])
    for (statement, claim, known), group in together.groupby(["statement", "claim", "known"], sort=False):
        status = group["status"]
        row = {"statement": statement, "claim": claim, "known": bool(known)}
        for data in ("batch", "train"):
            own = status[group["data"] == data]
            row[data] = int((own == "holds").sum()), int((own != "not-applicable").sum())
        decided = status.isin(["holds", "violated"]).any()
        reasons = group.loc[group["reason"] != "", "reason"]
        rows.append(row | measure_of(group) | {"reason": "" if decided or reasons.empty else str(reasons.mode()[0])})
    return pd.DataFrame(rows)


def statement_table(runs: Sequence[StoredRun]) -> TextTable:
    """`claim_frame` for the terminal: the claims of each statement below its name, in 80 columns."""
    frame = claim_frame(runs)
    rows = frame.to_dict("records")
    undecided = [f"{row['statement']}, {row['claim']}: not decided, {row['reason']}" for row in rows if row["reason"]]
    below = "\n".join([*undecided, caption(frame)])
    table = TextTable(["claim", "known", ">batch", ">train", ">unres.", ">worst", ">first"], caption=below)
    for row, above in zip(rows, [None, *rows], strict=False):
        if above is None or row["statement"] != above["statement"]:
            table.add_row(str(row["statement"]), *[""] * 6)
        table.add_row(
            f"  {row['claim']}",
            "true" if row["known"] else "false",
            "{} / {}".format(*row["batch"]),
            "{} / {}".format(*row["train"]),
            str(row["unresolved"]),
            number(row["worst"], ".3g"),
            number(row["first_violation"], "d"),
        )
    return table


STATEMENTS_TABLE = TableKind(
    "statements",
    60,
    "a row for each claim that was checked along a run: how often it held, by what margin",
    "runs with --statement",
    checked_statements,
    statement_columns,
    caption,
)
