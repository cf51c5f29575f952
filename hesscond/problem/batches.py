"""The batches of a data set, the same and in the same order every time."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from copy import copy as copied
from dataclasses import dataclass
from typing import Any

import torch

from hesscond.errors import CaptureError, ConfigError
from hesscond.problem import untouched
from hesscond.problem.containers import attributes, kind, mapped, stored, tensors_of
from hesscond.problem.evaluation import Batch


def is_batch(data: Any) -> bool:
    """Whether ``data`` is one batch, not a stream: a mapping, a record, an object, a pair that holds no two batches."""
    if isinstance(data, list):
        # a loader yields each batch as a list [inputs, targets]
        return len(data) == 2 and not all(isinstance(x, (tuple, list, Mapping)) or attributes(x) for x in data)
    if isinstance(data, tuple) and not hasattr(data, "_fields"):
        if len(data) != 2:
            raise ConfigError(
                f"a tuple of {len(data)} is no batch (inputs, targets): give a stream of batches as a list"
                if data
                else "the data are an empty tuple: give a pair (inputs, targets), or a list of such pairs"
            )
        if all(isinstance(item, (tuple, list)) and len(item) == 2 for item in data) and form(data[0]) == form(data[1]):
            raise ConfigError(
                "the data ((a, b), (c, d)) may be two batches or one with two inputs and two targets: write "
                "[(a, b), (c, d)] for two batches, or [((a, b), (c, d))] for one"
            )
        return True
    if isinstance(data, (Mapping, tuple)):
        return True
    # a loader may keep tensors, a graph may yield its attributes, and a frame its columns
    iterable = isinstance(data, Iterable) and not (isinstance(data, (str, bytes)) or hasattr(data, "__array__"))
    if attributes(data) and (not iterable or callable(getattr(data, "to", None))):
        return True
    if not iterable:
        raise ConfigError(
            f"the data must be a pair (inputs, targets) of tensors or a stream of such pairs, not {kind(data)}"
        )
    return False


def form(value: Any) -> Any:
    """Structure of a batch, without sizes."""
    if isinstance(value, torch.Tensor):
        return value.dtype, value.ndim
    if isinstance(value, Mapping):
        return {key: form(item) for key, item in value.items()}
    if isinstance(value, (tuple, list)):
        return [form(item) for item in value]
    return type(value)


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


def moved(value: Any, device: torch.device | None) -> Any:
    """Move every tensor in a value to a device (None: nowhere); a tensor that occurs twice stays a single one."""
    if device is None:
        return value
    done: dict[int, tuple[Any, Any]] = {}

    def move(part: Any) -> Any:
        if getattr(part, "is_meta", False):
            raise ConfigError("the data are on the meta device, so they have no values")
        if id(part) not in done:
            # the value itself is kept too, so that its id is not reused; some objects move themselves
            done[id(part)] = (part if isinstance(part, torch.Tensor) else copied(part)).to(device), part
        return done[id(part)][0]

    return mapped(value, move, move)
