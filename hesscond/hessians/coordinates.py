"""Linear changes of variables of layers, as operators: θ = P z, unit by unit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from hesscond.errors import ConfigError
from hesscond.hessians.network_operator import NetworkOperator
from hesscond.hessians.parameters import UnitLayout
from hesscond.hessians.preconditioner import Preconditioner, UnitPreconditioner
from hesscond.operators import LinearOperator


class UnitCoordinates(LinearOperator):
    """Diag(P_1 … P_m) (m n̂, m k) for P (n̂, k): every one of m units of a layer in the coordinates ŵ_i = P_i z_i.

    Parameters
    ----------
    P
        The change of variables of a unit, the same for all or another for each.
    units
        Those that the rows belong to.
    n_params
        n̂.
    dtype, device
        Of the operator; P itself works in float64.
    """

    def __init__(
        self,
        P: Preconditioner,
        units: Sequence[int],
        n_params: int,
        *,
        dtype: torch.dtype = torch.float64,
        device: torch.device | str = "cpu",
    ) -> None:
        self.n_params = n_params
        # one product for all units, or one for each
        self._parts = [P.of_unit(unit) for unit in units] if isinstance(P, UnitPreconditioner) else [P]
        self._units = len(units) // len(self._parts)
        one = torch.zeros(1, n_params, dtype=torch.float64, device=device)
        self.columns = self._parts[0].right_multiply(one).shape[1]
        super().__init__((len(units) * n_params, len(units) * self.columns), dtype, device)

    def multiply(self, vectors: torch.Tensor) -> torch.Tensor:
        """ŵ_i = P_i z_i for every unit."""
        parts = vectors.split(self._units * self.columns)
        return torch.cat(
            [
                self._joined(P.multiply(self._side_by_side(part), self.n_params), vectors)
                for P, part in zip(self._parts, parts, strict=True)
            ]
        )

    def multiply_adjoint(self, vectors: torch.Tensor) -> torch.Tensor:
        """P_iᵀ ŵ_i for every unit."""
        parts = vectors.split(self._units * self.n_params)
        return torch.cat(
            [
                self._joined(P.multiply_adjoint(self._side_by_side(part)), vectors)
                for P, part in zip(self._parts, parts, strict=True)
            ]
        )

    def _side_by_side(self, vectors: torch.Tensor) -> torch.Tensor:
        """(·, units·c): one column for every unit and every one of c vectors."""
        return vectors.unflatten(0, (self._units, -1)).transpose(0, 1).flatten(1)

    def _joined(self, columns: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        return columns.unflatten(1, (self._units, -1)).transpose(0, 1).flatten(0, 1).to(like.dtype)


class Unchanged(LinearOperator):
    """The identity (n, n)."""

    def __init__(self, order: int, *, dtype: torch.dtype = torch.float64, device: torch.device | str = "cpu") -> None:
        super().__init__((order, order), dtype, device)

    def multiply(self, vectors: torch.Tensor) -> torch.Tensor:
        """V."""
        return vectors.clone()

    def multiply_adjoint(self, vectors: torch.Tensor) -> torch.Tensor:
        """V."""
        return vectors.clone()


class LayerCoordinates(LinearOperator):
    """Changes of variables of several layers, one after another along the diagonal: rectangular blocks."""

    def __init__(self, blocks: Sequence[LinearOperator]) -> None:
        self.blocks = list(blocks)
        self.operands = self.blocks
        self._rows, self.columns = [b.shape[0] for b in blocks], [b.shape[1] for b in blocks]
        super().__init__((sum(self._rows), sum(self.columns)), blocks[0].dtype, blocks[0].device)

    def multiply(self, vectors: torch.Tensor) -> torch.Tensor:
        """Block by block."""
        parts = vectors.split(self.columns)
        return torch.cat([block.multiply(part) for block, part in zip(self.blocks, parts, strict=True)])

    def multiply_adjoint(self, vectors: torch.Tensor) -> torch.Tensor:
        """Block by block."""
        parts = vectors.split(self._rows)
        return torch.cat([block.multiply_adjoint(part) for block, part in zip(self.blocks, parts, strict=True)])


def coordinates_of(operator: NetworkOperator, preconditioners: Mapping[str, Preconditioner | None]) -> LayerCoordinates:
    """P of θ = P z for an operator of layers, so that ``Congruence(operator, P)`` is PᵀHP.

    Parameters
    ----------
    operator
        Made with ``layers=``.
    preconditioners
        By layer; a layer that is absent, or None, stays as it is.

    Raises
    ------
    ConfigError
        The operator is not one of layers, or does not have one of those named.
    """
    layout = unit_layout(operator)
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
            Unchanged(size, dtype=operator.dtype, device=operator.device)
            if P is None
            else UnitCoordinates(P, layout.units[name], n_params, dtype=operator.dtype, device=operator.device)
        )
    return LayerCoordinates(blocks)


def unit_layout(operator: NetworkOperator) -> UnitLayout:
    """The layout of an operator of layers.

    Raises
    ------
    ConfigError
        Its parameters are not in the order of units.
    """
    if not isinstance(operator.layout, UnitLayout):
        raise ConfigError("the parameters of this operator are not ordered by unit: make it with layers=")
    return operator.layout
