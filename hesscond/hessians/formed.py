"""Hessians known as matrices, with bounds of the rounding in their entries, and those of units from separators."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch

from hesscond import causes
from hesscond.capture import backward
from hesscond.capture.captured import EPS, TINY
from hesscond.capture.separators import ParameterRows, Separators
from hesscond.hessians.coordinates import base
from hesscond.hessians.factored import within_features
from hesscond.hessians.network_operator import HessianOperator
from hesscond.problem import graph
from hesscond.spectra import ConditionNumber
from hesscond.spectra.forms import SummedForm
from hesscond.spectra.solvers.base import RankBound

#: Matrices of the order of H that its eigenvalues take in addition to H, in plain coordinates and in others; number for
#: Jacobi's method.
EIGENVALUES, CHANGED, JACOBI = 5, 8, 12


@dataclass(frozen=True)
class FormedHessian(base.KeptHessian):
    """H itself, differentiated in the parameters; eigenvalues below its rounding are unresolved."""

    H: torch.Tensor  # (k, k) float64
    #: (k,) d such that a relative change eps of the summands changes entry (i, j) by eps·d_i·d_j
    spread: torch.Tensor
    terms: int  # products summed up for an entry
    units: int = 1  # number of units, on each of which a preconditioner acts
    #: reason why summands may have underflowed, so that no small eigenvalue counts as zero
    vanishing: causes.Cause = causes.NOTHING
    memory: int | None = None  # bytes; None: unlimited
    features: RankBound | None = None  # returns the largest rank that Ĥ leaves, see `within_features`

    @property
    def order(self) -> int:
        return len(self.H)

    def matrix(self) -> torch.Tensor:
        if self.P is None:
            return self.H
        dense = self._dense(self.P)
        product = dense.T @ self.H @ dense
        return (product + product.T) / 2

    def _dense(self, P: base.Preconditioner) -> torch.Tensor:
        return P.dense(self.units, self.order // self.units, self.H.device)

    def scales(self) -> torch.Tensor:
        return torch.maximum(self.H.diagonal().abs().sqrt(), base.LOST_IN_SQUARE * self.spread)

    def damped_condition(self, damping: float, *, rtol: float) -> ConditionNumber:
        H, spread = self.matrix(), self._spread().square()
        H = H + damping * torch.eye(len(H), dtype=H.dtype, device=H.device)
        damped = FormedHessian(H, (spread + damping).sqrt(), self.terms + 1, memory=self.memory)
        return damped.condition_number(rtol=rtol)

    def _spread(self) -> torch.Tensor:
        return self.spread if self.P is None else self._dense(self.P).abs().T @ self.spread

    def condition_number(self, *, rtol: float = 1e-8) -> ConditionNumber:
        graded = self.memory is None or 8 * JACOBI * self.order**2 <= self.memory
        least = (lambda: self.order) if self.vanishing else None
        form = SummedForm(self.matrix(), self._spread(), self.terms, graded, least_rank=least, lost=self.vanishing)
        return within_features(form, form.condition(rtol=rtol), self.features, rtol)


#: Two computations of a product may differ by this share of it, or by this multiple of their round-off.
TOLERANCE, CONFIRMED = 1e-11, 64.0


@dataclass(frozen=True)
class UnitMatrices:
    """Hessians of the units of a block, as matrices."""

    H: torch.Tensor  # (u, w, w)
    #: (u, w) d such that a relative change eps of the summands changes entry (k, l) of a unit's by eps·d_k·d_l
    spread: torch.Tensor
    terms: list[int]  # products summed up, for each unit
    difference: float = math.nan  # relative difference of the largest matrix from a product of the operator

    def confirmed(self, operator: HessianOperator, index: torch.Tensor) -> UnitMatrices | None:
        """Return the matrices with the rounding that products show; None: a product and a matrix differ by more."""
        signs, chosen, shown, difference = backward.scattered_signs(operator.point), backward.some(self.H), 0.0, 0.0
        spread = self.spread.square().add(float((operator @ signs).abs().amax())).clamp_min(TINY).sqrt()
        for unit in chosen:
            rows, d = index[unit], spread[unit]
            v = torch.zeros_like(signs).index_copy_(0, rows, signs[rows] / d)
            product = (operator @ v)[rows]
            apart, size = product - self.H[unit] @ v[rows], float(product.norm())
            if not float(apart.norm()) <= max(TOLERANCE * size, CONFIRMED * EPS * float(d.norm()) * len(d)):
                return None
            shown = max(shown, float((apart.abs() / d).amax()) * (backward.SHARE / EPS))
            if unit == chosen[0]:
                difference = float(apart.norm()) / (size or 1.0)
        # both may be exact by chance; entries are rounded all the same
        least = torch.minimum(spread, self.H.abs().amax(2).sqrt())
        return replace(self, spread=torch.maximum(spread * min(1.0, shown) ** 0.5, least), difference=difference)


def unit_matrices(
    H: HessianOperator, blocks: Mapping[str, tuple[HessianOperator, torch.Tensor]], memory: int, matrices: int
) -> dict[str, UnitMatrices]:
    """Hessians of the units of blocks; those without a separator, or that differ from a product, are left out.

    ``blocks`` have an operator `restricted` from H, and the rows (u, w) of the units; κ of a unit takes ``matrices``
    more matrices of its order. The largest matrix of a block and some others are compared.
    """
    hessians: dict[str, UnitMatrices] = {}
    left = dict(blocks)
    for number, linearization in H.linearizations():
        loss, weight = linearization.evaluation.loss, H.weights[number] / H.total_mass
        wanted = [
            ParameterRows(
                name,
                operator.leaves_of(linearization.leaves),
                operator.order,
                index,
                operator.layout.tensors_of,
                operator.layout.vector_of,
            )
            for name, (operator, index) in left.items()
        ]
        budget = backward.Budget(memory, 1, linearization.largest, H.device)
        with graph.differentiable():
            separators = Separators(loss, wanted, linearization.evaluation.samples, budget)
            for rows in wanted:
                budget.taken = 8 * sum(block.H.numel() for block in hessians.values())
                segment = separators.segment(rows, rows.index.numel(), rows.index.shape[1])
                if segment is None or not separators.room_for_rows(segment, rows.index, matrices):
                    hessians.pop(rows.name, None)
                    del left[rows.name]
                else:
                    H_batch, spread, terms = separators.rows(segment, rows.index)
                    if weight != 1:
                        H_batch, spread = H_batch.mul_(weight), spread * weight**0.5
                    if (sums := hessians.get(rows.name)) is not None:
                        H_batch, spread = sums.H.add_(H_batch), torch.hypot(sums.spread, spread)
                        terms = [mine + count for mine, count in zip(sums.terms, terms, strict=True)]
                    hessians[rows.name] = UnitMatrices(H_batch, spread, terms)
                del segment
                separators.release(rows)
        del linearization
    confirmed = {name: block.confirmed(*blocks[name]) for name, block in hessians.items()}
    return {name: block for name, block in confirmed.items() if block is not None}
