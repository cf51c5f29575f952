"""The rows that ``hesscond probe`` wrote, read again to be drawn."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from hesscond.errors import ConfigError

if TYPE_CHECKING:
    import pandas as pd

#: What the figure of a probe needs, and of what type.
COLUMNS = {
    "layer": str,
    "rank": int,
    "nullity": int,
    "negative": "Int64",
    "n_params": int,
    "solver": str,
    "resolved": bool,
    "kappa": float,
    "kappa_lower": float,
    "kappa_upper": float,
    "unit": float,
}


def read_rows(path: Path | str) -> pd.DataFrame:
    """A file of ``hesscond probe -o FILE``, as `ProbeResult.to_frame` would have it.

    Parameters
    ----------
    path
        A .json or .csv file.

    Raises
    ------
    ConfigError
        It cannot be read, or is not such a file.
    """
    import pandas as pd

    path = Path(path)
    wrong = f"{path} is not what hesscond probe writes with -o rows.json or -o rows.csv"
    if path.suffix.lower() not in (".json", ".csv"):
        raise ConfigError(wrong)
    try:
        frame = pd.read_csv(path) if path.suffix.lower() == ".csv" else pd.read_json(path, orient="records")
        missing = [name for name in COLUMNS if name not in frame]
        if missing or frame.empty:
            raise ConfigError(f"{wrong}: it has no {', '.join(missing) or 'rows'}")
        # JSON has no infinity: an unresolved κ is null in it
        frame = frame.fillna({"kappa": float("inf"), "kappa_upper": float("inf")})
        return frame.astype(COLUMNS)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror or error}") from None
    except (ValueError, TypeError, AttributeError) as error:
        raise ConfigError(f"{wrong}: {' '.join(str(error).split())}") from None
