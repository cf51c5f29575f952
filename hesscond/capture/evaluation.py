"""One evaluation of a model and its loss on copies, without side effects."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from copy import copy as copied
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode

from hesscond.capture.precision import Operations, lifted, operations
from hesscond.capture.untouched import untouched
from hesscond.capture.wrappers import plainly
from hesscond.errors import CaptureError, ConfigError

Batch = tuple[Any, Any]
LossFunction = Callable[[Any, Any], torch.Tensor]


@dataclass(frozen=True)
class Evaluation:
    """A loss with its graph.

    Attributes
    ----------
    loss
        The scalar loss.
    output, target
        What it was computed from.
    samples
        N, the leading dimension of the inputs.
    """

    loss: torch.Tensor
    output: Any
    target: Any
    samples: int


def evaluate(
    model: nn.Module,
    loss_fn: LossFunction,
    batch: Batch,
    state: Mapping[str, torch.Tensor],
    *,
    dtype: torch.dtype | None,
    watch: WeightWatch,
    copy: bool = False,
    lift_casts: bool = True,
    counted: Operations | None = None,
) -> Evaluation:
    """Run the model and the loss with the tensors of ``state`` in the place of its own. Nothing is left behind.

    The ``loss`` is what the function returned: `scalar` checks it.

    Parameters
    ----------
    model, loss_fn
        ``loss_fn(model(inputs), target)``.
    batch
        A `checked_batch`.
    state
        By name, as in `tensors_by_module`.
    dtype
        Precision of the inputs and of the loss; None: their own.
    watch
        Told of every function called.
    copy
        Whether the model and the loss get copies of the batch, which they may change in place.
    lift_casts
        Whether what the model casts to float32 stays in float64, if that is ``dtype``.
    counted
        Where the operations of the model and the loss are counted.
    """
    inputs, target = batch
    arguments = converted(inputs, dtype, copy=copy)
    if isinstance(arguments, dict):
        args, kwargs = (), arguments
    else:
        args, kwargs = (tuple(arguments) if isinstance(arguments, (tuple, list)) else (arguments,)), {}
    target = converted(target, dtype, copy=copy)
    with ExitStack() as stack:
        stack.enter_context(untouched(model, loss_fn))
        stack.enter_context(plainly(model))
        stack.enter_context(default_dtype(dtype))
        stack.enter_context(torch.enable_grad())
        # the other backends have no second derivatives
        stack.enter_context(sdpa_kernel(SDPBackend.MATH))
        stack.enter_context(operations(counted))
        watch.lifts = lift_casts and dtype == torch.float64
        stack.enter_context(watch)
        output = torch.func.functional_call(model, dict(state), args, kwargs, tie_weights=False)
        loss = in_precision(loss_fn, dtype)(output, target)
    if counted is not None:
        counted.lifted += watch.lifted
    return Evaluation(loss, output, target, leading_dimension(inputs))


def scalar(loss: object) -> torch.Tensor:
    """The loss as a tensor without dimensions.

    Raises
    ------
    CaptureError
        It is no tensor of one entry.
    """
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
        found = f"shape {tuple(loss.shape)}" if isinstance(loss, torch.Tensor) else type(loss).__name__
        raise CaptureError(f"the loss must be a scalar tensor, not {found}: use reduction 'mean' or 'sum'")
    return loss.reshape(())


class WeightWatch(TorchFunctionMode):
    """Notices every use of a layer's weight or bias outside the layer's own forward, and lifts casts if told to.

    One mode for both, since each costs every function called.

    Attributes
    ----------
    lifts
        Whether casts to float32 become casts to float64.
    lifted
        How many did.
    """

    #: Attributes that are the values in another form; the others only describe them.
    VALUES = frozenset({"T", "mT", "H", "mH", "data", "real"})
    HARMLESS = frozenset({"size", "dim", "ndimension", "numel", "nelement", "stride", "__len__", "__hash__"})

    def __init__(self, weights: Mapping[int, str]) -> None:
        super().__init__()
        self.weights = weights
        self.inside: list[str] = []
        self.used_outside: set[int] = set()
        self.lifts, self.lifted = False, 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for value in (*args, *(kwargs or {}).values()):
            for item in value if isinstance(value, (tuple, list)) else (value,):
                name = self.weights.get(id(item))
                if name is not None and name not in self.inside and not self.reads_metadata(func):
                    self.used_outside.add(id(item))
        return self.in_float64(func, args, kwargs or {}) if self.lifts else func(*args, **(kwargs or {}))

    def in_float64(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """The call without casts to float32, also where a float32 tensor of the model's own would not do."""
        wide = lifted(func, args, kwargs)
        if wide is not None:
            self.lifted += 1
            func, args, kwargs = wide
        try:
            return func(*args, **kwargs)
        except RuntimeError:
            if not {torch.float32, torch.float64} <= {tensor.dtype for tensor in tensors_of((tuple(args), kwargs))}:
                raise
            # what an operation writes to stays
            kept = 1 if writes(func) else 0
            wider = (*args[:kept], *mapped(tuple(args[kept:]), widened))
            with suppress(RuntimeError):
                return func(*wider, **mapped(kwargs, widened))
            raise

    def reads_metadata(self, func: Any) -> bool:
        """Whether ``func`` looks at the shape, type or place of a tensor only."""
        name = getattr(func, "__name__", "")
        if name == "__get__":
            return getattr(func.__self__, "__name__", "") not in self.VALUES
        return name in self.HARMLESS or name.startswith("is_")


def tensors_by_module(model: nn.Module) -> dict[str, torch.Tensor]:
    """Parameters and buffers by name, those of a module once (torch 2.13 leaves its copies in a module with two names).

    A tensor that several modules share has a name in each.
    """
    return {
        f"{name}.{attribute}" if name else attribute: tensor
        for name, module in model.named_modules()
        for own in (module._parameters, module._buffers)
        for attribute, tensor in own.items()
        if tensor is not None
    }


def writes(func: Any) -> bool:
    """Whether a function changes its first argument."""
    name = getattr(func, "__name__", "")
    return name.startswith("__i") or name == "__setitem__" or (name.endswith("_") and not name.startswith("__"))


def widened(tensor: torch.Tensor) -> torch.Tensor:
    """Float32 as float64; others as they are."""
    return tensor.to(torch.float64) if tensor.dtype is torch.float32 else tensor


def is_finite(tensor: torch.Tensor) -> bool:
    """Whether no entry is NaN or infinite; a sum is so only if every entry is (or if huge ones overflow)."""
    return math.isfinite(tensor.sum()) or bool(torch.isfinite(tensor).all())


def checked_batch(batch: Batch) -> Batch:
    """``batch`` as a pair with at least one sample, or a ConfigError."""
    if not isinstance(batch, (tuple, list)) or len(batch) != 2:
        raise ConfigError("the batch must be a pair (inputs, targets)")
    inputs, target = batch
    for tensor in tensors_of(inputs):
        if tensor.ndim == 0 or len(tensor) == 0:
            raise ConfigError("the batch is empty: it needs at least one sample")
    return inputs, target


def leading_dimension(inputs: Any) -> int:
    """N, that of the first tensor among the inputs (1 if there is none)."""
    return next((len(tensor) for tensor in tensors_of(inputs)), 1)


def tensors_of(value: Any) -> Iterator[torch.Tensor]:
    """All tensors in nested tuples, lists and dicts."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (tuple, list, dict)):
        for item in value.values() if isinstance(value, dict) else value:
            yield from tensors_of(item)


def mapped(value: Any, function: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """``function`` of every tensor in nested tuples, lists and dicts; the rest as it is."""
    if isinstance(value, torch.Tensor):
        return function(value)
    if isinstance(value, dict):
        # a subclass may have more to it than its items
        result = copied(value)
        for key, item in value.items():
            result[key] = mapped(item, function)
        return result
    if isinstance(value, (tuple, list)):
        items = [mapped(item, function) for item in value]
        # a named tuple takes its fields one by one
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    return value


def converted(value: Any, dtype: torch.dtype | None, *, copy: bool = False) -> Any:
    """Floating tensors cast to ``dtype`` (None: their own), also in nested containers; the rest as it is."""

    def cast(tensor: torch.Tensor) -> torch.Tensor:
        # a tensor made in inference mode cannot be differentiated through
        own = copy or tensor.is_inference()
        if dtype is not None and tensor.is_floating_point():
            return tensor.to(dtype, copy=own)
        return tensor.clone() if own else tensor

    return mapped(value, cast)


def in_precision(loss_fn: LossFunction, dtype: torch.dtype | None) -> LossFunction:
    """The loss, with its own tensors (class weights) cast to ``dtype`` if it is a module."""
    if not isinstance(loss_fn, nn.Module):
        return loss_fn
    state = {name: converted(tensor.detach(), dtype) for name, tensor in tensors_by_module(loss_fn).items()}
    return lambda output, target: torch.func.functional_call(loss_fn, state, (output, target), tie_weights=False)


@contextmanager
def default_dtype(dtype: torch.dtype | None) -> Iterator[None]:
    """Tensors that the model makes without a dtype get the precision of its parameters."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(before if dtype is None else dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
