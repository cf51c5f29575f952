"""The inputs of layers that depend on none of the parameters, those of first layers as a rule, over a data set."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge

from hesscond.capture import Batch, LossFunction
from hesscond.capture.batches import Batches
from hesscond.capture.forward import Call
from hesscond.capture.graph import is_transformed
from hesscond.capture.request import Request
from hesscond.capture.snapshot import Snapshot
from hesscond.hessians.kronecker import CHUNK, Terms, add_rows
from hesscond.hessians.null_rows import RowSpace, row_space
from hesscond.hessians.placement import Placement
from hesscond.hessians.streaming import StreamedBlock


class FirstLayers:
    """Layers whose inputs are given, with the rows they see.

    Parameters
    ----------
    snapshot
        The model, differentiable in the parameters in question.
    loss_fn, data
        The loss of the data set.
    layers
        Candidates.
    weights
        What each batch counts.
    memory
        Bytes that batches may take which can be read only once.

    Attributes
    ----------
    inputs
        By layer and group, the rows ĥ that it sees.
    """

    def __init__(
        self,
        snapshot: Snapshot,
        loss_fn: LossFunction,
        data: Batch | Iterable[Batch],
        layers: Sequence[Placement],
        weights: Sequence[float],
        *,
        memory: int,
    ) -> None:
        self._snapshot, self._loss_fn, self._weights = snapshot, loss_fn, weights
        self._batches = Batches(data, snapshot.gpus, memory)
        self._layers = {placement.name: placement for placement in layers}
        blocks: dict[str, list[StreamedBlock]] = {}
        for terms in self._terms():
            own = self._layers[terms.name]
            width = own.index.shape[1]
            groups = blocks.setdefault(terms.name, [StreamedBlock(width) for _ in range(own.geometry.groups)])
            for start, stop in terms.inputs.steps(CHUNK):
                rows = terms.rows(start, stop).flatten(0, 1)
                for group, block in enumerate(groups):
                    add_rows(block, rows[:, group], 1.0)
        like = torch.empty(0, dtype=torch.float64, device=snapshot.leaves[0].device)
        self.inputs: dict[str, list[RowSpace]] = {
            name: [row_space(block, like) for block in own] for name, own in blocks.items() if name in self._layers
        }

    def terms(self, name: str) -> Iterator[Terms]:
        """The rows of one layer in each batch, with the gradient in its outputs as ``B``."""
        return (terms for terms in self._terms() if terms.name == name)

    def _terms(self) -> Iterator[Terms]:
        """Those of all layers that are still candidates; the others are struck off."""
        for drawn in self._batches:
            seen: dict[str, list[tuple[Call, Any]]] = {}
            with ExitStack() as stack:
                for name, placement in self._layers.items():
                    hook = placement.layer.register_forward_hook(
                        self._noting(name, seen), with_kwargs=True, prepend=True
                    )
                    stack.callback(hook.remove)
                evaluation = self._snapshot.evaluate(self._loss_fn, drawn.batch)
            for name, calls in seen.items():
                if not calls:
                    del self._layers[name]
            seen = {name: calls for name, calls in seen.items() if calls}
            if not seen or not evaluation.loss.requires_grad:
                continue
            if self._weights[drawn.number] == 0:
                continue
            edges = [edge for calls in seen.values() for _, edge in calls]
            gradients = iter(torch.autograd.grad(evaluation.loss, edges, allow_unused=True))
            for name, calls in seen.items():
                request = Request(name, self._layers[name].layer, [call for call, _ in calls], (), True)
                blocks = evaluation.samples if request.splits(evaluation.samples) else 1
                own = [next(gradients) for _ in calls]
                parts = [
                    torch.zeros_like(call.delta) if g is None else g for (call, _), g in zip(calls, own, strict=True)
                ]
                B = request.positions([part[None] for part in parts], blocks)
                yield Terms(request.inputs(blocks), B, 1.0, self._layers[name].first, name)

    @staticmethod
    def _noting(name: str, seen: dict[str, list[tuple[Call, Any]]]) -> Any:
        dependent: set[str] = set()

        def hook(module: nn.Module, args: Any, kwargs: dict[str, Any], output: torch.Tensor) -> None:
            x = args[0] if args else kwargs["input"]
            if x.requires_grad or not output.requires_grad or is_transformed(x) or is_transformed(output):
                dependent.add(name)
            calls = seen.setdefault(name, [])
            if dependent:
                calls.clear()
            else:
                calls.append((Call(x.detach().clone(), output.detach(), None), get_gradient_edge(output)))

        return hook
