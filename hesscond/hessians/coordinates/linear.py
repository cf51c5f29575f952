"""Coordinates ŵ = P z with P a matrix, diagonal or a Kronecker product, and any P as an operator."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from hesscond.errors import ConfigError
from hesscond.hessians.coordinates.base import LinearCoordinates, Preconditioner, Product
from hesscond.hessians.network_operator import NetworkOperator
from hesscond.operators import Diagonal, LinearOperator


@dataclass(frozen=True)
class DensePreconditioner(Preconditioner):
    """P given as a matrix (n̂, k)."""

    P: torch.Tensor
    name: str = "P"
    cancels: bool = True

    def right_multiply(self, rows: torch.Tensor) -> torch.Tensor:
        return rows @ self.P.to(rows)


@dataclass(frozen=True)
class Scaling(Preconditioner):
    """P = diag(d)."""

    d: torch.Tensor  # (n̂,)
    name: str = "diagonal"

    def right_multiply(self, rows: torch.Tensor) -> torch.Tensor:
        return rows * self.d.to(rows)

    def carried(self, rows: torch.Tensor, units: int) -> torch.Tensor:
        return (rows.unflatten(1, (units, -1)) * self.d.to(rows).abs()).flatten(1)

    def scaled_norm(self, scales: torch.Tensor, units: int) -> float:
        return float((scales.view(units, -1) * self.d.to(scales)).square().sum())


@dataclass(frozen=True)
class UnitScaling(Scaling):
    """P_i = diag(d_i), with one row of ``d`` for each unit."""

    d: torch.Tensor  # (m, n̂)
    name: str = "diagonal, unit by unit"
    same_for_units = False

    def of_unit(self, unit: int) -> Scaling:
        return Scaling(self.d[unit].to(torch.float64), self.name)

    def by_unit(self, units: Sequence[int]) -> list[Preconditioner]:
        return [self.of_unit(unit) for unit in units]


class Kronecker(LinearCoordinates):
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

    cancels = True

    def __init__(self, left: torch.Tensor, right: LinearCoordinates, name: str = "L ⊗ R") -> None:
        self.left, self.right, self.name = left.to(torch.float64), right, name

    def of_unit(self, unit: int) -> Preconditioner:
        """L_ii R_i; a ConfigError if L is not diagonal."""
        assert self.left is not None
        if self.left.shape[0] != self.left.shape[1] or bool((self.left != self.left.diagonal().diag()).any()):
            raise ConfigError(
                f"{self.name!r} acts across the units of a layer, and the Hessian of one unit has no such coordinates: "
                "measure at level='layer' or level='network'"
            )
        return Product(self.right.of_unit(unit), Scaling(self.left[unit, unit, None], f"L of unit {unit}"))

    def by_unit(self, units: Sequence[int]) -> list[Preconditioner]:
        """R_i for each of the units between L and R."""
        return self.right.by_unit(units)


class UnitCoordinates(LinearOperator):
    """P of m units of a layer as an operator: diag(P_1 … P_m) (m n̂, m k), or (L ⊗ I) diag(P_1 … P_m') (m n̂, m' k)."""

    def __init__(
        self,
        P: LinearCoordinates,
        units: Sequence[int],
        n_params: int,
        *,
        dtype: torch.dtype = torch.float64,
        device: torch.device | str = "cpu",
    ) -> None:
        self.n_params = n_params
        P = P.of_unit(units[0]) if len(units) == 1 else P
        self._joint = P if P.shared_factors else None
        if self._joint is not None:
            none = torch.zeros(1, len(units) * n_params, dtype=torch.float64, device=device)
            columns = self._joint.multiplied(none, len(units)).shape[1]
            super().__init__((len(units) * n_params, columns), dtype, device)
            return
        self._left = P.left
        inner: Sequence[int] = [0] if P.unstructured else units
        inner = inner if self._left is None else range(self._left.shape[1])
        # one product for all units, or one for each
        self._parts = P.by_unit(inner)
        self._units = len(inner) // len(self._parts)
        #: Parameters that a product takes.
        self._order = n_params if self._left is not None else len(units) * n_params // len(inner)
        one = torch.zeros(1, self._order, dtype=torch.float64, device=device)
        self._columns = [self._units * P.right_multiply(one).shape[1] for P in self._parts]
        super().__init__((len(units) * n_params, sum(self._columns)), dtype, device)

    def multiply(self, vectors: torch.Tensor) -> torch.Tensor:
        if self._joint is not None:
            return self._joint.expanded(vectors.T.to(torch.float64)).T.to(vectors.dtype)
        parts = vectors.split(self._columns)
        found = torch.cat(
            [
                self._joined(P.multiply(self._side_by_side(part), self._order), vectors)
                for P, part in zip(self._parts, parts, strict=True)
            ]
        )
        return found if self._left is None else self._mixed(found, self._left)

    def multiply_adjoint(self, vectors: torch.Tensor) -> torch.Tensor:
        if self._joint is not None:
            rows = vectors.T.to(torch.float64)
            return self._joint.multiplied(rows, rows.shape[1] // self.n_params).T.to(vectors.dtype)
        mixed = vectors if self._left is None else self._mixed(vectors, self._left.T)
        parts = mixed.split(self._units * self._order)
        return torch.cat(
            [
                self._joined(P.multiply_adjoint(self._side_by_side(part)), vectors)
                for P, part in zip(self._parts, parts, strict=True)
            ]
        )

    def _side_by_side(self, vectors: torch.Tensor) -> torch.Tensor:
        """Columns of all units of c vectors side by side, (·, units·c)."""
        return vectors.unflatten(0, (self._units, -1)).transpose(0, 1).flatten(1)

    def _joined(self, columns: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        return columns.unflatten(1, (self._units, -1)).transpose(0, 1).flatten(0, 1).to(like.dtype)

    def _mixed(self, vectors: torch.Tensor, left: torch.Tensor) -> torch.Tensor:
        """(L ⊗ I) V."""
        by_unit = vectors.unflatten(0, (-1, self.n_params))
        return (left.to(vectors) @ by_unit.flatten(1)).view(-1, *by_unit.shape[1:]).flatten(0, 1)


class LayerCoordinates(LinearOperator):
    """Block-diagonal change of variables of several layers, with rectangular blocks."""

    def __init__(self, blocks: Sequence[LinearOperator]) -> None:
        self.blocks = list(blocks)
        self.operands = self.blocks
        self._rows, self.columns = [b.shape[0] for b in blocks], [b.shape[1] for b in blocks]
        super().__init__((sum(self._rows), sum(self.columns)), blocks[0].dtype, blocks[0].device)

    def multiply(self, vectors: torch.Tensor) -> torch.Tensor:
        parts = vectors.split(self.columns)
        return torch.cat([block.multiply(part) for block, part in zip(self.blocks, parts, strict=True)])

    def multiply_adjoint(self, vectors: torch.Tensor) -> torch.Tensor:
        parts = vectors.split(self._rows)
        return torch.cat([block.multiply_adjoint(part) for block, part in zip(self.blocks, parts, strict=True)])


def coordinates_of(
    operator: NetworkOperator, preconditioners: Mapping[str, LinearCoordinates | None]
) -> LayerCoordinates:
    """P of θ = P z for an operator of layers, so that ``Congruence(operator, P)`` is PᵀHP."""
    layout = operator.unit_layout
    for name in preconditioners:
        if name not in layout.parts:
            raise ConfigError(
                f"the operator has no layer {name!r} to change the coordinates of: {', '.join(layout.parts)}"
            )
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
