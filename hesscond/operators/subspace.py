"""Subspaces of Rⁿ with the projections onto them and onto their orthogonal complements."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch


class Subspace(ABC):
    """Subspace of Rⁿ, known by its orthogonal projector.

    Attributes
    ----------
    order
        n.
    dimension
        Dimension of the subspace.
    """

    order: int
    dimension: int

    @abstractmethod
    def project(self, vectors: torch.Tensor) -> torch.Tensor:
        """Components (n, k) of ``vectors`` (n, k) in the subspace, in their dtype."""

    def remove(self, vectors: torch.Tensor) -> torch.Tensor:
        """Components of ``vectors`` (n, k) orthogonal to the subspace."""
        return vectors - self.project(vectors)


class Span(Subspace):
    """Span of orthonormal columns Q (n, d).

    Examples
    --------
    >>> Span(torch.eye(3)[:, :1]).remove(torch.ones(3, 1))[:, 0]
    tensor([0., 1., 1.])
    """

    def __init__(self, Q: torch.Tensor) -> None:
        self.Q = Q
        self.order, self.dimension = Q.shape

    @classmethod
    def of(cls, vectors: torch.Tensor) -> Span:
        """Span of independent ``vectors`` (n, d)."""
        return cls(torch.linalg.qr(vectors).Q)

    def project(self, vectors: torch.Tensor) -> torch.Tensor:
        Q = self.Q.to(vectors)
        return Q @ (Q.T @ vectors)


class CoordinateSpan(Subspace):
    """Span of some unit vectors, those of the distinct rows ``index`` (d,) of Rⁿ."""

    def __init__(self, order: int, index: torch.Tensor) -> None:
        self.order, self.index, self.dimension = order, index, len(index)

    def project(self, vectors: torch.Tensor) -> torch.Tensor:
        result = torch.zeros_like(vectors)
        result[self.index] = vectors[self.index]
        return result


class KroneckerComplement(Subspace):
    """Orthogonal complement of range(Q_C) ⊗ range(Q_A), for each of G blocks of Rⁿ.

    For a block V (m, n̂) of the vector it is {V : P_C V P_A = 0}, P_C = Q_C Q_Cᵀ and P_A = Q_A Q_Aᵀ: the sum of
    null(Q_Cᵀ) ⊗ Rⁿ̂ and Rᵐ ⊗ null(Q_Aᵀ), which is the null space of C ⊗ A. Its dimension is G m n̂ − Σ r_C r_A. The
    orthonormal columns Q_C (m, r_C) and Q_A (n̂, r_A) are given for each block.
    """

    def __init__(self, Q_C: Sequence[torch.Tensor], Q_A: Sequence[torch.Tensor]) -> None:
        self.Q_C, self.Q_A = stacked(Q_C), stacked(Q_A)
        groups, units, _ = self.Q_C.shape
        self.order = groups * units * self.Q_A.shape[1]
        self.dimension = self.order - sum(c.shape[1] * a.shape[1] for c, a in zip(Q_C, Q_A, strict=True))
        self._all_C, self._all_A = (all(Q.shape[0] == Q.shape[1] for Q in bases) for bases in (Q_C, Q_A))

    def remove(self, vectors: torch.Tensor) -> torch.Tensor:
        Q_C, Q_A = self.Q_C.to(vectors), self.Q_A.to(vectors)
        V = as_blocks(vectors, Q_C.shape[1], Q_A.shape[1])
        if not self._all_C:
            V = Q_C @ (Q_C.mT @ V)
        if not self._all_A:
            V = (V @ Q_A) @ Q_A.mT
        return as_vectors(V)

    def project(self, vectors: torch.Tensor) -> torch.Tensor:
        return vectors - self.remove(vectors)

    def diagonal(self) -> torch.Tensor:
        """Diagonal (n,) of the projector."""
        kept = [Q.square().sum(2) for Q in (self.Q_C, self.Q_A)]
        return (1 - kept[0][:, :, None] * kept[1][:, None, :]).flatten()


def stacked(bases: Sequence[torch.Tensor]) -> torch.Tensor:
    """Bases (n, r_g) stacked (G, n, r), padded with columns of zeros."""
    width = max(basis.shape[1] for basis in bases)
    return torch.stack([torch.cat([basis, basis.new_zeros(len(basis), width - basis.shape[1])], 1) for basis in bases])


def as_blocks(vectors: torch.Tensor, units: int, width: int) -> torch.Tensor:
    """Vectors (G m n̂, k) as blocks (k, G, m, n̂)."""
    return vectors.T.reshape(vectors.shape[1], len(vectors) // (units * width), units, width)


def as_vectors(blocks: torch.Tensor) -> torch.Tensor:
    """Inverse of `as_blocks`."""
    return blocks.flatten(1).T


class OrthogonalSum(Subspace):
    """Sum of subspaces that are orthogonal to one another."""

    def __init__(self, parts: Sequence[Subspace]) -> None:
        self.parts, self.order = list(parts), parts[0].order
        self.dimension = sum(part.dimension for part in parts)

    def project(self, vectors: torch.Tensor) -> torch.Tensor:
        result = self.parts[0].project(vectors)
        for part in self.parts[1:]:
            result = result + part.project(vectors)
        return result


class DirectSum(Subspace):
    """Sum of subspaces of disjoint parts of Rⁿ (slices or indices), such as the parameters of layers."""

    def __init__(self, order: int, parts: Sequence[tuple[slice | torch.Tensor, Subspace]]) -> None:
        self.order, self.parts = order, list(parts)
        self.dimension = sum(part.dimension for _, part in self.parts)

    def project(self, vectors: torch.Tensor) -> torch.Tensor:
        result = torch.zeros_like(vectors)
        for where, part in self.parts:
            result[where] = part.project(vectors[where])
        return result
