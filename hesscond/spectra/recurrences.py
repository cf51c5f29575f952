"""Lanczos recurrences of several independent vectors at a time, with full reorthogonalization."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch

from hesscond.operators import Subspace, SymmetricOperator
from hesscond.operators.operator import ROUNDING
from hesscond.spectra.quadrature import Recurrence

#: Vectors beside each basis: the product, its copy in the layout of the basis, and what Gram-Schmidt takes off it.
WORKING = 3


def unit_vectors(
    order: int, count: int, seed: int, null_space: Subspace | None, device: torch.device | str = "cpu"
) -> Iterator[torch.Tensor]:
    """Random vectors (n,) in float64 on a device, uniform on the unit sphere of the null space's complement.

    So E vᵀf(A)v is the mean of f over the eigenvalues that are not known to be null. The host draws them, one after
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
    """Lanczos recurrences from the next ``count`` of ``starts``; one product with all of them a step.

    Every new vector is orthogonalized against its predecessors twice, by classical Gram-Schmidt, so that no eigenvalue
    comes twice (Giraud, Langou, Rozložník and van den Eshof, Numer. Math. 101, 2005). Recurrences whose next vector
    would be rounding only have found an invariant subspace and end there.

    Parameters
    ----------
    operator
        A, of order n.
    starts
        Gives unit vectors (n,), of any precision on any device.
    count
        How many are taken.
    steps
        At most n less the dimension of the null space.
    dtype
        Precision of the recurrences.
    null_space
        Is kept out of the vectors.
    on_step
        Called after each product.

    Returns
    -------
    list[Recurrence]
        One for each vector.
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
        # those that ended go on as zero vectors
        basis[:, k + 1] = residual / torch.where(active, norms, math.inf)[:, None]
    return [
        Recurrence(np.ldexp(alpha[:length], exponent or 0), np.ldexp(beta[:length], exponent or 0))
        for alpha, beta, length in zip(alphas.cpu().numpy(), betas.cpu().numpy(), lengths.tolist(), strict=True)
    ]
