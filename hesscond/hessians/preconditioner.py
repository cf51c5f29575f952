"""Linear changes of variables ŵ = P z of a layer's unit parameters."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import cached_property

import torch

from hesscond.errors import ConfigError, NotFiniteError


class Preconditioner(ABC):
    """P of ŵ = P z, known by what it does to the right of a matrix with one column a parameter of ŵ.

    The Hessian in z is PᵀHP = (ĤP)ᵀ S (ĤP). Subclasses write `right_multiply` and carry `name`; the rest follows.
    ``Q @ P`` is the change of variables ŵ = Q P z. One that is another for every unit is a `UnitPreconditioner`.
    """

    name: str

    @abstractmethod
    def right_multiply(self, rows: torch.Tensor) -> torch.Tensor:
        """``rows`` (m, n̂) times P (n̂, k), in float64."""

    def multiply(self, vectors: torch.Tensor, order: int) -> torch.Tensor:
        """P (n̂, k) times ``vectors`` (k, m), for n̂ = ``order``; float64.

        By the derivative of row ↦ row P, transposed, so that P need not be formed.
        """
        rows = vectors.to(torch.float64).T
        point = rows.new_zeros(len(rows), order, requires_grad=True)
        with torch.enable_grad():
            (found,) = torch.autograd.grad(self.right_multiply(point), point, rows)
        return found.T

    def multiply_adjoint(self, vectors: torch.Tensor) -> torch.Tensor:
        """Pᵀ times ``vectors`` (n̂, m), float64; ``P.multiply(P.multiply_adjoint(g), len(g))`` is P Pᵀ g."""
        return self.right_multiply(vectors.to(torch.float64).T).T

    def matrix(self, order: int, device: torch.device | None = None) -> torch.Tensor:
        """P as a dense (n̂, k) float64 tensor."""
        return self.right_multiply(torch.eye(order, dtype=torch.float64, device=device))

    def inverse(self, order: int, device: torch.device | None = None) -> DensePreconditioner:
        """P⁻¹ of a square P.

        Raises
        ------
        ConfigError
            P is not square, or is singular.
        """
        P = self.matrix(order, device)
        if P.shape[0] != P.shape[1]:
            raise ConfigError(f"{self.name} leaves out {order - P.shape[1]} of {order} parameters: it has no inverse")
        found, info = torch.linalg.inv_ex(P)
        if int(info) or not bool(torch.isfinite(found).all()):
            raise ConfigError(f"{self.name} is singular: it has no inverse")
        return DensePreconditioner(found, f"inverse of {self.name}")

    def of_unit(self, unit: int) -> Preconditioner:
        """That of one unit of the layer."""
        return self

    def matrices(self, units: int, order: int, device: torch.device | None = None) -> torch.Tensor:
        """P of each unit, (units, n̂, k), or (1, n̂, k) if it is the same for all."""
        return self.matrix(order, device)[None]

    def __matmul__(self, other: Preconditioner) -> Preconditioner:
        """ŵ = P Q z."""
        if isinstance(self, UnitPreconditioner) or isinstance(other, UnitPreconditioner):
            return UnitProduct(self, other)
        return Product(self, other)


@dataclass(frozen=True)
class DensePreconditioner(Preconditioner):
    """P given as a matrix (n̂, k)."""

    P: torch.Tensor
    name: str = "P"

    def right_multiply(self, rows: torch.Tensor) -> torch.Tensor:
        """``rows`` (m, n̂) times P."""
        return rows @ self.P.to(rows)


@dataclass(frozen=True)
class Scaling(Preconditioner):
    """P = diag(d).

    Attributes
    ----------
    d : (n̂,)
    """

    d: torch.Tensor
    name: str = "diagonal"

    def right_multiply(self, rows: torch.Tensor) -> torch.Tensor:
        """``rows`` (m, n̂) times P."""
        return rows * self.d.to(rows)


class Product(Preconditioner):
    """P Q, the change of variables ŵ = P Q z."""

    def __init__(self, first: Preconditioner, second: Preconditioner) -> None:
        self.first, self.second, self.name = first, second, f"{first.name}, then {second.name}"

    def right_multiply(self, rows: torch.Tensor) -> torch.Tensor:
        """``rows`` (m, n̂) times P Q."""
        return self.second.right_multiply(self.first.right_multiply(rows))


class UnitPreconditioner(Preconditioner):
    """A P that is another for every unit of the layer. Subclasses write `of_unit`."""

    @abstractmethod
    def of_unit(self, unit: int) -> Preconditioner:
        """That of one unit."""

    def right_multiply(self, rows: torch.Tensor) -> torch.Tensor:
        """Not defined.

        Raises
        ------
        ConfigError
            Always.
        """
        raise ConfigError(f"{self.name} is another P for every unit: take of_unit(i)")

    def matrices(self, units: int, order: int, device: torch.device | None = None) -> torch.Tensor:
        """P of each unit, (units, n̂, k)."""
        return torch.stack([self.of_unit(unit).matrix(order, device) for unit in range(units)])


@dataclass(frozen=True)
class UnitScaling(UnitPreconditioner):
    """P_i = diag(d_i).

    Attributes
    ----------
    d : (m, n̂)
        One row a unit.
    """

    d: torch.Tensor
    name: str = "diagonal, unit by unit"

    def of_unit(self, unit: int) -> Scaling:
        """diag(d_i)."""
        return Scaling(self.d[unit].to(torch.float64), self.name)


class UnitProduct(UnitPreconditioner):
    """P_i Q_i."""

    def __init__(self, first: Preconditioner, second: Preconditioner) -> None:
        self.first, self.second, self.name = first, second, f"{first.name}, then {second.name}"

    def of_unit(self, unit: int) -> Preconditioner:
        """P_i Q_i of one unit."""
        return Product(self.first.of_unit(unit), self.second.of_unit(unit))


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
        live = self._live
        if not self.bias:
            features = rows if live is None else rows.index_select(1, live)
            return features / ((self.sigma if live is None else self.sigma[live]) * self.q)
        # the first column is left alone: minus 0, over 1
        product = torch.addcmul(rows, rows[:, :1], self._shift, value=-1).div_(self._scale)
        return product if live is None else product.index_select(1, torch.cat([live.new_zeros(1), live + 1]))

    @cached_property
    def _shift(self) -> torch.Tensor:
        """(n + 1,) [0, μ]."""
        return torch.cat([self.mu.new_zeros(1), self.mu])

    @cached_property
    def _scale(self) -> torch.Tensor:
        """(n + 1,) q [1, σ], with 1 where σ = 0."""
        sigma = self.sigma if self._live is None else self.sigma.where(self.sigma != 0, 1.0)
        return torch.cat([sigma.new_ones(1), sigma]) * self.q

    @cached_property
    def _live(self) -> torch.Tensor | None:
        """Indices of the features with σ > 0; None: all of them."""
        live = self.sigma.nonzero()[:, 0]
        return None if len(live) == len(self.sigma) else live

    @property
    def dead(self) -> int:
        """Number of features left out because σ = 0."""
        return 0 if self._live is None else len(self.sigma) - len(self._live)

    @property
    def kappa_D(self) -> float:
        """κ(D) = max(1, σ) / min(1, σ) over the features with σ > 0 (without bias: max σ / min σ)."""
        return scaling_condition(self.sigma, bias=self.bias)


def scaling_condition(sigma: torch.Tensor, *, bias: bool) -> float:
    """κ of D = diag(1, 1/σ) over the features with σ > 0; without bias, of diag(1/σ)."""
    values = sigma.cpu().numpy()
    values = values[values != 0]
    ends = [float(values.min()), float(values.max())] if len(values) else []
    if bias:
        ends.append(1.0)
    return max(ends) / min(ends) if ends else math.nan
