"""Runs that differ in the seed alone, taken together, and their κ in the coordinates of their methods."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from hesscond.errors import ConfigError
from hesscond.report.palette import MethodLook, method_looks, varied
from hesscond.report.selection import check_one_study, one_of_each_seed
from hesscond.report.series import finite, is_unresolved, resolved_values

if TYPE_CHECKING:
    import pandas as pd

    from hesscond.study.store import StoredRun


@dataclass(frozen=True)
class Group:
    """Runs of one method with one learning rate and one batch size.

    Attributes
    ----------
    label
        The method, and what tells it from other groups of the same method.
    method
        As ``--method`` says it.
    learning_rate, batch_size
        Of all of them.
    runs
        One of each seed, ascending.
    """

    label: str
    method: str
    learning_rate: float
    batch_size: int
    runs: tuple[StoredRun, ...]

    @property
    def finished(self) -> list[StoredRun]:
        """The runs that went to their end: others have no final loss to compare."""
        return [run for run in self.runs if run.status == "finished"]

    @property
    def diverged(self) -> int:
        """How many of the runs did."""
        return sum(run.status == "diverged" for run in self.runs)

    @property
    def unfinished(self) -> int:
        """How many of the runs go on, or were broken off."""
        return len(self.runs) - len(self.finished) - self.diverged


def groups_of(runs: Sequence[StoredRun]) -> list[Group]:
    """The runs of one study in groups, vanilla first, then by name.

    Raises
    ------
    ConfigError
        No run; runs of different studies; a seed twice.
    """
    check_one_study(runs)
    runs = without_unprobed_twins(runs)
    found: dict[tuple[str, float, int], list[StoredRun]] = {}
    for run in runs:
        found.setdefault(setting_of(run), []).append(run)
    result = []
    for (method, rate, size), members in sorted(found.items(), key=lambda item: (item[0][0] != "vanilla", item[0])):
        same = [key for key in found if key[0] == method]
        label = method
        label += f" · lr {rate:g}" if len({key[1] for key in same}) > 1 else ""
        label += f" · batch {size}" if len({key[2] for key in same}) > 1 else ""
        result.append(Group(label, method, rate, size, tuple(one_of_each_seed(members))))
    return result


def setting_of(run: StoredRun) -> tuple[str, float, int]:
    """Method, learning rate and batch size."""
    return run.method, float(run.config["run"]["learning_rate"]), int(run.config["training"]["batch_size"])


def without_unprobed_twins(runs: Sequence[StoredRun]) -> list[StoredRun]:
    """The runs, less those without probes of which there is the same with probes: ``hesscond compare`` makes both."""
    probed = {(setting_of(run), run.seed) for run in runs if is_probed(run)}
    return [run for run in runs if is_probed(run) or (setting_of(run), run.seed) not in probed]


def probed_groups(runs: Sequence[StoredRun]) -> list[Group]:
    """`groups_of` the runs that probe: not those on which ``hesscond compare`` only tries learning rates.

    Raises
    ------
    ConfigError
        As `groups_of`; none probes.
    """
    probed = [run for run in runs if is_probed(run)]
    if runs and not probed:
        raise ConfigError("none of the runs was probed: train with --probe-every 1 or more")
    return groups_of(probed)


def is_probed(run: StoredRun) -> bool:
    """Whether the run's study probes at all."""
    probe = run.config["probe"]
    return bool(probe.get("every", 1) or probe.get("train_every_epochs", 1))


def looks_of(groups: Sequence[Group]) -> dict[str, MethodLook]:
    """The look of each group by its label: that of its method, further groups of a method in other shades of it."""
    methods = method_looks(group.method for group in groups)
    looks = {group.label: methods[group.method] for group in groups}
    for one, other in pairwise(groups):
        if one.method == other.method:
            place = sum(group.method == other.method for group in groups[: groups.index(other)])
            looks[other.label] = varied(methods[other.method], place - 1)
    return looks


def title_of(groups: Sequence[Group]) -> str:
    """Study and batch sizes."""
    sizes = ", ".join(str(size) for size in sorted({group.batch_size for group in groups}))
    return f"{groups[0].runs[0].config['name']} · batch size {sizes}"


def intervals(probe: pd.DataFrame, quantity: str) -> tuple[np.ndarray, np.ndarray]:
    """Where each κ of the rows lies: at its value, or from its lower bound to infinity if it is unresolved.

    Parameters
    ----------
    probe
        Rows of the probe table.
    quantity
        A key of `RESOLVED`.

    Returns
    -------
    tuple of (rows,) arrays
        Lower and upper ends; NaN where nothing was measured, or the matrix is zero.
    """
    value = resolved_values(probe, quantity).to_numpy(dtype=float)
    open_ended = is_unresolved(probe, quantity).to_numpy(dtype=bool)
    least = finite(probe[f"{quantity}_lower"]).fillna(1.0).to_numpy(dtype=float)
    return np.where(open_ended, np.maximum(least, 1.0), value), np.where(open_ended, np.inf, value)


def quantile(lower: np.ndarray, upper: np.ndarray, q: float) -> tuple[float, float]:
    """Where the q-quantile of values lies that are known to lie in intervals; NaN if there are none.

    It is known, the same twice, wherever the unresolved values are certainly above it or below; the quantile is one
    of the values (no interpolation), so that it is not made of two of which one is unknown.

    Examples
    --------
    >>> quantile(np.array([10.0, 20.0, 5.0]), np.array([10.0, 20.0, np.inf]), 0.5)
    (10.0, 20.0)
    """
    lower, upper = lower[~np.isnan(lower)], upper[~np.isnan(upper)]
    if not len(lower):
        return np.nan, np.nan
    return tuple(float(np.quantile(ends, q, method="inverted_cdf")) for ends in (lower, upper))  # type: ignore[return-value]


def located(name: str, ends: tuple[float, float]) -> dict[str, float]:
    """A quantity that lies between two ends, as columns: NaN unless they are the same, ``_lower`` and ``_upper``."""
    low, high = ends
    return {name: low if low == high else np.nan, f"{name}_lower": low, f"{name}_upper": high}
