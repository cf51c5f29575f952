"""Output of the commands: the two streams, exit codes, rows as JSON, cited papers, and a sign of life."""

from __future__ import annotations

import json
import re
import shlex
import textwrap
import tomllib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from itertools import groupby
from threading import Event, Thread, Timer
from typing import Annotated, Any, Protocol

import typer
from rich.console import Console, RenderableType
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.text import Text

from hesscond.runs import printable
from hesscond.sheets import TextTable, duration, plain_text

DIVERGED = 1
#: An expectation is not met, a true statement is violated, or a check of this machine failed.
UNMET = 1
BAD_USE = 2
INTERRUPTED = 130

# no markup: a path or a name from a file may contain square brackets
stdout = Console(markup=False, highlight=False)
stderr = Console(stderr=True, markup=False, highlight=False)

#: Seconds before `sign_of_life` shows anything in a terminal, and between two of its lines elsewhere.
PATIENCE, BEAT = 1.0, 30.0

#: Columns of its bar.
BAR = 12

#: The longest line of prose.
LINE = 100

#: Arguments of `hesscond.probe` that are options of the command, with a value or a list of names.
OPTION = re.compile(
    r"\b(level|layers|units|memory|products|dtype|rtol)=(?:torch\.)?(\[(?:'[^']*'(?:, )?)+\]|'[^']*'|\w*)"
)

#: A word that is underlined, as numpydoc has its sections.
SECTION = re.compile(r"^(\w[\w ]*)\n-{3,}$", re.MULTILINE)

#: Sections of a method's docstring that are of use to programs only.
FOR_PROGRAMS = ("Raises", "Examples")


def print_table(table: RenderableType) -> None:
    """Print a table; a pipe has no width, and rich would take 80 columns and fold what a script looks for."""
    if stdout.is_terminal:
        stdout.print(table)
        return
    stdout.out(plain_text(table))


@dataclass(frozen=True)
class Paper:
    """A paper, a book or a lecture; ``cited``: words with which sources cite it, ``venue`` includes the year."""

    group: str
    cited: tuple[str, ...]
    authors: str
    title: str
    venue: str
    url: str = ""
    about: str = ""

    def __str__(self) -> str:
        """Return the reference in one line."""
        end = f", {self.url}" if self.url else ""
        return f"{self.authors}: {self.title}. {self.venue}{end}"


@cache
def papers() -> tuple[Paper, ...]:
    """All papers, in the order of the file."""
    text = files("hesscond.commands").joinpath("papers.toml").read_text(encoding="utf-8")
    return tuple(Paper(**(entry | {"cited": tuple(entry["cited"])})) for entry in tomllib.loads(text)["paper"])


@cache
def citations(source: str) -> tuple[tuple[str, Paper], ...]:
    """Papers that a source names, each with the words that name it, in their order."""
    known = {words: paper for paper in papers() for words in paper.cited}
    # the longest first: the name of one paper may be part of that of another
    names = "|".join(re.escape(words) for words in sorted(known, key=len, reverse=True))
    mentions = dict.fromkeys(re.findall(rf"\b(?:{names})(?!\w)", source))
    return tuple((words, known[words]) for words in mentions)


def print_source(source: str) -> None:
    """Print a source, and each of its papers in full."""
    print_prose(source, "source:  ", " " * 9)
    for _, paper in citations(source):
        print_prose(str(paper), " " * 9, " " * 11)


def at_words(text: str, console: Console) -> str:
    """Lines broken between words where a terminal would break them anywhere; a pipe gets each whole."""
    if not console.is_terminal:
        return text
    indents = [line[: len(line) - len(line.lstrip())] for line in text.split("\n")]
    return "\n".join(
        textwrap.fill(line, console.width, subsequent_indent=indent and f"{indent}  ", **UNBROKEN)
        for line, indent in zip(text.split("\n"), indents, strict=True)
    )


def print_line(text: str, console: Console = stdout, style: str = "") -> None:
    """Print a line that is not only a path, `at_words`."""
    console.print(Text(at_words(text, console), style), soft_wrap=True)


def print_prose(text: str, first: str = "", rest: str | None = None) -> None:
    """Print a paragraph broken at the terminal's width, with indents of its first and its further lines."""
    width = min(LINE, stdout.width)
    stdout.print(
        textwrap.fill(text, width, initial_indent=first, subsequent_indent=first if rest is None else rest, **UNBROKEN),
        soft_wrap=True,
    )


#: A name, a path or an address is copied whole.
UNBROKEN: dict[str, Any] = {"break_long_words": False, "break_on_hyphens": False}


def print_docstring(docstring: str) -> None:
    """Print a docstring without its markup and without the sections for programs."""
    head, *sections = SECTION.split(re.sub(r"``?([^`]+)``?", r"\1", docstring))
    print_paragraphs(head)
    for title, body in zip(sections[::2], sections[1::2], strict=True):
        if title not in FOR_PROGRAMS:
            stdout.print(Text(f"\n{title}", style="bold"))
            print_paragraphs(body)


def print_paragraphs(text: str) -> None:
    """Print paragraphs, which are lines of one indentation, as wide as the terminal; literal blocks as they are."""
    literal = False
    lines_of_text = text.strip("\n").splitlines()
    for indent, group in groupby(lines_of_text, lambda line: len(line) - len(line.lstrip()) if line.strip() else -1):
        words = " ".join(lines := list(group)).strip()
        literal = literal and (indent > 0 or not words)
        if literal or not words:
            print_line("\n".join(lines))
        else:
            print_prose(re.sub(r"::$", ":", " ".join(words.split())), " " * indent)
            literal = words.endswith("::")


def as_options(sentence: str) -> str:
    """Sentence with the options of the command in place of the arguments in Python."""

    def option(match: re.Match[str]) -> str:
        names = ",".join(re.findall("'([^']*)'", match[2])) or match[2].replace("None", "as-is")
        return f"--{match[1]} {shlex.quote(names) if names else ''}".rstrip()

    return OPTION.sub(option, sentence)


class Say(Protocol):
    """Function that reports what is being done, the share of it that is over, and the seconds to go."""

    def __call__(self, text: str, share: float | None = None, left: float | None = None) -> None: ...


@contextmanager
def sign_of_life(label: str) -> Iterator[Say]:
    """A function that says on stderr what is being done if it takes long; in a file or a pipe, a line every 30 s."""
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}", markup=False),
        TextColumn("{task.fields[bar]}{task.fields[left]}", markup=False),
        TimeElapsedColumn(),
    )
    shown = Progress(*columns, console=stderr, transient=True)
    task = shown.add_task(label, total=None, bar="", left="")
    timer, ended = Timer(PATIENCE, shown.start), Event()

    def beat() -> None:
        while not ended.wait(BEAT):
            (now,) = shown.tasks
            stderr.print(f"{now.description}{now.fields['left']}, {duration(now.elapsed or 0)} so far", soft_wrap=True)

    (timer if stderr.is_terminal else Thread(target=beat, daemon=True)).start()

    def say(text: str, share: float | None = None, left: float | None = None) -> None:
        full = "" if share is None else "━" * round(BAR * share)
        bar = "" if share is None else f"{full:╌<{BAR}} {100 * share:.0f} %"
        shown.update(task, description=text, bar=bar, left="" if left is None else f", {duration(left)} left")

    try:
        yield say
    finally:
        ended.set()
        timer.cancel()
        if timer.is_alive():
            timer.join()
        if shown.live.is_started:
            shown.stop()


def complain(sentence: str) -> None:
    """Print an error sentence as one line, whatever it quotes."""
    print_line(f"error: {printable(' '.join(sentence.splitlines()))}", stderr)


def listing(rows: list[dict[str, Any]], as_json: bool, columns: Sequence[str] = ()) -> None:
    """Print rows as JSON, or some of their columns, or all, as a table."""
    if as_json:
        typer.echo(json.dumps(rows, indent=1, default=str))
        return
    chosen = (columns or list(rows[0])) if rows else ["nothing here"]
    drawn = TextTable(chosen, rule=False)
    for row in rows:
        drawn.add_row(*(printable(str(row[column])) for column in chosen))
    print_table(drawn)


AsJson = Annotated[bool, typer.Option("--json", help="Print a list of objects.")]
