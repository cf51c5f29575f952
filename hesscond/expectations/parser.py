"""From the text of an expectation to its tree: a tokenizer and a recursive descent, with bounds on size and depth.

::

    expectation = conjunction { "or" conjunction }
    conjunction = negation { "and" negation }
    negation    = "not" negation | comparison
    comparison  = sum { ("<" | "<=" | ">" | ">=" | "==" | "!=") sum }
    sum         = product { ("+" | "-") product }
    product     = sign { ("*" | "/") sign }
    sign        = ("-" | "+") sign | power
    power       = filtered [ "**" sign ]
    filtered    = atom { "[" condition { ("," | "and") condition } "]" }
    atom        = number | [ method "." ] column | function "(" expectation [ "," number ] ")" | "(" expectation ")"
    condition   = column ("=" | "==" | "!=" | "<" | "<=" | ">" | ">=") (number | name | "text in quotation marks")
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple, NoReturn

from hesscond.expectations.syntax import (
    AGGREGATES,
    COLUMNS,
    OF_TRUTHS,
    POINTWISE,
    READ,
    TEXT,
    WHOLE,
    Arithmetic,
    Call,
    Column,
    Comparison,
    Condition,
    ExpressionError,
    Filtered,
    Logic,
    Negative,
    Node,
    Not,
    Number,
    did_you_mean,
    walk,
)
from hesscond.study.store import TABLES

#: Characters of an expression.
LONGEST = 2000
#: Parentheses, functions and signs inside each other.
DEEPEST = 40
#: Signs, words and filters that join or follow something: with `DEEPEST` they bound the depth of the tree.
MOST = 150

TOKEN = re.compile(
    r"""(?P<space>[ \t\r\n]+)
    | (?P<number>(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]+)?(?![\w.]))
    | (?P<name>[A-Za-z_][A-Za-z0-9_]*(?:\.[A-Za-z0-9_]+)*)
    | (?P<text>"[^"]*"|'[^']*')
    | (?P<sign>\*\*|<=|>=|==|!=|[-+*/<>=()\[\],.])""",
    re.VERBOSE,
)
COMPARING = ("<", "<=", ">", ">=", "==", "!=")
WORDS = ("and", "or", "not")


class Token(NamedTuple):
    """A piece of the text from ``start`` to ``end``."""

    kind: str
    text: str
    start: int
    end: int


def parse_expectation(text: str) -> Node:
    """The tree of an expectation.

    Parameters
    ----------
    text
        As in `the grammar <hesscond.expectations.parser>`.

    Raises
    ------
    ExpressionError
        It cannot be read, names what there is not, or is too long or too deep.

    Examples
    --------
    >>> parse_expectation("kappa_preconditioned < kapa / 10")
    Traceback (most recent call last):
    hesscond.expectations.syntax.ExpressionError: expectation "kappa_preconditioned < kapa / 10": at character 24, \
'kapa' is not a column of the log: did you mean kappa?
    """
    return Parser(text).expectation()


def tokens_of(text: str) -> list[Token]:
    """The pieces, and one at the end that says so."""
    found, at = [], 0
    while at < len(text):
        match = TOKEN.match(text, at)
        if match is None:
            if text[at] in "'\"":
                raise ExpressionError(text, at, len(text), "a quotation mark is not closed")
            if text[at].isdigit():
                raise ExpressionError(
                    text,
                    at,
                    at + 1,
                    "a number is written as 10, 0.5 or 1e6, and a name like this needs quotation marks",
                )
            raise ExpressionError(text, at, at + 1, f"{text[at]!r} means nothing here")
        if match.lastgroup != "space":
            found.append(Token(str(match.lastgroup), match.group(), at, match.end()))
        at = match.end()
    return [*found, Token("end", "", len(text), len(text))]


class Parser:
    """Reads one text from left to right."""

    def __init__(self, text: str) -> None:
        self.text = text
        if len(text) > LONGEST:
            raise ExpressionError(text, LONGEST, len(text), f"it is longer than {LONGEST} characters")
        self.tokens, self.next, self.depth, self.joints = tokens_of(text), 0, 0, 0

    def expectation(self) -> Node:
        """All of the text."""
        if len(self.tokens) == 1:
            raise ExpressionError(self.text, 0, 0, "there is nothing: write a comparison, as in kappa < 1e6")
        node = self.either()
        if self.here.kind != "end":
            hint = " (= is for filters: write ==)" if self.here.text == "=" else ""
            self.fail(self.here, f"{self.here.text!r} is more than the expression before it takes{hint}")
        if not node.truth:
            self.fail(node, "this is a number: compare it with another, as in kappa < 1e6")
        self.check_methods(node)
        return node

    @property
    def here(self) -> Token:
        """The next token."""
        return self.tokens[self.next]

    def taken(self, *texts: str) -> Token | None:
        """The next token, passed over, if it is a sign or word of these."""
        token = self.here
        if token.text in texts and token.kind in ("sign", "name"):
            self.next += 1
            return token
        return None

    def joint(self, *texts: str) -> Token | None:
        """As `taken`, where the tree grows."""
        token = self.taken(*texts)
        if token is not None:
            self.joints += 1
            if self.joints > MOST:
                self.fail(token, f"it has more than {MOST} operations: split it into several expectations")
        return token

    def need(self, text: str) -> Token:
        """The next token, which must be this sign."""
        token = self.taken(text)
        if token is None:
            self.fail(self.here, f"{text!r} is missing")
        return token

    def fail(self, where: Token | Node, complaint: str) -> NoReturn:
        """Refuse the text."""
        raise ExpressionError(self.text, where.start, where.end, complaint)

    def wanted(self, node: Node, truth: bool, by: str) -> Node:
        """The node, if it is a truth or a number as wanted."""
        if node.truth != truth:
            what, needed = ("a comparison", "a number") if node.truth else ("a number", "a comparison")
            self.fail(node, f"{by} takes {needed}, and this is {what}")
        return node

    def either(self) -> Node:
        """Conjunctions joined by "or"."""
        return self.joined("or", lambda: self.joined("and", self.negation))

    def joined(self, word: str, part: Callable[[], Node]) -> Node:
        """Truths joined by a word."""
        node = part()
        while token := self.joint(word):
            a, b = self.wanted(node, True, token.text), self.wanted(part(), True, token.text)
            node = Logic(a.start, b.end, token.text, a, b)
        return node

    def negation(self) -> Node:
        """A comparison, or its opposite."""
        token = self.taken("not")
        if token is None:
            return self.comparison()
        a = self.wanted(self.deeper(token, self.negation), True, "not")
        return Not(token.start, a.end, a)

    def comparison(self) -> Node:
        """Sums compared with each other: a < b < c is a < b and b < c."""
        a = self.sum()
        found: Node | None = None
        while sign := self.joint(*COMPARING):
            b = self.wanted(self.sum(), False, sign.text)
            one = Comparison(a.start, b.end, sign.text, self.wanted(a, False, sign.text), b)
            found = one if found is None else Logic(found.start, b.end, "and", found, one)
            a = b
        return found or a

    def sum(self) -> Node:
        """Products added and subtracted."""
        return self.chain(("+", "-"), lambda: self.chain(("*", "/"), self.sign))

    def chain(self, signs: tuple[str, ...], part: Callable[[], Node]) -> Node:
        """Numbers joined by signs, from left to right."""
        node = part()
        while sign := self.joint(*signs):
            a, b = self.wanted(node, False, sign.text), self.wanted(part(), False, sign.text)
            node = Arithmetic(a.start, b.end, sign.text, a, b)
        return node

    def sign(self) -> Node:
        """A power with signs in front."""
        token = self.taken("-", "+")
        if token is None:
            return self.power()
        a = self.wanted(self.deeper(token, self.sign), False, token.text)
        return Negative(token.start, a.end, a) if token.text == "-" else replace(a, start=token.start)

    def power(self) -> Node:
        """Binds more tightly than a sign to its left, and from the right: -a ** b ** c is -(a ** (b ** c))."""
        node = self.filtered()
        token = self.taken("**")
        if token is None:
            return node
        a, b = self.wanted(node, False, "**"), self.wanted(self.deeper(token, self.sign), False, "**")
        return Arithmetic(a.start, b.end, "**", a, b)

    def filtered(self) -> Node:
        """An atom with filters behind it."""
        node = self.atom()
        while opening := self.joint("["):
            columns = [one for one in walk(node) if isinstance(one, Column)]
            if not columns:
                self.fail(opening, "a filter belongs behind a column, a function or a parenthesis with columns in it")
            conditions = [self.condition(columns)]
            while self.taken(",", "and"):
                conditions.append(self.condition(columns))
            node = Filtered(node.start, self.need("]").end, node, tuple(conditions))
        return node

    def condition(self, columns: list[Column]) -> Condition:
        """A column of the filtered tables, compared with a value."""
        name, known = self.here, (*WHOLE, *TEXT)
        if name.kind != "name" or name.text not in known:
            if name.text in COLUMNS:
                self.fail(name, f"{name.text} cannot be filtered by, as it has bounds: use one of {', '.join(known)}")
            hint = did_you_mean(name.text, known, otherwise=f"use one of {', '.join(known)}")
            self.fail(name, f"a filter begins with a column, not {name.text or 'the end'!r}: {hint}")
        for column in columns:
            if name.text not in TABLES[COLUMNS[column.name]]:
                self.fail(
                    name, f"{column.name} has no {name.text}: the table {COLUMNS[column.name]} has no such column"
                )
        self.next += 1
        sign = self.taken("=", *COMPARING)
        if sign is None:
            self.fail(self.here, f"{name.text!r} is not compared with anything: write = and a value")
        textual = name.text in TEXT
        if textual and sign.text not in ("=", "==", "!="):
            self.fail(sign, f"{name.text} is text: use = or !=")
        return Condition(name.text, "==" if sign.text == "=" else sign.text, self.value(textual))

    def value(self, textual: bool) -> float | str:
        """What a filter compares with."""
        token = self.here
        if token.kind not in ("name", "number", "text") if textual else token.kind != "number":
            needed = "a name or a text in quotation marks" if textual else "a number"
            self.fail(token, f"{needed} is missing")
        self.next += 1
        return token.text.strip("'\"") if textual else self.number(token)

    def number(self, token: Token) -> float:
        """Its value."""
        value = float(token.text)
        if math.isinf(value):
            self.fail(token, "the number is too large for double precision")
        return value

    def deeper(self, token: Token, part: Callable[[], Node]) -> Node:
        """A part one level further in."""
        self.depth += 1
        if self.depth > DEEPEST:
            self.fail(token, f"it goes more than {DEEPEST} levels deep")
        node = part()
        self.depth -= 1
        return node

    def atom(self) -> Node:
        """A number, a column, a function or a parenthesis."""
        token = self.here
        self.next += 1
        if token.kind == "number":
            return Number(token.start, token.end, self.number(token))
        if token.kind == "text":
            return self.of_method(token)
        if token.kind == "name" and token.text not in WORDS:
            return self.function(token) if self.here.text == "(" else self.column(token)
        if token.kind == "sign" and token.text == "(":
            inner = self.deeper(token, self.either)
            return replace(inner, start=token.start, end=self.need(")").end)
        self.next -= 1
        what = "it ends" if token.kind == "end" else f"there is {token.text!r}"
        self.fail(token, f"{what} where a column, a number or a parenthesis is needed")

    def column(self, token: Token) -> Column:
        """A column of the run that is checked, or METHOD.column."""
        method, _, name = token.text.rpartition(".")
        return self.known_column(token.start, token.end, method or None, name)

    def of_method(self, token: Token) -> Column:
        """A column of a method in quotation marks: "bnp+groupnorm".kappa."""
        if not self.taken("."):
            self.fail(token, "a text in quotation marks is a method: a dot and a column must follow")
        name = self.here
        if name.kind != "name":
            self.fail(name, "a column is missing behind the method")
        self.next += 1
        return self.known_column(token.start, name.end, token.text[1:-1], name.text)

    def known_column(self, start: int, end: int, method: str | None, name: str) -> Column:
        """A column, if there is such a one."""
        where = Token("name", name, end - len(name), end)
        if name not in COLUMNS:
            if name in (*WHOLE, *TEXT):
                self.fail(where, f"{name} says which row it is: use it in a filter, as in kappa[{name} = …]")
            tables = ", ".join(READ)
            hint = did_you_mean(
                name, (*COLUMNS, *AGGREGATES, *POINTWISE), otherwise=f"it has those of the tables {tables}"
            )
            self.fail(where, f"{name!r} is not a column of the log: {hint}")
        return Column(start, end, method, name)

    def function(self, token: Token) -> Call:
        """A function with what it is applied to."""
        known = (*AGGREGATES, *POINTWISE)
        if token.text not in known:
            hint = did_you_mean(token.text, known, otherwise=f"there are {', '.join(known)}")
            self.fail(token, f"{token.text!r} is not a function: {hint}")
        self.need("(")
        a = self.wanted(self.deeper(token, self.either), token.text in OF_TRUTHS, token.text)
        q = 0.5
        if token.text == "quantile":
            self.need(",")
            given = self.here
            if given.kind != "number" or not 0 <= float(given.text) <= 1:
                self.fail(given, "quantile takes a number from 0 to 1 behind the comma, as in quantile(kappa, 0.9)")
            self.next += 1
            q = float(given.text)
        if token.text in AGGREGATES and not any(isinstance(one, Column) for one in walk(a)):
            self.fail(a, f"{token.text} takes columns, and there is none in this")
        return Call(token.start, self.need(")").end, token.text, a, q)

    def check_methods(self, node: Node) -> None:
        """All columns name a method, or none does; and there is a column."""
        columns = [one for one in walk(node) if isinstance(one, Column)]
        if not columns:
            self.fail(node, "it names no column: what it says holds or fails whatever the run")
        bare = [one for one in columns if one.method is None]
        if bare and len(bare) < len(columns):
            other = next(one.method for one in columns if one.method is not None)
            self.fail(bare[0], f"say of which method {bare[0].name} is, as another column is {other}'s")


def methods_of(node: Node) -> tuple[str, ...]:
    """The methods that an expectation names, each once, in their order."""
    found = [one.method for one in walk(node) if isinstance(one, Column) and one.method is not None]
    return tuple(dict.fromkeys(found))
