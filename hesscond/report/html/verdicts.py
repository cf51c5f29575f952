"""What became of the statements that a study checked, with their own words."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hesscond.errors import ConfigError
from hesscond.report.html.naming import NamedRun
from hesscond.report.html.text import count

if TYPE_CHECKING:
    import pandas as pd

    from hesscond.theorems import Claim, Statement

#: Reasons shown for one claim, the most frequent first.
REASONS = 3

MEANING = {
    "holds": "its hypotheses hold and the bounds of what was measured decide for it",
    "violated": "its hypotheses hold and the bounds decide against it",
    "not-applicable": "a hypothesis fails, so that it says nothing here; it is neither confirmed nor refuted",
    "unresolved": "the bounds do not decide",
}


@dataclass(frozen=True)
class ClaimRow:
    """A claim over all runs, on one kind of data.

    Attributes
    ----------
    name, text, known
        Of the claim; known to be true or not.
    data
        batch or train.
    holds, violated, unresolved, not_applicable
        How often.
    worst
        The most of what is allowed that was used; NaN if no number says.
    first
        Run and iteration of the first violation, else empty.
    reasons
        Why it did not apply or was not resolved, with how often.
    """

    name: str
    text: str
    known: bool
    data: str
    holds: int
    violated: int
    unresolved: int
    not_applicable: int
    worst: float
    first: str
    reasons: tuple[tuple[str, int], ...]

    @property
    def status(self) -> str:
        """Violated if it ever was; else holds if it ever did; else what there was."""
        if self.violated:
            return "violated"
        if self.holds:
            return "holds"
        return "unresolved" if self.unresolved else "not-applicable"


@dataclass(frozen=True)
class StatementVerdict:
    """A statement and its claims.

    Attributes
    ----------
    id, title, source, text, hypotheses
        As the statement says; only the id if this version does not know it.
    rows
        Of its claims.
    """

    id: str
    title: str
    source: str
    text: str
    hypotheses: tuple[str, ...]
    rows: tuple[ClaimRow, ...]

    @property
    def sentence(self) -> str:
        """What was found, in words."""
        checked = sum(r.holds + r.violated + r.unresolved + r.not_applicable for r in self.rows)
        surprising = [row for row in self.rows if row.known and row.violated]
        refuted = [row for row in self.rows if not row.known and row.violated]
        parts = [f"{count(checked, 'check')} of {count(len({row.name for row in self.rows}), 'claim')}"]
        if surprising:
            parts.append(f"{count(sum(r.violated for r in surprising), 'violation')} of what is known to hold")
        elif any(row.holds for row in self.rows):
            parts.append("no violation of what is known to hold")
        if refuted:
            parts.append(f"{count(sum(r.violated for r in refuted), 'violation')} of what is known to be false")
        if not any(row.holds or row.violated for row in self.rows):
            parts.append("nothing was decided: it never applied, or the bounds did not decide")
        return "; ".join(parts) + "."


def verdicts(runs: Sequence[NamedRun]) -> list[StatementVerdict]:
    """One for each statement that was checked in a run, in the order of their first check."""
    import pandas as pd

    tables = [one.run.table("statements").assign(run=one.name) for one in runs]
    there = [table for table in tables if len(table)]
    if not there:
        return []
    together = pd.concat(there, ignore_index=True)
    return [verdict(str(id), rows) for id, rows in together.groupby("statement", sort=False)]


def verdict(id: str, rows: pd.DataFrame) -> StatementVerdict:
    """Of one statement."""
    found = known_statement(id)
    claims = {claim.name: claim for claim in found.claims} if found else {}
    keys = ["claim", "data", "known"]
    summed = tuple(
        claim_row(str(name), str(data), bool(known), group, claims.get(str(name)))
        for (name, data, known), group in rows.groupby(keys, sort=False)
    )
    if found is None:
        return StatementVerdict(id, "", "", "This version of hesscond does not know the statement.", (), summed)
    return StatementVerdict(id, found.title, found.source, found.text, found.hypotheses, summed)


def known_statement(id: str) -> Statement | None:
    """The statement, if there is one of that id."""
    from hesscond.theorems import statement

    try:
        return statement(id)
    except ConfigError:
        return None


def claim_row(name: str, data: str, known: bool, rows: pd.DataFrame, claim: Claim | None) -> ClaimRow:
    """Counts of one claim on one kind of data."""
    counts = rows["status"].value_counts()
    violated = rows[rows["status"] == "violated"]
    reasons = rows.loc[rows["reason"].fillna("") != "", "reason"].value_counts(sort=False)
    ordered = sorted(reasons.items(), key=lambda item: (-item[1], str(item[0])))[:REASONS]
    first = violated.loc[violated["iteration"].idxmin()] if len(violated) else None
    return ClaimRow(
        name,
        claim.text if claim else "",
        known,
        data,
        int(counts.get("holds", 0)),
        int(counts.get("violated", 0)),
        int(counts.get("unresolved", 0)),
        int(counts.get("not-applicable", 0)),
        float(rows["used"].max()),
        "" if first is None else f"{first['run']}, iteration {first['iteration']}",
        tuple((str(reason), int(times)) for reason, times in ordered),
    )
