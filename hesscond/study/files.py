"""Study files: built-in ones by name, others by their path; their panels, and what a paper says of them."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from hesscond.errors import ConfigError, did_you_mean
from hesscond.lazy import located
from hesscond.study import config, sections
from hesscond.study.listing import aliases, studies_folder
from hesscond.study.structure import check_structure

At = Literal["end", "best", "first", "mean"]
COMPARISON = re.compile(r"(?P<one>.+?)\s+(?P<sign>[>~])\s+(?P<other>.+)")
RANGE = re.compile(r"(?P<one>.+?)\s+in\s+\[(?P<low>[^,]+),(?P<high>[^,]+)\]")


class Comparison(sections.Section):
    """One comparison of values: ``A > B``, ``A ~ B`` (equal within the claim's margin) or ``A in [low, high]``."""

    one: str
    sign: Literal[">", "~", "in"]
    other: str = ""
    low: float = 0.0
    high: float = 0.0

    @classmethod
    def of(cls, text: str) -> Comparison:
        """The comparison that a text means."""
        if match := RANGE.fullmatch(text.strip()):
            try:
                return cls(one=match["one"], sign="in", low=float(match["low"]), high=float(match["high"]))
            except ValueError:
                pass
        elif match := COMPARISON.fullmatch(text.strip()):
            return cls.model_validate(match.groupdict())
        raise ConfigError(
            f"{text!r} is no comparison: use 'A > B', 'A ~ B' or 'A in [low, high]' with names of methods"
        )

    @property
    def names(self) -> list[str]:
        """The methods that are compared."""
        return [self.one, *([self.other] if self.other else [])]


class Claim(sections.Section):
    """``[[claims]]``: what a paper says of some panels of a figure, and which quantity of the runs decides it.

    ``of``: a quantity of `hesscond.report.replication.QUANTITIES`; ``at``: its value at the end, the best of all
    epochs, after the first epoch, or the mean over all. ``margin``: largest difference of methods that count as equal.
    """

    panels: list[str] = Field(default_factory=list)
    says: str
    of: str = "test_accuracy"
    at: At = "end"
    holds: Annotated[list[Annotated[str, sections.found_by(Comparison.of)]], Field(min_length=1)]
    margin: Annotated[float, Field(gt=0)] = 1.0

    @property
    def of_panels(self) -> list[str]:
        """Names of the panels; ``""`` for a figure that is one panel."""
        return self.panels or [""]

    @property
    def comparisons(self) -> list[Comparison]:
        """Comparisons of the claim, all of which must hold."""
        return [Comparison.of(text) for text in self.holds]


class Published(sections.Section):
    """A row of a published table: the value of a quantity for each method; ``tolerance``: what counts as the same."""

    of: str
    at: At = "end"
    values: dict[str, float]
    tolerance: Annotated[float, Field(gt=0)] | None = None  # None: the published runs are of another experiment


class Cost(sections.Section):
    """``[replicate]``: how the figure is drawn, and how long its runs take.

    ``core_hours``: time of all runs at full size with five seeds, on one core of the machine in README.md; ``how``
    it was found. ``probe``: whether condition numbers are measured; only figures that show some need it.
    """

    figure: Literal["training", "conditioning", "timing"] = "training"
    probe: bool = False
    core_hours: Annotated[float, Field(gt=0)] | None = None
    how: Literal["measured", "extrapolated"] = "extrapolated"
    needs: str = ""


class Table(BaseModel):
    """A table whose other keys are those of a study, which are checked when the study is put together."""

    model_config = ConfigDict(extra="allow", frozen=True, strict=True)


class Named(Table):
    """An entry of ``[[methods]]``, or what a panel changes of one."""

    name: Annotated[str, Field(min_length=1)]


class Rated(Table):
    """An entry of ``[[learning_rates]]``."""

    rate: dict[str, Any] = Field(default_factory=dict)


class Changes(Table):
    """``[small]``: changes of the study."""

    learning_rates: list[Rated] = Field(default_factory=list)


class PanelTable(Changes):
    """An entry of ``[[panels]]``; ``methods``: those of the file by name, or with changes."""

    name: Annotated[str, Field(pattern=r"^\w[\w.-]*$")]
    methods: list[str | Named] | None = None
    small: Changes | None = None
    paper: list[Published] = Field(default_factory=list)


class FileTable(Changes):
    """A whole file."""

    methods: list[Named] = Field(default_factory=list)
    small: Changes | None = None
    aliases: dict[str, str] = Field(default_factory=dict)
    panels: list[PanelTable] = Field(default_factory=list)
    claims: list[Claim] = Field(default_factory=list)
    replicate: Cost = Cost()
    paper: list[Published] = Field(default_factory=list)

    @model_validator(mode="before")
    @classmethod
    def keys_are_known(cls, content: dict[str, Any]) -> dict[str, Any]:
        """Refuse a key that neither the file nor a study has; a run's ``panel`` is a name, no table."""
        allowed = dict.fromkeys([*config.StudyConfig.model_fields, *cls.model_fields])
        if not isinstance(content.get("panel", ""), str):
            del allowed["panel"]
        sections.refuse_unknown(content, list(allowed))
        return content


SCALES = ("paper", "small")
#: Keys of a file with several panels that belong to the file, not to a study.
OF_THE_FILE = ("aliases", "panels", "claims", "replicate", "paper", "small")
#: Keys of a panel that do not belong to a study.
OF_THE_PANEL = ("name", "paper", "small", "methods")


def built_in() -> Iterator[config.StudyConfig]:
    """The studies that come with hesscond, by name, each panel of those that have some."""
    for path in sorted(studies_folder().glob("*.toml")):
        file = StudyFile.read(path)
        for panel in file.panels or [""]:
            yield file.study(panel, None)


def load_study(study: str | Path, scale: str | None = None) -> config.StudyConfig:
    """A built-in study by name, or the one in a TOML file; ``NAME/PANEL`` where there are several panels.

    Parameters
    ----------
    study
        Name or path.
    scale
        ``"paper"`` or ``"small"``: with the changes of its tables ``[small]``. None: as the study says.

    Returns
    -------
    StudyConfig
        The study with these changes made; ``small`` is empty. Its name is the one given, also if that is an alias.

    Raises
    ------
    ConfigError
        No such study or panel, or it has no other scale; a file that is not TOML; a key that is unknown, missing or of
        the wrong kind, at either scale; parts of the study that do not fit each other.
    """
    name, panel = split_name(str(study))
    file = StudyFile.named(name)
    if file.panels and not panel:
        panels = ", ".join(f"{study}/{choice}" for choice in file.panels)
        raise ConfigError(f"study {str(study)!r} has several panels: choose from {panels}")
    loaded = file.study(panel, scale)
    return loaded.model_copy(update={"name": str(study), "panel": ""}) if study in aliases() else loaded


def split_name(study: str) -> tuple[str, str]:
    """Name or path, and panel, of a study; a name that the study had before is replaced."""
    study = aliases().get(study, study)
    if study.endswith(".toml"):
        return study, ""
    name, _, panel = study.rpartition("/")
    return (name, panel) if name else (study, "")


def in_place(content: Any, folder: Path) -> Any:
    """Contents of a TOML file with the absolute paths of files in its folder: of ``FILE.py:NAME``, and as ``file``."""
    if isinstance(content, list):
        return [in_place(item, folder) for item in content]
    if not isinstance(content, dict):
        return located(content, folder) if isinstance(content, str) else content
    table = {located(key, folder): in_place(value, folder) for key, value in content.items()}
    if isinstance(file := content.get("file"), str) and (folder / file).is_file():
        table["file"] = str((folder / file).resolve())
    return table


@dataclass(frozen=True)
class StudyFile:
    """A TOML file with a study, or with several panels of one."""

    path: Path
    content: dict[str, Any]

    @classmethod
    def named(cls, name: str) -> StudyFile:
        """The file of a built-in study, or at a path."""
        path = Path(name)
        if path.suffix == ".toml":
            return cls.read(path)
        known = sorted(p.stem for p in studies_folder().glob("*.toml"))
        if name not in known:
            otherwise = "try fc-digits (hesscond studies and hesscond replicate --list have all), or give a .toml file"
            hint = did_you_mean(name, [*known, *aliases()], otherwise=otherwise)
            raise ConfigError(f"unknown study {name!r}: {hint}")
        return cls.read(studies_folder() / f"{name}.toml")

    @classmethod
    def read(cls, path: Path) -> StudyFile:
        """The file at a path."""
        content = sections.read_toml(path, f"no study file {path}")
        # a run's config.toml has absolute paths, so that it is resumed from any folder
        return cls(path, in_place(content, path.parent))

    @cached_property
    def layout(self) -> FileTable:
        """The tables of the file, as far as they do not belong to one study."""
        layout = sections.validated(FileTable, self.content, f"{self.path}: ")
        for name, count in Counter(table.name for table in layout.panels).items():
            if count > 1:
                raise ConfigError(f"{self.path}: panel {name!r} is there twice")
        return layout

    @property
    def panels(self) -> list[str]:
        """The names of the panels, if there are several studies in the file."""
        return [table.name for table in self.layout.panels]

    def study(self, panel: str, scale: str | None) -> config.StudyConfig:
        """The study of a panel (``""`` where there are none), as `load_study` returns it."""
        if scale not in (None, *SCALES):
            raise ConfigError(f"--scale is one of {', '.join(SCALES)}, not {scale!r}")
        if panel not in (self.panels or [""]):
            hint = f"choose from {', '.join(self.panels)}" if self.panels else "it has no panels"
            raise ConfigError(f"{self.path.stem} has no panel {panel!r}: {hint}")
        content, small = self.content_of(panel)
        as_is = self.checked(content, panel)
        wanted = scale or as_is.scale
        if as_is.run is not None:
            if scale not in (None, as_is.scale):
                raise ConfigError(
                    f"{self.path} is of a run at scale {as_is.scale!r}: take the study itself for another"
                )
            return as_is
        if not small:
            if wanted == "small":
                raise ConfigError(f"{self.path} has no table [small]: there is no small version of the study")
            return as_is
        for changes in small:
            content = config.merged(content, changes)
        versions = {
            "paper": as_is.model_copy(update={"scale": "paper"}),
            "small": self.checked(content | {"scale": "small"}, panel),
        }
        return versions[wanted]

    def content_of(self, panel: str) -> tuple[dict[str, Any], list[Any]]:
        """Contents of a panel's study, and the tables with the changes of its small version."""
        content = {key: value for key, value in self.content.items() if key not in OF_THE_FILE}
        small = [self.content["small"]] if "small" in self.content else []
        if not panel:
            return content, small
        changes = next(table for table in self.content["panels"] if table["name"] == panel)
        if "small" in changes:
            small.append(changes["small"])
        methods = content.pop("methods", [])
        content = config.merged(content, {key: value for key, value in changes.items() if key not in OF_THE_PANEL})
        content["panel"] = panel
        content["methods"] = list(methods)
        if "methods" in changes:
            by_name = {entry["name"]: entry for entry in methods}
            content["methods"] = []
            for entry in changes["methods"]:
                name = entry if isinstance(entry, str) else entry.get("name")
                if isinstance(entry, str) and name not in by_name:
                    raise ConfigError(
                        f"{self.path}: panel {panel!r} names a method {name!r} that is not in [[methods]]"
                    )
                content["methods"].append(config.merged(by_name.get(name, {}), {} if isinstance(entry, str) else entry))
        return content, small

    def checked(self, content: dict[str, Any], panel: str) -> config.StudyConfig:
        """The study from contents of the file, or from those of a panel, or of its small version."""
        try:
            if panel:
                # without the learning rates of methods that only other panels have
                others = {entry["name"] for entry in self.content.get("methods", [])}
                others -= {entry["name"] for entry in content["methods"]}
                rows = [
                    row | {"rate": {name: rate for name, rate in row.get("rate", {}).items() if name not in others}}
                    for row in content.get("learning_rates", [])
                ]
                content = content | {"learning_rates": rows}
            study = sections.validated(config.StudyConfig, content)
            check_structure(study)
            for entry in study.methods:
                if entry.changes and study.run is None:
                    check_structure(study.variant(entry.name).study)
        except ConfigError as error:
            where = f", panel {panel}" if panel else ""
            where += ", scale small" if content.get("scale") == "small" else ""
            raise ConfigError(f"{self.path}{where}: {error}") from None
        return study
