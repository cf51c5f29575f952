"""Interval arithmetic on arrays, rounded outwards, and the three-valued truth of comparing them.

Every operation returns intervals that contain the exact result for all values in the given ones; one that is exact in
double precision widens nothing. An end of ±inf: unbounded on that side. NaN: no value, or one that is not defined;
whatever is computed from it is NaN too, and no comparison with it is decided.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np


@dataclass(frozen=True, eq=False)
class Interval:
    """Intervals [lower, upper], two float64 arrays of one shape."""

    lower: np.ndarray
    upper: np.ndarray

    @classmethod
    def point(cls, value: object) -> Interval:
        """Intervals of zero width at the given numbers."""
        array = np.asarray(value, dtype=float)
        return cls(array, array)

    @classmethod
    def between(cls, lower: object, upper: object) -> Interval:
        """Intervals from arrays of ends; NaN where the ends are not in order."""
        low, high = np.asarray(lower, dtype=float), np.asarray(upper, dtype=float)
        right = low <= high
        return cls(np.where(right, low, np.nan), np.where(right, high, np.nan))

    def __len__(self) -> int:
        return len(self.lower)

    def take(self, where: Any) -> Interval:
        """Intervals at an index array or mask."""
        return Interval(self.lower[where], self.upper[where])

    @property
    def ends(self) -> list[np.ndarray]:
        """Lower and upper ends, once where they are the same numbers."""
        return [self.lower] if self.lower is self.upper else [self.lower, self.upper]

    @property
    def missing(self) -> np.ndarray:
        """Boolean mask of intervals without a value."""
        return np.isnan(self.lower) | np.isnan(self.upper)

    def __neg__(self) -> Interval:
        return Interval(-self.upper, -self.lower)

    def __add__(self, other: Interval) -> Interval:
        return Interval(
            rounded(operator.add, self.lower, other.lower)[0], rounded(operator.add, self.upper, other.upper)[1]
        )

    def __sub__(self, other: Interval) -> Interval:
        return self + -other

    def __mul__(self, other: Interval) -> Interval:
        return corners(operator.mul, self, other)

    def __truediv__(self, other: Interval) -> Interval:
        quotient = corners(operator.truediv, self, other)
        # a divisor that may be zero
        return quotient.where(~((other.lower <= 0) & (other.upper >= 0)))

    def where(self, defined: np.ndarray) -> Interval:
        """The same intervals, NaN where ``defined`` is false."""
        return Interval(np.where(defined, self.lower, np.nan), np.where(defined, self.upper, np.nan))

    def min(self) -> Interval:
        """The smallest of all values, which lies between the smallest lower and the smallest upper end."""
        return Interval(np.asarray(self.lower.min()), np.asarray(self.upper.min()))

    def max(self) -> Interval:
        """The largest of all values."""
        return Interval(np.asarray(self.lower.max()), np.asarray(self.upper.max()))

    def mean(self) -> Interval:
        """The mean of all values."""
        return Interval(mean_of(self.lower)[0], mean_of(self.upper)[1])

    def quantile(self, q: float) -> Interval:
        """A quantile of all values, interpolated linearly between neighbours; it is monotone in every value."""
        if self.missing.any():
            return Interval.point(np.nan)
        position = (len(self) - 1) * q
        below = math.floor(position)
        share = position - below

        def at(values: np.ndarray) -> Interval:
            ordered = np.sort(values)
            if share == 0 or ordered[below] == ordered[below + 1]:
                return Interval.point(ordered[below])
            low, high = Interval.point(ordered[below]), Interval.point(ordered[below + 1])
            return low * (Interval.point(1.0) - Interval.point(share)) + high * Interval.point(share)

        return Interval(at(self.lower).lower, at(self.upper).upper)


@dataclass(frozen=True, eq=False)
class Truth:
    """Three-valued truths, as masks: certain, or possible, for values in the intervals; the margin ranks them."""

    certain: np.ndarray
    possible: np.ndarray
    margin: np.ndarray

    def __invert__(self) -> Truth:
        return Truth(~self.possible, ~self.certain, -self.margin)

    def __and__(self, other: Truth) -> Truth:
        margin = np.minimum(self.margin, other.margin)
        return Truth(self.certain & other.certain, self.possible & other.possible, margin)

    def __or__(self, other: Truth) -> Truth:
        margin = np.maximum(self.margin, other.margin)
        return Truth(self.certain | other.certain, self.possible | other.possible, margin)

    def take(self, where: Any) -> Truth:
        """Truths at an index array or mask."""
        return Truth(self.certain[where], self.possible[where], self.margin[where])

    def all(self) -> Truth:
        """Whether it holds everywhere."""
        return Truth(*map(np.asarray, (self.certain.all(), self.possible.all(), self.margin.min())))

    def any(self) -> Truth:
        """Whether it holds somewhere."""
        return Truth(*map(np.asarray, (self.certain.any(), self.possible.any(), self.margin.max())))

    def share(self) -> Interval:
        """The share of places where it holds."""
        sure, open_too = np.count_nonzero(self.certain), np.count_nonzero(self.possible)
        return Interval.between(sure, open_too) / Interval.point(self.certain.size)


def less(a: Interval, b: Interval) -> Truth:
    """Whether a < b."""
    return Truth(a.upper < b.lower, ~(a.lower >= b.upper), slack(a, b))


def less_equal(a: Interval, b: Interval) -> Truth:
    """Whether a ≤ b."""
    return Truth(a.upper <= b.lower, ~(a.lower > b.upper), slack(a, b))


def equal(a: Interval, b: Interval) -> Truth:
    """Whether a = b: certain for numbers without bounds only."""
    return less_equal(a, b) & less_equal(b, a)


#: Comparisons by their signs in an expression.
COMPARISONS: dict[str, Callable[[Interval, Interval], Truth]] = {
    "<": less,
    "<=": less_equal,
    ">": lambda a, b: less(b, a),
    ">=": lambda a, b: less_equal(b, a),
    "==": equal,
    "!=": lambda a, b: ~equal(a, b),
}


def slack(a: Interval, b: Interval) -> np.ndarray:
    """Distance by which b certainly lies above a, relative to the larger; −inf where nothing is known."""
    with np.errstate(all="ignore"):
        size = np.maximum(np.abs(a.upper), np.abs(b.lower))
        distance = np.where(size == 0, 0.0, b.lower / size - a.upper / size)
    return np.where(np.isnan(distance), -np.inf, distance)


def directed(value: Any, error: Any) -> tuple[np.ndarray, np.ndarray]:
    """The doubles on both sides of value + error, of which only the sign of the error counts (NaN: not known)."""
    with np.errstate(all="ignore"):
        return (
            np.where(error >= 0, value, np.nextafter(value, -np.inf)),
            np.where(error <= 0, value, np.nextafter(value, np.inf)),
        )


def rounded(operation: Callable[[Any, Any], Any], a: np.ndarray, b: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The result of +, * or / rounded down and up: one number where it is exact; 0 times an unbounded end is 0."""
    with np.errstate(all="ignore"):
        value = operation(a, b)
    several = (array.ravel().tolist() for array in np.broadcast_arrays(value, a, b))
    error = np.reshape([sign_of_error(operation, *numbers) for numbers in zip(*several, strict=True)], value.shape)
    if operation is not operator.add:
        zero = (a == 0) | ((b == 0) if operation is operator.mul else np.isinf(b))
        value, error = np.where(zero, 0.0, value), np.where(zero, 0.0, error)
    return directed(value, error)


def sign_of_error(operation: Callable[[Any, Any], Any], value: float, a: float, b: float) -> float:
    """Sign of the exact result less its rounded value; NaN where one of them is not finite."""
    if not (math.isfinite(value) and math.isfinite(a) and math.isfinite(b)):
        return math.nan
    # in whole numbers, which takes a fifth of the time of Fractions
    (p, q), (r, s), (v, w) = a.as_integer_ratio(), b.as_integer_ratio(), value.as_integer_ratio()
    above, below = {operator.add: (p * s + r * q, q * s), operator.mul: (p * r, q * s)}.get(operation, (p * s, q * r))
    difference = (above * w - v * below) * (1 if below > 0 else -1)
    return float((difference > 0) - (difference < 0))


def mean_of(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The mean of numbers rounded down and up."""
    if not np.isfinite(values).all():
        with np.errstate(all="ignore"):
            return directed(np.mean(values), 0.0)
    exact = sum(map(Fraction, values), Fraction(0)) / len(values)
    return directed(float(exact), float((exact > float(exact)) - (exact < float(exact))))


def corners(operation: Callable[[Any, Any], Any], a: Interval, b: Interval) -> Interval:
    """Result of an operation that is monotone in each argument, from its values at the ends."""
    bounds = [rounded(operation, x, y) for x in a.ends for y in b.ends]
    low, high = np.min([pair[0] for pair in bounds], axis=0), np.max([pair[1] for pair in bounds], axis=0)
    return Interval(low, high).where(~(a.missing | b.missing))


def shown(lower: float, upper: float) -> str:
    """Text of an interval: its ends rounded outwards to five digits, one number if they agree then."""
    if math.isnan(lower) or math.isnan(upper):
        return "no value"
    if lower == upper:
        return f"{lower:.5g}"
    if upper == math.inf:
        return "anything" if lower == -math.inf else f"≥ {outwards(lower, -math.inf)}"
    if lower == -math.inf:
        return f"≤ {outwards(upper, math.inf)}"
    if upper - lower <= 1e-5 * max(abs(lower), abs(upper)):
        return f"{lower:.5g}"
    return f"[{outwards(lower, -math.inf)}, {outwards(upper, math.inf)}]"


def outwards(value: float, towards: float) -> str:
    """A number to five digits, rounded towards −inf or inf."""
    text = f"{value:.5g}"
    if (float(text) - value) * towards < 0:
        exponent = math.floor(math.log10(abs(value)))
        text = f"{float(text) + math.copysign(10.0 ** (exponent - 4), towards):.5g}"
    return text
