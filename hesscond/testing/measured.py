"""What assertions measure: the condition numbers of the Hessians named, one by one."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from hesscond.capture import Batch, LossFunction
from hesscond.errors import ConfigError, HesscondError
from hesscond.expectations.intervals import Interval, shown
from hesscond.hessians import Chart, Preconditioner
from hesscond.hessians.preconditioner import DensePreconditioner
from hesscond.methods import Method
from hesscond.probing import probe
from hesscond.spectra import ConditionNumber

#: Layer and unit (None: all of the layer, or of the network).
Place = tuple[str, int | None]
#: In what coordinates.
Coordinates = str | Method | Preconditioner | Chart | torch.Tensor | None


def measured(
    model: nn.Module,
    loss_fn: LossFunction,
    batch: Batch | Iterable[Batch],
    layer: str | Sequence[str] | None,
    unit: int | Sequence[int] | None,
    level: str,
    method: Coordinates,
    options: Mapping[str, Any],
) -> dict[Place, ConditionNumber]:
    """κ of every Hessian named.

    Raises
    ------
    ConfigError
        Bad use, as for `hesscond.probe`; data that can be read only once.
    """
    __tracebackhide__ = True
    if iter_once(batch):
        raise ConfigError("the data can be read only once: give a batch, a list of batches or a DataLoader")
    layers = [layer] if isinstance(layer, str) else layer
    units = [unit] if isinstance(unit, int) else unit
    coordinates = DensePreconditioner(method) if isinstance(method, torch.Tensor) else method
    try:
        result = probe(model, loss_fn, batch, layers, level, coordinates, units=units, **options)
    except HesscondError as error:
        # the sentence says it: no frames of the engine in a test's output
        raise error.with_traceback(None) from None
    if not len(result):
        raise ConfigError("the model has no layer that could be probed: " + "; ".join(result.skipped.values()))
    return {
        (own.name, unit): kappa
        for own in result.values()
        for unit, kappa in zip(own.units if own.level == "unit" else (None,), own.conditions, strict=True)
    }


def iter_once(batch: object) -> bool:
    """Whether the data are used up after one pass."""
    return hasattr(batch, "__next__")


def name_of(method: Coordinates) -> str:
    """Coordinates in a word."""
    if method is None:
        return "plain"
    if isinstance(method, torch.Tensor):
        return "P"
    return method if isinstance(method, str) else str(method.name)


def interval(kappa: ConditionNumber) -> Interval:
    """What is certain of κ."""
    return Interval.between(kappa.lower, kappa.upper)


def told(kappa: ConditionNumber) -> str:
    """κ with its bounds, for people."""
    if kappa.rank == 0:
        return "zero Hessian"
    text = shown(kappa.lower, kappa.upper)
    return text if kappa.resolved else f"{text} (unresolved)"


def width(kappa: ConditionNumber) -> str:
    """The relative width of the interval, rounded up; empty if it has no end."""
    return f"{1.05 * kappa.width:.1e}" if kappa.resolved else ""


def where(place: Place) -> str:
    """A place for people.

    Examples
    --------
    >>> where(("fc3", 3)), where(("fc3", None))
    ('layer fc3, unit 3', 'layer fc3')
    """
    layer, unit = place
    return f"layer {layer}" if unit is None else f"layer {layer}, unit {unit}"


def evidence(kappa: ConditionNumber) -> dict[str, str]:
    """The cells of a message's table that say how κ was decided."""
    return {
        "width": width(kappa),
        "rank": f"{kappa.rank} of {kappa.rank + kappa.nullity}",
        "negative": kappa.inertia.removesuffix(" negative") if kappa.negative else "",
        "λ min": f"{kappa.lambda_min:.3g}",
        "cutoff": f"{kappa.cutoff:.2g}",
        "gap": f"{kappa.gap:.2g}",
        "solver": kappa.solver,
    }


def cells_of(place: Place) -> dict[str, str]:
    """The cells that say which Hessian it is."""
    layer, unit = place
    return {"layer": layer, "unit": "" if unit is None else str(unit)}


def said_of(level: str, method: str) -> str:
    """What the Hessians are, as "units in the coordinates of bnp"."""
    what = {"unit": "units", "layer": "layers", "network": "network"}[level]
    return what if method == "plain" else f"{what} in the coordinates of {method}"
