"""State that running a model leaves as it was: random generators, buffers, gradients, hooks and attributes."""

from __future__ import annotations

import random
from collections import OrderedDict, defaultdict, deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import cache
from operator import is_not, ne
from types import CodeType, FunctionType
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.quasirandom import SobolEngine

from hesscond.errors import CaptureError
from hesscond.problem.containers import FOREIGN, PLAIN, stored
from hesscond.problem.devices import accelerators_of, runtime

Generator = torch.Generator | np.random.Generator | np.random.RandomState | random.Random


@dataclass(frozen=True)
class RandomState:
    """State of the global generators of torch (CPU and accelerators), Python and numpy, and of further generators."""

    cpu: torch.Tensor
    devices: dict[torch.device, torch.Tensor]
    host: tuple[Any, Any] | None  # of Python and numpy; None: not kept
    further: tuple[tuple[Generator, Any], ...] = ()

    @classmethod
    def now(cls, devices: Iterable[torch.device], generators: Iterable[Generator] = ()) -> RandomState:
        """Present state of the CPU, of some accelerators, and of other ``generators``."""
        states = tuple((generator, state_of(generator)) for generator in generators)
        host = random.getstate(), np.random.get_state()  # noqa: NPY002 - the user's code may draw from it
        return replace(cls.of_torch(devices), host=host, further=states)

    @classmethod
    def of_torch(cls, devices: Iterable[torch.device]) -> RandomState:
        """Present state of torch's generators alone: the states of Python and numpy take long to copy."""
        return cls(torch.get_rng_state(), {d: runtime(d).get_rng_state(d) for d in devices}, None)

    def restore(self) -> None:
        """Restore this state."""
        torch.set_rng_state(self.cpu)
        for device, state in self.devices.items():
            runtime(device).set_rng_state(state, device)
        if self.host is not None:
            random.setstate(self.host[0])
            np.random.set_state(self.host[1])  # noqa: NPY002
        for generator, state in self.further:
            set_state(generator, state)

    @contextmanager
    def again(self) -> Iterator[None]:
        """Context in which this is the present state; the previous state is restored afterwards."""
        with untouched_randomness(self.devices, [generator for generator, _ in self.further]):
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
def untouched_randomness(devices: Iterable[torch.device], generators: Iterable[Generator] = ()) -> Iterator[None]:
    """Leave the random state as it is found: of torch, numpy and Python, of accelerators and of ``generators``."""
    before = RandomState.now(devices, generators)
    try:
        yield
    finally:
        before.restore()


def generators_of(source: Any) -> list[torch.Generator]:
    """Generators that a ``DataLoader`` or its samplers draw from."""
    generators: dict[int, torch.Generator] = {}
    stack = [source]
    while stack:
        value = stack.pop()
        generator = getattr(value, "generator", None)
        if isinstance(generator, torch.Generator):
            generators[id(generator)] = generator
        stack += [inner for name in ("sampler", "batch_sampler") if (inner := getattr(value, name, None)) is not None]
    return list(generators.values())


GENERATORS = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)
#: Containers that a file's functions may keep results in, as the caches of functools; larger ones hold data.
CACHES, LARGE = (dict, OrderedDict, defaultdict, list, set, deque), 10_000
FunctionCache = type(cache(len))


@contextmanager
def untouched(*roots: object) -> Iterator[None]:
    """Leave modules as they are found: attributes, mode, hooks, buffers, gradients; and all random generators."""
    state = State(roots)
    try:
        yield
    except BaseException:
        state.restore()
        raise
    if changed := state.restore():
        raise CaptureError(
            f"evaluating the model changes {changed} of the model itself in place, which cannot be undone: let the "
            "forward pass or the loss write to no parameter through a reference of its own"
        )


def named_by(function: object, seen: set[int], owner: type = object) -> Iterator[object]:
    """Generators and caches named in a function, in methods of ``owner``, and in functions of the same file."""
    function = getattr(function, "func", getattr(function, "__func__", function))
    if isinstance(function, FunctionCache):
        yield function
        function = function.__wrapped__
    if not isinstance(function, FunctionType) or id(function) in seen:
        return
    seen.add(id(function))
    inner = [constant for constant in function.__code__.co_consts if isinstance(constant, CodeType)]
    names = {name for code in (function.__code__, *inner) for name in code.co_names}
    values: list[Any] = [function.__globals__.get(name) for name in names]
    values += [vars(kind)[name] for kind in owner.__mro__ for name in names & vars(kind).keys()]
    with suppress(ValueError):  # a variable without a value yet
        values += [cell.cell_contents for cell in function.__closure__ or ()]
    for value in values:
        if isinstance(value, (*GENERATORS, SobolEngine)) or (type(value) in CACHES and len(value) <= LARGE):
            yield value
        elif isinstance(value, (FunctionType, FunctionCache)) and value.__module__ == function.__module__:
            yield from named_by(value, seen, owner)


class State:
    """State of modules and their submodules at one moment, down to one level below their attributes."""

    def __init__(self, roots: Iterable[object]) -> None:
        self.dicts: list[tuple[dict[Any, Any], dict[Any, Any]]] = []
        self.empty: list[dict[Any, Any]] = []
        self.others: list[tuple[Any, list[Any]]] = []
        self.tensors: list[tuple[torch.Tensor, int, torch.Tensor]] = []
        self.parameters: list[tuple[str, nn.Parameter, int, torch.Tensor | None, int, bool]] = []
        self.generators: list[Generator] = []
        self.caches: list[tuple[Any, int]] = []
        self.arrays: list[tuple[np.ndarray, np.ndarray]] = []
        self._seen: set[int] = set()
        modules = [root for root in roots if isinstance(root, nn.Module)]
        kinds = {type(part) for root in modules for part in root.modules()}
        for root in modules:
            for name, module in root.named_modules():
                self._attributes(vars(module), 2)
                for key, parameter in module._parameters.items():
                    if parameter is not None and self._first(parameter):
                        self._parameter(f"{name}.{key}" if name else key, parameter)
        forwards = [(kind.forward, kind) for kind in kinds if not kind.__module__.startswith("torch.")]
        for function, owner in (*((root, object) for root in roots), *forwards):
            for value in named_by(function, set(), owner):
                self._remember(value, 0 if type(value) in CACHES else 1)
        places = [tensor for tensor, *_ in self.tensors] + [entry[1] for entry in self.parameters]
        self.random = RandomState.now(accelerators_of(places), self.generators)

    def _first(self, value: object) -> bool:
        """Whether a value is met for the first time."""
        known = id(value) in self._seen
        self._seen.add(id(value))
        return not known

    def _attributes(self, attributes: dict[Any, Any], depth: int) -> None:
        self.dicts.append((attributes, dict(attributes)))
        for value in attributes.values() if depth else ():
            if isinstance(value, dict) and not value:
                # most dicts are empty: a module has a dozen for its hooks
                self.empty.append(value)
            elif type(value) not in PLAIN:
                self._remember(value, depth - 1)

    def _remember(self, value: Any, depth: int) -> None:
        # parameters of other types of tensor too: they are remembered as such
        if isinstance(value, (nn.Parameter, FOREIGN)) or not self._first(value):
            return
        if isinstance(value, dict):
            self._attributes(value, depth)
        elif isinstance(value, FunctionCache):
            self.caches.append((value, value.cache_info().misses))
        elif isinstance(value, np.ndarray):
            self.arrays.append((value, value.copy()))
        elif isinstance(value, (list, set, deque, bytearray, tuple)):
            if not isinstance(value, tuple):
                self.others.append((value, list(value)))
            for item in value if depth else ():
                if type(item) not in PLAIN:
                    self._remember(item, depth - 1)
        elif isinstance(value, torch.Tensor):
            self.tensors.append((value, version(value), value.detach().clone()))
        elif isinstance(value, GENERATORS):
            self.generators.append(value)
        elif hasattr(value, "__dict__"):
            self._attributes(vars(value), depth)

    def _parameter(self, name: str, p: nn.Parameter) -> None:
        grad = p.grad
        self.parameters.append((name, p, version(p), grad, 0 if grad is None else version(grad), p.requires_grad))

    def restore(self) -> str | None:
        """Restore everything, and describe what cannot be restored; None: nothing."""
        self._restore_attributes()
        with torch.no_grad():
            for tensor, number, copy in self.tensors:
                # batch normalization writes its statistics without counting
                if version(tensor) != number or not all(map(torch.equal, stored(tensor), stored(copy))):
                    # observers of quantization change shapes too
                    (tensor if tensor.shape == copy.shape else tensor.resize_(copy.shape)).copy_(copy)
        self.random.restore()
        changed = None
        for name, p, number, grad, grad_number, requires_grad in self.parameters:
            if p.grad is not grad:
                p.grad = grad
            if p.requires_grad != requires_grad:
                p.requires_grad_(requires_grad)
            if version(p) != number:
                changed = changed or f"the parameter {name!r}"
            elif grad is not None and version(grad) != grad_number:
                changed = changed or f"the gradient of {name!r}"
        return changed

    def _restore_attributes(self) -> None:
        for attributes, before in self.dicts:
            same = len(attributes) == len(before) and not any(map(is_not, attributes.values(), before.values()))
            if not same or any(map(ne, attributes, before)):
                attributes.clear()
                attributes.update(before)
        for values in self.empty:
            values.clear()
        for function, misses in self.caches:
            if function.cache_info().misses != misses:
                function.cache_clear()
        for array, before_array in self.arrays:
            if array.tobytes() != before_array.tobytes():
                array[...] = before_array
        for container, items in self.others:
            if len(container) != len(items) or any(map(is_not, container, items)):
                container.clear()
                (container.update if isinstance(container, set) else container.extend)(items)


def version(tensor: torch.Tensor) -> int:
    """Number of times a tensor was written to; -1 for a tensor of inference mode, which keeps no count."""
    return -1 if tensor.is_inference() else tensor._version
