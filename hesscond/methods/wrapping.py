"""Putting modules around the layers of any model."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

from torch import nn

from hesscond.capture import Layer, eligible_layers
from hesscond.errors import ConfigError

#: Name that stands for the first and the last of the layers that a method works on.
ENDS = "ends"


class Wrapped(nn.Sequential):
    """A layer with what was put before or after it: children ``before`` and ``layer``, or ``layer`` and ``after``."""


def wrap(model: nn.Module, name: str, module: nn.Module, *, after: bool) -> None:
    """Put a module after or before a layer, everywhere in the model where it is; it goes to its device and dtype."""
    layer = model.get_submodule(name)
    if layer is model or name in ("", "model"):
        raise ConfigError(
            "the model is a single layer that nothing can be put around: wrap it in a torch.nn.Sequential"
        )
    like = next(layer.parameters())
    module.to(device=like.device, dtype=like.dtype)
    parts = {"layer": layer, "after": module} if after else {"before": module, "layer": layer}
    put(model, layer, Wrapped(OrderedDict(parts)))


def put(model: nn.Module, old: nn.Module, new: nn.Module) -> None:
    """Put a module into every place of a model where another one is, in the mode of that one."""
    places = [(parent, key) for parent in model.modules() for key, m in parent._modules.items() if m is old]
    new.train(old.training)
    for parent, key in places:
        parent._modules[key] = new


def place_of(model: nn.Module, name: str) -> str:
    """Where the layer is that was called ``name`` before anything was put around it."""
    modules = dict(model.named_modules())
    while isinstance(modules.get(name), Wrapped):
        name += ".layer"
    return name


def layers_of(
    model: nn.Module, names: Iterable[str] | None = None, *, first: bool = True, output: bool = True
) -> dict[str, Layer]:
    """The dense and convolutional layers of a model that a method works on, in the order of the model."""
    layers = eligible_layers(model)
    if not output and layers:
        layers.popitem()
    if not first and layers:
        del layers[next(iter(layers))]
    if names is not None:
        wanted = [place_of(model, name) for name in names]
        if wanted == [ENDS] and ENDS not in layers and layers:
            wanted = [next(iter(layers)), next(reversed(layers))]
        for name in wanted:
            if name not in layers:
                raise ConfigError(f"no layer {name!r} to choose: there is {', '.join(layers) or 'none'}")
        layers = {name: layers[name] for name in wanted}
    if not layers:
        raise ConfigError("the model has no dense or convolutional layer that this method works on")
    return layers
