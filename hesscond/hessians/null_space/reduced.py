"""Coordinates of the orthogonal complement of the known null directions of a network."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from hesscond.hessians.null_space.directions import NullDirections, combined
from hesscond.operators import ApproximateInverse, LinearOperator, Subspace
from hesscond.operators.subspace import CoordinateSpan, DirectSum, KroneckerComplement, Span

#: A basis is one of single units if its entries are within this of 0 and 1.
EXACT = 1e-12


@dataclass(frozen=True)
class LayerPiece:
    """Remaining space of a layer: V = Q_C X Q_Aᵀ for X (r_C, r_A), with rows x_i = W_i y_i that may be restricted."""

    index: torch.Tensor  # (m, n̂) rows of Rⁿ
    Q_C: torch.Tensor  # (m, r_C)
    Q_A: torch.Tensor  # (n̂, r_A) orthonormal columns
    W: torch.Tensor | None  # (r_C, r_A, w) orthonormal columns, padded with columns of zeros; None: all of R^r_A
    kept: torch.Tensor  # (k,) indices of the coordinates among the r_C w (or r_C r_A) numbers

    @property
    def width(self) -> int:
        """Coordinates for each of the r_C rows, padding included."""
        return self.Q_A.shape[1] if self.W is None else self.W.shape[2]

    def spread(self, vectors: torch.Tensor) -> torch.Tensor:
        """Coordinates (k, c) as parameters (m, n̂, c)."""
        rows, c = self.Q_C.shape[1], vectors.shape[1]
        X = vectors.new_zeros(rows * self.width, c)
        X[self.kept] = vectors
        X = X.view(rows, self.width, c)
        if self.W is not None:
            X = self.W.to(X) @ X
        Y = self.Q_A.to(X) @ X
        return (self.Q_C.to(X) @ Y.flatten(1)).unflatten(1, Y.shape[1:])

    def gathered(self, values: torch.Tensor) -> torch.Tensor:
        """Transpose: (k, c) of (m, n̂, c)."""
        Y = (self.Q_C.T.to(values) @ values.flatten(1)).unflatten(1, values.shape[1:])
        X = self.Q_A.T.to(Y) @ Y
        if self.W is not None:
            X = self.W.mT.to(X) @ X
        return X.flatten(0, 1)[self.kept]


class RemainingCoordinates(LinearOperator):
    """Orthonormal basis Z (n, k) of the remaining space: pieces of layers, and single parameters ``rest``."""

    def __init__(
        self,
        order: int,
        pieces: Sequence[LayerPiece],
        rest: torch.Tensor,
        *,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.pieces, self.rest = list(pieces), rest
        self._sizes = [len(piece.kept) for piece in pieces] + [len(rest)]
        super().__init__((order, sum(self._sizes)), dtype, device)

    def multiply(self, vectors: torch.Tensor) -> torch.Tensor:
        result = vectors.new_zeros(self.shape[0], vectors.shape[1])
        *parts, last = vectors.split(self._sizes)
        for piece, part in zip(self.pieces, parts, strict=True):
            result[piece.index] = piece.spread(part)
        result[self.rest] = last
        return result

    def multiply_adjoint(self, vectors: torch.Tensor) -> torch.Tensor:
        return torch.cat([*(piece.gathered(vectors[piece.index]) for piece in self.pieces), vectors[self.rest]])


class Pulled(Subspace):
    """Subspace of range(Z), in the coordinates y."""

    def __init__(self, subspace: Subspace, Z: LinearOperator) -> None:
        self.subspace, self.Z = subspace, Z
        self.order, self.dimension = Z.shape[1], subspace.dimension

    def project(self, vectors: torch.Tensor) -> torch.Tensor:
        return self.Z.multiply_adjoint(self.subspace.project(self.Z.multiply(vectors)))


class PulledInverse(ApproximateInverse):
    """Zᵀ M⁻¹ Z, where M is block diagonal in range(Z) and its complement, or nearly so."""

    def __init__(self, inverse: ApproximateInverse, Z: LinearOperator) -> None:
        self.inverse, self.Z, self.order = inverse, Z, Z.shape[1]

    def solve(self, vectors: torch.Tensor, shift: float = 0.0) -> torch.Tensor:
        return self.Z.multiply_adjoint(self.inverse.solve(self.Z.multiply(vectors), shift))


def remaining(
    directions: Sequence[NullDirections], order: int, *, dtype: torch.dtype, device: torch.device
) -> tuple[RemainingCoordinates, Subspace | None]:
    """Coordinates without null directions, which are orthogonal to one another, and the directions left in them."""
    layers: list[tuple[torch.Tensor, KroneckerComplement]] = []
    others: list[NullDirections] = []
    for group in directions:
        layer = kronecker_of(group.subspace)
        if layer is None:
            others.append(group)
        else:
            layers.append(layer)
    left: list[NullDirections] = []
    extra: dict[int, dict[int, list[torch.Tensor]]] = {}
    dropped = torch.zeros(order, dtype=torch.bool, device=device)
    owner = torch.full((order,), -1, dtype=torch.int64, device=device)
    for number, (index, _) in enumerate(layers):
        owner[index.flatten()] = number
    units = [selected(space.Q_C[0]) for _, space in layers]
    for group in others:
        bases = unit_bases(group.subspace, layers, owner)
        if isinstance(group.subspace, CoordinateSpan) and bool((owner[group.subspace.index] < 0).all()):
            dropped[group.subspace.index] = True
        elif bases is not None and all(units[number] is not None for number in bases):
            for number, by_unit in bases.items():
                for unit, Q in by_unit.items():
                    extra.setdefault(number, {}).setdefault(unit, []).append(Q)
        else:
            left.append(group)
    pieces = [piece_of(index, space, extra.get(number, {})) for number, (index, space) in enumerate(layers)]
    rest = ((owner < 0) & ~dropped).nonzero()[:, 0]
    Z = RemainingCoordinates(order, pieces, rest, dtype=dtype, device=device)
    null = combined(left)
    return Z, None if null is None else Pulled(null, Z)


def kronecker_of(subspace: Subspace) -> tuple[torch.Tensor, KroneckerComplement] | None:
    """Index (m, n̂) and complement of a subspace of one layer without groups; None for other subspaces."""
    if not (isinstance(subspace, DirectSum) and len(subspace.parts) == 1):
        return None
    where, space = subspace.parts[0]
    if not (isinstance(where, torch.Tensor) and isinstance(space, KroneckerComplement) and len(space.Q_C) == 1):
        return None
    return where.view(space.Q_C.shape[1], space.Q_A.shape[1]), space


def selected(Q: torch.Tensor) -> list[int] | None:
    """Rows whose unit vectors are the columns of Q (m, r); None if columns are no unit vectors."""
    exact = ((Q - 1).abs() <= EXACT) | (Q.abs() <= EXACT)
    if not bool(exact.all()) or not bool(((Q > 0.5).sum(0) == 1).all()):
        return None
    return Q.argmax(0).tolist() if Q.shape[1] else []


def unit_bases(
    subspace: Subspace, layers: Sequence[tuple[torch.Tensor, KroneckerComplement]], owner: torch.Tensor
) -> dict[int, dict[int, torch.Tensor]] | None:
    """Orthonormal bases (n̂, d), by layer and unit, of directions that each belong to one unit; None: they do not."""
    if isinstance(subspace, CoordinateSpan):
        by_layer: dict[int, dict[int, torch.Tensor]] = {}
        numbers = owner[subspace.index]
        if bool((numbers < 0).any()):
            return None
        for number in numbers.unique().tolist():
            index = layers[number][0]
            chosen = torch.isin(index, subspace.index)
            eye = torch.eye(index.shape[1], dtype=torch.float64, device=index.device)
            by_layer[number] = {int(u): eye[:, chosen[u]] for u in chosen.any(1).nonzero()[:, 0].tolist()}
        return by_layer
    if not (isinstance(subspace, DirectSum) and len(subspace.parts) == 1):
        return None
    where, inner = subspace.parts[0]
    if not (isinstance(where, torch.Tensor) and isinstance(inner, DirectSum)):
        return None
    number = int(owner[where[0]])
    if number < 0 or not torch.equal(layers[number][0].flatten(), where):
        return None
    width = layers[number][0].shape[1]
    bases = {}
    for rows, span in inner.parts:
        if not (isinstance(rows, slice) and isinstance(span, Span) and rows.stop - rows.start == width):
            return None
        bases[rows.start // width] = span.Q
    return {number: bases}


def piece_of(index: torch.Tensor, space: KroneckerComplement, extra: dict[int, list[torch.Tensor]]) -> LayerPiece:
    """Remaining space of a layer without the null directions of single units, which are orthogonal to the others."""
    Q_C, Q_A = space.Q_C[0], space.Q_A[0]
    rows, width = Q_C.shape[1], Q_A.shape[1]
    if not extra:
        return LayerPiece(index, Q_C, Q_A, None, torch.arange(rows * width, device=index.device))
    eye = torch.eye(width, dtype=Q_A.dtype, device=Q_A.device)
    bases = []
    for unit in selected(Q_C) or []:
        bases.append(eye)
        if unit in extra:
            inside = Q_A.T @ torch.cat(extra[unit], 1).to(Q_A)
            bases[-1] = torch.linalg.qr(inside, mode="complete").Q[:, inside.shape[1] :]
    most = max((basis.shape[1] for basis in bases), default=0)
    W = torch.stack([torch.cat([b, b.new_zeros(width, most - b.shape[1])], 1) for b in bases])
    valid = torch.stack([torch.arange(most, device=index.device) < b.shape[1] for b in bases])
    return LayerPiece(index, Q_C, Q_A, W, valid.flatten().nonzero()[:, 0])
