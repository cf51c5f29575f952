r"""Rescaling symmetries of networks, found by trying them.

If L(c^E θ) = L(θ) for all c > 0, with a diagonal E of exponents ±1 and 0 (c^E scales what enters a unit and unscales
what leaves it), then ∇L(c^E θ) = c^{−E} ∇L(θ), and the derivative in c at 1 is

    H E θ = −E ∇L,

so that E θ is a null direction of the Hessian exactly where E ∇L = 0. The Jacobian of the outputs annihilates E θ
everywhere, and so does the Gauss-Newton matrix.

Source: Saratchandran, Wang and Lucey, Weight Conditioning for Smooth Optimization of Neural Networks, theorem 2, for
the scale invariance of single rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import nn

from hesscond.capture.evaluation import tensors_of
from hesscond.hessians.network_operator import NetworkOperator
from hesscond.hessians.parameters import Placement

#: Relative change of the outputs that rounding may make.
SAME = 1e-11

#: How many of the layers called next, with as many inputs as a unit needs, may be where the unit's output goes.
NEXT = 3


@dataclass(frozen=True)
class ScaleSymmetry:
    """Independent scalings of d units (or of one layer) that leave the outputs as they are.

    Attributes
    ----------
    name
        Which.
    rows, columns, exponents
        Entry (rows[k], columns[k]) of the exponents (n, d) is ``exponents[k]``.
    order, count
        n and d.
    """

    name: str
    rows: torch.Tensor
    columns: torch.Tensor
    exponents: torch.Tensor
    order: int
    count: int

    def directions(self, point: torch.Tensor, start: int = 0, stop: int | None = None) -> torch.Tensor:
        """(n, stop − start) E θ for some of the units, at the parameters ``point`` (n,)."""
        return self._times(point, start, self.count if stop is None else min(stop, self.count))

    def images(self, gradient: torch.Tensor, start: int = 0, stop: int | None = None) -> torch.Tensor:
        """(n, stop − start) H E θ = −E ∇L for some of the units, from the ``gradient`` (n,) at the point."""
        return self._times(-gradient, start, self.count if stop is None else min(stop, self.count))

    def scaled(self, point: torch.Tensor, factors: torch.Tensor) -> torch.Tensor:
        """The parameters (n,) with the units scaled by ``factors`` (d,)."""
        result = point.clone()
        own = factors.to(point)[self.columns.to(point.device)] ** self.exponents.to(point)
        result[self.rows.to(point.device)] *= own
        return result

    def _times(self, vector: torch.Tensor, start: int, stop: int) -> torch.Tensor:
        own = (self.columns >= start) & (self.columns < stop)
        rows, columns = (part[own].to(vector.device) for part in (self.rows, self.columns - start))
        result = vector.new_zeros(self.order, stop - start)
        result[rows, columns] = self.exponents[own].to(vector) * vector[rows]
        return result


def scale_symmetries(operator: NetworkOperator) -> list[ScaleSymmetry]:
    """The scalings of units that leave the outputs of the first batch as they are, tried with random factors.

    Tried are: each unit of a layer or of an affine normalization together with what the next layers make of its output
    (positively homogeneous activations); each unit of a layer alone, and a layer as a whole (before a normalization
    without ε).
    """
    tried, layers = Trial(operator), operator.placements
    order = tried.order
    consumers = sorted((p for p in layers if p.layer in order), key=lambda p: order[p.layer])
    found = []
    for name, module, index in producers(operator):
        if module not in order:
            continue
        following = [p for p in consumers if order[p.layer] > order[module] and inputs_of(p) % len(index) == 0][:NEXT]
        candidates = [
            symmetry(f"units of {name!r} into {p.name!r}", operator.order, index, consumed(p, len(index)))
            for p in following
        ]
        candidates += [
            symmetry(f"units of {name!r}", operator.order, index, []),
            symmetry(f"layer {name!r}", operator.order, index.reshape(1, -1), []),
        ]
        own = next((candidate for candidate in candidates if tried.holds(candidate)), None)
        if own is not None:
            found.append(own)
    return found


class Trial:
    """Evaluates a network on its first batch at scaled parameters.

    Attributes
    ----------
    outputs
        Outputs at the present parameters.
    order
        The modules in the order of their (last) calls.
    """

    def __init__(self, operator: NetworkOperator) -> None:
        self.operator, self.drawn = operator, next(operator.problem.counted())[0]
        calls: dict[nn.Module, int] = {}

        def note(module: nn.Module, *_: Any) -> None:
            calls.pop(module, None)
            calls[module] = len(calls)

        with ExitStack() as stack:
            for module in operator.problem.model.modules():
                stack.callback(module.register_forward_pre_hook(note).remove)
            self.outputs = self.at(operator.point)
        self.order = {module: number for number, module in enumerate(calls)}

    def at(self, point: torch.Tensor) -> list[torch.Tensor]:
        """The outputs at ``point`` (n,)."""
        problem = self.operator.problem
        tensors = self.operator.layout.tensors_of(point)
        moved = problem.snapshot.at({number: own.clone().requires_grad_() for number, own in enumerate(tensors)})
        with self.drawn.state.again():
            evaluation = moved.evaluate(problem.loss_fn, self.drawn.batch)
        return [output.detach() for output in tensors_of(evaluation.output) if output.is_floating_point()]

    def holds(self, candidate: ScaleSymmetry) -> bool:
        """Whether the outputs do not change with random factors."""
        generator = torch.Generator().manual_seed(0)
        for _ in range(2):
            factors = torch.empty(candidate.count, dtype=torch.float64).uniform_(0.5, 2.0, generator=generator)
            outputs = self.at(candidate.scaled(self.operator.point, factors))
            for before, after in zip(self.outputs, outputs, strict=True):
                if float((before - after).norm()) > SAME * float(before.norm()):
                    return False
        return True


def producers(operator: NetworkOperator) -> Iterator[tuple[str, nn.Module, torch.Tensor]]:
    """Modules with the rows (m, ·) of what makes each of their m outputs: layers, and affine normalizations."""
    for placement in operator.placements:
        if placement.first == 0:
            yield placement.name, placement.layer, placement.index
    numbers = operator.layout.tensors_of(torch.arange(operator.order))
    rows = {id(p): number for p, number in zip(operator.layout.tensors, numbers, strict=True)}
    owned = {placement.layer for placement in operator.placements}
    for name, module in operator.problem.model.named_modules():
        own = list(module.parameters(recurse=False))
        if module in owned or not own or any(p.ndim != 1 or id(p) not in rows for p in own):
            continue
        if len({len(p) for p in own}) == 1:
            yield name, module, torch.stack([rows[id(p)] for p in own], 1)


def inputs_of(placement: Placement) -> int:
    """Number of input features or channels of a layer."""
    layer = placement.layer
    return layer.in_features if isinstance(layer, nn.Linear) else layer.in_channels


def consumed(placement: Placement, units: int) -> list[torch.Tensor]:
    """Rows of the weights that multiply the output of each of the units in front of a layer."""
    groups = placement.geometry.groups
    channels, bias = inputs_of(placement), placement.geometry.bias and not placement.first
    kernel = prod(getattr(placement.layer, "kernel_size", (1,)))
    # (input channel, rows that multiply it)
    weights = placement.index[:, int(bias) :].unflatten(0, (groups, -1)).unflatten(2, (-1, kernel))
    by_channel = weights.permute(0, 2, 1, 3).reshape(channels, -1)
    return list(by_channel.reshape(units, -1))


def symmetry(name: str, order: int, entering: torch.Tensor, leaving: list[torch.Tensor]) -> ScaleSymmetry:
    """The scaling of what enters d units, ``entering`` (d, ·), and of what ``leaving`` multiplies them by."""
    rows, columns, exponents = (
        [entering.flatten()],
        [torch.arange(len(entering)).repeat_interleave(entering[0].numel())],
        [],
    )
    exponents.append(torch.ones(entering.numel(), dtype=torch.float64))
    for unit, own in enumerate(leaving):
        rows.append(own)
        columns.append(torch.full_like(own, unit))
        exponents.append(-torch.ones(len(own), dtype=torch.float64))
    return ScaleSymmetry(name, torch.cat(rows), torch.cat(columns), torch.cat(exponents), order, len(entering))
