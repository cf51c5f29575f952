"""The front door of the room: Ĥ and S of chosen layers on one batch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial

import torch
from torch import nn

from hesscond.capture.captured import LayerCapture
from hesscond.capture.curvature import Differentiator, Request
from hesscond.capture.evaluation import Batch, LossFunction
from hesscond.capture.forward import run_forward
from hesscond.capture.layers import checked_units, chosen_layers, tied_layers
from hesscond.capture.weighting import Weights, refuse_nothing

#: Bytes that a capture and the work on it may take unless told otherwise.
MEMORY = 4 * 10**9


class Captures(dict[str, LayerCapture]):
    """What was captured, by layer name.

    Attributes
    ----------
    skipped
        Layers that were not captured, with the reason.
    mass
        What the batch counts in the loss of a data set (see `weighting.Weights`); None if not asked for. A batch that
        counts nothing is not captured.
    """

    skipped: dict[str, str]
    mass: float | None


@torch.enable_grad()
def capture(
    model: nn.Module,
    loss_fn: LossFunction,
    batch: Batch,
    layers: Iterable[str] | None = None,
    *,
    units: Mapping[str, Sequence[int]] | None = None,
    whole: bool = False,
    dtype: torch.dtype | None = torch.float64,
    memory: int = MEMORY,
    weights: Weights | None = None,
) -> Captures:
    """Ĥ and S of layers on a batch. The model is left as it was: mode, grads, buffers, RNG state.

    S is exact by the cheapest of these routes: from the loss alone at an output layer; from one backward pass for
    each rank-one term of the loss Hessian's factor (classes − 1 for cross-entropy) where what follows the layer is
    piecewise linear; else from two backward passes, one direction a unit and position, or a parameter, whichever
    are fewer. A layer whose parameters act in more ways than through its pre-activations on given inputs (tied to
    another one, used outside the layer, fed with its own output) is differentiated twice in the parameters.

    Parameters
    ----------
    model
        Any module; the layers are its `torch.nn.Linear`, convolution and transposed convolution modules.
    loss_fn
        ``loss_fn(output, target)``, a scalar.
    batch
        ``(inputs, targets)``; inputs a tensor, or a tuple of positional or a dict of keyword arguments.
    layers
        Qualified names; None: all that the batch reaches.
    units
        For each layer name its units; a layer that is absent: all.
    whole
        Whether the curvature is wanted between the units too, not within each alone; then all units are captured.
    dtype
        Precision of the forward pass: parameters, buffers and floating inputs are cast to it. None: as they are.
    memory
        Bytes that may be used.
    weights
        Told of the batch, for its ``mass``; None: the batch is the data.

    Raises
    ------
    ConfigError
        Unknown layer or unit; a batch that is not a pair, is empty, has no target that counts, or is on another device
        than the model.
    CaptureError
        A layer not reached; a loss that uses a weight directly; one that is not a differentiable scalar; NaN or
        infinite values; more memory needed than allowed.
    """
    chosen = chosen_layers(model, layers)
    wanted = {
        name: checked_units(name, layer, None if whole else (units or {}).get(name)) for name, layer in chosen.items()
    }
    optional, in_parameters = layers is None, tied_layers(model) & set(chosen)
    run = partial(run_forward, model, loss_fn, batch, chosen, dtype=dtype, optional=optional)
    forward = run(in_parameters=in_parameters)
    if forward.entangled or forward.overwritten:
        forward = run(in_parameters=in_parameters | forward.entangled, keep_inputs=forward.overwritten)
    result = Captures()
    result.skipped = forward.bypassed
    result.mass = None if weights is None else weights.add(batch, forward)
    if result.mass == 0:
        return result
    refuse_nothing(loss_fn, forward)
    requests = [
        Request(name, chosen[name], calls, wanted[name], whole, forward.parameters.get(name))
        for name, calls in forward.calls.items()
    ]
    found = Differentiator(forward, requests, memory).capture()
    result.update({request.name: found[request.name] for request in requests})
    return result
