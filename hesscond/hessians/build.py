"""Construction of the Hessians of units and layers from captures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import torch

from hesscond.capture import DiagonalS, FactoredS, FormedH, LayerCapture
from hesscond.errors import refuse_large
from hesscond.hessians.coordinates import base
from hesscond.hessians.factored import FactoredHessian, feature_rank
from hesscond.hessians.formed import FormedHessian
from hesscond.hessians.layer import LayerHessian
from hesscond.operators.threads import side_by_side, threads_for
from hesscond.spectra import condition
from hesscond.spectra.forms import MATRICES, FactorStack
from hesscond.spectra.solvers.base import conditions

#: Factors of layers with at most this many numbers are formed.
SMALL = 2**14


def unit_hessian(captured: LayerCapture, unit: int, memory: int) -> base.BlockHessian:
    """The Hessian of one output unit of a captured layer."""
    return unit_hessians(captured, [unit], memory)[0]


def unit_hessians(captured: LayerCapture, units: Sequence[int], memory: int) -> list[base.BlockHessian]:
    """The Hessians of output units that belong to one group of the layer."""
    columns, curvature = [captured.column(unit) for unit in units], captured.curvature
    features = feature_rank(captured, units[:1], memory)
    if isinstance(curvature, FormedH):
        lost, pairs = captured.loses_entries, ((curvature.matrices[k], curvature.spread[k]) for k in columns)
        return [FormedHessian(H, d, curvature.terms, vanishing=lost, features=features) for H, d in pairs]
    if isinstance(curvature, DiagonalS):
        inputs = captured.inputs
        if inputs.geometry.groups == 1:
            rows = captured.H_hat
        else:
            rows = inputs.slice(0, inputs.blocks)[:, :, inputs.geometry.group(units[0])].flatten(0, 1)
        hessians = [with_diagonal_curvature(captured, curvature, rows, column) for column in columns]
    else:
        hessians = with_factored_curvature(captured.narrowed(units), units, memory)
    return [replace(hessian, features=features) for hessian in hessians]


def with_diagonal_curvature(captured: LayerCapture, S: DiagonalS, rows: torch.Tensor, column: int) -> FactoredHessian:
    """The Hessian of a unit with Ĥ = ``rows`` and the curvature in a column of S."""
    lost = captured.loses_entries
    root, sign, spread = S.root[:, column], mixed(None if S.sign is None else S.sign[:, column]), None
    if S.norm is not None:
        spread = (S.norm[:, column] @ rows.square()).sqrt()
    error = None if S.error is None else S.error[:, column, None] * rows.abs()
    kept = (root != 0) | bool(captured.vanishing)
    if captured.repeating and bool(kept.any()):
        # the kept rows may all be independent, and the others are zero
        scaled, sign = (rows * root[:, None])[kept], None if sign is None else sign[kept]
        error = None if error is None else error[kept]
    elif error is None or not error.any():
        return FactoredHessian(rows, root, sign, spread=spread, vanishing=lost)
    else:
        scaled = rows * root[:, None]
    return FactoredHessian(scaled, None, sign, error, spread=spread, vanishing=lost)


def with_factored_curvature(captured: LayerCapture, units: Sequence[int], memory: int) -> list[FactoredHessian]:
    """The Hessians of the units that a capture was narrowed to."""
    S = captured.curvature
    assert isinstance(S, FactoredS)
    terms = (S.B != 0).any(3)
    factors, errors = captured.unit_rows(units, memory // 8), captured.row_rounding(units)
    spreads, batch = captured.spread(units), list[FactoredHessian]()
    for column, rows in enumerate(factors):
        spread = None if spreads is None else spreads[column]
        sign = None if S.sign is None else S.sign[:, :, min(column, S.sign.shape[2] - 1)].flatten()
        # the rank of a block is at most the number of its active positions
        active = (S.B[:, :, column] != 0).any(0).sum(1)
        limit = None if captured.vanishing else int(torch.minimum(terms[:, :, column].sum(0), active).sum())
        batch.append(FactoredHessian(rows, None, mixed(sign), errors[column], 1, limit, spread, captured.loses_entries))
    return batch


def mixed(sign: torch.Tensor | None) -> torch.Tensor | None:
    """``sign``, if any is negative."""
    return sign if sign is not None and bool((sign < 0).any()) else None


def layer_hessian(captured: LayerCapture, memory: int) -> base.BlockHessian:
    """The Hessian of all parameters of a layer captured whole."""
    curvature = captured.curvature
    units = captured.inputs.geometry.units
    if isinstance(curvature, FormedH):
        H, d, features = curvature.matrices[0], curvature.spread[0], feature_rank(captured, captured.units, memory)
        return FormedHessian(H, d, curvature.terms, units, captured.loses_entries, features=features)
    if units == 1:
        return unit_hessian(captured, 0, memory)
    assert isinstance(curvature, FactoredS)
    layer = LayerHessian(captured, memory)
    if layer.count == 0:
        # the loss is nowhere curved
        return FactoredHessian(curvature.B.new_zeros(1, layer.order), None, None, units=units)
    if layer.order <= layer.count or layer.order * layer.count <= SMALL:
        return layer.dense()
    what = f"the decomposition of the dual of layer {captured.name!r}, of order {layer.count}, takes"
    refuse_large(what, 8 * MATRICES * layer.count**2, memory, "probe it on fewer samples, or its units")
    return layer


def unit_conditions(
    captured: LayerCapture, P: base.Preconditioner | None, *, rtol: float, memory: int
) -> list[condition.ConditionNumber]:
    """κ of every captured unit, decomposed together where S ≥ 0 is exact."""
    if (stack := shared_stack(captured, P, rtol=rtol, memory=memory)) is not None:
        return conditions(stack, rtol=rtol)
    kappas: list[condition.ConditionNumber] = []
    for units in runs(captured, memory):
        hessians = [hessian.in_coordinates(P) for hessian in unit_hessians(captured, units, memory)]
        batch = [
            h
            for h in hessians
            if isinstance(h, FactoredHessian) and h.sign is h.spread is h.root is None and not h.vanishing
        ]
        if len(batch) < len(hessians) or len(batch) == 1:
            threads = threads_for(captured.inputs.device)
            kappas += side_by_side(lambda hessian: hessian.condition_number(rtol=rtol), hessians, threads)
        else:
            kappas += batch_conditions(batch, rtol)
    return kappas


def shared_stack(
    captured: LayerCapture, P: base.Preconditioner | None, *, rtol: float, memory: int
) -> FactorStack | None:
    """Factors of all units, which share Ĥ; None where S is not diagonal, or the factors have more errors."""
    curvature, groups = captured.curvature, captured.inputs.geometry.groups
    if not isinstance(curvature, DiagonalS) or groups > 1 or captured.loses_entries or curvature.error is not None:
        return None
    rows = captured.H_hat if P is None else P.multiplied(captured.H_hat, 1)
    if curvature.sign is curvature.norm is None:
        errors = None
        if P is not None and P.cancels:
            lengths = (curvature.root.square().T @ captured.H_hat.square()).sqrt()
            lost = condition.error_factor(*rows.shape) * condition.EPS * P.carried(lengths, 1)
            errors = torch.linalg.vector_norm(lost, dim=1).tolist()
        bounds = [partial(rank_bound, captured, unit, memory) for unit in captured.units]
        return FactorStack(rows, curvature.root, errors=errors, rank_bounds=bounds)
    if len(captured.units) == 1 or (P is not None and P.cancels):
        return None

    def alone(i: int) -> condition.ConditionNumber:
        hessian = unit_hessian(captured, captured.units[i], memory).in_coordinates(P)
        return hessian.condition_number(rtol=rtol)

    noises = None if curvature.norm is None else curvature.norm.T @ rows.square().sum(1)
    signs = torch.ones_like(curvature.root) if curvature.sign is None else curvature.sign
    return FactorStack(rows, curvature.root, signs, noises=noises, singly=alone)


def batch_conditions(hessians: Sequence[FactoredHessian], rtol: float) -> list[condition.ConditionNumber]:
    """κ of positive semidefinite Hessians with factors of one shape; singly where the stack does not resolve it."""
    stack = FactorStack(
        torch.stack([hessian.factor() for hessian in hessians]),
        errors=[hessian.error_norm() for hessian in hessians],
        rank_bounds=[hessian.rank_bound for hessian in hessians],
        singly=lambda i: hessians[i].condition_number(rtol=rtol),
    )
    return conditions(stack, rtol=rtol)


def rank_bound(captured: LayerCapture, unit: int, memory: int) -> int:
    """Upper bound of the rank of a unit's Hessian."""
    hessian = unit_hessian(captured, unit, memory)
    return hessian.rank_bound() if isinstance(hessian, FactoredHessian) else hessian.order


def runs(captured: LayerCapture, memory: int) -> list[list[int]]:
    """Captured units in runs of one group whose factors fit into the memory."""
    geometry, curvature = captured.inputs.geometry, captured.curvature
    step = len(captured.units)
    if isinstance(curvature, FactoredS):
        unit_bytes = 8 * curvature.B.shape[0] * curvature.B.shape[1] * geometry.n_params
        step = max(1, memory // 4 // max(unit_bytes, 1))
    chunks: list[list[int]] = []
    for unit in captured.units:
        if chunks and len(chunks[-1]) < step and geometry.group(chunks[-1][0]) == geometry.group(unit):
            chunks[-1].append(unit)
        else:
            chunks.append([unit])
    return chunks
