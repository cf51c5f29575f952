"""Verdict on the methods of a study: their κ at equal training loss, and κ before and after P at the same weights."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from hesscond.report import registry, selection, series, tables

if TYPE_CHECKING:
    import pandas as pd

    from hesscond.runs import StoredRun

#: Intervals of loss in which probes are compared: per decade, and in all where the losses span less than two decades.
PER_DECADE, INTERVALS = 10, 16
#: Number of quantiles that represent the probes of one method in one interval.
POINTS = 40
QUARTILES = (0.25, 0.5, 0.75)
SPREAD = ("ratio_q25", "ratio_q75")


@dataclass(frozen=True)
class Probes:
    """Losses and bounds of κ by quantity (infinite above: unresolved) of the probes of one method's runs."""

    loss: np.ndarray
    lower: Mapping[str, np.ndarray]
    upper: Mapping[str, np.ndarray]

    @classmethod
    def of(cls, chosen: selection.Selection, runs: Sequence[StoredRun]) -> Probes:
        """Probes of some runs on mini-batches, or on the training set where no mini-batch was probed."""
        losses: list[np.ndarray] = []
        ends: dict[str, tuple[list[np.ndarray], list[np.ndarray]]] = {quantity: ([], []) for quantity in series.SHOWN}
        for run in runs:
            loss = series.loss_of(run)
            smooth = series.running_median(loss, series.window_of(len(loss))).dropna()
            probe = chosen.probe(run, "batch")
            probe = chosen.probe(run, "train") if probe.empty else probe
            if smooth.empty or probe.empty:
                continue
            losses.append(smooth.reindex(probe.index, method="nearest").to_numpy())
            for quantity, parts in ends.items():
                for part, bounds in zip(parts, series.intervals(probe, quantity), strict=True):
                    part.append(bounds)
        joined = [{q: np.concatenate(parts[side] or [np.zeros(0)]) for q, parts in ends.items()} for side in (0, 1)]
        return cls(np.concatenate(losses or [np.zeros(0)]), *joined)

    def measured(self, quantity: str, low: float = 0.0, high: float = math.inf) -> np.ndarray:
        """Boolean mask of the probes with a value of a quantity, at a loss from ``low`` to ``high``."""
        return (self.loss > 0) & (self.loss >= low) & (self.loss <= high) & ~np.isnan(self.lower[quantity])

    def bins(self, per_decade: float) -> np.ndarray:
        """Index of the interval of loss that each probe is in."""
        return np.floor(per_decade * np.log10(np.where(self.loss > 0, self.loss, np.nan)))


def intervals_per_decade(low: float, high: float) -> float:
    """Number of intervals of loss per decade, where losses reach from ``low`` to ``high``."""
    span = math.log10(high / low)
    return max(PER_DECADE, INTERVALS / span) if span > 0 else PER_DECADE


def at_equal_loss(base: Probes, other: Probes, quantity: str = "kappa_own") -> dict[str, Any]:
    """Ratio κ of ``base`` over κ of ``other`` at equal training loss: of all pairs of probes in intervals of it."""
    comparison: dict[str, Any] = {"loss_low": math.nan, "loss_high": math.nan, "probes": 0, "base_probes": 0}
    comparison |= {"unresolved": 0, "base_unresolved": 0, **dict.fromkeys(("ratio", *SPREAD), (math.nan, math.nan))}
    losses = [probes.loss[probes.measured(quantity)] for probes in (base, other)]
    if not all(map(len, losses)):
        return comparison
    low, high = max(loss.min() for loss in losses), min(loss.max() for loss in losses)
    masks = [probes.measured(quantity, low, high) for probes in (base, other)]
    bins = [probes.bins(intervals_per_decade(low, high)) for probes in (base, other)]
    shared = np.intersect1d(*(indices[mask] for indices, mask in zip(bins, masks, strict=True)))
    if not len(shared):
        return comparison
    comparison |= {"loss_low": float(low), "loss_high": float(high)}
    for prefix, probes, mask in (("base_", base, masks[0]), ("", other, masks[1])):
        comparison |= {
            f"{prefix}probes": int(mask.sum()),
            f"{prefix}unresolved": int(np.isinf(probes.upper[quantity][mask]).sum()),
        }
    ends: tuple[list[np.ndarray], list[np.ndarray]] = ([], [])
    for place in shared:
        inside = [mask & (indices == place) for indices, mask in zip(bins, masks, strict=True)]
        for side, one_end, other_end in ((0, base.lower, other.upper), (1, base.upper, other.lower)):
            over, under = spread_out(one_end[quantity][inside[0]]), spread_out(other_end[quantity][inside[1]])
            ends[side].append(spread_out(np.subtract.outer(np.log(over), np.log(under)).ravel()))
    lower, upper = (np.exp(np.concatenate(side)) for side in ends)
    names = (SPREAD[0], "ratio", SPREAD[1])
    return comparison | {name: series.quantile(lower, upper, q) for name, q in zip(names, QUARTILES, strict=True)}


def spread_out(values: np.ndarray) -> np.ndarray:
    """Quantiles that represent values: `POINTS` of them, however many values there are."""
    return np.quantile(values, (np.arange(POINTS) + 0.5) / POINTS, method="inverted_cdf")


def at_same_weights(probes: Probes, quantity: str) -> tuple[float, float, float]:
    """Quartiles (q25, median, q75) of κ(H) over another κ of the same probes; NaN if half are unresolved."""
    above, below = probes.lower["kappa"], probes.lower[quantity]
    resolved = np.isfinite(probes.upper["kappa"]) & np.isfinite(probes.upper[quantity])
    measured = probes.measured("kappa") & probes.measured(quantity)
    if 2 * (measured & resolved).sum() <= measured.sum():
        return math.nan, math.nan, math.nan
    first, middle, last = np.quantile((above / below)[measured & resolved], QUARTILES)
    return float(first), float(middle), float(last)


def compared_groups(runs: Sequence[StoredRun]) -> tuple[list[tuple[selection.Group, list[StoredRun]]], list[str]]:
    """Groups of runs with those of them that can be compared, the baseline first, and a sentence for each left out."""
    kept, sentences = [], []
    for group in selection.probed_groups(runs):
        # κ of such runs says nothing about their method
        faults = [
            "diverged" if run.status == "diverged" else "collapsed to constant outputs" * series.is_collapsed(run)
            for run in group.runs
        ]
        for fault in dict.fromkeys(filter(None, faults)):
            seeds = f" ({faults.count(fault)} of {len(faults)} runs)" if len(faults) > 1 else ""
            sentences.append(f"{group.label} {fault}{seeds}: its κ is not compared.")
        rest = [run for run, fault in zip(group.runs, faults, strict=True) if not fault]
        if rest:
            kept.append((group, rest))
    kept.sort(key=lambda pair: pair[0].method != "vanilla")
    return kept, sentences


def verdict_frame(runs: Sequence[StoredRun], *, layer: str | None = None, unit: int | None = None) -> pd.DataFrame:
    """Condition numbers of the methods of a study at equal training loss, and at the same weights.

    Parameters
    ----------
    runs
        Runs of one study.
    layer, unit
        Unit whose κ is compared; the first that was probed by default.

    Returns
    -------
    pandas.DataFrame
        One row per method, the baseline (vanilla, or the first method) first: method; baseline; then the columns of
        `at_equal_loss` for κ in the method's own coordinates, each ratio with ``_lower`` and ``_upper`` (NaN in the row
        of the baseline); gain_own, gain_P with ``_q25`` and ``_q75``: κ(H)/κ own and κ(H)/κ(PᵀHP) at the same weights,
        P from the raw statistics of the same samples. ``attrs["left_out"]``: sentences on the methods that are missing,
        since their runs diverged or collapsed.
    """
    import pandas as pd

    chosen = selection.select(runs, layer, unit)
    groups, sentences = compared_groups(runs)
    rows: list[dict[str, Any]] = []
    base: Probes | None = None
    for group, members in groups:
        probes = Probes.of(chosen, members)
        row: dict[str, Any] = {"method": group.label, "baseline": groups[0][0].label}
        comparison = at_equal_loss(probes if base is None else base, probes)
        for name, ends in [(name, comparison.pop(name)) for name in ("ratio", *SPREAD)]:
            comparison |= series.located(name, ends if base is not None else (math.nan, math.nan))
        row |= comparison
        for name, quantity in (("own", "kappa_own"), ("P", "kappa_preconditioned")):
            names = (f"gain_{name}_q25", f"gain_{name}", f"gain_{name}_q75")
            row |= dict(zip(names, at_same_weights(probes, quantity), strict=True))
        rows.append(row)
        base = probes if base is None else base
    frame = pd.DataFrame(rows)
    frame.attrs["left_out"] = sentences
    return frame


def verdict_sentences(
    runs: Sequence[StoredRun], *, layer: str | None = None, unit: int | None = None
) -> tuple[str, ...]:
    """Sentences of the verdict on the methods of a study.

    Parameters
    ----------
    runs, layer, unit
        As for `verdict_frame`.

    Returns
    -------
    tuple of str
        Sentences on κ at equal training loss, one for each method other than the baseline; on κ at the same weights;
        and on which of the two the theorems are about. Empty if nothing was probed.
    """
    if not any(len(run.table("probe")) for run in runs):
        return ()
    return sentences_of(verdict_frame(runs, layer=layer, unit=unit))


def sentences_of(frame: pd.DataFrame) -> tuple[str, ...]:
    """`verdict_sentences` of a frame."""
    rows = frame.to_dict("records")
    sentences = [equal_loss_sentence(row) for row in rows[1:]]
    gains = [gain_clause(row, "own", f"{row['method']}'s own coordinates make κ(H)") for row in rows]
    if any(row["method"].startswith("bnp") for row in rows):
        gains += [gain_clause(row, "P", "BNP's P makes it") for row in rows[:1]]
    if any(gains):
        sentences.append(f"At the same weights, {'; '.join(filter(None, gains))}.")
    if len(rows) > 1:
        sentences.append(
            "Theorems compare the same weights; training meets the κ of its own path, which changes with the loss: "
            "medians over whole runs do not compare methods."
        )
    return (*sentences, *frame.attrs["left_out"])


def equal_loss_sentence(row: Mapping[str, Any]) -> str:
    """Sentence that compares κ of a method with that of the baseline at equal training loss."""
    method, baseline = row["method"], row["baseline"]
    if math.isnan(row["loss_low"]):
        return f"{method} and {baseline} were never probed at the same training loss: their κ cannot be compared."
    probes = row["probes"] + row["base_probes"]
    counted = f"{row['base_probes']:,} and {row['probes']:,} probes"
    open_ = row["unresolved"] + row["base_unresolved"]
    counted += f", {open_:,} of {probes:,} unresolved" if open_ else ""
    where = f"At equal training loss ({row['loss_low']:.2g} to {row['loss_high']:.2g})"
    ends = {name: (row[f"{name}_lower"], row[f"{name}_upper"]) for name in ("ratio", *SPREAD)}
    (low, high), (first, _), (_, last) = ends["ratio"], ends["ratio_q25"], ends["ratio_q75"]
    subject = f"κ in {method}'s own coordinates"
    spread = f"({quartiles(first, last)}; {counted})"
    if low < 1 < high:
        return f"{where}, too many κ are unresolved to compare {method} with {baseline} ({counted})."
    if first > 0.99 and last < 1.01:
        return f"{where}, {subject} equals {baseline}'s to 1 % ({counted})."
    if first > 1 or last < 1:
        bound = "" if low == high else "at least "
        return f"{where}, {subject} is {bound}{factor(low if first > 1 else high)} than {baseline}'s {spread}."
    return f"{where}, {subject} is not clearly different from {baseline}'s {spread}."


def gain_clause(row: Mapping[str, Any], name: str, start: str) -> str:
    """Clause on the change of κ(H) by coordinates in a method's run; empty if unknown, or if they are plain."""
    gain, first, last = row[f"gain_{name}"], row[f"gain_{name}_q25"], row[f"gain_{name}_q75"]
    if math.isnan(gain) or (first, last) == (1.0, 1.0):
        return ""
    if first > 0.99 and last < 1.01:
        return f"{start} less than 1 % different in {row['method']}'s run"
    return f"{start} {factor(gain)} in {row['method']}'s run ({quartiles(first, last)})"


def factor(ratio: float) -> str:
    """Ratio of κ above one as *times smaller*, below one as *times larger*."""
    size, side = times(max(ratio, 1 / ratio)), "smaller" if ratio >= 1 else "larger"
    return f"{'less than 1.01' if size == '1' else size} times {side}"


def times(value: float) -> str:
    """A factor with two significant digits, near one with three."""
    rounded = float(f"{value:.{2 if value >= 1.1 else 3}g}")
    return f"{rounded:.1e}" if rounded >= 1e6 else f"{rounded:,.0f}" if rounded >= 10 else f"{rounded:g}"


def quartiles(low: float, high: float) -> str:
    """Text of the quartiles of ratios of κ; what unresolved values leave open is called unresolved."""
    if low == 0 or not math.isfinite(high):
        known = [factor(end) for end in (low, high) if 0 < end < math.inf]
        return f"quartiles {' and '.join([*known, 'unresolved'])}" if known else "quartiles unresolved"
    if low >= 1 or high <= 1:
        ends = (low, high) if low >= 1 else (1 / high, 1 / low)
        return f"quartiles {times(ends[0])} to {times(ends[1])}"
    return f"quartiles {factor(low)} to {factor(high)}"


def verdict_columns(frame: pd.DataFrame) -> list[tables.Column]:
    """Columns of `verdict_frame` as they are written."""
    return [
        tables.words("method", "method"),
        tables.Column("training loss", loss_range),
        tables.numbers("probes", "probes", "d"),
        tables.Column("κ smaller than baseline's", lambda row: ratio_cell(row, "ratio")),
        tables.Column("κ(H) / κ own", lambda row: ratio_cell(row, "gain_own")),
        tables.Column("κ(H) / κ(PᵀHP)", lambda row: ratio_cell(row, "gain_P")),
    ]


def loss_range(row: Mapping[str, Any]) -> str:
    """Text of the range of loss that a method shares with the baseline; a dash if there is none."""
    low, high = (tables.number(row[name], ".2g") for name in ("loss_low", "loss_high"))
    return low if low == tables.DASH else f"{low} … {high}"


def ratio_cell(row: Mapping[str, Any], name: str) -> str:
    """Text of the median (quartiles) of a ratio; a dash if it is open."""
    median, first, last = (tables.number(float(row[f"{name}{end}"]), ".2g") for end in ("", "_q25", "_q75"))
    return tables.DASH if tables.DASH in (median, first, last) else f"{median} ({first} … {last})"


VERDICT_TABLE = registry.TableKind(
    "verdict",
    20,
    "a row for each method: κ at equal training loss, and at the same weights",
    registry.PROBED,
    verdict_frame,
    verdict_columns,
    lambda frame: " ".join(sentences_of(frame)),
    registry.UNIT,
)
