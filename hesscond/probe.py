"""The front door: capture → Hessian in a method's coordinates → spectrum → κ."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import nn

from hesscond.capture import MEMORY, Batch, LossFunction
from hesscond.errors import ConfigError
from hesscond.hessians import Chart, Preconditioner
from hesscond.layer_probe import LayerProbe
from hesscond.methods import Method
from hesscond.network_probe import probe_network
from hesscond.results import NETWORK, ProbeResult

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

LEVELS = ("unit", "layer", "network")


def probe(
    model: nn.Module,
    loss_fn: LossFunction,
    data: Batch | Iterable[Batch],
    layers: Iterable[str] | None = None,
    level: str = "unit",
    method: str | Method | Preconditioner | Chart | None = None,
    *,
    units: Sequence[int] | None = None,
    dtype: torch.dtype | None = torch.float64,
    rtol: float = 1e-8,
    memory: float | None = None,
    reduction: str | None = None,
    group: ProcessGroup | None = None,
    check: bool = True,
) -> ProbeResult:
    """Exact Hessians Ĥᵀ S Ĥ of layers or of their output units, and their condition numbers.

    The model is left as it was: mode, gradients, buffers, hooks and random state.

    Parameters
    ----------
    model
        Any module; its `torch.nn.Linear`, convolution and transposed convolution layers are probed, and other modules
        if they are named. The Hessian is that in the layer's own parameters, whatever the model does with them: a layer
        that is called several times has one, to which all calls contribute; one whose weight is computed from other
        parameters has that in these (``result["fc2"].parameters`` names them).
    loss_fn
        ``loss_fn(output, target)``, a scalar: the mean loss of the batch, usually.
    data
        ``(inputs, targets)``; inputs a tensor, or a tuple of positional or a dict of keyword arguments. Or a stream
        of such pairs (a ``DataLoader``): then the Hessians are those of the loss over all of them together.
    layers
        Qualified names of modules of any kind; None: all dense and convolutional ones that the data reach (``skipped``
        of the result names the others, and parameters of other modules).
    level
        ``"unit"``: one Hessian for every output unit's [b, w]; ``"layer"``: one for all parameters of the layer;
        ``"network"``: one for all parameters that require a gradient, or for those of ``layers`` together, under the
        name ``"network"``. It is known by its products (``result["network"].operator``); κ is exact up to some
        thousand parameters and beyond that from iterations at both ends of the spectrum, or unresolved.
    method
        Coordinates to measure in. None: plain. A name (``"bnp"``): that method's P from the statistics of the
        data. A method at work on the model, ``BNP(model)``: the coordinates of its last step. Or a `Preconditioner`, or
        a chart such as `hesscond.hessians.Jacobi`.
    units
        Units of each layer; None: all.
    dtype
        Precision of the forward pass (float64 whatever the model's own); None: the model's own. Spectra are
        always computed in float64.
    rtol
        Relative width of κ's interval that is good enough; 1e-6 is faster.
    memory
        Bytes that captures, Hessians and the work on them may take; None: 4 GB.
    reduction
        For a stream, whether the loss is a ``"mean"`` over the samples of a batch or their ``"sum"``; None: found out.
    group
        At level ``"network"``: processes of `torch.distributed` that all call this, each with its share of the data.

    check
        Whether what was built is compared with the model's own double-backward product, in a random direction for
        every layer; the result says how far the two are apart (``result["fc2"].check``). What does not agree is
        measured by double backward in the parameters, or refused. It takes up to three gradients a layer.

    Returns
    -------
    ProbeResult

    Raises
    ------
    ConfigError
        Unknown layer, unit, level or method; an empty batch, or one on another device than the model.
    CaptureError
        A layer that cannot be captured exactly, or whose Hessian does not agree with the model's own second derivatives;
        NaN in its activations; too little memory.

    Examples
    --------
    >>> _ = torch.manual_seed(0)
    >>> model = nn.Sequential(nn.Linear(5, 4), nn.ReLU(), nn.Linear(4, 3))
    >>> batch = torch.randn(20, 5), torch.randint(0, 3, (20,))
    >>> result = probe(model, nn.CrossEntropyLoss(), batch)
    >>> kappa = result["2"].kappa[0]
    >>> kappa.resolved, kappa.rank, kappa.nullity
    (True, 5, 0)
    >>> result["2"].hessian(unit=0).shape
    torch.Size([5, 5])
    >>> whole = probe(model, nn.CrossEntropyLoss(), batch, level="layer")
    >>> whole["0"].kappa.rank, whole["0"].n_params
    (24, 24)
    """
    if level not in LEVELS:
        raise ConfigError(f"unknown level {level!r}: use 'unit', 'layer' or 'network'")
    if not 0 < rtol < 1:
        raise ConfigError(f"rtol must lie between 0 and 1, not {rtol}")
    if reduction not in (None, "mean", "sum"):
        raise ConfigError(f"reduction must be 'mean' or 'sum', not {reduction!r}")
    if memory is not None and not memory > 0:
        raise ConfigError(f"memory must be a positive number of bytes, not {memory}")
    names = None if layers is None else list(layers)
    if units is not None and (names is None or level != "unit"):
        raise ConfigError(
            "units were given without layers: name the layers they belong to"
            if names is None
            else f"units were given at level {level!r}, which takes all of them: use level='unit'"
        )
    if group is not None and level != "network":
        raise ConfigError(f"several processes measure a whole network, not level {level!r}: use level='network'")
    budget = MEMORY if memory is None else int(memory)
    if level == "network":
        whole = probe_network(
            model,
            loss_fn,
            data,
            names,
            method,
            dtype=dtype,
            rtol=rtol,
            memory=budget,
            reduction=reduction,
            group=group,
            check=check,
        )
        return ProbeResult({NETWORK: whole}, {})
    return LayerProbe(
        model, loss_fn, data, names, level, method, units, dtype, rtol, budget, reduction, check
    ).result()
