"""Tables for the terminal, and as Markdown, LaTeX (booktabs) and CSV: a frame, with columns that make a text of a row.

Every number of a table of runs is written by `number`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from hesscond.errors import ConfigError, did_you_mean
from hesscond.sheets import TextTable

if TYPE_CHECKING:
    import pandas as pd

Format = Literal["text", "md", "latex", "csv"]
FORMATS = ("text", "md", "latex", "csv")
#: Numbers from here on are never written in fixed notation.
LONGEST_FIXED = 1e6
#: Text in place of a missing value.
DASH = "–"
#: Format of a training loss, and what the captions say of it.
LOSS, LAST = "#.3g", "loss: training, mean of the last 10 % of the iterations (at most 100)"
#: End of the caption of a table with lower bounds.
OPEN = "; ≥: a lower bound, unresolved κ leave it open"


def number(value: float, form: str = ".2e") -> str:
    """A number by a format specification, as for `format`; a dash if it is NaN."""
    if math.isnan(value):
        return DASH
    if math.isinf(value):
        return "-∞" if value < 0 else "∞"
    if value == 0 and form.endswith("e"):
        return "0"
    if form == "d":
        return str(int(value))
    # in fixed notation, a loss that blew up would fill the line
    return format(value, ".2e" if form.endswith("f") and abs(value) >= LONGEST_FIXED else form).rstrip(".")


def known(value: float, lower: float) -> str:
    """A κ, or where unresolved ones leave it open the lower bound."""
    return number(value) if math.isnan(lower) or not math.isnan(value) else f"≥ {number(lower)}"


@dataclass(frozen=True)
class Column:
    """A column: its title, the text of its cell in a row of the frame, and whether it is text, aligned to the left."""

    title: str
    cell: Callable[[Mapping[str, Any]], str]
    left: bool = False


def words(title: str, key: str) -> Column:
    """A column of text."""
    return Column(title, lambda row: str(row[key]), left=True)


def numbers(title: str, key: str, form: str = ".2e", factor: float = 1.0) -> Column:
    """A column of numbers, times a factor."""
    return Column(title, lambda row: number(factor * float(row[key]), form))


def bounded(title: str, key: str) -> Column:
    """Column of κ, or where it is NaN, of the lower bound in the frame's column ``KEY_lower``."""
    return Column(title, lambda row: known(float(row[key]), float(row[f"{key}_lower"])))


def write_table(frame: pd.DataFrame, columns: Sequence[Column], caption: str, format: Format) -> str:
    """A table as Markdown or LaTeX (needs ``booktabs``), or the whole frame as CSV."""
    if format == "csv":
        return str(frame.to_csv(index=False, lineterminator="\n"))
    if format not in ("md", "latex"):
        raise ConfigError(f"unknown format {format!r}: {did_you_mean(format, FORMATS)}")
    write = markdown if format == "md" else latex
    return write(columns, [shown_cells(row, columns) for row in frame.to_dict("records")], caption)


SUPERSCRIPTS = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


def shown_cells(row: Mapping[str, Any], columns: Sequence[Column]) -> list[str]:
    """The cells of a row, with 1.20×10⁵ for 1.20e+05."""
    cells = [column.cell(row) for column in columns]
    return [cell if column.left else in_powers(cell) for cell, column in zip(cells, columns, strict=True)]


def in_powers(text: str) -> str:
    """Text with powers of ten in place of exponents."""
    return re.sub(r"(?<=\d)e([+-]\d+)", lambda match: f"×10{str(int(match[1])).translate(SUPERSCRIPTS)}", text)


def markdown(columns: Sequence[Column], rows: Sequence[Sequence[str]], caption: str) -> str:
    """A table of GitHub-flavoured Markdown."""
    lines = [
        [markdown_escaped(column.title) for column in columns],
        ["---" if column.left else "---:" for column in columns],
        *(
            [markdown_escaped(cell) if column.left else cell.replace("*", r"\*") for cell, column in cells]
            for cells in (zip(row, columns, strict=True) for row in rows)
        ),
    ]
    below = f"\n{markdown_escaped(caption)}\n" if caption else ""
    return "".join(f"| {' | '.join(line)} |\n" for line in lines) + below


def markdown_escaped(text: str) -> str:
    """Text that Markdown shows as it is, in one cell."""
    return re.sub(r"([\\`*_\[\]<>|~#$&])", r"\\\1", " ".join(text.split()))


def latex(columns: Sequence[Column], rows: Sequence[Sequence[str]], caption: str) -> str:
    """A booktabs table with its caption."""
    import pandas as pd

    titles = [latex_escaped(column.title) for column in columns]
    frame = pd.DataFrame([[latex_escaped(cell) for cell in row] for row in rows], columns=titles)
    form = "".join("l" if column.left else "r" for column in columns)
    return str(frame.to_latex(index=False, column_format=form, caption=latex_escaped(caption) or None))


#: Formulas of characters that LaTeX does not set in text.
FORMULAS = {
    **{"≥": r"\geq", "≤": r"\leq", "×": r"\times", "−": "-", "±": r"\pm", "∞": r"\infty", "→": r"\rightarrow"},
    **{"κ": r"\kappa", "λ": r"\lambda", "σ": r"\sigma", "μ": r"\mu", "ᵀ": r"^{\top}", "⁺": "^{+}", "½": r"\frac{1}{2}"},
    **{"‖": r"\Vert", "∇": r"\nabla", "*": "^{*}", "<": "<", ">": ">", "|": "|", "\\": r"\backslash", "~": r"\sim"},
}
LATEX = {
    **{c: f"\\{c}" for c in "{}&%$#_"},
    **{"^": r"\textasciicircum{}", '"': r"\textquotedbl{}", "–": "--", "—": "---", "…": r"\ldots{}", "·": r"$\cdot$"},
    **{c: f"${formula}$" for c, formula in FORMULAS.items()},
    **{chr(small): f"$^{{{chr(digit)}}}$" for digit, small in SUPERSCRIPTS.items()},
}
#: Characters that need no LaTeX package; others are replaced by a question mark.
PLAIN_LATEX = re.compile(r"[\x20-\x7e\u00a1-\u00ac\u00ae-\u00ff]")


def latex_escaped(text: str) -> str:
    r"""Text that LaTeX sets literally: a line break is a space, a character that needs a package a question mark."""
    flat = " ".join(text.split())
    escaped = "".join(LATEX.get(c, c if PLAIN_LATEX.match(c) else "?") for c in flat)
    return escaped.replace("}$$^{", "")  # one exponent of several digits


def text_table(frame: pd.DataFrame, columns: Sequence[Column], caption: str, title: str = "") -> TextTable:
    """A table for the terminal."""
    titles = [column.title if column.left else f">{column.title}" for column in columns]
    table = TextTable(titles, title=title, caption=caption)
    for row in frame.to_dict("records"):
        table.add_row(*(column.cell(row) for column in columns))
    return table
