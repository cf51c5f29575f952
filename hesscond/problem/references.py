"""References to parameters outside of their modules, in lists, dicts, attributes and closures, and views of them.

They are replaced while a model is evaluated, and in modules that a backward pass runs again, as adjoint methods for
differential equations do.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any, ClassVar

import torch
from torch import nn
from torch.autograd.function import BackwardCFunction
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from hesscond.problem.graph import nodes

#: Attributes of a module that `torch.func.functional_call` replaces, or that hold its parts.
REGISTERED = frozenset({"_parameters", "_buffers", "_modules"})
#: Largest depth of containers within containers, number of items of one, and number of items of all, the nearest
#: first: a loss may refer to all the data. Types without references to tensors.
DEPTH, LONG, MOST = 8, 1000, 10_000
CONTAINERS = (dict, list, tuple)
HOOKS = (OrderedDict, dict)
PLAIN = (bool, int, float, complex, str, bytes, type(None), type, torch.dtype, torch.device, ModuleType)
#: Place of a tensor: its name, the tensor, and a function that puts another one there.
Place = tuple[str, torch.Tensor, Callable[[Any], None]]


class References:
    """Tensors that a model and its loss refer to, other than as parameters and buffers of the model's modules."""

    def __init__(self, model: nn.Module, loss: object = None) -> None:
        self.places: list[Place] = []
        self._seen: set[int] = set()
        self._waiting: deque[tuple[str, Any, Callable[[Any], None], int]] = deque()
        modules = dict(model.named_modules())
        self._seen.update(map(id, modules.values()))
        for path, module in modules.items():
            for key, value in list(vars(module).items()):
                # most attributes are flags and empty tables of hooks
                if not (key in REGISTERED or isinstance(value, PLAIN) or (type(value) in HOOKS and not value)):
                    self._visit(f"{path}/{key}" if path else key, value, partial(module.__dict__.__setitem__, key), 0)
        self._visit("loss", loss, lambda _: None, 0)
        left = MOST
        while self._waiting and left > 0:
            name, value, put, depth = self._waiting.popleft()
            left -= length(value) if isinstance(value, CONTAINERS) else len(getattr(value, "__dict__", "f"))
            self._inside(name, value, put, depth)

    def _visit(self, name: str, value: Any, put: Callable[[Any], None], depth: int) -> None:
        if isinstance(value, torch.Tensor):
            self.places.append((name, value, put))
            return
        empty = isinstance(value, CONTAINERS) and not 0 < length(value) <= LONG
        if not (empty or isinstance(value, PLAIN) or depth > DEPTH or id(value) in self._seen):
            self._seen.add(id(value))
            self._waiting.append((name, value, put, depth + 1))

    def _inside(self, name: str, value: Any, put: Callable[[Any], None], depth: int) -> None:
        """Visit what a container, a function or an object refers to."""
        if isinstance(value, (dict, list)):
            for key, item in list(dict.items(value) if isinstance(value, dict) else enumerate(list.__iter__(value))):
                if not isinstance(item, PLAIN):
                    self._visit(f"{name}[{key}]", item, partial(value.__setitem__, key), depth)
        elif isinstance(value, tuple):
            items = list(tuple.__iter__(value))

            def changed(number: int, item: Any) -> None:
                items[number] = item
                put(type(value)(*items) if hasattr(value, "_fields") else type(value)(items))

            for number, item in enumerate(list(items)):
                self._visit(f"{name}[{number}]", item, partial(changed, number), depth)
        elif isinstance(value, FunctionType):
            for key, cell in zip(value.__code__.co_freevars, value.__closure__ or (), strict=True):
                try:
                    self._visit(f"{name}/{key}", cell.cell_contents, partial(setattr, cell, "cell_contents"), depth)
                except ValueError:  # an empty cell
                    continue
        elif isinstance(value, MethodType):
            self._visit(name, value.__self__, put, depth)
        elif isinstance(value, partial):
            for item in (value.func, *value.args, *value.keywords.values()):
                self._visit(name, item, lambda _: None, depth)
        elif isinstance(value, nn.Module) or (
            hasattr(value, "__dict__") and not isinstance(value, BuiltinFunctionType)
        ):
            for key, item in list(vars(value).items()):
                # tensors of a module outside of the model are named as in it
                inner = name if key in REGISTERED else f"{name}/{key}"
                self._visit(inner, item, partial(vars(value).__setitem__, key), depth)

    @contextmanager
    def replaced(self, copies: Mapping[int, torch.Tensor]) -> Iterator[None]:
        """Context in which tensors with a copy, given by the tensor's id, and views of them are replaced."""
        changed = [(put, value, copy) for _, value, put in self.places if (copy := copy_of(value, copies)) is not None]
        try:
            for put, _, copy in changed:
                put(copy)
            yield
        finally:
            for put, value, _ in reversed(changed):
                put(value)

    def parameters(self) -> dict[str, nn.Parameter]:
        """Trained parameters by name, each once."""
        first: dict[int, tuple[str, nn.Parameter]] = {}
        for name, value, _ in self.places:
            if isinstance(value, nn.Parameter) and value.requires_grad:
                first.setdefault(id(value), (name, value))
        return dict(first.values())

    def outside(self, dtype: torch.dtype | None) -> dict[int, torch.Tensor]:
        """Parameters in ``dtype``, by their ids: constants, unless others take their places."""
        parameters = {id(p): p for p in self.parameters().values() if p.is_floating_point() and p.dtype != dtype}
        return {} if dtype is None else {number: p.detach().to(dtype) for number, p in parameters.items()}


def length(value: Any) -> int:
    """Number of items of a container, whatever its class makes of ``len``."""
    kinds: tuple[Any, ...] = CONTAINERS
    return int(next(kind.__len__(value) for kind in kinds if isinstance(value, kind)))


def copy_of(value: torch.Tensor, copies: Mapping[int, torch.Tensor]) -> torch.Tensor | None:
    """Copy of a tensor, or the same view of the copy of what it is a view of."""
    if (copy := copies.get(id(value))) is not None or value._base is None:
        return copy
    base = copies.get(id(value._base))
    return None if base is None else value._view_func_unsafe(base)


def parameters_outside(model: nn.Module, loss: object) -> dict[str, nn.Parameter]:
    """Trained parameters that a model or its loss refers to and no module of the model has, as ``"weights[0]"``."""
    ids = set(map(id, model.parameters()))
    parameters = References(model, loss).parameters()
    return {name: p for name, p in parameters.items() if id(p) not in ids and p.is_floating_point()}


def holding(model: nn.Module, others: Mapping[str, nn.Parameter]) -> nn.Module:
    """Model with the same modules and attributes, and further parameters by name."""
    clone: nn.Module = type(model).__new__(type(model))
    vars(clone).update(vars(model))
    clone.__dict__["_parameters"] = model._parameters | dict(others)
    return clone


class Reentry:
    """Copies of parameters and buffers that replace the originals in modules that a backward pass runs again.

    They are those of the evaluation whose graph is differentiated, by the ids of the originals. Hooks of modules are
    there while an `autograd.Function` of the graph runs its backward, and do nothing in another backward pass.
    """

    #: number of the backward pass that has run modules again, if one is running
    running: ClassVar[int] = -1

    def __init__(self, model: nn.Module, loss_fn: object, copies: Mapping[int, torch.Tensor]) -> None:
        self.model, self.loss_fn, self.copies = model, loss_fn, copies
        self._task, self._ran = -1, False
        self._handles: list[Any] = []
        self._entered: list[tuple[nn.Module, ExitStack]] = []

    def watch(self, loss: torch.Tensor) -> None:
        """Watch the functions in the graph of a loss that have a backward of their own."""
        for node in nodes([loss.grad_fn]):
            if isinstance(node, BackwardCFunction):
                node.register_prehook(self._begin)
                node.register_hook(self._end)

    def _begin(self, _: Any) -> None:
        self._end()
        self._task = torch._C._current_graph_task_id()
        Reentry.running = self._task if self._ran else -1
        self._handles = [
            register_module_forward_pre_hook(self._enter),
            register_module_forward_hook(self._leave, always_call=True),
        ]

    def _end(self, *_: Any) -> None:
        Reentry.running = -1
        while self._handles:
            self._handles.pop().remove()

    def _enter(self, module: nn.Module, _: Any) -> None:
        """Put the copies in place of the originals if a module with them is called."""
        if torch._C._current_graph_task_id() != self._task or not any(
            id(p) in self.copies for p in module.parameters()
        ):
            return
        self._ran, stack = True, ExitStack()
        for owner in self.model.modules():
            tensors: tuple[Any, ...] = owner._parameters, owner._buffers
            for entries in tensors:
                stack.callback(entries.update, dict(entries))
                entries.update({key: self.copies.get(id(tensor), tensor) for key, tensor in entries.items()})
        stack.enter_context(References(self.model, self.loss_fn).replaced(self.copies))
        self._entered.append((module, stack))

    def _leave(self, module: nn.Module, *_: Any) -> None:
        """Put the originals back when the module returns."""
        if self._entered and self._entered[-1][0] is module:
            self._entered.pop()[1].close()


def ran_again() -> bool:
    """Whether a function that has run modules in a backward pass runs its backward now."""
    return Reentry.running != -1 and Reentry.running == torch._C._current_graph_task_id()
