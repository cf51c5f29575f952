"""Random state that a computation starts from, to start from it again."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

Generator = torch.Generator | np.random.Generator | np.random.RandomState | random.Random


@dataclass(frozen=True)
class RandomState:
    """State of the global generators of torch (CPU, and GPUs by number), Python and numpy, and of further generators.

    ``host`` holds the states of Python and numpy; None: they are not kept.
    """

    cpu: torch.Tensor
    cuda: dict[int, torch.Tensor]
    host: tuple[Any, Any] | None
    own: tuple[tuple[Generator, Any], ...] = ()

    @classmethod
    def now(cls, gpus: Iterable[int], generators: Iterable[Generator] = ()) -> RandomState:
        """Present state of the CPU, of some GPUs, and of other ``generators``."""
        own = tuple((generator, state_of(generator)) for generator in generators)
        host = random.getstate(), np.random.get_state()  # noqa: NPY002 - the user's code may draw from it
        return cls(torch.get_rng_state(), {gpu: torch.cuda.get_rng_state(gpu) for gpu in gpus}, host, own)

    @classmethod
    def of_torch(cls, gpus: Iterable[int]) -> RandomState:
        """Present state of torch's generators alone: the states of Python and numpy take long to copy."""
        return cls(torch.get_rng_state(), {gpu: torch.cuda.get_rng_state(gpu) for gpu in gpus}, None)

    def restore(self) -> None:
        """Restore this state."""
        torch.set_rng_state(self.cpu)
        for gpu, state in self.cuda.items():
            torch.cuda.set_rng_state(state, gpu)
        if self.host is not None:
            random.setstate(self.host[0])
            np.random.set_state(self.host[1])  # noqa: NPY002
        for generator, state in self.own:
            set_state(generator, state)

    @contextmanager
    def again(self) -> Iterator[None]:
        """Context in which this is the present state; the previous state is restored afterwards."""
        with untouched_randomness(self.cuda, [generator for generator, _ in self.own]):
            self.restore()
            yield


def state_of(generator: Generator) -> Any:
    """State of a generator of torch, numpy or Python."""
    if isinstance(generator, np.random.Generator):
        return generator.bit_generator.state
    return generator.getstate() if isinstance(generator, random.Random) else generator.get_state()


def set_state(generator: Generator, state: Any) -> None:
    """Set the state of a generator, as returned by `state_of`."""
    if isinstance(generator, np.random.Generator):
        generator.bit_generator.state = state
    elif isinstance(generator, random.Random):
        generator.setstate(state)
    else:
        generator.set_state(state)


@contextmanager
def untouched_randomness(gpus: Iterable[int], generators: Iterable[Generator] = ()) -> Iterator[None]:
    """Leave the random state as it is found: of torch, numpy and Python, of some GPUs and of other ``generators``."""
    before = RandomState.now(gpus, generators)
    try:
        yield
    finally:
        before.restore()


def gpus_of(tensors: Iterable[torch.Tensor]) -> list[int]:
    """Numbers of the GPUs that ``tensors`` are on."""
    return sorted({t.device.index for t in tensors if t.device.type == "cuda"})


def generators_of(source: Any) -> list[torch.Generator]:
    """Generators that a ``DataLoader`` or its samplers draw from."""
    found: dict[int, torch.Generator] = {}
    stack = [source]
    while stack:
        value = stack.pop()
        generator = getattr(value, "generator", None)
        if isinstance(generator, torch.Generator):
            found[id(generator)] = generator
        stack += [inner for name in ("sampler", "batch_sampler") if (inner := getattr(value, name, None)) is not None]
    return list(found.values())
