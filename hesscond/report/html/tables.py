"""Tables of the page: what is shown of a cell, and what it is sorted by."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from markupsafe import Markup

from hesscond.errors import ConfigError
from hesscond.report.registry import TABLES
from hesscond.report.writing import Cell, Number

if TYPE_CHECKING:
    from hesscond.report.kinds import TableKind
    from hesscond.study.store import StoredRun


@dataclass(frozen=True)
class Shown:
    """A cell: what is shown, and the number it is sorted by; None for text."""

    content: str
    key: str | None


@dataclass(frozen=True)
class Sheet:
    """A table of the page.

    Attributes
    ----------
    name, summary, caption
        Of its kind.
    columns
        Titles, each with whether it holds numbers.
    rows
        Of cells.
    reason
        Why there is none.
    """

    name: str
    summary: str
    caption: str = ""
    columns: tuple[tuple[str, bool], ...] = ()
    rows: tuple[tuple[Shown, ...], ...] = ()
    reason: str = ""


def sheets(runs: Sequence[StoredRun], options: dict[str, Any]) -> list[Sheet]:
    """Every kind of table, those that these runs have nothing for with the reason."""
    return [sheet(kind, runs, options) for kind in TABLES.values()]


def sheet(kind: TableKind, runs: Sequence[StoredRun], options: dict[str, Any]) -> Sheet:
    """One table."""
    try:
        frame = kind.frame(runs, **{key: value for key, value in options.items() if key in kind.options})
    except ConfigError as error:
        return Sheet(kind.name, kind.summary, reason=str(error))
    if frame.empty:
        return Sheet(kind.name, kind.summary, reason="no rows")
    columns = kind.columns(frame)
    rows = tuple(tuple(shown(column.cell(row)) for column in columns) for row in frame.to_dict("records"))
    titles = tuple((column.title, not column.left) for column in columns)
    return Sheet(kind.name, kind.summary, kind.caption, titles, rows)


def shown(cell: Cell) -> Shown:
    """A cell as its format writes it, escaped there; missing numbers are sorted last."""
    key = None if not isinstance(cell, Number) else "" if cell.missing else repr(float(cell.values[0]))
    return Shown(Markup(cell.html), key)
