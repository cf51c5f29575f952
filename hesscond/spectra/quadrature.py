"""Gauss and Gauss–Radau quadrature from the coefficients of Lanczos recurrences.

k steps from a unit vector v make a Jacobi matrix J (k, k) with diagonal α_1 … α_k and off-diagonal β_1 … β_(k−1), and
one more β_k. J's eigenvalues and the SQUARED first components of its eigenvectors are the nodes and weights of Gauss
quadrature for μ, the spectral measure of v: ∫ f dμ = vᵀf(A)v, exactly for polynomials of degree 2k − 1 (Golub and
Welsch 1969; Golub and Meurant, *Matrices, Moments and Quadrature*, 2010, chapters 4 and 6).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from scipy.linalg import eigh_tridiagonal

from hesscond.operators import Subspace, SymmetricOperator
from hesscond.operators.operator import ROUNDING

#: Largest entry of a Radau matrix, in units of its size. It moves the prescribed node by no more than its inverse.
LARGEST_ENTRY = 1e15

#: Jacobi matrices that are decomposed at a time.
CHUNK = 256

#: Vectors besides each basis: the product, its copy in the layout of the basis, and the part removed from it.
WORKING = 3


@dataclass(frozen=True)
class Recurrence:
    """Coefficients of Lanczos recurrences from one vector."""

    alphas: np.ndarray  # (k,) float64 α_1 … α_k
    #: (k,) float64 β_1 … β_k; the last is 0 if the Krylov space is invariant, and μ the measure of J itself
    betas: np.ndarray

    @property
    def invariant(self) -> bool:
        """Whether the Krylov space is invariant, so that the recurrences ended."""
        return self.betas[-1] == 0

    def gauss(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Nodes θ of k-point Gauss quadrature, ascending, weights, which add up to 1, and residuals."""
        nodes, vectors = eigh_tridiagonal(self.alphas, self.betas[:-1])
        weights = vectors[0] ** 2
        return nodes, weights / weights.sum(), self.betas[-1] * np.abs(vectors[-1])

    def left_radau(self, x: float) -> tuple[np.ndarray, np.ndarray]:
        """Nodes and weights of Gauss–Radau quadrature with a node at x, left of the spectrum; see `radau`."""
        if self.invariant:
            return self.gauss()[:2]
        pivot = self.alphas[0] - x
        for alpha, beta in zip(self.alphas[1:], self.betas[:-1], strict=True):
            pivot = alpha - x - beta**2 / pivot
        nodes, vectors = eigh_tridiagonal(np.append(self.alphas, x + self.betas[-1] ** 2 / pivot), self.betas)
        # x is the smallest node, up to rounding
        return np.maximum(nodes, x), vectors[0] ** 2

    def below(self, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Bounds of μ's distribution function: lower ≤ μ((−∞, x)) and μ((−∞, x]) ≤ upper, for x (m,).

        The inequalities of Chebyshev, Markov and Stieltjes: of a quadrature rule with a node at x, positive weights
        and the exactness of Gauss–Radau, the weights left of x are no more than μ has there, and with that of x no
        less (Golub and Meurant 2010, section 6.2, and Szegő, *Orthogonal Polynomials*, section 3.41). They hold for
        every μ with these recurrence coefficients; so neither bound can be improved without another product.
        """
        outside = np.isinf(x)
        lower, upper = (np.where(x > 0, 1.0, 0.0) for _ in range(2))
        inner = np.flatnonzero(~outside)
        if self.invariant:
            nodes, weights, _ = self.gauss()
            total = np.concatenate([[0.0], np.cumsum(weights)])
            lower[inner] = total[np.searchsorted(nodes, x[inner], "left")]
            upper[inner] = total[np.searchsorted(nodes, x[inner], "right")]
            return lower, np.minimum(upper, 1.0)
        for part in np.array_split(inner, max(1, -(-len(inner) // CHUNK))):
            lower[part], upper[part] = self.radau(x[part])
        return lower, upper

    def radau(self, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Weights left of x, without and with that of x, of the Gauss–Radau rules with a node prescribed at x (m,).

        The rule is that of J bordered by β_k and by the entry x + β_k²/d, with d the last pivot of J − x (Golub, SIAM
        Review 15, 1973). As x nears a Gauss node d vanishes and the rule becomes that of J itself, with a node far
        away without weight.
        """
        k, size = len(self.alphas), float(np.abs(self.alphas).max() + 2 * self.betas.max())
        scaled, alphas, betas = x / size, self.alphas / size, self.betas / size
        pivots = alphas[0] - scaled
        with np.errstate(divide="ignore"):
            for alpha, beta in zip(alphas[1:], betas[:-1], strict=True):
                pivots = alpha - scaled - beta**2 / pivots
            entries = np.clip(betas[-1] ** 2 / pivots, -LARGEST_ENTRY, LARGEST_ENTRY)
        matrices = np.zeros((len(x), k + 1, k + 1))
        inner = np.arange(k)
        matrices[:, inner, inner] = alphas
        matrices[:, inner + 1, inner] = betas  # eigh reads the lower triangle
        matrices[:, k, k] = scaled + entries
        nodes, vectors = np.linalg.eigh(matrices)
        weights = vectors[:, 0, :] ** 2
        weights /= weights.sum(1, keepdims=True)
        # x is a node, up to rounding
        own = np.abs(nodes - scaled[:, None]).argmin(1)
        total = np.cumsum(weights, 1)
        upper = total[np.arange(len(x)), own]
        return upper - weights[np.arange(len(x)), own], np.minimum(upper, 1.0)


def unit_vectors(
    order: int, count: int, seed: int, null_space: Subspace | None, device: torch.device | str = "cpu"
) -> Iterator[torch.Tensor]:
    """Random vectors (n,) in float64 on a device, uniform on the unit sphere of the null space's complement.

    Then E vᵀf(A)v is the mean of f over the eigenvalues that are not known to be null. The host draws them, one after
    the other, so that neither the device nor the size of blocks changes them.
    """
    generator = torch.Generator().manual_seed(seed)
    for _ in range(count):
        vector = torch.randn(order, generator=generator, dtype=torch.float64).to(device)
        if null_space is not None:
            vector = null_space.remove(vector[:, None])[:, 0]
        yield vector / torch.linalg.vector_norm(vector)


def recurrences(
    operator: SymmetricOperator,
    starts: Sequence[torch.Tensor] | Iterator[torch.Tensor],
    count: int,
    steps: int,
    *,
    dtype: torch.dtype,
    null_space: Subspace | None,
    on_step: Callable[[], None] = lambda: None,
) -> list[Recurrence]:
    """Lanczos recurrences from the next ``count`` unit vectors of ``starts``, with one product a step for all.

    Every new vector is orthogonalized against its predecessors twice, by classical Gram-Schmidt, so that no eigenvalue
    comes twice (Giraud, Langou, Rozložník and van den Eshof, Numer. Math. 101, 2005). Recurrences whose next vector
    would be rounding only have found an invariant subspace and end there.
    """
    order, device = operator.order, operator.device
    whole = order - (null_space.dimension if null_space is not None else 0)
    basis = torch.empty(count, steps, order, dtype=dtype, device=device)
    for row, start in zip(basis[:, 0], starts, strict=False):
        row.copy_(start)
    alphas = torch.zeros(count, steps, dtype=torch.float64, device=device)
    betas = torch.zeros_like(alphas)
    lengths = torch.zeros(count, dtype=torch.int64, device=device)
    active = torch.ones(count, dtype=torch.bool, device=device)
    size = torch.zeros(count, dtype=torch.float64, device=device)
    # coefficients of rounding only would make Lanczos vectors of it
    threshold = max(operator.rounding, ROUNDING * torch.finfo(dtype).eps)
    exponent: int | None = None
    for k in range(steps):
        product = operator.multiply(basis[:, k].T.to(operator.dtype))
        if exponent is None:
            # a power of two takes the scale out exactly: no square over- or underflows, in float32 either
            largest = float(product.abs().max())
            most = math.frexp(torch.finfo(dtype).max)[1] - 2
            exponent = min(max(math.frexp(largest)[1], -most), most) if largest > 0 else 0
        residual = product.T.contiguous().to(dtype).mul_(2.0**-exponent)
        del product
        if null_space is not None:
            residual = null_space.remove(residual.T).T.contiguous()
        known = basis[:, : k + 1]
        for _ in range(2):
            coefficients = torch.bmm(known, residual[:, :, None])
            alphas[:, k] += coefficients[:, k, 0]
            residual.unsqueeze(1).baddbmm_(coefficients.mT, known, alpha=-1)
        if null_space is not None:
            residual = null_space.remove(residual.T).T.contiguous()
        lengths += active
        norms = torch.linalg.vector_norm(residual, dim=1, dtype=torch.float64)
        size = torch.maximum(size, alphas[:, k].abs() + norms)
        active = active & (norms > threshold * size) & (k + 1 < whole)
        betas[:, k] = torch.where(active, norms, 0.0)
        on_step()
        if k + 1 == steps or not bool(active.any()):
            break
        # recurrences that ended continue as zero vectors
        basis[:, k + 1] = residual / torch.where(active, norms, math.inf)[:, None]
    return [
        Recurrence(np.ldexp(alpha[:length], exponent or 0), np.ldexp(beta[:length], exponent or 0))
        for alpha, beta, length in zip(alphas.cpu().numpy(), betas.cpu().numpy(), lengths.tolist(), strict=True)
    ]
