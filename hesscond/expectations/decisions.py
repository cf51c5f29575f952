"""Expectations over the rows of stored runs: values, matched rows, and decisions with the row that decides."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from numbers import Integral
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from hesscond.errors import ConfigError, did_you_mean
from hesscond.expectations import intervals, parser
from hesscond.runs import store

if TYPE_CHECKING:
    import pandas as pd

OPERATIONS: dict[str, Callable[[Any, Any], Any]] = {
    **{"+": operator.add, "-": operator.sub, "*": operator.mul, "/": operator.truediv},
    **{"and": operator.and_, "or": operator.or_},
    **intervals.COMPARISONS,
}
#: Columns that identify a row in another table, or in another run.
KEYS = ("iteration", "data", "layer", "unit")


@dataclass(frozen=True)
class RowValues:
    """Interval or Truth with iteration, data, layer, unit of its rows (None: one value), and rows without partner."""

    values: Any
    rows: pd.DataFrame | None = None
    unmatched: int = 0


class Log:
    """The tables of a run, read once."""

    def __init__(self, run: store.StoredRun) -> None:
        self.run = run
        self._tables: dict[str, pd.DataFrame] = {}

    def table(self, name: str) -> pd.DataFrame:
        """A table of the log, without duplicate rows."""
        if name not in self._tables:
            table = self.run.table(name)
            self._tables[name] = table.drop_duplicates([k for k in KEYS if k in table], keep="last")
        return self._tables[name]

    def column(self, name: str, conditions: Sequence[parser.Condition]) -> RowValues:
        """The values of a column in the rows that fulfil the conditions, with their bounds."""
        table = self.table(parser.COLUMNS[name])
        if table.empty:
            raise ConfigError(f"{self.run.folder} has no rows in the table {parser.COLUMNS[name]}, where {name} is")
        for number, condition in enumerate(conditions):
            candidates = table
            table = table[fulfilled(table, condition)]
            if table.empty:
                before = ", ".join(map(str, conditions[:number]))
                raise ConfigError(
                    f"no row of the table {parser.COLUMNS[name]} of {self.run.folder} fulfils {condition}"
                    f"{f' where {before}' if before else ''}: {available(candidates, condition)}"
                )
        rows = table[[k for k in KEYS if k in table]].reset_index(drop=True)
        return RowValues(bounded(table, name), rows)


def bounded(table: pd.DataFrame, name: str) -> intervals.Interval:
    """Values of a column: its intervals where the log has them, else the numbers as they are."""
    if f"{name}_lower" in store.TABLES[parser.COLUMNS[name]]:
        return intervals.Interval.between(table[f"{name}_lower"], table[f"{name}_upper"])
    return intervals.Interval.point(table[name].astype(float).to_numpy(dtype=float, na_value=np.nan))


def fulfilled(table: pd.DataFrame, condition: parser.Condition) -> pd.Series:
    """Boolean mask of the rows that fulfil a condition; a missing value fulfils none."""
    column = table[condition.column]
    if isinstance(condition.value, str):
        same = column.astype("string") == condition.value
        return (same if condition.sign == "==" else ~same).fillna(False).astype(bool)
    compare = {"==": "eq", "!=": "ne", "<": "lt", "<=": "le", ">": "gt", ">=": "ge"}[condition.sign]
    numbers = column.astype("Float64")
    return getattr(numbers, compare)(condition.value).fillna(False).astype(bool)


def available(table: pd.DataFrame, condition: parser.Condition) -> str:
    """Values that the column has, as a hint in an error message."""
    known = table[condition.column].dropna().unique()
    if isinstance(condition.value, str):
        names = sorted(map(str, known))
        few = ", ".join(names[:10]) + (", …" if len(names) > 10 else "")
        return did_you_mean(condition.value, names, otherwise=f"there are {few}")
    return f"its values are from {min(known)} to {max(known)}" if len(known) else "they have none"


def matched(a: RowValues, b: RowValues, sign: str) -> tuple[RowValues, RowValues]:
    """Both operands in the same rows: those that agree in all columns that both have."""
    if a.rows is None or b.rows is None:
        # a single value is that of every row
        rows = a.rows if b.rows is None else b.rows
        return replace(a, rows=rows), replace(b, rows=rows)
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


def at_end(column: RowValues, which: str) -> RowValues:
    """Values of the last (or first) iteration, separately for each layer, unit and kind of data."""
    if column.rows is None or "iteration" not in column.rows:
        return column
    ordered = column.rows.sort_values("iteration", kind="stable")
    series = [name for name in column.rows if name != "iteration"]
    if not series:
        where = ordered.index[-1 if which == "last" else 0]
        return RowValues(column.values.take(where), None, column.unmatched)
    ends = ordered.drop_duplicates(series, keep="last" if which == "last" else "first").index.sort_values()
    rows = column.rows.loc[ends, series].reset_index(drop=True)
    return RowValues(column.values.take(ends.to_numpy()), rows, column.unmatched)


def reduced(node: parser.Node, inner: RowValues) -> RowValues:
    """Value of a function of all rows, given their values; a single number is that of its row."""
    if node.kind in ("last", "first"):
        return at_end(inner, node.kind)
    values = inner.values
    if node.kind in ("median", "quantile"):
        values = values if inner.rows is None else values.quantile(node.number)
    elif node.kind in parser.OF_TRUTHS or inner.rows is not None:
        values = getattr(values, node.kind)()
    return RowValues(values, None, inner.unmatched)


@dataclass
class Evaluation:
    """Computation of an expression over logs by method (None: columns without one); ``named``: values it used."""

    text: str
    logs: Mapping[str | None, Log]
    named: dict[str, RowValues] = field(default_factory=dict)
    _conditions: tuple[parser.Condition, ...] = ()

    def value(self, node: parser.Node) -> RowValues:
        """Numbers of an expression, or truths of a comparison, in each row."""
        if node.kind == "filter":
            return replace(self, _conditions=(*self._conditions, *node.conditions)).value(node.parts[0])
        if node.kind == "number":
            return RowValues(intervals.Interval.point(node.number))
        if node.kind == "column":
            return self._remember(node, self.logs[node.method].column(node.name, self._conditions))
        if node.kind in parser.AGGREGATES:
            return self._remember(node, reduced(node, replace(self, named={}).value(node.parts[0])))
        value, *others = map(self.value, node.parts)
        if not others:
            return replace(value, values=~value.values if node.kind == "not" else -value.values)
        if node.kind == "/" and not parser.columns_of(node.parts[1]) and float(others[0].values.lower) == 0:
            raise ConfigError(f"{self._source(node)!r} divides by zero")
        for other in others:
            x, y = matched(value, other, node.kind)
            value = replace(x, values=OPERATIONS[node.kind](x.values, y.values))
        return value

    def _source(self, node: parser.Node) -> str:
        return " ".join(self.text[node.start : node.end].split())

    def _remember(self, node: parser.Node, term: RowValues) -> RowValues:
        text = self._source(node)
        where = ", ".join(map(str, self._conditions))
        self.named[f"{text}[{where}]" if where else text] = term
        return term


Status = Literal["met", "failed", "unresolved"]


@dataclass(frozen=True)
class Expectation:
    """An expression that runs are expected to fulfil.

    Attributes
    ----------
    text
        The expression as it was written.
    node
        Tree of the expression.
    """

    text: str
    node: parser.Node

    @classmethod
    def of(cls, text: str) -> Expectation:
        """Read an expression; a ConfigError if it cannot be read."""
        text = text.strip()
        return cls(text, parser.Reader(text).expectation())

    @property
    def methods(self) -> tuple[str, ...]:
        """Methods that it compares; empty if it is about one run at a time."""
        return parser.methods_of(self.node)

    def check_methods(self, known: Sequence[str]) -> None:
        """Refuse a method that is not in ``known``, those of the runs."""
        for method in self.methods:
            if method not in known:
                names = list(dict.fromkeys(known))
                hint = did_you_mean(method, names, otherwise=f"they are of {', '.join(names)}")
                raise ConfigError(f'expectation "{self.text}": none of the runs is of method {method!r}: {hint}')


@dataclass(frozen=True)
class Decision:
    """Result of one expectation for one run, or for the runs of one seed.

    Attributes
    ----------
    expectation
        Text of the expectation.
    runs
        The runs' folders or METHOD-seedS, shown together.
    status
        met and failed only where bounds decide; unresolved where they do not, or the run is not finished.
    reason
        One sentence.
    rows, met, failed, unresolved
        Number of rows examined, and numbers of them by result. An expectation without rows (of medians, say) counts as
        one.
    unmatched
        Number of rows left out because the other side has no such row.
    worst
        The row that decides: iteration, data, layer, unit, as far as there are.
    values
        Bounds of the values that were compared there, by name.
    """

    expectation: str
    runs: str
    status: Status
    reason: str
    rows: int = 0
    met: int = 0
    failed: int = 0
    unresolved: int = 0
    unmatched: int = 0
    worst: dict[str, Any] = field(default_factory=dict)
    values: dict[str, tuple[float, float]] = field(default_factory=dict)


def decisions(expectations: Sequence[Expectation], runs: Sequence[store.StoredRun]) -> list[Decision]:
    """Decide every expectation for every run; one that names methods is decided for every seed.

    Parameters
    ----------
    expectations
        A comparison of columns that is not inside ``any``, ``share`` or a function of all rows must hold in all rows.
    runs
        Runs of any methods and seeds. A run that diverged fails; one that is not finished is unresolved.

    Raises
    ------
    ConfigError
        A method, a seed or rows are missing.
    RunError
        A log is damaged.
    """
    logs = [Log(run) for run in runs]
    decided = []
    for expectation in expectations:
        expectation.check_methods([run.method for run in runs])
        decided += [decision(expectation, label, group) for label, group in groups(expectation, logs)]
    return decided


def groups(expectation: Expectation, logs: Sequence[Log]) -> Iterator[tuple[str, dict[str | None, Log]]]:
    """Groups of runs on which an expectation is decided, each with a label."""
    methods = expectation.methods
    if not methods:
        labels = [log.run.label for log in logs]
        for log, label in zip(logs, labels, strict=True):
            yield (label if labels.count(label) == 1 else str(log.run.folder)), {None: log}
        return
    by_seed: dict[int, dict[str | None, Log]] = {}
    for log in logs:
        if log.run.method in methods:
            group = by_seed.setdefault(log.run.seed, {})
            if log.run.method in group:
                other = group[log.run.method].run.folder
                raise ConfigError(f"{other} and {log.run.folder} are both {log.run.label}: give one run of each seed")
            group[log.run.method] = log
    for seed, group in sorted(by_seed.items()):
        for method in methods:
            if method not in group:
                raise ConfigError(
                    f'expectation "{expectation.text}": there is no run of {method!r} with seed {seed}, as there is '
                    f"of {', '.join(str(other) for other in group)}"
                )
        yield f"{', '.join(methods)} seed {seed}", group


def decision(expectation: Expectation, label: str, group: dict[str | None, Log]) -> Decision:
    """Decision on an expectation for one group of runs."""
    for log in group.values():
        if log.run.status == "diverged":
            why = log.run.facts.get("message") or "its loss became NaN or infinite"
            return Decision(expectation.text, label, "failed", f"{log.run.label} diverged: {why}")
    for log in group.values():
        if log.run.status not in store.OVER:
            why = f"{log.run.label} is not finished ({log.run.status})"
            return Decision(expectation.text, label, "unresolved", why)
    parts = [of_part(expectation.text, part, label, group) for part in conjuncts(expectation.node)]
    return min(parts, key=lambda part: ("failed", "unresolved", "met").index(part.status))


def conjuncts(node: parser.Node) -> Iterator[parser.Node]:
    """Parts of an expectation that must all hold, in all rows."""
    if node.kind in ("and", "all"):
        for part in node.parts:
            yield from conjuncts(part)
    else:
        yield node


def of_part(text: str, node: parser.Node, label: str, group: dict[str | None, Log]) -> Decision:
    """Decision on one part of an expectation."""
    evaluation = Evaluation(text, group)
    truth = evaluation.value(node)
    certain, possible = np.atleast_1d(truth.values.certain), np.atleast_1d(truth.values.possible)
    met, failed = int(certain.sum()), int((~possible).sum())
    rows = len(certain)
    status: Status = "failed" if failed else "met" if met == rows else "unresolved"
    # false before open before true, and where the margin is least among these
    worst = np.lexsort((np.atleast_1d(truth.values.margin), certain.astype(int) + possible))[0]
    place = {} if truth.rows is None else {name: plain(truth.rows[name].iloc[worst]) for name in truth.rows}
    values = {name: value for name, term in evaluation.named.items() if (value := at_place(term, place)) is not None}
    unmatched = max([truth.unmatched, *(term.unmatched for term in evaluation.named.values())])
    counts = (rows, met, failed, rows - met - failed, unmatched)
    return Decision(text, label, status, sentence(status, counts, place, values), *counts, place, values)


def at_place(term: RowValues, place: dict[str, Any]) -> tuple[float, float] | None:
    """A value in a row, as an interval: true is 1, false 0."""
    where = 0
    if term.rows is not None:
        names = [name for name in term.rows if name in place]
        row = {name: [place[name]] for name in names}
        where = int(keys(term.rows, names).get_indexer_for(keys(type(term.rows)(row), names))[0])
        if where < 0:
            return None
    values = term.values
    low, high = (
        (values.lower, values.upper) if isinstance(values, intervals.Interval) else (values.certain, values.possible)
    )
    return float(np.atleast_1d(low)[where]), float(np.atleast_1d(high)[where])


def plain(cell: Any) -> Any:
    """A cell of a table as a Python value; None where it is missing."""
    import pandas as pd

    return None if pd.isna(cell) else cell.item() if hasattr(cell, "item") else cell


def sentence(
    status: Status, counts: tuple[int, ...], place: dict[str, Any], values: dict[str, tuple[float, float]]
) -> str:
    """Sentence on what was found, and in which row."""
    rows, met, failed, unresolved, unmatched = counts
    equations = ", ".join(f"{name} = {intervals.shown(*value)}" for name, value in values.items())
    if rows == 1:
        counted = {"met": "holds", "failed": "does not hold", "unresolved": "the bounds do not decide"}[status]
    else:
        remark = f" ({unresolved} more are undecided)" if unresolved else ""
        counted = {
            "met": f"holds in all {rows} rows, most narrowly",
            "failed": f"fails in {failed} of {rows} rows{remark}, worst",
            "unresolved": f"undecided in {unresolved} of {rows} rows (holds in {met}), as",
        }[status]
    notes = f"; {unmatched} of the rows without a partner left out" if unmatched else ""
    at = f" at {described(place)}" if place else ""
    return f"{counted}{at}: {equations}{notes}"


def described(place: dict[str, Any]) -> str:
    """Words for a row."""
    # a whole block has no unit
    cells = {name: cell for name, cell in place.items() if name != "unit" or isinstance(cell, Integral)}
    return ", ".join(f"{cell}" if name == "data" else f"{name} {cell}" for name, cell in cells.items())
