"""Entry point of the package: Ĥ and S of chosen layers on one batch."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import torch
from torch import nn

from hesscond.capture import captured, curvature
from hesscond.capture.forward import ForwardPass, run_forward
from hesscond.capture.kinds import Layer
from hesscond.capture.layers import checked_units, chosen_layers, is_computed, stock_class, tied_layers
from hesscond.capture.nonfinite import reasons
from hesscond.capture.progress import TIED, ProgressRecord
from hesscond.errors import CaptureError, NotFiniteError
from hesscond.problem import MEMORY, evaluation, weighting
from hesscond.problem.wrappers import measurable


class Slopes(NamedTuple):
    """Gradient of a loss in the parameters of a layer, Σ δ ĥᵀ (m, n̂); Σδ² by unit (m,); Σĥ² by input (G, n̂)."""

    gradient: torch.Tensor
    units: torch.Tensor
    inputs: torch.Tensor


class Captures(dict[str, captured.LayerCapture]):
    """Captured layers by name."""

    # layers without finite second derivatives, and why; an error if layers are not ``optional``
    failed: dict[str, CaptureError]
    skipped: dict[str, str]  # layers that were not captured, and why
    mass: float | None  # weight of the batch in the loss of a data set; None: not asked for; at 0 there are no captures
    slopes: dict[str, Slopes]  # if asked for
    loss: float
    in_parameters: set[str]  # layers that were differentiated in their parameters
    differentiated: set[str]  # those of them that the model takes a derivative through, and nothing else
    stopped: list[str]  # layers that are missing because of a request to stop

    def __init__(self, forward: ForwardPass) -> None:
        super().__init__()
        self.skipped, self.loss, self.slopes = forward.bypassed, float(forward.loss.detach()), {}
        self.in_parameters, self.stopped, self.failed, self.mass = set(forward.parameters), [], {}, None

    def take(self, layers: Mapping[str, captured.LayerCapture], requested: Sequence[str], forward: ForwardPass) -> None:
        """Add the layers that were captured, in the order in which they were requested."""
        for name in requested:
            if name in layers:
                self[name] = replace(layers[name], repeating=name in forward.repeating)
        self.stopped = [name for name in requested if name not in layers and name not in self.failed]


@torch.enable_grad()
def capture(
    model: nn.Module,
    loss_fn: evaluation.LossFunction,
    batch: evaluation.Batch,
    layers: Iterable[str] | None = None,
    *,
    units: Mapping[str, Sequence[int]] | None = None,
    whole: bool = False,
    dtype: torch.dtype | None = torch.float64,
    memory: int = MEMORY,
    weights: weighting.Weights | None = None,
    optional: bool | None = None,
    in_parameters: Set[str] = frozenset(),
    slopes: bool = False,
    progress: ProgressRecord | None = None,
) -> Captures:
    """Capture Ĥ and S of layers on a batch. The model is left as it was: mode, grads, buffers, RNG state.

    S is exact by the cheapest of these routes: from the loss alone at an output layer; from one backward pass for
    each rank-one term of the loss Hessian's factor (classes − 1 for cross-entropy) if the rest of the network is
    piecewise linear; else from two backward passes, with one direction for each unit and position or for each
    parameter, whichever are fewer, or behind batch statistics from derivatives that go forward. A layer whose
    parameters act otherwise than through its pre-activations on given inputs (tied to another layer, used outside the
    layer, applied to its own output, a custom forward pass) is differentiated twice in the parameters.

    Parameters
    ----------
    model, loss_fn, batch
        As for `hesscond.probe`.
    layers
        Qualified names; None: all that the batch reaches.
    units
        Units to capture, by layer name; of a layer that is not named here, all.
    whole
        Whether the curvature between units is computed too, not only within each; then all units are captured.
    dtype
        Precision of the forward pass: parameters, buffers and floating inputs are cast to it. None: no cast.
    memory
        Bytes that may be used.
    weights
        Weights of a data set, which the batch is added to, for its ``mass``; None: the batch is the whole data set.
    optional
        Whether layers that the batch does not reach are left out, or an error; None: an error if they were named.
    in_parameters
        Layers to differentiate in their parameters in any case.
    slopes
        Whether to compute the gradients of the loss from the captures.
    """
    model = measurable(model)
    chosen = chosen_layers(model, layers)
    wanted = {
        name: checked_units(name, layer, None if whole else (units or {}).get(name)) for name, layer in chosen.items()
    }
    optional = layers is None if optional is None else optional
    progress = ProgressRecord() if progress is None else progress
    run = partial(run_forward, model, loss_fn, batch, chosen, dtype=dtype, optional=optional)
    with_own = {name for name, layer in chosen.items() if stock_class(layer) is None and not is_computed(layer)}
    in_parameters = (tied_layers(model) | with_own | in_parameters) & set(chosen)
    forward = run(in_parameters=in_parameters)
    differentiated = forward.differentiated
    if forward.entangled or forward.overwritten:
        forward = run(in_parameters=in_parameters | forward.entangled, keep_inputs=forward.overwritten)
    result = Captures(forward)
    result.differentiated = differentiated
    result.mass = None if weights is None else weights.add(batch, forward)
    if result.mass == 0 or not forward.calls:
        return result
    weighting.refuse_nothing(loss_fn, forward)
    # a layer with a single unit is captured as that unit, whose rounding is known by sample
    requests = [
        curvature.Request(name, chosen[name], calls, units, whole and len(units) > 1, forward.parameters.get(name))
        for name, calls in forward.calls.items()
        for units in [wanted[name]]
    ]
    if slopes:
        result.slopes = slopes_of(forward, [request for request in requests if request.parameters is None])
    differentiator = curvature.Differentiator(forward, requests, memory, progress)
    if progress.callback is not None and differentiator.is_tied(model):
        progress.reason = TIED
    captures = differentiator.capture()
    if progress.sample and differentiator.is_tied(model):
        progress.reason = TIED
    result.failed = differentiator.failed
    explain(result.failed, model, loss_fn, batch, chosen, dtype=dtype)
    refuse_failed(result, optional=optional)
    wanted_now = [request.name for request in requests if progress.sample.get(request.name) != ()]
    result.take(captures, wanted_now, forward)
    return result


def refuse_failed(result: Captures, *, optional: bool) -> None:
    """Raise the error of a layer that failed, unless it may be left out, or where the loss itself is not finite."""
    undefined = not math.isfinite(result.loss)
    if result.failed and (undefined or not optional):
        name, error = next(iter(result.failed.items()))
        raise type(error)(f"layer {name!r} cannot be probed: {error}")
    if undefined:
        # the logarithm of a negative number is NaN, its formula for the derivative is not
        raise NotFiniteError(f"the loss of a batch is {result.loss}: its derivatives are not defined")


def explain(
    failed: dict[str, CaptureError],
    model: nn.Module,
    loss_fn: evaluation.LossFunction,
    batch: evaluation.Batch,
    layers: Mapping[str, Layer],
    dtype: torch.dtype | None,
) -> None:
    """Add the reasons why the second derivatives of layers are not finite to their errors."""
    unbounded = [name for name, error in failed.items() if isinstance(error, NotFiniteError)]
    if unbounded:
        parts = {name: list(layers[name].parameters()) for name in unbounded}
        # if the search fails, the original error is raised
        with suppress(Exception):
            for name, reason in reasons(model, loss_fn, [batch], parts, dtype).items():
                failed[name] = NotFiniteError(f"{captured.NOT_FINITE}: {reason}")


def slopes_of(forward: ForwardPass, requests: Sequence[curvature.Request]) -> dict[str, Slopes]:
    """Gradients of the loss in the parameters of layers, from δ and Ĥ."""
    deltas = [delta for request in requests for delta in request.deltas]
    if not deltas:
        return {}
    grads = iter(torch.autograd.grad(forward.loss, deltas, retain_graph=True, allow_unused=True))
    result = {}
    for request in requests:
        blocks = forward.samples if request.splits(forward.samples) else 1
        by_call = [(torch.zeros_like(d) if g is None else g)[None] for d, g in zip(request.deltas, grads, strict=False)]
        inputs, slopes = request.inputs(blocks), request.positions(by_call, blocks)[0]
        result[request.name] = Slopes(
            inputs.gradient(slopes), slopes.square().sum((0, 2)), inputs.squared_lengths.sum(0)
        )
    return result
