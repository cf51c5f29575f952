"""Hessian of a block, and the coordinates that it is measured in: `Coordinates.block` makes it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Protocol, Self

import torch
from torch import nn

from hesscond.capture import layers
from hesscond.errors import ConfigError
from hesscond.hessians.network_operator import HessianOperator
from hesscond.operators import SymmetricOperator, estimates
from hesscond.spectra import Bounded, ConditionNumber

#: Smallest scales in which products are compared: this share of the sizes whose squares H has round-off of, and this
#: multiple of the error of a factor's column. The rounding of H is then far below 1e-8 of what is compared.
LOST_IN_SQUARE, LOST_IN_FACTOR = 1e-2, 1e10

#: Makes the Hessian of a loss from ``layers=``, ``unit=`` or ``parameters=``, as `HessianOperator` does.
HessianMaker = Callable[..., HessianOperator]


def with_eigenvalue(kappa: ConditionNumber, number: float, count: int) -> ConditionNumber:
    """κ of a matrix with a positive ``number`` as a further eigenvalue, ``count`` times."""
    if not count:
        return kappa
    rank = kappa.rank + count
    if not kappa.resolved:
        return replace(kappa, rank=rank)
    top, bottom = max(kappa.lambda_max, number), min(kappa.lambda_min, number)
    lower, upper = (max(1.0, top / bottom * end / kappa.value) for end in (kappa.lower, kappa.upper))
    return replace(kappa, value=top / bottom, lower=lower, upper=upper, lambda_max=top, lambda_min=bottom, rank=rank)


class BlockHessian(ABC):
    """The Hessian H of the loss in the parameters of one unit or layer, or PᵀHP if it is in coordinates with a P.

    For a whole layer, P is that of all units. ``order`` and `scales` are those of H.
    """

    #: None: the plain coordinates
    P: Preconditioner | None = None

    def __getstate__(self) -> dict[str, Any]:
        # pickling a view would pickle all of its storage
        kept = {name: value for name, value in vars(self).items() if name != "features"}
        for name, value in kept.items():
            if isinstance(value, torch.Tensor) and value.untyped_storage().nbytes() > value.numel() * value.itemsize:
                kept[name] = value.clone()
        return kept

    @property
    @abstractmethod
    def plain(self) -> BlockHessian:
        """H."""

    @property
    def units(self) -> int:
        """Number of units that a P acts on."""
        return 1

    @property
    @abstractmethod
    def order(self) -> int:
        """Number of parameters."""

    def bounded(self, uncertainty: float = 0.0) -> Bounded | None:
        """Bounds from few products with H, known up to an ``uncertainty`` in the 2-norm; None: κ is computed."""
        return None

    def dense(self) -> BlockHessian:
        """Same Hessian, with its factor or matrix computed."""
        return self

    @abstractmethod
    def in_coordinates(self, P: Preconditioner | None) -> BlockHessian:
        """PᵀHP; of a block in other coordinates, that of their product with P."""

    @abstractmethod
    def matrix(self) -> torch.Tensor:
        """Dense Hessian (k, k), float64; parameters in the order [bias, weight row], unit by unit."""

    def diagonal(self) -> torch.Tensor:
        """(k,) the diagonal, float64."""
        return self.matrix().diagonal()

    def product(self, vectors: torch.Tensor) -> torch.Tensor:
        """Product (k, c) with V (k, c), float64."""
        return self.matrix() @ vectors

    def estimated_diagonal(self, probes: int | None, seed: int) -> estimates.Estimate[torch.Tensor]:
        """Diagonal (k,), from random vectors if only products are known; ``probes`` None: as many as it takes."""
        diagonal = self.diagonal()
        return estimates.Estimate(diagonal, torch.zeros_like(diagonal), 0, 0)

    def trace(self, probes: int | None, seed: int) -> estimates.Estimate[float]:
        """Trace, as by `estimated_diagonal`."""
        return estimates.Estimate(float(self.diagonal().sum()), 0.0, 0, 0)

    def frobenius_norm(self, probes: int | None, seed: int) -> estimates.Estimate[float]:
        """Frobenius norm, as by `estimated_diagonal`."""
        return estimates.Estimate(estimates.norm_of(self.matrix()), 0.0, 0, 0)

    @abstractmethod
    def damped_condition(self, damping: float, *, rtol: float) -> ConditionNumber:
        """κ of H + λI."""

    @abstractmethod
    def scales(self) -> torch.Tensor:
        """Scales d (k,) of the parameters: entry (i, j) of H is at most d_i d_j, and its round-off far smaller."""

    @abstractmethod
    def condition_number(self, *, rtol: float = 1e-8) -> ConditionNumber:
        """κ."""

    def eigenpairs(self) -> tuple[torch.Tensor, torch.Tensor]:
        """All nonzero eigenvalues (r,), descending, and orthonormal eigenvectors (k, r), float64."""
        rank = self.condition_number().rank
        values, vectors = torch.linalg.eigh(self.matrix())
        largest = values.abs().argsort(descending=True)[:rank]
        kept = largest[values[largest].argsort(descending=True)]
        return values[kept], vectors[:, kept]

    def eigenvalues(self) -> torch.Tensor:
        """All nonzero eigenvalues (r,), descending, float64."""
        return self.eigenpairs()[0]


@dataclass(frozen=True)
class KeptHessian(BlockHessian):
    """Hessian that is kept with its P."""

    P: Preconditioner | None = field(default=None, kw_only=True)

    @property
    def plain(self) -> Self:
        return replace(self, P=None)

    def in_coordinates(self, P: Preconditioner | None) -> Self:
        if P is None:
            return self
        return replace(self, P=P if self.P is None else self.P @ P)


class HessianSource(Protocol):
    """Hessians of a loss over data, from which `Coordinates` make their blocks."""

    def plain(self, layer: str, unit: int | None) -> BlockHessian:
        """H of a unit, or of the layer (``unit`` None), from its capture."""

    def operator(self, **wanted: Any) -> HessianOperator:
        """H of ``layers=``, ``unit=`` or ``parameters=``, by its products."""

    def products(self, operator: SymmetricOperator) -> BlockHessian:
        """Block of a Hessian that is known by its products, within the memory allowed."""


class Coordinates(ABC):
    """Coordinates in which the Hessians of units, of layers and of the network are measured.

    There are four kinds: a P that is known beforehand (`Preconditioner`), a P computed from the Hessian that is
    measured (`HessianScaling`), Hessians known by products (`Chart`), and None, the plain coordinates.

    Attributes
    ----------
    name
        Name of the coordinates in the log.
    """

    name: str

    @abstractmethod
    def block(self, source: HessianSource, layer: str, unit: int | None) -> BlockHessian:
        """Hessian of a unit, or of the layer (``unit`` None), in these coordinates; a ConfigError if it has none."""


class Chart(Coordinates):
    """Coordinates in which a Hessian is known by its products: the parameters behind a weight, or a tangent space."""

    #: whether the Hessian is zero where that of the plain parameters is; not with a penalty
    keeps_zeros = True

    def chosen_units(self, model: nn.Module, layer: str, units: Sequence[int] | None) -> tuple[int, ...]:
        """Units of a layer that are measured (None: all)."""
        return layers.checked_units(layer, layers.chosen_layers(model, [layer])[layer], units)

    def block(self, source: HessianSource, layer: str, unit: int | None) -> BlockHessian:
        return source.products(self.operator(source.operator, layer, unit))

    @abstractmethod
    def operator(self, hessian: HessianMaker, layer: str, unit: int | None) -> SymmetricOperator:
        """Operator of the Hessian of a unit, or of the layer (``unit`` None); a ConfigError if it has no such chart."""

    def network(self, hessian: HessianMaker) -> tuple[SymmetricOperator, Mapping[str, slice]]:
        """Hessian in all parameters, and the rows of each parameter or layer; a ConfigError if undefined."""
        raise ConfigError(f"the coordinates {self.name!r} are known for a unit or a layer, not for a whole network")


class HessianScaling(Coordinates):
    """Coordinates ŵ = P z with a P computed from the Hessian of the unit, layer or network that is measured.

    Parameters
    ----------
    P
        Function of a `BlockHessian` that returns its P; a subclass may write `at` instead.
    name
        Name of the coordinates in the log.
    """

    def __init__(self, P: Callable[[BlockHessian], Preconditioner] | None = None, name: str = "") -> None:
        self._P, self.name = P, name or self.name

    def block(self, source: HessianSource, layer: str, unit: int | None) -> BlockHessian:
        """PᵀHP with the P of this H."""
        plain = source.plain(layer, unit)
        return plain.in_coordinates(self.at(plain))

    def at(self, hessian: BlockHessian) -> Preconditioner:
        """P for a Hessian."""
        assert self._P is not None
        return self._P(hessian)


class Preconditioner(Coordinates):
    """Change of variables θ = P z of the parameters θ (m n̂,) of a layer's units, one after another: diag(P_1 … P_m).

    The Hessian in z is PᵀHP = (ĤP)ᵀ S (ĤP). Subclasses write `right_multiply` and have a `name`; where P_i differ by
    unit, ``same_for_units = False`` and `of_unit`, and if P acts across units, as a Kronecker-factored one does,
    ``unstructured = True``. ``Q @ P`` is the change of variables θ = Q P z.
    """

    #: Whether all P_i are the same.
    same_for_units: bool = True
    #: Whether P has no structure over units: `by_unit` gives one P (m n̂, k) of all of them.
    unstructured: ClassVar[bool] = False
    #: Whether products with P may cancel, so that their rounding is large compared with small results.
    cancels: bool = False

    @abstractmethod
    def right_multiply(self, rows: torch.Tensor) -> torch.Tensor:
        """``rows`` (r, n̂) times P (n̂, k), in float64; rows (r, m n̂) of all units if P differs by unit."""

    def of_unit(self, unit: int) -> Preconditioner:
        """P of one unit of the layer; a ConfigError if P mixes the units."""
        return self

    def block(self, source: HessianSource, layer: str, unit: int | None) -> BlockHessian:
        """PᵀHP."""
        P = self if unit is None else self.of_unit(unit)
        return source.plain(layer, unit).in_coordinates(P)

    def by_unit(self, units: Sequence[int]) -> list[Preconditioner]:
        """P_i for each of the units, or one that is the same for all."""
        if self.same_for_units or self.unstructured:
            return [self]
        return [self.of_unit(unit) for unit in units]

    def matrices(self, units: int, order: int, device: torch.device | None = None) -> list[torch.Tensor]:
        """Matrices (n̂, k_i) for each unit of a layer, or one: the same for each unit, or that of all units together."""
        inner = self._inner(units)
        return [P.matrix(units * order // inner, device) for P in self.by_unit(range(inner))]

    def dense(self, units: int, order: int, device: torch.device | None = None) -> torch.Tensor:
        """P of all units (m n̂, k)."""
        matrices = self.matrices(units, order, device)
        return torch.block_diag(*matrices * (self._inner(units) // len(matrices)))

    def multiplied(self, rows: torch.Tensor, units: int) -> torch.Tensor:
        """``rows`` (r, m n̂) times P."""
        inner = self._inner(units)
        parts = self.by_unit(range(inner))
        if inner == 1:
            return parts[0].right_multiply(rows)
        if len(parts) == 1:
            return parts[0].right_multiply(rows.reshape(len(rows) * inner, -1)).reshape(len(rows), -1)
        by_unit = rows.unflatten(1, (inner, -1)).unbind(1)
        return torch.cat([P.right_multiply(part) for P, part in zip(parts, by_unit, strict=True)], 1)

    @classmethod
    def multiplied_each(
        cls, rows: torch.Tensor, systems: Sequence[Self], units: int, root: torch.Tensor | None = None
    ) -> Sequence[torch.Tensor]:
        """``rows`` (k, r, m n̂) times the P of each of k systems, then ``root`` (k, r, 1) times that."""
        products = [P.multiplied(part, units) for P, part in zip(systems, rows, strict=True)]
        return products if root is None else [part * by for part, by in zip(products, root, strict=True)]

    def expanded(self, rows: torch.Tensor, units: int, order: int) -> torch.Tensor:
        """``rows`` (r, k) times Pᵀ, for m n̂ = ``order``: the transposed derivative of rows ↦ rows P."""
        point = rows.new_zeros(len(rows), order, requires_grad=True)
        with torch.enable_grad():
            (product,) = torch.autograd.grad(self.multiplied(point, units), point, rows)
        return product

    def carried(self, rows: torch.Tensor, units: int) -> torch.Tensor:
        """``rows`` (r, m n̂) times |P|: bounds of errors in θ as bounds in z."""
        matrices = self.matrices(units, rows.shape[1] // units, rows.device)
        by_unit = rows.unflatten(1, (self._inner(units), -1))
        if len(matrices) == 1:
            return (by_unit @ matrices[0].abs()).flatten(1)
        return torch.cat([part @ P.abs() for part, P in zip(by_unit.unbind(1), matrices, strict=True)], 1)

    def scaled_norm(self, scales: torch.Tensor, units: int) -> float:
        """‖diag(d) P‖² in the Frobenius norm, for d (m n̂,)."""
        matrices = self.matrices(units, len(scales) // units, scales.device)
        lengths = torch.stack([P.square().sum(1) for P in matrices])
        return float((scales.view(self._inner(units), -1).square() * lengths).sum())

    def _inner(self, units: int) -> int:
        return 1 if self.unstructured else units

    def __matmul__(self, other: Preconditioner) -> Preconditioner:
        """θ = P Q z."""
        if self.unstructured or other.unstructured:
            raise ConfigError(f"{other.name} acts across units, and {self.name} comes before it: multiply them out")
        return Product(self, other)

    def multiply(self, vectors: torch.Tensor, order: int) -> torch.Tensor:
        """P (n̂, k) times ``vectors`` (k, m), for n̂ = ``order``; float64."""
        return self.expanded(vectors.to(torch.float64).T, 1, order).T

    def multiply_adjoint(self, vectors: torch.Tensor) -> torch.Tensor:
        """Pᵀ times ``vectors`` (n̂, m), float64; ``P.multiply(P.multiply_adjoint(g), len(g))`` is P Pᵀ g."""
        return self.right_multiply(vectors.to(torch.float64).T).T

    def matrix(self, order: int, device: torch.device | None = None) -> torch.Tensor:
        """P as a dense (n̂, k) float64 tensor."""
        return self.right_multiply(torch.eye(order, dtype=torch.float64, device=device))


class Product(Preconditioner):
    """P Q, the change of variables θ = P Q z, unit by unit where one of them differs by unit."""

    def __init__(self, first: Preconditioner, second: Preconditioner) -> None:
        self.first, self.second, self.name = first, second, f"{first.name}, then {second.name}"
        self.same_for_units = first.same_for_units and second.same_for_units
        self.cancels = first.cancels or second.cancels

    def right_multiply(self, rows: torch.Tensor) -> torch.Tensor:
        return self.second.multiplied(self.first.multiplied(rows, 1), 1)

    def of_unit(self, unit: int) -> Preconditioner:
        return self if self.same_for_units else Product(self.first.of_unit(unit), self.second.of_unit(unit))
