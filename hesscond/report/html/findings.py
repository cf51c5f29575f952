"""What a reader must know before believing the numbers, and how many κ were not resolved."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hesscond.report.html.naming import NamedRun
from hesscond.report.html.text import count, listed
from hesscond.report.html.verdicts import StatementVerdict
from hesscond.report.rounding import rounding_note
from hesscond.report.series import RESOLVED, SHOWN, is_unresolved

if TYPE_CHECKING:
    import pandas as pd

#: What a status means for whoever reads the numbers.
STATUS = {
    "diverged": "diverged: its numbers end where the loss or an activation became NaN or infinite",
    "killed": "was killed: its process ended without a word, and its log is complete up to the last probe before",
    "interrupted": "was interrupted: it has fewer iterations than planned",
    "failed": "failed: it has fewer iterations than planned",
    "running": "is still running: this page shows what was logged so far",
    "silent": "is silent: it runs on another machine, or has died there; nothing was heard of it for a while",
}
DATA = {"batch": "mini-batches", "train": "training set"}


@dataclass(frozen=True)
class Finding:
    """A warning or a remark: ``kind`` is the first word of the text, in bold."""

    kind: str
    text: str


@dataclass(frozen=True)
class Unresolved:
    """How many κ of a run were not resolved."""

    name: str
    data: str
    quantity: str
    unresolved: int
    measured: int


def unresolved(runs: Sequence[NamedRun]) -> list[Unresolved]:
    """Of every run, kind of data and quantity that was measured."""
    found = []
    for one in runs:
        probe = one.run.table("probe")
        for data, rows in probe.groupby("data", sort=False):
            for quantity, shown in SHOWN.items():
                measured = int(rows[RESOLVED[quantity]].notna().sum())
                if measured:
                    number = int(is_unresolved(rows, quantity).sum())
                    found.append(Unresolved(one.name, DATA.get(str(data), str(data)), shown, number, measured))
    return found


def findings(runs: Sequence[NamedRun], checked: Sequence[StatementVerdict]) -> list[Finding]:
    """All warnings, the gravest first."""
    found = [*endings(runs)]
    for one in checked:
        for row in one.rows:
            if row.known and row.violated:
                text = f"{one.id}, {row.name}: {count(row.violated, 'violation')}, the first in {row.first}"
                found.append(Finding("A statement that is known to hold was violated.", text))
    probes = {one.name: one.run.table("probe") for one in runs}
    found.extend(unprobed(probes))
    found.extend(deficient(probes))
    found.extend(indefinite(probes))
    found.extend(dead(probes))
    found.extend(rounded(runs))
    found.extend(undecided(runs))
    found.extend(mixed_versions(runs))
    return found


def endings(runs: Sequence[NamedRun]) -> Iterator[Finding]:
    """Runs that did not finish."""
    for one in runs:
        status = one.run.status
        if status == "finished":
            continue
        said = STATUS.get(status, f"has the status {status}")
        message = one.run.facts.get("message", "")
        text = f"{one.name} {said} ({count(one.run.iterations, 'iteration')})"
        yield Finding(status.capitalize(), f"{text}: {message}" if message else f"{text}.")


def unprobed(probes: dict[str, pd.DataFrame]) -> Iterator[Finding]:
    """Runs without any κ."""
    names = [name for name, probe in probes.items() if probe.empty]
    if names:
        yield Finding("Not probed", f"{listed(names)}: no condition number was measured.")


def deficient(probes: dict[str, pd.DataFrame]) -> Iterator[Finding]:
    """Where Ĥ cannot have full column rank, and where H has none."""
    for data, shown in DATA.items():
        rows = of_all(probes, data)
        rows = rows[rows["nullity"].notna() & rows["samples"].notna()]
        if rows.empty:
            continue
        wide = rows["samples"] < rows["n_params"] - rows["dead"].fillna(0)
        if bool(wide.any()):
            yield Finding(
                "Rank deficient",
                f"On the {shown}, Ĥ has fewer rows (N ≤ {rows.loc[wide, 'samples'].max()}) than columns that vary at "
                f"{int(wide.sum())} of {len(rows)} probes: it cannot have full column rank, so that BNP's Theorem 4 on "
                "centring does not apply there. κ is that of the nonzero spectrum.",
            )
        if bool((rows["nullity"] > 0).all()):
            yield Finding(
                "Singular everywhere",
                f"On the {shown}, the Hessian is singular at every probe (rank {span(rows['rank'])} of "
                f"{span(rows['n_params'])}): κ is that of the nonzero spectrum.",
            )


def indefinite(probes: dict[str, pd.DataFrame]) -> Iterator[Finding]:
    """Hessians with negative eigenvalues."""
    rows = of_all(probes)
    number = int((rows["negative"].fillna(0) > 0).sum())
    if number:
        yield Finding("Indefinite", f"{number} of {len(rows)} Hessians have negative eigenvalues: κ is that of |λ|.")


def dead(probes: dict[str, pd.DataFrame]) -> Iterator[Finding]:
    """Features without variation."""
    rows = of_all(probes)
    number = int((rows["dead"].fillna(0) > 0).sum())
    if number:
        yield Finding(
            "Dead features",
            f"{number} of {len(rows)} probes have input features that are constant over the samples (at most "
            f"{int(rows['dead'].max())} of {span(rows['n_params'] - 1)}); κ(D) leaves them out.",
        )


def undecided(runs: Sequence[NamedRun]) -> Iterator[Finding]:
    """κ's that were not resolved."""
    counts = unresolved(runs)
    number, measured = (sum(getattr(row, key) for row in counts) for key in ("unresolved", "measured"))
    if number:
        yield Finding("Unresolved", f"{number} of {measured} condition numbers are only known to exceed a bound.")


def rounded(runs: Sequence[NamedRun]) -> Iterator[Finding]:
    """κ's that may be round-off."""
    note = rounding_note([one.run for one in runs])
    if note:
        yield Finding("Round-off", note)


def mixed_versions(runs: Sequence[NamedRun]) -> Iterator[Finding]:
    """Runs of different versions."""
    seen = {str(sorted(dict(one.run.config["run"].get("versions") or {}).items())) for one in runs}
    if len(seen) > 1:
        yield Finding("Different versions", "Not all runs were made with the same versions: see the environment.")


def of_all(probes: dict[str, pd.DataFrame], data: str | None = None) -> pd.DataFrame:
    """The probe rows of all runs, of one kind of data or of any."""
    import pandas as pd

    kept = [probe if data is None else probe[probe["data"] == data] for probe in probes.values()]
    full = [probe for probe in kept if len(probe)]
    return pd.concat(full, ignore_index=True) if full else kept[0].iloc[:0]


def span(values: pd.Series) -> str:
    """Smallest to largest."""
    low, high = values.min(), values.max()
    return str(low) if low == high else f"{low}–{high}"
