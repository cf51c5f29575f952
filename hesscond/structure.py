"""How block diagonal the Hessian of a model is: norms of its blocks, by layers and by rows."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

import torch
from torch import nn

from hesscond.capture import Batch, LossFunction
from hesscond.capture.weighting import BatchWeight
from hesscond.capture.wrappers import measurable
from hesscond.check import Check, check_operator, refuse_failed
from hesscond.errors import ConfigError
from hesscond.hessians import HessianOperator
from hesscond.operators import Estimate, block_norms

if TYPE_CHECKING:
    import pandas as pd

PARTITIONS = ("layer", "row")
#: Up to so many parameters norms are exact if nothing else is asked for, and beyond that from so many random vectors
#: for each block.
EXACT, PROBES = 4096, 30


@dataclass(frozen=True)
class BlockStructure:
    """Norms and traces of the blocks H_ab of a Hessian.

    Attributes
    ----------
    names
        Of the m blocks, in the order of everything below: layers, or rows as ``"fc1[3]"``.
    layers
        The layer of each.
    n_params
        Their sizes.
    trace
        (m,) tr H_aa.
    norms
        (m, m) ‖H_ab‖_F.
    share
        Σ_a ‖H_aa‖²_F / Σ_ab ‖H_ab‖²_F: how much of H lies on the diagonal of these blocks.
    share_of_layers
        How much lies on the diagonal of layers.
    within
        By layer, how much of its own Hessian lies on the diagonal of its rows; 1 where it is one block.
    check
        How far the operator is from the model's own double-backward product; None: it was not compared.

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
    share_of_layers: Estimate[float]
    within: Mapping[str, Estimate[float]]
    check: Check | None

    def to_frame(self) -> pd.DataFrame:
        """One row per block: block, layer, n_params, trace, norm (‖H_aa‖_F), both with ``_error``, and norm_others.

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
    """How block diagonal the Hessian of a model is, by layers or by rows: norms ‖H_ab‖_F and traces of its blocks.

    A layer is a module without modules inside, or a parameter that lies in no such module; a row the [b_i, w_i] of an
    output unit of a dense or convolutional layer. A layer of another kind is one block either way.

    The model is left as it was.

    Parameters
    ----------
    model, loss_fn, data, dtype, memory, reduction, weight
        As for `hesscond.HessianOperator`.
    layers
        Names of layers, or patterns of them (``"block1.*"``); None: all. Of the Hessian only their part is looked at.
    by
        ``"layer"`` or ``"row"``.
    probes
        Random vectors for each block, whose norms are unbiased estimates; a block with no more parameters is exact.
        None: everything is exact up to 4,096 parameters, from as many products, and beyond that 30 of them.
    seed
        Of the random vectors.
    check
        Whether the operator is compared with the model's own double-backward product.

    Returns
    -------
    BlockStructure

    Raises
    ------
    ConfigError
        No such layer or partition; too few probes; what `hesscond.HessianOperator` refuses.
    CaptureError
        As there, or the operator does not agree with the model.

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
    >>> 0 < found.share.value < found.share_of_layers.value < 1
    True
    """
    if by not in PARTITIONS:
        raise ConfigError(f"unknown partition {by!r}: use 'layer' or 'row'")
    model = measurable(model)
    parameters = chosen(parameters_by_layer(model), layers)
    H = HessianOperator(
        model,
        loss_fn,
        data,
        parameters=[name for own in parameters.values() for name in own],
        dtype=dtype,
        memory=memory,
        reduction=reduction,
        weight=weight,
    )
    verdict = None
    if check:
        verdict, _, _ = check_operator(H)
        refuse_failed("the Hessian", verdict, "the operator and a fresh evaluation of the model disagree")
    rows = rows_of(H, parameters)
    if by == "layer":
        rows = {name: [torch.cat(list(own))] for name, own in rows.items()}
    names = [f"{name}[{i}]" if len(own) > 1 else name for name, own in rows.items() for i in range(len(own))]
    owners = [number for number, own in enumerate(rows.values()) for _ in own]
    blocks = [block for own in rows.values() for block in own]
    if probes is None and H.order > EXACT:
        probes = PROBES
    found = block_norms(H, blocks, probes, groups=owners, seed=seed)
    squares = found.squares
    norms = squares.value.clamp_min(0).sqrt()
    # to first order in the error of the square
    error = torch.where(norms > 0, squares.error / (2 * norms), squares.error.sqrt())
    return BlockStructure(
        tuple(names),
        tuple(list(rows)[owner] for owner in owners),
        tuple(map(len, blocks)),
        found.traces,
        Estimate(norms, error, squares.probes, squares.products),
        found.blocks,
        found.groups,
        dict(zip(rows, found.within, strict=True)),
        verdict,
    )


def parameters_by_layer(model: nn.Module) -> dict[str, list[str]]:
    """Names of the parameters that require a gradient, by layer: those of a module without modules inside together."""
    found: dict[str, list[str]] = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            module = name.rpartition(".")[0]
            leaf = not any(model.get_submodule(module).children())
            found.setdefault((module or "model") if leaf else name, []).append(name)
    return found


def chosen(parameters: Mapping[str, list[str]], layers: Iterable[str] | str | None) -> dict[str, list[str]]:
    """Those of the layers that are named, in the order of the model.

    Raises
    ------
    ConfigError
        A name or a pattern that fits none.
    """
    if layers is None:
        return dict(parameters)
    wanted = [layers] if isinstance(layers, str) else list(layers)
    for pattern in wanted:
        if not any(fnmatchcase(name, pattern) for name in parameters):
            near = difflib.get_close_matches(pattern, parameters, 3, 0.3) or list(parameters)[:3]
            raise ConfigError(f"no layer {pattern!r} with parameters to differentiate in: near are {', '.join(near)}")
    return {name: own for name, own in parameters.items() if any(fnmatchcase(name, one) for one in wanted)}


def rows_of(H: HessianOperator, parameters: Mapping[str, Sequence[str]]) -> dict[str, Sequence[torch.Tensor]]:
    """By layer, where each of its rows is in the vectors of an operator; the whole layer where it has no rows."""
    found: dict[str, Sequence[torch.Tensor]] = {}
    units = {placement.name: placement.index for placement in H.placements}
    for name, own in parameters.items():
        whole = torch.cat([torch.arange(H.parts[part].start, H.parts[part].stop) for part in own])
        index = units.get(name)
        found[name] = list(index) if index is not None and index.numel() == len(whole) else [whole]
    return found
