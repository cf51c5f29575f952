"""The front door: capture → Hessian in a method's coordinates → spectrum → κ."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import nn

from hesscond.capture import MEMORY, Batch, Captures, Geometry, LossFunction, capture, chosen_layers
from hesscond.capture.batches import is_batch
from hesscond.capture.weighting import BatchWeight, Weights, check_weighting
from hesscond.coordinates import collector, coordinates
from hesscond.errors import ConfigError
from hesscond.hessians import BlockHessian, Chart, HessianOperator, Preconditioner, stream, stream_layers
from hesscond.methods import Method
from hesscond.network_probe import probe_network
from hesscond.results import NETWORK, CapturedLayer, ChartLayer, LayerResult, ProbeResult, StreamedLayer

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
    weight: BatchWeight | None = None,
    group: ProcessGroup | None = None,
) -> ProbeResult:
    """Exact Hessians Ĥᵀ S Ĥ of layers or of their output units, and their condition numbers.

    The model is left as it was: mode, gradients, buffers, hooks and random state.

    Parameters
    ----------
    model
        Any module; its `torch.nn.Linear`, convolution and transposed convolution layers are probed. A layer that is
        called several times has one Hessian, to which all calls contribute.
    loss_fn
        ``loss_fn(output, target)``, a scalar: the mean loss of the batch, usually.
    data
        ``(inputs, targets)``; inputs a tensor, or a tuple of positional or a mapping of keyword arguments. Or one
        mapping, as Hugging Face's loaders give it: its ``"labels"`` (or ``"label"``) are the target, and the model is
        called with all of it. Or a stream of such batches (a ``DataLoader``, a list): then the Hessians are those of
        the loss over all of them together.
    layers
        Qualified names of the layers; None: all that the data reach (see ``skipped`` of the result for the others).
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
        For a stream, whether the loss is a ``"mean"`` over the samples of a batch (for a loss of torch: over what it
        divides by) or their ``"sum"``; None: found out from parts of the batches, or refused.
    weight
        For a stream, what a batch counts in the loss Σ w_k L_k / Σ w_k of the whole, if that is not found out: a
        function of its inputs and target, or one number for each batch.
    group
        At level ``"network"``: processes of `torch.distributed` that all call this, each with its share of the data.

    Returns
    -------
    ProbeResult

    Raises
    ------
    ConfigError
        Unknown layer, unit, level or method; an empty batch, or one on another device than the model.
    CaptureError
        A layer that cannot be captured exactly; NaN in its activations; too little memory.

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
    check_weighting(reduction, weight)
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
            weight=weight,
            group=group,
        )
        return ProbeResult({NETWORK: whole}, {})
    wanted = None if units is None else dict.fromkeys(names or (), tuple(units))
    charts = charts_of(method, model, names)
    if charts:
        hessian = partial(
            HessianOperator, model, loss_fn, data, dtype=dtype, memory=budget, reduction=reduction, weight=weight
        )
        found: dict[str, LayerResult] = {
            name: ChartLayer(model, name, level, units, chart, hessian, rtol) for name, chart in charts.items()
        }
        rest, skipped = [name for name in chosen_layers(model, names) if name not in charts], {}
        if rest:
            others = probe(
                model,
                loss_fn,
                data,
                rest,
                level,
                method,
                units=units,
                dtype=dtype,
                rtol=rtol,
                memory=memory,
                reduction=reduction,
                weight=weight,
            )
            found, skipped = found | dict(others), others.skipped
        return ProbeResult({name: found[name] for name in chosen_layers(model, names) if name in found}, skipped)

    def captured(batch: Batch, weights: Weights | None = None) -> Captures:
        return capture(
            model,
            loss_fn,
            batch,
            names,
            units=wanted,
            whole=level == "layer",
            dtype=dtype,
            memory=budget,
            weights=weights,
        )

    if is_batch(data):
        captures, collect = captured(data), collector(method)
        layers_found: dict[str, LayerResult] = {}
        for name, own in captures.items():
            statistics = None if collect is None else collect(name, own.inputs)
            P = coordinates(method, name, own.inputs.geometry, statistics)
            layers_found[name] = CapturedLayer(own, level, P, rtol, budget)
        return ProbeResult(layers_found, captures.skipped)
    # a loader draws from the random state
    with torch.random.fork_rng(devices=[]):
        weights = Weights(model, loss_fn, dtype, reduction, weight)
        return probe_stream(data, partial(captured, weights=weights), weights, level, method, rtol, budget)


def charts_of(
    method: str | Method | Preconditioner | Chart | None, model: nn.Module, layers: Sequence[str] | None
) -> dict[str, Chart]:
    """The layers that are measured by products in a chart, with it."""
    if isinstance(method, Chart):
        found = dict.fromkeys(chosen_layers(model, layers), method)
    elif isinstance(method, Method):
        own = {name: method.coordinates(name) for name in chosen_layers(model, layers)}
        found = {name: chart for name, chart in own.items() if isinstance(chart, Chart)}
    else:
        return {}
    return {name: chart for name, chart in found.items() if not chart.local}


def probe_stream(
    batches: Iterable[Batch],
    captured: Callable[[Batch], Captures],
    weights: Weights,
    level: str,
    method: str | Method | Preconditioner | Chart | None,
    rtol: float,
    memory: int,
) -> ProbeResult:
    """The result over all ``batches`` together, each one captured in turn."""
    seen: dict[str, tuple[Geometry, str]] = {}
    skipped: dict[str, str] = {}

    def weighed() -> Iterator[tuple[Captures, float]]:
        for batch in batches:
            captures = captured(batch)
            skipped.update(captures.skipped)
            seen.update({name: (found.inputs.geometry, found.route) for name, found in captures.items()})
            yield captures, captures.mass or 0.0

    def total() -> float:
        return weights.total

    blocks: dict[str, dict[int | None, BlockHessian]] = {}
    if level == "layer":
        whole, statistics = stream_layers(weighed(), memory, total, collector(method))
        blocks = {name: {None: block} for name, block in whole.items()}
    else:
        hessians, statistics = stream(weighed(), memory, total, collector(method))
        for (name, unit), block in hessians.items():
            blocks.setdefault(name, {})[unit] = block
    layers: dict[str, LayerResult] = {}
    for name, own in blocks.items():
        P = coordinates(method, name, seen[name][0], statistics.get(name))
        layers[name] = StreamedLayer(name, level, own, seen[name][1], P, rtol)
    # refuses a stream that is empty, or in which nothing counts
    _ = weights.total
    return ProbeResult(layers, {name: reason for name, reason in skipped.items() if name not in layers})
