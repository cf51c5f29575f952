"""One forward pass of a model, without side effects, that yields Ĥ and S of chosen layers."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from hesscond.capture.losses import LossFunction, loss_curvature
from hesscond.capture.tail import is_piecewise_linear
from hesscond.errors import CaptureError, ConfigError

Batch = tuple[Any, torch.Tensor]


@dataclass(frozen=True)
class LayerCapture:
    """What a dense layer sees on a batch of N samples, and how the loss bends in its pre-activations.

    Attributes
    ----------
    name
        The layer's qualified name in the model.
    H_hat : (N, n + 1) float64
        Extended activations [1; h], one row a sample (without the first column if the layer has no bias).
    bias
        Whether the layer has one.
    units
        The output units captured.
    root : (N, len(units)) float64
        √|S_jj| for each of them. S, the second derivative of the loss in the unit's pre-activations, is diagonal.
    sign : (N, len(units)) or None
        Signs of S_jj; None: all of them ≥ 0.
    route
        How S was computed.
    """

    name: str
    H_hat: torch.Tensor
    bias: bool
    units: tuple[int, ...]
    root: torch.Tensor
    sign: torch.Tensor | None
    route: str

    @property
    def h(self) -> torch.Tensor:
        """(N, n) the activations without the column of ones."""
        return self.H_hat[:, 1:] if self.bias else self.H_hat


def dense_layers(model: nn.Module) -> dict[str, nn.Linear]:
    """The layers that can be captured, by qualified name: every `torch.nn.Linear`."""
    return {name or "model": module for name, module in model.named_modules() if isinstance(module, nn.Linear)}


def chosen_layers(model: nn.Module, names: Iterable[str] | None) -> dict[str, nn.Linear]:
    """The layers called ``names`` (None: all).

    Raises
    ------
    ConfigError
        A name the model does not have, or no dense layer at all.
    CaptureError
        A weight used by two layers: the Hessian of one of them alone is not that of the parameter.
    """
    layers = dense_layers(model)
    if not layers:
        raise ConfigError("the model has no torch.nn.Linear layer, and only those can be probed")
    wanted = list(layers) if names is None else list(names)
    for name in wanted:
        if name not in layers:
            raise ConfigError(f"no dense layer {name!r} in the model: it has {', '.join(layers)}")
    for name in wanted:
        for other, module in layers.items():
            if other != name and module.weight is layers[name].weight:
                raise CaptureError(f"layers {name!r} and {other!r} share their weight, which is not supported")
    return {name: layers[name] for name in wanted}


def checked_units(name: str, layer: nn.Linear, units: Sequence[int] | None) -> tuple[int, ...]:
    """``units`` of the layer (None: all), or a ConfigError for one out of range."""
    chosen = tuple(range(layer.out_features)) if units is None else tuple(units)
    for unit in chosen:
        if not 0 <= unit < layer.out_features:
            raise ConfigError(f"unit {unit} is out of range: layer {name!r} has units 0 to {layer.out_features - 1}")
    return chosen


@dataclass
class Recorder:
    """Forward hooks that keep the input and output of layers while ``armed``; they change nothing.

    The study runner leaves one on the model, so that a probe of the output layer reuses the training forward pass.
    """

    layers: Mapping[str, nn.Linear]
    armed: bool = False
    seen: dict[str, tuple[torch.Tensor, torch.Tensor, int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._handles = [layer.register_forward_hook(self._hook(name)) for name, layer in self.layers.items()]

    def _hook(self, name: str) -> Any:
        def keep(module: nn.Module, args: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
            if self.armed:
                self.seen[name] = (args[0].detach(), output, output._version)

        return keep

    def remove(self) -> None:
        """Take the hooks off the model."""
        for handle in self._handles:
            handle.remove()

    def captured(
        self,
        loss_fn: LossFunction,
        output: torch.Tensor,
        target: torch.Tensor,
        units: Mapping[str, tuple[int, ...]],
    ) -> dict[str, LayerCapture] | None:
        """The capture of the pass just seen, if every layer's output is the model's output; else None."""
        for _, own, version in self.seen.values():
            if own is not output or own._version != version:
                return None
        if set(self.seen) != set(self.layers):
            return None
        curvature = loss_curvature(loss_fn, output, target)
        if curvature is None:
            return None
        result = {}
        for name, layer in self.layers.items():
            root = torch.stack([curvature.diagonal_root(i) for i in units[name]], 1)
            result[name] = layer_capture(name, layer, self.seen[name][0], units[name], root, None, OUTPUT_ROUTE)
        self.seen.clear()
        return result


OUTPUT_ROUTE = "loss curvature of the output"
FACTOR_ROUTE = "loss factor through a piecewise linear tail"
DOUBLE_ROUTE = "double backward"


def layer_capture(
    name: str,
    layer: nn.Linear,
    h: torch.Tensor,
    units: tuple[int, ...],
    root: torch.Tensor,
    sign: torch.Tensor | None,
    route: str,
) -> LayerCapture:
    """Form Ĥ from the input (N, n) of a layer and check that everything is finite."""
    h = h.to(torch.float64)
    if not math.isfinite(h.sum()) and not torch.isfinite(h).all():
        raise CaptureError(f"the input of layer {name!r} has NaN or infinite entries")
    if not math.isfinite(root.sum()):
        raise CaptureError(f"the curvature of the loss at layer {name!r} is NaN or infinite")
    bias = layer.bias is not None
    H_hat = torch.cat([h.new_ones(len(h), 1), h], 1) if bias else h
    return LayerCapture(name, H_hat, bias, units, root, sign, route)


def capture(
    model: nn.Module,
    loss_fn: LossFunction,
    batch: Batch,
    layers: Iterable[str] | None = None,
    *,
    units: Mapping[str, Sequence[int]] | None = None,
    dtype: torch.dtype | None = torch.float64,
) -> dict[str, LayerCapture]:
    """Ĥ and S of dense layers on a batch. The model is left as it was: mode, grads, buffers, RNG state.

    Parameters
    ----------
    model
        Any module; the layers are its `torch.nn.Linear` modules with inputs (N, n), each called once.
    loss_fn
        ``loss_fn(output, target)``, a scalar.
    batch
        ``(inputs, targets)``; inputs a tensor, or a tuple of positional or a dict of keyword arguments.
    layers
        Qualified names; None: all.
    units
        For each layer name its units; a layer that is absent: all.
    dtype
        Precision of the forward pass: parameters, buffers and floating inputs are cast to it. None: as they are.

    Raises
    ------
    ConfigError
        Unknown layer or unit; a batch that is not a pair or is empty.
    CaptureError
        A layer not reached, called twice or fed anything but (N, n); samples that influence each other (batch
        normalization in training mode); a loss that is not a differentiable scalar; NaN or infinite values.
    """
    chosen = chosen_layers(model, layers)
    wanted = {n: checked_units(n, layer, (units or {}).get(n)) for n, layer in chosen.items()}
    inputs, target = checked_batch(batch)
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    state = {name: converted(t.detach(), dtype, copy=True) for name, t in tensors.items()}
    args, kwargs = call_arguments(inputs, dtype)
    if isinstance(target, torch.Tensor):
        target = converted(target, dtype)
    seen: dict[str, tuple[torch.Tensor, torch.Tensor, torch.Tensor, int]] = {}

    def hook_for(name: str) -> Any:
        def perturb(module: nn.Module, args: Any, kwargs: dict[str, Any], output: torch.Tensor) -> torch.Tensor:
            h = args[0] if args else kwargs["input"]
            if name in seen:
                raise CaptureError(f"layer {name!r} is called more than once, which is not supported")
            if h.ndim != 2:
                raise CaptureError(f"layer {name!r} sees inputs of shape {tuple(h.shape)}: only (N, n) is supported")
            delta = torch.zeros_like(output).requires_grad_()
            perturbed = output + delta
            seen[name] = (h.detach(), delta, perturbed, perturbed._version)
            return perturbed

        return perturb

    handles = [layer.register_forward_hook(hook_for(name), with_kwargs=True) for name, layer in chosen.items()]
    devices = sorted({t.device.index for t in state.values() if t.device.type == "cuda"})
    try:
        with torch.random.fork_rng(devices), torch.enable_grad():
            output = torch.func.functional_call(model, state, args, kwargs)
            for name in chosen:
                if name not in seen:
                    raise CaptureError(f"layer {name!r} is not reached by this batch")
            return curvatures(chosen, wanted, seen, loss_fn, output, target)
    finally:
        for handle in handles:
            handle.remove()


def checked_batch(batch: Batch) -> Batch:
    """``batch`` as a pair with at least one sample, or a ConfigError."""
    if not isinstance(batch, (tuple, list)) or len(batch) != 2:
        raise ConfigError("the batch must be a pair (inputs, targets)")
    inputs, target = batch
    first = inputs
    if isinstance(inputs, (tuple, list, dict)):
        values = list(inputs.values()) if isinstance(inputs, dict) else list(inputs)
        first = next((v for v in values if isinstance(v, torch.Tensor)), None)
    if isinstance(first, torch.Tensor) and (first.ndim == 0 or len(first) == 0):
        raise ConfigError("the batch is empty: it needs at least one sample")
    return inputs, target


def call_arguments(inputs: Any, dtype: torch.dtype | None) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Positional and keyword arguments of the model, floating tensors cast to ``dtype``."""
    if isinstance(inputs, dict):
        return (), {k: converted(v, dtype) for k, v in inputs.items()}
    if isinstance(inputs, (tuple, list)):
        return tuple(converted(v, dtype) for v in inputs), {}
    return (converted(inputs, dtype),), {}


def converted(value: Any, dtype: torch.dtype | None, *, copy: bool = False) -> Any:
    """A floating tensor cast to ``dtype`` (None: its own), anything else as it is; a copy where asked for."""
    if not isinstance(value, torch.Tensor):
        return value
    if dtype is not None and value.is_floating_point():
        return value.to(dtype, copy=copy)
    return value.clone() if copy else value


def curvatures(
    chosen: Mapping[str, nn.Linear],
    wanted: Mapping[str, tuple[int, ...]],
    seen: Mapping[str, tuple[torch.Tensor, torch.Tensor, torch.Tensor, int]],
    loss_fn: LossFunction,
    output: Any,
    target: Any,
) -> dict[str, LayerCapture]:
    """S of every layer by the cheapest exact route."""
    known = loss_curvature(loss_fn, output, target) if isinstance(output, torch.Tensor) else None
    captured = {}
    inner = []
    for name, layer in chosen.items():
        h, _, perturbed, version = seen[name]
        if known is not None and perturbed is output and perturbed._version == version:
            root = torch.stack([known.diagonal_root(i) for i in wanted[name]], 1)
            captured[name] = layer_capture(name, layer, h, wanted[name], root, None, OUTPUT_ROUTE)
        else:
            inner.append(name)
    if inner:
        results: list[tuple[torch.Tensor, torch.Tensor | None]]
        deltas = [seen[name][1] for name in inner]
        if known is not None and is_piecewise_linear(output):
            factor = known.factor()
            results = [(root, None) for root in factor_roots(inner, deltas, output, factor)]
            route = FACTOR_ROUTE
        else:
            results = double_backward(inner, deltas, [wanted[n] for n in inner], loss_fn, output, target)
            route = DOUBLE_ROUTE
        for name, (root, sign) in zip(inner, results, strict=True):
            if route == FACTOR_ROUTE:
                root = root[:, list(wanted[name])]
            captured[name] = layer_capture(name, chosen[name], seen[name][0], wanted[name], root, sign, route)
    return {name: captured[name] for name in chosen}


def factor_roots(
    names: Sequence[str], deltas: Sequence[torch.Tensor], output: torch.Tensor, factor: torch.Tensor
) -> list[torch.Tensor]:
    """√S (N, m) of each layer from backward passes of the loss Hessian's factor (r, N, c): S_i = Σ_r (Jᵀb_r)_i²."""
    gradients = torch.autograd.grad(
        output, deltas, factor.to(output.dtype), is_grads_batched=True, retain_graph=True, allow_unused=True
    )
    check = torch.autograd.grad(output, deltas, even_rows(output), allow_unused=True)
    roots = []
    for name, delta, gradient, mixed in zip(names, deltas, gradients, check, strict=True):
        if gradient is None or mixed is None:
            roots.append(torch.zeros_like(delta, dtype=torch.float64))
            continue
        refuse_coupling(name, mixed)
        # hypot, not the sum of squares: a curvature of 1e-400 must not vanish
        scale = gradient.abs().amax(0).clamp_min(torch.finfo(gradient.dtype).tiny).to(torch.float64)
        roots.append((gradient.to(torch.float64) / scale).square_().sum(0).sqrt_() * scale)
    return roots


def even_rows(like: torch.Tensor) -> torch.Tensor:
    """A direction on the even samples only, with unequal entries so that sums over units do not cancel."""
    direction = torch.cos(torch.arange(like.numel(), dtype=like.dtype, device=like.device)).reshape(like.shape)
    direction[1::2] = 0
    return direction


def refuse_coupling(name: str, derivative: torch.Tensor) -> None:
    """Raise unless the odd rows are exactly zero: they are derivatives along the even samples alone."""
    if not torch.isfinite(derivative).all():
        raise CaptureError(f"the curvature of the loss at layer {name!r} is NaN or infinite")
    if derivative[1::2].any():
        raise CaptureError(
            f"the samples of the batch influence each other behind layer {name!r} (batch normalization in training "
            "mode?): its S is not diagonal, which is not supported yet; probe in eval mode"
        )


def double_backward(
    names: Sequence[str],
    deltas: Sequence[torch.Tensor],
    units: Sequence[tuple[int, ...]],
    loss_fn: LossFunction,
    output: Any,
    target: Any,
) -> list[tuple[torch.Tensor, torch.Tensor | None]]:
    """√|S| and signs of each layer from second derivatives, one backward pass a unit."""
    loss = loss_fn(output, target)
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
        raise CaptureError("the loss must be a scalar tensor: use reduction 'mean' or 'sum'")
    if not loss.requires_grad:
        raise CaptureError(f"the loss does not depend differentiably on layer {names[0]!r}")
    first = torch.autograd.grad(loss, deltas, create_graph=True, allow_unused=True)
    results: list[tuple[torch.Tensor, torch.Tensor | None]] = []
    for name, delta, gradient, chosen in zip(names, deltas, first, units, strict=True):
        S = torch.zeros(len(delta), len(chosen), dtype=torch.float64, device=delta.device)
        if gradient is not None and gradient.requires_grad:
            (mixed,) = torch.autograd.grad(gradient, delta, even_rows(gradient), retain_graph=True, allow_unused=True)
            if mixed is not None:
                refuse_coupling(name, mixed)
                for column, unit in enumerate(chosen):
                    (second,) = torch.autograd.grad(gradient[:, unit].sum(), delta, retain_graph=True)
                    S[:, column] = second[:, unit]
        results.append((S.abs().sqrt(), S.sign() if (S < 0).any() else None))
    return results
