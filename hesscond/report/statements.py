"""Tables of the statements that a study checked."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from hesscond.errors import ConfigError
from hesscond.report import tables
from hesscond.report.registry import TableKind

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
        first_violation (its iteration, missing if there is none), reason (the commonest, where none was decided).
    """
    import pandas as pd

    rows = []
    keys = ["data", "layer", "unit", "statement", "claim", "known"]
    for run in runs:
        for key, group in run.table("statements").groupby(keys, sort=False):
            counts, violated = group["status"].value_counts(), group.loc[group["status"] == "violated", "iteration"]
            row = {"run": run.label, **dict(zip(keys, key, strict=True)), "checked": len(group)}
            row |= {
                "applicable": len(group) - int(counts.get("not-applicable", 0)),
                "held": int(counts.get("holds", 0)),
            }
            row |= {"violated": len(violated), "unresolved": int(counts.get("unresolved", 0))}
            row |= {
                "worst": float(group["used"].max()),
                "first_violation": violated.min() if len(violated) else math.nan,
            }
            reasons = group.loc[group["reason"] != "", "reason"]
            undecided = not (row["held"] or row["violated"] or reasons.empty)
            rows.append(row | {"reason": str(reasons.mode()[0]) if undecided else ""})
    columns = ["run", *keys, "checked", "applicable", "held", "violated", "unresolved", "worst", "first_violation"]
    return pd.DataFrame(rows, columns=[*columns, "reason"]).astype({"first_violation": "Int64", "known": bool})


def caption(frame: pd.DataFrame) -> str:
    """Remark on a table of claims: what its columns are, as far as something is in them."""
    undecided = frame[frame["reason"] != ""].groupby("reason", sort=False)["claim"].unique()
    parts = [f"{', '.join(claims)}: not decided, {why}" for why, claims in undecided.items()]
    parts.append(
        "held, of the checks that apply; worst: largest ratio of measured value to claimed bound, violated above 1, "
        "–: no check gave one"
    )
    if (frame["violated"] > 0).any():
        parts.append("first: iteration of the first violation")
    if not frame["known"].all():
        parts.append("known false: wrong, whether it was published or only looks plausible")
    return "; ".join(parts)


def statement_columns(frame: pd.DataFrame) -> list[tables.Column]:
    """Columns of `statement_frame` as they are written."""
    return [
        tables.words("run", "run"),
        tables.words("data", "data"),
        tables.Column("layer", lambda row: f"{row['layer']}/{row['unit']}", left=True),
        tables.words("statement", "statement"),
        tables.words("claim", "claim"),
        tables.Column("known", lambda row: "true" if row["known"] else "false", left=True),
        tables.Column("held", lambda row: f"{row['held']} / {row['applicable']}"),
        tables.numbers("unres.", "unresolved", "d"),
        tables.numbers("worst", "worst", ".3g"),
        tables.Column(
            "first", lambda row: tables.number(float(row["first_violation"]) if row["violated"] else math.nan, "d")
        ),
    ]


def checked_statements(runs: Sequence[StoredRun]) -> pd.DataFrame:
    """`statement_frame`; a ConfigError if no statement was checked along the runs."""
    frame = statement_frame(runs)
    if frame.empty:
        raise ConfigError("no statement was checked along the runs: train with --statement ID (hesscond statements)")
    return frame


STATEMENTS_TABLE = TableKind(
    "statements",
    60,
    "a row for each claim that was checked along a run: how often it held, by what margin",
    "runs with --statement",
    checked_statements,
    statement_columns,
    caption,
)
