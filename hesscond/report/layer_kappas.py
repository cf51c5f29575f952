"""κ of each probed layer, one row per method and layer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from hesscond.report.groups import located, probed_groups, quantile
from hesscond.report.layers import own_kappas
from hesscond.report.writing import Column, Number, Words, interval, words

if TYPE_CHECKING:
    import pandas as pd

    from hesscond.study.store import StoredRun

CAPTION = (
    "κ in the method's own coordinates over all probed units, seeds and iterations; 10 %, median, 90 %: quantiles that "
    "take unresolved κ into account, ≥: a lower bound of it; unres.: how many of them are"
)
QUANTILES = {"kappa_q10": 0.1, "kappa_median": 0.5, "kappa_q90": 0.9}


def layer_kappa_frame(runs: Sequence[StoredRun]) -> pd.DataFrame:
    """What the condition numbers of each layer were.

    Parameters
    ----------
    runs
        Of one study.

    Returns
    -------
    pandas.DataFrame
        One row per group of runs and layer: method, layer, data, units, measured (how many κ), unresolved, and
        kappa_q10, kappa_median, kappa_q90: quantiles, NaN where the unresolved leave them open, with ``_lower`` and
        ``_upper``, between which they lie.

    Raises
    ------
    ConfigError
        Nothing was probed; the runs are of different studies.
    """
    import pandas as pd

    rows = []
    for group in probed_groups(runs):
        for layer, probe in own_kappas(group).groupby("layer", sort=False):
            lower, upper = probe["lower"].to_numpy(dtype=float), probe["upper"].to_numpy(dtype=float)
            row: dict[str, Any] = {"method": group.label, "layer": layer, "data": probe["data"].iloc[0]}
            row |= {
                "units": probe["unit"].nunique(),
                "measured": int(np.sum(~np.isnan(lower))),
                "unresolved": int(np.isinf(upper).sum()),
            }
            for name, q in QUANTILES.items():
                row |= located(name, quantile(lower, upper, q))
            rows.append(row)
    return pd.DataFrame(rows)


def layer_kappa_columns(frame: pd.DataFrame) -> list[Column]:
    """As they are shown."""
    titles = {
        "kappa_q10": ("κ 10 %", r"$\kappa$ 10\,\%"),
        "kappa_median": ("median", ""),
        "kappa_q90": ("90 %", r"90\,\%"),
    }
    return [
        words("method", "method", code=True),
        words("layer", "layer", code=True),
        Column("data", lambda row: Words(str(row["data"])), left=True),
        Column("units", lambda row: Number((row["units"],), "d")),
        *(interval(title, name, latex) for name, (title, latex) in titles.items()),
        Column("unres.", lambda row: Number((row["unresolved"], row["measured"]), "d", "{0} / {1}")),
    ]
