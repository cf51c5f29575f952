"""Hessian kept as its factor, ∇²L = Fᵀ diag(±1) F."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from hesscond import causes
from hesscond.capture import EntryBounds, LayerCapture, statistics
from hesscond.hessians.coordinates import base
from hesscond.operators import estimates, threads
from hesscond.spectra import ConditionNumber
from hesscond.spectra.condition import EPS, error_factor
from hesscond.spectra.forms import DualForm, FactorForm, SummedForm
from hesscond.spectra.rank import distinct_rows
from hesscond.spectra.solvers.base import RankBound, conditions


@dataclass(frozen=True)
class FactoredHessian(base.KeptHessian):
    """Ĥᵀ S Ĥ of one unit with ŵ = [b, w] (or w alone), or of u units together, from rows and signs."""

    #: (m, u n̂) float64: Ĥ with ``root``; or F itself, with one row for each rank-one term of S, or triangular
    rows: torch.Tensor
    root: torch.Tensor | None  # (m,) float64 √|S_jj|; None: all 1
    sign: torch.Tensor | None  # (m,) signs of S_jj or of the rank-one terms; None: S ≥ 0
    #: bounds of the error in each column of ``rows`` (u n̂,), in the 2-norm, or in each entry (m, u n̂); None: exact
    row_error: torch.Tensor | EntryBounds | None = None
    units: int = 1  # u
    rank_limit: int | None = None  # upper bound of the rank
    #: (u n̂,) d such that round-off in S changes entry (k, l) of H by eps·d_k·d_l; None: S has none
    spread: torch.Tensor | None = None
    #: reason why zeros of S may be underflow, so that they bound no rank
    vanishing: causes.Cause = causes.NOTHING
    features: RankBound | None = None  # returns the largest rank that Ĥ leaves, see `within_features`

    @property
    def order(self) -> int:
        return self.rows.shape[1]

    def factor(self) -> torch.Tensor:
        """|S|^½ Ĥ P (m, k): the Hessian is FᵀF where S ≥ 0, and Fᵀ diag(sign) F otherwise."""
        return factors_of([self])[0]

    def matrix(self) -> torch.Tensor:
        F = self.factor()
        return F.T @ (F if self.sign is None else F * self.sign[:, None])

    def frobenius_norm(self, probes: int | None, seed: int) -> estimates.Estimate[float]:
        F = self.factor()
        if len(F) >= F.shape[1]:
            return super().frobenius_norm(probes, seed)
        return estimates.Estimate(signed_norm(F @ F.T, self.sign), 0.0, 0, 0)

    def diagonal(self) -> torch.Tensor:
        squares = self.factor().square()
        return (squares if self.sign is None else squares * self.sign[:, None]).sum(0)

    def product(self, vectors: torch.Tensor) -> torch.Tensor:
        F = self.factor()
        images = F @ vectors
        return F.T @ (images if self.sign is None else images * self.sign[:, None])

    def scales(self) -> torch.Tensor:
        scales = torch.linalg.vector_norm(self.plain.factor(), dim=0)
        if self.spread is not None:
            scales = torch.maximum(scales, base.LOST_IN_SQUARE * self.spread)
        if self.row_error is not None:
            scales = torch.maximum(scales, base.LOST_IN_FACTOR * self.column_errors())
        return scales

    def damped_condition(self, damping: float, *, rtol: float) -> ConditionNumber:
        """κ from the factor [F; √λ I]."""
        F = self.factor()
        error = torch.as_tensor(self.factor_error(), device=F.device)
        rows = torch.cat([F, damping**0.5 * torch.eye(F.shape[1], dtype=F.dtype, device=F.device)])
        sign = None if self.sign is None else torch.cat([self.sign, torch.ones_like(rows[len(F) :, 0]).to(self.sign)])
        error = (error.norm(dim=0) if error.ndim == 2 else error.expand(F.shape[1])).to(F)
        bounds = spread_in(self.spread, self.P, self.units)
        spread = None if bounds is None else F.new_tensor(bounds)
        damped = FactoredHessian(rows, None, sign, error if bool(error.any()) else None, spread=spread)
        return damped.condition_number(rtol=rtol)

    def column_errors(self) -> torch.Tensor:
        """Bounds ``row_error`` (n,) of each column in the 2-norm, at P = I."""
        error = self.row_error.entries() if isinstance(self.row_error, EntryBounds) else self.row_error
        assert error is not None
        return error if error.ndim == 1 else error.norm(dim=0)

    def condition_number(self, *, rtol: float = 1e-8) -> ConditionNumber:
        return conditions_of([self], rtol=rtol)[0]

    def settled(self, form: FactorForm, kappa: ConditionNumber, *, rtol: float) -> ConditionNumber:
        """κ of a form, with the rank in the plain coordinates where that decides: P does not increase it."""
        kappa = within_features(form, kappa, self.features, rtol)
        # the rounding of P may hide what is zero in the plain coordinates
        if kappa.resolved or self.P is None or not self.P.cancels:
            return kappa
        plain = self.plain.condition_number(rtol=rtol)
        if not plain.resolved or kappa.rank != plain.rank:
            return kappa
        return replace(form, rank_bound=lambda: plain.rank).condition(rtol=rtol)

    def form(self, factor: torch.Tensor | None = None) -> FactorForm:
        """Form of the Hessian, from its factor if that is given."""
        signs = self.sign
        if signs is None and self.spread is not None:
            signs = self.rows.new_ones(len(self.rows))
        return FactorForm(
            self.factor() if factor is None else factor,
            signs=signs,
            error=self.factor_error(),
            rank_bound=self.rank_bound,
            spread=spread_in(self.spread, self.P, self.units),
            least_rank=self._span if self.vanishing else None,
            lost=self.vanishing,
        )

    def _span(self) -> int:
        """Rank of H if no entry of S is zero, or a bound of it where only F is known."""
        if self.root is None:
            return self.rank_bound()
        return FactorForm(self.rows if self.P is None else self.P.multiplied(self.rows, self.units)).condition().rank

    def eigenvalues(self) -> torch.Tensor:
        form = self.form()
        return torch.from_numpy(np.ascontiguousarray(form.eigenvalues(form.condition()))).to(self.rows.device)

    def eigenpairs(self) -> tuple[torch.Tensor, torch.Tensor]:
        form = self.form()
        pairs = form.eigenpairs(form.condition())
        values, vectors = (torch.from_numpy(np.ascontiguousarray(part)).to(self.rows.device) for part in pairs)
        return values, vectors

    def rank_bound(self) -> int:
        """Upper bound of the rank: distinct active samples, or varying features plus one for all constant ones."""
        # not of the rows in other coordinates, where a dead feature no longer looks dead
        known = self.order if self.rank_limit is None else self.rank_limit
        if self.root is None:
            if self.vanishing:
                return min(known, *self.rows.shape)
            return min(known, int((self.rows != 0).any(1).sum()), int((self.rows != 0).any(0).sum()))
        active = distinct_rows((self.rows if self.vanishing else self.rows[self.root != 0]).cpu().numpy())
        if len(active) == 0:
            return 0
        low, high = active.min(0), active.max(0)
        varying = low != high
        return min(known, len(active), int(varying.sum()) + int((low[~varying] != 0).any()))

    def error_norm(self) -> float:
        """Bound, in the 2-norm, of the error in the factor."""
        if self.P is None and isinstance(self.row_error, EntryBounds):
            return float(self.row_error.squared_rows().sum().sqrt())
        return float(np.linalg.norm(self.factor_error()))

    def factor_error(self) -> float | np.ndarray:
        """Bounds of the error in each column of the factor, or in each entry."""
        P = self.P
        if self.row_error is None:
            if P is None or not P.cancels:
                return 0.0
            return P.carried(error_factor(*self.rows.shape) * EPS * self.scales()[None], self.units)[0].cpu().numpy()
        error = self.row_error.entries() if isinstance(self.row_error, EntryBounds) else self.row_error
        if P is None:
            return error.cpu().numpy()
        if error.ndim == 2:
            # errors of the entries and of the product rows·P, through |P|
            each = error + 16 * EPS * self.rows.abs()
            return P.carried(each, self.units).cpu().numpy()
        norms = torch.linalg.vector_norm(self.rows, dim=0)
        per_column = error + error_factor(*self.rows.shape) * EPS * norms
        return P.carried(per_column[None], self.units)[0].cpu().numpy()


def feature_rank(captured: LayerCapture, units: Sequence[int], memory: int) -> RankBound | None:
    """Function that returns the rank that Ĥ leaves to the Hessian of ``units``: n̂ for each if its own is unresolved.

    None: the inputs are not seen, take too much memory, or have zeros and equal columns by rounding.
    """
    inputs, geometry = captured.inputs, captured.inputs.geometry
    size = 8 * inputs.blocks * inputs.positions * geometry.groups * geometry.n_params if inputs.calls else math.inf
    if captured.loses_entries or size > memory // 8:
        return None

    def rank(group: int) -> int:
        if group not in inputs.ranks:
            kappa = FactorForm(inputs.slice(0, inputs.blocks)[:, :, group].flatten(0, 1)).condition()
            inputs.ranks[group] = kappa.rank if kappa.resolved else geometry.n_params
        return inputs.ranks[group]

    return lambda: sum(rank(geometry.group(unit)) for unit in units)


def within_features(
    form: FactorForm | DualForm | SummedForm, kappa: ConditionNumber, features: RankBound | None, rtol: float
) -> ConditionNumber:
    """``kappa``, or κ with the numerical rank of Ĥ, if H = ĤᵀSĤ certainly has as many nonzero eigenvalues.

    The null space of Ĥ is one of H, whatever the rounding of S.
    """
    if kappa.resolved or features is None or kappa.rank == 0 or kappa.rank != (limit := features()):
        return kappa
    bounded = replace(form, rank_bound=lambda: limit).condition(rtol=rtol)
    return replace(bounded, rank_decision="numerical") if bounded.resolved else kappa


def signed_norm(K: torch.Tensor, sign: torch.Tensor | None) -> float:
    """‖Fᵀ diag(s) F‖_F from K = FFᵀ: its square is Σ s_i s_j K_ij²."""
    if sign is None:
        return estimates.norm_of(K)
    scale = float(K.abs().max()) or 1.0
    return scale * float(sign @ (K / scale).square() @ sign) ** 0.5


def factors_of(hessians: Sequence[FactoredHessian]) -> list[torch.Tensor]:
    """Factors of Hessians; those with rows of one shape and one type of P are formed together."""
    factor_by_index: dict[int, torch.Tensor] = {}
    kinds = [(hessian.root is None, hessian.units, type(hessian.P)) for hessian in hessians]
    for members in statistics.by_shape([hessian.rows for hessian in hessians], kinds):
        rows, units = statistics.stacked([hessians[k].rows for k in members]), hessians[members[0]].units
        roots = [root for k in members if (root := hessians[k].root) is not None]
        root = statistics.stacked(roots)[..., None] if roots else None
        systems = [P for k in members if (P := hessians[k].P) is not None]
        if systems:
            factors = type(systems[0]).multiplied_each(rows, systems, units, root)
        else:
            factors = (rows if root is None else rows * root).unbind()
        factor_by_index |= zip(members, factors, strict=True)
    return [factor_by_index[k] for k in range(len(hessians))]


def conditions_of(hessians: Sequence[FactoredHessian], *, rtol: float = 1e-8) -> list[ConditionNumber]:
    """κ of several Hessians; factors of one shape are decomposed together."""
    forms = [block.form(factor) for block, factor in zip(hessians, factors_of(hessians), strict=True)]
    kappas = conditions(forms, rtol=rtol)
    return [block.settled(form, kappa, rtol=rtol) for block, form, kappa in zip(hessians, forms, kappas, strict=True)]


def traces_of(hessians: Sequence[FactoredHessian]) -> list[float]:
    """Traces of Hessians; those of one shape are summed up together."""
    traces = [0.0] * len(hessians)
    factors = factors_of(hessians)
    for members in statistics.by_shape(factors, [hessian.sign is None for hessian in hessians]):
        squares = statistics.stacked([factors[k] for k in members]).square()
        signs = [sign for k in members if (sign := hessians[k].sign) is not None]
        if signs:
            squares = squares * statistics.stacked(signs)[..., None]
        # the distribution of a sum over several threads depends on the other sums
        with threads.one_thread():
            sums = squares.sum(-2).sum(-1).tolist()
        for k, trace in zip(members, sums, strict=True):
            traces[k] = trace
    return traces


def spread_in(spread: torch.Tensor | None, P: base.Preconditioner | None, units: int) -> np.ndarray | None:
    """Spread |P|ᵀd of PᵀHP, from the spread d of H."""
    if spread is None:
        return None
    if P is not None:
        spread = P.carried(spread[None], units)[0]
    return spread.cpu().numpy()


def noise_of(spread: torch.Tensor | None, P: base.Preconditioner | None, units: int) -> float:
    """Round-off ‖|P|ᵀd‖² in PᵀHP, in units of eps."""
    bounds = spread_in(spread, P, units)
    return 0.0 if bounds is None else float(bounds @ bounds)
