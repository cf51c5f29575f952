"""Decisions of an assertion: block by block by the bounds of κ, then for all of them, then by the policy."""

from __future__ import annotations

import math
import unittest
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import _hesscond_pytest
from hesscond.errors import ConfigError

Outcome = Literal["passed", "failed", "unresolved", "written"]
#: Rows of the table in a message.
ROWS = 6


class ConditionNumberError(AssertionError):
    """The bounds decide against what was asserted.

    Attributes
    ----------
    assertion
        What was asserted, with everything found.
    """

    def __init__(self, message: str, assertion: Assertion | None = None) -> None:
        super().__init__(message)
        self.assertion = assertion


class UnresolvedError(ConditionNumberError):
    """The bounds do not decide, and the policy is to fail."""


class BaselineError(ConditionNumberError):
    """There is no baseline, or it is one of something else."""


class UnresolvedWarning(UserWarning):
    """The bounds do not decide, and the policy is to warn."""


@dataclass(frozen=True)
class Finding:
    """What was found of one Hessian, or of one claim of a statement.

    Attributes
    ----------
    holds
        None: the bounds do not decide.
    margin
        How far from the limit: above 1 if it holds, below if not, 0 where nothing is known. For ranking only.
    cells
        A row of the message's table, by column.
    place
        As "layer fc3, unit 3".
    told
        What was found, in a few words.
    """

    holds: bool | None
    margin: float
    cells: Mapping[str, str]
    place: str
    told: str


@dataclass(frozen=True)
class Assertion:
    """What was asserted, and what came of it.

    Attributes
    ----------
    claim
        As "κ < 1e+06".
    findings
        Of every Hessian or claim.
    share
        The share of them of which it must be true.
    what
        They are, as "units"; and in which coordinates.
    outcome
        unresolved too where the policy lets it pass.
    """

    claim: str
    findings: tuple[Finding, ...]
    share: float = 1.0
    what: str = "units"
    outcome: Outcome = field(default="passed")

    def count(self, holds: bool | None) -> int:
        """How many findings are of a kind."""
        return sum(one.holds is holds for one in self.findings)

    @property
    def needed(self) -> int:
        """Of how many it must be true."""
        # the product may be a rounding error above a whole number
        return math.ceil(self.share * len(self.findings) * (1 - 1e-12))

    @property
    def worst(self) -> Finding:
        """Against before undecided before true, the least margin first."""
        return ranked(self.findings)[0]

    @property
    def summary(self) -> str:
        """One line."""
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
    """The worst first."""
    order = {False: 0, None: 1, True: 2}
    return sorted(findings, key=lambda one: (order[one.holds], one.margin))


def table(rows: Sequence[Mapping[str, str]]) -> list[str]:
    """Lines of a table, columns that are empty everywhere left out."""
    names = [name for name in rows[0] if any(row[name] for row in rows)]
    widths = {name: max(len(name), *(len(row[name]) for row in rows)) for name in names}
    lines = ["  ".join(name.ljust(widths[name]) for name in names)]
    lines += ["  ".join(row[name].ljust(widths[name]) for name in names) for row in rows]
    return [f"  {line.rstrip()}" for line in lines]


def checked_share(share: float) -> float:
    """A share above 0 and at most 1."""
    if not 0 < share <= 1:
        raise ConfigError(f"share must lie above 0 and be at most 1, not {share}")
    return share


def policy_of(unresolved: str | None) -> str:
    """The policy asked for, else that of the test that is running, else fail.

    Raises
    ------
    ConfigError
        There is no such policy.
    """
    if unresolved is None:
        return "fail" if _hesscond_pytest.running is None else _hesscond_pytest.running.unresolved
    if unresolved not in _hesscond_pytest.POLICIES:
        raise ConfigError(f"unresolved is one of {', '.join(_hesscond_pytest.POLICIES)}, not {unresolved!r}")
    return unresolved


def conclude(assertion: Assertion, policy: str) -> Assertion:
    """Pass, fail, or do what the policy says where the bounds do not decide.

    Raises
    ------
    ConditionNumberError
        They decide against it.
    UnresolvedError
        They do not decide, and the policy is to fail.
    unittest.SkipTest
        They do not decide, and the policy is to skip.
    """
    __tracebackhide__ = True
    total, held = len(assertion.findings), assertion.count(True)
    outcome: Outcome = "unresolved"
    if held >= assertion.needed:
        outcome = "passed"
    elif total - assertion.count(False) < assertion.needed:
        outcome = "failed"
    found = Assertion(assertion.claim, assertion.findings, assertion.share, assertion.what, outcome)
    record(outcome, found.claim, found.summary)
    if outcome == "failed":
        raise ConditionNumberError(str(found), found)
    if outcome == "unresolved" and policy == "fail":
        hint = "unresolved='warn', 'skip' or 'pass' (or --hesscond-unresolved) lets it go"
        raise UnresolvedError(f"{found}\n\n{hint}", found)
    if outcome == "unresolved" and policy == "skip":
        raise unittest.SkipTest(f"expected {found.claim}, and the bounds do not decide: {found.summary}")
    if outcome == "unresolved" and policy == "warn":
        warnings.warn(
            f"expected {found.claim}, and the bounds do not decide: {found.summary}", UnresolvedWarning, stacklevel=3
        )
    return found


def record(outcome: Outcome, claim: str, summary: str, **more: Any) -> None:
    """Tell the pytest plugin, if a test of pytest's is running."""
    if _hesscond_pytest.running is not None:
        _hesscond_pytest.running.record({"outcome": outcome, "claim": claim, "summary": summary, **more})
