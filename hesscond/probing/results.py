"""Results of a probe, layer by layer: Hessians, spectra and condition numbers, computed when asked for."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import cached_property
from numbers import Real
from typing import TYPE_CHECKING, Any

import torch

from hesscond import causes
from hesscond.errors import ConfigError
from hesscond.hessians import BlockHessian, NullDirections
from hesscond.hessians.network_hessian import NetworkHessian
from hesscond.hessians.roles import NETWORK
from hesscond.operators import Estimate, SymmetricOperator
from hesscond.probing.check import Check
from hesscond.probing.differences import worst
from hesscond.sheets import Sheet, Shown, listed
from hesscond.spectra import Bounded, ConditionNumber, EigenResult, lanczos
from hesscond.spectra.condition import unresolved, zero_matrix

if TYPE_CHECKING:
    import pandas as pd

#: Names of the routes that form S without subtraction, accurate to the last digits where a product has none left.
CLOSED_FORM = ("loss curvature", "loss factor")

#: Part of the reason for a module that is measured if it is named.
OTHER = "no dense or convolutional layer"

#: Number of products that are timed; seconds over n³ that one core takes for the eigenvalues of H, and to count those
#: of a scaled H.
TRIED, DECOMPOSITION = 8, 7e-11


class LayerResult(Shown):
    """Hessians of one layer, in the coordinates asked for.

    `str` and notebooks show the table of the command line. A pickled result has κ and all Hessians that were captured;
    for Hessians known by products it has the eigenvalues that were asked for before, and raises an error for the rest.

    Attributes
    ----------
    name
        Name of the layer.
    level
        ``"unit"``, ``"layer"`` or ``"network"``: the owner of one Hessian.
    units
        Units that were probed.
    parameters
        Names of the model's tensors that the Hessian is in: weight and bias of a layer, with rows ordered unit by unit
        as [b_i, w_i]. If ``route`` names products in a chart of the parameters, they are the trained tensors of the
        module, with rows ordered tensor by tensor (for a unit: its rows of each tensor).
    n_params
        Number of parameters of one Hessian, biases included.
    route
        How the curvature S was computed.
    check
        Comparison with the double-backward product of the model itself; None: it was not made.
    uncertainty
        ε such that operations of the model in a lower precision than was asked for change entry (i, j) of a Hessian by
        ε d_i d_j, with its scales d; 0: there are none. κ's interval is widened accordingly.
    uncertain
        Cause of the uncertainty.
    kind
        Class of the module.
    rounding
        Hessians whose products are no larger than their rounding: whether they are zero, or may be hidden by it; None:
        they are neither, by a penalty.
    remark
        Sentence on how the layer was measured, if it was otherwise than asked for.
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
        entries: Callable[[int | None], pd.DataFrame] | None = None,
    ) -> None:
        self.name, self.level, self.units, self.n_params, self.route = name, level, tuple(units), n_params, route
        self.parameters = tuple(parameters)
        self.check: Check | None = None
        self.uncertainty, self.uncertain, self.kind = 0.0, causes.SUMMED, ""
        self.rounding: dict[int | None, bool | None] = {}
        self.remark = ""
        self.block, self._rtol, self._conditions, self._entries = block, rtol, conditions, entries
        self._eigenvalues: dict[int | None, torch.Tensor] = {}
        #: context in which κ, in the words given, is computed
        self.watch: Callable[[str], AbstractContextManager[object]] = nullcontext

    def __repr__(self) -> str:
        blocks = f"{len(self.units)} units" if self.level == "unit" else f"level {self.level}"
        return f"<{type(self).__name__} {self.name!r}: {blocks}, {self.n_params:,} parameters>"

    def __getstate__(self) -> dict[str, Any]:
        kept = {"conditions": self.conditions, "_conditions": None, "_entries": None}
        return vars(self) | kept | {"block": {unit: self.block(unit) for unit in self.blocks}.__getitem__}

    def sheet(self) -> Sheet:
        return ProbeResult({self.name: self}, {}, "").sheet()

    def remarks(self) -> list[str]:
        """Remarks printed below the table, other than on κ."""
        return [self.remark] if self.remark else []

    @property
    def blocks(self) -> Sequence[int | None]:
        """Unit of every Hessian; None for a whole layer."""
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
        with self.watch(f"κ of {self.name}"):
            if self._conditions is not None:
                kappas = [self._widened(*pair) for pair in zip(self.blocks, self._conditions(), strict=True)]
            else:
                kappas = [self._condition(unit) for unit in self.blocks]
        return tuple(self._confirmed(unit, kappa) for unit, kappa in zip(self.blocks, kappas, strict=True))

    def _condition(self, unit: int | None) -> ConditionNumber:
        """κ of one block, or its bounds from few products, with the uncertainty of H."""
        block = self.block(unit)
        if (bounds := block.bounded(self.error(unit))) is not None:
            return bounds.condition
        return self._widened(unit, block.condition_number(rtol=self._rtol))

    def _widened(self, unit: int | None, kappa: ConditionNumber) -> ConditionNumber:
        return kappa.widened(self.error(unit), self.uncertain) if self.uncertainty else kappa

    def _confirmed(self, unit: int | None, kappa: ConditionNumber) -> ConditionNumber:
        """Return κ of one block; zero or unresolved if its products, or those of the check, are only rounding."""
        zero = self.rounding.get(unit)
        if self.check is not None and self._coarse(unit):
            zero = self.check.zero and not self._vanishing(unit)
        if zero is None and kappa.is_zero:
            # a large P may enlarge rounding beyond all values, but makes no zeros of a nonzero H
            block = self.block(unit)
            zero = block.P is None or block.plain.condition_number(rtol=self._rtol).is_zero
        if not zero:
            return kappa if zero is None else unresolved(kappa, self._vanishing(unit) or causes.ALL_ROUNDING)
        cause = causes.Cause("the Hessian is zero: the loss does not depend on its parameters to second order")
        return replace(zero_matrix(kappa.rank + kappa.nullity), cutoff=max(kappa.cutoff, kappa.lambda_max), cause=cause)

    def _coarse(self, unit: int | None) -> bool:
        """Whether the products that H was compared with are only rounding, and no closed form or penalty is better."""
        coarse = self.check is not None and self.check.bound >= 1 and not self.route.startswith(CLOSED_FORM)
        return coarse and unit not in self.rounding

    def _vanishing(self, unit: int | None) -> causes.Cause:
        """Reason why zeros of a Hessian may be numbers that double precision does not represent."""
        cause: causes.Cause = getattr(self.block(unit).plain, "vanishing", causes.NOTHING)
        return cause

    def error(self, unit: int | None = None) -> float:
        """Bound ε ‖DP‖² of the error of a Hessian, in the 2-norm, that follows from `uncertainty`."""
        if self.uncertainty == 0:
            return 0.0
        block = self.block(unit)
        scales = block.plain.scales()
        if block.P is None:
            return self.uncertainty * float(scales.max()) ** 2
        return self.uncertainty * block.P.scaled_norm(scales, block.units)

    @property
    def plain(self) -> LayerResult:
        """Same Hessians in the plain parameters, if they are PᵀHP here."""
        result = LayerResult.__new__(LayerResult)
        vars(result).update(vars(self), block=lambda unit: self.block(unit).plain, _conditions=None, _eigenvalues={})
        vars(result).pop("conditions", None)
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
            Unit, whose parameters are [bias, weights as torch flattens them]; None at level ``"layer"``, where the
            order is unit by unit. For Hessians by products in the parameters of a module it is tensor after tensor: see
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

    def entries(self, unit: int | None = None) -> pd.DataFrame:
        """Names of the entries of `eigenvectors`, and of rows and columns of `hessian`.

        Parameters
        ----------
        unit
            Unit; None at other levels.

        Returns
        -------
        pandas.DataFrame
            One row per entry: parameter; index in it, a tuple; unit, missing outside of dense and convolutional layers;
            name: "bias", "feature 3", "channel 2, offset (0, 1)" in these layers, "norm.weight[4]" elsewhere. In the
            coordinates of a method, w = P z, entry k is that of z.

        Raises
        ------
        ConfigError
            No such unit; a chart, whose coordinates are no entries of parameters; a pickled result.
        """
        unit = self._checked(unit)
        entries = None if self._entries is None else self._entries(unit)
        if entries is None or len(entries) != self.block(unit).order:
            raise ConfigError(
                f"the entries of {self.name!r} have no names: it was measured in a chart, or saved without the model"
            )
        return entries

    def trace(self, unit: int | None = None, *, probes: int | None = None, seed: int = 0) -> Estimate[float]:
        """Trace of a Hessian, without forming it.

        Parameters
        ----------
        unit
            Unit; None at other levels.
        probes
            Random vectors where only products with the Hessian are known; None: exact up to 4,096 parameters, and
            beyond that 30. Elsewhere it is exact.
        seed
            Seed of the random vectors.

        Returns
        -------
        Estimate[float]
            With ``value`` and ``error``: a standard error, plus a bound of what `uncertainty` makes of it.

        Raises
        ------
        ConfigError
            No such unit; fewer than 4 probes.
        """
        return self._estimate(self.block(self._checked(unit)).trace(probes, seed), unit)

    def diagonal(self, unit: int | None = None, *, probes: int | None = None, seed: int = 0) -> Estimate[torch.Tensor]:
        """Diagonal (k,) of a Hessian, in the order of `hessian`; arguments and errors as of `trace`."""
        return self._estimate(self.block(self._checked(unit)).estimated_diagonal(probes, seed), unit)

    def frobenius_norm(self, unit: int | None = None, *, probes: int | None = None, seed: int = 0) -> Estimate[float]:
        """Frobenius norm ‖H‖_F of a Hessian; arguments and errors as of `trace`."""
        return self._estimate(self.block(self._checked(unit)).frobenius_norm(probes, seed), unit)

    def _estimate(self, estimate: Estimate[Any], unit: int | None) -> Estimate[Any]:
        # entry (i, j) is off by at most ε d_i d_j, so that all three are by no more than ε Σ d_i²
        return replace(estimate, error=estimate.error + self.error(unit))

    def condition(self, unit: int | None = None, *, damping: float = 0.0) -> ConditionNumber:
        """κ(H + λI) of a Hessian; with a damping λ = 0 that of the nonzero eigenvalues of H, as in `kappa`.

        Parameters
        ----------
        unit
            Unit; None at other levels.
        damping
            λ ≥ 0, in the coordinates that were measured: κ(PᵀHP + λI).

        Returns
        -------
        ConditionNumber
            With rank and eigenvalues of H + λI. If H is indefinite, it is that of |λ_i + λ|.

        Raises
        ------
        ConfigError
            No such unit; a damping that is negative or not finite; a result from a given number of products.
        """
        unit = self._checked(unit)
        undamped = self.conditions[self.blocks.index(unit)]
        if isinstance(damping, bool) or not isinstance(damping, Real) or not 0 <= damping < math.inf:
            raise ConfigError(f"damping must be a number from 0 on, not {damping!r}")
        if damping == 0:
            return undamped
        kappa = self.block(unit).damped_condition(float(damping), rtol=self._rtol)
        error = self.error(unit)
        if undamped.is_zero or self.rounding.get(unit) is not None or self._coarse(unit):
            # round-off may be any matrix of its size
            error += self.frobenius_norm(unit).value
        return kappa.widened(error, self.uncertain) if error else kappa

    def to_frame(self) -> pd.DataFrame:
        """Table with one row per Hessian, as in `ProbeResult.to_frame`."""
        return ProbeResult({self.name: self}, {}, "").to_frame()


class NetworkResult(LayerResult):
    """Hessian in all parameters of the network together.

    Attributes
    ----------
    parts
        Rows of the Hessian that belong to each module.
    """

    def __init__(
        self,
        block: NetworkHessian,
        parts: Mapping[str, Sequence[slice]],
        parameters: Sequence[str],
        route: str,
        rtol: float,
        entries: Callable[[int | None], pd.DataFrame] | None = None,
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
            entries=entries,
        )
        self._block, self.parts = block, dict(parts)

    def rename(self, name_of: Callable[[str], str]) -> None:
        super().rename(name_of)
        self.parts = {name_of(part): where for part, where in self.parts.items()}

    @property
    def operator(self) -> SymmetricOperator:
        """Hessian in the coordinates asked for, as an operator for `hesscond.lanczos` and `hesscond.density`."""
        return self._block.operator

    def remarks(self) -> list[str]:
        if self.bounded is None:
            return []
        ends = f"{float(self.top.lower[0]):.9g} to {float(self.top.upper[0]):.9g}"
        return [f"eigenvalue of the largest size: {ends}"]

    @property
    def bounded(self) -> Bounded | None:
        """Bounds from a given number of products; None: no number was given, or it forms the matrix."""
        return self._block.bounded(self.error())

    def condition(self, unit: int | None = None, *, damping: float = 0.0) -> ConditionNumber:
        if self.bounded is not None and damping:
            raise ConfigError("products= bounds κ of H alone: probe without it for κ(H + λI)")
        return super().condition(unit, damping=damping)

    @cached_property
    def top(self) -> EigenResult:
        """Eigenvalue of largest |λ| with its interval, which includes the rounding of products.

        If a number of products was given, it comes from these; else it takes a separate iteration.
        """
        if self.bounded is not None:
            return self.bounded.top
        which = "top" if self.operator.psd else "magnitude"
        eigenvalue = lanczos(self.operator, 1, which, tol=self._rtol**0.5, memory=self._block.limits.memory)
        return replace(eigenvalue, lower=eigenvalue.lower - self.uncertainty, upper=eigenvalue.upper + self.uncertainty)

    def seconds(self) -> float | None:
        """Estimated seconds for κ if the matrix is formed; None: κ is found by an iteration of unknown length."""
        order, limits = self.operator.order, self._block.limits
        if limits.bounding is not None or not limits.forms(order):
            return None
        few = torch.ones(order, TRIED, dtype=self.operator.dtype, device=self.operator.device)
        began = time.perf_counter()
        _ = self.operator @ few
        return (time.perf_counter() - began) * order / TRIED + DECOMPOSITION * order**3

    @property
    def null_directions(self) -> Sequence[NullDirections]:
        """Null directions that are known beforehand, each with its reason."""
        return self._block.known.directions

    def by_layer(self) -> pd.DataFrame:
        """Share of each module in the network's extreme eigenvectors.

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
    """Results of `probe`, by layer name.

    `str` and notebooks show the table of the command line; the result can be pickled and copied (see `LayerResult`).

    Attributes
    ----------
    skipped
        Parts of the model without a Hessian here, with the reason and the way to get it: layers that could not be
        probed on this data, and modules of other kinds whose parameters receive a gradient.
    coordinates
        Description of the measurement: the network and the coordinates.
    scope
        Which parameters were measured if no layers were named and none is dense or convolutional; else empty.
    precision
        Precision that the forward pass and the loss were computed in, found from the operations that ran:
        ``"float64"``, or ``"mixed: 326 float32 operations (LlamaRMSNorm, …)"``.
    """

    def __init__(self, layers: Mapping[str, LayerResult], skipped: Mapping[str, str], precision: str) -> None:
        self._layers = dict(layers)
        self.skipped = dict(skipped)
        self.precision = precision
        self.coordinates = "plain coordinates"
        self.scope = ""

    def rename(self, name_of: Callable[[str], str]) -> None:
        """Call the layers, and the parts of a network, by other names."""
        for layer in self._layers.values():
            layer.rename(name_of)
        self._layers = {layer.name: layer for layer in self._layers.values()}
        self.skipped = {name_of(name): why for name, why in self.skipped.items()}

    def first(self, count: int, reason: str) -> ProbeResult:
        """Return the first ``count`` layers; the others are skipped, with ``reason``."""
        kept = dict(list(self._layers.items())[:count])
        left_out = dict.fromkeys([name for name in self._layers if name not in kept], reason)
        result = ProbeResult(kept, self.skipped | left_out, self.precision)
        result.coordinates, result.scope = self.coordinates, self.scope
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
        """Return the table, with the description of the measurement above it and the notes below it.

        Parameters
        ----------
        frame
            Rows to show; None: those of `to_frame`.
        kinds
            Classes of the modules by name; None: those of these layers.
        """
        from hesscond.probing.tables import layer_table, network_table, notes, unit_table

        frame = self.to_frame() if frame is None else frame
        above = [f"{self.coordinates} · forward pass in {self.precision}"] if self.precision else []
        above += self._checks()
        by_unit = any(layer.level == "unit" for layer in self.values())
        draw = network_table if "share_top" in frame else unit_table if by_unit else layer_table
        table = draw(frame, {name: layer.kind for name, layer in self.items()} if kinds is None else kinds)
        below = [self.scope] if self.scope else []
        below += [line for layer in self.values() for line in layer.remarks()]
        below += notes(frame, {name: layer.route for name, layer in self.items()})
        reasons = {name: reason for name, reason in self.skipped.items() if f"{OTHER}: name it" not in reason}
        if others := [name for name in self.skipped if name not in reasons]:
            below.append(f"not measured, as no dense or convolutional layers: {listed(others)}; layers='*' takes all")
        skipped: dict[str, list[str]] = {}
        for name, reason in reasons.items():
            skipped.setdefault(reason.replace(f"name it, layers=[{name!r}],", "name it with layers="), []).append(name)
        below += [f"skipped {listed(names)}: {reason}" for reason, names in skipped.items()]
        return Sheet(above, table, below)

    def _checks(self) -> list[str]:
        """Lines with the largest differences from the model's own derivatives; the table says which H are zero."""
        curved = {name: layer for name, layer in self.items() if not all(kappa.is_zero for kappa in layer.conditions)}
        checks = {name: layer.check for name, layer in curved.items() if layer.check is not None}
        if not checks:
            return []
        name, least = max(checks.items(), key=lambda item: item[1].difference / item[1].bound)
        text, *_ = str(least).split("; ")
        lines = [f"checked: {text}" + (f", largest at {name}" if len(checks) > 1 else "")]
        explanations = {check.central: check.against for check in checks.values() if check.central is not None}
        return lines if (largest := worst(explanations)) is None else [*lines, f"         {explanations[largest]}"]

    def to_frame(self) -> pd.DataFrame:
        """Table with one row per Hessian: layer, unit (missing for a whole layer), n_params, rank, nullity, negative,
        lambda_max, lambda_min, kappa, kappa_lower, kappa_upper, resolved, solver, reason, advice. ``negative`` is
        missing if not all negative eigenvalues were counted; ``reason`` and ``advice`` are empty where κ is resolved.
        """
        import pandas as pd

        rows = [
            {"layer": layer.name, "unit": unit, "n_params": layer.n_params}
            | kappa.columns
            | {"reason": kappa.reason, "advice": kappa.advice}
            for layer in self._layers.values()
            for unit, kappa in zip(layer.blocks, layer.conditions, strict=True)
        ]
        frame = pd.DataFrame(rows).astype({"resolved": bool})
        return frame.astype({name: "Int64" for name in ("unit", "negative") if frame[name].isna().any()})
