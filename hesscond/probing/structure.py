"""Block structure of the Hessian of a model: norms of its blocks, by layers and by rows."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import nn

from hesscond.errors import ConfigError
from hesscond.hessians import HessianOperator
from hesscond.hessians.blocks import Block
from hesscond.hessians.catalogue import Catalogue, Choice
from hesscond.hessians.parameters import BlockLayout
from hesscond.operators import Estimate, SymmetricOperator
from hesscond.operators.estimates import BLOCK
from hesscond.probing.check import Check, check_operator, refuse_failed
from hesscond.probing.products import occurring
from hesscond.problem.evaluation import Batch, LossFunction
from hesscond.problem.weighting import BatchWeight
from hesscond.problem.wrappers import measurable

if TYPE_CHECKING:
    import pandas as pd

PARTITIONS = ("layer", "row")
#: By default, norms are exact up to this number of parameters, and above from this number of random vectors for each
#: block.
EXACT, PROBES = 4096, 30


@dataclass(frozen=True)
class BlockStructure:
    """Norms and traces of the blocks H_ab of a Hessian.

    Attributes
    ----------
    names
        Names of the m blocks, in the order of everything below: layers, or rows as ``"fc1[3]"``.
    layers
        Layer of each block.
    n_params
        Number of parameters of each block.
    trace
        (m,) tr H_aa.
    norms
        (m, m) ‖H_ab‖_F.
    share
        Σ_a ‖H_aa‖²_F / Σ_ab ‖H_ab‖²_F: share of H on the diagonal of these blocks.
    check
        Comparison of the operator with the double-backward product of the model itself; None: it was not made.

    Notes
    -----
    Each number is an `hesscond.operators.Estimate` with ``value``, standard ``error`` (0: exact but for rounding),
    ``probes`` (random vectors for a block) and ``products`` (with the Hessian in all).
    """

    names: tuple[str, ...]
    layers: tuple[str, ...]
    n_params: tuple[int, ...]
    trace: Estimate[torch.Tensor]
    norms: Estimate[torch.Tensor]
    share: Estimate[float]
    check: Check | None

    def to_frame(self) -> pd.DataFrame:
        """Table with one row per block: block, layer, n_params, trace, norm (‖H_aa‖_F), their ``_error``, norm_others.

        norm_others is ‖H_ab‖_F over all b ≠ a together.
        """
        import pandas as pd

        own = self.norms.value.diagonal()
        others = self.norms.value.clone().fill_diagonal_(0).norm(dim=1)
        columns = {"block": self.names, "layer": self.layers, "n_params": self.n_params}
        return pd.DataFrame(columns).assign(
            trace=self.trace.value.numpy(),
            trace_error=self.trace.error.numpy(),
            norm=own.numpy(),
            norm_error=self.norms.error.diagonal().numpy(),
            norm_others=others.numpy(),
        )


def block_structure(
    model: nn.Module,
    loss_fn: LossFunction,
    data: Batch | Iterable[Batch],
    layers: Iterable[str] | str | None = None,
    by: str = "layer",
    *,
    probes: int | None = None,
    seed: int = 0,
    dtype: torch.dtype | None = torch.float64,
    memory: float | None = None,
    reduction: str | None = None,
    weight: BatchWeight | None = None,
    check: bool = True,
) -> BlockStructure:
    """Block structure of the Hessian of a model, by layers or by rows: norms ‖H_ab‖_F and traces of its blocks.

    Layers are the blocks of `hesscond.probe`, rows their units: [b_i, w_i] of an output unit, the tokens that occur of
    an embedding, shift and scale of a feature, rows of packed or bare parameters. A parameter that belongs to no unit
    is one further block, and a layer without units is a single block. Parameters that require no gradient are left out.

    The model is left as it was.

    Parameters
    ----------
    model, loss_fn, data, dtype, memory, reduction, weight
        Arguments of `hesscond.HessianOperator`.
    layers
        Names as for `hesscond.probe`: modules, parameters, parts of them, and globs; None: every parameter that
        requires a gradient. Only the Hessian in these parameters is measured.
    by
        ``"layer"`` or ``"row"``.
    probes
        Random vectors for each block, whose norms are unbiased estimates; a block with no more parameters is exact.
        None: everything is exact up to 4,096 parameters, from as many products, and beyond that 30 of them.
    seed
        Seed of the random vectors.
    check
        Whether the operator is compared with the double-backward product of the model itself.

    Returns
    -------
    BlockStructure

    Raises
    ------
    ConfigError
        No such layer or partition; layers that overlap, or require no gradient; too few probes; what
        `hesscond.HessianOperator` refuses.
    CaptureError
        Raised by `hesscond.HessianOperator`; or the operator does not agree with the model; or, by rows, nothing is
        looked up in a table.

    References
    ----------
    Dong, Zhang, Luo, Yao, Sun: Towards Quantifying the Hessian Structure of Neural Networks (2025): Hessians of layers
    are nearly block diagonal by rows.

    Examples
    --------
    >>> _ = torch.manual_seed(0)
    >>> model = nn.Sequential(nn.Linear(5, 4), nn.ReLU(), nn.Linear(4, 3))
    >>> batch = torch.randn(20, 5), torch.randint(0, 3, (20,))
    >>> found = block_structure(model, nn.CrossEntropyLoss(), batch, by="row")
    >>> found.names[:2], found.norms.value.shape, found.norms.products
    (('0[0]', '0[1]'), torch.Size([7, 7]), 39)
    >>> 0 < found.share.value < block_structure(model, nn.CrossEntropyLoss(), batch).share.value < 1
    True
    """
    if by not in PARTITIONS:
        raise ConfigError(f"unknown partition {by!r}: use 'layer' or 'row'")
    if probes is not None and probes < 2:
        raise ConfigError(f"an estimate takes at least 2 probes to know its error, not {probes}")
    model = measurable(model)
    catalogue = Catalogue(model)
    choice = Choice.of(model, "*" if layers is None else layers, None, "layer")
    asked = [catalogue.trained(block) for block in choice.blocks(model).values()]
    catalogue.refuse_overlap(asked)
    H = HessianOperator(
        model,
        loss_fn,
        data,
        parameters=dict.fromkeys(key for block in asked for key in block.parameters),
        dtype=dtype,
        memory=memory,
        reduction=reduction,
        weight=weight,
    )
    if by == "row":
        asked = [part for block in asked for part in rows_that_occur(block, H, catalogue)]
    H = H.restricted(BlockLayout(asked, catalogue.parameters))
    verdict = None
    if check:
        verdict, _, _ = check_operator(H)
        refuse_failed("the Hessian", verdict)
    placed = {one.name: one.index - H.parts[one.name].start for one in H.placements if one.name in H.parts}
    rows: dict[str, dict[str, torch.Tensor]] = {}
    for block in asked:
        own = rows_of(block, placed.get(block.name)) if by == "row" else {block.name: torch.arange(block.order)}
        rows[block.name] = {name: H.parts[block.name].start + index for name, index in own.items()}
    if probes is None and H.order > EXACT:
        probes = PROBES
    return measured(H, rows, probes, seed, verdict)


def measured(
    H: SymmetricOperator,
    rows: Mapping[str, Mapping[str, torch.Tensor]],
    probes: int | None,
    seed: int,
    check: Check | None,
) -> BlockStructure:
    """Norms and traces of the blocks whose indices are given by layer and by name, one block column after another.

    ‖H_ab‖ = ‖H_ba‖ is the mean of both columns' results, or that of the exact one.
    """
    blocks = [index for own in rows.values() for index in own.values()]
    sizes = list(map(len, blocks))
    exact = torch.tensor([probes is None or size <= probes for size in sizes])
    owner = torch.arange(len(blocks)).repeat_interleave(torch.tensor(sizes)).to(H.device)
    everything = torch.cat(blocks).to(H.device)
    generator = torch.Generator().manual_seed(seed)
    squares, variances = (torch.zeros(len(blocks), len(blocks), dtype=torch.float64) for _ in range(2))
    weights, traces, sums = torch.zeros_like(squares), [], []
    for a, block in enumerate(blocks):
        parts = []
        for vectors in signs(H, block, int(probes or 0), generator, exact=bool(exact[a])):
            image = H.multiply(vectors).to(torch.float64)
            norms = image.new_zeros(len(blocks), vectors.shape[1]).index_add_(0, owner, image[everything].square())
            parts.append((norms.cpu(), (vectors * image).sum(0).cpu()))
        columns, diagonals = zip(*parts, strict=True)
        norms, diagonal = torch.cat(columns, 1), torch.cat(diagonals)
        if exact[a]:
            # one sample that has no spread
            norms, diagonal = norms.sum(1, keepdim=True), diagonal.sum(0, keepdim=True)
        squares[a], variances[a] = norms.mean(1), squared_error(norms)
        traces.append((float(diagonal.mean()), float(squared_error(diagonal))))
        weight = torch.where(exact == exact[a], 1.0, 2.0 if exact[a] else 0.0).to(torch.float64)
        weight[a] = 1.0
        weights[a] = weight / 2
        sums.append((norms[a], (weight[:, None] * norms).sum(0)))
    drawn = 0 if bool(exact.all()) else int(probes or 0)
    counts = drawn, sum(size if known else drawn for size, known in zip(sizes, exact.tolist(), strict=True))
    values = weights * squares
    norms = (values + values.T).sqrt()
    error = weights.square() * variances
    error = ((error + error.T).fill_diagonal_(0) + variances.diagonal().diag()).sqrt()
    # to first order in the error of the square
    error = torch.where(norms > 0, error / (2 * norms), error.sqrt())
    trace, spread = torch.tensor(traces, dtype=torch.float64).T
    return BlockStructure(
        tuple(name for own in rows.values() for name in own),
        tuple(layer for layer, own in rows.items() for _ in own),
        tuple(sizes),
        Estimate(trace, spread.sqrt(), *counts),
        Estimate(norms, error, *counts),
        ratio(sums, *counts),
        check,
    )


def signs(
    H: SymmetricOperator, block: torch.Tensor, probes: int, generator: torch.Generator, *, exact: bool
) -> Iterator[torch.Tensor]:
    """Vectors (n, ≤ 16) on the rows of a block: random signs (Hutchinson 1990), or the columns of the identity.

    For random signs v, E ‖(Hv)_b‖² = ‖H_ba‖²_F and E vᵀHv = tr H_aa; the identity's columns add up to both.
    """
    count = len(block) if exact else probes
    for start in range(0, count, BLOCK):
        width = min(BLOCK, count - start)
        if exact:
            own = torch.zeros(len(block), width)
            own[start : start + width].fill_diagonal_(1)
        else:
            own = torch.randint(0, 2, (len(block), width), generator=generator, dtype=torch.int8).mul_(2).sub_(1)
        vectors = torch.zeros(H.order, width, dtype=H.dtype, device=H.device)
        vectors[block.to(H.device)] = own.to(H.device, H.dtype)
        yield vectors


def squared_error(samples: torch.Tensor) -> torch.Tensor:
    """Squared standard error of the mean over the last dimension; 0 for one sample, which is exact."""
    count = samples.shape[-1]
    return samples.var(-1) / count if count > 1 else torch.zeros_like(samples[..., 0])


def ratio(samples: Sequence[tuple[torch.Tensor, torch.Tensor]], probes: int, products: int) -> Estimate[float]:
    """Ratio of two sums of means over independent samples, with its error to first order in them; NaN for 0/0."""
    part, whole = (float(sum(float(one[k].mean()) for one in samples)) for k in (0, 1))
    if whole == 0:
        return Estimate(math.nan, 0.0, probes, products)
    variance = sum(float(squared_error(one - part / whole * other)) for one, other in samples)
    return Estimate(part / whole, math.sqrt(variance) / abs(whole), probes, products)


def rows_that_occur(block: Block, H: HessianOperator, catalogue: Catalogue) -> list[Block]:
    """Split a block by the outputs of its parameters, or return it whole if its rows are not outputs.

    Rows of tables that nothing looks up are zero, and left out.
    """
    if block.layer is not None:
        return [block]
    try:
        found = catalogue.by_use(block, H.uses)
    except ConfigError:
        found = [replace(block, units=(), pieces=tuple(replace(piece, rows=None) for piece in block.pieces))]
    return [occurring(own, H, catalogue.parameters) if own.table else own for own in found]


def rows_of(block: Block, placed: torch.Tensor | None) -> dict[str, torch.Tensor]:
    """Indices of each row of a block in its vectors, by name; of the whole block if it has no rows.

    ``placed`` (m, w) are these indices for a plain layer. A parameter that belongs to no unit is a further row.
    """
    found: dict[str, list[torch.Tensor]] = {}
    start = 0
    if placed is not None and placed.numel() == block.order:
        found = {f"{block.name}[{unit}]": [own] for unit, own in zip(block.units, placed, strict=True)}
    else:
        for piece in block.pieces:
            numbers = torch.arange(start, start := start + piece.size)
            if piece.rows is None:
                found[piece.parameter] = [numbers]
                continue
            for unit, own in zip(block.units, piece.places(), strict=True):
                found.setdefault(f"{block.name}[{unit}]", []).append(numbers[own])
    whole = not block.units or len(found) == 1
    return {block.name: torch.arange(block.order)} if whole else {name: torch.cat(own) for name, own in found.items()}
