"""Layers of a model that can be probed, and the layouts of their parameters and outputs."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn

from hesscond.capture import kinds
from hesscond.errors import ConfigError
from hesscond.problem.wrappers import unwrapped


def device_of(layer: nn.Module) -> torch.device:
    """Device of the layer, without reading its weight."""
    return next(itertools.chain(layer.parameters(), layer.buffers()), torch.empty(0, device="cpu")).device


def bare(layer: kinds.Layer) -> kinds.Layer:
    """Module of the layer's class with its arguments and its device, and no parameters except an empty bias."""
    layer_class, kind = kinds.class_of(layer), kinds.kind_of(layer)
    assert layer_class is not None
    module: Any = layer_class.__new__(layer_class)
    nn.Module.__init__(module)
    arguments = {*getattr(layer_class, "__constants__", ()), *kind.arguments}
    vars(module).update({name: value for name, value in vars(layer).items() if name in arguments})
    module.register_buffer("place", torch.empty(0, device=device_of(layer)))
    module.register_parameter("bias", nn.Parameter(module.place) if kinds.has_bias(layer) else None)
    return module


def eligible_layers(model: nn.Module) -> dict[str, kinds.Layer]:
    """Layers that can be captured, by qualified name: the modules of a known kind that have units."""
    layers = {name or "model": module for name, module in unwrapped(model).named_modules() if kinds.is_layer(module)}
    return {name: layer for name, layer in layers.items() if 0 not in kinds.kind_of(layer).weight_shape(layer)}


def stock_class(layer: kinds.Layer) -> type[nn.Module] | None:
    """Class with a kind whose forward pass a layer runs unchanged; None: the layer overrides it."""
    layer_class, methods = kinds.class_of(layer), kinds.kind_of(layer).forward_methods
    stock = all(getattr(type(layer), a, None) is getattr(layer_class, a, None) for a in methods)
    return layer_class if stock and not set(methods) & set(vars(layer)) else None


def is_plain(layer: kinds.Layer) -> bool:
    """Whether a layer is known to compute W h + b with W and b its parameters."""
    return stock_class(layer) is not None and not is_computed(layer)


def is_computed(layer: nn.Module) -> bool:
    """Whether the weight or bias of a layer is computed from other tensors: parametrized, pruned, a property."""
    registered = layer._parameters
    return "weight" not in registered or not isinstance(registered["weight"], nn.Parameter) or "bias" not in registered


def own_parameters(layer: kinds.Layer) -> list[nn.Parameter]:
    """Weight and bias of a layer as far as they are parameters, not computed from others."""
    return [p for key in ("weight", "bias") if (p := layer._parameters.get(key)) is not None]


def dense_layers(model: nn.Module) -> dict[str, nn.Linear]:
    """Modules of class `torch.nn.Linear`, by qualified name."""
    return {name: layer for name, layer in eligible_layers(model).items() if isinstance(layer, nn.Linear)}


def chosen_layers(model: nn.Module, names: Iterable[str] | None) -> dict[str, kinds.Layer]:
    """Layers called ``names`` (None: all), by name; a ConfigError if there is none, or none of a name."""
    layers = eligible_layers(model)
    if not layers:
        raise ConfigError("the model has no layer to probe: it needs a torch.nn.Linear, Conv or ConvTranspose module")
    wanted = list(layers) if names is None else list(names)
    if not wanted:
        raise ConfigError("no layer was named: leave layers= out for all of them")
    for name in wanted:
        if name not in layers:
            raise ConfigError(f"no layer {name!r} to probe in the model: it has {', '.join(layers)}")
    return {name: layers[name] for name in wanted}


def tied_layers(model: nn.Module) -> set[str]:
    """Names of the layers that share a parameter with another layer."""
    owners: dict[int, list[str]] = {}
    for name, layer in eligible_layers(model).items():
        for parameter in layer.parameters(recurse=False):
            owners.setdefault(id(parameter), []).append(name)
    return {name for names in owners.values() if len(names) > 1 for name in names}


def checked_units(name: str, layer: kinds.Layer, units: Sequence[int] | None) -> tuple[int, ...]:
    """Return ``units`` of the layer (None: all), or raise a ConfigError for a unit out of range."""
    count = kinds.Geometry.of(layer).units
    chosen = tuple(range(count)) if units is None else tuple(units)
    for unit in chosen:
        if not 0 <= unit < count:
            raise ConfigError(f"unit {unit} is out of range: layer {name!r} has units 0 to {count - 1}")
    return chosen


def by_position(layer: kinds.Layer, values: torch.Tensor, *, leading: int = 0) -> torch.Tensor:
    """Pre-activations (…, L, p, m) from the layer's output layout, with ``leading`` dimensions in front.

    L is the leading dimension of the output (1 for an unbatched one), p the number of its positions.
    """
    dims = kinds.Geometry.of(layer).dims
    if not dims:
        length = values.shape[leading] if values.ndim > leading + 1 else 1
        return values.reshape(*values.shape[:leading], length, -1, values.shape[-1])
    if values.ndim == leading + dims + 1:
        values = values.unsqueeze(leading)
    return values.flatten(leading + 2).transpose(-1, -2)


def from_position(layer: kinds.Layer, values: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    """Values (k, L, p, m) in the layer's output layout (k, *shape): inverse of `by_position`."""
    if kinds.Geometry.of(layer).dims:
        values = values.transpose(-1, -2)
    return values.reshape(len(values), *shape)


def unit_weights(layer: kinds.Layer, weights: torch.Tensor) -> torch.Tensor:
    """Weights or their derivatives (k, *weight.shape) with one row for each unit: (k, m, n)."""
    return kinds.kind_of(layer).unit_weights(layer, weights)


def from_unit_weights(layer: kinds.Layer, rows: torch.Tensor) -> torch.Tensor:
    """Weights (k, *weight.shape) from rows (k, m, n): inverse of `unit_weights`."""
    return kinds.kind_of(layer).from_unit_weights(layer, rows)


def parameter_tensors(layer: kinds.Layer, rows: torch.Tensor) -> list[torch.Tensor]:
    """Weight (k, *weight.shape), and bias (k, m) if there is one, from the parameters [b_i; w_i] of units (k, m, n̂)."""
    if not kinds.has_bias(layer):
        return [from_unit_weights(layer, rows)]
    return [from_unit_weights(layer, rows[:, :, 1:]), rows[:, :, 0]]


def parameter_rows(layer: kinds.Layer, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Parameters [b_i; w_i] of units (k, m, n̂) from the weight and bias: inverse of `parameter_tensors`."""
    rows = unit_weights(layer, tensors[0])
    return torch.cat([tensors[1][:, :, None], rows], 2) if len(tensors) > 1 else rows
