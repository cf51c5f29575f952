"""Requests for the curvature of a layer, and the layouts of its derivatives."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch.autograd.graph import get_gradient_edge

from hesscond.capture.captured import Curvature, DiagonalS, FactoredS, FormedH, LayerCapture, LayerInputs
from hesscond.capture.kinds import Geometry, Layer
from hesscond.capture.layers import by_position, from_position
from hesscond.errors import NotFiniteError
from hesscond.problem import Call
from hesscond.problem.evaluation import is_finite

COUPLED = ", samples coupled"

#: Reason reported for a layer whose curvature is not finite.
NOT_FINITE = "the curvature of the loss is NaN or infinite"


@dataclass(frozen=True)
class Request:
    """Request for the curvature of one layer, in some units or as one block (``whole``).

    ``calls`` are those of the forward pass; ``parameters`` are the weight and bias if the layer is to be
    differentiated in them, else None.
    """

    name: str
    layer: Layer
    calls: list[Call]
    units: tuple[int, ...]
    whole: bool
    parameters: tuple[torch.Tensor, torch.Tensor | None] | None = None

    @cached_property
    def deltas(self) -> list[torch.Tensor]:
        """Perturbation of every call."""
        return [call.delta for call in self.calls]

    @cached_property
    def leaves(self) -> set[Any]:
        """Nodes of the perturbations in the graph."""
        return {get_gradient_edge(delta).node for delta in self.deltas}

    def splits(self, samples: int) -> bool:
        """Whether every call has equally many leading entries for each sample."""
        return all(call.inputs.ndim > 1 and call.delta.shape[0] % samples == 0 for call in self.calls)

    def positions_apart(self) -> int:
        """Number of blocks of one position of each call; 0: the calls differ in their number of positions."""
        counts = {delta.shape.numel() // Geometry.of(self.layer).units for delta in self.deltas}
        return counts.pop() if len(counts) == 1 and all(call.inputs.ndim > 1 for call in self.calls) else 0

    def inputs(self, blocks: int) -> LayerInputs:
        """Return Ĥ of all calls in blocks: the same object for the same number of blocks, with its cached rows."""
        if blocks not in self._inputs:
            # only one layout of the inputs is kept at a time
            self._inputs.clear()
            calls = tuple((call.inputs, call.delta.shape) for call in self.calls)
            self._inputs[blocks] = LayerInputs(self.layer, calls, blocks)
        return self._inputs[blocks]

    @cached_property
    def _inputs(self) -> dict[int, LayerInputs]:
        return {}

    def inputs_by_sample(self, samples: int) -> LayerInputs:
        """Return Ĥ, with a block for each sample if the layout allows it."""
        return self.inputs(samples if self.splits(samples) else 1)

    def positions(self, values: Sequence[torch.Tensor | None], blocks: int) -> torch.Tensor:
        """Return derivatives (k, *shape) in each call's output as (k, J, m, q) float64; None stands for zeros."""
        count = next((len(v) for v in values if v is not None), 0)
        parts = []
        for value, delta in zip(values, self.deltas, strict=True):
            if value is None:
                value = delta.new_zeros(count, *delta.shape)
            part = by_position(self.layer, value.detach().to(torch.float64), leading=1)
            parts.append(part.reshape(count, blocks, -1, part.shape[-1]))
        joined = parts[0] if len(parts) == 1 else torch.cat(parts, 2)
        return joined.transpose(2, 3)

    def outputs(self, values: torch.Tensor) -> list[torch.Tensor]:
        """Return values (k, J, m, q) in the layout of each call's output: inverse of `positions`."""
        k, blocks = values.shape[:2]
        values = values.transpose(2, 3)
        result, start = [], 0
        for delta in self.deltas:
            laid_out = by_position(self.layer, delta)
            length, positions, units = laid_out.shape
            own = length * positions // blocks
            part = values[:, :, start : start + own].reshape(k, length, positions, units)
            result.append(from_position(self.layer, part, delta.shape).to(delta.dtype))
            start += own
        return result

    def finished(self, curvature: Curvature, route: str, samples: int, blocks: int | None = None) -> LayerCapture:
        """Capture with this curvature; raise a NotFiniteError if it is not finite."""
        tensor = getattr(curvature, {DiagonalS: "root", FactoredS: "B", FormedH: "matrices"}[type(curvature)])
        if not is_finite(tensor):
            raise NotFiniteError(NOT_FINITE)
        if blocks is None:
            blocks = samples if self.splits(samples) else 1
        elif blocks == 1 < samples:
            route += COUPLED
        return LayerCapture(self.name, self.inputs(blocks).kept(), self.units, curvature, route)
