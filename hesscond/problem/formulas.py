"""Formulas that are called in place of functions of torch whose second derivatives are missing, wrong or inexact."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional
from torch.nn.utils.rnn import pad_sequence

from hesscond.problem.precision import MASKED


def gelu(input: torch.Tensor, approximate: str = "none") -> torch.Tensor:
    """GELU, x Φ(x), with Φ(x) = erfc(−x/√2)/2, accurate where torch's (1 + erf(x/√2))/2 has no digits left."""
    if approximate == "tanh" or input.dtype != torch.float64:
        return functional.gelu(input, approximate=approximate)
    return 0.5 * input * torch.special.erfc(-(0.5**0.5) * input)


def weight_norm(v: torch.Tensor, g: torch.Tensor, dim: int = 0) -> torch.Tensor:
    """Weights g v/‖v‖ by plain operations: second derivatives of torch's kernel hold ‖v‖ constant (torch 2.13)."""
    return v * (g / torch.norm_except_dim(v, 2, dim))


def hardsigmoid(input: torch.Tensor, inplace: bool = False) -> torch.Tensor:
    """Hard sigmoid min(max(x + 3, 0), 6)/6."""
    return functional.relu6(input + 3) / 6


def gumbel_softmax(
    logits: torch.Tensor, tau: float = 1, hard: bool = False, eps: float = 1e-10, dim: int = -1
) -> torch.Tensor:
    """Sample of the Gumbel-Softmax distribution, or its largest entry with the sample's derivative, by operations."""
    sample = functional.gumbel_softmax(logits, tau, dim=dim)
    largest = torch.zeros_like(sample).scatter_(dim, sample.argmax(dim, keepdim=True), 1.0)
    return largest - sample.detach() + sample if hard else sample


def distances(differences: torch.Tensor, p: float) -> torch.Tensor:
    """Norms ‖d‖_p over the last dimension, constant where d = 0, as in torch."""
    apart = (differences != 0).any(-1, keepdim=True)
    return torch.linalg.vector_norm(torch.where(apart, differences, 1.0), p, -1) * apart[..., 0]


def cdist(
    x1: torch.Tensor, x2: torch.Tensor, p: float = 2.0, compute_mode: str = "use_mm_for_euclid_dist_if_necessary"
) -> torch.Tensor:
    """Distances between the rows of two matrices; torch has second derivatives of those formed by products."""
    many = compute_mode != "donot_use_mm_for_euclid_dist" and max(x1.shape[-2], x2.shape[-2]) > 25
    if p == 2 and (many or compute_mode == "use_mm_for_euclid_dist"):
        return torch.cdist(x1, x2, p, compute_mode)
    return distances(x1.unsqueeze(-2) - x2.unsqueeze(-3), p)


def pdist(input: torch.Tensor, p: float = 2.0) -> torch.Tensor:
    """Distances between the rows i < j of a matrix."""
    i, j = torch.triu_indices(len(input), len(input), 1, device=input.device)
    return distances(input[i] - input[j], p)


def over_segments(rows: torch.Tensor, owner: torch.Tensor, count: int, reduce: str) -> torch.Tensor:
    """Sum, mean, max, min or prod over the rows of each owner (0 to count − 1); 0 for an owner without rows."""
    pooled = rows.new_zeros(count, *rows.shape[1:])
    if reduce in ("sum", "mean"):
        pooled = pooled.index_add(0, owner, rows)
        sizes = owner.bincount(minlength=count).clamp_min(1).view(-1, *[1] * (rows.ndim - 1))
        return pooled if reduce == "sum" else pooled / sizes
    index = owner.view(-1, *[1] * (rows.ndim - 1)).expand_as(rows)
    return pooled.scatter_reduce(0, index, rows, {"max": "amax", "min": "amin"}.get(reduce, reduce), include_self=False)


def segment_reduce(data: torch.Tensor, reduce: str, **options: Any) -> torch.Tensor:
    """Reduction over consecutive rows; with options that are rarely used, torch's own, without second derivatives."""
    lengths: Any = options.get("lengths")
    offsets: Any = options.get("offsets")
    lengths = offsets.diff() if lengths is None and offsets is not None else lengths
    if options.get("axis") or options.get("initial") is not None or lengths.ndim > 1 or bool((lengths == 0).any()):
        return torch.segment_reduce(data, reduce, **options)
    owner = torch.arange(len(lengths), device=data.device).repeat_interleave(lengths)
    return over_segments(data, owner, len(lengths), reduce)


def embedding_bag(
    input: torch.Tensor,
    weight: torch.Tensor,
    offsets: torch.Tensor | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    mode: str = "mean",
    sparse: bool = False,
    per_sample_weights: torch.Tensor | None = None,
    include_last_offset: bool = False,
    padding_idx: int | None = None,
) -> torch.Tensor:
    """Sum, mean or maximum of the rows of a table that each bag of tokens looks up."""
    if offsets is None:
        offsets = torch.arange(0, input.numel(), input.shape[1], device=input.device)
    elif include_last_offset:
        offsets = offsets[:-1]
    tokens = input.flatten()
    owner = torch.searchsorted(offsets, torch.arange(len(tokens), device=input.device).to(offsets), right=True) - 1
    rows = functional.embedding(tokens, weight, None, max_norm, norm_type)
    if per_sample_weights is not None:
        rows = rows * per_sample_weights.flatten()[:, None]
    if padding_idx is not None:
        kept = tokens != padding_idx % len(weight)
        rows, owner = rows[kept], owner[kept]
    return over_segments(rows, owner.long(), len(offsets), mode)


def reduced(
    values: torch.Tensor, reduction: str, size_average: bool | None = None, reduce: bool | None = None
) -> torch.Tensor:
    """Mean or sum of the losses of the samples, or the losses themselves, with torch's old arguments for this too."""
    if size_average is not None or reduce is not None:
        reduction = "none" if reduce is False else "sum" if size_average is False else "mean"
    return values.mean() if reduction == "mean" else values.sum() if reduction == "sum" else values


def multi_margin_loss(
    input: torch.Tensor,
    target: torch.Tensor,
    p: int = 1,
    margin: float = 1.0,
    weight: torch.Tensor | None = None,
    size_average: bool | None = None,
    reduce: bool | None = None,
    reduction: str = "mean",
) -> torch.Tensor:
    """Loss Σ_j≠y max(0, margin − x_y + x_j)^p w_y / C."""
    target = target[..., None]
    excess = (margin - input.gather(-1, target) + input).clamp_min(0)
    excess = excess.square() if p == 2 else excess
    excess = excess if weight is None else excess * weight[target]
    mask = torch.arange(input.shape[-1], device=input.device) == target
    return reduced(excess.masked_fill(mask, 0).mean(-1), reduction, size_average, reduce)


def multilabel_margin_loss(
    input: torch.Tensor,
    target: torch.Tensor,
    size_average: bool | None = None,
    reduce: bool | None = None,
    reduction: str = "mean",
) -> torch.Tensor:
    """Loss Σ_jk max(0, 1 − x_j + x_k) / C over the classes j before the first −1 in the target, and all others k."""
    given = (target >= 0).long().cumprod(-1)
    classes = target * given
    other = torch.zeros_like(target).scatter_add(-1, classes, given) == 0
    excess = (1 - input.gather(-1, classes)[..., None] + input[..., None, :]).clamp_min(0)
    counted = given[..., None].bool() & other[..., None, :]
    excess = excess.masked_fill(~counted, 0).sum((-2, -1)) / input.shape[-1]
    return reduced(excess, reduction, size_average, reduce)


def ctc_loss(
    log_probs: torch.Tensor,
    targets: torch.Tensor,
    input_lengths: Any,
    target_lengths: Any,
    blank: int = 0,
    reduction: str = "mean",
    zero_infinity: bool = False,
) -> torch.Tensor:
    """Connectionist temporal classification: −log Σ p over the paths of a target, by the forward recursion.

    Source: Graves, Fernández, Gomez, Schmidhuber, ICML (2006), eqs. (5) to (8), in logarithms.
    """
    single, device = log_probs.ndim == 2, log_probs.device
    log_probs = log_probs[:, None] if single else log_probs
    steps, lengths = (torch.as_tensor(counts, device=device).view(-1) for counts in (input_lengths, target_lengths))
    if targets.ndim == 1:
        targets = pad_sequence(targets.split(lengths.tolist()), batch_first=True)
    states = targets.new_full((len(targets), 2 * targets.shape[1] + 1), blank, dtype=torch.long)
    states[:, 1::2] = targets
    # stands for −∞, whose derivatives would be NaN
    never = -10 * MASKED
    skips = torch.zeros_like(states, dtype=torch.bool)
    skips[:, 2:] = (states[:, 2:] != blank) & (states[:, 2:] != states[:, :-2])
    scores = log_probs.gather(-1, states.expand(len(log_probs), -1, -1))
    alpha = torch.where(torch.arange(states.shape[1], device=device) < 2, scores[0], never)
    for t in range(1, len(scores)):
        one, two = (functional.pad(alpha, (k, 0), value=never)[:, : alpha.shape[1]] for k in (1, 2))
        ways = torch.stack([alpha, one, torch.where(skips, two, never)])
        alpha = torch.where((t < steps)[:, None], ways.logsumexp(0) + scores[t], alpha)
    ends = alpha.gather(1, torch.stack([2 * lengths, (2 * lengths - 1).clamp_min(0)], 1))
    ends = torch.where(torch.stack([lengths >= 0, lengths > 0], 1), ends, never)
    losses = -ends.logsumexp(1)
    losses = torch.where(losses > MASKED, 0.0 if zero_infinity else torch.inf, losses)
    if reduction == "mean":
        losses = losses / lengths.clamp_min(1)
    return reduced(losses[0] if single else losses, reduction)


#: Functions of torch, and the formulas that are called in their place.
FORMULAS: dict[Callable[..., Any], Callable[..., torch.Tensor]] = {
    functional.gelu: gelu,
    functional.gumbel_softmax: gumbel_softmax,
    torch._weight_norm: weight_norm,
    functional.hardsigmoid: hardsigmoid,
    torch.cdist: cdist,
    torch.pdist: pdist,
    torch.segment_reduce: segment_reduce,
    functional.embedding_bag: embedding_bag,
    functional.multi_margin_loss: multi_margin_loss,
    functional.multilabel_margin_loss: multilabel_margin_loss,
    functional.ctc_loss: ctc_loss,
}
