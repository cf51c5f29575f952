"""What an expectation is made of: nodes of its tree, the columns it may name, and the error that points into it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from difflib import get_close_matches

from hesscond.errors import ConfigError
from hesscond.study.store import TABLES

#: Tables that expectations read; the others repeat their column names.
READ = ("probe", "evaluation", "training")
#: Columns that say which row it is, and other exact ones: what a filter may ask for.
TEXT = ("data", "layer", "coordinates", "solver")
WHOLE = tuple(
    name
    for table in READ
    for name, kind in TABLES[table].items()
    if kind.startswith("INTEGER") and (table == "probe" or name not in TABLES["probe"])
)
#: Column → table, for all that an expression may compute with.
COLUMNS = {
    name: table
    for table in READ
    for name in TABLES[table]
    if name not in TEXT and name not in ("iteration", "epoch", "unit")
}

#: Functions of the rows: one value for all of them, or (last, first) for each layer, unit and kind of data.
AGGREGATES = ("median", "mean", "min", "max", "quantile", "last", "first", "all", "any", "share")
#: Functions row by row.
POINTWISE = ("abs", "log10", "sqrt")
#: These take a comparison, the others a number.
OF_TRUTHS = ("all", "any", "share")


class ExpressionError(ConfigError):
    """An expectation that cannot be read.

    Attributes
    ----------
    text
        The whole expression.
    start, end
        The part at fault, as indices.
    """

    def __init__(self, text: str, start: int, end: int, complaint: str) -> None:
        self.text, self.start, self.end = text, start, end
        place = f"at character {start + 1}" if start < len(text) else "at its end"
        super().__init__(f"expectation {excerpt(text, start)}: {place}, {complaint}")


def excerpt(text: str, start: int = 0) -> str:
    """The expression in quotation marks, or what is around an index of a long one."""
    if len(text) <= 100:
        return f'"{printable(text)}"'
    low, high = max(0, start - 40), start + 40
    return f'"{"…" if low else ""}{printable(text[low:high])}{"…" if high < len(text) else ""}"'


def printable(text: str) -> str:
    """The text with � for what a terminal does not show."""
    return "".join(c if c.isprintable() else "�" for c in text)


@dataclass(frozen=True)
class Node:
    """A part of an expression: the characters from start to end."""

    start: int
    end: int

    @property
    def truth(self) -> bool:
        """Whether it is true or false, and not a number."""
        return False


@dataclass(frozen=True)
class Number(Node):
    """A number as written."""

    value: float


@dataclass(frozen=True)
class Column(Node):
    """A column of the log; of the runs of ``method``, or of the run that is checked."""

    method: str | None
    name: str


@dataclass(frozen=True)
class Arithmetic(Node):
    """a + b and the like; ``sign`` is one of + - * / **."""

    sign: str
    a: Node
    b: Node


@dataclass(frozen=True)
class Negative(Node):
    """−a."""

    a: Node


@dataclass(frozen=True)
class Comparison(Node):
    """a < b and the like."""

    sign: str
    a: Node
    b: Node

    @property
    def truth(self) -> bool:
        """It is."""
        return True


@dataclass(frozen=True)
class Logic(Node):
    """a and b, a or b."""

    word: str
    a: Node
    b: Node

    @property
    def truth(self) -> bool:
        """It is."""
        return True


@dataclass(frozen=True)
class Not(Node):
    """Not a."""

    a: Node

    @property
    def truth(self) -> bool:
        """It is."""
        return True


@dataclass(frozen=True)
class Call(Node):
    """A function of an expression; ``q`` of quantile only."""

    name: str
    a: Node
    q: float = 0.5

    @property
    def truth(self) -> bool:
        """All and any are."""
        return self.name in ("all", "any")


@dataclass(frozen=True)
class Condition:
    """What a filter asks of a row."""

    column: str
    sign: str
    value: float | str

    def __str__(self) -> str:
        return f"{self.column} {self.sign.replace('==', '=')} {format(self.value, '' if self.column in TEXT else 'g')}"


@dataclass(frozen=True)
class Filtered(Node):
    """An expression over the rows that fulfil all conditions."""

    a: Node
    conditions: tuple[Condition, ...]

    @property
    def truth(self) -> bool:
        """If what it filters is."""
        return self.a.truth


def walk(node: Node) -> Iterator[Node]:
    """The node and all below it."""
    yield node
    for field in fields(node):
        below = getattr(node, field.name)
        if isinstance(below, Node):
            yield from walk(below)


def did_you_mean(given: str, known: list[str] | tuple[str, ...], *, otherwise: str) -> str:
    """A suggestion for a misspelt name."""
    close = get_close_matches(given, known, 1, 0.6) or [k for k in known if k.lower() == given.lower()]
    return f"did you mean {close[0]}?" if close else otherwise
