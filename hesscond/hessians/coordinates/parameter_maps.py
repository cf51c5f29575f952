"""Preconditioners of single parameters, as optimizers have them: scalings and Kronecker factors."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce

import torch
from torch.nn import functional

from hesscond.capture.kinds import Geometry, Layer, is_turned
from hesscond.capture.layers import parameter_tensors, unit_weights
from hesscond.errors import ConfigError
from hesscond.hessians.coordinates.base import LinearCoordinates, Preconditioner
from hesscond.hessians.coordinates.linear import DensePreconditioner, Scaling, UnitScaling
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

    def by_entry(self, f: Callable[[torch.Tensor], torch.Tensor]) -> ParameterMap:
        """Map with f of every entry, for an f of products that is the product of the f of each: |P|, or P∘P."""
        return ParameterMap(f(self.v), tuple(None if F is None else f(F) for F in self.factors))

    def multiply(self, z: torch.Tensor) -> torch.Tensor:
        """P z for each row of ``z`` (r, k)."""
        x = z.view(len(z), *self.v.shape) * self.v.to(z)
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
    """P of several parameters together; what belongs to none of them does not move, and is left out of z."""

    #: map of each parameter, and its entries of a vector: rows in the order of z, or a slice
    places: tuple[tuple[ParameterMap, torch.Tensor | slice], ...]
    name: str
    cancels = True

    def right_multiply(self, rows: torch.Tensor) -> torch.Tensor:
        own = torch.cat([P.multiply_adjoint(rows[:, where]) for P, where in self.places], 1)
        index = [where for _, where in self.places if isinstance(where, torch.Tensor)]
        return own[:, torch.cat(index).argsort()] if index else own

    def multiply(self, vectors: torch.Tensor, order: int) -> torch.Tensor:
        if any(isinstance(where, torch.Tensor) for _, where in self.places):
            return super().multiply(vectors, order)
        parts = vectors.to(torch.float64).split([P.v.numel() for P, _ in self.places])
        found = parts[0].new_zeros(order, vectors.shape[1])
        for part, (P, where) in zip(parts, self.places, strict=True):
            own, R = P.v.to(part)[:, None] * part, P.factors[0] if P.factors else None
            found[where] = own if R is None else R.to(part) @ own
        return found


class JointMap(Preconditioner):
    """P of all units of a layer together, from maps that do not act on the units one by one.

    The maps belong to weight and bias; a parameter without one is left out of z.
    """

    same_for_units = False
    unstructured = True
    cancels = True

    def __init__(self, layer: Layer, maps: Sequence[ParameterMap | None], name: str) -> None:
        self.layer, self.maps, self.name = layer, maps, name

    def right_multiply(self, rows: torch.Tensor) -> torch.Tensor:
        tensors = parameter_tensors(self.layer, rows.unflatten(1, (Geometry.of(self.layer).units, -1)))
        pairs = zip(self.maps, tensors, strict=True)
        return torch.cat([P.multiply_adjoint(own.flatten(1)) for P, own in pairs if P is not None], 1)

    def _by_entry(self, f: Callable[[torch.Tensor], torch.Tensor]) -> JointMap:
        return JointMap(self.layer, [None if P is None else P.by_entry(f) for P in self.maps], self.name)

    def carried(self, rows: torch.Tensor, units: int) -> torch.Tensor:
        return self._by_entry(torch.abs).right_multiply(rows)

    def scaled_norm(self, scales: torch.Tensor, units: int) -> float:
        return float(self._by_entry(torch.square).right_multiply(scales.square()[None]).sum())

    def of_unit(self, unit: int) -> DensePreconditioner:
        """P_i with P_i P_iᵀ = M_ii, the block of M = P Pᵀ in one unit's parameters."""
        geometry = Geometry.of(self.layer)
        own = torch.zeros(geometry.n_params, geometry.units, geometry.n_params, dtype=torch.float64, device="cpu")
        own[:, unit] = torch.eye(geometry.n_params, device="cpu")
        v = next(P.v for P in self.maps if P is not None)
        return DensePreconditioner(
            torch.linalg.qr(self.right_multiply(own.flatten(1).to(v)).T, mode="r").R.T, self.name
        )


class LayerMap(LinearCoordinates):
    """P of a layer whose bias and weight have one each, P_b = B diag(c) and P_w = (L ⊗ R) diag(v).

    In the order [b_i, w_i] it is ([B, L] ⊗ I) diag(P_1 … P_2m). Without ``bias`` the first and last columns of a unit,
    ``still`` of them, do not move.
    """

    shared_factors = True
    cancels = True

    def __init__(
        self, weight: ParameterMap, bias: ParameterMap | None, name: str, still: tuple[int, int] = (0, 0)
    ) -> None:
        self.name, self.m, self._still = name, len(weight.v), still
        self._where = slice(still[0] if bias is None else 1, -still[1] or None)
        self._v = weight.v.flatten(1)
        self._right = right_factor(weight)
        self._c = None if bias is None else bias.v.flatten()
        maps = [weight] if bias is None else [bias, weight]
        lefts = [one.factors[0] if one.factors else None for one in maps]
        if any(F is not None for F in lefts):
            eye = torch.eye(self.m, dtype=torch.float64, device=weight.v.device)
            self.left = torch.cat([eye if F is None else F.to(eye) for F in lefts], 1)

    def of_unit(self, unit: int) -> Mapped:
        """P_i with P_i P_iᵀ = M_ii, the block of M = P Pᵀ in one unit's parameters."""
        if self.left is None:
            return Mapped((*self._bias(unit), *self._weight(unit)), self.name)
        row = self.left[unit].square()
        pieces = self._weight(unit, (row[-self.m :] @ self._v.square()).sqrt())
        if self._c is not None:
            pieces = (*self._bias(unit, (row[: self.m] @ self._c.square()).sqrt()), *pieces)
        return Mapped(pieces, self.name)

    def by_unit(self, units: Sequence[int]) -> list[Preconditioner]:
        """P_i of each unit, or the factors to the right of ``left``."""
        if self.left is None:
            return super().by_unit(units)
        biases = 0 if self._c is None else self.m
        return [Mapped(self._bias(k) if k < biases else self._weight(k - biases), self.name) for k in units]

    def multiplied(self, rows: torch.Tensor, units: int) -> torch.Tensor:
        inner = self._mixed(rows, units, self.left).unflatten(1, (self._inner(units), -1))
        own = inner[:, -self.m :, self._where]
        own = (own if self._right is None else own @ self._right.to(own)) * self._v.to(own)
        if self._c is None:
            return own.flatten(1)
        biases = inner[:, : self.m, :1] * self._c.to(own)[:, None]
        if self.left is None:
            return torch.cat([biases, own], 2).flatten(1)
        return torch.cat([biases.flatten(1), own.flatten(1)], 1)

    def expanded(self, rows: torch.Tensor) -> torch.Tensor:
        biases = None
        if self.left is None or self._c is None:
            own = rows.unflatten(1, (self.m, -1))
            if self._c is not None:
                biases, own = own[:, :, :1], own[:, :, 1:]
        else:
            biases, own = rows[:, : self.m, None], rows[:, self.m :].unflatten(1, (self.m, -1))
        own = own * self._v.to(own)
        own = own if self._right is None else own @ self._right.to(own).T
        if biases is None or self._c is None:
            own = functional.pad(own, self._still)
            return self._mixed(own.flatten(1), self.m, None if self.left is None else self.left.T)
        biases = biases * self._c.to(own)[:, None]
        if self.left is not None:
            of_biases, of_weights = self.left.to(own).split(self.m, 1)
            biases, own = of_biases @ biases, of_weights @ own
        return torch.cat([biases, own], 2).flatten(1)

    def _bias(self, unit: int, c: torch.Tensor | None = None) -> tuple[tuple[ParameterMap, slice], ...]:
        if self._c is None:
            return ()
        return ((ParameterMap((self._c[unit] if c is None else c)[None]), slice(0, 1)),)

    def _weight(self, unit: int, v: torch.Tensor | None = None) -> tuple[tuple[ParameterMap, slice], ...]:
        return ((ParameterMap(self._v[unit] if v is None else v, (self._right,)), self._where),)


def right_factor(weight: ParameterMap) -> torch.Tensor | None:
    """R (n, n) = F_2 ⊗ … ⊗ F_d; None: the identity."""
    if all(F is None for F in weight.factors[1:]):
        return None
    sizes = weight.v.shape[1:]
    eyes = (torch.eye(size, dtype=torch.float64, device=weight.v.device) for size in sizes)
    return reduce(
        torch.kron, [eye if F is None else F.to(eye) for F, eye in zip(weight.factors[1:], eyes, strict=True)]
    )


def layer_map(
    layer: Layer, weight: ParameterMap | None, bias: ParameterMap | None = None, *, name: str
) -> LinearCoordinates:
    """P of all units of a layer, from the maps of its parameters; a parameter without one is left out of z."""
    geometry = Geometry.of(layer)
    units = geometry.units
    if weight is None:
        assert bias is not None
        factors = (bias.factors[0], None) if bias.factors else ()
        return LayerMap(ParameterMap(bias.v.view(-1, 1), factors), None, name, (0, geometry.fan_in))
    still = (int(geometry.bias and bias is None), 0)
    if weight.diagonal and (bias is None or bias.diagonal):
        d = unit_weights(layer, weight.v.reshape(1, *layer.weight.shape))[0]
        if any(still):
            return LayerMap(ParameterMap(d), None, name, still)
        return UnitScaling(d if bias is None else torch.cat([bias.v.reshape(-1, 1), d], 1), name)
    if is_turned(layer) or weight.v.shape[:1] != (units,) or weight.v.ndim < 2:
        return JointMap(layer, [weight, bias][: 1 + geometry.bias], name)
    return LayerMap(weight, bias, name, still)


@dataclass(frozen=True)
class ParameterMaps:
    """Maps of parameters by their names, which give θ = P z for any block of these."""

    maps: Mapping[str, ParameterMap]
    name: str

    def of(self, layout: Layout) -> Preconditioner:
        """P of the entries in a layout; a ConfigError if a map mixes entries of the layout with others."""
        maps = [self.maps[name] for name in layout.names]
        if all(own.diagonal for own in maps):
            d = [own.v.reshape(shape) for own, shape in zip(maps, layout.shapes, strict=True)]
            return Scaling(layout.vector_of(d), self.name)
        numbers = layout.tensors_of(torch.arange(1, layout.order + 1, device=layout.tensors[0].device))
        for name, number in zip(layout.names, numbers, strict=True):
            if not bool(number.all()):
                raise ConfigError(
                    f"{self.name!r} mixes the entries of parameters, and a part of {name!r} has no such coordinates: "
                    "measure all of it at level='layer', or level='network'"
                )
        return Mapped(tuple((own, n.flatten() - 1) for own, n in zip(maps, numbers, strict=True)), self.name)
