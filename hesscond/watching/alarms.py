"""Alarms of a watch: events at a block between two probes, decided by bounds, with the evidence."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from hesscond.errors import ConfigError
from hesscond.runs import place_name

Row = Mapping[str, Any]

#: From this rate on, gradient descent on a quadratic grows (Cohen et al., *Gradient Descent on Neural Networks
#: Typically Occurs at the Edge of Stability*, ICLR 2021).
STABLE = 2.0


@dataclass(frozen=True)
class Alarm:
    """Event that a watch was asked to report, with the evidence.

    Attributes
    ----------
    event
        One of `EVENTS`.
    step
        Optimizer steps taken.
    block
        The layer, or layer.unit.
    sentence
        What happened, with the numbers that show it.
    before, now
        Rows of the probe with which it is compared, if there is one, and of the present probe.
    """

    event: str
    step: int
    block: str
    sentence: str
    before: Row | None
    now: Row


@dataclass
class Rule:
    """Rule by which a watch looks for one event."""

    event: str
    callback: Callable[[Alarm], object] | None
    factor: float
    probes: int
    memory: dict[str, Any] = field(default_factory=dict)

    def look(self, step: int, row: Row) -> Alarm | None:
        """Alarm that the row of a block raises, or None."""
        block = place_name(row["layer"], row["unit"])
        found = EVENTS[self.event](self, block, row)
        return None if found is None else Alarm(self.event, step, block, f"{block}: {found[0]}", found[1], row)


def grown(rule: Rule, block: str, row: Row, name: str, lower: float, upper: float) -> tuple[str, Row | None] | None:
    """Sentence and earlier row if the lower bound exceeds ``factor`` times the smallest upper bound before; or None."""
    before = rule.memory.get(block)
    if before is not None and lower > rule.factor * before["upper"]:
        rule.memory[block] = {"upper": upper, "row": dict(row)}
        return f"{name} is at least {lower:.4g}, and was at most {before['upper']:.4g}", before["row"]
    if math.isfinite(upper) and (before is None or upper < before["upper"]):
        rule.memory[block] = {"upper": upper, "row": dict(row)}
    return None


def kappa_grew(rule: Rule, block: str, row: Row) -> tuple[str, Row | None] | None:
    """Compare the lower bound of κ with the smallest upper bound before."""
    return grown(rule, block, row, "κ", row["kappa_lower"], row["kappa_upper"])


def lambda_grew(rule: Rule, block: str, row: Row) -> tuple[str, Row | None] | None:
    """Compare the lower bound of the largest |λ| with the smallest upper bound before."""
    top, error = row["lambda_max"], row["lambda_max_error"]
    return grown(rule, block, row, "λ_max", top - error, top + error)


def rank_fell(rule: Rule, block: str, row: Row) -> tuple[str, Row | None] | None:
    """Compare a decided rank with the last decided one."""
    if not row["resolved"]:
        return None
    before, rule.memory[block] = rule.memory.get(block), dict(row)
    if before is None or row["rank"] >= before["rank"]:
        return None
    return f"the rank fell from {before['rank']} to {row['rank']} of {row['n_params']}", before


def sharp(rule: Rule, block: str, row: Row) -> tuple[str, Row | None] | None:
    """Look for λ_max·η above 2 by its lower bound in ``probes`` probes in a row; reported once until it falls."""
    lower = row.get("sharpness_times_rate_lower")
    seen = rule.memory.get(block, 0) + 1 if lower is not None and lower > STABLE else 0
    rule.memory[block] = seen
    if seen != rule.probes:
        return None
    return f"λ_max·η is at least {lower:.4g}, and was above 2 in {seen} probes in a row", None


def dead_units(rule: Rule, block: str, row: Row) -> tuple[str, Row | None] | None:
    """Look for units whose Hessian has become exactly zero on the probe batch."""
    dead = set(row.get("dead_units") or ())
    new = sorted(dead - set(rule.memory.get(block, ())))
    rule.memory[block] = sorted(dead)
    if not new:
        return None
    named = ", ".join(map(str, new[:8])) + (", …" if len(new) > 8 else "")
    return f"{len(new)} units have a Hessian that is exactly zero on the probe batch: {named}", None


#: Events that a watch can be asked to report, with the functions that look for them.
EVENTS: dict[str, Callable[[Rule, str, Row], tuple[str, Row | None] | None]] = {
    "kappa_grew": kappa_grew,
    "lambda_max_grew": lambda_grew,
    "rank_fell": rank_fell,
    "sharpness": sharp,
    "dead_units": dead_units,
}


def rule_of(event: str, callback: Callable[[Alarm], object] | None, factor: float, probes: int) -> Rule:
    """Rule with checked values."""
    if not isinstance(event, str) or event not in EVENTS:
        raise ConfigError(f"unknown event {event!r}: choose from {', '.join(EVENTS)}")
    if callback is not None and not callable(callback):
        raise ConfigError(f"the callback of {event!r} must be a function of an Alarm, not {type(callback).__name__}")
    if isinstance(factor, bool) or not isinstance(factor, (int, float)) or not 1 < factor < math.inf:
        raise ConfigError(f"factor must be a number above 1, not {factor!r}")
    if isinstance(probes, bool) or not isinstance(probes, int) or probes < 1:
        raise ConfigError(f"probes must be a positive whole number, not {probes!r}")
    return Rule(event, callback, factor, probes)
