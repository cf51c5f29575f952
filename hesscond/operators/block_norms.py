"""Frobenius norms of the blocks of a symmetric operator, and how much of it lies on the block diagonal.

For a vector v of random signs on the rows of block a, and zero elsewhere, E ‖(Av)_b‖² = ‖A_ba‖²_F and E vᵀAv = tr A_aa
(Hutchinson 1990). With the columns of the identity in the place of v both are exact.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from hesscond.errors import ConfigError
from hesscond.operators.estimates import BLOCK, Estimate
from hesscond.operators.operator import SymmetricOperator
from hesscond.operators.parallel import led


@dataclass(frozen=True)
class BlockNorms:
    """The blocks A_ab of an operator whose rows are divided into m blocks, and these into groups.

    Attributes
    ----------
    squares
        (m, m) ‖A_ab‖²_F.
    traces
        (m,) tr A_aa.
    blocks
        Σ_a ‖A_aa‖²_F / Σ_ab ‖A_ab‖²_F: how much of A lies on the diagonal of blocks; NaN for A = 0.
    groups
        The same for the diagonal of groups.
    within
        By group, the same as ``blocks`` for its part of A alone.
    """

    squares: Estimate[torch.Tensor]
    traces: Estimate[torch.Tensor]
    blocks: Estimate[float]
    groups: Estimate[float]
    within: tuple[Estimate[float], ...]


def block_norms(
    A: SymmetricOperator,
    blocks: Sequence[torch.Tensor],
    probes: int | None = None,
    *,
    groups: Sequence[int] | None = None,
    seed: int = 0,
) -> BlockNorms:
    """Norms and traces of blocks, from products with vectors that are zero outside of a block.

    A block is known exactly from as many products as it has rows, and is where these are no more than ``probes``.
    ‖A_ab‖ = ‖A_ba‖ is the mean of what both say, or what the exact one does.

    Parameters
    ----------
    A
        The operator, of order n.
    blocks
        Rows of each block (n_a,), none of them twice; A is restricted to the rows of all blocks together.
    probes
        Random vectors for a block; None: all are exact.
    groups
        The group of each block, from 0; None: one for all.
    seed
        Seed of the random signs.

    Returns
    -------
    BlockNorms
        On the host.

    Raises
    ------
    ConfigError
        A row twice, an empty block, or too few probes for an error estimate.
    """
    rows = torch.cat(list(blocks))
    if not all(map(len, blocks)):
        raise ConfigError("a block has no rows: leave it out")
    if len(rows.unique()) < len(rows):
        raise ConfigError("blocks overlap: a row belongs to two of them")
    if probes is not None and probes < 2:
        raise ConfigError(f"an estimate takes at least 2 probes to know its error, not {probes}")
    return led(A, lambda: measured(A, blocks, probes, [0] * len(blocks) if groups is None else list(groups), seed))


def measured(
    A: SymmetricOperator, blocks: Sequence[torch.Tensor], probes: int | None, groups: list[int], seed: int
) -> BlockNorms:
    """The norms, block column by block column."""
    generator = torch.Generator().manual_seed(seed)
    sizes = [len(block) for block in blocks]
    rows, group = torch.cat(list(blocks)).to(A.device), torch.tensor(groups)
    owner = torch.arange(len(blocks), device=A.device).repeat_interleave(torch.tensor(sizes, device=A.device))
    exact = torch.tensor([probes is None or size <= probes for size in sizes])
    squares, variances = (torch.zeros(len(blocks), len(blocks), dtype=torch.float64) for _ in range(2))
    weights = torch.zeros_like(squares)
    traces, sums = [], []
    for a, block in enumerate(blocks):
        count = sizes[a] if exact[a] else int(probes or 0)
        norms, diagonal = column(A, block, count, generator if not exact[a] else None, rows, owner, len(blocks))
        if exact[a]:
            # one sample that has no spread
            norms, diagonal = norms.sum(1, keepdim=True), diagonal.sum(0, keepdim=True)
        squares[a], variances[a] = norms.mean(1), squared_error(norms)
        traces.append((float(diagonal.mean()), float(squared_error(diagonal))))
        weight = torch.where(exact == exact[a], 1.0, 2.0 if exact[a] else 0.0).to(torch.float64)
        weight[a] = 1.0
        weights[a] = weight / 2
        shares = weight[:, None] * norms
        sums.append(torch.stack([norms[a], shares[group == group[a]].sum(0), shares.sum(0)]))
    error = weights.square() * variances
    error = (error + error.T).fill_diagonal_(0) + variances.diagonal().diag()
    products = sum(size if known else int(probes or 0) for size, known in zip(sizes, exact, strict=True))
    drawn = 0 if bool(exact.all()) else int(probes or 0)
    values, errors = torch.tensor(traces, dtype=torch.float64).T
    return BlockNorms(
        Estimate(weights * squares + (weights * squares).T, error.sqrt(), drawn, products),
        Estimate(values, errors.sqrt(), drawn, products),
        ratio([(own, whole) for own, _, whole in sums], drawn, products),
        ratio([(inside, whole) for _, inside, whole in sums], drawn, products),
        tuple(
            ratio(
                [(own, inside) for (own, inside, _), at in zip(sums, groups, strict=True) if at == g], drawn, products
            )
            for g in range(max(groups) + 1)
        ),
    )


def column(
    A: SymmetricOperator,
    block: torch.Tensor,
    count: int,
    generator: torch.Generator | None,
    rows: torch.Tensor,
    owner: torch.Tensor,
    blocks: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """‖(Av)_b‖² (blocks, count) and vᵀAv (count,) of vectors v on a block: its identity without a generator."""
    norms, diagonal = [], []
    for start in range(0, count, BLOCK):
        width = min(BLOCK, count - start)
        if generator is None:
            own = torch.zeros(len(block), width)
            own[start : start + width].fill_diagonal_(1)
        else:
            own = torch.randint(0, 2, (len(block), width), generator=generator, dtype=torch.int8).mul_(2).sub_(1)
        vectors = torch.zeros(A.order, width, dtype=A.dtype, device=A.device)
        vectors[block.to(A.device)] = own.to(A.device, A.dtype)
        image = A.multiply(vectors).to(torch.float64)
        diagonal.append((vectors * image).sum(0).cpu())
        found = image.new_zeros(blocks, width).index_add_(0, owner, image[rows].square())
        norms.append(found.cpu())
    return torch.cat(norms, 1), torch.cat(diagonal)


def squared_error(samples: torch.Tensor) -> torch.Tensor:
    """The squared standard error of the mean over the last dimension; 0 of the one sample that is exact."""
    count = samples.shape[-1]
    return samples.var(-1) / count if count > 1 else torch.zeros_like(samples[..., 0])


def ratio(samples: Sequence[tuple[torch.Tensor, torch.Tensor]], probes: int, products: int) -> Estimate[float]:
    """A ratio of sums of means over independent samples, its error to first order in them."""
    part, whole = (float(sum(float(one[k].mean()) for one in samples)) for k in (0, 1))
    if whole == 0:
        return Estimate(math.nan, 0.0, probes, products)
    variance = sum(float(squared_error(one - part / whole * other)) for one, other in samples)
    return Estimate(part / whole, math.sqrt(variance) / abs(whole), probes, products)
