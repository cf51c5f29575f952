"""Grids of runs, planned and checked before the first one starts.

`plan_runs`: methods × seeds of one study; `plan_sweep`: methods × seeds × rates × batch sizes × settings, which the
sweep's folder describes in ``sweep.toml``.
"""

from __future__ import annotations

import itertools
import os
import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import tomli_w
import torch
from pydantic import Field, field_validator

from hesscond.errors import ConfigError
from hesscond.lazy import located
from hesscond.methods import parse
from hesscond.runs import log
from hesscond.sheets import listed
from hesscond.study import sections
from hesscond.study.config import StudyConfig, Variant
from hesscond.study.runner import RunPlan

#: Name of the file that describes a sweep, in its folder.
FILE = "sweep.toml"
#: Factors of a method's rate that ``around`` tries.
AROUND = (0.1, 0.3, 1.0, 3.0, 10.0)
#: Keys of a study that cannot be set in a grid, with what to use instead or why.
RESERVED = {
    "training.batch_size": "use --batch-size",
    "run": "that is what a run was, not what it should be",
    "learning_rates": "use --lr",
    "name": "the runs of a sweep are of one study",
}


@dataclass(frozen=True)
class Overrides:
    """Changes to a study that the command line can make; None leaves a value as it is."""

    iterations: int | None = None
    epochs: int | None = None
    batch_size: int | None = None
    learning_rate: float | None = None
    probe_every: int | None = None
    statements: tuple[str, ...] = ()

    def apply(self, study: StudyConfig) -> StudyConfig:
        """The study with the changes made."""
        if self.iterations is not None and self.epochs is not None:
            raise ConfigError("give either --iterations or --epochs, not both")
        if self.learning_rate is not None and not 0 < self.learning_rate <= sections.LARGEST_RATE:
            raise ConfigError(
                f"--lr must be positive and at most {sections.LARGEST_RATE:.3g}, got {self.learning_rate}"
            )
        given = {"training.batch_size": self.batch_size, "probe.every": self.probe_every}
        settings: dict[str, Any] = {key: value for key, value in given.items() if value is not None}
        if self.iterations is not None or self.epochs is not None:
            settings |= {"training.iterations": self.iterations, "training.epochs": self.epochs}
        if self.probe_every == 0:
            settings |= {"probe.train_every_epochs": 0, "probe.at": []}
        if self.statements:
            ids = [*(statement.id for statement in study.statements), *self.statements]
            settings["statements"] = [{"id": id} for id in ids]
        return with_settings(study, settings)


def asked(
    study: StudyConfig,
    file: Path,
    method: list[str] | None,
    lr: float | None,
    seed: str | None,
    out: Path | None,
    resume: bool,
) -> tuple[list[str], float | None, str, Path | None]:
    """Methods, rate, seeds and folder as they were given, else as the ``config.toml`` of a run has them."""
    if resume and out is None:
        if study.run is None:
            raise ConfigError("--resume needs the folder of the runs: give it as --out")
        out = file.parent
    if study.run is not None:
        if not method:
            method, lr = [study.run.label or study.run.method], lr or study.run.learning_rate
        seed = str(study.run.seed) if seed is None else seed
    if not method:
        names = ", ".join(entry.name for entry in study.methods) or "vanilla, bnp"
        raise ConfigError(f"name at least one method with --method, such as {names} (hesscond methods lists all)")
    return method, lr, "0" if seed is None else seed, out


def plan_runs(
    study: StudyConfig,
    methods: Sequence[str],
    seeds: Sequence[int],
    out: Path,
    device: torch.device,
    overrides: Overrides,
    *,
    resume: bool = False,
) -> list[RunPlan]:
    """Plan one run for every method and seed, in folders that are free, or that may exist if ``resume``."""
    if len(set(methods)) < len(methods) or len(set(seeds)) < len(seeds):
        raise ConfigError("a method or seed is given twice")
    single = len(methods) * len(seeds) == 1
    if not single:
        log.check_outside_runs(out)
    variants = [study.variant(name) for name in methods]
    if len({(variant.study.model_dump_json(), variant.method) for variant in variants}) < len(variants):
        raise ConfigError("a method is given twice, under two names")
    plans = []
    for name, variant in zip(methods, variants, strict=True):
        config = overrides.apply(variant.study)
        rate = overrides.learning_rate or config.learning_rate(name, config.training.batch_size)
        for seed in seeds:
            folder = out if single else out / f"{folder_name(variant)}-seed{seed}"
            if not resume:
                log.check_free(folder)
            plans.append(RunPlan(config, variant.method, seed, rate, folder, device, variant.label))
    return plans


def folder_name(variant: Variant) -> str:
    """Beginning of the folder names of a method's runs: its name in the study, else what ``--method`` says."""
    return plain(variant.label) if variant.label else parse(variant.method).folder


class SweepConfig(sections.Section):
    """``sweep.toml``: a study and the axes of the grid.

    ``rates``: numbers; ``"grid"``, those that the study tries for each method at each batch size; ``"study"``, the
    one that it gives, or else the method's default; ``"around"``, 0.1 to 10 times that one. ``settings``: dotted keys
    of the study's TOML, each with its values. ``threads``: number of threads of every run; another number adds in
    another order and changes the last digits.
    """

    study: StudyConfig
    methods: Annotated[list[str], Field(min_length=1)]
    seeds: Annotated[list[Annotated[int, Field(ge=0, le=2**63 - 1)]], Field(min_length=1)]
    rates: Annotated[list[sections.Rate], Field(min_length=1)] | Literal["grid", "study", "around"]
    batch_sizes: Annotated[list[sections.PositiveInt], Field(min_length=1)]
    settings: Annotated[dict[str, Annotated[list[Any], Field(min_length=1)]], Field(default_factory=dict)]
    threads: sections.PositiveInt = 1

    # no run twice
    _distinct = field_validator("methods", "seeds", "rates", "batch_sizes")(sections.distinct)

    @field_validator("methods")
    @classmethod
    def in_place(cls, value: list[str]) -> list[str]:
        """Name files by their absolute paths."""
        return list(map(located, value))

    @property
    def axes(self) -> tuple[str, ...]:
        """Names of the settings in folders and tables: the last part of the key where that is unambiguous."""
        last = [key.rpartition(".")[2] for key in self.settings]
        return tuple(short if last.count(short) == 1 else key for key, short in zip(self.settings, last, strict=True))


def plan_sweep(config: SweepConfig, out: Path, device: torch.device) -> list[RunPlan]:
    """Plan one run for every point of the grid, all methods and rates of the first seed before those of the next."""
    places = []
    for values in itertools.product(*config.settings.values()):
        settings = dict(zip(config.settings, values, strict=True))
        label = "".join(f"-{axis}{plain(value)}" for axis, value in zip(config.axes, values, strict=True))
        for batch_size in config.batch_sizes:
            for method in config.methods:
                variant = config.study.variant(method)
                study = with_settings(variant.study, {**settings, "training.batch_size": batch_size})
                name = f"{folder_name(variant)}-b{batch_size}"
                for rate in rates_for(config, study, method):
                    places.append((replace(variant, study=study), rate, f"{name}-lr{rate!r}{label}"))
    plans = [
        RunPlan(variant.study, variant.method, seed, rate, out / f"{name}-seed{seed}", device, variant.label)
        for seed in config.seeds
        for variant, rate, name in places
    ]
    folders = [plan.folder.name for plan in plans]
    if doubled := next((name for name in folders if folders.count(name) > 1), None):
        raise ConfigError(f"two runs of the grid would have the name {doubled}: leave one out")
    return plans


def rates_for(config: SweepConfig, study: StudyConfig, method: str) -> list[float]:
    """The learning rates of a method at the study's batch size."""
    if config.rates == "grid":
        return study.learning_rate_grid(method, study.training.batch_size)
    if isinstance(config.rates, list):
        return list(config.rates)
    rate = study.learning_rate(method, study.training.batch_size)
    return [float(f"{factor * rate:.3g}") for factor in AROUND] if config.rates == "around" else [rate]


def with_settings(study: StudyConfig, settings: Mapping[str, Any]) -> StudyConfig:
    """The study with values at dotted keys of its TOML, checked like the file."""
    content = study.model_dump(mode="json", exclude_none=True)
    for key, value in settings.items():
        *tables, last = key.split(".")
        place = content
        for name in tables:
            place = place.setdefault(name, {})
            if not isinstance(place, dict):
                raise ConfigError(f"--set {key}: {name} is not a table of the study")
        place[last] = value
    return sections.validated(StudyConfig, content)


def parse_settings(texts: Sequence[str]) -> dict[str, list[Any]]:
    """Values of dotted keys from ``training.momentum=0,0.9``; words need no quotes."""
    settings: dict[str, list[Any]] = {}
    for text in texts:
        key, equals, values = (part.strip() for part in text.partition("="))
        if not re.fullmatch(r"[\w-]+(\.[\w-]+)*", key) or not equals or not values:
            raise ConfigError(f"--set takes KEY=VALUE[,VALUE…] with a key as training.momentum, not {text!r}")
        if key in settings:
            raise ConfigError(f"--set {key} is given twice: separate its values by commas")
        for name in (key, key.partition(".")[0]):
            if name in RESERVED:
                raise ConfigError(f"--set cannot set {key}: {RESERVED[name]}")
        try:
            settings[key] = toml_value(f"[{values}]")
        except tomllib.TOMLDecodeError:
            settings[key] = [word(part.strip()) for part in values.split(",")]
    return settings


def toml_value(text: str) -> Any:
    """Value that TOML reads from a text."""
    return tomllib.loads(f"value = {text}")["value"]


def word(text: str) -> Any:
    """A TOML value, or the text as it is."""
    try:
        return toml_value(text)
    except tomllib.TOMLDecodeError:
        return text


def plain(value: Any) -> str:
    """A value as part of a folder's name."""
    return re.sub(r"[^\w.+-]+", "-", str(value)).strip("-")


def read_sweep(folder: Path) -> SweepConfig:
    """The sweep of a folder."""
    path = folder / FILE
    content = sections.read_toml(path, f"{folder} is not the folder of a sweep: it has no {FILE}")
    return sections.validated(SweepConfig, content, f"{path}: ")


def write_sweep(config: SweepConfig, folder: Path) -> None:
    """Describe the sweep in its folder; the file is there whole or not at all."""
    partial = folder / f"{FILE}.{os.getpid()}.partial"
    try:
        partial.write_text(tomli_w.dumps(config.model_dump(mode="json", exclude_none=True)), encoding="utf-8")
        partial.replace(folder / FILE)
    except OSError as error:
        raise ConfigError(f"the folder {folder} cannot be written: {error.strerror}") from None


def check_same_sweep(config: SweepConfig, folder: Path) -> None:
    """Refuse a folder that holds another sweep; one whose grid lies in that of ``config`` may grow to it."""
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"{folder} is a file: give a folder as --out")
    if not (folder / FILE).exists():
        inside = folder.iterdir() if folder.is_dir() else ()
        if any(not path.name.startswith(".") for path in inside):
            raise ConfigError(f"{folder} is not empty and holds no sweep: give another --out")
        return
    stored_config = read_sweep(folder)
    differing = [name for name in ("study", "threads") if getattr(stored_config, name) != getattr(config, name)]
    device = torch.device("cpu")
    left_out = {p.folder.name for p in plan_sweep(stored_config, folder, device)} - {
        p.folder.name for p in plan_sweep(config, folder, device)
    }
    if left_out:
        differing.append(f"without {listed(sorted(left_out))}")
    if differing:
        raise ConfigError(
            f"{folder} holds another sweep ({', '.join(differing)}): a grid may grow but not change, give another --out"
        )
