"""On which line of a TOML file each key is: what `tomllib` reads but does not tell."""

from __future__ import annotations

import re
import tomllib

Path = tuple[str | int, ...]

BLANK = re.compile(r"[ \t]*")
#: What may come between two statements, or two elements of an array.
GAP = re.compile(r"(?:[ \t\r\n]|#[^\n]*)*")
BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")
#: Numbers, dates and truth values; a date may have a space before its time.
BARE_VALUE = re.compile(r"[^,\]}#\r\n]+")
#: The longest quotation marks first.
STRINGS = (
    re.compile(r'"""(?:\\.|[^\\])*?"{3,5}(?!")', re.DOTALL),
    re.compile(r"'''.*?'{3,5}(?!')", re.DOTALL),
    re.compile(r'"(?:\\.|[^"\\])*"'),
    re.compile(r"'[^']*'"),
)


def lines_of(text: str) -> dict[Path, int]:
    r"""The line, from 1, on which each table, key and element of an array first appears.

    Parameters
    ----------
    text
        Valid TOML.

    Returns
    -------
    dict
        By path: names of tables and keys, numbers of elements.

    Examples
    --------
    >>> lines_of("[a]\nb = [\n  1,\n  {c = 2},\n]")
    {('a',): 1, ('a', 'b'): 2, ('a', 'b', 0): 3, ('a', 'b', 1): 4, ('a', 'b', 1, 'c'): 4}
    """
    return Scanner(text).document()


class Scanner:
    """Reads a document once, from the beginning, and looks at nothing but its structure."""

    def __init__(self, text: str) -> None:
        self.text, self.at = text, 0
        self.found: dict[Path, int] = {}
        #: How many tables each array of tables has so far.
        self.tables: dict[Path, int] = {}
        self.line, self.counted = 1, 0

    def document(self) -> dict[Path, int]:
        """All lines."""
        table: Path = ()
        self.skip(GAP)
        while self.at < len(self.text):
            if self.text.startswith("[", self.at):
                table = self.header()
            else:
                self.statement(table)
            self.skip(GAP)
        return self.found

    def header(self) -> Path:
        """The path of ``[table]``, or of the next of ``[[tables]]``."""
        line, several = self.here(), self.text.startswith("[[", self.at)
        self.at += 2 if several else 1
        names = self.key()
        self.at += 2 if several else 1
        path: Path = ()
        for number, name in enumerate(names, 1):
            path = (*path, name)
            self.found.setdefault(path, line)
            if several and number == len(names):
                self.tables[path] = self.tables.get(path, 0) + 1
            if path in self.tables:
                path = (*path, self.tables[path] - 1)
                self.found.setdefault(path, line)
        return path

    def statement(self, table: Path) -> None:
        """``key = value`` in a table."""
        line, path = self.here(), table
        for name in self.key():
            path = (*path, name)
            self.found.setdefault(path, line)
        self.at += 1  # the equals sign
        self.skip(BLANK)
        self.value(path)

    def key(self) -> list[str]:
        """The names of a key, which may have dots; up to what follows it."""
        names = []
        while True:
            self.skip(BLANK)
            if self.text[self.at] in "\"'":
                names.append(tomllib.loads(f"k = {self.string()}")["k"])
            else:
                names.append(self.take(BARE_KEY))
            self.skip(BLANK)
            if not self.text.startswith(".", self.at):
                return names
            self.at += 1

    def value(self, path: Path) -> None:
        """Any value."""
        first = self.text[self.at]
        if first in "\"'":
            self.string()
        elif first == "[":
            self.at += 1
            number = 0
            while not self.ends("]"):
                self.found[*path, number] = self.here()
                self.value((*path, number))
                number += 1
        elif first == "{":
            self.at += 1
            while not self.ends("}"):
                self.statement(path)
        else:
            self.take(BARE_VALUE)

    def ends(self, bracket: str) -> bool:
        """Whether an array or inline table is over; else go to its next element."""
        self.skip(GAP)
        if self.text.startswith(",", self.at):
            self.at += 1
            self.skip(GAP)
        if not self.text.startswith(bracket, self.at):
            return False
        self.at += 1
        return True

    def string(self) -> str:
        """A string as it is written."""
        for kind in STRINGS:
            if match := kind.match(self.text, self.at):
                self.at = match.end()
                return match[0]
        raise ValueError(f"no end of the string on line {self.here()}")

    def take(self, what: re.Pattern[str]) -> str:
        """What a pattern finds here."""
        match = what.match(self.text, self.at)
        if match is None:
            raise ValueError(f"not valid TOML on line {self.here()}")
        self.at = match.end()
        return match[0]

    def skip(self, what: re.Pattern[str]) -> None:
        """Go behind what a pattern finds here, maybe nothing."""
        self.take(what)

    def here(self) -> int:
        """The line of the present position."""
        self.line += self.text.count("\n", self.counted, self.at)
        self.counted = self.at
        return self.line
