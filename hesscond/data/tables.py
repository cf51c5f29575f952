"""Tables of the user's: a CSV file with a target column."""

from __future__ import annotations

import hashlib
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from hesscond.data import dataset, sources
from hesscond.data.files import DIGITS
from hesscond.errors import ConfigError

if TYPE_CHECKING:
    import pandas as pd


@lru_cache(maxsize=4)
def load_table(
    *, file: str = "", target: str = "", columns: str = "", values: bool = False, test: float = 0.2, seed: int = 0
) -> dataset.Dataset:
    """Rows of a CSV file with a header, split at random into training and test samples.

    ``file``: a path, or one below ``$HESSCOND_DATA_DIR``. ``target``: column to predict; "" is the last one. Words and
    whole numbers in it are classes, other numbers values; ``values = true`` takes whole numbers as values too.
    ``columns``: inputs, as "age,height"; "" is all others. ``test``: share of the rows that are test samples.
    """
    import pandas as pd

    if not file:
        raise ConfigError('csv needs a file: write file = "data.csv" in [data]')
    path = sources.file_of_yours(file)
    try:
        content = path.read_bytes()
        frame = pd.read_csv(path, skipinitialspace=True)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read as CSV: {error}") from None
    target = target or str(frame.columns[-1])
    inputs = [name.strip() for name in columns.split(",") if name.strip()]
    inputs = inputs or [str(name) for name in frame.columns if name != target]
    for name in (target, *inputs):
        if name not in frame.columns:
            raise ConfigError(f"{path} has no column {name!r}: it has {', '.join(map(str, frame.columns))}")
        if (missing := int(frame[name].isna().sum())) > 0:
            raise ConfigError(f"column {name!r} of {path} has {missing} empty cells: fill or remove these rows")
    for name in inputs:
        if not pd.api.types.is_numeric_dtype(frame[name]):
            raise ConfigError(f"column {name!r} of {path} is not numeric: encode it, or name others by columns = …")
    if target in inputs:
        raise ConfigError(f"column {target!r} of {path} is the target, and cannot be an input")
    targets = targets_of(frame[target], path, values=values)
    if not 0 < test < 1 or not 0 < (tests := round(test * len(frame))) < len(frame):
        raise ConfigError(f"test = {test} leaves no training or no test samples of {len(frame)} rows")
    order = np.random.default_rng(seed).permutation(len(frame))
    X, rows = frame[inputs].to_numpy(dtype=np.float32), (order[tests:], order[:tests])
    arrays = [part for indices in rows for part in (X[indices], targets[indices])]
    source = f"{path} (md5 {hashlib.md5(content, usedforsecurity=False).hexdigest()[:DIGITS]})"
    return dataset.of_arrays("csv", arrays, source)


def targets_of(column: pd.Series, path: Path, *, values: bool) -> np.ndarray:
    """Values of a column, or classes of its words and whole numbers unless these are ``values``."""
    import pandas as pd

    if pd.api.types.is_float_dtype(column) or (values and pd.api.types.is_numeric_dtype(column)):
        return column.to_numpy(dtype=np.float32)
    if values:
        raise ConfigError(f"column {column.name!r} of {path} has words, which are no values: leave values = true out")
    return pd.factorize(column, sort=True)[0].astype(np.int64)


sources.register(sources.Generated("csv", load_table, lambda options: load_table(**options).form))
