"""Curves from rows of the log: resolved κ and their bounds, running medians, seeds, thinning."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Literal

import numpy as np

from hesscond.sheets import COORDINATES, in_coordinates

if TYPE_CHECKING:
    import pandas as pd

    from hesscond.runs import StoredRun

#: Column that says whether a κ is resolved.
RESOLVED = {in_coordinates("kappa", suffix): in_coordinates("resolved", suffix) for suffix in ("", *COORDINATES)}
#: Column with the rank of the matrix: at rank 0, as for a unit that is never active, there is no κ.
RANK = {in_coordinates("kappa", suffix): in_coordinates("rank", suffix) for suffix in ("", *COORDINATES)}
#: Symbol of κ in the plain coordinates, in those of P from the raw statistics, and in the method's own.
SHOWN = dict(zip(RESOLVED, ("κ(H)", "κ(PᵀHP)", "κ own"), strict=True))


def finite(values: pd.Series) -> pd.Series:
    """The values, NaN where they are infinite."""
    return values.where(np.isfinite(values))


def resolved_values(probe: pd.DataFrame, quantity: str) -> pd.Series:
    """κ where it is resolved, NaN elsewhere; ``quantity`` is a key of `RESOLVED`."""
    return finite(probe[quantity]).where(probe[RESOLVED[quantity]].fillna(False).astype(bool))


def values_of(probe: pd.DataFrame, quantity: str) -> pd.Series:
    """Values of a quantity in each row: of a column, κ where it is resolved, or one of `DERIVED`."""
    if quantity in DERIVED:
        return DERIVED[quantity](probe)
    return resolved_values(probe, quantity) if quantity in RESOLVED else finite(probe[quantity])


def is_unresolved(probe: pd.DataFrame, quantity: str) -> pd.Series:
    """Boolean mask of rows whose κ was measured but not resolved; a zero matrix has no κ to resolve."""
    zero = probe[RANK[quantity]].eq(0).fillna(False).astype(bool)
    measured = probe[RESOLVED[quantity]].notna() & ~zero
    return measured & resolved_values(probe, quantity).isna()


def expected(probe: pd.DataFrame) -> pd.Series:
    """κ(H) / κ(D)², what κ(PᵀHP) is expected to be (BNP, section 3.3), where κ(H) is resolved."""
    return finite(resolved_values(probe, "kappa") / probe["kappa_D"] ** 2)


def gain(probe: pd.DataFrame) -> pd.Series:
    """κ(H) / κ(PᵀHP) where both are resolved, NaN elsewhere."""
    return resolved_values(probe, "kappa") / resolved_values(probe, "kappa_preconditioned")


#: Quantities of several columns, by name.
DERIVED: dict[str, Callable[[pd.DataFrame], pd.Series]] = {
    "expected": expected,
    "gain": gain,
    "relative_gain": lambda probe: gain(probe) / probe["kappa_D"] ** 2,
}


def loss_of(run: StoredRun) -> pd.Series:
    """Training loss by iteration."""
    return finite(run.table("training").set_index("iteration")["loss"])


def is_collapsed(run: StoredRun) -> bool:
    """Whether a run ended with constant outputs: H, which only the bias enters, has κ = 1, which is no merit."""
    if run.status == "diverged":
        return False
    loss = loss_of(run).dropna()
    probe = run.table("probe")
    last = probe[(probe["iteration"] >= 0.9 * probe["iteration"].max()) & (probe["n_params"] > 2)]
    if loss.empty or last["rank"].isna().all():
        return False
    few = max(1, min(100, len(loss) // 10))
    return bool(last["rank"].le(1).all() and loss.tail(few).median() >= 0.9 * loss.iloc[0])


def window_of(iterations: int) -> int:
    """Width in iterations of the running median of a run: an odd number, 2 % of the run and at most 101."""
    return min(101, max(1, iterations // 50) | 1)


def running_median(values: pd.Series, window: int) -> pd.Series:
    """Centred running median over ``window`` iterations; NaN where less than half of a window's rows have a value."""
    if len(values) < 3:
        return values
    spacing = max(1.0, float(np.median(np.diff(values.index))))
    rows = max(1, round(window / spacing)) | 1
    median = values.rolling(rows, center=True, min_periods=1).median()
    share = values.notna().astype(float).rolling(rows, center=True, min_periods=1).mean()
    return median.where(share >= 0.5)


def over_seeds(middle: Literal["median", "mean"], curves: Sequence[pd.Series]) -> pd.DataFrame:
    """Median or mean, low and high of the seeds, a row for each iteration: a mean only where every seed has a value."""
    import pandas as pd

    table = pd.concat(curves, axis=1).sort_index()
    table = table.dropna() if middle == "mean" else table
    columns = {middle: getattr(table, middle)(axis=1), "low": table.min(axis=1), "high": table.max(axis=1)}
    return pd.DataFrame(columns).dropna(how="all")


def intervals(probe: pd.DataFrame, quantity: str) -> tuple[np.ndarray, np.ndarray]:
    """Bounds of a κ (a key of `RESOLVED`) in each row: its value twice, or lower bound and infinity if unresolved."""
    value = resolved_values(probe, quantity).to_numpy(dtype=float)
    open_ended = is_unresolved(probe, quantity).to_numpy(dtype=bool)
    least = finite(probe[f"{quantity}_lower"]).fillna(1.0).to_numpy(dtype=float)
    return np.where(open_ended, np.maximum(least, 1.0), value), np.where(open_ended, np.inf, value)


def quantile(lower: np.ndarray, upper: np.ndarray, q: float) -> tuple[float, float]:
    """Bounds of the q-quantile (one of the values, not interpolated) of values known by their bounds; NaN if none."""
    lower, upper = lower[~np.isnan(lower)], upper[~np.isnan(upper)]
    if not len(lower):
        return np.nan, np.nan
    return tuple(float(np.quantile(ends, q, method="inverted_cdf")) for ends in (lower, upper))  # type: ignore[return-value]


def located(name: str, ends: tuple[float, float]) -> dict[str, float]:
    """Columns of a quantity with two bounds: its value, NaN unless they are equal, ``_lower`` and ``_upper``."""
    low, high = ends
    return {name: low if low == high else np.nan, f"{name}_lower": low, f"{name}_upper": high}


def median_kappa(probe: pd.DataFrame, quantity: str) -> dict[str, float]:
    """Median of a κ over all rows as `located` columns; every table of runs takes it from here."""
    return located(quantity, quantile(*intervals(probe, quantity), 0.5))


def shown_probes(probe: pd.DataFrame) -> pd.DataFrame:
    """Rows that tables take medians over: of mini-batches, or of the training set where no mini-batch was probed."""
    batches = probe[probe["data"] == "batch"]
    return batches if len(batches) else probe


#: κ(PᵀHP) from which the smallest singular value of the normalized features is of the size of their own rounding: u⁻²
#: with float32's unit round-off u = 2⁻²⁴.
FLOAT32_LIMIT = float(2**48)


def rounding_note(runs: Sequence[StoredRun]) -> str:
    """Sentence about probes with more samples than parameters and κ(PᵀHP) above `FLOAT32_LIMIT`; empty if none.

    The bounds of κ hold for the activations as they are. In a float32 network (``precision = "as-trained"``) each is
    rounded, so that features which depend on each other in exact arithmetic are independent by round-off only.
    """
    rounded = probes = 0
    for run in runs:
        if run.config["probe"].get("precision", "as-trained") != "as-trained":
            continue
        rows = run.table("probe").query("samples > n_params")
        kappas = rows["kappa_preconditioned"].to_numpy(dtype=float)
        probes += len(kappas)
        rounded += int(np.sum(np.isfinite(kappas) & (kappas > FLOAT32_LIMIT)))
    if not rounded:
        return ""
    return (
        f"{rounded} of {probes} probes found κ(PᵀHP) above {FLOAT32_LIMIT:.1e}, which with float32 activations "
        '(precision = "as-trained") may be round-off; set precision = "float64" in [probe] to know.'
    )
