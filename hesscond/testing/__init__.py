"""Assertions about condition numbers, for tests: plain functions that raise an ``AssertionError``.

An assertion passes only if the bounds of κ decide for it and fails only if they decide against it. A policy decides on
what is unresolved: the argument ``unresolved``, pytest's ``@pytest.mark.hesscond(unresolved=…)``,
``--hesscond-unresolved`` or the ini option ``hesscond_unresolved``, in this order. pytest finds the plugin by itself.
"""

from typing import TYPE_CHECKING

from hesscond.lazy import attach

if TYPE_CHECKING:
    from hesscond.testing.assertions import (
        Assertion as Assertion,
        ConditionNumberError as ConditionNumberError,
        Finding as Finding,
        UnresolvedError as UnresolvedError,
        UnresolvedWarning as UnresolvedWarning,
        assert_condition_number as assert_condition_number,
        assert_no_regression as assert_no_regression,
        assert_preconditioner_improves as assert_preconditioner_improves,
    )
else:
    __getattr__, __dir__, __all__ = attach(__name__)
