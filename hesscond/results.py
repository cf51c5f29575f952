"""What a probe found, layer by layer: Hessians, spectra and condition numbers, computed when asked for."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from hesscond.capture import LayerCapture, checked_units, chosen_layers
from hesscond.errors import ConfigError
from hesscond.hessians import (
    BlockHessian,
    Chart,
    HessianMaker,
    NetworkHessian,
    NullDirections,
    Preconditioner,
    UnitPreconditioner,
    layer_hessian,
    unit_conditions,
    unit_hessian,
)
from hesscond.spectra import ConditionNumber, Effort, Known

if TYPE_CHECKING:
    import pandas as pd

#: Name of the one result at level "network".
NETWORK = "network"


class LayerResult(ABC):
    """The Hessians of one layer, in the coordinates asked for.

    Attributes
    ----------
    name
        The layer.
    level
        ``"unit"``, ``"layer"`` or ``"network"``: what one Hessian belongs to.
    units
        The units probed.
    n_params
        Number of parameters of one Hessian, biases included.
    route
        How the curvature S was computed.
    """

    def __init__(self, name: str, level: str, units: Sequence[int], n_params: int, route: str) -> None:
        self.name, self.level, self.units, self.n_params, self.route = name, level, tuple(units), n_params, route
        self._P: Preconditioner | Chart | None = None
        self._rtol = 1e-8

    @abstractmethod
    def block(self, unit: int | None) -> BlockHessian:
        """The Hessian object of a probed unit, or of the layer (``unit`` None)."""

    def _checked(self, unit: int | None) -> int | None:
        if self.level != "unit":
            if unit is not None:
                raise ConfigError(
                    f"{self.level} {self.name!r} was probed as a whole: it has no unit {unit} (use level='unit')"
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
        blocks = self.units if self.level == "unit" else [None]
        return tuple(self.block(unit).condition_number(self._of(unit), rtol=self._rtol) for unit in blocks)

    def _of(self, unit: int | None) -> Preconditioner | None:
        """P of a unit, or of all of them."""
        if isinstance(self._P, Chart):
            return self._P.at(self.block(unit))
        return self._P if self._P is None or unit is None else self._P.of_unit(unit)

    @property
    def kappa(self) -> Any:
        """κ of every probed unit, in the order of ``units`` (a tuple), or the one κ of the layer."""
        return self.conditions if self.level == "unit" else self.conditions[0]

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
        return self.block(self._checked(unit)).matrix(self._of(unit))

    def eigenvalues(self, unit: int | None = None) -> torch.Tensor:
        """All nonzero eigenvalues of a Hessian, descending, float64.

        Raises
        ------
        ConfigError
            The unit was not probed.
        """
        return self.block(self._checked(unit)).eigenvalues(self._of(unit))

    def eigenvectors(self, unit: int | None = None) -> torch.Tensor:
        """Orthonormal eigenvectors (n, r) of a Hessian, one column for each of `eigenvalues`.

        Raises
        ------
        ConfigError
            The unit was not probed.
        CaptureError
            They do not fit into the memory allowed.
        """
        return self.block(self._checked(unit)).eigenpairs(self._of(unit))[1]


class CapturedLayer(LayerResult):
    """A layer probed on one batch."""

    def __init__(
        self, captured: LayerCapture, level: str, P: Preconditioner | Chart | None, rtol: float, memory: int
    ) -> None:
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
            return (self.block(None).condition_number(self._of(None), rtol=self._rtol),)
        if isinstance(self._P, (UnitPreconditioner, Chart)):
            return super().conditions
        return tuple(unit_conditions(self._captured, self._P, rtol=self._rtol, memory=self._memory))


class StreamedLayer(LayerResult):
    """A layer probed over a stream of batches."""

    def __init__(
        self,
        name: str,
        level: str,
        blocks: Mapping[int | None, BlockHessian],
        route: str,
        P: Preconditioner | Chart | None,
        rtol: float,
    ) -> None:
        units = () if level == "layer" else tuple(u for u in blocks if u is not None)
        super().__init__(name, level, units, next(iter(blocks.values())).order, route)
        self._blocks, self._P, self._rtol = blocks, P, rtol

    def block(self, unit: int | None) -> BlockHessian:
        """The Hessian object of a unit, or of the layer."""
        return self._blocks[unit]


class ChartLayer(LayerResult):
    """A layer probed in coordinates where its Hessian is known by its products."""

    def __init__(
        self,
        model: nn.Module,
        name: str,
        level: str,
        units: Sequence[int] | None,
        chart: Chart,
        hessian: HessianMaker,
        rtol: float,
    ) -> None:
        self._chart, self._hessian, self._blocks = chart, hessian, dict[int | None, NetworkHessian]()
        self._place = name
        layer = chosen_layers(model, [name])[name]
        chosen = checked_units(name, layer, units) if level == "unit" else ()
        order = self.block(chosen[0] if chosen else None).order
        super().__init__(name, level, chosen, order, f"products, in {chart.name}")
        self._rtol = rtol

    def block(self, unit: int | None) -> NetworkHessian:
        """The Hessian object of a unit, or of the layer."""
        if unit not in self._blocks:
            operator = self._chart.operator(self._hessian, self._place, unit)
            self._blocks[unit] = NetworkHessian(operator, lambda: ((), Known()), Effort())
        return self._blocks[unit]


class NetworkResult(LayerResult):
    """All parameters of the network together.

    Attributes
    ----------
    operator
        The Hessian, in the coordinates asked for, as an operator: products, `hesscond.lanczos`, `hesscond.density`.
    parts
        Which of its rows belong to which module.
    """

    def __init__(self, block: NetworkHessian, parts: Mapping[str, Sequence[slice]], route: str, rtol: float) -> None:
        super().__init__(NETWORK, "network", (), block.order, route)
        self._block, self.parts, self._rtol = block, dict(parts), rtol
        self.operator = block.operator

    def block(self, unit: int | None) -> NetworkHessian:
        """The Hessian object."""
        return self._block

    @property
    def null_directions(self) -> Sequence[NullDirections]:
        """What is known of the null space beforehand, each with its reason."""
        return self._block.known[0]

    def by_layer(self) -> pd.DataFrame:
        """What each module has of the network's extreme eigenvectors.

        Returns
        -------
        pandas.DataFrame
            One row per module: layer, n_params, share_top and share_bottom: the sum of squares of its entries in the
            eigenvectors (of norm 1) of the largest and the smallest (algebraic) eigenvalue of the network's Hessian.
        """
        import pandas as pd

        squares = self._block.extremes.to(torch.float64).square()
        rows = []
        for name, slices in self.parts.items():
            top, bottom = sum(squares[where].sum(0) for where in slices).tolist()  # type: ignore[union-attr]
            size = sum(where.stop - where.start for where in slices)
            rows.append({"layer": name, "n_params": size, "share_top": top, "share_bottom": bottom})
        return pd.DataFrame(rows)


class ProbeResult(Mapping[str, LayerResult]):
    """What `probe` found, by layer name.

    Attributes
    ----------
    skipped
        Layers of the model that could not be probed on this data, with the reason.
    coordinates
        What was measured, in words: of which network, in which coordinates.
    """

    def __init__(self, layers: dict[str, LayerResult], skipped: Mapping[str, str]) -> None:
        self._layers = layers
        self.skipped = dict(skipped)
        self.coordinates = "plain coordinates"

    def rename(self, name_of: Callable[[str], str]) -> None:
        """Call the layers, and the parts of a network, by other names."""
        for layer in self._layers.values():
            layer.name = name_of(layer.name)
            if isinstance(layer, NetworkResult):
                layer.parts = {name_of(part): where for part, where in layer.parts.items()}
        self._layers = {layer.name: layer for layer in self._layers.values()}
        self.skipped = {name_of(name): why for name, why in self.skipped.items()}

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
            for unit, kappa in zip(layer.units if layer.level == "unit" else [None], layer.conditions, strict=True)
        ]
        frame = pd.DataFrame(rows)
        return frame.astype({"unit": "Int64"}) if frame["unit"].isna().any() else frame
