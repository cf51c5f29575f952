"""Display of results: columns of a condition number, tables as plain text, for the terminal and in HTML."""

from __future__ import annotations

import html
import math
import re
import textwrap
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
    from rich.table import Table

#: Width in columns if there is no terminal.
WIDE = 240

#: Places where a cell with a name, or with several numbers, may be broken: never inside a word or digits.
NAME_BREAKS = re.compile(r"\s+|(?<=[:/])(?=\S)|(?<=[.,])(?=[^\s\d])|(?<=[-+])(?=[^\W\d])")
NUMBER_BREAKS = re.compile(r"\s+(?=[(…])")
#: Longer words are shown without their middle.
LONGEST_WORD = 30
#: Least width of a caption, in columns of the terminal.
CAPTION = 80
#: Largest number of names that a note lists.
FEW = 4


class TextTable:
    """Table for the terminal that breaks no word and no number.

    If it is wider than the terminal, names continue in the next line, at a blank or behind a sign between their parts;
    if that is not enough, the columns that do not fit follow below, with the first column repeated. Titles with ``">"``
    in front are of numbers, which are aligned to the right; ``rule``: a line below the titles.
    """

    def __init__(self, columns: Sequence[str], *, title: str = "", caption: str = "", rule: bool = True) -> None:
        self.titles = [column.removeprefix(">") for column in columns]
        self.numeric = [column.startswith(">") for column in columns]
        self.title, self.caption, self.rule = title, caption, rule
        self.rows: list[tuple[Sequence[str], bool]] = []

    def add_row(self, *cells: str, end_section: bool = False) -> None:
        """Add a row, with space below it if it ends a section; a cell may have several lines."""
        self.rows.append((["\n".join(map(shown_line, cell.split("\n"))) for cell in cells], end_section))

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Yield the table, or its blocks of columns one below the other."""
        from rich.text import Text

        if self.title:
            yield Text(self.title)
        blocks, width = self.blocks(options.max_width), 0
        for block in blocks:
            loose = sum(block.values()) + 2 * (len(self.titles) - 1) <= options.max_width
            width = max(width, sum(block.values()) + (1 + loose) * (len(block) - 1))
            yield self.drawn(block, gap=1 + loose, last=block is blocks[-1])
        if self.caption:
            # the caption of a narrow table may be wider than the table
            yield Text(textwrap.fill(self.caption, min(options.max_width, max(width, CAPTION))))

    def drawn(self, block: Mapping[int, int], *, gap: int, last: bool) -> Table:
        """Table of the columns of a block at their widths, with ``gap`` blanks between them."""
        from rich import box
        from rich.table import Table
        from rich.text import Text

        # a box has a blank between columns
        right = (0, gap - 1 if self.rule else gap, 0, 0)
        table = Table(show_edge=False, pad_edge=False, padding=right)
        table.box = box.SIMPLE_HEAD if self.rule else None
        for place, width in block.items():
            title = Text(wrapped(self.titles[place], width, NAME_BREAKS))
            table.add_column(title, justify="right" if self.numeric[place] else "left", width=width, no_wrap=True)
        for cells, ends in self.rows:
            table.add_row(*(Text(wrapped(cells[k], w, self.breaks(k))) for k, w in block.items()), end_section=ends)
        if not last:
            table.add_row()
        return table

    def breaks(self, place: int) -> re.Pattern[str]:
        """Pattern of the places where the cells of a column may be broken."""
        return NUMBER_BREAKS if self.numeric[place] else NAME_BREAKS

    def blocks(self, room: int) -> list[dict[int, int]]:
        """Widths of the columns, block by block."""
        least, most = [], []
        for place, title in enumerate(self.titles):
            cells = [cells[place] for cells, _ in self.rows]
            parts = [*NAME_BREAKS.split(title), *(part for cell in cells for part in self.breaks(place).split(cell))]
            least.append(max(len(line) for part in parts for line in part.split("\n")))
            most.append(max(len(line) for text in [title, *cells] for line in text.split("\n")))
        if sum(least) + len(least) - 1 > room:
            # the names are repeated in every block, where they are read best in one piece
            least[0] = max(least[0], min(most[0], room // 2))
        blocks = [[0]]
        for place in range(1, len(least)):
            # a blank between columns
            if len(blocks[-1]) > 1 and sum(least[k] + 1 for k in blocks[-1]) + least[place] > room:
                blocks.append([0])
            blocks[-1].append(place)
        return [shared(room - len(block) + 1, {k: (least[k], most[k]) for k in block}) for block in blocks]


def shared(room: int, needs: Mapping[int, tuple[int, int]]) -> dict[int, int]:
    """Widths of columns between the least and the largest that each needs; spare room is shared out evenly."""
    widths = {place: least for place, (least, _) in needs.items()}
    spare = room - sum(widths.values())
    while spare > 0 and (wanting := [place for place, (_, most) in needs.items() if widths[place] < most]):
        for place in wanting[:spare]:
            widths[place] += 1
        spare -= len(wanting)
    return widths


def wrapped(text: str, width: int, breaks: re.Pattern[str]) -> str:
    """Text in lines no longer than a width, if it can be broken at the given places."""
    lines = []
    for line in text.split("\n"):
        start = end = resume = 0
        for match in [*breaks.finditer(line), None]:
            stop = len(line) if match is None else match.start()
            if stop - start > width and end > start:
                lines.append(line[start:end].rstrip())
                start = resume
            end, resume = stop, len(line) if match is None else match.end()
        lines.append(line[start:])
    return "\n".join(lines)


def listed(names: Sequence[str]) -> str:
    """List of the first few names, and their number if there are more."""
    return ", ".join(names) if len(names) <= FEW else f"{', '.join(names[:FEW])}, … ({len(names)} in all)"


def shown_line(text: str) -> str:
    """Line without control characters, with the middle of very long words left out."""
    line = "".join(c if c.isprintable() else " " for c in text)
    half = LONGEST_WORD // 2
    parts = re.split(f"({NAME_BREAKS.pattern})", line)
    return "".join(part if len(part) <= LONGEST_WORD else f"{part[:half]}…{part[-half + 1 :]}" for part in parts)


def plain_text(table: RenderableType) -> str:
    """Table as text without colours and without a newline at the end."""
    from rich.console import Console

    console = Console(width=WIDE, markup=False, highlight=False, color_system=None)
    with console.capture() as drawn:
        console.print(table)
    return "\n".join(line.rstrip() for line in drawn.get().splitlines())


def html_table(titles: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Table as HTML, in the colours of the page around it; without titles if ``titles`` is empty."""
    import pandas as pd

    frame = pd.DataFrame(list(rows), columns=list(titles) or None)
    with pd.option_context("display.max_colwidth", None):
        return str(frame.to_html(index=False, header=bool(titles), escape=True))


@dataclass(frozen=True)
class Sheet:
    """Table with the lines above and below it."""

    above: Sequence[str]
    table: TextTable | Table
    below: Sequence[str]

    @property
    def text(self) -> str:
        """Plain text."""
        parts = ["\n".join(self.above), plain_text(self.table), "\n".join(self.below)]
        return "\n\n".join(part for part in parts if part)

    @property
    def html(self) -> str:
        """HTML of the sheet, with every line as a paragraph."""
        if isinstance(self.table, TextTable):
            titles, rows = self.table.titles, [list(cells) for cells, _ in self.table.rows]
        else:
            columns = self.table.columns
            titles = [str(column.header) for column in columns] if self.table.show_header else []
            rows = [list(map(str, cells)) for cells in zip(*(column.cells for column in columns), strict=True)]
        lines = self.above, [str(self.table.caption or ""), *self.below]
        above, under = ("".join(f"<p>{html.escape(line)}</p>\n" for line in part if line) for part in lines)
        return f"{above}{html_table(titles, rows)}\n{under}"


class Shown(ABC):
    """Result whose text and HTML are those of a sheet."""

    @abstractmethod
    def sheet(self) -> Sheet:
        """Return the table with the lines around it."""

    def __str__(self) -> str:
        return self.sheet().text

    def _repr_html_(self) -> str:
        return self.sheet().html


#: Columns of κ in the plain parameters by name: the attribute of a `ConditionNumber`, and its type in SQLite.
CONDITION = {
    "rank": ("rank", "INTEGER"),
    "nullity": ("nullity", "INTEGER"),
    "negative": ("counted_negative", "INTEGER"),
    "lambda_max": ("lambda_max", "REAL"),
    "lambda_min": ("lambda_min", "REAL"),
    "kappa": ("value", "REAL"),
    "kappa_lower": ("lower", "REAL"),
    "kappa_upper": ("upper", "REAL"),
    "resolved": ("resolved", "INTEGER"),
    "solver": ("solver", "TEXT"),
}
#: Coordinates other than the plain ones that a log has κ in: those of P from the raw statistics of the samples,
#: whatever the method, and the method's own.
COORDINATES = ("preconditioned", "own")


def ends(kappa: str) -> tuple[str, str, str]:
    """Names of the columns of a κ and of its bounds."""
    return kappa, f"{kappa}_lower", f"{kappa}_upper"


def in_coordinates(name: str, coordinates: str) -> str:
    """Name of a column of `CONDITION` in other coordinates, as ``kappa_own_lower``; none: in the plain parameters."""
    if not coordinates:
        return name
    kappa, bound = (name[:5], name[5:]) if name.startswith("kappa") else (name, "")
    return f"{kappa}_{coordinates}{bound}"


def in_sqlite(*names: str) -> dict[str, str]:
    """SQLite types of columns of `CONDITION`."""
    return {name: CONDITION[name][1] for name in names}


def duration(seconds: float) -> str:
    """Duration in words, from seconds."""
    if math.isnan(seconds):
        return "–"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    return f"{whole // 60} min {whole % 60} s" if whole < 3600 else f"{whole // 3600} h {whole % 3600 // 60} min"
