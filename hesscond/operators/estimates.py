"""Trace, diagonal and Frobenius norm of an operator from its products with a few random vectors.

Each is exact on the span Q of A times random signs, and estimated from further random signs on its complement
(Hutch++: Meyer, Musco, Musco and Woodruff, SOSA 2021; docs/concepts/bounds.md).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch

from hesscond.errors import ConfigError
from hesscond.operators import operator

Value = TypeVar("Value", float, torch.Tensor)

#: Random vectors that are multiplied at a time.
BLOCK = 16

#: Fewest products from which the error is estimated.
FEWEST = 4


@dataclass(frozen=True)
class Estimate(Generic[Value]):
    """Estimate of a number, or of a vector, from random vectors.

    Attributes
    ----------
    value
        The estimate, in float64.
    error
        Standard error of the estimate, from the spread over the probes: the exact value is within it in about two cases
        of three, and within twice of it in nineteen of twenty; 0 if the value is exact but for rounding, infinite from
        one probe.
    probes
        Number of random vectors whose spread gave the error; 0: none were needed.
    products
        Number of products with one vector in all.
    """

    value: Value
    error: Value
    probes: int
    products: int


def trace(A: operator.SymmetricOperator, probes: int = 30, *, seed: int = 0) -> Estimate[float]:
    """Estimate of the trace of A by Hutch++.

    Parameters
    ----------
    A
        The operator, of order n.
    probes
        Number of products; with n or more the trace is exact, from n of them. A third is spent on a basis of the
        dominant part and one on its image, in memory for 2·probes/3 vectors.
    seed
        Seed of the random signs.

    Raises
    ------
    ConfigError
        Fewer than 4 probes, which are too few to know the error.

    Examples
    --------
    >>> from hesscond.operators import Diagonal
    >>> trace(Diagonal(torch.arange(1.0, 5.0)), 4)
    Estimate(value=10.0, error=0.0, probes=0, products=4)
    """
    if probes >= A.order:
        return Estimate(float(exact_diagonal(A).sum()), 0.0, 0, A.order)
    part = Dominant(A, probes, seed)
    Q, AQ = part.Q, part.AQ
    known = ((2 * AQ - Q @ (Q.T @ AQ)) * Q).sum(1, dtype=torch.float64)
    parts = ((signs, part.without(image)) for signs, image in part.images())
    samples = torch.cat([(signs * image).sum(0, dtype=torch.float64) for signs, image in parts])
    error = float(samples.std()) / math.sqrt(part.probes)
    return Estimate(float(known.sum() + samples.mean()), error, part.probes, probes)


def frobenius_norm(A: operator.SymmetricOperator, probes: int = 30, *, seed: int = 0) -> Estimate[float]:
    """Estimate of the Frobenius norm of A, as by `trace`; its error is to first order in that of the square.

    Examples
    --------
    >>> from hesscond.operators import Diagonal
    >>> frobenius_norm(Diagonal(torch.tensor([3.0, 4.0])), 4)
    Estimate(value=5.0, error=0.0, probes=0, products=2)
    """
    if probes >= A.order:
        blocks = operator.identity_blocks(A.order, A.dtype, A.device)
        return Estimate(math.hypot(*(norm_of(A.multiply(columns)) for _, columns in blocks)), 0.0, 0, A.order)
    part = Dominant(A, probes, seed)
    scale = float(part.AQ.abs().max()) or 1.0
    samples = torch.cat([(image / scale).to(torch.float64).square().sum(0) for _, image in part.images()])
    value = math.sqrt((norm_of(part.AQ) / scale) ** 2 + float(samples.mean()))
    error = float(samples.std()) / math.sqrt(part.probes) / (2 * value) if value else 0.0
    return Estimate(scale * value, scale * error, part.probes, probes)


def diagonal(A: operator.SymmetricOperator, probes: int = 30, *, seed: int = 0) -> Estimate[torch.Tensor]:
    """Estimate of the diagonal (n,) of A, the mean of ω ∘ Aω over random signs ω; exact with n probes or more.

    Source: Bekas, Kokiopoulou and Saad, Appl. Numer. Math. 57 (2007), 1214-1229.
    """
    if probes >= A.order:
        entries = exact_diagonal(A)
        return Estimate(entries, torch.zeros_like(entries), 0, A.order)
    refuse_few(probes)
    total, squares = torch.zeros(2, A.order, dtype=torch.float64, device=A.device)
    for signs in random_signs(A, probes, torch.Generator().manual_seed(seed)):
        samples = (signs * A.multiply(signs)).to(torch.float64)
        total += samples.sum(1)
        squares += samples.square().sum(1)
    mean = total / probes
    spread = (squares / probes - mean.square()).clamp_min(0)
    return Estimate(mean, (spread / (probes - 1)).sqrt(), probes, probes)


def refuse_few(probes: int) -> None:
    """Raise a ConfigError for too few probes to know an error."""
    if probes < FEWEST:
        raise ConfigError(f"an estimate takes at least {FEWEST} probes to know its error, not {probes}")


class Dominant:
    """Basis Q of the dominant part of A and AQ, from two thirds of the products, and random signs for the others."""

    def __init__(self, A: operator.SymmetricOperator, products: int, seed: int) -> None:
        refuse_few(products)
        self.A = A
        self._generator = torch.Generator().manual_seed(seed)
        basis = products // 3
        self.probes = products - 2 * basis
        image = torch.cat([A.multiply(signs) for signs in random_signs(A, basis, self._generator)], 1)
        # scaled first, as Householder vectors square the entries
        self.Q = torch.linalg.qr(image / image.abs().amax().clamp_min(torch.finfo(image.dtype).tiny)).Q
        self.AQ = torch.cat([A.multiply(block) for block in self.Q.split(BLOCK, 1)], 1)

    def without(self, vectors: torch.Tensor) -> torch.Tensor:
        """R V."""
        return vectors - self.Q @ (self.Q.T @ vectors)

    def images(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield random signs ω and A R ω."""
        for signs in random_signs(self.A, self.probes, self._generator):
            yield signs, self.A.multiply(self.without(signs))


def norm_of(A: torch.Tensor) -> float:
    """Frobenius norm in float64, of entries whose squares may overflow or underflow."""
    scale = float(A.abs().max()) or 1.0
    return scale * float(torch.linalg.vector_norm((A / scale).to(torch.float64)))


def random_signs(A: operator.SymmetricOperator, count: int, generator: torch.Generator) -> Iterator[torch.Tensor]:
    """Yield blocks (n, ≤ BLOCK) of random signs, ``count`` columns in all, of the operator's dtype on its device."""
    for start in range(0, count, BLOCK):
        bits = torch.randint(
            0, 2, (A.order, min(BLOCK, count - start)), generator=generator, dtype=torch.int8, device="cpu"
        )
        yield bits.to(A.device, A.dtype).mul_(2).sub_(1)


def exact_diagonal(A: operator.SymmetricOperator) -> torch.Tensor:
    """Diagonal (n,) in float64, from n products."""
    return torch.cat(
        [
            A.multiply(block)[start : start + block.shape[1]].diagonal().to(torch.float64)
            for start, block in operator.identity_blocks(A.order, A.dtype, A.device)
        ]
    )
