"""What is known of the null space of a network's Hessian or Gauss-Newton matrix, each claim tried on the operator.

At any point, not only at minima: parameters without effect (of units that no sample activates, of features that are
never used, of layers that are not reached); directions of a layer with given inputs that none of these sees; shifts of
the parameters that leave the loss as it is (softmax, layer normalization, a bias before batch normalization). The
directions of a rescaling symmetry are null for the Gauss-Newton matrix, and for the Hessian only where the gradient
vanishes: see `null_scaling`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import nn

from hesscond.capture import MEMORY, Batch, LossFunction
from hesscond.capture.snapshot import Snapshot
from hesscond.hessians.first_layers import FirstLayers
from hesscond.hessians.network import GGNOperator
from hesscond.hessians.null_layer import CLOSE, single_units
from hesscond.hessians.null_rows import RowSpace
from hesscond.hessians.null_scaling import scale_symmetries
from hesscond.hessians.null_spaces import NullDirections, combined, holds
from hesscond.hessians.placement import Placement, covered, placements
from hesscond.hessians.stream_operator import NetworkOperator
from hesscond.operators import Subspace
from hesscond.operators.subspace import Coordinates, DirectSum, KroneckerComplement, SparseSpan

#: Units whose directions are made at a time.
UNITS = 64

#: A gradient is taken for zero along a direction, as far as trying it goes, below this share of its size.
FLAT = 1e-10


def network_null_directions(
    operator: NetworkOperator,
    model: nn.Module,
    loss_fn: LossFunction,
    data: Batch | Iterable[Batch],
    *,
    dtype: torch.dtype | None = torch.float64,
    memory: float = MEMORY,
) -> list[NullDirections]:
    """Null directions of an operator of a network, orthogonal to one another, in the order of its parameters.

    Parameters
    ----------
    operator
        The Hessian or the Gauss-Newton matrix: what fails on it is not claimed.
    model, loss_fn, data, dtype
        What it was made from.
    memory
        Bytes that batches may take which can be read only once.
    """
    layers = placements(operator.layout, model)
    zero = zero_rows(operator)
    snapshot = Snapshot(model, operator.layout.tensors, dtype)
    first = FirstLayers(snapshot, loss_fn, data, layers, operator.weights, memory=int(memory))
    found: list[NullDirections] = []
    for placement in layers:
        found += in_layer(operator, placement, first, zero)
    outside = ~covered(layers, operator.order)
    found += elsewhere(operator, zero, outside.to(operator.device))
    found = [own for own in found if holds(operator, own.subspace)]
    if isinstance(operator, GGNOperator):
        found += rescalings(operator, model, loss_fn, data, combined(found), dtype=dtype, memory=memory)
    return found


def zero_rows(operator: NetworkOperator) -> torch.Tensor:
    """(n,) bool: parameters of which the product with random vectors, and the gradient, is exactly zero."""
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randn(operator.order, 2, generator=generator, dtype=torch.float64)
    products = operator.multiply(drawn.to(operator.device, operator.dtype))
    return (products == 0).all(1) & (operator.gradient == 0)


def in_layer(
    operator: NetworkOperator, placement: Placement, first: FirstLayers, zero: torch.Tensor
) -> list[NullDirections]:
    """Those within the parameters of a layer."""
    index, name = placement.index.to(operator.device), placement.name
    seen = first.inputs.get(name)
    off = zero[index].unflatten(0, (placement.geometry.groups, -1))
    Q_C, Q_A, reasons = aligned(operator, placement, seen, off)
    product = KroneckerComplement(Q_C, Q_A)
    found = []
    if product.dimension:
        space = placed(operator, index, product)
        found.append(NullDirections(f"layer {name!r}", "; ".join(reasons), space))
    if seen is not None and [Q.shape[1] for Q in Q_A] == [rows.rank for rows in seen]:
        alone = single_units(placement.geometry, seen, Q_C, lambda: first.terms(name))
        if alone is not None and holds(operator, placed(operator, index, alone)):
            reason = f"{len(alone.parts)} of its units are active on too few samples to see every direction"
            found.append(
                NullDirections(f"rarely active units of layer {name!r}", reason, placed(operator, index, alone))
            )
            return found
    # of the other single parameters, those that are orthogonal to these
    single = index.flatten()[off.flatten() & (product.diagonal() < CLOSE)]
    if len(single):
        reason = f"{len(single)} more of its parameters have no effect: no sample uses them"
        found.append(NullDirections(f"parameters of layer {name!r}", reason, Coordinates(operator.order, single)))
    return found


def aligned(
    operator: NetworkOperator, placement: Placement, seen: list[RowSpace] | None, off: torch.Tensor
) -> tuple[list[torch.Tensor], list[torch.Tensor], list[str]]:
    """Bases, by group, of what is left of Rᵐ and Rⁿ̂ without V with null columns or null rows, and the reasons.

    ``off`` (G, m/G, n̂) bool: single parameters without effect.
    """
    index, geometry = placement.index.to(operator.device), placement.geometry
    groups, per_group, width = off.shape
    eye_C = torch.eye(per_group, dtype=torch.float64, device=operator.device)
    eye_A = torch.eye(width, dtype=torch.float64, device=operator.device)
    Q_C, Q_A, reasons = [eye_C] * groups, [eye_A] * groups, []
    if seen is not None and any(rows.nullity for rows in seen):
        bases = [rows.Q for rows in seen]
        if holds(operator, placed(operator, index, KroneckerComplement(Q_C, bases))):
            Q_A = bases
            reasons.append(f"its inputs span {min(rows.rank for rows in seen)} of {width} dimensions")
    gradient = operator.gradient[index].to(torch.float64)
    flat = FLAT * float(operator.gradient.norm())
    if groups == 1 and per_group > 1 and float(gradient.sum(0).norm()) <= flat:
        others = without([eye_C], [torch.ones_like(eye_C[:, :1])])
        if holds(operator, placed(operator, index, KroneckerComplement(others, [eye_A]))):
            Q_C = others
            reasons.append("the loss does not change if all its outputs are shifted alike")
    columns, units = off.all(1), off.all(2)
    inputs = int(columns.any(0).sum())
    bias = geometry.bias and not placement.first and not bool(columns[:, 0].all())
    # in front of a normalization a bias has no effect, but for rounding
    if bias and float(gradient[:, 0].norm()) <= flat and holds(operator, Coordinates(operator.order, index[:, 0])):
        columns[:, 0] = True
        reasons.append("its bias has no effect")
    if units.any():
        reasons.append(f"{int(units.sum())} of its units have no effect")
    if inputs:
        reasons.append(f"{inputs} of its inputs have no effect")
    Q_C = without(Q_C, [eye_C[:, own] for own in units])
    Q_A = without(Q_A, [eye_A[:, own] for own in columns])
    return Q_C, Q_A, reasons


def placed(operator: NetworkOperator, index: torch.Tensor, subspace: Subspace) -> DirectSum:
    """A subspace of the parameters of a layer, at the rows ``index`` (m, n̂) of all parameters."""
    return DirectSum(operator.order, [(index.flatten(), subspace)])


def without(bases: list[torch.Tensor], directions: list[torch.Tensor]) -> list[torch.Tensor]:
    """Orthonormal bases Q (n, r) less the span of ``directions`` (n, d) of each; Q itself if the angles are vague.

    If the directions are among the columns of Q, the others stay as they are: bases of single units remain so.
    """
    found = []
    for Q, D in zip(bases, directions, strict=True):
        if D.shape[1] == 0:
            found.append(Q)
            continue
        inner = Q.T @ (D / D.norm(dim=0))
        touched = inner.abs().amax(1) > 0
        if bool(((inner == 0) | (inner == 1)).all()):
            found.append(Q[:, ~touched])
            continue
        U, sigma, _ = torch.linalg.svd(inner, full_matrices=True)
        inside = int((sigma > CLOSE).sum())
        vague = bool(((sigma > CLOSE) & (sigma < 1e-3)).any())
        found.append(Q if vague else Q @ U[:, inside:])
    return found


def elsewhere(operator: NetworkOperator, zero: torch.Tensor, outside: torch.Tensor) -> list[NullDirections]:
    """Parameters without effect that belong to no layer, one by one or a whole tensor of them."""
    single = (zero & outside).nonzero()[:, 0]
    found = []
    if len(single):
        reason = f"{len(single)} parameters of other modules have no effect"
        found.append(NullDirections("parameters of no layer", reason, Coordinates(operator.order, single)))
    size = float(operator.gradient.norm())
    for name, rows in operator.parts.items():
        index = torch.arange(rows.start, rows.stop, device=operator.device)
        index = index[outside[index] & ~zero[index]]
        if len(index) and float(operator.gradient[index].norm()) <= FLAT * size:
            space = Coordinates(operator.order, index)
            if holds(operator, space):
                found.append(NullDirections(f"parameter {name!r}", "it has no effect, but for rounding", space))
    return found


def rescalings(
    operator: NetworkOperator,
    model: nn.Module,
    loss_fn: LossFunction,
    data: Batch | Iterable[Batch],
    known: Subspace | None,
    *,
    dtype: torch.dtype | None,
    memory: float,
) -> list[NullDirections]:
    """Directions of rescalings that leave the outputs as they are, less what is ``known`` to be null."""
    symmetries = scale_symmetries(operator, model, loss_fn, data, dtype=dtype, memory=memory)
    if not symmetries:
        return []

    def columns() -> Iterator[torch.Tensor]:
        for symmetry in symmetries:
            for start in range(0, symmetry.count, UNITS):
                D = symmetry.directions(operator.point, start, start + UNITS)
                rest = D if known is None else known.remove(D)
                lengths = rest.norm(dim=0)
                kept = lengths > 1e-3 * D.norm(dim=0)
                yield rest[:, kept] / lengths[kept]

    space = SparseSpan(operator.order, columns())
    reason = "scaling what enters a unit and unscaling what leaves it does not change the outputs"
    found = NullDirections("rescaling of units", reason, space)
    return [found] if holds(operator, space) else []
