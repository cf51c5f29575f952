"""One forward pass of a model, without side effects, that perturbs the pre-activations of chosen layers by zero."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Set
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode

from hesscond.capture.graph import dependent
from hesscond.capture.layers import Layer
from hesscond.errors import CaptureError, ConfigError

Batch = tuple[Any, Any]
LossFunction = Callable[[Any, Any], torch.Tensor]


@dataclass(frozen=True)
class Call:
    """One call of a layer.

    Attributes
    ----------
    inputs
        What the layer was given, copied.
    delta
        Zeros of the output's shape, added to it: the loss is differentiated in them.
    node
        The autograd node of the sum; None for a layer that is differentiated in its parameters.
    """

    inputs: torch.Tensor
    delta: torch.Tensor
    node: Any


@dataclass(frozen=True)
class ForwardPass:
    """A loss with its graph down to the perturbations of every layer.

    Attributes
    ----------
    loss
        The scalar loss.
    output, target
        What it was computed from.
    calls
        By layer, in the order of the calls.
    parameters
        Weight and bias (None: there is none) of the layers that are differentiated in them.
    samples
        N, the leading dimension of the inputs.
    bypassed
        Layers of the request that were not used, with the reason.
    entangled
        Layers whose parameters act otherwise than through the perturbations: used outside the layer, or a call sees
        what an earlier one gave. They must be differentiated in their parameters.
    overwritten
        Whether an input of a layer was changed in place after the call: the pass must be repeated with copies.
    """

    loss: torch.Tensor
    output: Any
    target: Any
    calls: dict[str, list[Call]]
    parameters: dict[str, tuple[torch.Tensor, torch.Tensor | None]]
    samples: int
    bypassed: dict[str, str]
    entangled: set[str]
    overwritten: bool


class WeightWatch(TorchFunctionMode):
    """Notices every use of a layer's weight or bias outside the layer's own forward."""

    #: Attributes that are the values in another form; the others only describe them.
    VALUES = frozenset({"T", "mT", "H", "mH", "data", "real"})
    HARMLESS = frozenset({"size", "dim", "ndimension", "numel", "nelement", "stride", "__len__", "__hash__"})

    def __init__(self, weights: Mapping[int, str]) -> None:
        super().__init__()
        self.weights = weights
        self.inside: list[str] = []
        self.used_outside: set[int] = set()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for value in (*args, *(kwargs or {}).values()):
            for item in value if isinstance(value, (tuple, list)) else (value,):
                name = self.weights.get(id(item))
                if name is not None and name not in self.inside and not self.reads_metadata(func):
                    self.used_outside.add(id(item))
        return func(*args, **(kwargs or {}))

    def reads_metadata(self, func: Any) -> bool:
        """Whether ``func`` looks at the shape, type or place of a tensor only."""
        name = getattr(func, "__name__", "")
        if name == "__get__":
            return getattr(func.__self__, "__name__", "") not in self.VALUES
        return name in self.HARMLESS or name.startswith("is_")


def run_forward(
    model: nn.Module,
    loss_fn: LossFunction,
    batch: Batch,
    layers: Mapping[str, Layer],
    *,
    dtype: torch.dtype | None,
    optional: bool,
    in_parameters: Set[str] = frozenset(),
    keep_inputs: bool = False,
) -> ForwardPass:
    """Run the model on copies of its parameters and buffers, every output of ``layers`` plus a zero perturbation.

    Parameters
    ----------
    model, loss_fn, batch, dtype
        As in `capture`.
    layers
        The layers to perturb.
    optional
        Whether layers that are not used are left out, or an error.
    in_parameters
        Layers to differentiate in their weight and bias instead.
    keep_inputs
        Whether to copy the layers' inputs, which the model is known to overwrite.

    Raises
    ------
    ConfigError
        An empty or malformed batch; one on another device than the model.
    CaptureError
        A layer not used; a loss that uses a weight directly, or is not a differentiable scalar.
    """
    inputs, target = checked_batch(batch)
    samples = leading_dimension(inputs)
    tensors = tensors_by_module(model)
    refuse_other_device(layers, tensors, inputs)
    copies = {id(t): converted(t.detach(), dtype, copy=True) for t in tensors.values()}
    state = {key: copies[id(t)] for key, t in tensors.items()}
    arguments = converted(inputs, dtype)
    if isinstance(arguments, dict):
        args, kwargs = (), arguments
    else:
        args, kwargs = (tuple(arguments) if isinstance(arguments, (tuple, list)) else (arguments,)), {}
    target = converted(target, dtype)

    originals = {id(p): name for name, layer in layers.items() for p in own_parameters(layer)}
    parameters = {name: leaves(name, layers[name], copies) for name in layers if name in in_parameters}
    watch = WeightWatch(originals | {id(copies[i]): name for i, name in originals.items()})
    calls: dict[str, list[Call]] = {name: [] for name in layers}
    entangled: set[str] = set()
    versions: list[tuple[torch.Tensor, int]] = []

    def enter(name: str) -> Callable[..., None]:
        return lambda *_: watch.inside.append(name)

    def perturb(name: str) -> Callable[..., torch.Tensor | None]:
        def hook(module: nn.Module, args: Any, kwargs: dict[str, Any], output: torch.Tensor) -> torch.Tensor | None:
            watch.inside.remove(name)
            h = args[0] if args else kwargs["input"]
            seen = h.detach().clone() if keep_inputs else h.detach()
            versions.append((seen, seen._version))
            if name in in_parameters:
                calls[name].append(Call(seen, torch.zeros_like(output), None))
                return None
            earlier = {get_gradient_edge(call.delta).node for call in calls[name]}
            if earlier and h.grad_fn in dependent([h.grad_fn], earlier):
                entangled.add(name)
            delta = torch.zeros_like(output, requires_grad=True)
            perturbed = output + delta
            calls[name].append(Call(seen, delta, perturbed.grad_fn))
            return perturbed

        return hook

    with ExitStack() as stack:
        for name, layer in layers.items():
            stack.callback(layer.register_forward_pre_hook(enter(name)).remove)
            stack.callback(layer.register_forward_hook(perturb(name), with_kwargs=True, prepend=True).remove)
        stack.enter_context(untouched_randomness(state))
        stack.enter_context(default_dtype(dtype))
        stack.enter_context(torch.enable_grad())
        # the other backends have no second derivatives
        stack.enter_context(sdpa_kernel(SDPBackend.MATH))
        stack.enter_context(watch)
        output = torch.func.functional_call(model, state, args, kwargs, tie_weights=False)
        loss = in_precision(loss_fn, dtype)(output, target)
    for number in watch.used_outside:
        name = watch.weights[number]
        if number in originals:
            raise CaptureError(
                f"the loss uses a parameter of layer {name!r} of the model itself, which is not differentiated: "
                "leave terms in the parameters, as weight decay, out of the loss (their Hessian is known)"
            )
        entangled.add(name)
    entangled -= set(in_parameters)
    bypassed = {
        name: "not reached by this batch"
        for name, seen in calls.items()
        if not seen and name not in entangled and name not in in_parameters
    }
    for name, reason in bypassed.items():
        if not optional or len(bypassed) == len(layers):
            raise CaptureError(f"layer {name!r} cannot be probed: {reason}")
    overwritten = any(seen._version != version for seen, version in versions)
    reached = {name: seen for name, seen in calls.items() if name not in bypassed}
    for name, seen in reached.items():
        if not all(is_finite(call.inputs) for call in seen):
            raise CaptureError(f"the input of layer {name!r} has NaN or infinite entries")
    first = next(iter(reached))
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
        found = f"shape {tuple(loss.shape)}" if isinstance(loss, torch.Tensor) else type(loss).__name__
        raise CaptureError(f"the loss must be a scalar tensor, not {found}: use reduction 'mean' or 'sum'")
    if not loss.requires_grad and not entangled:
        raise CaptureError(f"the loss does not depend differentiably on layer {first!r}")
    return ForwardPass(loss.reshape(()), output, target, reached, parameters, samples, bypassed, entangled, overwritten)


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


def is_finite(tensor: torch.Tensor) -> bool:
    """Whether no entry is NaN or infinite; a sum is so only if every entry is (or if huge ones overflow)."""
    return math.isfinite(tensor.sum()) or bool(torch.isfinite(tensor).all())


def own_parameters(layer: Layer) -> list[nn.Parameter]:
    """The weight and bias of a layer that are parameters, not computed from others."""
    return [p for p in (layer.weight, layer.bias) if isinstance(p, nn.Parameter)]


def leaves(name: str, layer: Layer, copies: Mapping[int, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The copies of a layer's weight and bias, made differentiable.

    Raises
    ------
    CaptureError
        They are computed from other parameters.
    """
    own = own_parameters(layer)
    if len(own) != (1 if layer.bias is None else 2):
        raise CaptureError(
            f"layer {name!r} is used in more than one way and its weight is computed from other parameters: "
            "its Hessian cannot be captured"
        )
    found = [copies[id(p)].requires_grad_() for p in own]
    return found[0], found[1] if layer.bias is not None else None


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
        return {key: mapped(item, function) for key, item in value.items()}
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


def refuse_other_device(layers: Mapping[str, Layer], tensors: Mapping[str, torch.Tensor], inputs: Any) -> None:
    """Raise a ConfigError if the inputs are where no part of the model is."""
    homes = {tensor.device for tensor in tensors.values()}
    for tensor in tensors_of(inputs):
        if tensor.device not in homes:
            name, layer = next(iter(layers.items()))
            raise ConfigError(f"layer {name!r} is on device '{layer.weight.device}' but the batch on '{tensor.device}'")


@contextmanager
def untouched_randomness(state: Mapping[str, torch.Tensor]) -> Iterator[None]:
    """Leave the random state of the CPU and of the state's GPUs as it is found."""
    devices = sorted({t.device.index for t in state.values() if t.device.type == "cuda"})
    with torch.random.fork_rng(devices):
        yield


@contextmanager
def default_dtype(dtype: torch.dtype | None) -> Iterator[None]:
    """Tensors that the model makes without a dtype get the precision of its parameters."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(before if dtype is None else dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
