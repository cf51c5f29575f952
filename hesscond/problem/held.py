"""Values that a model detaches, recorded at one point and replayed at others: they are constants of the gradient."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch.autograd import Function
from torch.overrides import TorchFunctionMode

from hesscond.problem.containers import mapped, tensors_of


class Held(TorchFunctionMode):
    """Mode that records the values a model detaches or computes under ``no_grad``, and replays them later.

    Values in the body of an `autograd.Function` are not held, since its derivative is to be checked.
    """

    #: Functions that return a value without its derivative.
    LEAVES = frozenset(
        {torch.Tensor.detach, torch.Tensor.item, torch.Tensor.tolist, vars(torch._C.TensorBase)["data"].__get__}
    )

    def __init__(self) -> None:
        super().__init__()
        self._values: list[Any] = []
        self._place: int | None = None

    def replaying(self) -> Held:
        """Return the context in which recorded values replace the computed ones."""
        self._place = 0
        return self

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        constant = func in self.LEAVES or (not torch.is_grad_enabled() and any(True for _ in tensors_of(found)))
        if not constant or inside_function():
            return found
        if self._place is None:
            self._values.append(mapped(found, lambda t: t.detach().clone()))
            return found
        if self._place >= len(self._values):
            raise RuntimeError("the model takes another path")
        value = self._values[self._place]
        self._place += 1
        if args and found is args[0]:
            found.copy_(value)
            return found
        return mapped(value, torch.clone)


def inside_function() -> bool:
    """Whether Python runs the body of an `autograd.Function` or of a custom operator."""
    frame = sys._getframe(2)
    while frame is not None:
        if frame.f_code is Function.apply.__func__.__code__ or "torch/_library/" in frame.f_code.co_filename:  # type: ignore[attr-defined]
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return False
