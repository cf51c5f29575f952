"""Figures and tables of stored runs by name: the only list that the commands and the HTML report use.

A new one is a module in this package that defines a `FigureKind` or a `TableKind` at its top level; one from elsewhere
is given to ``FIGURES.register`` or ``TABLES.register``, by a module that its package names as an entry point of the
group ``hesscond.figures``. It may use these modules: `selection` picks runs and rows, `series` makes curves of them,
`plotting` draws, `palette` gives a method its colour, and `tables` writes columns in every format. A module is imported
when its figure is drawn.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from hesscond.errors import ConfigError
from hesscond.lazy import Registry
from hesscond.report import tables
from hesscond.report.page import save_both

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


@dataclass(frozen=True)
class FigureKind:
    """A figure of stored runs: its name on the command line, one line on what it shows, and what the runs must have.

    ``order``: place in lists and reports, the lowest first.
    ``draw(runs, page=…, **options)`` returns the figure, or raises a ConfigError with one sentence if there is nothing
    to draw. ``options``: those of layer, unit and quantity it takes.
    """

    name: str
    order: int
    summary: str
    needs: str
    draw: Callable[..., Figure]
    options: tuple[str, ...] = ()


@dataclass(frozen=True)
class TableKind:
    """A table of stored runs: its name on the command line, one line on its rows, and what the runs must have.

    ``order``: place in lists and reports, the lowest first.
    ``frame(runs, **options)`` returns the data for programs, or raises a ConfigError with one sentence;
    ``columns(frame)`` says what is shown of it. ``frame.attrs["title"]`` is a title for the terminal.
    """

    name: str
    order: int
    summary: str
    needs: str
    frame: Callable[..., pd.DataFrame]
    columns: Callable[[pd.DataFrame], Sequence[tables.Column]]
    caption: str | Callable[[pd.DataFrame], str]
    options: tuple[str, ...] = ()

    def write(self, runs: Sequence[StoredRun], format: tables.Format, **options: Any) -> str:
        """The table as Markdown, LaTeX or CSV."""
        frame = self.frame(runs, **options)
        return tables.write_table(frame, self.columns(frame), self.explained(frame), format)

    def print(self, runs: Sequence[StoredRun], **options: Any) -> tables.TextTable:
        """The table for the terminal."""
        frame = self.frame(runs, **options)
        return tables.text_table(frame, self.columns(frame), self.explained(frame), frame.attrs.get("title", ""))

    def explained(self, frame: pd.DataFrame) -> str:
        """The caption of a frame."""
        return self.caption if isinstance(self.caption, str) else self.caption(frame)


#: Packages that bring figures or tables name modules that register them as entry points of this group.
GROUP = "hesscond.figures"
Kind = TypeVar("Kind", bound=FigureKind | TableKind)


class Kinds(Mapping[str, Kind], Generic[Kind]):
    """Mapping of names, ``FILE.py:NAME`` included, to figures or tables of this package and those registered."""

    def __init__(self, kind: type[Kind]) -> None:
        self._kind = kind
        self._registered: Registry[Kind] = Registry(kind.__name__, GROUP, self._checked)

    def _checked(self, name: str, kind: Any) -> Kind:
        if isinstance(kind, self._kind):
            return kind
        raise ConfigError(f"{name} is no hesscond.report.{self._kind.__name__}")

    def register(self, kind: Kind) -> None:
        """Make a figure or a table known by its name."""
        if kind.name in self._places:
            raise ConfigError(f"a {self._kind.__name__} named {kind.name!r} is registered already")
        self._registered.add(kind.name, kind)

    @cached_property
    def _places(self) -> dict[str, tuple[str, str]]:
        """Module and attribute by name, read from the text of the modules: importing them takes matplotlib along."""
        definition = re.compile(rf'^(\w+) = (?:\w+\.)?{self._kind.__name__}\(\s*"([\w-]+)",\s*(\d+),', re.MULTILINE)
        entries = [
            (int(order), name, path.stem, attribute)
            for path in Path(__file__).parent.glob("*.py")
            for attribute, name, order in definition.findall(path.read_text(encoding="utf-8"))
        ]
        return {name: (module, attribute) for _, name, module, attribute in sorted(entries)}

    def __getitem__(self, name: str) -> Kind:
        if name in self._places:
            module, attribute = self._places[name]
            kind: Kind = getattr(import_module(f"hesscond.report.{module}"), attribute)
            return kind
        return self._registered[name]

    def __iter__(self) -> Iterator[str]:
        return iter([*self._places, *sorted(self._registered, key=lambda name: self._registered[name].order)])

    def __len__(self) -> int:
        return len(self._places) + len(self._registered)


FIGURES: Kinds[FigureKind] = Kinds(FigureKind)
TABLES: Kinds[TableKind] = Kinds(TableKind)


def draw_first(names: Sequence[str], runs: Sequence[StoredRun], folder: Path) -> Path | None:
    """Draw the first of some figures that the runs have, as PDF and PNG; its path without ending, if there is one."""
    for name in names:
        try:
            figure = FIGURES[name].draw(runs)
        except ConfigError:
            continue
        save_both(figure, folder / name)
        return folder / name
    return None
