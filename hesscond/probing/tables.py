"""Tables of the results of a probe, and the notes below them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from decimal import ROUND_CEILING, ROUND_FLOOR, ROUND_HALF_EVEN, Context
from typing import TYPE_CHECKING, Any

from hesscond.sheets import FEW, TextTable, listed

if TYPE_CHECKING:
    import pandas as pd

#: Significant digits of the ends of κ's interval at layer level.
DIGITS = 6


def remark(what: str, frame: pd.DataFrame, unresolved: str = "≥") -> str:
    """Remark on a table: what it shows, and what its signs mean where it has them."""
    parts = [what]
    if (~frame["resolved"].astype(bool) & ~is_zero(frame)).any():
        parts.append(f"{unresolved}: unresolved, the number is a lower bound")
    if (frame["negative"].fillna(0) > 0).any():
        parts.append("neg.: negative eigenvalues, κ is of |λ|")
    return "; ".join(parts)


def layer_frame(frame: pd.DataFrame) -> pd.DataFrame:
    """Table of a probe's results with one row per layer.

    Its columns: units, the number of blocks; whole, whether it is a single one that is no unit; kappa_* over the
    resolved blocks, NaN if there are none; unresolved, the number of the others, of which zero are the zero matrix;
    lower_*, lower bounds of κ of those that are not; rank_* and nullity_*; negative: the number of blocks with negative
    eigenvalues; solvers: the number of blocks of each solver, by name.
    """
    import pandas as pd

    rows = []
    for layer, blocks in frame.groupby("layer", sort=False):
        resolved = blocks["resolved"].astype(bool)
        zero = is_zero(blocks)
        kappa, lower = blocks["kappa"][resolved], blocks["kappa_lower"][~resolved & ~zero]
        rows.append(
            {
                "layer": layer,
                "units": len(blocks),
                "whole": bool(blocks["unit"].isna().all()),
                "n_params": int(blocks["n_params"].iloc[0]),
                **{f"kappa_{how}": float(kappa.agg(how)) for how in ("min", "median", "max")},
                "unresolved": int((~resolved).sum()),
                "zero": int(zero.sum()),
                **{f"lower_{how}": float(lower.agg(how)) for how in ("min", "median", "max")},
                **{
                    f"{what}_{how}": int(blocks[what].agg(how))
                    for what in ("rank", "nullity")
                    for how in ("min", "max")
                },
                "negative": int((blocks["negative"].fillna(0) > 0).sum()),
                "solvers": blocks["solver"][~zero].value_counts().to_dict(),
            }
        )
    return pd.DataFrame(rows)


def unit_table(frame: pd.DataFrame, kinds: Mapping[str, str]) -> TextTable:
    """Table of the condition numbers of every layer's units: least, median and largest, with ranks and nullities."""
    titles = (
        "layer",
        "kind",
        ">units",
        ">params",
        ">κ min",
        ">median",
        ">κ max",
        ">unres.",
        ">rank",
        ">nullity",
        ">neg.",
    )
    table = TextTable(titles, caption=remark("κ and params of one unit, bias included", frame, "≥, unres."))
    for row in layer_frame(frame).to_dict("records"):
        table.add_row(
            row["layer"],
            kinds.get(row["layer"], ""),
            "whole" if row["whole"] else str(row["units"]),
            str(row["n_params"]),
            *kappa_cells(row),
            str(row["unresolved"] - row["zero"]),
            span(row["rank_min"], row["rank_max"]),
            span(row["nullity_min"], row["nullity_max"]),
            str(row["negative"]),
        )
    return table


def layer_table(frame: pd.DataFrame, kinds: Mapping[str, str]) -> TextTable:
    """Table of the condition number of every whole layer, with its interval."""
    titles = ("layer", "kind", ">params", ">κ", ">[lower, upper]", ">rank", ">nullity", ">neg.")
    what = "κ and an interval that contains it, rounded outwards"
    table = TextTable(titles, caption=remark(what, frame))
    for row in frame.to_dict("records"):
        upper = compact(row["kappa_upper"], DIGITS, ROUND_CEILING)
        interval = f"[{compact(row['kappa_lower'], DIGITS, ROUND_FLOOR)}, {upper}{')' if upper == '∞' else ']'}"
        cells = [kappa_cell(row), "–" if is_zero(row) else interval]
        cells += [count(row[name]) for name in ("rank", "nullity", "negative")]
        table.add_row(row["layer"], kinds.get(row["layer"], ""), str(int(row["n_params"])), *cells)
    return table


def count(number: Any, missing: str = "–") -> str:
    """Text of a whole number; a dash for a number of eigenvalues that were not counted."""
    import pandas as pd

    return missing if pd.isna(number) else str(int(number))


def network_table(frame: pd.DataFrame, kinds: Mapping[str, str]) -> TextTable:
    """Table of every layer and the whole network, with each layer's share in the network's extreme eigenvectors."""
    titles = ("layer", "kind", ">params", ">λ max", ">κ", ">rank", ">nullity", ">neg.", ">top", ">bottom")
    what = "top, bottom: share of a layer in the network's eigenvectors of largest and smallest λ"
    table = TextTable(titles, caption=remark(what, frame))
    records = frame.to_dict("records")
    for number, row in enumerate(records, 1):
        last = number == len(records)
        shares = ["" if last else share(row[name]) for name in ("share_top", "share_bottom")]
        counts = [count(row[name]) for name in ("rank", "nullity", "negative")]
        table.add_row(
            row["layer"],
            kinds.get(row["layer"], "all together" if last else ""),
            str(int(row["n_params"])),
            compact(row["lambda_max"]),
            kappa_cell(row),
            *counts,
            *shares,
            end_section=number == len(records) - 1,
        )
    return table


def share(part: float) -> str:
    """Text of a share of 1 in per cent.

    Examples
    --------
    >>> share(0.123), share(0.004), share(0.99999)
    ('12 %', '<1 %', '100 %')
    """
    if math.isnan(part):
        return "–"
    return "<1 %" if 0 < part < 0.005 else f"{100 * part:.0f} %"


def is_zero(rows: Any) -> Any:
    """Whether the Hessian of a row, or of each row of a frame, is zero; a Hessian without known λ_max is not."""
    largest = rows.get("lambda_max", 0.0)
    return (rows["rank"] == 0) & (largest == largest)


def kappa_cell(row: Mapping[str, Any]) -> str:
    """Text of the κ of one block, or of its lower bound."""
    if is_zero(row):
        return "zero"
    return compact(row["kappa"], 4) if row["resolved"] else at_least(row["kappa_lower"])


def kappa_cells(row: Mapping[str, Any]) -> list[str]:
    """Texts of the least, median and largest κ in a row of `layer_frame`: of resolved units, or bounds if none is."""
    if row["unresolved"] == row["units"]:
        if row["zero"] == row["units"]:
            return ["–", "–", "–"]
        return [at_least(row[f"lower_{how}"]) for how in ("min", "median", "max")]
    bounded = row["unresolved"] > row["zero"]
    largest = at_least(max(row["kappa_max"], row["lower_max"])) if bounded else compact(row["kappa_max"])
    return [compact(row["kappa_min"]), compact(row["kappa_median"]), largest]


def at_least(value: float) -> str:
    """Text of a lower bound, rounded down."""
    return f"≥ {compact(value, rounding=ROUND_FLOOR)}"


def compact(value: float, digits: int = 3, rounding: str = ROUND_HALF_EVEN) -> str:
    """Text of a positive number to ``digits`` significant digits: plain from 0.01 to 1000, else as 1.23e5.

    Examples
    --------
    >>> compact(0.25), compact(188.34), compact(123456.0), compact(123456.0, 4, ROUND_FLOOR), compact(math.inf)
    ('0.250', '188', '1.23e5', '1.234e5', '∞')
    """
    if math.isnan(value):
        return "–"
    if math.isinf(value):
        return "∞"
    rounded = Context(prec=digits, rounding=rounding).create_decimal(value)
    exponent = rounded.adjusted()
    if -3 < exponent < 3:
        return f"{rounded:.{max(digits - 1 - exponent, 0)}f}"
    return f"{rounded.scaleb(-exponent):.{digits - 1}f}e{exponent}"


def span(low: int, high: int) -> str:
    """Text of a range of whole numbers."""
    return str(low) if low == high else f"{low}–{high}"


def in_few_words(groups: Mapping[str, list[str]]) -> Iterator[tuple[str, str]]:
    """Notes that are not empty, and the layers of each; those that most layers have say how many these are, if many."""
    most = max(groups.values(), key=len)
    for note, layers in groups.items():
        many = layers is most and len(layers) > FEW
        if note:
            yield note, f"{'the other' if len(groups) > 1 else 'all'} {len(layers)} layers" if many else listed(layers)


def notes(frame: pd.DataFrame, routes: Mapping[str, str]) -> list[str]:
    """Notes on the layers of ``ProbeResult.to_frame()``: how S and κ were computed, and why κ is unresolved.

    ``routes`` says how S was computed, by layer name. Layers with the same note share a line.
    """
    rows = layer_frame(frame).to_dict("records")
    by_route: dict[str, list[str]] = {}
    by_solvers: dict[str, list[str]] = {}
    for row in rows:
        by_route.setdefault(routes.get(row["layer"], ""), []).append(row["layer"])
        counts = row["solvers"]
        solvers = ", ".join(f"{name} ({n})" if len(counts) > 1 else str(name) for name, n in counts.items())
        by_solvers.setdefault(solvers, []).append(row["layer"])
    lines = [f"S of {layers}: {route}" for route, layers in in_few_words(by_route)]
    lines += [f"κ of {layers}: {solvers}" for solvers, layers in in_few_words(by_solvers)]
    zero = is_zero(frame)
    for (reason, advice, none), blocks in frame[~frame["resolved"]].groupby(["reason", "advice", zero], sort=False):
        what = "zero" if none else "unresolved"
        text = f"{reason}; {advice}" if advice else reason
        lines.append(f"{what}, {len(blocks)} of {len(frame)} κ ({listed(list(blocks['layer'].unique()))}): {text}")
    return lines
