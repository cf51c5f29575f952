"""The Hessian of one output unit, ∇²_ŵ L = Ĥᵀ S Ĥ, kept as its factor."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from hesscond.capture import LayerCapture
from hesscond.hessians.preconditioner import Preconditioner
from hesscond.spectra import ConditionNumber, factor_conditions, factor_eigenvalues, signed_condition
from hesscond.spectra.factored import EPS, error_factor
from hesscond.spectra.signed import signed_eigenvalues


@dataclass(frozen=True)
class UnitHessian:
    """Ĥᵀ S Ĥ of one unit with ŵ = [b, w] (or w alone), in plain or in preconditioned coordinates.

    Attributes
    ----------
    rows : (m, n̂) float64
        Ĥ, or after streaming a triangular factor of S^½Ĥ.
    root : (m,) float64 or None
        √|S_jj|; None: all 1.
    sign : (m,) or None
        Signs of S_jj; None: S ≥ 0.
    row_error : (n̂,) or None
        Bounds, in the 2-norm, of the error in each column of ``rows``; None: they are what was asked for.
    """

    rows: torch.Tensor
    root: torch.Tensor | None
    sign: torch.Tensor | None
    row_error: torch.Tensor | None = None

    @classmethod
    def of(cls, captured: LayerCapture, unit: int) -> UnitHessian:
        """The Hessian of ``unit`` of a captured layer."""
        column = captured.units.index(unit)
        sign = None if captured.sign is None else captured.sign[:, column]
        if sign is not None and not (sign < 0).any():
            sign = None
        return cls(captured.H_hat, captured.root[:, column], sign)

    @property
    def order(self) -> int:
        """Number of parameters n̂ of the unit."""
        return self.rows.shape[1]

    def factor(self, P: Preconditioner | None = None) -> torch.Tensor:
        """|S|^½ Ĥ P (m, k): H = FᵀF where S ≥ 0, and Fᵀ diag(sign) F otherwise."""
        rows = self.rows if P is None else P.right_multiply(self.rows)
        return rows if self.root is None else rows * self.root[:, None]

    def matrix(self, P: Preconditioner | None = None) -> torch.Tensor:
        """The dense Hessian (k, k), float64, order [bias, weight row]."""
        F = self.factor(P)
        return F.T @ (F if self.sign is None else F * self.sign[:, None])

    def condition_number(self, P: Preconditioner | None = None, *, rtol: float = 1e-8) -> ConditionNumber:
        """κ(H), or κ(PᵀHP)."""
        return self.condition_numbers([P], rtol=rtol)[0]

    def condition_numbers(
        self, coordinates: Sequence[Preconditioner | None], *, rtol: float = 1e-8
    ) -> list[ConditionNumber]:
        """κ in several coordinate systems at once (None: the plain ones), cheaper than one by one."""
        factors = [self.factor(P) for P in coordinates]
        errors = [self._factor_error(P) for P in coordinates]
        if self.sign is None:
            return factor_conditions(factors, rank_bound=self._rank_bound, rtol=rtol, error=errors)
        return [
            signed_condition(
                factor, self.sign, rank_bound=self._rank_bound, rtol=rtol, error=float(np.linalg.norm(error))
            )
            for factor, error in zip(factors, errors, strict=True)
        ]

    def eigenvalues(self, P: Preconditioner | None = None) -> torch.Tensor:
        """All nonzero eigenvalues, descending."""
        F = self.factor(P)
        condition = self.condition_number(P)
        if self.sign is not None:
            values = signed_eigenvalues(F, self.sign, condition.rank)
        else:
            values = factor_eigenvalues(F, condition)
        return torch.from_numpy(np.ascontiguousarray(values))

    def _rank_bound(self) -> int:
        """Distinct active samples, or features: one for each that varies over them and one for all constant ones.

        It holds in all coordinates, since P is linear; a transformed dead feature no longer looks dead.
        """
        if self.root is None:
            return min(len(self.rows), int((self.rows != 0).any(0).sum()))
        active = torch.unique(self.rows[self.root != 0], dim=0)
        if len(active) == 0:
            return 0
        low, high = active.amin(0), active.amax(0)
        varying = low != high
        return min(len(active), int(varying.sum()) + int((low[~varying] != 0).any()))

    def _factor_error(self, P: Preconditioner | None) -> float | np.ndarray:
        """Bounds of the error in each column of the factor."""
        if self.row_error is None:
            return 0.0
        if P is None:
            return self.row_error.cpu().numpy()
        # the columns' errors, and those of the product rows·P, carried through |P|
        absolute = P.matrix(self.order, self.rows.device).abs()
        norms = torch.linalg.vector_norm(self.rows, dim=0)
        per_column = self.row_error + error_factor(*self.rows.shape) * EPS * norms
        return (per_column @ absolute).cpu().numpy()
