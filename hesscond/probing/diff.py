"""Results of several probes side by side, with the ratios of their condition numbers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from decimal import ROUND_CEILING
from typing import TYPE_CHECKING, Any

import numpy as np

from hesscond.errors import ConfigError
from hesscond.probing import tables
from hesscond.probing.results import LayerResult, ProbeResult
from hesscond.sheets import Sheet, Shown, TextTable, ends, in_coordinates

if TYPE_CHECKING:
    import pandas as pd

#: Columns that say which Hessian a row is of, and those that are set side by side.
PLACE = ["layer", "unit"]
COMPARED = [*ends("kappa"), "resolved", "rank", "nullity", "negative", "lambda_max", "lambda_min"]
#: Most rows of the printed table.
ROWS = 20
#: Notes below the table, by the marks that they are about.
MARKS = {"≥≤": "≥, ≤: a bound, as a κ is unresolved", "–": "–: no bound, or no such Hessian"}


@dataclass(frozen=True, repr=False)
class Diff(Shown):
    """Condition numbers of the same Hessians in several probes.

    `str` and notebooks show the rows whose κ grew most.

    Attributes
    ----------
    names
        Name of each probe.
    frame
        One row per Hessian, as in `to_frame`.
    """

    names: tuple[str, ...]
    frame: pd.DataFrame

    def __repr__(self) -> str:
        return f"<Diff of {', '.join(self.names)}: {len(self.frame)} Hessians>"

    def to_frame(self) -> pd.DataFrame:
        """Table with one row per Hessian, those whose κ grew most first.

        Returns
        -------
        pandas.DataFrame
            layer, unit; kappa_NAME, kappa_NAME_lower, kappa_NAME_upper, resolved_NAME, rank_NAME, nullity_NAME,
            negative_NAME, lambda_max_NAME and lambda_min_NAME of each probe, missing where it has no such Hessian;
            ratio_NAME, ratio_NAME_lower and ratio_NAME_upper of each probe but the first: κ divided by κ of the first
            probe, NaN if one is unresolved, and the interval that it lies in.
        """
        return self.frame.copy()

    def sheet(self) -> Sheet:
        first, *others = self.names
        titles = ["layer", "unit", *(f">κ {name}" for name in self.names)]
        titles += [f">{name}/{first}" for name in others]
        rows = []
        for row in self.frame.head(ROWS).to_dict("records"):
            cells = [str(row["layer"]), tables.count(row["unit"], "")]
            cells += [kappa_of(row, name) for name in self.names]
            cells += [ratio_of(row, name) for name in others]
            rows.append([*cells, *(tables.count(row[in_coordinates("rank", name)]) for name in self.names)])
        notes = [f"{left} more rows have smaller ratios"] if (left := len(self.frame) - ROWS) > 0 else []
        shown = {letter for row in rows for cell in row[2:] for letter in cell}
        notes += [note for marks, note in MARKS.items() if shown & set(marks)]
        table = TextTable([*titles, *(f">rank {name}" for name in self.names)], caption="; ".join(notes))
        for cells in rows:
            table.add_row(*cells)
        return Sheet([], table, [])


def kappa_of(row: dict[str, Any], name: str) -> str:
    """Text of κ of one probe in a row of `Diff.frame`."""
    values = {key: row[in_coordinates(key, name)] for key in COMPARED}
    return "–" if values["rank"] != values["rank"] else tables.kappa_cell(values)


def ratio_of(row: dict[str, Any], name: str) -> str:
    """Text of the ratio of one probe in a row of `Diff.frame`, or of its bound."""
    ratio, lower, upper = (row[column] for column in ratio_columns(name))
    if ratio == ratio:
        return tables.compact(ratio)
    if lower > 0:
        return tables.at_least(lower)
    return f"≤ {tables.compact(upper, rounding=ROUND_CEILING)}" if upper < math.inf else "–"


def ratio_columns(name: str) -> list[str]:
    """Columns of a ratio and its bounds."""
    return [f"ratio_{name}", f"ratio_{name}_lower", f"ratio_{name}_upper"]


def diff(*results: ProbeResult | LayerResult | pd.DataFrame, names: Sequence[str] | None = None) -> Diff:
    """Set the condition numbers of several probes side by side, with their ratios.

    Parameters
    ----------
    results
        At least two results of `hesscond.probe` (of one model at several times, in several coordinates, …), or their
        frames; Hessians are matched by layer and unit.
    names
        Name of each; by default A, B, ….

    Returns
    -------
    Diff
        Rows whose κ grew most first.

    Raises
    ------
    ConfigError
        Fewer than two results, or names that are not one for each; a frame without the columns of
        `ProbeResult.to_frame`; no Hessian in common.

    Examples
    --------
    >>> import hesscond, torch
    >>> from torch import nn
    >>> _ = torch.manual_seed(0)
    >>> model, batch = nn.Linear(4, 1), (torch.randn(50, 4) * torch.tensor([1.0, 10, 100, 1000]), torch.randn(50, 1))
    >>> plain = hesscond.probe(model, nn.MSELoss(), batch)
    >>> bnp = hesscond.probe(model, nn.MSELoss(), batch, method="bnp")
    >>> diff(plain, bnp, names=["plain", "bnp"]).to_frame()["ratio_bnp"].round(8)
    0    0.000002
    Name: ratio_bnp, dtype: float64
    """
    import pandas as pd

    if len(results) < 2:
        raise ConfigError(f"a diff takes two results or more, not {len(results)}")
    names = [chr(ord("A") + number) for number in range(len(results))] if names is None else list(names)
    if len(names) != len(results) or len(set(names)) < len(names):
        raise ConfigError(f"give each of the {len(results)} results a name of its own, not {names}")
    frames = [frame_of(result, name) for result, name in zip(results, names, strict=True)]
    joint = frames[0].merge(frames[1], on=PLACE, how="inner")
    if joint.empty:
        some = [
            f"{'units of ' if frame['unit'].notna().any() else ''}{', '.join(frame['layer'].unique()[:4])}"
            for frame in frames[:2]
        ]
        raise ConfigError(
            f"{names[0]} ({some[0]}) and {names[1]} ({some[1]}) have no Hessian in common: probe both with the same "
            "level= and layers="
        )
    whole = frames[0]
    for frame in frames[1:]:
        whole = whole.merge(frame, on=PLACE, how="outer", sort=False)
    first = names[0]
    for name in names[1:]:
        columns, base = ([in_coordinates(k, n) for k in COMPARED] for n in (name, first))
        with np.errstate(all="ignore"):
            lower = np.nextafter(whole[columns[1]] / whole[base[2]], 0.0)
            upper = np.nextafter(whole[columns[2]] / whole[base[1]], math.inf)
            both = whole[columns[3]].eq(True) & whole[base[3]].eq(True)
            ratio = (whole[columns[0]] / whole[base[0]]).where(both)
        # κ ≥ 1, so that a bound of 0 or ∞ says nothing
        whole[ratio_columns(name)] = pd.concat([ratio, lower, upper], axis=1).to_numpy(dtype=float)
    worst = whole[[ratio_columns(name)[1] for name in names[1:]]].max(axis=1)
    return Diff(tuple(names), whole.loc[worst.sort_values(ascending=False, kind="stable").index].reset_index(drop=True))


def frame_of(result: ProbeResult | LayerResult | pd.DataFrame, name: str) -> pd.DataFrame:
    """Columns of a result that are compared, under the names that they have in a `Diff`."""
    frame = result.to_frame() if isinstance(result, ProbeResult | LayerResult) else result
    missing = [column for column in [*PLACE, *COMPARED] if column not in getattr(frame, "columns", ())]
    if missing:
        raise ConfigError(f"{name} is no result of a probe: it has no column {missing[0]}")
    if frame["layer"].dtype.kind == "f":
        raise ConfigError(f"{name} has numbers for layers: read it by pandas.read_csv(…, dtype={{'layer': str}})")
    # those of a Sequential are whole numbers, which pandas does not read as text
    frame = frame[[*PLACE, *COMPARED]].astype({"unit": "Int64", "layer": str})
    if frame.duplicated(PLACE).any():
        layer = frame.loc[frame.duplicated(PLACE), "layer"].iloc[0]
        raise ConfigError(f"{name} has several rows of the same Hessian, of layer {layer!r}: give one probe at a time")
    return frame.rename(columns={column: in_coordinates(column, name) for column in COMPARED})
