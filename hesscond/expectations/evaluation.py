"""The value of an expression over the rows of runs, with what it was computed from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from hesscond.expectations.intervals import COMPARISONS, Interval, Truth
from hesscond.expectations.rows import Found, Log, at_end, matched
from hesscond.expectations.syntax import (
    Arithmetic,
    Call,
    Column,
    Comparison,
    Condition,
    Filtered,
    Logic,
    Negative,
    Node,
    Not,
    Number,
)


@dataclass
class Evaluation:
    """Evaluates an expression.

    Attributes
    ----------
    text
        As it was written.
    logs
        By method; None is the run of columns that name no method.
    named
        What the result was computed from: columns, and values of all rows, by their texts.
    """

    text: str
    logs: Mapping[str | None, Log]
    named: dict[str, Found] = field(default_factory=dict)
    _conditions: tuple[Condition, ...] = ()

    def truth(self, node: Node) -> Found[Truth]:
        """Whether it holds.

        Raises
        ------
        ConfigError
            No row is there for a column, or those of two sides do not match.
        """
        if isinstance(node, Comparison):
            a, b = matched(self.number(node.a), self.number(node.b), node.sign)
            return a.replaced(COMPARISONS[node.sign](a.values, b.values))
        if isinstance(node, Logic):
            p, q = matched(self.truth(node.a), self.truth(node.b), node.word)
            return p.replaced(p.values & q.values if node.word == "and" else p.values | q.values)
        if isinstance(node, Not):
            found = self.truth(node.a)
            return found.replaced(~found.values)
        if isinstance(node, Filtered):
            return self._filtered(node).truth(node.a)
        assert isinstance(node, Call)
        found = self._argument_truth(node)
        return self._remember(node, Found(getattr(found.values, node.name)(), None, found.unmatched))

    def number(self, node: Node) -> Found[Interval]:
        """Its value.

        Raises
        ------
        ConfigError
            As for `truth`.
        """
        if isinstance(node, Number):
            return Found(Interval.point(node.value))
        if isinstance(node, Column):
            return self._remember(node, self.logs[node.method].column(node.name, self._conditions))
        if isinstance(node, Negative):
            found = self.number(node.a)
            return found.replaced(-found.values)
        if isinstance(node, Arithmetic):
            a, b = matched(self.number(node.a), self.number(node.b), node.sign)
            return a.replaced(arithmetic(node.sign, a.values, b.values))
        if isinstance(node, Filtered):
            return self._filtered(node).number(node.a)
        assert isinstance(node, Call)
        return self._called(node)

    def _called(self, node: Call) -> Found[Interval]:
        if node.name == "share":
            found = self._argument_truth(node)
            return self._remember(node, Found(found.values.share(), None, found.unmatched))
        if node.name in ("abs", "log10", "sqrt"):
            inner = self.number(node.a)
            return inner.replaced(abs(inner.values) if node.name == "abs" else getattr(inner.values, node.name)())
        inner = replace(self, named={}).number(node.a)
        if node.name in ("last", "first"):
            return self._remember(node, at_end(inner, node.name))
        values = inner.values
        if inner.rows is not None:
            if node.name in ("median", "quantile"):
                values = values.quantile(node.q)
            else:
                values = {"mean": values.mean, "min": values.minimum, "max": values.maximum}[node.name]()
        return self._remember(node, Found(values, None, inner.unmatched))

    def _argument_truth(self, node: Call) -> Found[Truth]:
        return replace(self, named={}).truth(node.a)

    def _filtered(self, node: Filtered) -> Evaluation:
        return replace(self, _conditions=(*self._conditions, *node.conditions))

    def _remember(self, node: Node, found: Found) -> Found:
        text = " ".join(self.text[node.start : node.end].split())
        where = ", ".join(map(str, self._conditions))
        self.named[f"{text}[{where}]" if where else text] = found
        return found


def arithmetic(sign: str, a: Interval, b: Interval) -> Interval:
    """A sign applied to intervals."""
    if sign == "+":
        return a + b
    if sign == "-":
        return a - b
    if sign == "*":
        return a * b
    return a / b if sign == "/" else a**b
