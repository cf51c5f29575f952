"""Parser of expectations: from a text to its tree.

Python's own parser reads the text; only the following is allowed, everything else is refused, and nothing is run::

    a < b    <=  >  >=  ==  !=     comparisons; a < b < c is a < b and b < c
    p and q, p or q, not p         of comparisons
    a + b    -  *  /               of numbers, which are written as 10, 0.5 or 1e6
    kappa                          a column of the run that is checked
    bnp.kappa, "bnp+groupnorm".kappa
                                   a column of the run of a method
    median(a), quantile(a, 0.9)    a function
    a[data = train, unit > 3]      a filter, around columns: column (= == != < <= > >=) (number, name or "text"),
                                   joined by , or and

Only filters are not Python's, as = is not: they are read here, and stand as an index in what Python reads.
"""

from __future__ import annotations

import ast
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NoReturn

from hesscond.errors import ConfigError, did_you_mean
from hesscond.expectations.intervals import COMPARISONS
from hesscond.runs import TABLES

#: Tables that expectations read; the others repeat their column names.
READ = ("probe", "evaluation", "training")
#: Columns that identify a row, and other exact ones: those that a filter may use.
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
#: These take a comparison, the others a number.
OF_TRUTHS = ("all", "any", "share")

#: Most characters of an expression, and most levels of its tree.
LONGEST, DEEPEST = 2000, 200

WORDS = ("and", "or", "not")
SIGNS: dict[type[ast.AST], str] = {
    ast.Lt: "<", ast.LtE: "<=", ast.Gt: ">", ast.GtE: ">=", ast.Eq: "==", ast.NotEq: "!=",
    ast.And: "and", ast.Or: "or", ast.Not: "not", ast.USub: "-",
    ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.Div: "/",
}  # fmt: skip
NUMBER = r"(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]+)?(?![\w.])"
PIECE = re.compile(
    rf"""(?P<space>\s+)
    | (?P<number>{NUMBER})
    | (?P<word>[A-Za-z_][A-Za-z0-9_]*)
    | (?P<text>"[^"]*"|'[^']*')
    | (?P<filter>\[(?:[^\]"']|"[^"]*"|'[^']*')+\])
    | (?P<bracket>[()\[\],])
    | (?P<sign><=|>=|==|!=|[-+*/<>=.])""",
    re.VERBOSE,
)
CONDITION = re.compile(
    r"""\s*(?P<column>\w+)
    \s*(?P<sign>==|!=|<=|>=|=|<|>)
    \s*(?P<value>"[^"]*"|'[^']*'|[^\s,"'=<>!]+)
    \s*(?:,|\band\b|$)""",
    re.VERBOSE,
)


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
    """The expression in quotation marks, or a part of a long one around an index; � for unprintable characters."""
    low, high = (0, len(text)) if len(text) <= 100 else (max(0, start - 40), start + 40)
    shown = "".join(c if c.isprintable() else "�" for c in text[low:high])
    return f'"{"…" if low else ""}{shown}{"…" if high < len(text) else ""}"'


@dataclass(frozen=True)
class Condition:
    """Condition that a filter puts on a column of a row."""

    column: str
    sign: str
    value: float | str

    def __str__(self) -> str:
        return f"{self.column} {self.sign.replace('==', '=')} {format(self.value, '' if self.column in TEXT else 'g')}"


@dataclass(frozen=True)
class Node:
    """Part of an expression: a number (or the share of quantile), column, filter, sign, word or function."""

    kind: str
    start: int
    end: int
    parts: tuple[Node, ...] = ()
    number: float = 0.5
    name: str = ""
    method: str | None = None
    conditions: tuple[Condition, ...] = ()

    @property
    def truth(self) -> bool:
        """Whether its value is true or false rather than a number."""
        if self.kind == "filter":
            return self.parts[0].truth
        return self.kind in (*COMPARISONS, *WORDS, "all", "any")


def walk(node: Node) -> Iterator[Node]:
    """The node and all below it."""
    yield node
    for part in node.parts:
        yield from walk(part)


def columns_of(node: Node) -> list[Node]:
    """The columns in an expression."""
    return [part for part in walk(node) if part.kind == "column"]


def methods_of(node: Node) -> tuple[str, ...]:
    """The methods that an expectation names, each once, in their order."""
    return tuple(dict.fromkeys(column.method for column in columns_of(node) if column.method is not None))


def for_python(text: str) -> str:
    """Text of the same length for Python's parser: filters become an index, names in quotes x's."""
    pieces, at = [], 0
    while at < len(text):
        match = PIECE.match(text, at)
        if match is None:
            raise ExpressionError(text, at, at + 1, strange(text[at]))
        kind, piece = str(match.lastgroup), match.group()
        if piece == "=":
            raise ExpressionError(text, at, at + 1, "'=' compares nothing (= is for filters: write ==)")
        blank = len(piece) - 2
        stands_for = {"space": " " * len(piece), "text": f'"{"x" * blank}"', "filter": f"[{'0'.ljust(blank)}]"}
        pieces.append(stands_for.get(kind, piece))
        at = match.end()
    return "".join(pieces)


def strange(character: str) -> str:
    """Reason why an expectation cannot go on with a character."""
    if character in "'\"":
        return "a quotation mark is not closed"
    if character.isdigit():
        return "a number is written as 10, 0.5 or 1e6, and a name like this needs quotation marks"
    return f"{character!r} means nothing here"


class Reader:
    """Reader of a text without blanks around it: makes Python's syntax tree that of an expectation, or refuses it."""

    def __init__(self, text: str) -> None:
        self.text, self.depth = text, 0

    def fail(self, start: int, end: int, complaint: str) -> NoReturn:
        """Refuse the text because of some characters."""
        raise ExpressionError(self.text, start, end, complaint)

    def refuse(self, node: Node, complaint: str) -> NoReturn:
        """Refuse the text because of a part."""
        self.fail(node.start, node.end, complaint)

    def expectation(self) -> Node:
        """Tree of the whole text."""
        if not self.text:
            self.fail(0, 0, "there is nothing: write a comparison, as in kappa < 1e6")
        if len(self.text) > LONGEST:
            self.fail(LONGEST, len(self.text), f"it is longer than {LONGEST} characters")
        try:
            tree = ast.parse(for_python(self.text), mode="eval")
        except SyntaxError as error:
            self.explain(error)
        except (RecursionError, MemoryError):
            self.too_deep(0)
        node = self.read(tree.body)
        if not node.truth:
            self.refuse(node, "this is a number: compare it with another, as in kappa < 1e6")
        columns = columns_of(node)
        if not columns:
            self.refuse(node, "it names no column: what it says holds or fails whatever the run")
        bare = [column for column in columns if column.method is None]
        if bare and len(bare) < len(columns):
            other = methods_of(node)[0]
            self.refuse(bare[0], f"say of which method {bare[0].name} is, as another column is {other}'s")
        return node

    def too_deep(self, start: int) -> NoReturn:
        """Refuse a text with too many levels."""
        self.fail(start, len(self.text), f"it goes more than {DEEPEST} levels deep: split it into several expectations")

    def explain(self, error: SyntaxError) -> NoReturn:
        """Raise an error for the place where Python's parser failed."""
        length = len(self.text)
        start = error.offset - 1 if error.offset else length  # Python has no offset for the end
        if error.msg.endswith("never closed"):
            self.fail(length, length, f"{')' if self.text[start] == '(' else ']'!r} is missing")
        if "forgot a comma" in error.msg:
            end = (error.end_offset or 0) - 1
            self.fail(start, end, f"a sign is missing in {self.text[start:end]!r}")
        match = PIECE.match(self.text, start)
        if match is None:
            self.fail(length, length, "a column, a number or a parenthesis is missing")
        self.fail(start, match.end(), f"{match.group()!r} cannot follow what stands before it")

    def read(self, node: ast.expr) -> Node:
        """Node that a node of Python's syntax tree stands for."""
        start, end = node.col_offset, node.end_col_offset or 0
        self.depth += 1
        if self.depth > DEEPEST:
            self.too_deep(start)
        subtree = self.node(node, start, end)
        self.depth -= 1
        return subtree

    def node(self, node: ast.expr, start: int, end: int) -> Node:
        """Node of the characters from start to end."""
        match node:
            case ast.BoolOp(op=op, values=values):
                word = SIGNS[type(op)]
                return Node(word, start, end, tuple(self.wanted(self.read(part), True, word) for part in values))
            case ast.Compare(left=left, ops=ops, comparators=others) if all(type(op) in SIGNS for op in ops):
                signs = [SIGNS[type(op)] for op in ops]
                parts = [
                    self.wanted(self.read(part), False, sign)
                    for part, sign in zip((left, *others), (signs[0], *signs), strict=True)
                ]
                pairs = zip(signs, parts, parts[1:], strict=False)
                comparisons = tuple(Node(sign, a.start, b.end, (a, b)) for sign, a, b in pairs)
                return comparisons[0] if len(comparisons) == 1 else Node("and", start, end, comparisons)
            case ast.BinOp(left=left, op=op, right=right) if type(op) in SIGNS:
                sign = SIGNS[type(op)]
                a, b = self.wanted(self.read(left), False, sign), self.wanted(self.read(right), False, sign)
                return Node(sign, start, end, (a, b))
            case ast.UnaryOp(op=ast.UAdd(), operand=operand):
                return self.wanted(self.read(operand), False, "+")
            case ast.UnaryOp(op=op, operand=operand) if type(op) in SIGNS:
                sign = SIGNS[type(op)]
                return Node(sign, start, end, (self.wanted(self.read(operand), sign == "not", sign),))
            case ast.Call(func=function, args=args):
                return self.call(start, end, function, args)
            case ast.Subscript(value=value, slice=index):
                return self.filtered(start, end, self.read(value), index.col_offset)
            case ast.Name(id=name):
                return self.column(start, end, None, name)
            case ast.Attribute(value=ast.Constant(value=str()) as method, attr=name):
                return self.column(start, end, self.source(method)[1:-1], name)
            case ast.Attribute(value=ast.Name() | ast.Attribute() as method, attr=name):
                return self.column(start, end, self.source(method), name)
            case ast.Constant(value=str()):
                self.fail(start, end, "a text in quotation marks is a method: a dot and a column must follow")
            case ast.Constant(value=value) if type(value) in (int, float):
                return Node("number", start, end, number=self.number(start, end))
        self.fail(start, end, f"an expectation has nothing like {self.source(node)[:40]!r}")

    def source(self, node: ast.expr) -> str:
        """The characters of a part."""
        return self.text[node.col_offset : node.end_col_offset]

    def number(self, start: int, end: int) -> float:
        """The number that is written there."""
        value = float(self.text[start:end])
        if math.isinf(value):
            self.fail(start, end, "the number is too large for double precision")
        return value

    def wanted(self, node: Node, truth: bool, by: str) -> Node:
        """Return the node if it is a truth or a number, as wanted; refuse it otherwise."""
        if node.truth != truth:
            what, needed = ("a comparison", "a number") if node.truth else ("a number", "a comparison")
            self.refuse(node, f"{by} takes {needed}, and this is {what}")
        return node

    def column(self, start: int, end: int, method: str | None, name: str) -> Node:
        """Node of a column; refuse one that does not exist."""
        if name in (*WHOLE, *TEXT) and name not in COLUMNS:
            complaint = f"{name} says which row it is: use it in a filter, as in kappa[{name} = …]"
            self.fail(end - len(name), end, complaint)
        if name not in COLUMNS:
            known, tables = (*COLUMNS, *AGGREGATES), ", ".join(READ)
            hint = did_you_mean(name, known, otherwise=f"it has those of the tables {tables}")
            self.fail(end - len(name), end, f"{name!r} is not a column of the log: {hint}")
        return Node("column", start, end, name=name, method=method)

    def call(self, start: int, end: int, function: ast.expr, args: list[ast.expr]) -> Node:
        """Node of a function and its arguments."""
        name = self.source(function)
        if name not in AGGREGATES:
            hint = did_you_mean(name, AGGREGATES, otherwise=f"there are {', '.join(AGGREGATES)}")
            self.fail(start, start + len(name), f"{name!r} is not a function: {hint}")
        if len(args) != 1 + (name == "quantile"):
            takes = "a number, too, as in quantile(kappa, 0.9)" if name == "quantile" else "one thing"
            self.fail(end - 1, end, f"{name} takes {takes}")
        a = self.wanted(self.read(args[0]), name in OF_TRUTHS, name)
        if not columns_of(a):
            self.refuse(a, f"{name} takes columns, and there is none in this")
        if name != "quantile":
            return Node(name, start, end, (a,))
        q = self.source(args[1])
        if not re.fullmatch(NUMBER, q) or not float(q) <= 1:
            at = args[1].col_offset
            self.fail(at, end, "quantile takes a number from 0 to 1 behind the comma, as in quantile(kappa, 0.9)")
        return Node(name, start, end, (a,), float(q))

    def filtered(self, start: int, end: int, inner: Node, at: int) -> Node:
        """Node of an expression with a filter, whose conditions begin at ``at``."""
        if not columns_of(inner):
            complaint = "a filter belongs behind a column, a function or a parenthesis with columns in it"
            self.fail(at - 1, at, complaint)
        conditions = []
        while at < end - 1:
            match = CONDITION.match(self.text, at, end - 1)
            if match is None:
                self.fail(at, end - 1, "a filter has conditions as data = train and unit > 3, with = != < <= > or >=")
            conditions.append(self.condition(match, inner))
            at = match.end()
        return Node("filter", start, end, (inner,), conditions=tuple(conditions))

    def condition(self, match: re.Match[str], inner: Node) -> Condition:
        """Condition of a filter: a column of the filtered tables, compared with a value."""
        (name, sign, value), known = match.group("column", "sign", "value"), (*WHOLE, *TEXT)
        if name not in known:
            hint = did_you_mean(name, known, otherwise=f"use one of {', '.join(known)}")
            if name in COLUMNS:
                hint = f"it has bounds, use one of {', '.join(known)}"
            self.fail(*match.span("column"), f"{name!r} is no column that rows are chosen by: {hint}")
        for column in columns_of(inner):
            table = COLUMNS[column.name]
            if name not in TABLES[table]:
                complaint = f"{column.name} has no {name}: the table {table} has no such column"
                self.fail(*match.span("column"), complaint)
        if name in TEXT and sign not in ("=", "==", "!="):
            self.fail(*match.span("sign"), f"{name} is text: use = or !=")
        sign = "==" if sign == "=" else sign
        if name in TEXT:
            return Condition(name, sign, value.strip("'\""))
        if not re.fullmatch(NUMBER, value):
            self.fail(*match.span("value"), f"{name} is compared with a number, not {value}")
        return Condition(name, sign, self.number(*match.span("value")))
