"""Coordinates ŵ = P z with P a matrix, diagonal, a Kronecker product or from statistics, and any P as an operator."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
import torch
from torch.nn import functional

from hesscond.capture.statistics import stacked
from hesscond.errors import ConfigError, NotFiniteError
from hesscond.hessians.coordinates.base import Preconditioner, Product
from hesscond.hessians.network_operator import NetworkOperator
from hesscond.operators import Diagonal, LinearOperator


@dataclass(frozen=True)
class DensePreconditioner(Preconditioner):
    """P given as a matrix (n̂, k)."""

    P: torch.Tensor
    name: str = "P"
    cancels: bool = True

    def right_multiply(self, rows: torch.Tensor) -> torch.Tensor:
        if len(self.P) != (n := rows.shape[-1]):
            raise ConfigError(f"coordinates {self.name!r} are for {len(self.P)} parameters of a unit, which has {n}")
        return rows @ self.P.to(rows)


@dataclass(frozen=True)
class Scaling(Preconditioner):
    """P = diag(d), the same for all units, or P_i = diag(d_i) with one row of ``d`` for each unit."""

    d: torch.Tensor  # (n̂,) or (m, n̂)
    name: str = "diagonal"

    @property
    def same_for_units(self) -> bool:  # type: ignore[override]
        return self.d.ndim == 1

    def right_multiply(self, rows: torch.Tensor) -> torch.Tensor:
        return rows * self.d.flatten().to(rows)

    def multiplied(self, rows: torch.Tensor, units: int) -> torch.Tensor:
        if self.d.shape[-1] not in (1, n := rows.shape[1] // units):
            raise ConfigError(f"coordinates {self.name!r} scale {self.d.shape[-1]} parameters of a unit, which has {n}")
        return (rows.unflatten(1, (units, -1)) * self.d.to(rows)).flatten(1)

    def of_unit(self, unit: int) -> Preconditioner:
        return self if self.same_for_units else Scaling(self.d[unit].to(torch.float64), self.name)

    def carried(self, rows: torch.Tensor, units: int) -> torch.Tensor:
        return (rows.unflatten(1, (units, -1)) * self.d.to(rows).abs()).flatten(1)

    def scaled_norm(self, scales: torch.Tensor, units: int) -> float:
        return float((scales.view(units, -1) * self.d.to(scales)).square().sum())


class Kronecker(Preconditioner):
    """P = L ⊗ R of a layer: W = L Z Rᵀ for the parameters W (m, n̂), one row [b_i, w_i] a unit.

    Parameters
    ----------
    left : (m, m')
        L, which acts across units.
    right
        R, which acts on the inputs: the same for all units, or R_1 … R_m' with P = (L ⊗ I) diag(R_1 … R_m').
    name
        Name of the coordinates in the log.
    """

    same_for_units = False
    unstructured = True
    cancels = True

    def __init__(self, left: torch.Tensor, right: Preconditioner, name: str = "L ⊗ R") -> None:
        if not isinstance(right, Preconditioner):
            raise ConfigError(
                "right must be a Preconditioner: give hesscond.hessians.DensePreconditioner(R) for a matrix"
            )
        self.left, self.right, self.name = left.to(torch.float64), right, name

    def of_unit(self, unit: int) -> Preconditioner:
        """L_ii R_i; a ConfigError if L is not diagonal."""
        if self.left.shape[0] != self.left.shape[1] or bool((self.left != self.left.diagonal().diag()).any()):
            raise ConfigError(
                f"{self.name!r} acts across the units of a layer, and the Hessian of one unit has no such coordinates: "
                "measure at level='layer' or level='network'"
            )
        return Product(self.right.of_unit(unit), Scaling(self.left[unit, unit, None], f"L of unit {unit}"))

    def _mixed(self, rows: torch.Tensor, left: torch.Tensor) -> torch.Tensor:
        """``rows`` (r, m n̂) times L ⊗ I."""
        return (left.to(rows).T @ rows.unflatten(1, (len(left), -1))).flatten(1)

    def right_multiply(self, rows: torch.Tensor) -> torch.Tensor:
        return self.right.multiplied(self._mixed(rows, self.left), self.left.shape[1])

    def carried(self, rows: torch.Tensor, units: int) -> torch.Tensor:
        return self.right.carried(self._mixed(rows, self.left.abs()), self.left.shape[1])

    def scaled_norm(self, scales: torch.Tensor, units: int) -> float:
        mixed = self._mixed(scales.square()[None], self.left.square())[0]
        return self.right.scaled_norm(mixed.sqrt(), self.left.shape[1])

    def __matmul__(self, other: Preconditioner) -> Preconditioner:
        return Kronecker(self.left, self.right @ other, f"{self.name}, then {other.name}")


class UnitCoordinates(LinearOperator):
    """P of m units of a layer as an operator (m n̂, k)."""

    def __init__(
        self,
        P: Preconditioner,
        units: Sequence[int],
        n_params: int,
        *,
        dtype: torch.dtype = torch.float64,
        device: torch.device | str = "cpu",
    ) -> None:
        self._P, self._m = P.of_unit(units[0]) if len(units) == 1 else P, len(units)
        rows = torch.zeros(1, len(units) * n_params, dtype=torch.float64, device=device)
        super().__init__((rows.shape[1], self._P.multiplied(rows, self._m).shape[1]), dtype, device)

    def multiply(self, vectors: torch.Tensor) -> torch.Tensor:
        return self._P.expanded(vectors.T.to(torch.float64), self._m, self.shape[0]).T.to(vectors.dtype)

    def multiply_adjoint(self, vectors: torch.Tensor) -> torch.Tensor:
        return self._P.multiplied(vectors.T.to(torch.float64), self._m).T.to(vectors.dtype)


class LayerCoordinates(LinearOperator):
    """Block-diagonal change of variables of several layers, with rectangular blocks."""

    def __init__(self, blocks: Sequence[LinearOperator]) -> None:
        self.blocks = list(blocks)
        self._rows, self.columns = [b.shape[0] for b in blocks], [b.shape[1] for b in blocks]
        super().__init__((sum(self._rows), sum(self.columns)), blocks[0].dtype, blocks[0].device)

    def multiply(self, vectors: torch.Tensor) -> torch.Tensor:
        parts = vectors.split(self.columns)
        return torch.cat([block.multiply(part) for block, part in zip(self.blocks, parts, strict=True)])

    def multiply_adjoint(self, vectors: torch.Tensor) -> torch.Tensor:
        parts = vectors.split(self._rows)
        return torch.cat([block.multiply_adjoint(part) for block, part in zip(self.blocks, parts, strict=True)])


def coordinates_of(operator: NetworkOperator, preconditioners: Mapping[str, Preconditioner | None]) -> LayerCoordinates:
    """P of θ = P z for an operator of layers, so that ``Congruence(operator, P)`` is PᵀHP."""
    layout = operator.unit_layout
    blocks: list[LinearOperator] = []
    for name, where in layout.parts.items():
        P, n_params = preconditioners.get(name), layout.geometries[name].n_params
        size = where.stop - where.start
        blocks.append(
            Diagonal(operator.point.new_ones(size))
            if P is None
            else UnitCoordinates(P, layout.units[name], n_params, dtype=operator.dtype, device=operator.device)
        )
    return LayerCoordinates(blocks)


@dataclass(frozen=True)
class CentringScaling(Preconditioner):
    r"""P = (1/q) U D with U = [[1, −μᵀ], [0, I]] and D = diag(1, 1/σ): ĤP is Ĥ, centred and scaled.

    Features with σ_j = 0 are left out (their centred column is zero on the samples that gave σ): P then has fewer
    columns than rows. A layer without bias has nothing to centre with: P = D/q.

    Source: Lange, Helfrich and Ye, JMLR 23 (2022), eqs. (13)-(15).

    Attributes
    ----------
    mu, sigma : (n,) float64
    bias
        Whether the layer has one.
    q
        Scalar factor; κ does not depend on it.
    name
        Which statistics these are.

    Raises
    ------
    NotFiniteError
        μ or σ is NaN or infinite.
    """

    mu: torch.Tensor
    sigma: torch.Tensor
    bias: bool = True
    q: float = 1.0
    name: str = "BNP"

    def __post_init__(self) -> None:
        if not math.isfinite(self.mu.sum() + self.sigma.sum()):
            raise NotFiniteError(f"{self.name}: the mean or deviation of a feature is NaN or infinite")

    def right_multiply(self, rows: torch.Tensor) -> torch.Tensor:
        """``rows`` (m, n + 1) times P, the features centred before they are scaled."""
        return self.multiplied_each(rows[None], [self], 1)[0]

    @classmethod
    def multiplied_each(
        cls, rows: torch.Tensor, systems: Sequence[Self], units: int, root: torch.Tensor | None = None
    ) -> Sequence[torch.Tensor]:
        if units > 1:
            return super().multiplied_each(rows, systems, units, root)
        mu, sigma = (stacked([getattr(P, name) for P in systems]) for name in ("mu", "sigma"))
        # the first column is left alone: minus 0, over 1
        if systems[0].bias:
            mu, sigma = (functional.pad(part, (1, 0), value=first) for part, first in ((mu, 0.0), (sigma, 1.0)))
        live = sigma != 0
        scale = sigma.where(live, 1.0) * sigma.new_tensor([P.q for P in systems])[:, None]
        if systems[0].bias:
            rows = torch.addcmul(rows, rows[..., :1], mu[:, None], value=-1)
        product = rows / scale[:, None]
        if root is not None:
            product = product * root
        kept = live.sum(1).tolist()
        columns = live.nonzero()[:, 1].split(kept)
        return [
            matrix if matrix.shape[1] == count else matrix.gather(1, at.expand(len(matrix), -1))
            for matrix, count, at in zip(product, kept, columns, strict=True)
        ]

    @property
    def kappa_D(self) -> float:
        """κ(D) = max(1, σ) / min(1, σ) over the features with σ > 0 (without bias: max σ / min σ)."""
        return scaling_conditions(self.sigma[None], bias=self.bias)[0]


def scaling_conditions(sigmas: torch.Tensor, *, bias: bool) -> list[float]:
    """κ of D = diag(1, 1/σ), or diag(1/σ) without bias, over the features with σ > 0, for every row of σ (k, n)."""
    values = sigmas.cpu().numpy()
    live = values != 0
    least = values.min(1, where=live, initial=1.0 if bias else math.inf)
    most = values.max(1, where=live, initial=1.0 if bias else -math.inf)
    with np.errstate(over="ignore", invalid="ignore"):
        kappas: list[float] = (most / least).tolist()
    return kappas


def by_group(
    parts: Sequence[Preconditioner], units: int, order: int, *, device: torch.device | None = None
) -> Preconditioner:
    """P of a layer with one P_g for each of its groups: a `GroupedPreconditioner`, unless there is only one."""
    return parts[0] if len(parts) == 1 else GroupedPreconditioner(parts, units, order, device=device)


class GroupedPreconditioner(Preconditioner):
    """P_g for the units of group g of a grouped convolution.

    Parameters
    ----------
    parts
        P_1 … P_G, padded with columns of zeros to the same width.
    units
        Number of units of the layer, a multiple of G.
    order
        n̂.
    device
        Where the parts are.
    """

    same_for_units = False

    def __init__(
        self, parts: Sequence[Preconditioner], units: int, order: int, *, device: torch.device | None = None
    ) -> None:
        row = torch.zeros(1, order, dtype=torch.float64, device=device)
        widths = [P.right_multiply(row).shape[1] for P in parts]
        # columns of zeros behind those of a P that has fewer
        self.parts = [
            P
            if k == max(widths)
            else Product(P, DensePreconditioner(torch.eye(k, max(widths), device="cpu"), cancels=False))
            for P, k in zip(parts, widths, strict=True)
        ]
        self.units, self.name = units, parts[0].name

    def right_multiply(self, rows: torch.Tensor) -> torch.Tensor:
        return self.multiplied(rows, self.units)

    def of_unit(self, unit: int) -> Preconditioner:
        return self.parts[unit * len(self.parts) // self.units]
