"""Tables for the terminal, and as Markdown, LaTeX (booktabs), HTML and CSV.

A table is a frame with `Column`s, each of which makes a `Cell` of a row; a cell can be written in every format.
"""

from __future__ import annotations

import html
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from hesscond.errors import ConfigError
from hesscond.sheets import TextTable

if TYPE_CHECKING:
    import pandas as pd

Format = Literal["text", "md", "latex", "csv", "html"]
FORMATS = ("text", "md", "latex", "csv", "html")
#: Numbers from here on are never written in fixed notation.
LONGEST_FIXED = 1e6
#: Text in place of a missing value.
DASH = "–"
SUPERSCRIPTS = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")
#: LaTeX formulas of characters.
FORMULAS = {
    **{
        "≥": r"\geq",
        "≤": r"\leq",
        "×": r"\times",
        "−": "-",
        "±": r"\pm",
        "→": r"\rightarrow",
        "‖": r"\Vert",
        "∇": r"\nabla",
    },
    **{
        "κ": r"\kappa",
        "λ": r"\lambda",
        "σ": r"\sigma",
        "μ": r"\mu",
        "ᵀ": r"^{\top}",
        "²": "^{2}",
        "*": "^{*}",
        "½": r"\frac{1}{2}",
    },
}
NAMED = {
    "\\": "backslash",
    "~": "asciitilde",
    "^": "asciicircum",
    "<": "less",
    ">": "greater",
    "|": "bar",
    '"': "quotedbl",
}
LATEX_SPECIAL = {
    **{c: f"\\{c}" for c in "{}&%$#_"},
    **{c: rf"\text{name}{{}}" for c, name in NAMED.items()},
    **{"–": "--", "—": "---", "…": r"\ldots{}", "·": r"\textperiodcentered{}"},
    **{c: f"${formula}$" for c, formula in FORMULAS.items()},
}
#: Characters that need no LaTeX package; others are replaced by a question mark.
PLAIN_LATEX = re.compile(r"[\x20-\x7e\u00a1-\u00ac\u00ae-\u00ff]")


def latex_escaped(text: str) -> str:
    r"""Text that LaTeX sets literally: a line break is a space, a character that needs a package a question mark.

    Examples
    --------
    >>> print(latex_escaped("50% of a_1 & κ"))
    50\% of a\_1 \& $\kappa$
    """
    flat = " ".join(text.split())
    return "".join(LATEX_SPECIAL.get(c, c if PLAIN_LATEX.match(c) else "?") for c in flat)


def markdown_escaped(text: str) -> str:
    """Text that Markdown shows as it is, in one cell."""
    return re.sub(r"([\\`*_\[\]<>|~#$&])", r"\\\1", " ".join(text.split()))


@dataclass(frozen=True)
class Words:
    """A cell of text.

    Attributes
    ----------
    words
        The text; control characters become spaces when it is written.
    code
        Whether it is a name that is typed: set in a typewriter face where the format has one.
    """

    words: str
    code: bool = False

    @property
    def text(self) -> str:
        """The cell for the terminal."""
        return "".join(c if c.isprintable() else " " for c in self.words)

    @property
    def md(self) -> str:
        """The cell for Markdown."""
        return markdown_escaped(self.text)

    @property
    def latex(self) -> str:
        """The cell for LaTeX."""
        escaped = latex_escaped(self.text)
        return rf"\texttt{{{escaped}}}" if self.code and escaped else escaped

    @property
    def html(self) -> str:
        """The cell for HTML."""
        escaped = html.escape(self.text)
        return f"<code>{escaped}</code>" if self.code and escaped else escaped


@dataclass(frozen=True)
class Number:
    """A cell of a number, or of several with words between them.

    Attributes
    ----------
    values
        Numbers that are written, in this order; a dash in place of NaN.
    form
        Format specification, as for `format`: ``".2e"``, ``".3f"``, ``"d"``, ``".3g"``.
    pattern
        Text around the values; ``{0}``, ``{1}``, … stand for them.
    lower
        Whether the number is a lower bound.
    strong
        Whether it is set in bold: the best of its row.
    """

    values: tuple[float, ...]
    form: str = ".2e"
    pattern: str = "{0}"
    lower: bool = False
    strong: bool = False

    @property
    def missing(self) -> bool:
        """Whether all values are NaN."""
        return all(value != value for value in self.values)

    def parts(self) -> list[tuple[str, int | None]]:
        """Digits and power of ten of each value."""
        found: list[tuple[str, int | None]] = []
        for value in self.values:
            if value != value:
                found.append((DASH, None))
            elif value == 0 and self.form.endswith("e"):
                found.append(("0", None))
            elif math.isinf(value):
                found.append(("-∞" if value < 0 else "∞", None))
            else:
                # in fixed notation, a loss that blew up would fill the line
                form = ".2e" if self.form.endswith("f") and abs(value) >= LONGEST_FIXED else self.form
                digits, e, power = format(int(value) if form == "d" else value, form).partition("e")
                found.append((digits, int(power) if e else None))
        return found

    @property
    def text(self) -> str:
        """The cell for the terminal: 1.20e+05."""
        if self.missing:
            return DASH
        shown = self.pattern.format(*(d if p is None else f"{d}e{p:+03d}" for d, p in self.parts()))
        return f"{'≥ ' if self.lower else ''}{shown}{'*' if self.strong else ''}"

    @property
    def md(self) -> str:
        """The cell for Markdown: 1.20×10⁵."""
        if self.missing:
            return DASH
        shown = self.pattern.format(
            *(d if p is None else f"{d}×10{str(p).translate(SUPERSCRIPTS)}" for d, p in self.parts())
        )
        shown = f"{'≥ ' if self.lower else ''}{shown}"
        return f"**{shown}**" if self.strong else shown

    @property
    def latex(self) -> str:
        r"""The cell for LaTeX: $1.20\times10^{5}$."""
        if self.missing:
            return "--"
        shown = [d if p is None else rf"{d}\times10^{{{p}}}" for d, p in self.parts()]
        shown = [one.replace("-∞", r"-\infty").replace("∞", r"\infty").replace(DASH, r"\text{--}") for one in shown]
        pattern = self.pattern.replace(" – ", r"\text{ -- }").replace("…", r"\,\ldots\,").replace("±", r"\pm")
        pattern = pattern.replace("≤", r"\leq")
        inside = re.sub(r"\{(\d)\}", lambda match: shown[int(match[1])], pattern)
        inside = (r"\geq " if self.lower else "") + inside
        return rf"$\mathbf{{{inside}}}$" if self.strong else f"${inside}$"

    @property
    def html(self) -> str:
        """The cell for HTML: 1.20×10<sup>5</sup>."""
        if self.missing:
            return DASH
        shown = self.pattern.format(*(d if p is None else f"{d}×10<sup>{p}</sup>" for d, p in self.parts()))
        shown = shown.replace("-", "−")
        shown = f"{'≥ ' if self.lower else ''}{shown}"
        return f"<strong>{shown}</strong>" if self.strong else shown


Cell = Words | Number


@dataclass(frozen=True)
class Column:
    """A column of a table.

    Attributes
    ----------
    title
        Title of the column.
    cell
        Function that makes the cell of a row of the frame.
    latex
        The title as LaTeX; the escaped title if empty.
    left
        Whether it is aligned to the left.
    """

    title: str
    cell: Callable[[Mapping[str, Any]], Cell]
    latex: str = ""
    left: bool = False


def words(title: str, key: str, *, code: bool = False) -> Column:
    """A column of text."""
    return Column(title, lambda row: Words(str(row[key]), code), left=True)


def numbers(title: str, key: str, form: str = ".2e", latex: str = "", factor: float = 1.0) -> Column:
    """A column of numbers, times a factor."""
    return Column(title, lambda row: Number((factor * float(row[key]),), form), latex)


def bounded(title: str, key: str, latex: str = "") -> Column:
    """Column of κ, or where it is NaN, of the lower bound in the frame's column ``KEY_lower``."""

    def cell(row: Mapping[str, Any]) -> Cell:
        value, lower = float(row[key]), float(row[f"{key}_lower"])
        return Number((lower,), lower=True) if math.isnan(value) else Number((value,))

    return Column(title, cell, latex)


def interval(title: str, key: str, latex: str = "") -> Column:
    """Column of κ, or where it is NaN, of the interval from ``KEY_lower`` to ``KEY_upper``."""

    def cell(row: Mapping[str, Any]) -> Cell:
        low, high = float(row[f"{key}_lower"]), float(row[f"{key}_upper"])
        if math.isinf(high):
            return Number((low,), lower=True)
        return Number((low,)) if low == high or math.isnan(low) else Number((low, high), pattern="{0} … {1}")

    return Column(title, cell, latex)


def write_table(frame: pd.DataFrame, columns: Sequence[Column], caption: str, format: Format) -> str:
    """A table in one of the written formats.

    Parameters
    ----------
    frame
        One row per row of the table; CSV has all of its columns, with every digit.
    columns
        Columns that are shown in the other formats.
    format
        ``"md"``, ``"latex"`` (needs ``booktabs``, ``amsmath`` and ``graphicx``), ``"html"`` or ``"csv"``; the terminal
        has `text_table`.

    Raises
    ------
    ConfigError
        Another format.
    """
    if format == "csv":
        return str(frame.to_csv(index=False, lineterminator="\n"))
    if format not in WRITERS:
        raise ConfigError(f"unknown format {format!r}: choose from {', '.join(FORMATS)}")
    rows = [[column.cell(row) for column in columns] for row in frame.to_dict("records")]
    return WRITERS[format](columns, rows, caption)


def write_markdown(columns: Sequence[Column], rows: Sequence[Sequence[Cell]], caption: str) -> str:
    """A table of GitHub-flavoured Markdown."""
    lines = [
        [markdown_escaped(column.title) for column in columns],
        ["---" if column.left else "---:" for column in columns],
        *([cell.md for cell in row] for row in rows),
    ]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines) + (
        f"\n{markdown_escaped(caption)}\n" if caption else ""
    )


def write_latex(columns: Sequence[Column], rows: Sequence[Sequence[Cell]], caption: str) -> str:
    """A booktabs table with its caption, no wider than the text."""
    import pandas as pd

    titles = [column.latex or latex_escaped(column.title) for column in columns]
    frame = pd.DataFrame([[cell.latex for cell in row] for row in rows], columns=titles)
    tabular = frame.to_latex(index=False, column_format="".join("l" if column.left else "r" for column in columns))
    lines = [
        "% \\usepackage{booktabs,amsmath,graphicx}",
        r"\begin{table}",
        r"\centering\small",
        r"\sbox0{%",
        *tabular.strip().splitlines()[:-1],
        r"\end{tabular}}%",
        "% smaller where it is wider than the text",
        r"\ifdim\wd0>\linewidth\resizebox{\linewidth}{!}{\usebox0}\else\usebox0\fi",
        *([rf"\caption{{{latex_escaped(caption)}}}"] if caption else []),
        r"\end{table}",
    ]
    return "\n".join(lines) + "\n"


def write_html(columns: Sequence[Column], rows: Sequence[Sequence[Cell]], caption: str) -> str:
    """HTML table with scoped headers, which pandas does not write; numbers have a class."""
    place = ["" if column.left else ' class="number"' for column in columns]
    tags = [("th", ' scope="row"'), *[("td", "")] * (len(columns) - 1)]
    head = "".join(f'<th scope="col"{at}>{html.escape(c.title)}</th>' for c, at in zip(columns, place, strict=True))
    lines = [
        "".join(
            f"<{tag}{scope}{at}>{cell.html}</{tag}>" for cell, at, (tag, scope) in zip(row, place, tags, strict=True)
        )
        for row in rows
    ]
    above = f"<caption>{html.escape(caption)}</caption>\n" if caption else ""
    body = "".join(f"<tr>{line}</tr>\n" for line in lines)
    return f"<table>\n{above}<thead>\n<tr>{head}</tr>\n</thead>\n<tbody>\n{body}</tbody>\n</table>\n"


WRITERS: dict[str, Callable[[Sequence[Column], Sequence[Sequence[Cell]], str], str]] = {
    "md": write_markdown,
    "latex": write_latex,
    "html": write_html,
}


def text_table(frame: pd.DataFrame, columns: Sequence[Column], caption: str) -> TextTable:
    """A table for the terminal."""
    table = TextTable([column.title if column.left else f">{column.title}" for column in columns], caption=caption)
    for row in frame.to_dict("records"):
        table.add_row(*(column.cell(row).text for column in columns))
    return table


def duration(seconds: float) -> str:
    """Duration in words, from seconds.

    Examples
    --------
    >>> duration(42.0), duration(130.0), duration(4000.0)
    ('42 s', '2 min 10 s', '1 h 6 min')
    """
    if math.isnan(seconds):
        return "–"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    return f"{whole // 60} min {whole % 60} s" if whole < 3600 else f"{whole // 3600} h {whole % 3600 // 60} min"
