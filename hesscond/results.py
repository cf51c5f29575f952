"""What a probe found, layer by layer: Hessians, spectra and condition numbers, computed when asked for."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch

from hesscond.causes import ALL_ROUNDING, NOTHING, SUMMED, Cause
from hesscond.check import Check
from hesscond.differences import worst
from hesscond.errors import ConfigError
from hesscond.hessians import BlockHessian, NetworkHessian, NullDirections
from hesscond.operators import SymmetricOperator
from hesscond.roles import NETWORK
from hesscond.sheets import Sheet, Shown
from hesscond.spectra import Bounded, ConditionNumber, EigenResult, lanczos
from hesscond.spectra.condition import unresolved, zero_matrix

if TYPE_CHECKING:
    import pandas as pd

#: How the routes of S are called that form it without subtraction, to its last digits where a product has none left.
CLOSED_FORM = ("loss curvature", "loss factor")

#: Products that are timed, and seconds of a core for the eigenvalues of H, in two scalings, over n³.
TRIED, DECOMPOSITION = 8, 1.2e-10


class LayerResult(Shown):
    """The Hessians of one layer, in the coordinates asked for.

    `str` and notebooks show the table of the command line. Pickled, it has κ and all Hessians that were captured; of
    those known by products, the eigenvalues that were asked for before, and an error for the rest.

    Attributes
    ----------
    name
        The layer.
    level
        ``"unit"``, ``"layer"`` or ``"network"``: what one Hessian belongs to.
    units
        The units probed.
    parameters
        Names of the tensors of the model whose Hessian it is: weight and bias of a layer, whose rows come unit by unit
        as [b_i, w_i]; where ``route`` names products in a chart of the parameters, what the module trains, whose rows
        come one tensor after another in this order (of a unit, its rows of each).
    n_params
        Number of parameters of one Hessian, biases included.
    route
        How the curvature S was computed.
    check
        How far the answer is from the model's own double-backward product; None: it was not compared.
    uncertainty
        ε such that operations of the model in a lower precision than was asked for change entry (i, j) of a Hessian by
        ε d_i d_j, d being its scales; 0: there are none. κ's interval is wider by as much.
    uncertain
        What these operations are.
    kind
        Class of the module.
    rounding
        The Hessians whose products are no more than their rounding: whether they are zero, or may be hidden by it.
    """

    def __init__(
        self,
        name: str,
        level: str,
        units: Sequence[int],
        block: Callable[[int | None], BlockHessian],
        *,
        parameters: Sequence[str],
        n_params: int,
        route: str,
        rtol: float = 1e-8,
        conditions: Callable[[], Sequence[ConditionNumber]] | None = None,
    ) -> None:
        self.name, self.level, self.units, self.n_params, self.route = name, level, tuple(units), n_params, route
        self.parameters = tuple(parameters)
        self.check: Check | None = None
        self.uncertainty, self.uncertain, self.kind = 0.0, SUMMED, ""
        self.rounding: dict[int | None, bool] = {}
        self.block, self._rtol, self._conditions = block, rtol, conditions
        self._eigenvalues: dict[int | None, torch.Tensor] = {}

    def __repr__(self) -> str:
        blocks = f"{len(self.units)} units" if self.level == "unit" else f"level {self.level}"
        return f"<{type(self).__name__} {self.name!r}: {blocks}, {self.n_params:,} parameters>"

    def __getstate__(self) -> dict[str, Any]:
        kept = {"conditions": self.conditions, "_conditions": None}
        return vars(self) | kept | {"block": {unit: self.block(unit) for unit in self.blocks}.__getitem__}

    def sheet(self) -> Sheet:
        return ProbeResult({self.name: self}, {}, "").sheet()

    def remarks(self) -> list[str]:
        """What there is to say below its table beside κ."""
        return []

    @property
    def blocks(self) -> Sequence[int | None]:
        """The unit of every Hessian; None for that of a whole layer."""
        return self.units if self.level == "unit" else [None]

    def rename(self, name_of: Callable[[str], str]) -> None:
        """Call the layer by another name."""
        self.name = name_of(self.name)

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
        if self._conditions is not None:
            found = list(self._conditions())
        else:
            found = [self.block(unit).condition_number(rtol=self._rtol) for unit in self.blocks]
        pairs = list(zip(self.blocks, found, strict=True))
        if self.uncertainty != 0:
            pairs = [(unit, kappa.widened(self.error(unit), self.uncertain)) for unit, kappa in pairs]
        return tuple(self._confirmed(unit, kappa) for unit, kappa in pairs)

    def _confirmed(self, unit: int | None, kappa: ConditionNumber) -> ConditionNumber:
        """κ of one block, unless its products, or those of the check, are rounding: the Hessian is zero, or unknown."""
        zero = self.rounding.get(unit)
        if zero is None and self.check is not None and self.check.bound >= 1 and not self.route.startswith(CLOSED_FORM):
            zero = self.check.zero and not self._vanishing(unit)
        if zero is None:
            zero = kappa.is_zero or None
        if not zero:
            return kappa if zero is None else unresolved(kappa, self._vanishing(unit) or ALL_ROUNDING)
        cause = Cause("the Hessian is zero: the loss does not depend on its parameters to second order")
        return replace(zero_matrix(kappa.rank + kappa.nullity), cutoff=max(kappa.cutoff, kappa.lambda_max), cause=cause)

    def _vanishing(self, unit: int | None) -> Cause:
        """Why zeros of a Hessian may be numbers that double precision does not hold."""
        found: Cause = getattr(self.block(unit).plain, "vanishing", NOTHING)
        return found

    def error(self, unit: int | None = None) -> float:
        """The bound of the error in the 2-norm that `uncertainty` is for a Hessian, ε ‖DP‖²."""
        if self.uncertainty == 0:
            return 0.0
        block = self.block(unit)
        scales = block.plain.scales()
        if block.P is None:
            return self.uncertainty * float(scales.max()) ** 2
        return self.uncertainty * block.P.scaled_norm(scales, block.units)

    @property
    def plain(self) -> LayerResult:
        """The same Hessians in the plain parameters, if they are PᵀHP here."""
        result = LayerResult(
            self.name,
            self.level,
            self.units,
            lambda unit: self.block(unit).plain,
            parameters=self.parameters,
            n_params=self.n_params,
            route=self.route,
            rtol=self._rtol,
        )
        result.check, result.uncertainty, result.uncertain = self.check, self.uncertainty, self.uncertain
        result.rounding, result.kind = self.rounding, self.kind
        return result

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
            order is unit by unit. By products in the parameters of a module it is tensor after tensor: see
            ``parameters``.
        """
        return self.block(self._checked(unit)).matrix()

    def eigenvalues(self, unit: int | None = None) -> torch.Tensor:
        """All nonzero eigenvalues of a Hessian, descending, float64."""
        unit = self._checked(unit)
        if unit not in self._eigenvalues:
            self._eigenvalues[unit] = self.block(unit).eigenvalues()
        return self._eigenvalues[unit].clone()

    def eigenvectors(self, unit: int | None = None) -> torch.Tensor:
        """Orthonormal eigenvectors (n, r) of a Hessian, one column for each of `eigenvalues`."""
        return self.block(self._checked(unit)).eigenpairs()[1]

    def to_frame(self) -> pd.DataFrame:
        """One row per Hessian, as `ProbeResult.to_frame` has them."""
        return ProbeResult({self.name: self}, {}, "").to_frame()


@dataclass(frozen=True)
class Memory:
    """Bytes that products with a whole network take at most, beside the model and its data: known before the first.

    Attributes
    ----------
    order
        n.
    copies
        Of the parameters and the gradient.
    graphs
        What is kept of the forward and the backward pass.
    vectors, count
        Those of the iteration, and how many.
    check
        What the comparison with the model needs beside copies and graphs, before the iteration.
    double
        What the last two products in float64 need beside copies and graphs, after it.
    """

    order: int
    copies: int
    graphs: int
    vectors: int
    count: int
    check: int
    double: int

    @property
    def total(self) -> int:
        """The most at a time."""
        return self.copies + self.graphs + max(self.vectors, self.check, self.double)

    def __str__(self) -> str:
        copies, graphs = gigabytes(self.copies), gigabytes(self.graphs)
        parts = [f"{self.count} vectors of {self.order:,} parameters {gigabytes(self.vectors)}"]
        parts += [f"or the check {gigabytes(self.check)}"] if self.check > self.vectors else []
        parts += [f"or the last products in float64 {gigabytes(self.double)}"] if self.double > self.vectors else []
        return f"{gigabytes(self.total)}: copies {copies}, graphs {graphs}, {', '.join(parts)}"


def gigabytes(size: float) -> str:
    """Bytes as one writes them."""
    return f"{size / 1e9:.3g} GB"


class NetworkResult(LayerResult):
    """All parameters of the network together.

    Attributes
    ----------
    parts
        Which of its rows belong to which module.
    bounded
        What a given number of products showed; None: none was given.
    memory
        What they take, if a number was given.
    """

    def __init__(
        self,
        block: NetworkHessian,
        parts: Mapping[str, Sequence[slice]],
        parameters: Sequence[str],
        route: str,
        rtol: float,
    ) -> None:
        super().__init__(
            NETWORK,
            "network",
            (),
            lambda unit: block,
            parameters=parameters,
            n_params=block.order,
            route=route,
            rtol=rtol,
        )
        self._block, self.parts = block, dict(parts)
        self.bounded: Bounded | None = None
        self.memory: Memory | None = None

    def rename(self, name_of: Callable[[str], str]) -> None:
        """Call the parts by other names."""
        super().rename(name_of)
        self.parts = {name_of(part): where for part, where in self.parts.items()}

    @property
    def operator(self) -> SymmetricOperator:
        """The Hessian, in the coordinates asked for: its products, for `hesscond.lanczos` and `hesscond.density`."""
        return self._block.operator

    def remarks(self) -> list[str]:
        if self.bounded is None:
            return []
        ends = f"{float(self.top.lower[0]):.9g} to {float(self.top.upper[0]):.9g}"
        memory = [] if self.memory is None else [f"memory: {self.memory}"]
        return [f"eigenvalue of the largest size: {ends}", *memory]

    @cached_property
    def conditions(self) -> tuple[ConditionNumber, ...]:
        """κ, alone in a tuple."""
        # its bounds count what is uncertain
        return super().conditions if self.bounded is None else (self._confirmed(None, self.bounded.condition),)

    @cached_property
    def top(self) -> EigenResult:
        """The eigenvalue of the largest |λ| with its interval, which counts the rounding of products.

        Of a number of products that was given it is what these showed, or else an iteration of its own.
        """
        if self.bounded is not None:
            return self.bounded.top
        which = "top" if self.operator.psd else "magnitude"
        found = lanczos(self.operator, 1, which, tol=self._rtol**0.5, memory=self._block.effort.memory)
        return replace(found, lower=found.lower - self.uncertainty, upper=found.upper + self.uncertainty)

    def seconds(self) -> float | None:
        """About how long κ takes where the matrix is formed; None: by an iteration, of which one cannot tell."""
        order, effort = self.operator.order, self._block.effort
        if self.bounded is not None or order > effort.dense_order or not effort.holds(order):
            return None
        few = torch.ones(order, TRIED, dtype=self.operator.dtype, device=self.operator.device)
        began = time.perf_counter()
        _ = self.operator @ few
        return (time.perf_counter() - began) * order / TRIED + DECOMPOSITION * order**3

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


class ProbeResult(Shown, Mapping[str, LayerResult]):
    """What `probe` found, by layer name.

    `str` and notebooks show the table of the command line; it can be pickled and copied (see `LayerResult`).

    Attributes
    ----------
    skipped
        What of the model has no Hessian here, with the reason and the way to get it: layers that could not be probed on
        this data, and modules of other kinds whose parameters receive a gradient.
    coordinates
        What was measured, in words: of which network, in which coordinates.
    precision
        What the forward pass and the loss were computed in, found by looking at the operations that ran: ``"float64"``,
        or ``"mixed: 326 float32 operations (LlamaRMSNorm, …)"``.
    """

    def __init__(self, layers: Mapping[str, LayerResult], skipped: Mapping[str, str], precision: str) -> None:
        self._layers = dict(layers)
        self.skipped = dict(skipped)
        self.precision = precision
        self.coordinates = "plain coordinates"

    def rename(self, name_of: Callable[[str], str]) -> None:
        """Call the layers, and the parts of a network, by other names."""
        for layer in self._layers.values():
            layer.rename(name_of)
        self._layers = {layer.name: layer for layer in self._layers.values()}
        self.skipped = {name_of(name): why for name, why in self.skipped.items()}

    def first(self, count: int, reason: str) -> ProbeResult:
        """The first so many layers; the others are skipped for a reason."""
        kept = dict(list(self._layers.items())[:count])
        left_out = dict.fromkeys([name for name in self._layers if name not in kept], reason)
        result = ProbeResult(kept, self.skipped | left_out, self.precision)
        result.coordinates = self.coordinates
        return result

    def __getitem__(self, layer: str) -> LayerResult:
        if layer not in self._layers:
            raise KeyError(f"layer {layer!r} was not probed: {', '.join(self._layers)} were")
        return self._layers[layer]

    def __iter__(self) -> Iterator[str]:
        return iter(self._layers)

    def __len__(self) -> int:
        return len(self._layers)

    def __repr__(self) -> str:
        names = [*map(repr, list(self)[:3]), *["…"] * (len(self) > 3)]
        return f"<ProbeResult: {', '.join(names)} in {self.coordinates}>"

    def sheet(self, frame: pd.DataFrame | None = None, kinds: Mapping[str, str] | None = None) -> Sheet:
        """The table, with what was measured above it and the notes below it.

        Parameters
        ----------
        frame
            The rows, if not those of `to_frame`.
        kinds
            Classes of the modules by name, if there are others than of these layers.
        """
        from hesscond.result_tables import layer_table, network_table, notes, unit_table

        frame = self.to_frame() if frame is None else frame
        above = [f"{self.coordinates} · forward pass in {self.precision}"] if self.precision else []
        # of a Hessian that is zero the table says so
        curved = {name: own for name, own in self.items() if not all(kappa.is_zero for kappa in own.conditions)}
        checks = {name: own.check for name, own in curved.items() if own.check is not None}
        if checks:
            name, least = max(checks.items(), key=lambda item: item[1].difference / item[1].bound)
            own, *_ = str(least).split("; ")
            above.append(f"checked: {own}" + (f", largest at {name}" if len(checks) > 1 else ""))
            made = {one.central: one.against for one in checks.values() if one.central is not None}
            if (largest := worst(made)) is not None:
                above.append(f"         {made[largest]}")
        by_unit = any(own.level == "unit" for own in self.values())
        draw = network_table if "share_top" in frame else unit_table if by_unit else layer_table
        table = draw(frame, {name: own.kind for name, own in self.items()} if kinds is None else kinds)
        below = [line for own in self.values() for line in own.remarks()]
        below += notes(frame, {name: own.route for name, own in self.items()})
        skipped: dict[str, list[str]] = {}
        for name, reason in self.skipped.items():
            skipped.setdefault(reason.replace(f"name it, layers=[{name!r}],", "name it with layers="), []).append(name)
        below += [f"skipped {', '.join(names)}: {reason}" for reason, names in skipped.items()]
        return Sheet(above, table, below)

    def to_frame(self) -> pd.DataFrame:
        """One row per Hessian: layer, unit (missing for a whole layer), n_params, rank, nullity, negative,
        lambda_max, lambda_min, kappa, kappa_lower, kappa_upper, resolved, solver, reason, advice. ``negative`` is
        missing where they were not all counted; ``reason`` and ``advice`` are empty where κ is resolved.
        """
        import pandas as pd

        rows = [
            {
                "layer": layer.name,
                "unit": unit,
                "n_params": layer.n_params,
                "rank": kappa.rank,
                "nullity": kappa.nullity,
                "negative": kappa.counted_negative,
                "lambda_max": kappa.lambda_max,
                "lambda_min": kappa.lambda_min,
                "kappa": kappa.value,
                "kappa_lower": kappa.lower,
                "kappa_upper": kappa.upper,
                "resolved": kappa.resolved,
                "solver": kappa.solver,
                "reason": kappa.reason,
                "advice": kappa.advice,
            }
            for layer in self._layers.values()
            for unit, kappa in zip(layer.blocks, layer.conditions, strict=True)
        ]
        frame = pd.DataFrame(rows)
        return frame.astype({name: "Int64" for name in ("unit", "negative") if frame[name].isna().any()})
