"""The figures and tables of stored runs, by name: the only list that the commands and the report use.

A new figure is a module with a `FigureKind`, whose ``draw(runs, page=…)`` returns a matplotlib figure, and a line in
`FIGURES` below that says where it is; a table likewise. It may use these modules: `selection` picks runs and rows,
`series` makes curves of them, `axes` draws, `palette` gives a method its colour, and `tables` writes columns in every
format. A module is imported when its figure is drawn.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from hesscond.errors import ConfigError
from hesscond.report.tables import Column, Format, TextTable, text_table, write_table

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

    from hesscond.runs import StoredRun

UNIT = ("layer", "unit")
STUDY = "runs of one study"
PROBED = "runs of one study that were probed"
#: Quantities of blocks: `hesscond.report.layers`.
QUANTITIES = ("kappa", "lambda_max", "lambda_min", "trace", "rank", "negative")
#: Statements whose claims compare rates; their figure needs no run.
RATED = ("prec-theorem-1", "bnp-theorem-1")


def reason_against(check: Callable[..., object], runs: Sequence[StoredRun], options: dict[str, Any]) -> str | None:
    """The sentence of the ConfigError that a check of runs raises; None if it raises none."""
    try:
        check(runs, **options)
    except ConfigError as error:
        return str(error)
    return None


@dataclass(frozen=True)
class FigureKind:
    """A figure of stored runs: its name on the command line, one line on what it shows, and what the runs must have.

    ``draw(runs, page=…, **options)`` returns the figure, or raises a ConfigError with one sentence, as ``check`` with
    the same arguments except the page does without drawing. ``options``: those of layer, unit and quantity it takes.
    """

    name: str
    summary: str
    needs: str
    draw: Callable[..., Figure]
    check: Callable[..., object]
    options: tuple[str, ...] = ()

    def fits(self, runs: Sequence[StoredRun], **options: Any) -> str | None:
        """Reason why it cannot be drawn from these runs; None if it can."""
        return reason_against(self.check, runs, options)


@dataclass(frozen=True)
class TableKind:
    """A table of stored runs: its name on the command line, one line on its rows, and what the runs must have.

    ``frame(runs, **options)`` returns the data for programs, or raises a ConfigError with one sentence;
    ``columns(frame)`` says what is shown of it; ``terminal(runs, **options)`` is a separate layout for the terminal.
    """

    name: str
    summary: str
    needs: str
    frame: Callable[..., pd.DataFrame]
    columns: Callable[[pd.DataFrame], Sequence[Column]]
    caption: str | Callable[[pd.DataFrame], str]
    options: tuple[str, ...] = ()
    terminal: Callable[..., TextTable] | None = None

    def write(self, runs: Sequence[StoredRun], format: Format, **options: Any) -> str:
        """The table as Markdown, LaTeX or CSV."""
        frame = self.frame(runs, **options)
        return write_table(frame, self.columns(frame), self.explained(frame), format)

    def print(self, runs: Sequence[StoredRun], **options: Any) -> TextTable:
        """The table for the terminal."""
        if self.terminal is not None:
            return self.terminal(runs, **options)
        frame = self.frame(runs, **options)
        return text_table(frame, self.columns(frame), self.explained(frame))

    def explained(self, frame: pd.DataFrame) -> str:
        """The caption of a frame."""
        return self.caption if isinstance(self.caption, str) else self.caption(frame)

    def fits(self, runs: Sequence[StoredRun], **options: Any) -> str | None:
        """Reason why these runs have no such table; None if they have one."""
        return reason_against(self.frame, runs, options)


Kind = TypeVar("Kind")


class Kinds(Mapping[str, Kind], Generic[Kind]):
    """Mapping of names to kinds, each imported when it is used from the place that ``MODULE:NAME`` names."""

    def __init__(self, places: Mapping[str, str]) -> None:
        self._places = dict(places)

    def __getitem__(self, name: str) -> Kind:
        module, _, attribute = self._places[name].partition(":")
        found: Kind = getattr(import_module(f"hesscond.report.{module}"), attribute)
        return found

    def __contains__(self, name: object) -> bool:
        return name in self._places

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)


FIGURES: Kinds[FigureKind] = Kinds(
    {
        "equal-loss": "equal_loss:EQUAL_LOSS_FIGURE",
        "conditioning": "curves:CONDITIONING_FIGURE",
        "training": "curves:TRAINING_FIGURE",
        "layers": "layers:LAYERS_FIGURE",
        "heatmap": "layers:HEATMAP_FIGURE",
        "blocks": "layers:BLOCKS_FIGURE",
        "block-bands": "layers:BANDS_FIGURE",
        "gain": "curves:GAIN_FIGURE",
        "spectra": "curves:EIGENVALUES_FIGURE",
        "margins": "margins:MARGINS_FIGURE",
    }
)

TABLES: Kinds[TableKind] = Kinds(
    {
        "summary": "summary:SUMMARY_TABLE",
        "verdict": "verdict:VERDICT_TABLE",
        "seeds": "summary:SEEDS_TABLE",
        "layers": "layers:LAYERS_TABLE",
        "blocks": "layers:BLOCKS_TABLE",
        "statements": "statements:STATEMENTS_TABLE",
    }
)
