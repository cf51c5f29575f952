"""Interval arithmetic against exact fractions."""

import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import assume, given, settings, strategies as st

from hesscond.expectations.intervals import COMPARISONS, Interval, Truth, shown

NUMBERS = st.floats(allow_nan=False, allow_infinity=False)
#: Of all sizes, and such that collide often.
ENDS = st.one_of(NUMBERS, st.integers(-4, 4).map(float), st.floats(0.1, 10.0))
OPERATIONS = {
    "+": (lambda a, b: a + b, lambda a, b: a + b),
    "-": (lambda a, b: a - b, lambda a, b: a - b),
    "*": (lambda a, b: a * b, lambda a, b: a * b),
    "/": (lambda a, b: a / b, lambda a, b: a / b),
}


@st.composite
def intervals(draw, unbounded=True):
    """An interval and points in it, exact fractions."""
    low, high = sorted([draw(ENDS), draw(ENDS)])
    inside = [Fraction(low), Fraction(high), (Fraction(low) + Fraction(high)) / 2]
    if unbounded and draw(st.integers(0, 9)) == 0:
        inside.append(Fraction(high) * 2 + 1 if high >= 0 else Fraction(high) / 2)
        high = math.inf
    return Interval.between(low, high), [point for point in inside if point >= Fraction(low)]


def contains(found, exact):
    """Whether an exact number lies within; what is not defined contains everything."""
    low, high = float(found.lower), float(found.upper)
    if math.isnan(low):
        return True
    return (low == -math.inf or Fraction(low) <= exact) and (high == math.inf or exact <= Fraction(high))


@pytest.mark.parametrize("sign", OPERATIONS)
@settings(deadline=None, max_examples=25)
@given(a=intervals(), b=intervals())
def test_the_exact_result_is_inside(sign, a, b):
    computed, exact = OPERATIONS[sign]
    found = computed(a[0], b[0])
    for x in a[1]:
        for y in b[1]:
            if sign != "/" or y != 0:
                assert contains(found, exact(x, y))


@pytest.mark.parametrize("sign", OPERATIONS)
@settings(deadline=None, max_examples=25)
@given(x=NUMBERS, y=NUMBERS)
def test_numbers_are_rounded_to_both_sides_or_not_at_all(sign, x, y):
    assume(sign != "/" or y != 0)
    computed, exact = OPERATIONS[sign]
    found, truth = computed(Interval.point(x), Interval.point(y)), exact(Fraction(x), Fraction(y))
    assume(Fraction(np.finfo(float).tiny) <= abs(truth) <= Fraction(np.finfo(float).max))
    low, high = float(found.lower), float(found.upper)
    if Fraction(float(truth)) == truth:
        assert low == high == float(truth)
    else:
        assert high == math.nextafter(low, math.inf)


@settings(deadline=None, max_examples=25)
@given(st.lists(intervals(unbounded=False), min_size=1, max_size=6), st.floats(0, 1))
def test_functions_of_all_rows(rows, q):
    together = Interval(*(np.array([getattr(one, end) for one, _ in rows], float) for end in ("lower", "upper")))
    for choice in (0, 1, 2):
        values = sorted(points[choice] for _, points in rows)
        n = len(values)
        position = (n - 1) * q
        below = math.floor(position)
        above = min(below + 1, n - 1)
        between = values[below] + (values[above] - values[below]) * (Fraction(position) - below)
        assert contains(together.quantile(q), between)
        assert contains(together.quantile(0.5), (values[(n - 1) // 2] + values[n // 2]) / 2)
        assert contains(together.mean(), sum(values) / n)
        assert contains(together.min(), values[0])
        assert contains(together.max(), values[-1])


@pytest.mark.parametrize("sign", COMPARISONS)
@settings(deadline=None, max_examples=25)
@given(a=intervals(), b=intervals())
def test_comparisons_are_decided_only_if_all_values_agree(sign, a, b):
    exact = {
        "<": lambda x, y: x < y, "<=": lambda x, y: x <= y, ">": lambda x, y: x > y,
        ">=": lambda x, y: x >= y, "==": lambda x, y: x == y, "!=": lambda x, y: x != y,
    }[sign]  # fmt: skip
    found = COMPARISONS[sign](a[0], b[0])
    seen = {exact(x, y) for x in a[1] for y in b[1]}
    if found.certain:
        assert seen == {True}
    elif not found.possible:
        assert seen == {False}
    else:
        # the ends are among the points, so that an open comparison shows both answers; but for one common point
        assert len(seen) == 2 or math.inf in (a[0].upper, b[0].upper) or sign in ("==", "!=")


def test_what_has_no_value_decides_nothing():
    nothing, one = Interval.point(math.nan), Interval.point(1.0)
    for found in (nothing + one, nothing * Interval.point(0.0), one / Interval.between(-1.0, 1.0),
                  one / Interval.point(0.0), Interval.between(2.0, 1.0)):  # fmt: skip
        assert found.missing
        for compare in COMPARISONS.values():
            truth = compare(found, one)
            assert truth.possible
            assert not truth.certain


TRUTHS = {True: (True, True), False: (False, False), None: (False, True)}


def truth(value):
    return Truth(*(np.array(x) for x in TRUTHS[value]), np.array(0.0))


@pytest.mark.parametrize("p", TRUTHS)
@pytest.mark.parametrize("q", TRUTHS)
def test_the_logic_is_kleenes(p, q):
    order = {False: 0, None: 1, True: 2}
    for found, expected in (
        (truth(p) & truth(q), min(p, q, key=order.get)),
        (truth(p) | truth(q), max(p, q, key=order.get)),
        (~truth(p), {True: False, False: True, None: None}[p]),
    ):
        assert (bool(found.certain), bool(found.possible)) == TRUTHS[expected]


@settings(deadline=None, max_examples=25)
@given(st.floats(-1e12, 1e12), st.floats(0, 1e12))
def test_a_printed_interval_contains_the_true_one(low, width):
    high = low + width
    text = shown(low, high)
    if text.startswith("["):
        a, b = map(float, text[1:-1].split(", "))
        assert a <= low <= high <= b
        assert b - a <= (high - low) + 4e-4 * max(abs(low), abs(high))
    else:
        assert float(text) == pytest.approx(low, rel=6e-5, abs=1e-300)
        assert float(text) == pytest.approx(high, rel=6e-5, abs=1e-300)
