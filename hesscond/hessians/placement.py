"""Where the parameters of layers are in the vectors of a network's operator, whatever its layout."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from hesscond.capture import Geometry, Layer, eligible_layers
from hesscond.capture.layers import has_bias, is_plain, unit_weights
from hesscond.hessians.parameters import Layout


@dataclass(frozen=True)
class Placement:
    """The rows of a vector that belong to a layer.

    Attributes
    ----------
    name, layer
        The layer.
    index : (m, w)
        Row of each parameter of a unit, [b_i, w_i] or w_i alone.
    first
        0, or 1 where the layer has a bias that is not among the parameters.
    """

    name: str
    layer: Layer
    index: torch.Tensor
    first: int

    @property
    def geometry(self) -> Geometry:
        """Of the layer."""
        return Geometry.of(self.layer)


def placements(layout: Layout, model: nn.Module) -> list[Placement]:
    """The layers all of whose weights are in the layout; one that shares its weight with an earlier one is left out."""
    numbers = layout.tensors_of(torch.arange(1, layout.order + 1))
    rows = {id(p): number - 1 for p, number in zip(layout.tensors, numbers, strict=True)}
    found = []
    for name, layer in eligible_layers(model).items():
        # what a computed weight or a forward pass of its own makes of its parameters is not known
        if not is_plain(layer):
            continue
        weight = rows.pop(id(layer._parameters.get("weight")), None)
        # a layout of some units has no rows for the others
        if weight is None or bool((weight < 0).any()):
            continue
        index = unit_weights(layer, weight[None])[0]
        bias = rows.pop(id(own), None) if (own := layer._parameters.get("bias")) is not None else None
        if bias is not None:
            index = torch.cat([bias[:, None], index], 1)
        found.append(Placement(name, layer, index, int(has_bias(layer) and bias is None)))
    return found


def covered(found: list[Placement], order: int) -> torch.Tensor:
    """(order,) bool: the rows that belong to some layer."""
    mask = torch.zeros(order, dtype=torch.bool)
    for placement in found:
        mask[placement.index.flatten()] = True
    return mask
