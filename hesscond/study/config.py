"""What a study is: its TOML file, checked key by key."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import torch
from pydantic import Field, ValidationError, field_validator

from hesscond.errors import ConfigError
from hesscond.methods import parse
from hesscond.study.sections import (
    DataConfig,
    ModelConfig,
    PositiveInt,
    Rate,
    ScheduleConfig,
    Section,
    TrainingConfig,
)
from hesscond.theorems import LayerStatement, statement


class LearningRates(Section):
    """``[[learning_rates]]``: the rate of each method at one batch size, and the grid it is chosen from.

    A method with options has the rate of the same text in quotes, else that of its name alone. The ``grid`` is that of
    the methods in ``rate``, and of all others that no entry of this batch size names beside a grid.
    """

    batch_size: PositiveInt
    rate: dict[str, Rate] = Field(default_factory=dict)
    grid: list[Rate] = Field(default_factory=list)

    @field_validator("rate")
    @classmethod
    def known(cls, value: dict[str, float]) -> dict[str, float]:
        """Refuse a method that does not exist."""
        for name in value:
            try:
                parse(name)
            except ConfigError as error:
                raise ValueError(str(error)) from None
        return value


class ProbeConfig(Section):
    """``[probe]``: which units are measured, how often, and on which data.

    ``layers``: dense layers and convolutions by their names in the network; the output layer if not given. ``every``:
    on the mini-batch, every so many iterations (0: never). ``train_every_epochs``: over the training set, at the start,
    every so many epochs and at the end (0: never); ``train_samples``: over a fixed part of it only, chosen as that of
    ``[data]``. ``precision``: ``"as-trained"`` takes the activations of the training forward pass as they are and does
    everything after in float64; ``"float64"`` recomputes the forward pass in float64 (about twice the cost of a probe).
    """

    layers: Annotated[list[str], Field(min_length=1)] | None = None
    units: Annotated[list[Annotated[int, Field(ge=0)]], Field(min_length=1)]
    every: Annotated[int, Field(ge=0)] = 1
    train_every_epochs: Annotated[int, Field(ge=0)] = 1
    train_samples: PositiveInt | None = None
    precision: Literal["as-trained", "float64"] = "as-trained"
    rtol: Annotated[float, Field(gt=0, lt=1)] = 1e-6

    @field_validator("layers", "units")
    @classmethod
    def distinct(cls, value: list[Any] | None) -> list[Any] | None:
        """Refuse to measure the same thing twice."""
        if value is not None and len(set(value)) < len(value):
            raise ValueError(f"each may be given only once, got {value}")
        return value


class StatementConfig(Section):
    """``[[statements]]``: a published statement that is checked wherever a unit is probed."""

    id: str

    @field_validator("id")
    @classmethod
    def known(cls, value: str) -> str:
        """The statement's own id; one that does not exist, or does not speak of a layer, is refused."""
        try:
            found = statement(value)
        except ConfigError as error:
            raise ValueError(str(error)) from None
        if not isinstance(found, LayerStatement):
            raise ValueError(f"statement {value!r} does not speak of a layer in training: use hesscond verify {value}")
        return found.id


class RunConfig(Section):
    """``[run]``: in the ``config.toml`` that a run leaves behind, which of the study's runs it was."""

    method: str
    seed: Annotated[int, Field(ge=0)]
    learning_rate: Rate
    device: str = "auto"
    data_source: str = ""
    versions: dict[str, str] = Field(default_factory=dict)


class StudyConfig(Section):
    """A whole study file.

    ``scale``: the study as the paper has it, or with the changes of the table ``[small]``, which has the structure of
    the file itself; `hesscond.study.load_study` makes them.
    """

    name: Annotated[str, Field(pattern=r"^\w[\w.-]*$")]
    description: str
    source: str = ""
    scale: Literal["paper", "small"] = "paper"
    data: DataConfig
    model: ModelConfig = ModelConfig()
    training: TrainingConfig
    schedule: ScheduleConfig = ScheduleConfig()
    learning_rates: list[LearningRates] = Field(default_factory=list)
    probe: ProbeConfig
    statements: list[StatementConfig] = Field(default_factory=list)
    run: RunConfig | None = None
    small: dict[str, Any] = Field(default_factory=dict, exclude=True)

    @field_validator("statements")
    @classmethod
    def once(cls, value: list[StatementConfig]) -> list[StatementConfig]:
        """Each statement once, whichever of its ids it is named by."""
        return list({own.id: own for own in value}.values())

    def learning_rate(self, method: str, batch_size: int) -> float:
        """The rate of ``method`` at ``batch_size``.

        Raises
        ------
        ConfigError
            The study does not say.
        """
        for name in (method, parse(method).plain):
            for entry in self.learning_rates:
                if entry.batch_size == batch_size and name in entry.rate:
                    return entry.rate[name]
        raise ConfigError(
            f"study {self.name!r} gives no learning rate for method {method!r} at batch size {batch_size}: add --lr"
        )

    def learning_rate_grid(self, method: str, batch_size: int) -> list[float]:
        """The rates to try for ``method`` at ``batch_size``, ascending.

        Raises
        ------
        ConfigError
            The study does not say.
        """
        entries = [entry for entry in self.learning_rates if entry.batch_size == batch_size and entry.grid]
        for name in (method, parse(method).plain):
            for entry in entries:
                if name in entry.rate:
                    return sorted(entry.grid)
        if entries:
            return sorted(entries[0].grid)
        raise ConfigError(
            f"study {self.name!r} gives no grid of learning rates for method {method!r} at batch size {batch_size}: "
            "add grid = [...] to its [[learning_rates]], or name the rates"
        )


def completed(config: dict[str, Any]) -> dict[str, Any]:
    """The contents of a run's ``config.toml`` with the defaults of keys that it lacks: those of an earlier version."""
    try:
        return StudyConfig.model_validate(config).model_dump(mode="json", exclude_none=True)
    except ValidationError:
        return config


def resolve_device(name: str) -> torch.device:
    """The torch device called ``name``; ``auto`` is the GPU if there is one, else the CPU.

    Raises
    ------
    ConfigError
        No such device here, or one without float64.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ConfigError(f"unknown device {name!r}: use auto, cpu, cuda or cuda:N") from None
    if device.type not in ("cpu", "cuda"):
        raise ConfigError(f"device {name!r} is not supported: use auto, cpu, cuda or cuda:N")
    there = torch.cuda.device_count() if device.type == "cuda" else 1
    if (device.index or 0) >= there:
        raise ConfigError(f"device {name!r} does not exist here: torch sees {torch.cuda.device_count()} GPUs")
    return device
