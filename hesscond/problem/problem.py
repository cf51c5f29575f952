"""Model, loss and data of a Hessian operator, frozen at one moment; the batches are the same every time."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge

from hesscond.errors import CaptureError, bytes_of
from hesscond.problem import untouched, weighting
from hesscond.problem.containers import is_batch, stored, strided, tensors_of
from hesscond.problem.devices import default_memory
from hesscond.problem.evaluation import Batch, Evaluation, LossFunction
from hesscond.problem.graph import is_transformed
from hesscond.problem.snapshot import Snapshot


@dataclass(frozen=True)
class Drawn:
    """Batch with its position in the data and the random state in which it was read, which dropout depends on."""

    number: int
    batch: Batch
    state: untouched.RandomState


class Batches:
    """One batch or a stream of batches; each iteration yields the same batches in the same order, as `Drawn`.

    The first iteration, which must be complete, keeps the batches if they fit into ``memory`` bytes. Otherwise the
    source is read anew in every iteration, in the random state of the first one, and compared with what was read then.
    """

    def __init__(self, data: Batch | Iterable[Batch], devices: Sequence[torch.device], memory: int) -> None:
        self.source: Iterable[Batch] = [data] if is_batch(data) else data
        self.devices, self.memory = list(devices), memory
        self.free = isinstance(self.source, (list, tuple))
        self._kept: list[Drawn] | None = None
        self._start: untouched.RandomState | None = None
        self._sums: list[str] = []
        self.held = 0

    def __iter__(self) -> Iterator[Drawn]:
        if self._start is None:
            return self._first()
        return iter(self._kept) if self._kept is not None else self._again(self._start)

    def _first(self) -> Iterator[Drawn]:
        start = untouched.RandomState.now(self.devices, untouched.generators_of(self.source))
        kept: list[Drawn] | None = []
        taken = 0
        # the generators of the source are left as one reading leaves them
        with untouched.untouched_randomness(self.devices):
            for number, batch in enumerate(self.source):
                drawn = Drawn(number, batch, untouched.RandomState.now(self.devices))
                taken += sum(t.numel() * t.element_size() for tensor in tensors_of(batch) for t in stored(tensor))
                if taken > self.memory and not self.free:
                    kept = None
                    if isinstance(self.source, Iterator):
                        raise CaptureError(
                            f"the data can be read only once ({type(self.source).__name__}) and take more than the "
                            f"{self.memory / 1e9:.3g} GB there are for them: give a DataLoader, or more memory"
                        )
                if kept is not None:
                    kept.append(drawn)
                if not self.free:
                    self._sums.append(checksum(batch))
                yield drawn
        self._start, self._kept = start, kept
        self.held = 0 if kept is None or self.free else taken

    def _again(self, start: untouched.RandomState) -> Iterator[Drawn]:
        count = -1
        with start.again():
            for count, batch in enumerate(self.source):
                if count >= len(self._sums) or checksum(batch) != self._sums[count]:
                    self._refuse(count)
                yield Drawn(count, batch, untouched.RandomState.now(self.devices))
        if count + 1 < len(self._sums):
            self._refuse(count + 1)

    def _refuse(self, number: int) -> None:
        raise CaptureError(
            f"batch {number} of the data is not what it was when they were first read, so that products would be with "
            "different matrices: make the data set return the same every time, or give enough memory= to keep it"
        )


def checksum(value: Any) -> str:
    """Short text that differs for batches that differ, also if only the order of their entries does."""
    return ";".join(
        f"{tuple(tensor.shape)}{tensor.dtype}{weighted_sum(tensor)!r}"
        for whole in tensors_of(value)
        for tensor in stored(whole.detach())
    )


def weighted_sum(tensor: torch.Tensor) -> float:
    """Σ (1 + i/n) x_i in float64."""
    flat = tensor.flatten()
    flat = (torch.view_as_real(flat).flatten() if flat.is_complex() else flat).to(torch.float64)
    return float(flat @ torch.linspace(1, 2, len(flat), dtype=torch.float64, device=flat.device))


@dataclass(frozen=True)
class Call:
    """Call of a layer."""

    inputs: torch.Tensor  # detached; a copy if the pass keeps inputs
    delta: torch.Tensor  # zeros of the output's shape, added to it: the loss is differentiated in them
    node: Any  # node of the sum in the graph; None for a layer that is differentiated in its parameters


@dataclass(frozen=True)
class WatchedEvaluation(Evaluation):
    """Value of a loss with its graph, and the calls of some layers in its forward pass."""

    # of each layer; ``delta`` has the output's shape but no memory, ``node`` is its edge; without those outside the
    # graph
    calls: Mapping[str, list[Call]]
    given: frozenset[str]  # layers whose inputs all depend on no parameter


class Problem:
    """Loss of a model over a data set, frozen with the present parameters, buffers, mode and random state.

    Every part of a computation evaluates the same batches, each in the random state in which it was first read. The
    model is only run, never changed. ``weights``, the weight of each batch, and ``total_mass``, the divisor of the
    weighted sum, are known once the batches were read.
    """

    def __init__(
        self,
        model: nn.Module,
        loss_fn: LossFunction,
        data: Batch | Iterable[Batch],
        parameters: Sequence[nn.Parameter],
        *,
        watched: Mapping[str, nn.Module],
        dtype: torch.dtype | None,
        memory: float | str | None,
        reduction: str | None,
        weight: weighting.BatchWeight | None,
    ) -> None:
        memory = bytes_of(memory)
        self.model, self.loss_fn, self.dtype = model, loss_fn, dtype
        self.snapshot = Snapshot(model, parameters, dtype)
        self.memory = default_memory(self.snapshot.copies.values()) if memory is None else int(memory)
        # the loss of a single batch is the loss of the data set
        self.single = is_batch(data)
        self.weights: list[float] = []
        self.total_mass = 1.0
        self._watched = dict(watched)
        self._weights = weighting.Weights(model, loss_fn, dtype, reduction, weight)
        self._copies = sum(leaf.numel() * leaf.element_size() for leaf in self.snapshot.leaves)
        room = self.memory - self._copies
        # graphs that cannot be kept are built again from the batches, so that each gets half of the memory
        self.batches = Batches(data, self.snapshot.devices, room // 2)
        # bytes that are left for graphs
        self.room = room if self.batches.free else room // 2

    @property
    def held(self) -> int:
        """Bytes that the copies and the batches take."""
        return self._copies + self.batches.held

    def read(self) -> Iterator[tuple[Drawn, WatchedEvaluation]]:
        """Yield every batch that counts, with its first evaluation; afterwards the weights are known."""
        for drawn in self.batches:
            evaluation = self._watch(drawn.batch)
            # the loss of a single batch is the loss of the data, whatever its weight
            self.weights.append(1.0 if self.single else self._weights.add(drawn.batch, evaluation))
            if self.weights[-1]:
                weighting.refuse_nothing(self.loss_fn, evaluation)
                yield drawn, evaluation
            # one graph at a time
            del evaluation
        self.total_mass = 1.0 if self.single else self._weights.total

    def counted(self) -> Iterator[tuple[Drawn, float]]:
        """Yield the batches that count in their order, each with its weight; the weights sum to ``total_mass``."""
        for drawn in self.batches:
            if weight := self.weights[drawn.number]:
                yield drawn, weight

    def evaluate(self, drawn: Drawn) -> WatchedEvaluation:
        """Evaluate a batch again, in the random state in which it was first read."""
        with drawn.state.again():
            return self._watch(drawn.batch)

    def _watch(self, batch: Batch) -> WatchedEvaluation:
        """Evaluate the loss of a batch and record the calls of the watched layers."""
        calls: dict[str, list[Call]] = {}
        computed: set[str] = set()
        versions: dict[str, list[tuple[torch.Tensor, int]]] = {}

        def note(name: str) -> Any:
            def hook(module: nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> None:
                x: Any = args[0] if args else kwargs.get("input")
                layer_calls = calls.setdefault(name, [])
                plain = all(isinstance(t, torch.Tensor) and not is_transformed(t) for t in (x, output))
                if not plain or not output.requires_grad or x.requires_grad:
                    computed.add(name)
                if plain and output.requires_grad:
                    # the graph has it too
                    inputs = strided(x.detach())
                    versions.setdefault(name, []).append((inputs, inputs._version))
                    shape = output.detach().new_zeros(()).expand(output.shape)
                    layer_calls.append(Call(inputs, shape, get_gradient_edge(output)))

            return hook

        with ExitStack() as stack:
            for name, layer in self._watched.items():
                stack.callback(layer.register_forward_hook(note(name), with_kwargs=True, prepend=True).remove)
            evaluation = self.snapshot.evaluate(self.loss_fn, batch, flattening=True)
        for name, pairs in versions.items():
            if any(x._version != version for x, version in pairs):
                # changed in place after the call: the input of the layer is lost
                calls[name] = []
                computed.add(name)
        return WatchedEvaluation(**vars(evaluation), calls=calls, given=frozenset(calls) - computed)
