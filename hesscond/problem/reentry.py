"""Modules that a backward pass runs again, as adjoint methods for differential equations do."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any, ClassVar

import torch
from torch import nn
from torch.autograd.function import BackwardCFunction
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from hesscond.problem.graph import nodes
from hesscond.problem.references import References


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
            for own in tensors:
                stack.callback(own.update, dict(own))
                own.update({key: self.copies.get(id(tensor), tensor) for key, tensor in own.items()})
        stack.enter_context(References(self.model, self.loss_fn).replaced(self.copies))
        self._entered.append((module, stack))

    def _leave(self, module: nn.Module, *_: Any) -> None:
        """Put the originals back when the module returns."""
        if self._entered and self._entered[-1][0] is module:
            self._entered.pop()[1].close()


def ran_again() -> bool:
    """Whether a function that has run modules in a backward pass runs its backward now."""
    return Reentry.running != -1 and Reentry.running == torch._C._current_graph_task_id()
