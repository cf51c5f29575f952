"""Values of expressions over the rows of runs: their columns, the matching of two sides, and their results."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Generic, TypeVar

import numpy as np

from hesscond.errors import ConfigError
from hesscond.expectations.intervals import COMPARISONS, Interval, Truth
from hesscond.expectations.parser import COLUMNS, Condition, Node, columns_of, did_you_mean
from hesscond.runs import TABLES

if TYPE_CHECKING:
    import pandas as pd

    from hesscond.runs import StoredRun

ARITHMETIC = {"+": operator.add, "-": operator.sub, "*": operator.mul, "/": operator.truediv}
#: Columns that identify a row in another table, or in another run.
KEYS = ("iteration", "data", "layer", "unit")

Values = TypeVar("Values", Interval, Truth)


@dataclass(frozen=True)
class RowValues(Generic[Values]):
    """Values, and the columns iteration, data, layer, unit (as far as there are) of their rows; None: a single value.

    ``unmatched``: number of rows that had no partner.
    """

    values: Values
    rows: pd.DataFrame | None = None
    unmatched: int = 0

    def replaced(self, values: Interval | Truth) -> RowValues:
        """The same rows with other values."""
        return RowValues(values, self.rows, self.unmatched)


class Log:
    """The tables of a run, read once."""

    def __init__(self, run: StoredRun) -> None:
        self.run = run
        self._tables: dict[str, pd.DataFrame] = {}

    def table(self, name: str) -> pd.DataFrame:
        """A table of the log, without duplicate rows."""
        if name not in self._tables:
            table = self.run.table(name)
            self._tables[name] = table.drop_duplicates([k for k in KEYS if k in table], keep="last")
        return self._tables[name]

    def column(self, name: str, conditions: Sequence[Condition]) -> RowValues[Interval]:
        """The values of a column in the rows that fulfil the conditions, with their bounds."""
        table = self.table(COLUMNS[name])
        if table.empty:
            raise ConfigError(f"{self.run.folder} has no rows in the table {COLUMNS[name]}, where {name} is")
        for number, condition in enumerate(conditions):
            there = table
            table = table[fulfilled(table, condition)]
            if table.empty:
                before = ", ".join(map(str, conditions[:number]))
                raise ConfigError(
                    f"no row of the table {COLUMNS[name]} of {self.run.folder} fulfils {condition}"
                    f"{f' where {before}' if before else ''}: {available(there, condition)}"
                )
        rows = table[[k for k in KEYS if k in table]].reset_index(drop=True)
        return RowValues(bounded(table, name), rows)


def bounded(table: pd.DataFrame, name: str) -> Interval:
    """Values of a column: its intervals where the log has them, else the numbers as they are."""
    if f"{name}_lower" in TABLES[COLUMNS[name]]:
        return Interval.between(table[f"{name}_lower"], table[f"{name}_upper"])
    return Interval.point(table[name].astype(float).to_numpy(dtype=float, na_value=np.nan))


def fulfilled(table: pd.DataFrame, condition: Condition) -> pd.Series:
    """Boolean mask of the rows that fulfil a condition; a missing value fulfils none."""
    column = table[condition.column]
    if isinstance(condition.value, str):
        same = column.astype("string") == condition.value
        return (same if condition.sign == "==" else ~same).fillna(False).astype(bool)
    compare = {"==": "eq", "!=": "ne", "<": "lt", "<=": "le", ">": "gt", ">=": "ge"}[condition.sign]
    numbers = column.astype("Float64")
    return getattr(numbers, compare)(condition.value).fillna(False).astype(bool)


def available(table: pd.DataFrame, condition: Condition) -> str:
    """Values that the column has, as a hint in an error message."""
    known = table[condition.column].dropna().unique()
    if isinstance(condition.value, str):
        names = sorted(map(str, known))
        shown = ", ".join(names[:10]) + (", …" if len(names) > 10 else "")
        return did_you_mean(condition.value, names, otherwise=f"there are {shown}")
    return f"its values are from {min(known)} to {max(known)}" if len(known) else "it is empty"


def matched(a: RowValues, b: RowValues, sign: str) -> tuple[RowValues, RowValues]:
    """Both operands in the same rows: those that agree in all columns that both have."""
    if a.rows is None or b.rows is None:
        rows = a.rows if b.rows is None else b.rows
        count = () if rows is None else (len(rows),)
        return tuple(RowValues(broadcast(one.values, count), rows, one.unmatched) for one in (a, b))  # type: ignore[return-value]
    if a.rows is b.rows:
        return a, b
    if len(b.rows.columns) > len(a.rows.columns):
        second, first = matched(b, a, sign)
        return first, second
    common = [name for name in a.rows if name in b.rows]
    if len(common) < len(b.rows.columns):
        raise ConfigError(
            f"the two sides of {sign} belong to different rows ({', '.join(a.rows)} and {', '.join(b.rows)}): "
            "take one value of one of them, as median(…) does"
        )
    where = keys(b.rows, common).get_indexer(keys(a.rows, common))
    kept = np.flatnonzero(where >= 0)
    if not len(kept):
        raise ConfigError(
            f"the two sides of {sign} have no row in common ({', '.join(common)} agree in none): put a filter around "
            "the whole comparison, or take one value of one side, as median(…) does"
        )
    rows = a.rows if len(kept) == len(a.rows) else a.rows.iloc[kept].reset_index(drop=True)
    lost = len(a.rows) - len(kept) + (len(b.rows) - len(set(where[kept])) if len(common) == len(a.rows.columns) else 0)
    unmatched = max(a.unmatched, b.unmatched, lost)
    return RowValues(a.values.take(kept), rows, unmatched), RowValues(b.values.take(where[kept]), rows, unmatched)


def keys(rows: pd.DataFrame, names: list[str]) -> pd.Index:
    """Index of the rows by some columns."""
    import pandas as pd

    # as texts: a missing layer or unit equals another
    return pd.MultiIndex.from_frame(rows[names].astype("string").fillna(""))


def broadcast(values: Values, shape: tuple[int, ...]) -> Values:
    """A single value for every row."""
    if isinstance(values, Interval):
        return Interval(*(np.broadcast_to(end, shape or np.shape(end)) for end in (values.lower, values.upper)))
    ends = (values.certain, values.possible, values.margin)
    return Truth(*(np.broadcast_to(end, shape or np.shape(end)) for end in ends))


def at_end(found: RowValues[Interval], which: str) -> RowValues[Interval]:
    """Values of the last (or first) iteration, separately for each layer, unit and kind of data."""
    if found.rows is None or "iteration" not in found.rows:
        return found
    ordered = found.rows.sort_values("iteration", kind="stable")
    series = [name for name in found.rows if name != "iteration"]
    if not series:
        where = ordered.index[-1 if which == "last" else 0]
        return RowValues(found.values.take(where), None, found.unmatched)
    ends = ordered.drop_duplicates(series, keep="last" if which == "last" else "first").index.sort_values()
    rows = found.rows.loc[ends, series].reset_index(drop=True)
    return RowValues(found.values.take(ends.to_numpy()), rows, found.unmatched)


@dataclass
class Evaluation:
    """An expression computed over the rows of logs, given by method; that of None is for columns without a method.

    ``named``: values from which the result was computed, columns and values of all rows, by their texts.
    """

    text: str
    logs: Mapping[str | None, Log]
    named: dict[str, RowValues] = field(default_factory=dict)
    _conditions: tuple[Condition, ...] = ()

    def truth(self, node: Node) -> RowValues[Truth]:
        """Truth of a comparison, in each row."""
        if node.kind == "filter":
            return self._filtered(node).truth(node.parts[0])
        if node.kind == "not":
            found = self.truth(node.parts[0])
            return found.replaced(~found.values)
        if node.kind in ("all", "any"):
            found = self._inside().truth(node.parts[0])
            return self._remember(node, RowValues(getattr(found.values, node.kind)(), None, found.unmatched))
        if node.kind in ("and", "or"):
            joined = self.truth(node.parts[0])
            for part in node.parts[1:]:
                p, q = matched(joined, self.truth(part), node.kind)
                joined = p.replaced(p.values & q.values if node.kind == "and" else p.values | q.values)
            return joined
        x, y = matched(self.number(node.parts[0]), self.number(node.parts[1]), node.kind)
        return x.replaced(COMPARISONS[node.kind](x.values, y.values))

    def number(self, node: Node) -> RowValues[Interval]:
        """Values of an expression, in each row."""
        if node.kind == "filter":
            return self._filtered(node).number(node.parts[0])
        if node.kind == "number":
            return RowValues(Interval.point(node.number))
        if node.kind == "column":
            return self._remember(node, self.logs[node.method].column(node.name, self._conditions))
        if node.kind not in ARITHMETIC:
            return self._called(node)
        if len(node.parts) == 1:
            found = self.number(node.parts[0])
            return found.replaced(-found.values)
        a, b = map(self.number, node.parts)
        if node.kind == "/" and not columns_of(node.parts[1]) and float(b.values.lower) == 0:
            raise ConfigError(f"{self._source(node)!r} divides by zero")
        x, y = matched(a, b, node.kind)
        return x.replaced(ARITHMETIC[node.kind](x.values, y.values))

    def _called(self, node: Node) -> RowValues[Interval]:
        name, (part,) = node.kind, node.parts
        if name == "share":
            truths = self._inside().truth(part)
            return self._remember(node, RowValues(truths.values.share(), None, truths.unmatched))
        inner = self._inside().number(part)
        if name in ("last", "first"):
            return self._remember(node, at_end(inner, name))
        values = inner.values
        if inner.rows is not None:
            if name in ("median", "quantile"):
                values = values.quantile(node.number)
            else:
                values = {"mean": values.mean, "min": values.minimum, "max": values.maximum}[name]()
        return self._remember(node, RowValues(values, None, inner.unmatched))

    def _source(self, node: Node) -> str:
        return " ".join(self.text[node.start : node.end].split())

    def _inside(self) -> Evaluation:
        return replace(self, named={})

    def _filtered(self, node: Node) -> Evaluation:
        return replace(self, _conditions=(*self._conditions, *node.conditions))

    def _remember(self, node: Node, found: RowValues) -> RowValues:
        text = self._source(node)
        where = ", ".join(map(str, self._conditions))
        self.named[f"{text}[{where}]" if where else text] = found
        return found
