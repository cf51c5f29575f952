"""The front door: capture → Hessian in a method's coordinates → spectrum → κ."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
from torch import nn

from hesscond.capture import MEMORY, Batch, Captures, FeatureStatistics, Geometry, LayerCapture, LossFunction, capture
from hesscond.errors import ConfigError
from hesscond.hessians import (
    BlockHessian,
    Preconditioner,
    layer_hessian,
    stream,
    stream_layers,
    unit_conditions,
    unit_hessian,
)
from hesscond.methods import Method, method_class
from hesscond.spectra import ConditionNumber

if TYPE_CHECKING:
    import pandas as pd

LEVELS = ("unit", "layer")


class LayerResult(ABC):
    """The Hessians of one layer, in the coordinates asked for.

    Attributes
    ----------
    name
        The layer.
    level
        ``"unit"`` or ``"layer"``: what one Hessian belongs to.
    units
        The units probed.
    n_params
        Number of parameters of one Hessian, biases included.
    route
        How the curvature S was computed.
    """

    def __init__(self, name: str, level: str, units: Sequence[int], n_params: int, route: str) -> None:
        self.name, self.level, self.units, self.n_params, self.route = name, level, tuple(units), n_params, route
        self._P: Preconditioner | None = None
        self._rtol = 1e-8

    @abstractmethod
    def block(self, unit: int | None) -> BlockHessian:
        """The Hessian object of a probed unit, or of the layer (``unit`` None)."""

    def _checked(self, unit: int | None) -> int | None:
        if self.level == "layer":
            if unit is not None:
                raise ConfigError(
                    f"layer {self.name!r} was probed as a whole: it has no unit {unit} (use level='unit')"
                )
        elif unit is None:
            raise ConfigError(f"layer {self.name!r} was probed by unit: say which, as in unit={self.units[0]}")
        elif unit not in self.units:
            raise ConfigError(
                f"unit {unit} of layer {self.name!r} was not probed: {len(self.units)} units were, from {self.units[0]}"
            )
        return unit

    @cached_property
    def conditions(self) -> tuple[ConditionNumber, ...]:
        """κ of every Hessian, in the order of ``units``; a single one at level ``"layer"``."""
        blocks = [None] if self.level == "layer" else self.units
        return tuple(self.block(unit).condition_number(self._P, rtol=self._rtol) for unit in blocks)

    @property
    def kappa(self) -> Any:
        """κ of every probed unit, in the order of ``units`` (a tuple), or the one κ of the layer."""
        return self.conditions[0] if self.level == "layer" else self.conditions

    def hessian(self, unit: int | None = None) -> torch.Tensor:
        """Dense Hessian, float64, PᵀHP if a method was given.

        Parameters
        ----------
        unit
            Which one; its parameters are [bias, weights as torch flattens them]. At level ``"layer"`` none, and the
            order is unit by unit.

        Raises
        ------
        ConfigError
            The unit was not probed.
        CaptureError
            The matrix does not fit into the memory allowed.
        """
        return self.block(self._checked(unit)).matrix(self._P)

    def eigenvalues(self, unit: int | None = None) -> torch.Tensor:
        """All nonzero eigenvalues of a Hessian, descending, float64.

        Raises
        ------
        ConfigError
            The unit was not probed.
        """
        return self.block(self._checked(unit)).eigenvalues(self._P)

    def eigenvectors(self, unit: int | None = None) -> torch.Tensor:
        """Orthonormal eigenvectors (n, r) of a Hessian, one column for each of `eigenvalues`.

        Raises
        ------
        ConfigError
            The unit was not probed.
        CaptureError
            They do not fit into the memory allowed.
        """
        return self.block(self._checked(unit)).eigenpairs(self._P)[1]


class CapturedLayer(LayerResult):
    """A layer probed on one batch."""

    def __init__(self, captured: LayerCapture, level: str, P: Preconditioner | None, rtol: float, memory: int) -> None:
        geometry = captured.inputs.geometry
        n_params = geometry.n_params * (geometry.units if level == "layer" else 1)
        super().__init__(captured.name, level, captured.units, n_params, captured.route)
        self._captured, self._P, self._rtol, self._memory = captured, P, rtol, memory

    def block(self, unit: int | None) -> BlockHessian:
        """The Hessian object of a unit, or of the layer."""
        if unit is None:
            return layer_hessian(self._captured, self._memory)
        return unit_hessian(self._captured, unit, self._memory)

    @cached_property
    def conditions(self) -> tuple[ConditionNumber, ...]:
        """κ of every Hessian; of all units at once where their curvature allows it."""
        if self.level == "layer":
            return (self.block(None).condition_number(self._P, rtol=self._rtol),)
        return tuple(unit_conditions(self._captured, self._P, rtol=self._rtol, memory=self._memory))


class StreamedLayer(LayerResult):
    """A layer probed over a stream of batches."""

    def __init__(
        self,
        name: str,
        level: str,
        blocks: Mapping[int | None, BlockHessian],
        route: str,
        P: Preconditioner | None,
        rtol: float,
    ) -> None:
        units = () if level == "layer" else tuple(u for u in blocks if u is not None)
        super().__init__(name, level, units, next(iter(blocks.values())).order, route)
        self._blocks, self._P, self._rtol = blocks, P, rtol

    def block(self, unit: int | None) -> BlockHessian:
        """The Hessian object of a unit, or of the layer."""
        return self._blocks[unit]


class ProbeResult(Mapping[str, LayerResult]):
    """What `probe` found, by layer name.

    Attributes
    ----------
    skipped
        Layers of the model that could not be probed on this data, with the reason.
    """

    def __init__(self, layers: dict[str, LayerResult], skipped: Mapping[str, str]) -> None:
        self._layers = layers
        self.skipped = dict(skipped)

    def __getitem__(self, layer: str) -> LayerResult:
        if layer not in self._layers:
            raise KeyError(f"layer {layer!r} was not probed: {', '.join(self._layers)} were")
        return self._layers[layer]

    def __iter__(self) -> Iterator[str]:
        return iter(self._layers)

    def __len__(self) -> int:
        return len(self._layers)

    def to_frame(self) -> pd.DataFrame:
        """One row per Hessian: layer, unit (missing for a whole layer), n_params, rank, nullity, negative,
        lambda_max, lambda_min, kappa, kappa_lower, kappa_upper, resolved, solver.
        """
        import pandas as pd

        rows = [
            {
                "layer": layer.name,
                "unit": unit,
                "n_params": layer.n_params,
                "rank": kappa.rank,
                "nullity": kappa.nullity,
                "negative": kappa.negative,
                "lambda_max": kappa.lambda_max,
                "lambda_min": kappa.lambda_min,
                "kappa": kappa.value,
                "kappa_lower": kappa.lower,
                "kappa_upper": kappa.upper,
                "resolved": kappa.resolved,
                "solver": kappa.solver,
            }
            for layer in self._layers.values()
            for unit, kappa in zip([None] if layer.level == "layer" else layer.units, layer.conditions, strict=True)
        ]
        frame = pd.DataFrame(rows)
        return frame.astype({"unit": "Int64"}) if frame["unit"].isna().any() else frame


def probe(
    model: nn.Module,
    loss_fn: LossFunction,
    data: Batch | Iterable[Batch],
    layers: Iterable[str] | None = None,
    level: str = "unit",
    method: str | Method | Preconditioner | None = None,
    *,
    units: Sequence[int] | None = None,
    dtype: torch.dtype | None = torch.float64,
    rtol: float = 1e-8,
    memory: float | None = None,
    reduction: str | None = None,
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
        ``"unit"``: one Hessian for every output unit's [b, w]; ``"layer"``: one for all parameters of the layer.
    method
        Coordinates to measure in. None: plain. A name (``"bnp"``): that method's P from the statistics of the
        data. A method at work on the model, ``BNP(model)``: the P of its last step. Or a `Preconditioner`.
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
        raise ConfigError(f"unknown level {level!r}: use 'unit' or 'layer'")
    if not 0 < rtol < 1:
        raise ConfigError(f"rtol must lie between 0 and 1, not {rtol}")
    if reduction not in (None, "mean", "sum"):
        raise ConfigError(f"reduction must be 'mean' or 'sum', not {reduction!r}")
    if memory is not None and not memory > 0:
        raise ConfigError(f"memory must be a positive number of bytes, not {memory}")
    names = None if layers is None else list(layers)
    if units is not None and (names is None or level == "layer"):
        raise ConfigError(
            "units were given without layers: name the layers they belong to"
            if names is None
            else "units were given at level 'layer', which takes all of them: use level='unit'"
        )
    budget = MEMORY if memory is None else int(memory)
    wanted = None if units is None else dict.fromkeys(names or (), tuple(units))

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
        captures = captured(data)
        return ProbeResult(
            {
                name: CapturedLayer(found, level, coordinates(method, name, found.inputs.geometry, found), rtol, budget)
                for name, found in captures.items()
            },
            captures.skipped,
        )
    # a loader draws from the random state
    with torch.random.fork_rng(devices=[]):
        return probe_stream(data, lambda batch: captured(batch, reduction or True), level, method, rtol, budget)


def probe_stream(
    batches: Iterable[Batch],
    captured: Callable[[Batch], Captures],
    level: str,
    method: str | Method | Preconditioner | None,
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

    layers: dict[str, LayerResult] = {}
    if level == "layer":
        if isinstance(method, str) and method_class(method).needs_statistics:
            raise ConfigError(f"method {method!r} at level 'layer' over a stream is not available: give its P")
        for name, block in stream_layers(weighed(), memory, total).items():
            P = coordinates(method, name, seen[name][0], None)
            layers[name] = StreamedLayer(name, level, {None: block}, seen[name][1], P, rtol)
    else:
        hessians, statistics = stream(weighed(), memory, total)
        blocks: dict[str, dict[int | None, BlockHessian]] = {}
        for (name, unit), block in hessians.items():
            blocks.setdefault(name, {})[unit] = block
        for name, own in blocks.items():
            P = coordinates(method, name, seen[name][0], statistics.get(name))
            layers[name] = StreamedLayer(name, level, own, seen[name][1], P, rtol)
    if not layers:
        raise ConfigError("no target in the stream counts in the loss: there is no Hessian")
    return ProbeResult(layers, {name: reason for name, reason in skipped.items() if name not in layers})


def is_batch(data: Any) -> TypeGuard[Batch]:
    """Whether ``data`` is one batch, not a stream: a tuple, or a list that starts with tensors or is no list of pairs.

    Raises
    ------
    ConfigError
        Neither a pair nor a stream of pairs.
    """
    if isinstance(data, list):
        # a loader yields each batch as a list [inputs, targets]
        return len(data) == 2 and not all(isinstance(item, (tuple, list)) for item in data)
    if isinstance(data, (tuple, torch.Tensor, dict)):
        return True
    if not isinstance(data, Iterable):
        raise ConfigError(f"the data must be a pair (inputs, targets) or a stream of them, not {type(data).__name__}")
    return False


def coordinates(
    method: str | Method | Preconditioner | None,
    layer: str,
    geometry: Geometry,
    seen: LayerCapture | FeatureStatistics | None,
) -> Preconditioner | None:
    """The P that ``method`` stands for at a layer (see `probe`), from what the data showed of its inputs.

    Raises
    ------
    ConfigError
        No such method; one whose P is not defined for this kind of layer.
    """
    if method is None or isinstance(method, Preconditioner):
        return method
    if isinstance(method, Method):
        return method.preconditioner(layer)
    if not isinstance(method, str):
        raise ConfigError(f"method must be a name, a Method or a Preconditioner, not {type(method).__name__}")
    chosen = method_class(method)
    if not chosen.needs_statistics:
        return None
    if geometry.kind != "Linear":
        raise ConfigError(
            f"the coordinates of method {method!r} are defined for dense layers only, and {layer!r} is a "
            f"{geometry.kind}: name the dense layers with layers=, or give a Preconditioner"
        )
    assert seen is not None
    statistics = seen if isinstance(seen, FeatureStatistics) else FeatureStatistics.of(seen.h)
    return chosen.data_preconditioner(statistics, bias=geometry.bias)
