"""Assertions about condition numbers: decided for each Hessian by the bounds of κ, then for all, then by the policy."""

from __future__ import annotations

import math
import unittest
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from torch import nn

import _hesscond_pytest
from hesscond.errors import ConfigError, HesscondError
from hesscond.expectations import intervals
from hesscond.hessians import Coordinates, DensePreconditioner
from hesscond.methods import Method
from hesscond.operators.operator import as_number
from hesscond.probing.diff import diff
from hesscond.probing.entry import probe
from hesscond.probing.results import ProbeResult
from hesscond.problem import evaluation
from hesscond.runs import place_name
from hesscond.spectra import ConditionNumber

if TYPE_CHECKING:
    import pandas as pd

#: Findings in a message.
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
    place
        Place of the Hessian, as "layer fc3, unit 3".
    measured
        What was measured, in a few words.
    """

    holds: bool | None
    margin: float
    place: str
    measured: str


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
        return sum(finding.holds is holds for finding in self.findings)

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
        return f"{held} of {total} {self.what} hold{undecided}; {where}{self.worst.measured}"

    def __str__(self) -> str:
        total, held, against = len(self.findings), self.count(True), self.count(False)
        verdict = {"passed": "decide for it", "failed": "decide against it"}.get(self.outcome, "do not decide")
        needed = f"all {total}" if self.needed == total else f"{self.needed} of {total}"
        counted = (
            f"{held} of {total} {self.what} hold, {against} do not, {self.count(None)} undecided; needed: {needed}"
        )
        first = ranked(self.findings)[:ROWS]
        remainder = total - len(first)
        lines = [f"expected {self.claim}, and the bounds {verdict}: {counted}", ""]
        lines += [f"  {entry.place}: {entry.measured}" if entry.place else f"  {entry.measured}" for entry in first]
        return "\n".join([*lines, f"… and {remainder} more"] if remainder else lines)


def ranked(findings: Sequence[Finding]) -> list[Finding]:
    """The findings, the worst first."""
    order = {False: 0, None: 1, True: 2}
    return sorted(findings, key=lambda finding: (order[finding.holds], finding.margin))


def policy_of(share: float, unresolved: str | None) -> str:
    """The given policy, else that of the test that is running, else fail; a share must be above 0 and at most 1."""
    if not 0 < (as_number(share) or math.nan) <= 1:
        raise ConfigError(f"share must lie above 0 and be at most 1, not {share!r}")
    if unresolved is None:
        return "fail" if _hesscond_pytest.running is None else _hesscond_pytest.running.unresolved
    if unresolved not in _hesscond_pytest.POLICIES:
        raise ConfigError(f"unresolved is one of {', '.join(_hesscond_pytest.POLICIES)}, not {unresolved!r}")
    return unresolved


def check_number(what: str, value: object) -> None:
    """Raise a ConfigError for a limit that is no positive finite number."""
    if not 0 < (as_number(value) or math.nan) < math.inf:
        raise ConfigError(f"{what} must be a positive finite number, not {value!r}")


def conclude(assertion: Assertion, policy: str) -> Assertion:
    """Pass, fail, or do what the policy says where the bounds do not decide."""
    __tracebackhide__ = True
    conclusion = assertion
    if assertion.count(True) < assertion.needed:
        lost = len(assertion.findings) - assertion.count(False) < assertion.needed
        conclusion = replace(assertion, outcome="failed" if lost else "unresolved")
    undecided = f"expected {conclusion.claim}, and the bounds do not decide: {conclusion.summary}"
    if conclusion.outcome == "failed":
        raise ConditionNumberError(str(conclusion), conclusion)
    if conclusion.outcome == "unresolved" and policy == "fail":
        hint = "unresolved='warn', 'skip' or 'pass' (or --hesscond-unresolved) lets it go"
        raise UnresolvedError(f"{conclusion}\n\n{hint}", conclusion)
    if conclusion.outcome == "unresolved" and policy == "skip":
        skipped = unittest.SkipTest(undecided)
        skipped.assertion = conclusion  # type: ignore[attr-defined]
        raise skipped
    if conclusion.outcome == "unresolved" and policy == "warn":
        warnings.warn(undecided, UnresolvedWarning, stacklevel=3)
    # the pytest plugin knows of others by their exceptions
    if _hesscond_pytest.running is not None:
        _hesscond_pytest.running.record(conclusion.record)
    return conclusion


#: Layer and unit (None: all of the layer, or of the network).
Place = tuple[str, int | None]
#: Coordinates in which κ is measured.
Measure = str | Method | Coordinates | torch.Tensor | None


def assert_condition_number(
    model: nn.Module,
    loss_fn: evaluation.LossFunction,
    batch: evaluation.Batch | Iterable[evaluation.Batch],
    *,
    layer: str | Sequence[str] | None = None,
    below: float | None = None,
    above: float | None = None,
    unit: int | Sequence[int] | None = None,
    level: str = "unit",
    method: Measure = None,
    share: float = 1.0,
    unresolved: str | None = None,
    **options: Any,
) -> Assertion:
    """Assert κ < below, κ > above, or both, for every Hessian named.

    It passes only if the bounds of κ decide for it, and fails only if they decide against it.

    Parameters
    ----------
    model, loss_fn, batch, level, method
        As for `hesscond.probe`; ``method`` may be a dense (n, n) tensor P, too.
    layer
        One or several layers; None: all.
    below, above
        Limits of κ, at least one.
    unit
        One or several units; None: all. It requires ``layer``.
    share
        Smallest share of the Hessians for which it must be true.
    unresolved
        What to do if the bounds do not decide: ``"fail"``, ``"warn"``, ``"skip"`` or ``"pass"``. None: the policy given
        to pytest, or fail. A Hessian that is zero has no κ and decides nothing.
    **options
        Further options of `hesscond.probe`: dtype, rtol, memory, reduction.

    Raises
    ------
    ConditionNumberError
        The bounds decide against it.
    UnresolvedError
        They do not decide, and the policy is to fail. Both are an ``AssertionError``.
    ConfigError
        Bad use.

    Examples
    --------
    >>> import torch
    >>> _ = torch.manual_seed(0)
    >>> model, batch = nn.Linear(4, 3), (torch.randn(20, 4), torch.randint(0, 3, (20,)))
    >>> assert_condition_number(model, nn.CrossEntropyLoss(), batch, below=100).outcome
    'passed'
    """
    __tracebackhide__ = True
    limits = [(sign, limit) for sign, limit in (("<", below), (">", above)) if limit is not None]
    if not limits:
        raise ConfigError("give a limit of κ: below=…, above=… or both")
    for _, limit in limits:
        check_number("a limit of κ", limit)
    policy = policy_of(share, unresolved)
    kappas = measured(model, loss_fn, batch, layer=layer, unit=unit, level=level, method=method, options=options)
    findings = []
    for place, kappa in kappas.items():
        known = interval(kappa)
        truths = [intervals.COMPARISONS[sign](known, intervals.Interval.point(limit)) for sign, limit in limits]
        margin = min(limit / kappa.upper if sign == "<" else kappa.lower / limit for sign, limit in limits)
        findings.append(Finding(decided(truths, kappa.rank), margin, where(place), with_accuracy(kappa)))
    claim = " and ".join(f"κ {sign} {limit:g}" for sign, limit in limits)
    return conclude(Assertion(claim, tuple(findings), share, description_of(level, name_of(method))), policy)


def assert_preconditioner_improves(
    model: nn.Module,
    loss_fn: evaluation.LossFunction,
    batch: evaluation.Batch | Iterable[evaluation.Batch],
    method: Measure,
    *,
    factor: float = 1.0,
    layer: str | Sequence[str] | None = None,
    unit: int | Sequence[int] | None = None,
    level: str = "unit",
    share: float = 1.0,
    unresolved: str | None = None,
    **options: Any,
) -> Assertion:
    """Assert κ(H) / κ(PᵀHP) ≥ factor, for every Hessian named.

    The ratio is known to lie between the lower bound of κ(H) over the upper bound of κ(PᵀHP) and the upper bound of
    κ(H) over the lower bound of κ(PᵀHP); it passes only if this whole interval decides for it, and fails only if the
    whole interval decides against it.

    Parameters
    ----------
    model, loss_fn, batch, level
        As for `hesscond.probe`.
    method
        Method whose coordinates are measured, as for `hesscond.probe`, or a dense (n, n) tensor P of one unit's
        parameters [bias, weights].
    factor
        Smallest factor by which κ must decrease; 1: it must not increase.
    layer, unit, share, unresolved, **options
        As for `assert_condition_number`, which returns and raises the same.

    Examples
    --------
    >>> import torch
    >>> _ = torch.manual_seed(0)
    >>> inputs = torch.randn(50, 4) * torch.tensor([1.0, 10.0, 100.0, 1000.0]) + 5
    >>> model, batch = nn.Linear(4, 1), (inputs, torch.randn(50, 1))
    >>> assert_preconditioner_improves(model, nn.MSELoss(), batch, "bnp", factor=1e4).outcome
    'passed'
    """
    __tracebackhide__ = True
    if method is None:
        raise ConfigError("say which preconditioner: a method's name, a Preconditioner or a matrix P")
    check_number("factor", factor)
    policy = policy_of(share, unresolved)
    plain = measured(model, loss_fn, batch, layer=layer, unit=unit, level=level, method=None, options=options)
    transformed = measured(model, loss_fn, batch, layer=layer, unit=unit, level=level, method=method, options=options)
    findings = []
    for place, kappa in plain.items():
        other = transformed[place]
        ratio = interval(kappa) / interval(other)
        gain = intervals.shown(float(ratio.lower), float(ratio.upper))
        truth = intervals.less_equal(intervals.Interval.point(factor), ratio)
        holds = decided([truth], min(kappa.rank, other.rank))
        summary = f"by {gain}, {with_accuracy(kappa)} → {with_accuracy(other)}"
        findings.append(Finding(holds, float(ratio.lower) / factor, where(place), summary))
    name = name_of(method)
    claim = f"κ(H)/κ(PᵀHP) ≥ {factor:g} with {name}"
    return conclude(Assertion(claim, tuple(findings), share, description_of(level, "plain")), policy)


def assert_no_regression(
    before: ProbeResult | pd.DataFrame,
    after: ProbeResult | pd.DataFrame,
    *,
    at_most: float = 1.05,
    share: float = 1.0,
    unresolved: str | None = None,
) -> Assertion:
    """Assert κ after / κ before ≤ at_most, for every Hessian that both results have.

    Parameters
    ----------
    before, after
        Results of `hesscond.probe`, or their frames: ``pandas.read_csv`` of what ``to_frame().to_csv`` wrote.
    at_most
        Largest factor by which κ may grow: 10 for ten times.
    share, unresolved
        As for `assert_condition_number`, which returns and raises the same.

    Examples
    --------
    >>> import torch
    >>> _ = torch.manual_seed(0)
    >>> model, (inputs, targets) = nn.Linear(4, 1), (torch.randn(50, 4), torch.randn(50, 1))
    >>> before, after = (probe(model, nn.MSELoss(), (c * inputs, targets)) for c in (1, 2))
    >>> assert_no_regression(before, after, at_most=10).outcome
    'passed'
    """
    __tracebackhide__ = True
    check_number("at_most", at_most)
    policy = policy_of(share, unresolved)
    frame = diff(before, after, names=["before", "after"]).to_frame()
    findings = []
    for row in frame[frame["rank_before"].notna() & frame["rank_after"].notna()].to_dict("records"):
        place: Place = (row["layer"], row["unit"] if isinstance(row["unit"], int) else None)
        ratio = intervals.Interval.between(row["ratio_after_lower"], row["ratio_after_upper"])
        holds = decided(
            [intervals.less_equal(ratio, intervals.Interval.point(at_most))], min(row["rank_before"], row["rank_after"])
        )
        kappas = {
            name: intervals.shown(row[f"kappa_{name}_lower"], row[f"kappa_{name}_upper"])
            for name in ("before", "after")
        }
        growth = intervals.shown(float(ratio.lower), float(ratio.upper))
        summary = f"κ {kappas['before']} → {kappas['after']}, by {growth}"
        findings.append(Finding(holds, at_most / float(ratio.upper), where(place), summary))
    what = "Hessians" if frame["unit"].isna().all() else "units"
    return conclude(Assertion(f"κ after / κ before ≤ {at_most:g}", tuple(findings), share, what), policy)


def decided(truths: Sequence[intervals.Truth], rank: int) -> bool | None:
    """Whether all truths are certain; None if that is not decided, as for a Hessian that is zero."""
    if rank == 0:
        return None
    if all(bool(np.all(truth.certain)) for truth in truths):
        return True
    return None if all(bool(np.all(truth.possible)) for truth in truths) else False


def measured(
    model: nn.Module,
    loss_fn: evaluation.LossFunction,
    batch: evaluation.Batch | Iterable[evaluation.Batch],
    *,
    layer: str | Sequence[str] | None,
    unit: int | Sequence[int] | None,
    level: str,
    method: Measure,
    options: Mapping[str, Any],
) -> dict[Place, ConditionNumber]:
    """κ of every Hessian named, by its place."""
    __tracebackhide__ = True
    if hasattr(batch, "__next__"):
        raise ConfigError("the data can be read only once: give a batch, a list of batches or a DataLoader")
    layers = [layer] if isinstance(layer, str) else layer
    units = "all" if unit is None else [unit] if isinstance(unit, int) else unit
    coordinates = DensePreconditioner(method) if isinstance(method, torch.Tensor) else method
    try:
        result = probe(model, loss_fn, batch, layers, level, method=coordinates, units=units, **options)
    except HesscondError as error:
        # the sentence says it: no frames of the engine in a test's output
        raise error.with_traceback(None) from None
    if not len(result):
        raise ConfigError("the model has no layer that could be probed: " + "; ".join(result.skipped.values()))
    return {
        (entry.name, unit): kappa
        for entry in result.values()
        for unit, kappa in zip(entry.units if entry.level == "unit" else (None,), entry.conditions, strict=True)
    }


def name_of(method: Measure) -> str:
    """Name of the coordinates."""
    if method is None:
        return "plain"
    if isinstance(method, torch.Tensor):
        return "P"
    return method if isinstance(method, str) else str(method.name)


def interval(kappa: ConditionNumber) -> intervals.Interval:
    """The bounds of κ."""
    return intervals.Interval.between(kappa.lower, kappa.upper)


def with_accuracy(kappa: ConditionNumber) -> str:
    """κ, how it was decided, and how well it is known."""
    return f"{kappa}, known to {1 - kappa.lower / kappa.upper:.1e}" if kappa.resolved else str(kappa)


def where(place: Place) -> str:
    """A place in words."""
    return place_name(f"layer {place[0]}", place[1], ", unit ")


def description_of(level: str, method: str) -> str:
    """Description of the Hessians, as "units in the coordinates of bnp"."""
    what = {"unit": "units", "layer": "layers", "network": "network"}[level]
    return what if method == "plain" else f"{what} in the coordinates of {method}"
