"""Expectations of runs: expressions over the columns of their logs, decided by the bounds of κ.

`parser` reads them and describes their grammar, `intervals` computes with bounds, `decisions` goes through the rows and
says which are met. Nothing in an expression is ever executed as code.
"""

from hesscond.expectations.decisions import Decision, Expectation, decisions
from hesscond.expectations.parser import ExpressionError

__all__ = ["Decision", "Expectation", "ExpressionError", "decisions"]
