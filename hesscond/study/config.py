"""Configuration of a study: its TOML file, checked key by key."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from hesscond.errors import ConfigError
from hesscond.lazy import IN_FILE, located
from hesscond.methods import parse
from hesscond.spectra.bounded import LEAST_PRODUCTS
from hesscond.study import sections
from hesscond.theorems import base as theorems


class LearningRates(sections.Section):
    """``[[learning_rates]]``: the rate of each method at one batch size, and the grid it is chosen from.

    Methods are named as in ``[[methods]]``, or as ``--method`` names them; one with options that is not there has the
    rate of its name alone. The ``grid`` is that of the methods in ``rate``, and of all methods that no entry of this
    batch size with a grid names.
    """

    batch_size: sections.PositiveInt
    rate: dict[str, sections.Rate] = Field(default_factory=dict)
    grid: list[sections.Rate] = Field(default_factory=list)


class MethodConfig(sections.Section):
    """``[[methods]]``: a method as the study runs it, under the name that its paper has for it.

    ``method``: the method, as ``--method`` takes it. ``model``, ``training``, ``schedule``: keys of these tables of the
    study that have other values for this method.
    """

    name: Annotated[str, Field(min_length=1)]
    method: Annotated[str, sections.found_by(parse)]
    model: dict[str, Any] = Field(default_factory=dict)
    training: dict[str, Any] = Field(default_factory=dict)
    schedule: dict[str, Any] = Field(default_factory=dict)

    @property
    def changes(self) -> dict[str, dict[str, Any]]:
        """Changes that the method makes to the study, by table."""
        return {table: values for table in ("model", "training", "schedule") if (values := getattr(self, table))}


def merged(content: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """``content`` with the ``changes``, table by table; other values, and tables of another ``name``, are replaced."""
    combined = dict(content)
    for key, value in changes.items():
        before = combined.get(key)
        if isinstance(before, dict) and isinstance(value, dict) and value.get("name") in (None, before.get("name")):
            combined[key] = merged(before, value)
        else:
            combined[key] = value
    return combined


#: Parameters that one Hessian covers: those of a unit, of a layer, or of the whole network.
Level = Literal["unit", "layer", "network"]


class ProbeConfig(sections.Section):
    """``[probe]``: which blocks are measured, how often, and on which data.

    ``layers``: what `hesscond.probe` takes: modules, parameters and parts of both (``"attention[q]"``) by their names
    in the network, and globs of them, ``"*"`` being every parameter once; the output layer if not given. ``units``:
    numbers, or ``"all"``; of an embedding, those tokens of them that occur in the data. ``levels``: ``"unit"`` for a
    Hessian of each unit, ``"layer"`` for one of the whole block (``unit`` is empty in its rows), ``"network"`` for one
    of all parameters (in a row of the layer ``network``), or several of them. ``every``: number of iterations between
    probes of the mini-batch (0: never). ``train_every_epochs``: number of epochs between probes of the training set,
    which is also probed at the start and at the end (0: never); ``at``: iterations before whose steps the training set
    is probed, in the coordinates of the step about to be taken; ``train_samples``: size of a fixed part of the training
    set that is probed in its place, chosen as that of ``[data]``: a probe batch that stays the same. ``products``:
    number of products with the Hessian of the network, as `hesscond.probe` takes it; as many as are needed if not
    given. ``optima``: number of parameters up to which the smallest κ of a layer under any diagonal and any Kronecker
    scaling is bounded too (0: for no layer). ``precision``: ``"as-trained"`` takes the activations of the training
    forward pass as they are and does everything after in float64; ``"float64"`` recomputes the forward pass in float64
    (about twice the cost of a probe).
    """

    layers: Annotated[list[str], Field(min_length=1)] | None = None
    units: Annotated[list[Annotated[int, Field(ge=0)]], Field(min_length=1)] | Literal["all"]
    levels: Annotated[list[Level], Field(min_length=1)] = Field(default_factory=lambda: list[Level](("unit",)))
    every: Annotated[int, Field(ge=0)] = 1
    train_every_epochs: Annotated[int, Field(ge=0)] = 1
    at: list[Annotated[int, Field(ge=0)]] = Field(default_factory=list)
    train_samples: sections.PositiveInt | None = None
    products: Annotated[int, Field(ge=LEAST_PRODUCTS)] | None = None
    optima: Annotated[int, Field(ge=0)] = 0
    precision: Literal["as-trained", "float64"] = "as-trained"
    rtol: Annotated[float, Field(gt=0, lt=1)] = 1e-6

    @field_validator("units", mode="before")
    @classmethod
    def numbers_or_all(cls, value: Any) -> Any:
        """Refuse other words and numbers; of a union the error would name one type only."""
        if value != "all" and not isinstance(value, list):
            raise ValueError("must be 'all', or a list of numbers")
        return value

    # the same thing is not measured twice
    _distinct = field_validator("layers", "units", "levels", "at")(sections.distinct)

    @model_validator(mode="after")
    def one_clock(self) -> ProbeConfig:
        """Refuse two ways to say when the training set is measured."""
        if self.at and self.train_every_epochs:
            raise sections.misfit(["at"], "says when the training set is measured: set train_every_epochs = 0")
        return self

    @property
    def unmeasured(self) -> ProbeConfig:
        """Copy of this table in which nothing is measured."""
        return self.model_copy(update={"every": 0, "train_every_epochs": 0, "at": []})


class StatementConfig(sections.Section):
    """``[[statements]]``: a published statement that is checked wherever a unit is probed."""

    id: str

    @field_validator("id")
    @classmethod
    def known(cls, value: str) -> str:
        """Return the statement's own id; refuse one that does not exist or is not about a layer."""
        try:
            statement = theorems.statement(value)
        except ConfigError as error:
            raise ValueError(str(error)) from None
        if not isinstance(statement, theorems.LayerStatement):
            raise ValueError(f"statement {value!r} does not speak of a layer in training: use hesscond verify {value}")
        # its own id is known only where its file was read
        return located(value) if IN_FILE.fullmatch(value) else statement.id

    @property
    def statement(self) -> theorems.LayerStatement:
        """The statement, which is about a layer as `known` has found."""
        return theorems.statement(self.id)  # type: ignore[return-value]


class RunConfig(sections.Section):
    """``[run]``: in the ``config.toml`` that a run leaves behind, which of the study's runs it was.

    ``label``: the name of the method among those of the study, if it is one of them.
    """

    method: str
    label: str = ""
    seed: Annotated[int, Field(ge=0)]
    learning_rate: sections.Rate
    device: str = "auto"
    data_source: str = ""
    versions: dict[str, str] = Field(default_factory=dict)


@dataclass(frozen=True)
class Variant:
    """A study with the changes of one method, and the method's name in it; empty if the study does not name it."""

    study: StudyConfig
    method: str
    label: str


class StudyConfig(sections.Section):
    """A whole study file, or one panel of it.

    ``scale``: the study as the paper has it, or with the changes of the table ``[small]``, which has the structure of
    the file itself; ``panel``, ``title``: which of several in a file. `hesscond.study.load_study` makes both.
    """

    name: Annotated[str, Field(pattern=r"^\w[\w.-]*$")]
    description: str
    source: str = ""
    scale: Literal["paper", "small"] = "paper"
    panel: str = ""
    title: str = ""
    data: sections.DataConfig
    model: sections.ModelConfig = sections.ModelConfig()
    training: sections.TrainingConfig
    schedule: sections.ScheduleConfig = sections.ScheduleConfig()
    methods: list[MethodConfig] = Field(default_factory=list)
    learning_rates: list[LearningRates] = Field(default_factory=list)
    probe: ProbeConfig
    statements: list[StatementConfig] = Field(default_factory=list)
    run: RunConfig | None = None
    small: dict[str, Any] = Field(default_factory=dict, exclude=True)

    @field_validator("statements")
    @classmethod
    def once(cls, value: list[StatementConfig]) -> list[StatementConfig]:
        """Keep each statement once, whichever of its ids it is named by."""
        return list({statement.id: statement for statement in value}.values())

    @model_validator(mode="after")
    def methods_are_known(self) -> StudyConfig:
        """Refuse two methods of one name, and rates of methods that do not exist."""
        names = [entry.name for entry in self.methods]
        for number, name in enumerate(names):
            if name in names[:number]:
                raise sections.misfit(["methods", number, "name"], f"methods: {name!r} is there twice")
        for number, rates in enumerate(self.learning_rates):
            for name in rates.rate:
                if name not in names:
                    try:
                        parse(name)
                    except ConfigError as error:
                        raise sections.misfit(
                            ["learning_rates", number, "rate"], f"learning_rates.{number}.rate: {error}"
                        ) from None
        return self

    @property
    def full_name(self) -> str:
        """The name, with that of the panel: what `hesscond.study.load_study` takes."""
        return f"{self.name}/{self.panel}" if self.panel else self.name

    def entry(self, text: str) -> MethodConfig | None:
        """Entry of ``methods`` that a text means: by its name, as ``--method`` says it, or that without options."""
        text = located(text)
        named = [entry for entry in self.methods if entry.name == text]
        if named:
            return named[0]
        versions = [entry for entry in self.methods if entry.method == text]
        versions = versions or [entry for entry in self.methods if parse(entry.method).plain == text]
        if len(versions) > 1:
            names = ", ".join(repr(entry.name) for entry in versions)
            raise ConfigError(f"study {self.full_name!r} has several versions of {text!r}: choose from {names}")
        return versions[0] if versions else None

    def variant(self, text: str) -> Variant:
        """The study with the changes of a method, named as in ``methods`` or as ``--method`` says it."""
        entry = self.entry(text)
        if self.run is not None and self.run.label:
            # a run's config.toml has the changes in it, and perhaps others on top
            if entry is not None and entry.name == self.run.label:
                return Variant(self, entry.method, entry.name)
            if any(method.changes for method in self.methods if method.name == self.run.label):
                raise ConfigError(
                    f"this is the config.toml of a run of {self.run.label!r}: take the study for {text!r}"
                )
        if entry is None:
            try:
                parse(text)
            except ConfigError as error:
                names = ", ".join(repr(method.name) for method in self.methods)
                raise ConfigError(f"{error}; the study names {names}" if names else str(error)) from None
            return Variant(self, located(text), "")
        if not entry.changes:
            # runs are named as the method was typed
            return Variant(self, entry.method, entry.name if text == entry.name else "")
        content = merged(self.model_dump(mode="json", exclude_none=True), entry.changes)
        study = sections.validated(StudyConfig, content, f"method {entry.name!r} of study {self.full_name!r}: ")
        return Variant(study, entry.method, entry.name)

    def names_of(self, text: str) -> list[str]:
        """Names under which the tables of rates may list a method, the most specific name first."""
        entry = self.entry(text)
        method = entry.method if entry else text
        return [text, located(text), *([entry.name] if entry else []), method, parse(method).plain]

    def known_rate(self, method: str, batch_size: int) -> float | None:
        """The rate that the study gives for ``method`` at ``batch_size``; None if it gives none."""
        rates = [entry.rate for entry in self.learning_rates if entry.batch_size == batch_size]
        return next((rate[name] for name in self.names_of(method) for rate in rates if name in rate), None)

    def learning_rate(self, method: str, batch_size: int) -> float:
        """The rate of ``method`` at ``batch_size``: the study's, else the method's default."""
        known = self.known_rate(method, batch_size)
        if known is not None:
            return known
        entry = self.entry(method)
        return parse(entry.method if entry else method).rate

    def learning_rate_grid(self, method: str, batch_size: int) -> list[float]:
        """The rates to try for ``method`` at ``batch_size``, ascending."""
        entries = [entry for entry in self.learning_rates if entry.batch_size == batch_size and entry.grid]
        named = [entry for name in self.names_of(method) for entry in entries if name in entry.rate]
        if entries:
            # that with the most specific name of the method, else the first
            return sorted([*named, *entries][0].grid)
        raise ConfigError(
            f"study {self.name!r} gives no grid of learning rates for method {method!r} at batch size {batch_size}: "
            "add grid = [...] to its [[learning_rates]], or name the rates"
        )
