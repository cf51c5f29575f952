"""Layers that can be probed, and the rows ĥ that each of their output positions sees."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.nn.utils import parametrize

from hesscond.errors import ConfigError
from hesscond.problem.wrappers import unwrapped

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
Convolution = nn.Conv1d | nn.Conv2d | nn.Conv3d | nn.ConvTranspose1d | nn.ConvTranspose2d | nn.ConvTranspose3d
Layer = nn.Linear | Convolution
ELIGIBLE = (nn.Linear, *CONVOLUTIONS, *TRANSPOSED)


@dataclass(frozen=True)
class Geometry:
    """Geometry of a layer, whose pre-activations depend on its weights by a_{p,i} = b_i + w_iᵀ h_{p,g(i)}."""

    kind: str  # name of the module's class
    units: int  # m, the number of output units (channels)
    groups: int  # G; unit i has the inputs of group g(i) = i // (m / G)
    fan_in: int  # n, the number of weights of a unit
    bias: bool

    @classmethod
    def of(cls, layer: Layer) -> Geometry:
        """Geometry of an eligible module."""
        kind, bias = type(layer).__name__, has_bias(layer)
        if isinstance(layer, nn.Linear):
            return cls(kind, layer.out_features, 1, layer.in_features, bias)
        fan_in = layer.in_channels // layer.groups * prod(layer.kernel_size)
        return cls(kind, layer.out_channels, layer.groups, fan_in, bias)

    @property
    def n_params(self) -> int:
        """Number n̂ of parameters of a unit."""
        return self.fan_in + self.bias

    def group(self, unit: int) -> int:
        """Group g(unit) of the convolution whose inputs the unit sees."""
        return unit * self.groups // self.units


def has_bias(layer: Layer) -> bool:
    """Whether the layer has a bias, without reading it: computing a parametrization may change its buffers."""
    own = layer._parameters.get("bias") is not None or vars(layer).get("bias") is not None
    return own or parametrize.is_parametrized(layer, "bias")


def weight_shape(layer: Layer) -> torch.Size:
    """Shape of the weight, without reading the weight."""
    if isinstance(layer, nn.Linear):
        return torch.Size((layer.out_features, layer.in_features))
    outer, inner = layer.out_channels, layer.in_channels
    if isinstance(layer, TRANSPOSED):
        outer, inner = inner, outer
    return torch.Size((outer, inner // layer.groups, *layer.kernel_size))


def device_of(layer: nn.Module) -> torch.device:
    """Device of the layer, without reading its weight."""
    return next(itertools.chain(layer.parameters(), layer.buffers()), torch.empty(0)).device


def bare(layer: Layer) -> Layer:
    """Module of torch with the arguments and the device of a layer, and no parameters except an empty bias."""
    kind = next(kind for kind in ELIGIBLE if isinstance(layer, kind))
    found: Any = kind.__new__(kind)
    nn.Module.__init__(found)
    arguments = {*kind.__constants__, "_reversed_padding_repeated_twice"}
    vars(found).update({name: value for name, value in vars(layer).items() if name in arguments})
    found.register_buffer("place", torch.empty(0, device=device_of(layer)))
    found.register_parameter("bias", nn.Parameter(found.place) if has_bias(layer) else None)
    return found


def eligible_layers(model: nn.Module) -> dict[str, Layer]:
    """Layers that can be captured, by qualified name: dense, convolutional and transposed convolutional layers."""
    return {
        name or "model": module for name, module in unwrapped(model).named_modules() if isinstance(module, ELIGIBLE)
    }


def stock_class(layer: nn.Module) -> type[nn.Module] | None:
    """Class of torch whose forward pass a layer runs unchanged; None: the layer overrides it."""
    for kind in ELIGIBLE:
        if isinstance(layer, kind):
            own = ("forward", "_conv_forward", "__call__", "_output_padding")
            stock = all(getattr(type(layer), a, None) is getattr(kind, a, None) for a in own)
            return kind if stock and not set(own) & set(vars(layer)) else None
    return None


def is_plain(layer: Layer) -> bool:
    """Whether a layer is known to compute W h + b with W and b its parameters."""
    return stock_class(layer) is not None and not is_computed(layer)


def is_computed(layer: nn.Module) -> bool:
    """Whether the weight or bias of a layer is computed from other tensors: parametrized, pruned, a property."""
    registered = layer._parameters
    return "weight" not in registered or not isinstance(registered["weight"], nn.Parameter) or "bias" not in registered


def own_parameters(layer: Layer) -> list[nn.Parameter]:
    """Weight and bias of a layer as far as they are parameters, not computed from others."""
    return [p for key in ("weight", "bias") if (p := layer._parameters.get(key)) is not None]


def dense_layers(model: nn.Module) -> dict[str, nn.Linear]:
    """Modules of class `torch.nn.Linear`, by qualified name."""
    return {name: layer for name, layer in eligible_layers(model).items() if isinstance(layer, nn.Linear)}


def chosen_layers(model: nn.Module, names: Iterable[str] | None) -> dict[str, Layer]:
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


def checked_units(name: str, layer: Layer, units: Sequence[int] | None) -> tuple[int, ...]:
    """Return ``units`` of the layer (None: all), or raise a ConfigError for a unit out of range."""
    count = Geometry.of(layer).units
    chosen = tuple(range(count)) if units is None else tuple(units)
    for unit in chosen:
        if not 0 <= unit < count:
            raise ConfigError(f"unit {unit} is out of range: layer {name!r} has units 0 to {count - 1}")
    return chosen


def by_position(layer: Layer, values: torch.Tensor, *, leading: int = 0) -> torch.Tensor:
    """Pre-activations (…, L, p, m) from the layer's output layout, with ``leading`` dimensions in front.

    L is the leading dimension of the output (1 for an unbatched one), p the number of its positions.
    """
    front = values.shape[:leading]
    if isinstance(layer, nn.Linear):
        length = values.shape[leading] if values.ndim > leading + 1 else 1
        return values.reshape(*front, length, -1, values.shape[-1])
    if values.ndim == leading + len(layer.kernel_size) + 1:
        values = values.unsqueeze(leading)
    return values.flatten(leading + 2).transpose(-1, -2)


def from_position(layer: Layer, values: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    """Values (k, L, p, m) in the layer's output layout (k, *shape): inverse of `by_position`."""
    if not isinstance(layer, nn.Linear):
        values = values.transpose(-1, -2)
    return values.reshape(len(values), *shape)


def windows(layer: Convolution, x: torch.Tensor, output_shape: torch.Size) -> torch.Tensor:
    """Inputs (L, …, G, …) of a convolution that the weights of each group multiply at each output position.

    They are a view of the padded input: the first dots stand for the dimensions of the p output positions, the second
    for those of the n weights. A transposed convolution is the convolution of stride 1 with the flipped kernel over
    the input spread out by its stride.
    """
    dims = len(layer.kernel_size)
    if x.ndim == dims + 1:
        x = x.unsqueeze(0)
    sizes = tuple(output_shape[-dims:])
    kernel, dilation = layer.kernel_size, layer.dilation
    reach = [d * (k - 1) for d, k in zip(dilation, kernel, strict=True)]
    if isinstance(layer, TRANSPOSED):
        stride = [1] * dims
        spread = x.new_zeros(*x.shape[:2], *((s - 1) * t + 1 for s, t in zip(x.shape[2:], layer.stride, strict=True)))
        every: tuple[Any, ...] = tuple(slice(None, None, t) for t in layer.stride)
        spread[(..., *every)] = x
        padding = []
        for axis in reversed(range(dims)):
            left = reach[axis] - int(layer.padding[axis])
            padding += [left, sizes[axis] + reach[axis] - left - spread.shape[2 + axis]]
        x = functional.pad(spread, padding)
    else:
        stride = list(layer.stride)
        mode = "constant" if layer.padding_mode == "zeros" else layer.padding_mode
        if any(layer._reversed_padding_repeated_twice):
            x = functional.pad(x, layer._reversed_padding_repeated_twice, mode=mode)
    x = x.contiguous()
    groups = layer.groups
    per_group = x.shape[1] // groups
    steps = x.stride()
    view = x.as_strided(
        (len(x), *sizes, groups, per_group, *kernel),
        (
            steps[0],
            *(steps[2 + a] * stride[a] for a in range(dims)),
            steps[1] * per_group,
            steps[1],
            *(steps[2 + a] * dilation[a] for a in range(dims)),
        ),
    )
    if isinstance(layer, TRANSPOSED):
        view = view.flip(tuple(range(-dims, 0)))
    return view


def unit_weights(layer: Layer, weights: torch.Tensor) -> torch.Tensor:
    """Weights or their derivatives (k, *weight.shape) with one row for each unit: (k, m, n)."""
    if not isinstance(layer, TRANSPOSED):
        return weights.flatten(2)
    grouped = weights.reshape(len(weights), layer.groups, -1, weights.shape[2], prod(layer.kernel_size))
    return grouped.transpose(2, 3).reshape(len(weights), layer.out_channels, -1)


def from_unit_weights(layer: Layer, rows: torch.Tensor) -> torch.Tensor:
    """Weights (k, *weight.shape) from rows (k, m, n): inverse of `unit_weights`."""
    if not isinstance(layer, TRANSPOSED):
        return rows.reshape(len(rows), *weight_shape(layer))
    grouped = rows.reshape(len(rows), layer.groups, weight_shape(layer)[1], -1, prod(layer.kernel_size))
    return grouped.transpose(2, 3).reshape(len(rows), *weight_shape(layer))


def parameter_tensors(layer: Layer, rows: torch.Tensor) -> list[torch.Tensor]:
    """Weight (k, *weight.shape), and bias (k, m) if there is one, from the parameters [b_i; w_i] of units (k, m, n̂)."""
    if not has_bias(layer):
        return [from_unit_weights(layer, rows)]
    return [from_unit_weights(layer, rows[:, :, 1:]), rows[:, :, 0]]


def parameter_rows(layer: Layer, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Parameters [b_i; w_i] of units (k, m, n̂) from the weight and bias: inverse of `parameter_tensors`."""
    rows = unit_weights(layer, tensors[0])
    return torch.cat([tensors[1][:, :, None], rows], 2) if len(tensors) > 1 else rows
