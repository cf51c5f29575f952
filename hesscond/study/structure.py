"""Structure of a study's network before it is built: its layers and their units, and whether it fits the data."""

from __future__ import annotations

import json
from functools import lru_cache

import torch

from hesscond.capture import Geometry, eligible_layers
from hesscond.data import Form
from hesscond.errors import ConfigError
from hesscond.hessians import catalogue
from hesscond.hessians.blocks import Block
from hesscond.models import MODELS, OptionError
from hesscond.study import sections
from hesscond.study.config import StudyConfig


def catalogue_of(model: sections.ModelConfig, form: Form) -> catalogue.Catalogue:
    """Catalogue of the blocks of the network that can be probed."""
    wanted, kinds = model.architecture.kind, (form.kind,) if form.tokens else (form.kind, "vector")
    if wanted not in (*kinds, "any"):
        fitting = ", ".join(name for name, architecture in MODELS.items() if architecture.kind in kinds)
        reason = f"the inputs of this data set have the shape {form.input_shape}"
        raise ConfigError(
            f"model.name: model {model.name!r} needs {sections.INPUTS[wanted]}, but {reason}: choose another data set, "
            f"or a model from {fitting}"
        )
    try:
        return skeleton(model.name, json.dumps(model.options), form)
    except OptionError as error:
        raise ConfigError(f"model.{error.option}: {error}") from None
    except ConfigError as error:
        raise ConfigError(f"model: {error}") from None


@lru_cache(maxsize=64)
def skeleton(name: str, options: str, form: Form) -> catalogue.Catalogue:
    """The blocks of the network built without values."""
    # the meta device gives shapes, and takes neither time nor memory
    with torch.device("meta"):
        model = MODELS[name](input_shape=form.input_shape, outputs=form.outputs, **json.loads(options))
    return catalogue.Catalogue(model)


def probed_blocks(study: StudyConfig) -> dict[str, Block]:
    """Blocks to measure by name: those the study names, or the output layer; ``*`` in the network's order."""
    known = catalogue_of(study.model, study.data.form)
    level = "unit" if "unit" in study.probe.levels else "layer"
    blocks: dict[str, Block] = {}
    for number, name in enumerate(study.probe.layers or list(eligible_layers(known.model))[-1:]):
        try:
            blocks |= catalogue.Choice.of(known.model, name, None, level).blocks(known.model)
        except ConfigError as error:
            raise ConfigError(f"probe.layers.{number}: {error}") from None
    return blocks


def check_structure(study: StudyConfig) -> None:
    """Check that network, data, loss and probe fit each other; nothing is loaded for it."""
    form = study.data.form
    fitting = ("cross_entropy", "binary_cross_entropy", "mse")[: 1 if form.tokens else 3] if form.classes else ("mse",)
    if study.training.loss not in fitting:
        targets = "tokens" if form.tokens else "class labels" if form.classes else "values to predict, no classes"
        choices = " or ".join(map(repr, fitting))
        raise ConfigError(f"training.loss: the data set {study.data.name!r} has {targets}: use {choices}")
    for name, block in probed_blocks(study).items():
        if "unit" in study.probe.levels:
            if not block.units:
                raise ConfigError(f"probe.layers: {block.undivided}".replace("level='layer'", 'levels = ["layer"]'))
            units = study.probe.units
            for number, unit in enumerate(() if isinstance(units, str) else units):
                if unit not in block.units:
                    unit_range = f"layer {name!r} has units {block.units[0]} to {block.units[-1]}"
                    raise ConfigError(f"probe.units.{number}: unit {unit} is out of range: {unit_range}")
        for number, entry in enumerate(study.statements):
            kind = None if block.layer is None else Geometry.of(block.layer).kind
            if kind is None or "unit" not in study.probe.levels:
                what, wrong = "units of ", "none of these" if kind is None else "measured as a whole"
            elif kind not in entry.statement.layers:
                what, wrong = "", f"a {kind}"
            else:
                continue
            layers = " and ".join(entry.statement.layers)
            raise ConfigError(
                f"statements.{number}: {entry.id} speaks of {what}{layers} layers, but layer {name!r} is {wrong}: "
                "probe others"
            )
