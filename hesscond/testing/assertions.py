"""Assertions and their results: decided for each Hessian by the bounds of κ, then for all, then by the policy."""

from __future__ import annotations

import math
import unittest
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import _hesscond_pytest
from hesscond.errors import ConfigError

#: Rows of the table in a message.
ROWS = 6


class ConditionNumberError(AssertionError):
    """The bounds decide against what was asserted.

    Attributes
    ----------
    assertion
        The assertion, with all findings.
    """

    def __init__(self, message: str, assertion: Assertion | None = None) -> None:
        super().__init__(message)
        self.assertion = assertion


class UnresolvedError(ConditionNumberError):
    """The bounds do not decide, and the policy is to fail."""


class UnresolvedWarning(UserWarning):
    """The bounds do not decide, and the policy is to warn."""


@dataclass(frozen=True)
class Finding:
    """Result for one Hessian.

    Attributes
    ----------
    holds
        Whether it holds; None if the bounds do not decide.
    margin
        Ratio to the limit: above 1 if it holds, below if not, 0 where nothing is known. For ranking only.
    cells
        Row of the message's table, by column.
    place
        Place of the Hessian, as "layer fc3, unit 3".
    told
        The result in a few words.
    """

    holds: bool | None
    margin: float
    cells: Mapping[str, str]
    place: str
    told: str


@dataclass(frozen=True)
class Assertion:
    """An assertion and its result.

    Attributes
    ----------
    claim
        The asserted claim, as "κ < 1e+06".
    findings
        Results for every Hessian.
    share
        Share of the findings that must hold.
    what
        Subject of the findings, as "units in the coordinates of bnp".
    outcome
        Outcome; ``"unresolved"`` also where the policy lets it pass.
    """

    claim: str
    findings: tuple[Finding, ...]
    share: float = 1.0
    what: str = "units"
    outcome: Literal["passed", "failed", "unresolved"] = "passed"

    def count(self, holds: bool | None) -> int:
        """Number of findings with this value of ``holds``."""
        return sum(one.holds is holds for one in self.findings)

    @property
    def needed(self) -> int:
        """Number of findings that must hold."""
        # the product may be a rounding error above a whole number
        return math.ceil(self.share * len(self.findings) * (1 - 1e-12))

    @property
    def worst(self) -> Finding:
        """Worst finding: failed before undecided before true, the smallest margin first."""
        return ranked(self.findings)[0]

    @property
    def record(self) -> dict[str, str]:
        """Record for the pytest plugin and JUnit reports."""
        return {"outcome": self.outcome, "claim": self.claim, "summary": self.summary}

    @property
    def summary(self) -> str:
        """Number of findings that hold, and the worst of them, in one line."""
        total, held, open_ones = len(self.findings), self.count(True), self.count(None)
        undecided = f", {open_ones} undecided" if open_ones else ""
        where = f"{self.worst.place}: " if self.worst.place else ""
        return f"{held} of {total} {self.what} hold{undecided}; {where}{self.worst.told}"

    def __str__(self) -> str:
        total, held, against = len(self.findings), self.count(True), self.count(False)
        said = "decide against it" if self.outcome == "failed" else "do not decide"
        needed = f"all {total}" if self.needed == total else f"{self.needed} of {total}"
        counted = (
            f"{held} of {total} {self.what} hold, {against} do not, {self.count(None)} undecided; needed: {needed}"
        )
        shown = ranked(self.findings)[:ROWS]
        more = total - len(shown)
        lines = [f"expected {self.claim}, and the bounds {said}: {counted}", "", *table([one.cells for one in shown])]
        return "\n".join([*lines, f"… and {more} more"] if more else lines)


def ranked(findings: Sequence[Finding]) -> list[Finding]:
    """The findings, the worst first."""
    order = {False: 0, None: 1, True: 2}
    return sorted(findings, key=lambda one: (order[one.holds], one.margin))


def table(rows: Sequence[Mapping[str, str]]) -> list[str]:
    """Lines of a table, columns that are empty everywhere left out."""
    names = [name for name in rows[0] if any(row[name] for row in rows)]
    widths = {name: max(len(name), *(len(row[name]) for row in rows)) for name in names}
    lines = ["  ".join(name.ljust(widths[name]) for name in names)]
    lines += ["  ".join(row[name].ljust(widths[name]) for name in names) for row in rows]
    return [f"  {line.rstrip()}" for line in lines]


def refuse_share(share: float) -> None:
    """Refuse a share that is not above 0 and at most 1."""
    if not 0 < share <= 1:
        raise ConfigError(f"share must lie above 0 and be at most 1, not {share}")


def policy_of(unresolved: str | None) -> str:
    """The given policy, else that of the test that is running, else fail."""
    if unresolved is None:
        return "fail" if _hesscond_pytest.running is None else _hesscond_pytest.running.unresolved
    if unresolved not in _hesscond_pytest.POLICIES:
        raise ConfigError(f"unresolved is one of {', '.join(_hesscond_pytest.POLICIES)}, not {unresolved!r}")
    return unresolved


def conclude(assertion: Assertion, policy: str) -> Assertion:
    """Pass, fail, or do what the policy says where the bounds do not decide."""
    __tracebackhide__ = True
    found = assertion
    if assertion.count(True) < assertion.needed:
        lost = len(assertion.findings) - assertion.count(False) < assertion.needed
        found = replace(assertion, outcome="failed" if lost else "unresolved")
    undecided = f"expected {found.claim}, and the bounds do not decide: {found.summary}"
    if found.outcome == "failed":
        raise ConditionNumberError(str(found), found)
    if found.outcome == "unresolved" and policy == "fail":
        hint = "unresolved='warn', 'skip' or 'pass' (or --hesscond-unresolved) lets it go"
        raise UnresolvedError(f"{found}\n\n{hint}", found)
    if found.outcome == "unresolved" and policy == "skip":
        skipped = unittest.SkipTest(undecided)
        skipped.assertion = found  # type: ignore[attr-defined]
        raise skipped
    if found.outcome == "unresolved" and policy == "warn":
        warnings.warn(undecided, UnresolvedWarning, stacklevel=3)
    # the pytest plugin knows of others by their exceptions
    if _hesscond_pytest.running is not None:
        _hesscond_pytest.running.record(found.record)
    return found
