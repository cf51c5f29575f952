"""Layouts: parameters of an operator, and their order in its vectors."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import nn

from hesscond.capture import kinds
from hesscond.capture.captured import Request
from hesscond.capture.layers import (
    checked_units,
    chosen_layers,
    eligible_layers,
    is_plain,
    own_parameters,
    parameter_rows,
    parameter_tensors,
    unit_weights,
)
from hesscond.errors import CaptureError, ConfigError
from hesscond.hessians.blocks import Block
from hesscond.problem.problem import WatchedEvaluation

if TYPE_CHECKING:
    import pandas as pd


class Layout:
    """Order of parameters in vectors (n,): one after another, each flattened as torch does.

    ``parts`` has the rows of each parameter, or of each layer, by name; ``whole``: no parameter lacks entries.
    """

    whole = True

    def __init__(self, named: Sequence[tuple[str, nn.Parameter]], parts: Mapping[str, int] | None = None) -> None:
        self.names = [name for name, _ in named]
        self.tensors = [parameter for _, parameter in named]
        self.shapes = [parameter.shape for parameter in self.tensors]
        self.parts: dict[str, slice] = {}
        self.order = 0
        for name, size in (parts or {name: p.numel() for name, p in named}).items():
            self.parts[name] = slice(self.order, self.order + size)
            self.order += size
        if not self.order:
            raise ConfigError("there is no parameter to differentiate in: none was named, or none requires a gradient")

    def tensors_of(self, vector: torch.Tensor) -> Sequence[torch.Tensor]:
        """Tensors in the shapes of the parameters, in the order of ``names``; zero in entries that are left out."""
        sizes = [shape.numel() for shape in self.shapes]
        return [part.view(shape) for part, shape in zip(vector.split(sizes), self.shapes, strict=True)]

    def vector_of(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        """(n,) from tensors in the shapes of the parameters."""
        return torch.cat([tensor.reshape(-1) for tensor in tensors])

    def entries(self, model: nn.Module) -> pd.DataFrame:
        """Table with one row per entry of the vectors: parameter, index in it (a tuple), unit, and name."""
        import pandas as pd

        plain = {
            id(parameter): layer
            for layer in eligible_layers(model).values()
            if is_plain(layer)
            for parameter in own_parameters(layer)
        }
        layers = [plain.get(id(tensor)) for tensor in self.tensors]
        # number of each entry among those of all the parameters, one after another
        sizes = torch.tensor([prod(shape) for shape in self.shapes], device="cpu")
        numbers, device = torch.arange(int(sizes.sum()), device="cpu").split(sizes.tolist()), self.tensors[0].device
        tensors = [part.view(shape).to(device) for part, shape in zip(numbers, self.shapes, strict=True)]
        entries, starts = self.vector_of(tensors).cpu(), sizes.cumsum(0) - sizes
        owners = torch.bucketize(entries, starts, right=True) - 1
        rows = []
        for owner, offset in zip(owners.tolist(), (entries - starts[owners]).tolist(), strict=True):
            place = [int(at) for at in np.unravel_index(offset, self.shapes[owner])]
            name, layer = self.names[owner], layers[owner]
            unit, text = (None, f"{name}{place}") if layer is None else named_entry(layer, place)
            rows.append((name, tuple(place), unit, text))
        return pd.DataFrame(rows, columns=["parameter", "index", "unit", "name"]).astype({"unit": "Int64"})


def named_entry(layer: kinds.Layer, place: list[int]) -> tuple[int, str]:
    """Unit and name of an entry of the weight or bias of a layer, by its index."""
    geometry = kinds.Geometry.of(layer)
    if len(place) == 1:
        return place[0], "bias"
    unit, channel, *offset = place
    units, channels = geometry.units // geometry.groups, geometry.channels // geometry.groups
    if kinds.is_turned(layer):
        unit, channel = channel + unit // channels * units, unit
    else:
        channel += unit // units * channels
    if not offset:
        return unit, f"feature {channel}"
    return unit, f"channel {channel}, offset {tuple(offset) if len(offset) > 1 else offset[0]}"


class UnitLayout(Layout):
    """Layers one after another, each unit by unit as [b_i, w_i] (no b_i without bias)."""

    def __init__(
        self,
        model: nn.Module,
        layers: Mapping[str, kinds.Layer],
        unit: int | None,
        named: Sequence[tuple[str, nn.Parameter]] | None = None,
    ) -> None:
        self.layers = dict(layers)
        self.geometries = {name: kinds.Geometry.of(layer) for name, layer in layers.items()}
        chosen = None if unit is None else [unit]
        self.units = {name: checked_units(name, layer, chosen) for name, layer in layers.items()}
        super().__init__(
            [pair for name, layer in layers.items() for pair in parameters_of(model, name, layer)]
            if named is None
            else named,
            {name: len(self.units[name]) * self.geometries[name].n_params for name in layers},
        )
        refuse_twice(self.names, self.tensors)

    def rows(self, layer: str, vectors: torch.Tensor) -> torch.Tensor:
        """Part of ``vectors`` (n, …) that belongs to a layer, (units, n̂, …)."""
        return vectors[self.parts[layer]].unflatten(0, (-1, self.geometries[layer].n_params))

    def tensors_of(self, vector: torch.Tensor) -> Sequence[torch.Tensor]:
        """Weight and bias of each layer, zero in the units that are left out."""
        tensors = []
        for name, layer in self.layers.items():
            geometry, units, rows = self.geometries[name], self.units[name], self.rows(name, vector)
            if len(units) < geometry.units:
                rows = rows.new_zeros(geometry.units, geometry.n_params).index_copy_(0, self._index(name, rows), rows)
            tensors += [part[0] for part in parameter_tensors(layer, rows[None])]
        return tensors

    def vector_of(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        given, parts = iter(tensors), []
        for name, layer in self.layers.items():
            geometry = self.geometries[name]
            rows = parameter_rows(layer, [next(given)[None] for _ in range(1 + geometry.bias)])[0]
            if len(self.units[name]) < geometry.units:
                rows = rows[self._index(name, rows)]
            parts.append(rows.reshape(-1))
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _index(self, layer: str, like: torch.Tensor) -> torch.Tensor:
        return torch.tensor(self.units[layer], device=like.device)


class BlockLayout(Layout):
    """Blocks one after another, each in the order of its pieces."""

    def __init__(self, blocks: Sequence[Block], tensors: Mapping[str, nn.Parameter]) -> None:
        names = dict.fromkeys(name for block in blocks for name in block.parameters)
        super().__init__([(name, tensors[name]) for name in names], {block.name: block.order for block in blocks})
        place, device = {name: number for number, name in enumerate(names)}, self.tensors[0].device
        #: number of the parameter, rows of the vector and indices in the parameter (None: all), for each piece
        self._pieces: list[tuple[int, slice, torch.Tensor | None]] = []
        end = 0
        for piece in (piece for block in blocks for piece in block.pieces):
            index = piece.index()
            span = slice(end, end := end + piece.size)
            self._pieces.append((place[piece.parameter], span, None if index is None else index.to(device)))
        self.whole = all(index is None for *_, index in self._pieces)

    def tensors_of(self, vector: torch.Tensor) -> Sequence[torch.Tensor]:
        flat: dict[int, torch.Tensor] = {}
        for number, span, index in self._pieces:
            if index is None:
                flat[number] = vector[span]
                continue
            if number not in flat:
                flat[number] = vector.new_zeros(self.shapes[number].numel())
            flat[number].index_copy_(0, index, vector[span])
        return [flat[number].view(shape) for number, shape in enumerate(self.shapes)]

    def vector_of(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        flat = [tensor.reshape(-1) for tensor in tensors]
        return torch.cat([flat[at] if index is None else flat[at][index] for at, _, index in self._pieces])


def layout_of(
    model: nn.Module,
    *,
    layers: Iterable[str] | str | None = None,
    unit: int | None = None,
    parameters: Iterable[str] | str | None = None,
) -> Layout:
    """Layout of layers, of one unit of a layer, or of parameters; by default of all trained parameters."""
    if layers is not None and parameters is not None:
        raise ConfigError("layers and parameters were both given: name one or the other")
    if layers is not None:
        chosen = chosen_layers(model, [layers] if isinstance(layers, str) else layers)
        if unit is not None and len(chosen) != 1:
            raise ConfigError(f"unit={unit} is of one layer, but {len(chosen)} were named: name the one it belongs to")
        return UnitLayout(model, chosen, unit)
    if unit is not None:
        raise ConfigError(f"unit={unit} was given without its layer: name it with layers=")
    if parameters is None:
        return Layout([(name, p) for name, p in model.named_parameters() if p.requires_grad])
    known = dict(model.named_parameters(remove_duplicate=False))
    named = []
    for name in [parameters] if isinstance(parameters, str) else parameters:
        if name not in known:
            raise ConfigError(f"no parameter {name!r} in the model: it has {', '.join(known)}")
        named.append((name, known[name]))
    refuse_twice([name for name, _ in named], [parameter for _, parameter in named])
    return Layout(named)


def parameters_of(model: nn.Module, name: str, layer: kinds.Layer) -> list[tuple[str, nn.Parameter]]:
    """Weight and bias of a layer with their names."""
    pairs = []
    for attribute in ("weight", "bias"):
        if attribute == "bias" and not kinds.has_bias(layer):
            continue
        value = layer._parameters.get(attribute)
        if value is None:
            raise CaptureError(
                f"the {attribute} of layer {name!r} is computed from other parameters: name these with parameters="
            )
        pairs.append((attribute if layer is model else f"{name}.{attribute}", value))
    return pairs


def refuse_twice(names: Sequence[str], parameters: Sequence[nn.Parameter]) -> None:
    """Raise a ConfigError if a parameter is there twice."""
    first: dict[int, str] = {}
    for name, parameter in zip(names, parameters, strict=True):
        if id(parameter) in first:
            raise ConfigError(f"{first[id(parameter)]!r} and {name!r} are one parameter: name it once")
        first[id(parameter)] = name


@dataclass(frozen=True)
class Placement:
    """Rows of a vector that belong to a layer."""

    name: str
    layer: kinds.Layer
    index: torch.Tensor  # (m, w) row of each parameter of a unit, [b_i, w_i] or w_i alone
    first: int  # 0, or 1 where the layer has a bias that is not among the parameters

    @property
    def geometry(self) -> kinds.Geometry:
        """Geometry of the layer."""
        return kinds.Geometry.of(self.layer)

    @property
    def squares(self) -> int:
        """Bytes of three matrices (m/G, m/G) and (n̂, n̂), for null directions and inverses."""
        units, width = self.index.shape
        return 24 * ((units // self.geometry.groups) ** 2 + width**2)

    def request(self, evaluation: WatchedEvaluation) -> Request:
        """Calls of the layer in an evaluation."""
        return Request(self.name, self.layer, evaluation.calls[self.name], (), True)


def placements(layout: Layout, model: nn.Module) -> list[Placement]:
    """Layers all of whose weights are in the layout; of layers that share a weight, the first."""
    numbers = layout.tensors_of(torch.arange(1, layout.order + 1, device=layout.tensors[0].device))
    rows = {id(p): number.cpu() - 1 for p, number in zip(layout.tensors, numbers, strict=True)}
    places = []
    for name, layer in eligible_layers(model).items():
        # how a computed weight or a custom forward pass uses the parameters is not known
        if not is_plain(layer):
            continue
        weight = rows.pop(id(layer._parameters.get("weight")), None)
        # a layout of some units has no rows for the others
        if weight is None or bool((weight < 0).any()):
            continue
        index = unit_weights(layer, weight[None])[0]
        bias = rows.pop(id(tensor), None) if (tensor := layer._parameters.get("bias")) is not None else None
        if bias is not None and bool((bias < 0).any()):
            bias = None
        if bias is not None:
            index = torch.cat([bias[:, None], index], 1)
        places.append(Placement(name, layer, index, int(kinds.has_bias(layer) and bias is None)))
    return places


def covered(places: list[Placement], order: int) -> torch.Tensor:
    """Mask (order,) of the rows that belong to some layer."""
    mask = torch.zeros(order, dtype=torch.bool, device="cpu")
    for placement in places:
        mask[placement.index.flatten()] = True
    return mask
