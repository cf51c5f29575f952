"""Expectations of runs: expressions over the columns of their logs, decided by the bounds of κ.

`parser` reads them (the grammar is there), `syntax` says what they may name, `intervals` computes with bounds, `rows`
matches what is compared, `evaluation` and `outcomes` decide. Nothing in an expression is ever executed as code.
"""

from hesscond.expectations.outcomes import Expectation, Outcome, outcomes
from hesscond.expectations.parser import ExpressionError

__all__ = ["Expectation", "ExpressionError", "Outcome", "outcomes"]
