"""The tables ``[data]``, ``[model]``, ``[training]`` and ``[schedule]`` of a study file, checked key by key."""

from __future__ import annotations

import difflib
import math
import re
import tomllib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import torch
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator
from pydantic_core import PydanticCustomError
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from hesscond.data import AUGMENTATIONS, Form, loading
from hesscond.data.sources import SOURCES
from hesscond.errors import LARGEST, ConfigError
from hesscond.methods.base import OptimizerName
from hesscond.models import MODELS, Architecture, OptionError

#: Plural noun for the inputs of each kind of data set, or of network.
KINDS = ("image", "points", "coordinates", "tokens", "vector")
INPUTS = dict(zip(KINDS, ("images", "clouds of points", "coordinates", "tokens", "numbers"), strict=True))

#: The largest learning rate: float32 holds no larger number.
LARGEST_RATE = torch.finfo(torch.float32).max

PositiveInt = Annotated[int, Field(gt=0, le=LARGEST)]
Rate = Annotated[float, Field(gt=0, le=LARGEST_RATE, allow_inf_nan=False)]
Kind = TypeVar("Kind", bound=BaseModel)


class Section(BaseModel):
    """A table of the TOML file; unknown keys and values of another type are errors."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    @classmethod
    def allowed_keys(cls, content: Mapping[str, Any]) -> Sequence[str]:
        """The keys that a table may have, given what it has."""
        return list(cls.model_fields)

    @model_validator(mode="before")
    @classmethod
    def keys_are_known(cls, content: Any) -> Any:
        """Refuse an unknown key, and name those that are allowed."""
        if isinstance(content, dict):
            refuse_unknown(content, cls.allowed_keys(content))
        return content


#: How the sentence about a key that does not exist begins.
UNKNOWN = "unknown key: "


def misfit(key: Sequence[str | int], words: str) -> PydanticCustomError:
    """Validation error for a key below the table that is being validated."""
    return PydanticCustomError("misfit", "{words}", {"words": words, "key": tuple(key)})


def refuse_unknown(content: Mapping[str, Any], allowed: Sequence[str]) -> None:
    """Raise the error for the first key that is not allowed."""
    for key in content:
        if key not in allowed:
            near = difflib.get_close_matches(str(key), allowed, 1)
            hint = f"did you mean {near[0]!r}? " if near else ""
            raise misfit([key], f"{UNKNOWN}{hint}allowed: {', '.join(allowed)}")


def found_by(find: Callable[[str], object]) -> AfterValidator:
    """Validator of a text that ``find`` takes; where that refuses it, its sentence is the error of the key."""

    def check(text: str) -> str:
        try:
            find(text)
        except ConfigError as error:
            raise ValueError(str(error)) from None
        return text

    return AfterValidator(check)


def distinct(value: Any) -> Any:
    """Return a value; a ValueError if it is a list with something in it twice."""
    if isinstance(value, list) and len(set(value)) < len(value):
        raise ValueError(f"each may be given only once, got {', '.join(map(str, value))}")
    return value


class SectionWithOptions(Section):
    """Section whose other keys are options of what its ``name`` names."""

    model_config = ConfigDict(extra="allow")

    @property
    def options(self) -> dict[str, Any]:
        """Options that are given."""
        return dict(self.model_extra or {})


class DataConfig(SectionWithOptions):
    """``[data]``: which data set, and what is done to it; further keys are the options of the data set.

    ``train_samples`` and ``test_samples``: a fixed part of it, as many samples of each class (see
    `hesscond.data.preparation.chosen`). ``standardize``: each channel (coordinate) minus its mean over the training
    set, divided by its standard deviation; else images are scaled to [0, 1]. ``augmentation``: ``"crop"``, each image
    moved by up to 4 pixels with zeros around it, of a picture on disk a random part of the centre whose side is
    ``resize``; ``"resized-crop"``, a random part of the image or of the whole picture (0.08 to 1 of its area, 3/4 to
    4/3 as wide as high) brought to the image's size; ``"flip"``, mirrored left to right with probability ½;
    ``"cutout"``, zeros in a rectangle of half its height and width at a random place (16 × 16 for CIFAR). For points:
    ``"rotation"``, about the third axis by a random angle; ``"jitter"``, noise of 0.01 in each coordinate.
    """

    name: Annotated[str, found_by(SOURCES.find)]
    train_samples: PositiveInt | None = None
    test_samples: PositiveInt | None = None
    standardize: bool = False
    augmentation: Annotated[
        list[Literal["crop", "resized-crop", "flip", "cutout", "rotation", "jitter"]], AfterValidator(distinct)
    ] = []

    @classmethod
    def allowed_keys(cls, content: Mapping[str, Any]) -> Sequence[str]:
        """Keys that all data sets have, and the options of this one."""
        return [*cls.model_fields, *loading.options(str(content.get("name")))]

    @model_validator(mode="after")
    def options_fit(self) -> DataConfig:
        """Refuse options of the wrong kind, and changes that do not fit the kind of samples."""
        try:
            form = self.form
        except ConfigError as error:
            raise ValueError(str(error)) from None
        if self.standardize and form.tokens:
            raise misfit(["standardize"], f"the tokens of data set {self.name!r} have no mean: leave it out")
        for number, name in enumerate(self.augmentation):
            if name not in AUGMENTATIONS[form.kind]:
                names = ", ".join(AUGMENTATIONS[form.kind]) or "none"
                raise misfit(
                    ["augmentation", number],
                    f"{name!r} cannot change {INPUTS[form.kind]}, which data set {self.name!r} has: there are {names}",
                )
        settings = loading.options(self.name) | self.options
        if "crop" in self.augmentation and settings.get("resize", 0) == settings.get("size"):
            raise misfit(["resize"], f"a crop of size = {settings['size']} leaves out nothing of it: raise it")
        return self

    @property
    def form(self) -> Form:
        """Form of the samples."""
        return loading.form(self.name, **self.options)

    @property
    def preparation(self) -> tuple[str, ...]:
        """Preparation of the data set before training, as in `hesscond.data.Dataset.preparation`."""
        plain = {"train_samples": None, "test_samples": None, "standardize": False}
        settings = {key: getattr(self, key) for key in plain} | self.options
        return tuple(f"{key} = {value}" for key, value in sorted(settings.items()) if plain.get(key, ...) != value)


class ModelConfig(SectionWithOptions):
    """``[model]``: a network of `hesscond.models.MODELS`; the other keys are its options.

    Inputs are flattened for fully connected networks (``"mlp"``, which is meant where no name is given).
    """

    name: Annotated[str, found_by(MODELS.find)] = "mlp"

    @classmethod
    def allowed_keys(cls, content: Mapping[str, Any]) -> Sequence[str]:
        """The name, and the options of the network."""
        name = content.get("name", "mlp")
        return ["name", *(MODELS[name].options if name in MODELS else content)]

    @model_validator(mode="after")
    def options_fit(self) -> ModelConfig:
        """Refuse values of another kind than the defaults."""
        for option, value in self.options.items():
            try:
                MODELS[self.name].checked(option, value)
            except OptionError as error:
                raise misfit([option], str(error).removeprefix(f"option {option!r} ")) from None
        return self

    @property
    def architecture(self) -> Architecture:
        """Architecture of the network."""
        return MODELS[self.name]


class TrainingConfig(Section):
    """``[training]``: mini-batches of ``batch_size`` in a new random order every epoch, the remainder dropped.

    ``loss``: for classes ``"cross_entropy"``, ``"binary_cross_entropy"`` of every class against the others, or
    ``"mse"``, of outputs that are to be 1 for the class and 0 for the others; ``"mse"`` for values; the mean over all
    of them, and where a network has several predictions of them, as NeRF's two, the sum of these. ``optimizer``: takes
    the steps of a method that is no optimizer itself; the coordinates are those of the method, without the M of Adam,
    which those of ``--method adam+NAME`` have.
    ``momentum`` and ``nesterov`` belong to SGD: other optimizers refuse them. ``weight_decay``: λ of the λθ that is
    added to the gradient (by AdamW, to the step) of every parameter but those that the method leaves out.
    ``checkpoint_seconds``: how often the state is saved; what a kill loses is computed again, to the same numbers.
    """

    batch_size: PositiveInt
    epochs: PositiveInt | None = None
    iterations: PositiveInt | None = None
    loss: Literal["cross_entropy", "binary_cross_entropy", "mse"] = "cross_entropy"
    optimizer: OptimizerName = "sgd"
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.0
    nesterov: bool = False
    weight_decay: Annotated[float, Field(ge=0, le=LARGEST_RATE, allow_inf_nan=False)] = 0.0
    checkpoint_seconds: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 30.0

    @model_validator(mode="after")
    def one_length(self) -> TrainingConfig:
        """Require either epochs or iterations, and a momentum above 0 for Nesterov's step."""
        if (self.epochs is None) == (self.iterations is None):
            raise ValueError("give either epochs or iterations")
        if self.nesterov and self.momentum == 0:
            raise misfit(["nesterov"], "Nesterov's step needs a momentum above 0")
        return self

    @property
    def optimizer_options(self) -> dict[str, Any]:
        """Options of the optimizer other than the learning rate: the momentum, and others that are set."""
        settings = {"nesterov": self.nesterov, "weight_decay": self.weight_decay}
        kind = {} if self.optimizer == "sgd" else {"kind": self.optimizer}
        return {"momentum": self.momentum} | kind | {key: value for key, value in settings.items() if value}


#: The keys of ``[schedule]`` that belong to some kinds only.
SHAPE = {"milestones": ("steps",), "factor": ("steps", "exponential"), "end": ("cosine", "linear")}


class ScheduleConfig(Section):
    """``[schedule]``: factor of the learning rate at each iteration.

    ``kind``: ``"constant"``; ``"steps"``, multiplied by ``factor`` after each of the ``milestones`` (epochs);
    ``"exponential"``, multiplied by ``factor`` over each epoch; ``"cosine"`` or ``"linear"``, from 1 at the end of the
    warm-up down to ``end`` at the end of the run. During the warm-up, whose length W is given in epochs or iterations,
    the rate grows linearly from ``warmup_start`` times its value after it (1/W if not given), or stays there
    (``warmup = "constant"``).
    """

    kind: Literal["constant", "steps", "cosine", "linear", "exponential"] = "constant"
    milestones: Annotated[list[Annotated[float, Field(gt=0, allow_inf_nan=False)]], Field(min_length=1)] | None = None
    factor: Annotated[float, Field(gt=0, lt=1)] | None = None
    end: Annotated[float, Field(ge=0, lt=1)] = 0.0
    warmup_epochs: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    warmup_iterations: PositiveInt | None = None
    warmup_start: Annotated[float, Field(gt=0, le=1)] | None = None
    warmup: Literal["linear", "constant"] = "linear"

    @model_validator(mode="after")
    def keys_fit_the_kind(self) -> ScheduleConfig:
        """Refuse a key that the kind does not use, and the lack of one that it needs."""
        for key, kinds in SHAPE.items():
            given = key in self.model_fields_set and getattr(self, key) not in (None, 0.0)
            if given and self.kind not in kinds:
                raise misfit([key], f"belongs to kind = {' or '.join(map(repr, kinds))}, not to {self.kind!r}")
            if self.kind in kinds and getattr(self, key) is None:
                raise ValueError(f"kind = {self.kind!r} needs {key}")
        if self.milestones is not None and sorted(set(self.milestones)) != self.milestones:
            raise misfit(["milestones"], f"must ascend, got {self.milestones}")
        if self.warmup_epochs is not None and self.warmup_iterations is not None:
            raise misfit(["warmup_iterations"], "give either warmup_epochs or warmup_iterations")
        if self.warmup_start is not None and self.warmup_epochs is None and self.warmup_iterations is None:
            raise misfit(["warmup_start"], "needs the length of the warm-up: warmup_epochs or warmup_iterations")
        if self.warmup == "constant" and self.warmup_start is None:
            raise misfit(["warmup"], "a constant warm-up needs warmup_start")
        return self

    def scheduler(self, optimizer: Optimizer, *, per_epoch: int, iterations: int) -> LambdaLR | None:
        """Scheduler that sets the rates of ``optimizer`` once after every step; None if they are constant."""
        if self == ScheduleConfig():
            return None
        return LambdaLR(optimizer, self.factors(per_epoch=per_epoch, iterations=iterations))

    def factors(self, *, per_epoch: int, iterations: int) -> Callable[[int], float]:
        """Factor of the learning rate as a function of the iteration, given their number in an epoch and in all."""
        warmup = self.warmup_iterations or round((self.warmup_epochs or 0) * per_epoch)
        left = max(1, iterations - warmup)

        def factor(iteration: int) -> float:
            if iteration < warmup:
                if self.warmup_start is None:
                    return (iteration + 1) / warmup
                grown = iteration / warmup if self.warmup == "linear" else 0.0
                return self.warmup_start + (1 - self.warmup_start) * grown
            epoch, done = iteration / per_epoch, min(1.0, (iteration - warmup) / left)
            if self.kind == "steps":
                passed = sum(epoch >= milestone for milestone in self.milestones or ())
                return (self.factor or 1.0) ** passed
            if self.kind == "exponential":
                return (self.factor or 1.0) ** epoch
            if self.kind == "cosine":
                return self.end + (1 - self.end) * (1 + math.cos(math.pi * done)) / 2
            if self.kind == "linear":
                return self.end + (1 - self.end) * (1 - done)
            return 1.0

        return factor


def read_toml(path: Path, missing: str) -> dict[str, Any]:
    """Contents of a TOML file; ``missing``: the sentence if there is none."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(missing) from None
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is not valid TOML: {error}") from None


def validated(kind: type[Kind], content: Any, where: str = "") -> Kind:
    """Table of a kind with the given contents; ``where``: beginning of the sentence if they are wrong."""
    try:
        return kind.model_validate(content)
    except ValidationError as error:
        raise ConfigError(where + sentence(error)) from None


def named(key: tuple[str | int, ...]) -> str:
    """A key as it is in the file; one in an array of tables with the array's name and its number, from 1."""
    numbered = [place for place, part in enumerate(key) if isinstance(part, int)]
    if not numbered:
        return ".".join(map(str, key))
    place = numbered[0]
    before, number, after = ".".join(map(str, key[:place])), int(key[place]) + 1, key[place + 1 :]
    if after:
        return f"{named(after)} in [[{before}]] number {number}"
    return f"entry {number} of {before}"


def sentence(error: ValidationError) -> str:
    """The first thing wrong, as ``key: what was expected (got …)``."""
    first = error.errors()[0]
    # pydantic names the one of several types that a value was taken for
    key = tuple(
        part for part in first["loc"] if not str(part).startswith(("list[", "literal[", "constrained-", "function-"))
    )
    context = first.get("ctx", {})
    below: tuple[str | int, ...] = context["key"] if first["type"] == "misfit" else ()
    place, message = named((*key, *below)), first["msg"].removeprefix("Value error, ").replace("Input should", "must")
    message = re.sub(r"valid dictionary( or instance of \w+)?", "table", message)
    if message.startswith(UNKNOWN):
        table = f" in [{named(key)}]" if key else ""
        return f"unknown key {below[-1]!r}{table}: {message.removeprefix(UNKNOWN)}"
    if first["type"] == "missing":
        name, within, table = place.partition(" in ")
        return f"key {name!r} is missing{within}{table}"
    got = first["input"]
    shown = f" (got {got!r})" if isinstance(got, (str, int, float)) and repr(got) not in message else ""
    return f"{place}: {message}{shown}" if place else message
