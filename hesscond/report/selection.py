"""Selection of runs and rows for figures and tables: rows of one unit, groups that differ in the seed alone."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

from hesscond.errors import ConfigError
from hesscond.report import palette
from hesscond.runs import place_name

if TYPE_CHECKING:
    import pandas as pd

    from hesscond.runs import StoredRun


@dataclass(frozen=True)
class Selection:
    """Runs of one study, and the rows of one unit that every run has probed; unit is None for the block as a whole."""

    runs: tuple[StoredRun, ...]
    study: str
    layer: str
    unit: int | None
    probes: tuple[pd.DataFrame, ...]

    @property
    def title(self) -> str:
        """Study, layer and unit, batch size."""
        sizes = ", ".join(map(str, sorted({int(run.config["training"]["batch_size"]) for run in self.runs})))
        return f"{self.study} · {place_name(f'layer {self.layer}', self.unit, ', unit ')} · batch size {sizes}"

    def probe(self, run: StoredRun, data: str) -> pd.DataFrame:
        """Probe rows of the unit over ``data`` ("batch" or "train"), one per iteration, indexed by it."""
        rows = self.rows_of(run)
        rows = rows[rows["data"] == data]
        return rows.drop_duplicates("iteration", keep="last").set_index("iteration")

    def rows_of(self, run: StoredRun) -> pd.DataFrame:
        """All probe rows of the unit."""
        return self.probes[self.runs.index(run)]


def in_order(runs: Sequence[StoredRun]) -> list[StoredRun]:
    """The runs by method in the order in which these were started, vanilla first if at once, then by seed."""
    starts: dict[str, str] = {}
    for run in runs:
        starts[run.legend] = min(run.facts.get("started", ""), starts.get(run.legend, "~"))
    return sorted(runs, key=lambda run: (starts[run.legend], run.legend != "vanilla", run.legend, run.seed))


def check_one_study(runs: Sequence[StoredRun]) -> None:
    """Refuse an empty list, and runs of different studies."""
    if not runs:
        raise ConfigError("no runs given: name at least one run folder")
    first = runs[0]
    for run in runs:
        # a method that the study names may have a network of its own
        versions = "label" in first.config["run"] and "label" in run.config["run"]
        for key in ("name", "panel", "data", *(() if versions else ("model",))):
            value, other = first.config.get(key), run.config.get(key)
            if (value or "") != (other or ""):
                raise ConfigError(
                    f"{first.folder} and {run.folder} come from different studies "
                    f"({key} is {value!r} and {other!r}): give runs of one study"
                )


def select(runs: Sequence[StoredRun], layer: str | None = None, unit: int | None = None) -> Selection:
    """The runs, checked to be of one study, with the first layer and unit that it probes by default."""
    check_one_study(runs)
    first = runs[0]
    tables = [run.table("probe") for run in runs]
    layer, default = first_place(first, tables[0], layer)
    unit = default if unit is None else unit
    for run, table in zip(runs, tables, strict=True):
        layers = run.config["probe"]["layers"]
        if layer not in layers:
            raise ConfigError(f"layer {layer!r} was not probed in {run.folder}: choose from {', '.join(layers)}")
        units = run.config["probe"]["units"]
        if units == "all":
            units = sorted(table.loc[table["layer"] == layer, "unit"].dropna().unique())
        # the rows of a log that is being written may be yet to come
        if unit is not None and unit not in units and (units or run.config["probe"]["units"] != "all"):
            raise ConfigError(f"unit {unit} was not probed in {run.folder}: choose from {', '.join(map(str, units))}")
    probes = tuple(table[at_place(table, layer, unit)] for table in tables)
    return Selection(tuple(runs), str(first.config["name"]), layer, unit, probes)


def first_place(run: StoredRun, probe: pd.DataFrame, layer: str | None = None) -> tuple[str, int | None]:
    """Layer and unit that are shown where none were named; the unit is None for the whole block."""
    settings = run.config["probe"]
    layer = settings["layers"][0] if layer is None else layer
    if "unit" not in settings.get("levels", ["unit"]):
        return layer, None
    if settings["units"] != "all":
        return layer, settings["units"][0]
    # for tokens, one that occurs
    units = probe.loc[probe["layer"] == layer, "unit"].dropna()
    return layer, int(units.iloc[0]) if len(units) else 0


def at_place(probe: pd.DataFrame, layer: str, unit: int | None) -> pd.Series:
    """Boolean mask of the rows of a unit of a layer, or of the whole block."""
    where = probe["unit"].isna() if unit is None else (probe["unit"] == unit).fillna(False).astype(bool)
    return (probe["layer"] == layer) & where


def of_units(probe: pd.DataFrame) -> pd.DataFrame:
    """Rows of units, and rows of whole blocks whose units were not measured."""
    units = probe["unit"].notna()
    return probe[units | ~probe["layer"].isin(probe.loc[units, "layer"])]


@dataclass(frozen=True)
class Group:
    """Runs of a method with one learning rate and batch size, one a seed; the label tells such groups apart."""

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
        """Number of runs that diverged."""
        return sum(run.status == "diverged" for run in self.runs)

    @property
    def unfinished(self) -> int:
        """Number of runs that neither finished nor diverged."""
        return len(self.runs) - len(self.finished) - self.diverged


def groups_of(runs: Sequence[StoredRun]) -> list[Group]:
    """The runs of one study in groups: methods in the order in which they were started, vanilla first if at once."""
    check_one_study(runs)
    # without unprobed runs that another one repeats with probes, as where rates are tried first
    probed = {(setting_of(run), run.seed) for run in runs if is_probed(run)}
    runs = [run for run in runs if is_probed(run) or (setting_of(run), run.seed) not in probed]
    by_setting: dict[tuple[str, float, int], list[StoredRun]] = {}
    for run in in_order(runs):
        by_setting.setdefault(setting_of(run), []).append(run)
    result, places = [], {name: place for place, (name, _, _) in enumerate(by_setting)}
    labels = labels_of(by_setting)
    for method, rate, size in sorted(by_setting, key=lambda key: (places[key[0]], key)):
        label = labels[method, rate, size]
        members = sorted(by_setting[method, rate, size], key=lambda run: run.seed)
        for one, other in pairwise(members):
            if one.seed == other.seed:
                raise ConfigError(f"{one.folder} and {other.folder} are both {one.label}: give one run of each seed")
        result.append(Group(label, method, rate, size, tuple(members)))
    return result


def labels_of(settings: Iterable[tuple[str, float, int]]) -> dict[tuple[str, float, int], str]:
    """Label of each setting: the method, with the learning rate and the batch size where it has several."""
    labels = {}
    for method, rate, size in (keys := set(settings)):
        label = method
        label += f" · lr {rate:g}" if len({key[1] for key in keys if key[0] == method}) > 1 else ""
        label += f" · batch {size}" if len({key[2] for key in keys if key[0] == method}) > 1 else ""
        labels[method, rate, size] = label
    return labels


def setting_of(run: StoredRun) -> tuple[str, float, int]:
    """Method by its legend, learning rate and batch size."""
    return run.legend, float(run.config["run"]["learning_rate"]), int(run.config["training"]["batch_size"])


def probed_groups(runs: Sequence[StoredRun]) -> list[Group]:
    """`groups_of` the runs with probes, without those that only try learning rates."""
    probed = [run for run in runs if is_probed(run)]
    if runs and not probed:
        raise ConfigError("none of the runs was probed: train with --probe-every 1 or more")
    return groups_of(probed)


def is_probed(run: StoredRun) -> bool:
    """Whether the run's study probes at all."""
    probe = run.config["probe"]
    return bool(probe.get("every", 1) or probe.get("train_every_epochs", 1) or probe.get("at"))


def looks_of(groups: Sequence[Group]) -> dict[str, palette.MethodLook]:
    """The look of each group by its label: that of its method, or a shade of it where a method has several groups."""
    looks = palette.method_looks(group.label for group in groups)
    return {group.label: looks[group.label] for group in groups}


def title_of(groups: Sequence[Group]) -> str:
    """Title: study and batch sizes."""
    sizes = ", ".join(str(size) for size in sorted({group.batch_size for group in groups}))
    return f"{groups[0].runs[0].config['name']} · batch size {sizes}"
