"""What a report says of runs in words: names, what a reader must know first, verdicts, how the runs differ."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import tomli_w
from markupsafe import Markup

from hesscond.errors import ConfigError
from hesscond.report.series import RESOLVED, SHOWN, is_unresolved, rounding_note

if TYPE_CHECKING:
    import pandas as pd

    from hesscond.study.store import StoredRun
    from hesscond.theorems import Claim, Statement

#: Control, format (bidirectional overrides among them), surrogate, private and unassigned characters, separators.
INVISIBLE = ("Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp")

#: A page shows no more characters than this of one text.
LONGEST = 4000


def visible(text: Any) -> str:
    r"""The text with every character that has no look of its own written out; long ones are cut.

    Parameters
    ----------
    text
        Anything; what is marked as safe stays as it is.

    Examples
    --------
    >>> visible("study\u202e\x00")
    'study⟨U+202E⟩⟨U+0000⟩'
    """
    if isinstance(text, Markup):
        return text
    text = str(text)
    rest = len(text) - LONGEST
    shown = "".join(
        f"⟨U+{ord(c):04X}⟩" if unicodedata.category(c) in INVISIBLE else c for c in " ".join(text[:LONGEST].split("\n"))
    )
    return f"{shown} … ({rest} more characters)" if rest > 0 else shown


def shortened(text: str, length: int = 60) -> str:
    """A name that fits into a legend."""
    return text if len(text) <= length else f"{text[: length - 1]}…"


def count(number: int, noun: str) -> str:
    """A number of things.

    Examples
    --------
    >>> count(1, "run"), count(2, "run")
    ('1 run', '2 runs')
    """
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def listed(items: list[str], most: int = 6) -> str:
    """Items in a sentence, the first few of many.

    Examples
    --------
    >>> listed(["a", "b", "c"], most=2)
    'a, b and 1 more'
    """
    if len(items) <= most:
        return ", ".join(items)
    return f"{', '.join(items[:most])} and {len(items) - most} more"


@dataclass(frozen=True)
class NamedRun:
    """A run, what it is called on the page, and what its configuration is called as a file."""

    run: StoredRun
    name: str
    file: str


def named_runs(runs: Sequence[StoredRun]) -> list[NamedRun]:
    """Method and seed; where that is not enough learning rate and batch size too, else a number."""
    plain = [f"{shortened(run.method)}, seed {run.seed}" for run in runs]
    fuller = [
        name
        if plain.count(name) == 1
        else f"{name}, lr {run.config['run']['learning_rate']:g}, batch {run.config['training']['batch_size']}"
        for name, run in zip(plain, runs, strict=True)
    ]
    numbered = [
        name if fuller.count(name) == 1 else f"{name} #{fuller[: place + 1].count(name)}"
        for place, name in enumerate(fuller)
    ]
    files = [re.sub(r"[^A-Za-z0-9._-]+", "-", run.label)[:60].strip("-.") or "run" for run in runs]
    return [
        NamedRun(run, name, file if files.count(file) == 1 else f"{file}-{files[: place + 1].count(file)}")
        for place, (run, name, file) in enumerate(zip(runs, numbered, files, strict=True))
    ]


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
            parts.append(f"{count(sum(r.violated for r in surprising), 'violation')} of what is known to be true")
        elif any(row.holds for row in self.rows):
            parts.append("no violation of what is known to be true")
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
                found.append(Finding("A statement that is known to be true was violated.", text))
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


#: What a configuration does not set.
MISSING = "–"


@dataclass(frozen=True)
class Configuration:
    """A run's configuration.

    Attributes
    ----------
    name, file
        Of the run, and of the file to save it as.
    text
        As TOML.
    lines
        Of it, each with whether another run's differs in it.
    """

    name: str
    file: str
    text: str
    lines: tuple[tuple[str, bool], ...]


@dataclass(frozen=True)
class Setting:
    """A key of the configurations with the value in each run."""

    key: str
    values: tuple[str, ...]


def configurations(runs: Sequence[NamedRun]) -> list[Configuration]:
    """One for each run."""
    texts = [tomli_w.dumps(one.run.config) for one in runs]
    placed = [lines_in_tables(text) for text in texts]
    common = set(placed[0]).intersection(*placed[1:])
    return [
        Configuration(
            one.name,
            f"{one.file}.toml",
            text,
            tuple((line, (table, line) not in common) for table, line in lines),
        )
        for one, text, lines in zip(runs, texts, placed, strict=True)
    ]


def lines_in_tables(text: str) -> list[tuple[str, str]]:
    """Each line of TOML with the header of the table that it is in."""
    found, table = [], ""
    for line in text.rstrip("\n").split("\n"):
        table = line if line.startswith("[") else table
        found.append((table, line))
    return found


def differences(runs: Sequence[NamedRun]) -> list[Setting]:
    """The keys whose values are not the same in all runs, in the order of the first that has them."""
    flat = [flattened(one.run.config) for one in runs]
    keys = dict.fromkeys(key for settings in flat for key in settings)
    rows = [Setting(key, tuple(settings.get(key, MISSING) for settings in flat)) for key in keys]
    return [row for row in rows if len(set(row.values)) > 1]


def flattened(config: dict[str, Any], above: str = "") -> dict[str, str]:
    """Values as TOML writes them, by dotted key.

    Examples
    --------
    >>> flattened({"run": {"seed": 0, "method": "bnp"}})
    {'run.seed': '0', 'run.method': '"bnp"'}
    """
    found: dict[str, str] = {}
    for key, value in config.items():
        if isinstance(value, dict):
            found |= flattened(value, f"{above}{key}.")
        else:
            found[f"{above}{key}"] = " ".join(tomli_w.dumps({"v": value}).partition("=")[2].split())
    return found


@dataclass(frozen=True)
class Fact:
    """Something about the environment: each value with the runs that have it."""

    name: str
    values: tuple[tuple[str, str], ...]


def environment(runs: Sequence[NamedRun]) -> list[Fact]:
    """Versions, device and source of the data."""
    described = []
    for one in runs:
        own = one.run.config["run"]
        versions = own.get("versions")
        facts = {"device": own.get("device", MISSING), "data source": own.get("data_source", MISSING)}
        described.append((versions if isinstance(versions, dict) else {}) | facts)
    found = []
    for name in dict.fromkeys(name for facts in described for name in facts):
        whose: dict[str, list[str]] = {}
        for one, facts in zip(runs, described, strict=True):
            whose.setdefault(str(facts.get(name, MISSING)), []).append(one.name)
        everywhere = len(whose) == 1
        found.append(Fact(str(name), tuple((v, "" if everywhere else listed(names)) for v, names in whose.items())))
    return found
