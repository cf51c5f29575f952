"""Trace of an operator from its products with a few random vectors.

With Q (n, s) orthonormal, R = I − QQᵀ and A symmetric,

    A = QQᵀA + AQQᵀ − Q(QᵀAQ)Qᵀ + RAR.

The first three terms are known from Q and AQ; only the last is estimated, from random signs ω (Hutchinson 1990:
E ωωᵀ = I). Q spans A times random signs, so that RAR is small where the spectrum decays (Hutch++: Meyer, Musco, Musco
and Woodruff, SOSA 2021).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch

from hesscond.errors import ConfigError
from hesscond.operators.operator import SymmetricOperator, identity_blocks
from hesscond.operators.parallel import led

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


def trace(A: SymmetricOperator, probes: int = 30, *, seed: int = 0) -> Estimate[float]:
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

    Returns
    -------
    Estimate[float]

    Raises
    ------
    ConfigError
        Fewer than 4 probes.

    Examples
    --------
    >>> from hesscond.operators import Diagonal
    >>> trace(Diagonal(torch.arange(1.0, 5.0)), 4)
    Estimate(value=10.0, error=0.0, probes=0, products=4)
    """
    if probes >= A.order:
        return led(A, lambda: Estimate(float(exact_diagonal(A).sum()), 0.0, 0, A.order))
    if probes < FEWEST:
        raise ConfigError(f"a trace takes at least {FEWEST} probes to know its error, not {probes}")
    return led(A, lambda: estimated_trace(A, probes, seed))


def estimated_trace(A: SymmetricOperator, products: int, seed: int) -> Estimate[float]:
    """Estimate of the trace from a third of the products for Q, as many for AQ, and random signs for the others."""
    generator = torch.Generator().manual_seed(seed)
    basis = products // 3
    probes = products - 2 * basis
    image = torch.cat([A.multiply(signs) for signs in random_signs(A, basis, generator)], 1)
    # scaled first, as Householder vectors square the entries
    Q = torch.linalg.qr(image / image.abs().amax().clamp_min(torch.finfo(image.dtype).tiny)).Q
    del image
    AQ = torch.cat([A.multiply(block) for block in Q.split(BLOCK, 1)], 1)
    known = ((2 * AQ - Q @ (Q.T @ AQ)) * Q).sum(1, dtype=torch.float64)

    def without(vectors: torch.Tensor) -> torch.Tensor:
        return vectors - Q @ (Q.T @ vectors)

    parts = ((signs, without(A.multiply(without(signs)))) for signs in random_signs(A, probes, generator))
    samples = torch.cat([(signs * image).sum(0, dtype=torch.float64) for signs, image in parts])
    error = float(samples.std()) / math.sqrt(probes)
    return Estimate(float(known.sum() + samples.mean()), error, probes, products)


def random_signs(A: SymmetricOperator, count: int, generator: torch.Generator) -> Iterator[torch.Tensor]:
    """Yield blocks (n, ≤ BLOCK) of random signs, ``count`` columns in all, of the operator's dtype on its device."""
    for start in range(0, count, BLOCK):
        bits = torch.randint(0, 2, (A.order, min(BLOCK, count - start)), generator=generator, dtype=torch.int8)
        yield bits.to(A.device, A.dtype).mul_(2).sub_(1)


def exact_diagonal(A: SymmetricOperator) -> torch.Tensor:
    """Diagonal (n,) in float64, from n products."""
    return torch.cat(
        [
            A.multiply(block)[start : start + block.shape[1]].diagonal().to(torch.float64)
            for start, block in identity_blocks(A.order, A.dtype, A.device)
        ]
    )
