"""The front door: capture → Hessian in a method's coordinates → spectrum → κ."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from torch import nn

from hesscond.capture import Batch, LayerCapture, LossFunction, capture
from hesscond.errors import ConfigError
from hesscond.hessians import Preconditioner, UnitHessian
from hesscond.methods import Method, method_class
from hesscond.spectra import ConditionNumber

if TYPE_CHECKING:
    import pandas as pd


class LayerResult:
    """The unit Hessians of one layer, in the coordinates asked for.

    Attributes
    ----------
    name
        The layer.
    units
        The units probed.
    route
        How the curvature S was computed.
    """

    def __init__(self, captured: LayerCapture, P: Preconditioner | None, rtol: float) -> None:
        self.name = captured.name
        self.units = captured.units
        self.route = captured.route
        self._captured = captured
        self._P = P
        self._rtol = rtol

    def _unit(self, unit: int) -> UnitHessian:
        if unit not in self.units:
            raise ConfigError(
                f"unit {unit} of layer {self.name!r} was not probed: {len(self.units)} units were, from {self.units[0]}"
            )
        return UnitHessian.of(self._captured, unit)

    @property
    def n_params(self) -> int:
        """Number of parameters of one unit, its bias included."""
        return self._captured.H_hat.shape[1]

    @cached_property
    def kappa(self) -> tuple[ConditionNumber, ...]:
        """κ of every probed unit, in the order of ``units``."""
        return tuple(self._unit(unit).condition_number(self._P, rtol=self._rtol) for unit in self.units)

    def hessian(self, unit: int) -> torch.Tensor:
        """Dense Hessian (n̂, n̂), float64, order [bias, weight row]; PᵀHP if a method was given.

        Raises
        ------
        ConfigError
            The unit was not probed.
        """
        return self._unit(unit).matrix(self._P)

    def eigenvalues(self, unit: int) -> torch.Tensor:
        """All nonzero eigenvalues of the unit's Hessian, descending, float64.

        Raises
        ------
        ConfigError
            The unit was not probed.
        """
        return self._unit(unit).eigenvalues(self._P)


class ProbeResult(Mapping[str, LayerResult]):
    """What `probe` found, by layer name."""

    def __init__(self, layers: dict[str, LayerResult]) -> None:
        self._layers = layers

    def __getitem__(self, layer: str) -> LayerResult:
        if layer not in self._layers:
            raise KeyError(f"layer {layer!r} was not probed: {', '.join(self._layers)} were")
        return self._layers[layer]

    def __iter__(self) -> Iterator[str]:
        return iter(self._layers)

    def __len__(self) -> int:
        return len(self._layers)

    def to_frame(self) -> pd.DataFrame:
        """One row per unit: layer, unit, n_params, rank, nullity, negative, lambda_max, lambda_min, kappa,
        kappa_lower, kappa_upper, resolved, solver.
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
            for unit, kappa in zip(layer.units, layer.kappa, strict=True)
        ]
        return pd.DataFrame(rows)


def probe(
    model: nn.Module,
    loss_fn: LossFunction,
    batch: Batch,
    layers: Iterable[str] | None = None,
    level: str = "unit",
    method: str | Method | Preconditioner | None = None,
    *,
    units: Sequence[int] | None = None,
    dtype: torch.dtype | None = torch.float64,
    rtol: float = 1e-8,
) -> ProbeResult:
    """Exact unit Hessians Ĥᵀ S Ĥ of dense layers on one batch, and their condition numbers.

    The model is left as it was: mode, gradients, buffers, hooks and random state.

    Parameters
    ----------
    model
        Any module; its `torch.nn.Linear` layers with inputs (N, n), each called once, are probed.
    loss_fn
        ``loss_fn(output, target)``, a scalar: the mean loss of the batch, usually.
    batch
        ``(inputs, targets)``.
    layers
        Qualified names of the layers; None: all.
    level
        ``"unit"``: one Hessian for every output unit's [b, w].
    method
        Coordinates to measure in. None: plain. A name (``"bnp"``): that method's P from the statistics of this
        batch. A method at work on the model, ``BNP(model)``: the P of its last step. Or a `Preconditioner`.
    units
        Units of each layer; None: all.
    dtype
        Precision of the forward pass (float64 whatever the model's own); None: the model's own. Spectra are
        always computed in float64.
    rtol
        Relative width of κ's interval that is good enough.

    Returns
    -------
    ProbeResult

    Raises
    ------
    ConfigError
        Unknown layer, unit, level or method; an empty batch.
    CaptureError
        A layer that cannot be captured exactly; NaN in its activations.

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
    """
    if level != "unit":
        known = {"layer", "network"}
        raise ConfigError(
            f"level {level!r} is not available yet: use 'unit'"
            if level in known
            else f"unknown level {level!r}: use 'unit'"
        )
    names = None if layers is None else list(layers)
    if units is not None and names is None:
        raise ConfigError("units were given without layers: name the layers they belong to")
    chosen = None if units is None else dict.fromkeys(names or (), tuple(units))
    captures = capture(model, loss_fn, batch, names, units=chosen, dtype=dtype)
    return ProbeResult({name: LayerResult(found, coordinates(method, found), rtol) for name, found in captures.items()})


def coordinates(method: str | Method | Preconditioner | None, captured: LayerCapture) -> Preconditioner | None:
    """The P that ``method`` stands for at a captured layer (see `probe`)."""
    if method is None or isinstance(method, Preconditioner):
        return method
    if isinstance(method, Method):
        return method.preconditioner(captured.name)
    if isinstance(method, str):
        return method_class(method).batch_preconditioner(captured)
    raise ConfigError(f"method must be a name, a Method or a Preconditioner, not {type(method).__name__}")
