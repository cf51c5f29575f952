"""Columns of a condition number: the one list of their names, for tables, logs and reports."""

from __future__ import annotations

#: Columns of κ in the plain parameters by name: the attribute of a `ConditionNumber`, and its type in SQLite.
CONDITION = {
    "rank": ("rank", "INTEGER"),
    "nullity": ("nullity", "INTEGER"),
    "negative": ("counted_negative", "INTEGER"),
    "lambda_max": ("lambda_max", "REAL"),
    "lambda_min": ("lambda_min", "REAL"),
    "kappa": ("value", "REAL"),
    "kappa_lower": ("lower", "REAL"),
    "kappa_upper": ("upper", "REAL"),
    "resolved": ("resolved", "INTEGER"),
    "solver": ("solver", "TEXT"),
}
#: Coordinates other than the plain ones that a log has κ in: those of P from the raw statistics of the samples,
#: whatever the method, and the method's own.
COORDINATES = ("preconditioned", "own")


def ends(kappa: str) -> tuple[str, str, str]:
    """Names of the columns of a κ and of its bounds."""
    return kappa, f"{kappa}_lower", f"{kappa}_upper"


def in_coordinates(name: str, coordinates: str) -> str:
    """Name of a column of `CONDITION` in other coordinates; none: in the plain parameters.

    Examples
    --------
    >>> in_coordinates("rank", "own"), in_coordinates("kappa_lower", "own"), in_coordinates("kappa", "")
    ('rank_own', 'kappa_own_lower', 'kappa')
    """
    if not coordinates:
        return name
    kappa, bound = (name[:5], name[5:]) if name.startswith("kappa") else (name, "")
    return f"{kappa}_{coordinates}{bound}"


def in_sqlite(*names: str) -> dict[str, str]:
    """SQLite types of columns of `CONDITION`."""
    return {name: CONDITION[name][1] for name in names}
