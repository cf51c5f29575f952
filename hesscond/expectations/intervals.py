"""Interval arithmetic on arrays, rounded outwards, and the three-valued truth of comparing them.

Every operation returns intervals that contain the exact result for all values in the given ones; one that is exact in
double precision widens nothing. An end of ±inf: unbounded on that side. NaN: no value, or one that is not defined;
whatever is computed from it is NaN too, and no comparison with it is decided.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

#: Units in the last place by which numpy's logarithm and power may be off.
ULPS = 8
#: Whole exponents up to this one are multiplied out, which is exact where the product is.
MULTIPLIED_OUT = 64
#: Veltkamp's constant, 2²⁷ + 1: splits a double into two halves.
SPLITTER = 134217729.0
TINY = float(np.finfo(float).tiny)


@dataclass(frozen=True, eq=False)
class Interval:
    """Intervals [lower, upper].

    Attributes
    ----------
    lower, upper
        Arrays of one shape, float64.
    """

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
    def missing(self) -> np.ndarray:
        """Boolean mask of intervals without a value."""
        return np.isnan(self.lower) | np.isnan(self.upper)

    def __neg__(self) -> Interval:
        return Interval(-self.upper, -self.lower)

    def __add__(self, other: Interval) -> Interval:
        return Interval(rounded_sum(self.lower, other.lower)[0], rounded_sum(self.upper, other.upper)[1])

    def __sub__(self, other: Interval) -> Interval:
        return self + -other

    def __mul__(self, other: Interval) -> Interval:
        return corners(rounded_product, self, other)

    def __truediv__(self, other: Interval) -> Interval:
        found = corners(rounded_quotient, self, other)
        # a divisor that may be zero
        return found.where(~((other.lower <= 0) & (other.upper >= 0)))

    def __pow__(self, other: Interval) -> Interval:
        exponent = whole(other)
        if exponent is not None:
            return integer_power(self, exponent)
        found = corners(rounded_power, self, other)
        return found.where(np.broadcast_to(self.lower > 0, found.lower.shape))

    def __abs__(self) -> Interval:
        low = np.where(self.lower >= 0, self.lower, np.where(self.upper <= 0, -self.upper, 0.0))
        return Interval(low, np.maximum(-self.lower, self.upper)).where(~self.missing)

    def log10(self) -> Interval:
        """Logarithm to the base 10; NaN where not everything is positive."""
        with np.errstate(all="ignore"):
            return Interval(down(np.log10(self.lower)), up(np.log10(self.upper))).where(self.lower > 0)

    def sqrt(self) -> Interval:
        """Square root; NaN where something is negative."""
        with np.errstate(all="ignore"):
            found = Interval(np.maximum(down(np.sqrt(self.lower), 1), 0.0), up(np.sqrt(self.upper), 1))
        return found.where(self.lower >= 0)

    def where(self, defined: np.ndarray) -> Interval:
        """The same intervals, NaN where ``defined`` is false."""
        return Interval(np.where(defined, self.lower, np.nan), np.where(defined, self.upper, np.nan))

    def minimum(self) -> Interval:
        """The smallest of all values, which lies between the smallest lower and the smallest upper end."""
        return Interval(np.asarray(self.lower.min()), np.asarray(self.upper.min()))

    def maximum(self) -> Interval:
        """The largest of all values."""
        return Interval(np.asarray(self.lower.max()), np.asarray(self.upper.max()))

    def mean(self) -> Interval:
        """The mean of all values, by a sum without rounding errors."""
        total = Interval(np.asarray(exact_sum(self.lower)[0]), np.asarray(exact_sum(self.upper)[1]))
        return total / Interval.point(len(self))

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
    """Three-valued truths: certain, impossible, or not decided.

    Attributes
    ----------
    certain
        Mask: it holds for all values in the intervals.
    possible
        Mask: it is not ruled out for all of them.
    margin
        Margin by which it is certain, relative to the compared values; negative where it is not. Only for ranking.
    """

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
        found = np.where(size == 0, 0.0, b.lower / size - a.upper / size)
    return np.where(np.isnan(found), -np.inf, found)


def down(values: np.ndarray, ulps: int = ULPS) -> np.ndarray:
    """Values made smaller by some units in the last place."""
    with np.errstate(all="ignore"):
        for _ in range(ulps):
            values = np.nextafter(values, -np.inf)
    return values


def up(values: np.ndarray, ulps: int = ULPS) -> np.ndarray:
    """Values made larger by some units in the last place."""
    return -down(-values, ulps)


def directed(value: np.ndarray, error: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The doubles on both sides of value + error, of which only the sign of the error counts (NaN: not known)."""
    with np.errstate(all="ignore"):
        return (
            np.where(error >= 0, value, np.nextafter(value, -np.inf)),
            np.where(error <= 0, value, np.nextafter(value, np.inf)),
        )


def rounded_sum(a: np.ndarray, b: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The sum rounded down and up; the error is that of Knuth's TwoSum."""
    with np.errstate(all="ignore"):
        total = a + b
        part = total - a
        return directed(total, (a - (total - part)) + (b - part))


def product_error(a: np.ndarray, b: np.ndarray, product: np.ndarray) -> np.ndarray:
    """The product a b less its rounded value, exactly, for mantissas (Dekker's TwoProduct)."""
    high_a, high_b = SPLITTER * a, SPLITTER * b
    high_a, high_b = high_a - (high_a - a), high_b - (high_b - b)
    low_a, low_b = a - high_a, b - high_b
    return ((high_a * high_b - product) + high_a * low_b + low_a * high_b) + low_a * low_b


def scaled(mantissa: np.ndarray, exponent: np.ndarray, error: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The number mantissa 2^exponent with the error's sign, where it is in the normal range."""
    value = np.ldexp(mantissa, exponent)
    normal = (np.isfinite(value) & (np.abs(value) >= TINY)) | ((mantissa == 0) & (error == 0))
    return directed(value, np.where(normal, error, np.nan))


def rounded_product(a: np.ndarray, b: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The product rounded down and up; 0 times an unbounded end is 0."""
    with np.errstate(all="ignore"):
        (ma, ea), (mb, eb) = np.frexp(a), np.frexp(b)
        product = ma * mb
        low, high = scaled(product, ea + eb, product_error(ma, mb, product))
        zero = (a == 0) | (b == 0)
        return np.where(zero, 0.0, low), np.where(zero, 0.0, high)


def rounded_quotient(a: np.ndarray, b: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The quotient rounded down and up; an end beyond all bounds in the divisor gives 0."""
    with np.errstate(all="ignore"):
        (ma, ea), (mb, eb) = np.frexp(a), np.frexp(b)
        quotient = ma / mb
        product = quotient * mb
        remainder = (ma - product) - product_error(quotient, mb, product)
        low, high = scaled(quotient, ea - eb, remainder * np.sign(mb))
        zero = (a == 0) | np.isinf(b)
        return np.where(zero, 0.0, low), np.where(zero, 0.0, high)


def rounded_power(a: np.ndarray, b: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The power a^b rounded down and up, for a > 0."""
    with np.errstate(all="ignore"):
        value = np.power(a, b)
        return np.maximum(down(value), 0.0), up(value)


def corners(
    operation: Callable[[np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]], a: Interval, b: Interval
) -> Interval:
    """Result of an operation that is monotone in each argument, from its values at the ends."""
    found = [operation(x, y) for x in (a.lower, a.upper) for y in (b.lower, b.upper)]
    low, high = np.min([one[0] for one in found], axis=0), np.max([one[1] for one in found], axis=0)
    return Interval(low, high).where(~(a.missing | b.missing))


def whole(exponent: Interval) -> int | None:
    """The exponent, if it is one whole number that can be multiplied out."""
    if exponent.lower.ndim or exponent.lower != exponent.upper or not abs(exponent.lower) <= MULTIPLIED_OUT:
        return None
    return int(exponent.lower) if float(exponent.lower).is_integer() else None


def integer_power(base: Interval, exponent: int) -> Interval:
    """The power by repeated squaring; an even one is a power of |base|."""
    result, square, left = Interval.point(np.ones_like(base.lower)), base, abs(exponent)
    if exponent % 2 == 0:
        square = abs(base)
    while left:
        if left & 1:
            result = result * square
        left >>= 1
        if left:
            square = square * square
    return (Interval.point(1.0) / result if exponent < 0 else result).where(~base.missing)


def exact_sum(values: np.ndarray) -> tuple[float, float]:
    """The sum rounded down and up."""
    if not np.isfinite(values).all():
        total = float(np.sum(values))
        return total, total
    try:
        total = math.fsum(values)
        error = math.fsum([*values, -total])
    except OverflowError:
        return -math.inf, math.inf
    low, high = directed(np.asarray(total), np.asarray(error))
    return float(low), float(high)


def shown(lower: float, upper: float) -> str:
    """Text of an interval: its ends rounded outwards to five digits, one number if they agree then.

    Examples
    --------
    >>> shown(188.31, 188.31), shown(188.30999, 188.31001), shown(1.5, 2.25), shown(1e9, math.inf), shown(math.nan, 0)
    ('188.31', '188.31', '[1.5, 2.25]', '≥ 1e+09', 'no value')
    """
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
