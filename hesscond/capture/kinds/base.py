"""Protocol of a kind of layer, and the kind of a module."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar, TypeGuard

import torch
from torch import nn
from torch.nn.utils import parametrize

#: Type of the layers, for type checkers: a module of another kind has a weight and a bias too.
Layer = nn.Linear | nn.Conv1d | nn.Conv2d | nn.Conv3d | nn.ConvTranspose1d | nn.ConvTranspose2d | nn.ConvTranspose3d


@dataclass(frozen=True)
class Geometry:
    """Geometry of a layer, whose pre-activations depend on its weights by a_{p,i} = b_i + w_iᵀ h_{p,g(i)}."""

    kind: str  # name of the module's class
    units: int  # m, the number of output units (channels)
    groups: int  # G; unit i has the inputs of group g(i) = i // (m / G)
    fan_in: int  # n, the number of weights of a unit
    bias: bool
    channels: int  # number of input features or channels
    dims: int = 0  # number of dimensions of positions behind the channels; 0: the features are the last dimension

    @classmethod
    def of(cls, layer: Layer) -> Geometry:
        """Geometry of a layer of a known kind."""
        return kind_of(layer).geometry(layer)

    @property
    def n_params(self) -> int:
        """Number n̂ of parameters of a unit."""
        return self.fan_in + self.bias

    @property
    def per_channel(self) -> int:
        """Number of weights of a unit for each of its input channels."""
        return self.fan_in * self.groups // self.channels

    def group(self, unit: int) -> int:
        """Group g(unit) of the convolution whose inputs the unit sees."""
        return unit * self.groups // self.units


class LayerKind(ABC):
    """Kind of layer: modules with a ``weight`` and a ``bias`` (or None) that compute a_{p,i} = b_i + w_iᵀ h_{p,g(i)}.

    The same weights act at every position p of an output. A subclass is registered for its ``classes`` by being
    defined; their subclasses are of the same kind.
    """

    classes: ClassVar[tuple[type[nn.Module], ...]] = ()
    role: ClassVar[str] = "dense"  # as in `hesscond.role`
    rows_are_units: ClassVar[bool] = True  # whether the rows of the weight are the units, in order
    #: Methods that compute the output: a layer that overrides one is differentiated in its parameters.
    forward_methods: ClassVar[tuple[str, ...]] = ("forward", "__call__")
    #: Attributes that describe the layer, in addition to the ``__constants__`` of its class.
    arguments: ClassVar[tuple[str, ...]] = ()

    def __init_subclass__(cls) -> None:
        KINDS.update(dict.fromkeys(cls.classes, cls()))

    @abstractmethod
    def geometry(self, layer: Layer) -> Geometry:
        """Geometry of a layer, without reading its weight: a parametrization may change buffers."""

    @abstractmethod
    def weight_shape(self, layer: Layer) -> torch.Size:
        """Shape of the weight, without reading it."""

    @abstractmethod
    def windows(self, layer: Layer, x: torch.Tensor, output_shape: torch.Size) -> torch.Tensor:
        """Inputs (L, …, G, …) that the weights of each group multiply at each output position, as a view if possible.

        L is the leading dimension of the output (1 for an unbatched one). The first dots stand for the dimensions of
        the p output positions (one of a dense layer), the second for those of the n weights.
        """

    def unit_weights(self, layer: Layer, weights: torch.Tensor) -> torch.Tensor:
        """Weights or their derivatives (k, *weight.shape) with one row for each unit: (k, m, n)."""
        return weights.flatten(2)

    def from_unit_weights(self, layer: Layer, rows: torch.Tensor) -> torch.Tensor:
        """Weights (k, *weight.shape) from rows (k, m, n): inverse of `unit_weights`."""
        return rows.reshape(len(rows), *self.weight_shape(layer))


#: Kinds by class of module.
KINDS: dict[type[nn.Module], LayerKind] = {}


def class_of(module: nn.Module) -> type[nn.Module] | None:
    """Nearest class of a module that has a kind; None: the module is no layer."""
    return next((ancestor for ancestor in type(module).__mro__ if ancestor in KINDS), None)


def is_layer(module: nn.Module | None) -> TypeGuard[Layer]:
    """Whether a module is a layer of a known kind."""
    return module is not None and class_of(module) is not None


def is_turned(module: nn.Module | None) -> TypeGuard[Layer]:
    """Whether a module is a layer whose units are not the rows of its weight, as in a transposed convolution."""
    layer_class = None if module is None else class_of(module)
    return layer_class is not None and not KINDS[layer_class].rows_are_units


def kind_of(layer: Layer) -> LayerKind:
    """Kind of a layer."""
    layer_class = class_of(layer)
    assert layer_class is not None
    return KINDS[layer_class]


def has_bias(layer: Layer) -> bool:
    """Whether the layer has a bias, without reading it: computing a parametrization may change its buffers."""
    stored = layer._parameters.get("bias") is not None or vars(layer).get("bias") is not None
    return stored or parametrize.is_parametrized(layer, "bias")
