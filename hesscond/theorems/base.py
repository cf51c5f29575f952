"""What a published statement is, what one check of it says, and what all of them together do."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Literal

import numpy as np

from hesscond.errors import ConfigError

Status = Literal["holds", "violated", "not-applicable", "unresolved"]


@dataclass(frozen=True)
class Claim:
    """One thing that a statement says.

    Attributes
    ----------
    name
        Short, for tables.
    text
        What is claimed, as a formula.
    true
        Whether it is known to hold; one that is known to be false is expected to be violated.
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


def decided(lower: float, upper: float, allowed: float = 1.0) -> Outcome:
    """The outcome for a quantity known to lie in [lower, upper] that is claimed to be at most ``allowed``."""
    if math.isnan(lower) or math.isnan(upper):
        return Outcome("unresolved", reason="a condition number is unresolved")
    if upper <= allowed:
        return Outcome("holds", upper / allowed)
    if lower > allowed:
        return Outcome("violated", lower / allowed)
    return Outcome("unresolved", lower / allowed, "the bounds lie on both sides")


@dataclass(frozen=True)
class Counterexample:
    """A case in which a claim is false, certified in exact arithmetic.

    Attributes
    ----------
    claim
        Its name.
    matrix
        What can be typed in: nested lists of integers.
    text
        What is compared, with certified bounds.
    factor
        A certified lower bound of how far the claim is exceeded.
    """

    claim: str
    matrix: list[list[int]]
    text: str
    factor: float


@dataclass(frozen=True)
class Extreme:
    """The worst case that a search found.

    Attributes
    ----------
    claim
        Its name.
    factor
        A certified lower bound of how far it is exceeded there.
    ceiling
        What the factor certainly cannot exceed.
    matrix
        Where.
    """

    claim: str
    factor: float
    ceiling: float
    matrix: np.ndarray


@dataclass
class Tally:
    """What the trials of one claim came to."""

    claim: Claim
    holds: int = 0
    violated: int = 0
    not_applicable: int = 0
    unresolved: int = 0
    worst: float = -math.inf
    first_violation: int | None = None
    reasons: dict[str, int] = field(default_factory=dict)
    used: list[float] = field(default_factory=list)

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
        """Violated if it ever was; else holds if it ever did; else what there was."""
        if self.violated:
            return "violated"
        if self.holds:
            return "holds"
        return "unresolved" if self.unresolved else "not-applicable"

    @property
    def as_expected(self) -> bool:
        """Whether a true claim was never violated; a false one may or may not be."""
        return not (self.claim.true and self.violated)


@dataclass(frozen=True)
class Verdict:
    """What was found of a statement.

    Attributes
    ----------
    id
        Of the statement.
    status
        Of what is published: violated if one claim of it is.
    expected
        ``"holds"`` if all that is published is known to be true, else ``"violated"``.
    trials, seed
        How many were made, from which seed.
    tallies
        Claim by claim.
    counterexamples
        Of the false claims, certified, if they were asked for.
    seconds
        It took.
    """

    id: str
    status: Status
    expected: Status
    trials: int
    seed: int
    tallies: tuple[Tally, ...]
    counterexamples: tuple[Counterexample, ...] = ()
    seconds: float = 0.0

    @property
    def ok(self) -> bool:
        """Whether no claim that is known to hold was violated."""
        return all(tally.as_expected for tally in self.tallies)

    @property
    def violations(self) -> int:
        """In all claims that are published."""
        return sum(tally.violated for tally in self.tallies if tally.claim.published)

    @property
    def worst(self) -> float:
        """The most of what is allowed that was used, in all claims that are published; NaN if none says."""
        found = [tally.worst for tally in self.tallies if tally.claim.published and tally.worst > -math.inf]
        return max(found, default=math.nan)


class Statement(ABC):
    """A published statement, and how it is checked.

    A new one is a subclass in a file of its paper under ``hesscond/theorems`` with the `register` decorator, and one
    line in ``hesscond/theorems/__init__.py``.
    """

    #: As in THEORY and on the command line.
    id: ClassVar[str]
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

    def worst(self, size: int, rng: np.random.Generator) -> Extreme | None:
        """The largest factor by which a false claim is exceeded that ascent finds at a size; None: there is no such."""
        return None


_REGISTRY: dict[str, type[Statement]] = {}


def register(statement: type[Statement]) -> type[Statement]:
    """Make a statement known by its id (a class decorator).

    Raises
    ------
    ConfigError
        The id is taken.
    """
    if statement.id in _REGISTRY:
        raise ConfigError(f"a statement {statement.id!r} is registered already")
    _REGISTRY[statement.id] = statement
    return statement


def statement(id: str) -> Statement:
    """The statement of an id.

    Raises
    ------
    ConfigError
        There is none.
    """
    if id not in _REGISTRY:
        raise ConfigError(f"unknown statement {id!r}: choose from {', '.join(sorted(_REGISTRY))}")
    return _REGISTRY[id]()


def statements() -> Iterator[Statement]:
    """All statements, by id."""
    return iter([_REGISTRY[id]() for id in sorted(_REGISTRY)])
