"""Schedules: the optimizer steps of a training after which something is measured."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from hesscond.errors import ConfigError

#: Function that says whether a measurement is due after a number of optimizer steps, counted from 1.
Schedule = Callable[[int], bool]


def linear(every: int) -> Schedule:
    """Schedule with a constant number of steps between measurements.

    Parameters
    ----------
    every
        Steps from one measurement to the next.

    Examples
    --------
    >>> [step for step in range(1, 10) if linear(3)(step)]
    [3, 6, 9]
    """
    positive("every", every)
    return lambda step: step % every == 0


def logarithmic(per_decade: int = 10, first: int = 1) -> Schedule:
    """Schedule with measurements after ``first`` · 10^(k / ``per_decade``) steps, k = 0, 1, …, rounded.

    Parameters
    ----------
    per_decade
        Measurements while the number of steps grows tenfold; fewer where several round to the same step.
    first
        Step of the first measurement.

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
    """Schedule with evenly spaced measurements in each epoch, the last at its end.

    Parameters
    ----------
    times
        Measurements in each epoch.
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
    """Raise a ConfigError if a value is no positive whole number."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigError(f"{name} must be a positive whole number, not {value!r}")


def schedule_of(every: int | Schedule) -> Schedule:
    """Return a schedule as it is, or the schedule of a number of steps."""
    if callable(every):
        return every
    if isinstance(every, bool) or not isinstance(every, int) or every < 1:
        raise ConfigError(
            "every must be a positive whole number of steps or a schedule, as "
            f"hesscond.watching.schedules.logarithmic(), not {every!r}"
        )
    return linear(every)
