"""What a study's network looks like before it is built: its layers and their units, and whether it fits the data."""

from __future__ import annotations

import fnmatch
import json
from collections.abc import Mapping
from functools import lru_cache

import torch

from hesscond.capture import Geometry, eligible_layers
from hesscond.data import Form
from hesscond.errors import ConfigError
from hesscond.models import MODELS, OptionError
from hesscond.study.config import StudyConfig
from hesscond.study.sections import ModelConfig
from hesscond.theorems import LayerStatement, statement

#: What each kind of network sees, for people.
INPUTS = {
    "vector": "inputs that are numbers",
    "image": "images (channels, height, width)",
    "points": "clouds of points (points, d)",
    "coordinates": "coordinates (d,)",
    "tokens": "tokens (context,)",
}


class Misfit(ConfigError):
    """A part of a study that does not fit another.

    Attributes
    ----------
    key
        Where in the study.
    """

    def __init__(self, key: tuple[str | int, ...], words: str) -> None:
        super().__init__(f"{'.'.join(map(str, key))}: {words}")
        self.key = key


def layers_of(model: ModelConfig, form: Form) -> Mapping[str, Geometry]:
    """The layers that can be probed, by name, in the order of the network; the last is the output layer.

    Raises
    ------
    Misfit
        The network is not for such inputs, or an option does not fit.
    """
    wanted, taken = model.architecture.kind, (form.kind,) if form.tokens else (form.kind, "vector")
    if wanted not in taken:
        fitting = ", ".join(name for name, own in MODELS.items() if own.kind in taken)
        raise Misfit(
            ("model", "name"),
            f"model {model.name!r} needs {INPUTS[wanted]}, but the inputs of this data set have the shape "
            f"{form.input_shape}: choose another data set, or a model from {fitting}",
        )
    try:
        return skeleton(model.name, json.dumps(model.options), form)
    except OptionError as error:
        raise Misfit(("model", error.option), str(error)) from None
    except ConfigError as error:
        raise Misfit(("model",), str(error)) from None


@lru_cache(maxsize=64)
def skeleton(name: str, options: str, form: Form) -> Mapping[str, Geometry]:
    """The layers of the network built without values."""
    # the meta device gives shapes, and takes neither time nor memory
    with torch.device("meta"):
        model = MODELS[name](input_shape=form.input_shape, outputs=form.outputs, **json.loads(options))
    return {name: Geometry.of(layer) for name, layer in eligible_layers(model).items()}


def probed_layers(study: StudyConfig) -> list[str]:
    """The layers that the study measures: those it names, or the output layer; in its order, ``*`` in the network's.

    Raises
    ------
    Misfit
        The network does not fit the data, or has no such layer.
    """
    layers = layers_of(study.model, study.data.form)
    if study.probe.layers is None:
        return [list(layers)[-1]]
    found: dict[str, None] = {}
    for number, name in enumerate(study.probe.layers):
        # brackets mean themselves
        own = fnmatch.filter(layers, name.replace("[", "[[]"))
        if not own:
            raise Misfit(("probe", "layers", number), f"no layer {name!r} in the model, it has {', '.join(layers)}")
        found |= dict.fromkeys(own)
    return list(found)


def check_structure(study: StudyConfig) -> None:
    """See that network, data, loss and probe fit each other; nothing is loaded for it.

    Raises
    ------
    Misfit
        They do not.
    """
    form = study.data.form
    fitting = ("cross_entropy", "binary_cross_entropy")[: 1 if form.tokens else 2] if form.classes else ("mse",)
    if study.training.loss not in fitting:
        there = "tokens" if form.tokens else "class labels" if form.classes else "values to predict, no classes"
        raise Misfit(
            ("training", "loss"), f"the data set {study.data.name!r} has {there}: use {' or '.join(map(repr, fitting))}"
        )
    layers = layers_of(study.model, form)
    for name in probed_layers(study):
        for number, unit in enumerate(study.probe.units):
            if unit >= layers[name].units:
                raise Misfit(
                    ("probe", "units", number),
                    f"unit {unit} is out of range: layer {name!r} has units 0 to {layers[name].units - 1}",
                )
        for number, own in enumerate(study.statements):
            found = statement(own.id)
            if isinstance(found, LayerStatement) and layers[name].kind not in found.layers:
                raise Misfit(
                    ("statements", number),
                    f"{own.id} speaks of {' and '.join(found.layers)} layers, but layer {name!r} is a "
                    f"{layers[name].kind}: probe others",
                )
