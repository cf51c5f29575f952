"""Published statements: what one is, what a check of it says, when two sides count as equal, and how all is run."""

from __future__ import annotations

import math
import textwrap
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from types import MappingProxyType
from typing import ClassVar, Literal, SupportsIndex

import numpy as np

from hesscond.errors import ConfigError
from hesscond.hessians import BlockHessian
from hesscond.lazy import Registry, subclass_of
from hesscond.sheets import Sheet, Shown, TextTable
from hesscond.spectra import ConditionNumber
from hesscond.theorems.networks import LayerNetwork

Status = Literal["holds", "violated", "not-applicable", "unresolved"]


@dataclass(frozen=True)
class Claim:
    """One claim of a statement.

    Attributes
    ----------
    name
        Short, for tables.
    text
        What is claimed, as a formula.
    true
        Whether it is known to be true; one that is known to be false is expected to be violated.
    published
        Whether the source claims it; others are nearby readings, which say where the claim ends.
    """

    name: str
    text: str
    true: bool
    published: bool = True


@dataclass(frozen=True)
class Outcome:
    """One check of one claim.

    Attributes
    ----------
    status
        holds or violated only where bounds decide; unresolved where they do not; not-applicable where a hypothesis
        fails.
    used
        How much of what the claim allows is used: it is violated above 1. NaN where there is no such number.
    reason
        The hypothesis that fails, or what was not resolved.
    predicted, measured
        Where the claim compares a decay −ln(rate) that κ predicts with a measured one: both.
    """

    status: Status
    used: float = math.nan
    reason: str = ""
    predicted: float = math.nan
    measured: float = math.nan


#: Outcome where κ has no bounds.
UNRESOLVED = Outcome("unresolved", reason="a condition number is unresolved")


def decided(lower: float, upper: float, allowed: float = 1.0) -> Outcome:
    """Outcome for a quantity that lies in [lower, upper] and is claimed to be at most ``allowed``.

    It holds or is violated only where both bounds are on one side; a NaN, as of an unresolved κ, leaves it unresolved.
    """
    if math.isnan(lower) or math.isnan(upper):
        return UNRESOLVED
    if lower > upper and not math.isclose(lower, upper):  # two roundings of one number
        raise ValueError(f"decided(lower, upper) got a lower bound {lower:.6g} above the upper one, {upper:.6g}")
    if upper <= allowed:
        return Outcome("holds", upper / allowed)
    if lower > allowed:
        return Outcome("violated", lower / allowed)
    return Outcome("unresolved", lower / allowed, "the bounds lie on both sides")


def not_applicable(reason: str) -> Outcome:
    """Outcome of a claim of which a hypothesis fails."""
    return Outcome("not-applicable", reason=reason)


@dataclass(frozen=True)
class Counterexample:
    """A case in which a claim is false, certified in exact arithmetic.

    Attributes
    ----------
    claim
        Name of the claim.
    matrix
        The case, to be typed in: nested lists of integers.
    text
        The comparison, with certified bounds.
    factor
        A certified lower bound of how far the claim is exceeded.
    """

    claim: str
    matrix: list[list[int]]
    text: str
    factor: float


@dataclass
class Tally:
    """Counts of the outcomes of one claim in all trials."""

    claim: Claim
    holds: int = 0
    violated: int = 0
    not_applicable: int = 0
    unresolved: int = 0
    worst: float = -math.inf
    first_violation: int | None = None
    reasons: dict[str, int] = field(default_factory=dict)
    used: list[float] = field(default_factory=list, repr=False)

    def add(self, outcome: Outcome, number: int) -> None:
        """Count the outcome of trial ``number``."""
        key = outcome.status.replace("-", "_")
        setattr(self, key, getattr(self, key) + 1)
        if not math.isnan(outcome.used):
            self.worst = max(self.worst, outcome.used)
            self.used.append(outcome.used)
        if outcome.status == "violated" and self.first_violation is None:
            self.first_violation = number
        if outcome.reason:
            self.reasons[outcome.reason] = self.reasons.get(outcome.reason, 0) + 1

    @property
    def status(self) -> Status:
        """Status: violated if a trial violated the claim, else holds if it held in one, else what the trials gave."""
        if self.violated:
            return "violated"
        if self.holds:
            return "holds"
        return "unresolved" if self.unresolved else "not-applicable"


@dataclass(frozen=True, repr=False)
class Verdict(Shown):
    """Result of the check of a statement.

    Attributes
    ----------
    id
        Id of the statement.
    trials, seed
        Number of trials, and the seed of their cases.
    tallies
        Counts of the outcomes, one tally for each claim.
    counterexamples
        Certified counterexamples of the false claims, if they were asked for.
    aliases
        Other ids of the statement.
    seconds
        Time the check took.
    """

    id: str
    trials: int
    seed: int
    tallies: tuple[Tally, ...]
    counterexamples: tuple[Counterexample, ...] = ()
    aliases: tuple[str, ...] = ()
    seconds: float = 0.0

    def __repr__(self) -> str:
        return f"<Verdict {self.id}: {self.status}, {self.trials} trials>"

    def sheet(self) -> Sheet:
        return Sheet([], verdict_table([self]), self.remarks())

    def status_of(self, tally: Tally) -> Status:
        """The status of a claim: violated too if only the search found a counterexample."""
        return "violated" if any(case.claim == tally.claim.name for case in self.counterexamples) else tally.status

    @property
    def status(self) -> Status:
        """Status of the published claims: violated if one of them is."""
        statuses = [self.status_of(tally) for tally in self.tallies if tally.claim.published]
        order: tuple[Status, ...] = ("violated", "holds", "unresolved")
        return next((status for status in order if status in statuses), "not-applicable")

    @property
    def expected(self) -> Status:
        """``"holds"`` if all published claims are known to be true, else ``"violated"``."""
        return "holds" if all(tally.claim.true for tally in self.tallies if tally.claim.published) else "violated"

    def remarks(self) -> list[str]:
        """Lines about the counterexamples, with matrices to be typed in."""
        lines = []
        for case in self.counterexamples:
            lines.append(f"{self.id}, {case.claim}: certified counterexample, factor {case.factor:.4f}")
            lines += [f"  {case.matrix}", f"  {case.text}"]
        return lines

    @property
    def ok(self) -> bool:
        """Whether no claim that is known to be true was violated."""
        return not any(tally.claim.true and tally.violated for tally in self.tallies)

    @property
    def violations(self) -> int:
        """Number of violations of all published claims."""
        return sum(tally.violated for tally in self.tallies if tally.claim.published)

    @property
    def worst(self) -> float:
        """Largest used share of what published claims allow, above 1 if one is violated; NaN if none has a share."""
        shares = [tally.worst for tally in self.tallies if tally.claim.published and tally.worst > -math.inf]
        return max(shares, default=math.nan)


#: Explanation of the columns of a table of verdicts.
CAPTION = (
    "known false: wrong, published or (*) only plausible. violated: of the decided trials, 0 if by the counterexample "
    "below only; n/a: a hypothesis fails; open: bounds do not decide; used: largest value / bound, violated above 1"
)


def verdict_table(verdicts: Sequence[Verdict]) -> TextTable:
    """A row for each claim below its statement, in 80 columns."""
    table = TextTable(["claim", "known", "status", ">violated", ">n/a", ">open", ">used"], caption=CAPTION)
    for verdict in verdicts:
        table.add_row(" = ".join([verdict.id, *verdict.aliases]), *[""] * 6)
        for tally in verdict.tallies:
            table.add_row(
                f"  {tally.claim.name}",
                f"{'true' if tally.claim.true else 'false'}{'' if tally.claim.published else ' *'}",
                verdict.status_of(tally),
                f"{tally.violated} / {tally.holds + tally.violated}",
                str(tally.not_applicable),
                str(tally.unresolved),
                "–" if tally.worst == -math.inf else f"{tally.worst:.3g}",
                end_section=tally is verdict.tallies[-1],
            )
    return table


class Statement(ABC):
    """A published statement, and how it is checked.

    A new one is a subclass with the `register` decorator in any file under ``hesscond/theorems``, or in a module of
    another package that is an entry point of the group ``hesscond.statements``.
    """

    #: Id, as in THEORY and on the command line.
    id: ClassVar[str]
    #: Other ids, each with the claims that it stands for: for a statement that several papers make.
    aliases: ClassVar[Mapping[str, str]] = MappingProxyType({})
    #: A few words.
    title: ClassVar[str]
    #: Paper and number.
    source: ClassVar[str]
    #: One paragraph: what is said, and what is known of it.
    text: ClassVar[str]
    #: What must hold for it to apply.
    hypotheses: ClassVar[tuple[str, ...]]
    #: What it says, one by one.
    claims: ClassVar[tuple[Claim, ...]]
    #: Trials unless another number is asked for: seconds on one core.
    trials: ClassVar[int] = 200

    @abstractmethod
    def trial(self, rng: np.random.Generator) -> Sequence[Outcome]:
        """Check all claims on one random case, drawn from the generator only."""

    def counterexamples(self, seed: int) -> Iterator[Counterexample]:
        """Certified counterexamples of the false claims, searched for from a seed."""
        return iter(())


#: Statements by id and alias; packages that bring some name modules that register them as entry points of the group.
_REGISTRY: Registry[type[Statement]] = Registry("statement", "hesscond.statements", subclass_of(Statement))


def register(statement: type[Statement]) -> type[Statement]:
    """Make a statement known by its id and its aliases, none of which may be taken (a class decorator)."""
    names = (statement.id, *statement.aliases)
    for id in names:
        if id in [*_REGISTRY]:
            raise ConfigError(f"a statement {id!r} is registered already")
    _REGISTRY.update(dict.fromkeys(names, statement))
    return statement


def statement(id: str) -> Statement:
    """The statement of an id or an alias; a `ConfigError` if there is none."""
    return _REGISTRY.find(id)()


def statements() -> Iterator[Statement]:
    """All statements, by id, each once."""
    return (subclass() for subclass in sorted({*_REGISTRY.installed()}, key=lambda subclass: subclass.id))


#: Relative differences of up to this are round-off …
ALLOWED = 1000 * float(np.finfo(float).eps)
#: … of more than this times as much are none, and what lies between is unresolved.
GAP = 1e4
#: Nothing is learnt from an equality if round-off may reach this share of what is compared.
SHARE = 1e-3


def equal(
    actual: np.ndarray, expected: np.ndarray, scale: np.ndarray | float | None = None, *, allowed: float = ALLOWED
) -> Outcome:
    """Whether two arrays are equal up to ``allowed``, relative to ``scale``; violated above `GAP` times that.

    ``scale`` is the size of the terms that each entry is a sum of; by default the largest entry.
    """
    actual, expected = np.asarray(actual, dtype=float), np.asarray(expected, dtype=float)
    difference = np.abs(actual - expected)
    size = max(np.abs(actual).max(), np.abs(expected).max())
    if size == 0:
        return not_applicable("both sides are zero")
    if not np.isfinite(size):
        return Outcome("unresolved", reason="overflow")
    terms = np.broadcast_to(np.asarray(size if scale is None else scale, dtype=float), difference.shape)
    # where all terms are zero, so must the difference be
    relative = np.divide(difference, terms, out=np.where(difference == 0, 0.0, 1.0), where=terms > 0).max()
    if relative > GAP * allowed:
        decade = int(np.floor(np.log10(difference.max() / size)))
        return Outcome(
            "violated", float(relative / allowed), f"both sides differ by about 1e{decade} of the larger one"
        )
    if relative > allowed:
        return Outcome("unresolved", float(relative / allowed), "more than round-off, and less than a clear difference")
    if allowed * terms.max() > SHARE * size:
        return Outcome("unresolved", float(relative / allowed), "round-off is as large as what is compared")
    return Outcome("holds", float(relative / allowed))


def discrepancy(actual: Sequence[Fraction | int], expected: Sequence[Fraction | int]) -> Fraction:
    """1 + max |actual − expected| / max |expected|, exactly: 1 for equal sides; ∞ is no fraction, so expected ≠ 0."""
    difference = max(abs(Fraction(a) - Fraction(b)) for a, b in zip(actual, expected, strict=True))
    return 1 + difference / max(abs(Fraction(b)) for b in expected)


@dataclass(frozen=True)
class Observation:
    """A layer at one moment of a training run, on a mini-batch or on the whole training set.

    Attributes
    ----------
    centred : (k, n + 1)
        ĤU = [e, H − eμᵀ], or a triangular factor of it, without constant features. No rows if no statement needs them.
    mu, sigma : (n,)
        Means and standard deviations of the features that are not constant.
    samples
        N.
    weight : (m, all features)
        Weight of the layer, one row for each unit as in torch.
    kappa, kappa_preconditioned
        κ of the unit's Hessian in plain coordinates, and in those of BNP from the same data.
    means : (all features)
        Means of all features, constant ones included.
    unit
        Number of the unit.
    hessian
        Hessian of the unit in plain coordinates.
    network
        The network in which the layer is, with the data.
    """

    centred: np.ndarray
    mu: np.ndarray
    sigma: np.ndarray
    samples: int
    weight: np.ndarray
    kappa: ConditionNumber
    kappa_preconditioned: ConditionNumber
    means: np.ndarray | None = None
    unit: int = 0
    hessian: BlockHessian | None = None
    network: LayerNetwork | None = None

    @property
    def plain(self) -> np.ndarray:
        """Ĥ = [e, H], or the same triangular factor times U⁻¹."""
        H_hat = self.centred.copy()
        H_hat[:, 1:] += self.centred[:, :1] * self.mu
        return H_hat

    @property
    def normalized(self) -> np.ndarray:
        """Ĝ = ĤUD."""
        G_hat = self.centred.copy()
        G_hat[:, 1:] /= self.sigma
        return G_hat

    @property
    def kappa_D(self) -> float:
        """κ of D = diag(1, 1/σ)."""
        ends = [1.0, *self.sigma]
        return max(ends) / min(ends)


class LayerStatement(Statement):
    """A statement that can be checked on a layer of a network in training."""

    #: Types of the modules that the statement applies to.
    layers: ClassVar[tuple[str, ...]] = ("Linear",)
    #: Whether it differs from unit to unit of a layer; if not, it is checked with the first one that is probed.
    by_unit: ClassVar[bool] = False
    #: Whether it reads the inputs, ``centred``: over a training set that takes one more pass, and a triangular factor.
    inputs: ClassVar[bool] = True

    @abstractmethod
    def observe(self, layer: Observation) -> Sequence[Outcome]:
        """Check all claims on an observed layer."""


def verify(
    id: str | Statement,
    *,
    trials: int | None = None,
    seed: int = 0,
    counterexamples: bool = True,
    on_trial: Callable[[int], None] | None = None,
) -> Verdict:
    """Check a published statement on random cases, and find certified counterexamples of what is false in it.

    Parameters
    ----------
    id
        Id or alias of a statement, as ``hesscond statements`` lists them, or a `Statement`.
    trials
        Number of cases; by default that of the statement.
    seed
        Trial k depends on the seed and k only.
    counterexamples
        Whether counterexamples are searched for.
    on_trial
        Called with the number of trials done.

    Raises
    ------
    ConfigError
        No such statement; fewer than one trial.

    Examples
    --------
    >>> verdict = verify("van-der-sluis", trials=5)
    >>> verdict.status, verdict.violations
    ('holds', 0)
    """
    checked = statement(id) if isinstance(id, str) else id
    count = checked.trials if trials is None else trials
    if not isinstance(count, SupportsIndex) or count < 1:
        raise ConfigError(f"trials must be a whole number from 1 on, not {count!r}")
    start = time.perf_counter()
    tallies = tuple(Tally(claim) for claim in checked.claims)
    for number in range(count):
        for tally, outcome in zip(tallies, one_trial(checked, seed, number), strict=True):
            tally.add(outcome, number)
        if on_trial is not None:
            on_trial(number + 1)
    refutations = tuple(checked.counterexamples(seed)) if counterexamples else ()
    seconds = time.perf_counter() - start
    return Verdict(checked.id, count, seed, tallies, refutations, tuple(checked.aliases), seconds)


def one_trial(checked: Statement, seed: int, number: int) -> Sequence[Outcome]:
    """The outcomes of trial ``number``."""
    return checked_outcomes(checked, "trial", checked.trial(np.random.default_rng([seed, number])))


def checked_outcomes(checked: Statement, hook: str, returned: Sequence[Outcome]) -> Sequence[Outcome]:
    """Outcomes that a method of a statement returned; a ConfigError unless there is one for each claim."""
    names = [claim.name for claim in checked.claims]
    listed = isinstance(returned, (list, tuple))
    if not listed or len(returned) != len(names) or not all(isinstance(one, Outcome) for one in returned):
        got = f"{len(returned)} in {returned}" if listed else repr(returned)
        raise ConfigError(
            f"{hook} of statement {checked.id!r} must return a list with one Outcome for each claim "
            f"({', '.join(names)}), not {textwrap.shorten(got, 120)}"
        )
    return returned
