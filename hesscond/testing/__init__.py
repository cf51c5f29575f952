"""Assertions about condition numbers, for tests: plain functions that raise an ``AssertionError``.

An assertion passes only if the bounds of κ decide for it and fails only if they decide against it. A policy decides on
what is unresolved: the argument ``unresolved``, pytest's ``@pytest.mark.hesscond(unresolved=…)``,
``--hesscond-unresolved`` or the ini option ``hesscond_unresolved``, in this order. pytest finds the plugin by itself.
"""

from hesscond.testing.assertions import (
    Assertion,
    BaselineError,
    ConditionNumberError,
    Finding,
    UnresolvedError,
    UnresolvedWarning,
)
from hesscond.testing.baselines import assert_no_regression
from hesscond.testing.conditions import assert_condition_number, assert_preconditioner_improves
from hesscond.testing.statements import assert_statement

__all__ = [
    "Assertion",
    "BaselineError",
    "ConditionNumberError",
    "Finding",
    "UnresolvedError",
    "UnresolvedWarning",
    "assert_condition_number",
    "assert_no_regression",
    "assert_preconditioner_improves",
    "assert_statement",
]
