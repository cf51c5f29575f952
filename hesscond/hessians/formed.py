"""Hessian known as a matrix, with a bound of the rounding in its entries."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from hesscond.causes import NOTHING, Cause
from hesscond.hessians.coordinates.base import LOST_IN_SQUARE, KeptHessian, Preconditioner
from hesscond.spectra import ConditionNumber
from hesscond.spectra.forms import SummedForm

#: Matrices of the order of H that its eigenvalues take in addition to H, in plain coordinates and in others; number for
#: Jacobi's method.
EIGENVALUES, CHANGED, JACOBI = 5, 8, 12


@dataclass(frozen=True)
class FormedHessian(KeptHessian):
    """H itself, differentiated in the parameters; eigenvalues below its rounding are unresolved."""

    H: torch.Tensor  # (k, k) float64
    #: (k,) d such that a relative change eps of the summands changes entry (i, j) by eps·d_i·d_j
    spread: torch.Tensor
    terms: int  # products summed up for an entry
    units: int = 1  # number of units, on each of which a preconditioner acts
    #: reason why summands may have underflowed, so that no small eigenvalue counts as zero
    vanishing: Cause = NOTHING
    memory: int | None = None  # bytes; None: unlimited

    @property
    def order(self) -> int:
        return len(self.H)

    def matrix(self) -> torch.Tensor:
        if self.P is None:
            return self.H
        dense = self._dense(self.P)
        product = dense.T @ self.H @ dense
        return (product + product.T) / 2

    def _dense(self, P: Preconditioner) -> torch.Tensor:
        return P.dense(self.units, self.order // self.units, self.H.device)

    def scales(self) -> torch.Tensor:
        return torch.maximum(self.H.diagonal().abs().sqrt(), LOST_IN_SQUARE * self.spread)

    def damped(self, damping: float) -> FormedHessian:
        H, spread = self.matrix(), self._spread().square()
        H = H + damping * torch.eye(len(H), dtype=H.dtype, device=H.device)
        return FormedHessian(H, (spread + damping).sqrt(), self.terms + 1, memory=self.memory)

    def _spread(self) -> torch.Tensor:
        return self.spread if self.P is None else self._dense(self.P).abs().T @ self.spread

    def condition_number(self, *, rtol: float = 1e-8) -> ConditionNumber:
        graded = self.memory is None or 8 * JACOBI * self.order**2 <= self.memory
        least = (lambda: self.order) if self.vanishing else None
        return SummedForm(self.matrix(), self._spread(), self.terms, least, self.vanishing, graded).condition(rtol=rtol)
