"""Preconditioners of single parameters, as optimizers have them: scalings and Kronecker factors."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from hesscond.capture import kinds, layers
from hesscond.errors import ConfigError
from hesscond.hessians.coordinates.base import Preconditioner
from hesscond.hessians.coordinates.linear import DensePreconditioner, Scaling
from hesscond.hessians.parameters import Layout


@dataclass(frozen=True)
class ParameterMap:
    """P = (F_1 ⊗ … ⊗ F_d) diag(v) of the entries of one parameter, so that M = P Pᵀ is what its step multiplies with.

    Attributes
    ----------
    v
        Diagonal v, in the shape that the entries are viewed in (row-major, (s_1, …, s_d)), float64.
    factors
        F_i (s_i, s_i) for each axis, None for the identity; empty: P is the diagonal matrix of v.
    """

    v: torch.Tensor
    factors: tuple[torch.Tensor | None, ...] = ()

    @property
    def diagonal(self) -> bool:
        """Whether P is diag(v)."""
        return all(F is None for F in self.factors)

    @classmethod
    def still(cls, parameter: torch.Tensor) -> ParameterMap:
        """P = 0 of a parameter that takes no steps."""
        return cls(torch.zeros_like(parameter, dtype=torch.float64))

    @classmethod
    def kronecker(
        cls, shape: Sequence[int], factors: Sequence[torch.Tensor | None], scale: float = 1.0
    ) -> ParameterMap:
        """√scale F_1 ⊗ … ⊗ F_d; a factor (s_i,) is a diagonal one."""
        device = next((F.device for F in factors if F is not None), None)
        v = torch.full(tuple(shape), scale**0.5, dtype=torch.float64, device=device)
        for axis, F in enumerate(factors):
            if F is not None and F.ndim == 1:
                v = v * F.to(v).view(-1, *[1] * (len(shape) - axis - 1))
        return cls(v, tuple(None if F is None or F.ndim < 2 else F.to(v) for F in factors))

    def scaled(self, c: float) -> ParameterMap:
        """√c P, whose M is c times as large."""
        return ParameterMap(self.v * c**0.5, self.factors)

    def of_row(self, i: int) -> ParameterMap:
        """P_i with P_i P_iᵀ = M_ii, the block of M in row i of the entries."""
        L, v = next(iter(self.factors), None), self.v.reshape(len(self.v), -1)
        v = v[i] if L is None else (L[i].to(v).square() @ v.square()).sqrt()
        return ParameterMap(v.view(self.v.shape[1:] or 1), self.factors[1:])

    def by_entry(self, f: Callable[[torch.Tensor], torch.Tensor]) -> ParameterMap:
        """Map with f of every entry, for an f of products that is the product of the f of each: |P|, or P∘P."""
        return ParameterMap(f(self.v), tuple(None if F is None else f(F) for F in self.factors))

    def multiply(self, z: torch.Tensor) -> torch.Tensor:
        """P z for each row of ``z`` (r, k)."""
        x = z.reshape(len(z), *self.v.shape) * self.v.to(z)
        for axis, F in enumerate(self.factors, 1):
            if F is not None:
                x = torch.tensordot(x, F.to(x), ([axis], [1])).movedim(-1, axis)
        return x.reshape(len(z), -1)

    def multiply_adjoint(self, rows: torch.Tensor) -> torch.Tensor:
        """Pᵀ x for each row of ``rows`` (r, k)."""
        x = rows.reshape(len(rows), *self.v.shape)
        for axis, F in enumerate(self.factors, 1):
            if F is not None:
                x = torch.tensordot(x, F.to(x), ([axis], [0])).movedim(-1, axis)
        return (x * self.v.to(x)).reshape(len(rows), -1)

    def applied(self, gradient: torch.Tensor) -> torch.Tensor:
        """M g, in the shape and precision of g."""
        g = gradient.reshape(1, -1).to(torch.float64)
        return self.multiply(self.multiply_adjoint(g)).view(gradient.shape).to(gradient.dtype)


@dataclass(frozen=True)
class Mapped(Preconditioner):
    """P of several parameters together, of m units; an entry that belongs to none does not move, and is left out of z.

    z is in the order of the parameters [b_i, w_i], unit by unit.
    """

    same_for_units = False
    unstructured = True
    cancels = True

    #: map of each parameter, and its entries, row-major, in a vector (m n̂,)
    places: tuple[tuple[ParameterMap, torch.Tensor], ...]
    shape: tuple[int, int]  # (m, n̂)
    name: str

    @cached_property
    def _moved(self) -> torch.Tensor:
        return torch.cat([where for _, where in self.places]).sort().values

    def right_multiply(self, rows: torch.Tensor) -> torch.Tensor:
        z = torch.zeros_like(rows)
        for P, where in self.places:
            z[:, where] = P.multiply_adjoint(rows[:, where])
        return z if len(self._moved) == rows.shape[1] else z[:, self._moved]

    def expanded(self, rows: torch.Tensor, units: int, order: int) -> torch.Tensor:
        z, theta = rows.new_zeros(2, len(rows), order)
        z[:, self._moved] = rows
        for P, where in self.places:
            theta[:, where] = P.multiply(z[:, where])
        return theta

    def _by_entry(self, f: Callable[[torch.Tensor], torch.Tensor]) -> Mapped:
        return Mapped(tuple((P.by_entry(f), where) for P, where in self.places), self.shape, self.name)

    def carried(self, rows: torch.Tensor, units: int) -> torch.Tensor:
        return self._by_entry(torch.abs).right_multiply(rows)

    def scaled_norm(self, scales: torch.Tensor, units: int) -> float:
        return float(self._by_entry(torch.square).right_multiply(scales.square()[None]).sum())

    @cached_property
    def _separate(self) -> bool:
        """Whether each row of each map is of one unit."""
        m, n = self.shape
        units = torch.arange(m, device=self._moved.device)
        return all(len(P.v) == m and bool((where.view(m, -1).T // n == units).all()) for P, where in self.places)

    def of_unit(self, unit: int) -> Preconditioner:
        """P_i with P_i P_iᵀ = M_ii, the block of M = P Pᵀ in one unit's parameters."""
        m, n = self.shape
        if m == 1:
            return self
        if self._separate:
            places = tuple((P.of_row(unit), where.view(m, -1)[unit] - unit * n) for P, where in self.places)
            return Mapped(places, (1, n), self.name)
        rows = self.places[0][0].v.new_zeros(n, m, n)
        rows[:, unit] = torch.eye(n, dtype=rows.dtype, device=rows.device)
        return DensePreconditioner(torch.linalg.qr(self.right_multiply(rows.flatten(1)).T, mode="r").R.T, self.name)


def layer_map(
    layer: kinds.Layer, weight: ParameterMap | None, bias: ParameterMap | None = None, *, name: str
) -> Preconditioner:
    """P of all units of a layer, from the maps of its parameters; a parameter without one is left out of z."""
    geometry = kinds.Geometry.of(layer)
    shape = geometry.units, geometry.n_params
    maps = [weight, bias][: 1 + geometry.bias]
    there = [P for P in maps if P is not None]
    numbers = layers.parameter_tensors(layer, torch.arange(math.prod(shape), device=there[0].v.device).view(1, *shape))
    if len(there) == len(maps) and all(P.diagonal for P in there):
        d = [P.v.reshape(index.shape) for P, index in zip(there, numbers, strict=True)]
        return Scaling(layers.parameter_rows(layer, d)[0], name)
    places = [(P, index.flatten()) for P, index in zip(maps, numbers, strict=True) if P is not None]
    return Mapped(tuple(places), shape, name)


@dataclass(frozen=True)
class ParameterMaps:
    """Maps of parameters by their names, which give θ = P z for any block of these."""

    maps: Mapping[str, ParameterMap]
    name: str

    def of(self, layout: Layout) -> Preconditioner:
        """P of the entries in a layout; a ConfigError if a map mixes entries of the layout with others."""
        maps = [self.maps[name] for name in layout.names]
        if all(P.diagonal for P in maps):
            d = [P.v.reshape(shape) for P, shape in zip(maps, layout.shapes, strict=True)]
            return Scaling(layout.vector_of(d), self.name)
        numbers = layout.tensors_of(torch.arange(1, layout.order + 1, device=layout.tensors[0].device))
        for name, number in zip(layout.names, numbers, strict=True):
            if not bool(number.all()):
                raise ConfigError(
                    f"{self.name!r} mixes the entries of parameters, and a part of {name!r} has no such coordinates: "
                    "measure all of it at level='layer', or level='network'"
                )
        places = tuple((P, n.flatten() - 1) for P, n in zip(maps, numbers, strict=True))
        return Mapped(places, (1, layout.order), self.name)
