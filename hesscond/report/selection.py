"""Which rows of which runs a figure or table shows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

from hesscond.errors import ConfigError

if TYPE_CHECKING:
    import pandas as pd

    from hesscond.study.store import StoredRun


@dataclass(frozen=True)
class Selection:
    """Runs of one study, and the unit of theirs to show.

    Attributes
    ----------
    runs
        In the order given.
    study
        The study's name.
    layer, unit
        Probed in every run.
    probes
        The probe table of each run of `runs`, rows of that unit only.
    """

    runs: tuple[StoredRun, ...]
    study: str
    layer: str
    unit: int
    probes: tuple[pd.DataFrame, ...]

    @property
    def batch_sizes(self) -> tuple[int, ...]:
        """The different batch sizes, ascending."""
        return tuple(sorted({int(run.config["training"]["batch_size"]) for run in self.runs}))

    @property
    def title(self) -> str:
        """Study, layer and unit, batch size."""
        sizes = ", ".join(map(str, self.batch_sizes))
        return f"{self.study} · layer {self.layer}, unit {self.unit} · batch size {sizes}"

    def probe(self, run: StoredRun, data: str) -> pd.DataFrame:
        """Probe rows of the unit over ``data`` ("batch" or "train"), one per iteration, indexed by it."""
        rows = self.rows_of(run)
        rows = rows[rows["data"] == data]
        return rows.drop_duplicates("iteration", keep="last").set_index("iteration")

    def rows_of(self, run: StoredRun) -> pd.DataFrame:
        """All probe rows of the unit."""
        return self.probes[self.runs.index(run)]

    def by_method(self) -> dict[str, list[StoredRun]]:
        """Runs of each method, by seed: those that differ in the seed alone.

        Raises
        ------
        ConfigError
            A method's runs differ in more than the seed, or not even in that; batch sizes differ.
        """
        if len(self.batch_sizes) > 1:
            sizes = ", ".join(map(str, self.batch_sizes))
            raise ConfigError(f"the runs have different batch sizes ({sizes}): draw one figure for each")
        groups: dict[str, list[StoredRun]] = {}
        for run in self.runs:
            groups.setdefault(run.method, []).append(run)
        for method, runs in groups.items():
            rates = sorted({float(run.config["run"]["learning_rate"]) for run in runs})
            if len(rates) > 1:
                shown = ", ".join(f"{rate:g}" for rate in rates)
                raise ConfigError(
                    f"the runs of method {method!r} have different learning rates ({shown}): draw one figure for each"
                )
            groups[method] = one_of_each_seed(runs)
        return dict(sorted(groups.items(), key=lambda item: (item[0] != "vanilla", item[0])))


def one_of_each_seed(runs: Sequence[StoredRun]) -> list[StoredRun]:
    """The runs by seed.

    Raises
    ------
    ConfigError
        Two have the same.
    """
    ordered = sorted(runs, key=lambda run: run.seed)
    for one, other in pairwise(ordered):
        if one.seed == other.seed:
            raise ConfigError(f"{one.folder} and {other.folder} are both {one.label}: give one run of each seed")
    return ordered


def check_one_study(runs: Sequence[StoredRun]) -> None:
    """Refuse no runs, and runs of different studies.

    Raises
    ------
    ConfigError
        They are.
    """
    if not runs:
        raise ConfigError("no runs given: name at least one run folder")
    first = runs[0]
    for run in runs:
        for key in ("name", "data", "model"):
            if run.config[key] != first.config[key]:
                raise ConfigError(
                    f"{first.folder} and {run.folder} come from different studies "
                    f"({key} is {first.config[key]!r} and {run.config[key]!r}): give runs of one study"
                )


def select(runs: Sequence[StoredRun], layer: str | None = None, unit: int | None = None) -> Selection:
    """The runs, checked to be of one study, with the first layer and unit that it probes by default.

    Raises
    ------
    ConfigError
        No run; runs of different studies; a layer or unit that one of them did not probe.
    """
    check_one_study(runs)
    first = runs[0]
    layer = first.config["probe"]["layers"][0] if layer is None else layer
    unit = first.config["probe"]["units"][0] if unit is None else unit
    for run in runs:
        layers, units = run.config["probe"]["layers"], run.config["probe"]["units"]
        if layer not in layers:
            raise ConfigError(f"layer {layer!r} was not probed in {run.folder}: choose from {', '.join(layers)}")
        if unit not in units:
            raise ConfigError(f"unit {unit} was not probed in {run.folder}: choose from {', '.join(map(str, units))}")
    tables = (run.table("probe") for run in runs)
    probes = tuple(table[(table["layer"] == layer) & (table["unit"] == unit)] for table in tables)
    return Selection(tuple(runs), str(first.config["name"]), layer, unit, probes)


def by_method(
    runs: Sequence[StoredRun], *, layer: str | None = None, unit: int | None = None
) -> dict[str, list[StoredRun]]:
    """`Selection.by_method` of runs.

    Raises
    ------
    ConfigError
        As `select` and that.
    """
    return select(runs, layer, unit).by_method()
