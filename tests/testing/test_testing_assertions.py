"""Assertions against condition numbers from numpy, and the decisions they make from bounds."""

import itertools
import math
import unittest
import warnings

import pytest
import torch
from hypothesis import given, settings, strategies as st

from hesscond import probe
from hesscond.errors import ConfigError
from hesscond.testing import (
    Assertion,
    ConditionNumberError,
    Finding,
    UnresolvedError,
    UnresolvedWarning,
    assert_condition_number,
    assert_preconditioner_improves,
)
from hesscond.testing.assertions import conclude
from tests.testing.testing_cases import least_squares, with_a_dead_unit

EPS = 1e-9


def test_a_limit_beside_the_truth():
    *case, truth = least_squares([1.0, 30.0])
    passed = assert_condition_number(*case, below=truth * (1 + EPS))
    assert passed.outcome == "passed"
    assert "the bounds decide for it: 1 of 1 units hold" in str(passed)
    assert assert_condition_number(*case, above=truth * (1 - EPS), below=2 * truth).outcome == "passed"
    for limit in (
        {"below": truth * (1 - EPS)},
        {"above": truth * (1 + EPS)},
        {"above": truth / 2, "below": truth / 1.5},
    ):
        with pytest.raises(ConditionNumberError, match="the bounds decide against it"):
            assert_condition_number(*case, **limit)


def test_a_limit_inside_the_bounds_is_not_decided():
    *case, _ = least_squares([1.0, 30.0])
    (found,) = assert_condition_number(*case, below=1e9).findings
    assert float(found.measured.split()[2]) > 1
    value = probe(*case)["model"].kappa[0]
    middle = (value.lower + value.upper) / 2
    assert value.lower < middle < value.upper
    with pytest.raises(UnresolvedError, match="the bounds do not decide"):
        assert_condition_number(*case, below=middle)
    for policy, outcome in (("pass", "unresolved"), ("warn", "unresolved")):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            assert assert_condition_number(*case, above=middle, unresolved=policy).outcome == outcome
        assert [one.category for one in caught] == [UnresolvedWarning] * (policy == "warn")
    with pytest.raises(unittest.SkipTest):
        assert_condition_number(*case, below=middle, unresolved="skip")


def test_an_improvement_beside_the_truth():
    *case, truth = least_squares([1.0, 1000.0, 0.01])
    inputs = case[2][0]
    extended = torch.hstack([torch.ones(len(inputs), 1).double(), inputs])
    P = torch.diag(1 / extended.norm(dim=0))
    singular = torch.linalg.svdvals(extended @ P)
    gain = truth / float((singular[0] / singular[-1]) ** 2)
    assert gain > 1e6
    assert assert_preconditioner_improves(*case, P, factor=gain * (1 - 1e-6)).outcome == "passed"
    with pytest.raises(ConditionNumberError, match="κ\\(H\\)/κ\\(PᵀHP\\)"):
        assert_preconditioner_improves(*case, P, factor=gain * (1 + 1e-6))
    assert assert_preconditioner_improves(*case, "bnp", factor=1e6).outcome == "passed"
    # the identity gains nothing, and its bounds lie on both sides of 1
    with pytest.raises(UnresolvedError):
        assert_preconditioner_improves(*case, torch.eye(4).double())


def test_a_zero_hessian_decides_nothing_whatever_the_limit():
    case = with_a_dead_unit()
    for limit in ({"below": 1e300}, {"above": 1e-300}):
        with pytest.raises(UnresolvedError, match="no κ"):
            assert_condition_number(*case, layer="0", **limit)
    assert assert_condition_number(*case, layer="0", unit=0, below=1e6).outcome == "passed"
    assert assert_condition_number(*case, layer="0", below=1e6, share=0.5).outcome == "passed"


@pytest.mark.parametrize("level", ["layer", "network"])
def test_other_levels(level):
    *case, truth = least_squares([1.0, 30.0])
    assert assert_condition_number(*case, below=truth * (1 + 1e-6), above=truth * (1 - 1e-6), level=level)


@settings(deadline=None, max_examples=25)
@given(st.lists(st.sampled_from([True, False, None]), min_size=1, max_size=6), st.sampled_from([0.2, 0.5, 2 / 3, 1.0]))
def test_a_share_is_decided_if_all_ways_to_decide_the_rest_agree(holds, share):
    findings = tuple(Finding(one, 1.0, "", "") for one in holds)
    found = conclude_or_say(Assertion("x", findings, share))
    open_ones = holds.count(None)
    answers = {
        sum(one is True for one in holds) + sum(rest) >= share * len(holds) - 1e-9
        for rest in itertools.product([True, False], repeat=open_ones)
    }
    assert found == {True: "passed", False: "failed"}.get(answers.pop() if len(answers) == 1 else None, "unresolved")


def conclude_or_say(assertion):
    try:
        return conclude(assertion, "pass").outcome
    except UnresolvedError:
        return "unresolved"
    except ConditionNumberError:
        return "failed"


@pytest.mark.parametrize(
    ("call", "complaint"),
    [
        (lambda case: assert_condition_number(*case), "give a limit"),
        (lambda case: assert_condition_number(*case, below=math.inf), "positive finite"),
        (lambda case: assert_condition_number(*case, below="1e4"), "a limit of κ must be a positive finite number"),
        (lambda case: assert_condition_number(*case, below=3, share=0), "share must lie"),
        (lambda case: assert_condition_number(*case, below=3, share="half"), "share must lie"),
        (lambda case: assert_condition_number(*case, below=3, layer="fc9"), "no layer 'fc9'"),
        (lambda case: assert_condition_number(*case, below=3, unresolved="maybe"), "fail, warn, skip, pass"),
        (lambda case: assert_condition_number(*case[:2], iter([case[2]]), below=3), "read only once"),
        (lambda case: assert_preconditioner_improves(*case, "bnpp"), "bnpp"),
        (lambda case: assert_preconditioner_improves(*case, None), "say which preconditioner"),
        (lambda case: assert_preconditioner_improves(*case, "bnp", factor=-1), "factor must be"),
        (lambda case: assert_preconditioner_improves(*case, torch.eye(9)), "are for 9 parameters of a unit, which has"),
    ],
)
def test_bad_use_is_one_sentence_and_no_failed_assertion(call, complaint):
    *case, _ = least_squares([1.0, 2.0])
    with pytest.raises(ConfigError, match=complaint) as caught:
        call(case)
    assert "\n" not in str(caught.value)
