"""A configuration as a flat list of names and values."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any


def flat(config: Mapping[str, Any]) -> dict[str, str | int | float | bool]:
    """Names with dots, and values that are numbers or texts; a list as JSON writes it.

    Examples
    --------
    >>> flat({"name": "mine", "model": {"hidden": [8, 8]}})
    {'name': 'mine', 'model.hidden': '[8, 8]'}
    """
    found: dict[str, str | int | float | bool] = {}
    for key, value in config.items():
        if isinstance(value, Mapping):
            found |= {f"{key}.{name}": own for name, own in flat(value).items()}
        elif isinstance(value, (str, int, float)):
            found[key] = value
        else:
            found[key] = json.dumps(value, ensure_ascii=False, default=str)
    return found
