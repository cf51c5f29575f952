"""Schedules: after which optimizer steps of a training something is measured."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from hesscond.errors import ConfigError

#: Whether something is due after so many optimizer steps, counted from 1.
Schedule = Callable[[int], bool]


def linear(every: int) -> Schedule:
    """After every so many steps.

    Parameters
    ----------
    every
        Steps from one time to the next.

    Examples
    --------
    >>> [step for step in range(1, 10) if linear(3)(step)]
    [3, 6, 9]
    """
    positive("every", every)
    return lambda step: step % every == 0


def logarithmic(per_decade: int = 10, first: int = 1) -> Schedule:
    """Ever more rarely: after ``first`` · 10^(k / ``per_decade``) steps, k = 0, 1, …, rounded.

    Parameters
    ----------
    per_decade
        Times while the number of steps grows tenfold; fewer where several round to the same step.
    first
        The first of them.

    Examples
    --------
    >>> [step for step in range(1, 101) if logarithmic(3)(step)]
    [1, 2, 5, 10, 22, 46, 100]
    """
    positive("per_decade", per_decade)
    positive("first", first)

    def due(step: int) -> bool:
        if step < first:
            return False
        nearest = round(per_decade * math.log10(step / first))
        return any(round(first * 10 ** (k / per_decade)) == step for k in (nearest - 1, nearest, nearest + 1))

    return due


def per_epoch(times: int, steps: int) -> Schedule:
    """Some times an epoch, evenly; the last time is the end of the epoch.

    Parameters
    ----------
    times
        How many times.
    steps
        Optimizer steps of an epoch: ``len(loader)``, over the number of batches that one step accumulates.

    Examples
    --------
    >>> [step for step in range(1, 21) if per_epoch(2, steps=10)(step)]
    [5, 10, 15, 20]
    """
    positive("times", times)
    positive("steps", steps)
    if times > steps:
        raise ConfigError(f"{times} times in an epoch of {steps} steps: it has fewer, so give at most times={steps}")
    return lambda step: step * times // steps > (step - 1) * times // steps


def positive(name: str, value: Any) -> None:
    """Raise a ConfigError for what is no positive whole number."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigError(f"{name} must be a positive whole number, not {value!r}")


def schedule_of(every: int | Schedule) -> Schedule:
    """The schedule that is meant by a number of steps or by a schedule."""
    if callable(every):
        return every
    if isinstance(every, bool) or not isinstance(every, int) or every < 1:
        raise ConfigError(
            "every must be a positive whole number of steps or a schedule, as hesscond.schedules.logarithmic(), not "
            f"{every!r}"
        )
    return linear(every)
