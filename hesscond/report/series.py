"""From rows of the log to curves: which κ are resolved, running medians, seeds taken together, thinning."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import pandas as pd

#: Which column says whether a κ is resolved.
RESOLVED = {"kappa": "resolved", "kappa_preconditioned": "resolved_preconditioned", "kappa_own": "resolved_own"}
#: Which column has the rank of the matrix: one of rank 0, of a unit that is never active, has no κ.
RANK = {"kappa": "rank", "kappa_preconditioned": "rank_preconditioned", "kappa_own": "rank_own"}
#: How each is called: in the plain coordinates, in those of P from the raw statistics, in the method's own.
SHOWN = {"kappa": "κ(H)", "kappa_preconditioned": "κ(PᵀHP)", "kappa_own": "κ own"}

#: A curve is thinned to the smallest and largest value in each of so many stretches: more than print shows.
STRETCHES = 400


def finite(values: pd.Series) -> pd.Series:
    """The values, NaN where they are infinite."""
    return values.where(np.isfinite(values))


def resolved_values(probe: pd.DataFrame, quantity: str) -> pd.Series:
    """κ where it is resolved, NaN elsewhere; ``quantity`` is a key of `RESOLVED`."""
    return finite(probe[quantity]).where(probe[RESOLVED[quantity]].fillna(False).astype(bool))


def is_unresolved(probe: pd.DataFrame, quantity: str) -> pd.Series:
    """Where κ was measured but not resolved; a zero matrix has none to resolve."""
    zero = probe[RANK[quantity]].eq(0).fillna(False).astype(bool)
    measured = probe[RESOLVED[quantity]].notna() & ~zero
    return measured & resolved_values(probe, quantity).isna()


def lower_bounds(probe: pd.DataFrame, quantity: str) -> pd.Series:
    """The lower bound of κ at the iterations where κ is not resolved."""
    return finite(probe.loc[is_unresolved(probe, quantity), f"{quantity}_lower"])


def expected(probe: pd.DataFrame) -> pd.Series:
    """κ(H) / κ(D)², what κ(PᵀHP) is expected to be (BNP, section 3.3), where κ(H) is resolved."""
    return finite(resolved_values(probe, "kappa") / probe["kappa_D"] ** 2)


def gain(probe: pd.DataFrame) -> pd.Series:
    """κ(H) / κ(PᵀHP) where both are resolved, NaN elsewhere."""
    return resolved_values(probe, "kappa") / resolved_values(probe, "kappa_preconditioned")


def window_of(iterations: int) -> int:
    """Width in iterations of the running median of a run: an odd number, 2 % of the run and at most 101."""
    return min(101, max(1, iterations // 50) | 1)


def running_median(values: pd.Series, window: int) -> pd.Series:
    """Centred running median of values indexed by iteration.

    Parameters
    ----------
    values
        NaN: no value. The result is NaN where less than half of a window's rows have one.
    window
        In iterations; a table with fewer rows has so many fewer in each window.
    """
    if len(values) < 3:
        return values
    spacing = max(1.0, float(np.median(np.diff(values.index))))
    rows = max(1, round(window / spacing)) | 1
    median = values.rolling(rows, center=True, min_periods=1).median()
    share = values.notna().astype(float).rolling(rows, center=True, min_periods=1).mean()
    return median.where(share >= 0.5)


def across_seeds(curves: Sequence[pd.Series]) -> pd.DataFrame:
    """Columns median, low and high of the seeds' values, one row per iteration that any of them has."""
    import pandas as pd

    table = pd.concat(curves, axis=1).sort_index()
    together = pd.DataFrame({"median": table.median(axis=1), "low": table.min(axis=1), "high": table.max(axis=1)})
    return together.dropna(how="all")


def thinned(values: pd.Series, stretches: int = STRETCHES) -> pd.Series:
    """The values themselves, or the smallest and largest of each of so many stretches if there are more."""
    if len(values) <= 2 * stretches:
        return values
    keep: list[int] = []
    array = values.to_numpy()
    for stretch in np.array_split(np.arange(len(array)), stretches):
        part = array[stretch]
        if np.isnan(part).all():
            keep.append(int(stretch[0]))
        else:
            keep.extend(sorted({int(stretch[np.nanargmin(part)]), int(stretch[np.nanargmax(part)])}))
    return values.iloc[keep]


def thinned_band(band: pd.DataFrame) -> pd.DataFrame:
    """Columns low and high; the lowest and highest of each stretch if there are more rows than `thinned` keeps."""
    if len(band) <= 2 * STRETCHES:
        return band[["low", "high"]]
    stretch = np.arange(len(band)) * 2 * STRETCHES // len(band)
    groups = band.reset_index(names="iteration").groupby(stretch)
    return groups.agg(iteration=("iteration", "median"), low=("low", "min"), high=("high", "max")).set_index(
        "iteration"
    )


def means_of_stretches(values: pd.Series, width: int) -> pd.Series:
    """Means over so many iterations each, at the middle of them; NaN where one of them is; ends with the values."""
    import pandas as pd

    if width <= 1 or len(values) < width:
        return values
    whole = len(values) // width * width
    rows = values.to_numpy(dtype=float)[:whole].reshape(-1, width)
    places = values.index.to_numpy(dtype=float)[:whole].reshape(-1, width)
    return pd.Series(rows.mean(axis=1), index=pd.Index(places.mean(axis=1), name=values.index.name))


def mean_over_seeds(curves: Sequence[pd.Series]) -> pd.DataFrame:
    """Columns mean, low and high where every seed has a value, one row per iteration: no mean of fewer seeds."""
    import pandas as pd

    table = pd.concat(curves, axis=1).sort_index().dropna()
    return pd.DataFrame({"mean": table.mean(axis=1), "low": table.min(axis=1), "high": table.max(axis=1)})
