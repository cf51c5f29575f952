"""What can be drawn and tabulated from stored runs, by name: the command line and the report only go through these."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hesscond.errors import ConfigError
from hesscond.report.writing import Column, Format, text_table, write_table

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure
    from rich.table import Table

    from hesscond.study.store import StoredRun


def reason_against(check: Callable[..., object], runs: Sequence[StoredRun], options: dict[str, Any]) -> str | None:
    """The sentence of the ConfigError that a check of runs raises; None if it raises none."""
    try:
        check(runs, **options)
    except ConfigError as error:
        return str(error)
    return None


@dataclass(frozen=True)
class FigureKind:
    """A figure that is drawn from stored runs.

    Attributes
    ----------
    name
        On the command line.
    summary
        One line: what is seen; also the text that stands for the picture.
    needs
        What the runs must have.
    draw
        ``draw(runs, page=…, **options)`` returns the figure, or raises a ConfigError with one sentence.
    check
        Of the same arguments but the page: raises that ConfigError without drawing.
    options
        Which of layer and unit it takes.
    """

    name: str
    summary: str
    needs: str
    draw: Callable[..., Figure]
    check: Callable[..., object]
    options: tuple[str, ...] = ()

    def fits(self, runs: Sequence[StoredRun], **options: Any) -> str | None:
        """Why it cannot be drawn from these runs; None if it can."""
        return reason_against(self.check, runs, options)


@dataclass(frozen=True)
class TableKind:
    """A table of stored runs.

    Attributes
    ----------
    name
        On the command line.
    summary
        One line: what its rows are.
    needs
        What the runs must have.
    frame
        ``frame(runs, **options)`` returns one row per row, for programs; or raises a ConfigError with one sentence.
    columns
        ``columns(frame)``: what is shown of it, and how: see `hesscond.report.writing`.
    caption
        Below the table: what the columns are.
    rows
        ``rows(frame)``: the rows that are shown, where they are not those of the frame.
    terminal
        ``terminal(runs, **options)``: a layout for the terminal of its own.
    options
        Which of layer and unit it takes.
    """

    name: str
    summary: str
    needs: str
    frame: Callable[..., pd.DataFrame]
    columns: Callable[[pd.DataFrame], Sequence[Column]]
    caption: str
    options: tuple[str, ...] = ()
    rows: Callable[[pd.DataFrame], pd.DataFrame] | None = None
    terminal: Callable[..., Table] | None = None

    def write(self, runs: Sequence[StoredRun], format: Format, **options: Any) -> str:
        """The table as Markdown, LaTeX, HTML or CSV.

        Raises
        ------
        ConfigError
            There is no such table of these runs, or another format.
        """
        frame = self.frame(runs, **options)
        shown = frame if format == "csv" else self.shown(frame)
        return write_table(shown, self.columns(frame), self.caption, format)

    def print(self, runs: Sequence[StoredRun], **options: Any) -> Table:
        """The table for the terminal.

        Raises
        ------
        ConfigError
            There is no such table of these runs.
        """
        if self.terminal is not None:
            return self.terminal(runs, **options)
        frame = self.frame(runs, **options)
        return text_table(self.shown(frame), self.columns(frame), self.caption)

    def shown(self, frame: pd.DataFrame) -> pd.DataFrame:
        """The rows that are shown of the frame."""
        return frame if self.rows is None else self.rows(frame)

    def fits(self, runs: Sequence[StoredRun], **options: Any) -> str | None:
        """Why there is no such table of these runs; None if there is."""
        return reason_against(self.frame, runs, options)
