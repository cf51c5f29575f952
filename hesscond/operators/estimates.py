"""Trace and diagonal of an operator from its products with a few random vectors.

With Q (n, s) orthonormal, R = I − QQᵀ and A symmetric,

    A = QQᵀA + AQQᵀ − Q(QᵀAQ)Qᵀ + RAR.

The first three terms are known from Q and AQ; only the last is estimated, from random signs ω (Hutchinson 1990:
E ωωᵀ = I). Q spans A times random signs, so that RAR is small where the spectrum decays (Hutch++: Meyer, Musco, Musco
and Woodruff, SOSA 2021; Diag++: Baston and Nakatsukasa 2022). With s = 0 these are the classical estimators
(Hutchinson 1990; Bekas, Kokiopoulou and Saad, Appl. Numer. Math. 57, 2007).
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

TRACES = {"hutch++": 3, "hutchinson": 0}
DIAGONALS = {"diag++": 3, "bekas": 0}


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


def trace(A: SymmetricOperator, probes: int = 30, *, seed: int = 0, method: str = "hutch++") -> Estimate[float]:
    """Estimate of the trace of A.

    Parameters
    ----------
    A
        The operator, of order n.
    probes
        Number of products; with n or more the trace is exact, from n of them.
    seed
        Seed of the random signs.
    method
        "hutch++" spends a third of the products on a basis of the dominant part and one on its image, in memory for
        2·probes/3 vectors; "hutchinson" none.

    Returns
    -------
    Estimate[float]

    Raises
    ------
    ConfigError
        Too few probes for an error estimate, or an unknown method.

    Examples
    --------
    >>> from hesscond.operators import Diagonal
    >>> trace(Diagonal(torch.arange(1.0, 5.0)), 4)
    Estimate(value=10.0, error=0.0, probes=0, products=4)
    """
    plan = planned(A, probes, method, TRACES)
    return led(A, lambda: estimated_trace(A, plan, seed))


def estimated_trace(A: SymmetricOperator, plan: ProductPlan | None, seed: int) -> Estimate[float]:
    """Estimate of the trace by a plan."""
    if plan is None:
        return Estimate(float(exact_diagonal(A).sum()), 0.0, 0, A.order)
    known, parts = split(A, plan, seed)
    samples = torch.cat([(signs * image).sum(0, dtype=torch.float64) for signs, image in parts])
    error = float(samples.std()) / math.sqrt(plan.probes)
    return Estimate(float(known.sum() + samples.mean()), error, plan.probes, plan.products)


def diagonal(
    A: SymmetricOperator, probes: int = 30, *, seed: int = 0, method: str = "diag++"
) -> Estimate[torch.Tensor]:
    """Estimate of the diagonal of A.

    Parameters
    ----------
    A, probes, seed
        See `trace`.
    method
        "diag++" or "bekas", with the same difference as between the methods of `trace`.

    Returns
    -------
    Estimate[torch.Tensor]
        Values and errors (n,), on the operator's device.

    Raises
    ------
    ConfigError
        Too few probes for an error estimate, or an unknown method.
    """
    plan = planned(A, probes, method, DIAGONALS)
    return led(A, lambda: estimated_diagonal(A, plan, seed))


def estimated_diagonal(A: SymmetricOperator, plan: ProductPlan | None, seed: int) -> Estimate[torch.Tensor]:
    """Estimate of the diagonal by a plan."""
    if plan is None:
        exact = exact_diagonal(A)
        return Estimate(exact, torch.zeros_like(exact), 0, A.order)
    known, parts = split(A, plan, seed)
    mean, squares, count = torch.zeros_like(known), torch.zeros_like(known), 0
    for signs, image in parts:
        # as Chan, Golub and LeVeque (1979) join the means and squared deviations of two samples
        samples = (signs * image).to(torch.float64)
        size, centre = samples.shape[1], samples.mean(1)
        change = centre - mean
        squares += (samples - centre[:, None]).square().sum(1) + change.square() * (count * size / (count + size))
        mean += change * (size / (count + size))
        count += size
    error = (squares / (count * (count - 1))).sqrt()
    return Estimate(known + mean, error, plan.probes, plan.products)


@dataclass(frozen=True)
class ProductPlan:
    """Numbers of products for the basis Q, for its image (as many), and for random probes of the rest."""

    basis: int
    probes: int

    @property
    def products(self) -> int:
        """Total number of products."""
        return 2 * self.basis + self.probes


def planned(A: SymmetricOperator, products: int, method: str, shares: dict[str, int]) -> ProductPlan | None:
    """Plan of a method; None: the products suffice for the exact answer."""
    if method not in shares:
        raise ConfigError(f"method is one of {', '.join(shares)}, not {method!r}")
    if products >= A.order:
        return None
    basis = products // shares[method] if shares[method] else 0
    if products - 2 * basis < 2:
        fewest = 4 if shares[method] else 2
        raise ConfigError(f"{method} takes at least {fewest} probes to know its error, not {products}")
    return ProductPlan(basis, products - 2 * basis)


def split(
    A: SymmetricOperator, plan: ProductPlan, seed: int
) -> tuple[torch.Tensor, Iterator[tuple[torch.Tensor, torch.Tensor]]]:
    """Diagonal of A − RAR, and blocks of signs ω with RARω."""
    generator = torch.Generator().manual_seed(seed)
    if not plan.basis:
        known = torch.zeros(A.order, dtype=torch.float64, device=A.device)
        return known, ((signs, A.multiply(signs)) for signs in random_signs(A, plan.probes, generator))
    image = torch.cat([A.multiply(signs) for signs in random_signs(A, plan.basis, generator)], 1)
    # scaled first, as Householder vectors square the entries
    Q = torch.linalg.qr(image / image.abs().amax().clamp_min(torch.finfo(image.dtype).tiny)).Q
    del image
    AQ = torch.cat([A.multiply(block) for block in Q.split(BLOCK, 1)], 1)
    known = ((2 * AQ - Q @ (Q.T @ AQ)) * Q).sum(1, dtype=torch.float64)

    def without(vectors: torch.Tensor) -> torch.Tensor:
        return vectors - Q @ (Q.T @ vectors)

    return known, ((signs, without(A.multiply(without(signs)))) for signs in random_signs(A, plan.probes, generator))


def random_signs(A: SymmetricOperator, count: int, generator: torch.Generator) -> Iterator[torch.Tensor]:
    """Yield blocks (n, ≤ BLOCK) of random signs, ``count`` columns in all, of the operator's dtype on its device.

    They are drawn on the host, so that they are the same for every device.
    """
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
