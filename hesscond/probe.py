"""The front door: capture → Hessian in a method's coordinates → spectrum → κ."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import nn

from hesscond.capture import MEMORY, Batch, Captures, Geometry, LossFunction, capture, chosen_layers
from hesscond.capture.batches import is_batch
from hesscond.coordinates import ProbeMethod, applied, collector, coordinates
from hesscond.errors import ConfigError
from hesscond.hessians import BlockHessian, Chart, HessianOperator, stream, stream_layers
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
    method: ProbeMethod = None,
    *,
    units: Sequence[int] | None = None,
    dtype: torch.dtype | None = torch.float64,
    rtol: float = 1e-8,
    memory: float | None = None,
    reduction: str | None = None,
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
        ``(inputs, targets)``; inputs a tensor, or a tuple of positional or a dict of keyword arguments. Or a stream
        of such pairs (a ``DataLoader``): then the Hessians are those of the loss over all of them together.
    layers
        Qualified names of the layers; None: all that the data reach (see ``skipped`` of the result for the others).
    level
        ``"unit"``: one Hessian for every output unit's [b, w]; ``"layer"``: one for all parameters of the layer;
        ``"network"``: one for all parameters that require a gradient, or for those of ``layers`` together, under the
        name ``"network"``. It is known by its products (``result["network"].operator``); κ is exact up to some
        thousand parameters and beyond that from iterations at both ends of the spectrum, or unresolved.
    method
        What to measure. None: the model in plain coordinates. A name, as ``--method`` takes it: of methods that build
        the network otherwise (``"batchnorm"``, ``"sphere"``) a copy of the model with the method applied to it, in the
        method's coordinates; of those whose P the inputs of the layers define (``"bnp"``) that of the data; methods
        whose coordinates steps define (``"adam"``) are refused. A method at work on the model, ``BNP(model)``: the
        coordinates of its last step. Or a `Preconditioner`, or a chart such as `hesscond.hessians.Jacobi`. The result
        says in words which it was (``result.coordinates``).
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
    whole_network = level == "network" and names is None
    work = applied(model, method, data, whole=whole_network, alone=group is None or group.size() == 1)
    if work.model is not model:
        found_there = probe(
            work.model,
            loss_fn,
            work.data,
            work.places(names),
            level,
            work.method,
            units=units,
            dtype=dtype,
            rtol=rtol,
            memory=memory,
            reduction=reduction,
            group=group,
        )
        return work.renamed(found_there)
    method = work.method
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
        )
        return work.renamed(ProbeResult({NETWORK: whole}, {}))
    wanted = None if units is None else dict.fromkeys(names or (), tuple(units))
    charts = charts_of(method, model, names)
    if charts:
        hessian = partial(HessianOperator, model, loss_fn, data, dtype=dtype, memory=budget, reduction=reduction)
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
            )
            found, skipped = found | dict(others), others.skipped
        ordered = {name: found[name] for name in chosen_layers(model, names) if name in found}
        return work.renamed(ProbeResult(ordered, skipped))

    def captured(batch: Batch, weigh: str | bool = False) -> Captures:
        return capture(
            model,
            loss_fn,
            batch,
            names,
            units=wanted,
            whole=level == "layer",
            dtype=dtype,
            memory=budget,
            weigh=weigh,
        )

    if is_batch(data):
        captures, collect = captured(data), collector(method)
        layers_found: dict[str, LayerResult] = {}
        for name, own in captures.items():
            statistics = None if collect is None else collect(name, own.inputs)
            P = coordinates(method, name, own.inputs.geometry, statistics)
            layers_found[name] = CapturedLayer(own, level, P, rtol, budget)
        return work.renamed(ProbeResult(layers_found, captures.skipped))
    # a loader draws from the random state
    with torch.random.fork_rng(devices=[]):
        found_stream = probe_stream(data, lambda batch: captured(batch, reduction or True), level, method, rtol, budget)
    return work.renamed(found_stream)


def charts_of(method: ProbeMethod, model: nn.Module, layers: Sequence[str] | None) -> dict[str, Chart]:
    """The layers that are measured by products in a chart, with it."""
    if isinstance(method, Chart):
        found = dict.fromkeys(chosen_layers(model, layers), method)
    elif isinstance(method, Method):
        own = {name: method.probed(name) for name in chosen_layers(model, layers)}
        found = {name: chart for name, chart in own.items() if isinstance(chart, Chart)}
    else:
        return {}
    return {name: chart for name, chart in found.items() if not chart.local}


def probe_stream(
    batches: Iterable[Batch],
    captured: Callable[[Batch], Captures],
    level: str,
    method: ProbeMethod,
    rtol: float,
    memory: int,
) -> ProbeResult:
    """The result over all ``batches`` together, each one captured in turn."""
    seen: dict[str, tuple[Geometry, str]] = {}
    skipped: dict[str, str] = {}
    masses: list[float] = []

    def weighed() -> Iterator[tuple[Captures, float]]:
        for batch in batches:
            captures = captured(batch)
            skipped.update(captures.skipped)
            seen.update({name: (found.inputs.geometry, found.route) for name, found in captures.items()})
            masses.append(captures.mass or 0.0)
            yield captures, 1.0 if math.isnan(masses[-1]) else masses[-1]
        if not masses:
            raise ConfigError("the data are an empty stream: they need at least one batch")

    def total() -> float:
        # nan: the loss is a sum over the samples
        return 1.0 if math.isnan(sum(masses)) else sum(masses)

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
    if not layers:
        raise ConfigError("no target in the stream counts in the loss: there is no Hessian")
    return ProbeResult(layers, {name: reason for name, reason in skipped.items() if name not in layers})
