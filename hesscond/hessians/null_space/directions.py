"""Known null directions of a network's Hessian or Gauss-Newton matrix, each tested on the operator.

Null at any point, not only at minima, are parameters without effect (of units that no sample activates, of features
that are never used, of layers that are not reached), directions of a layer with given inputs that none of these sees,
and shifts of the parameters that leave the loss as it is (softmax, layer normalization, a bias before batch norm).

A direction V (m, n̂) in the parameters of a layer, whose Hessian is Σ_j,p,p' (C_j)_pp' ⊗ ĥ_jp ĥ_jp'ᵀ, is null whatever
the curvature if its rows are orthogonal to all ĥ. For a unit on which most samples have no curvature (a ReLU that is
off), the row need only be orthogonal to the inputs of the other samples.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch

from hesscond.capture import Geometry
from hesscond.hessians import parameters
from hesscond.hessians.network_operator import NetworkOperator
from hesscond.hessians.null_space.kronecker import CHUNK, RowSpace, Terms, add_rows, row_space
from hesscond.hessians.streaming import StreamedBlock
from hesscond.operators import Subspace, SymmetricOperator
from hesscond.operators.subspace import CoordinateSpan, DirectSum, KroneckerComplement, OrthogonalSum, Span

#: Null directions are refuted if the product with a random unit vector exceeds this multiple of its rounding.
TOLERANCE = 8.0

#: Random vectors in each test.
TRIALS = 2

#: Entries of a projector's diagonal this close to 0 or 1 are 0 or 1.
CLOSE = 1e-12

#: Null vectors of single units are kept up to this many bytes.
KEPT = 2**28

#: Gradients along a direction below this share of their norm count as zero: the direction is tested.
FLAT = 1e-10


@dataclass(frozen=True)
class NullDirections:
    """Subspace that a Hessian is known to annihilate.

    Attributes
    ----------
    name
        Short name.
    reason
        Reason why they are null, in a sentence.
    subspace
        Subspace of the directions. Subspaces of one list are orthogonal to one another.
    """

    name: str
    reason: str
    subspace: Subspace

    @property
    def dimension(self) -> int:
        """Number of independent directions."""
        return self.subspace.dimension

    def __str__(self) -> str:
        return f"{self.dimension} null direction{'s'[: self.dimension != 1]}: {self.name} ({self.reason})"


def combined(directions: Sequence[NullDirections]) -> Subspace | None:
    """Sum of subspaces that are orthogonal to one another, if there are any."""
    parts = [group.subspace for group in directions if group.dimension]
    if not parts:
        return None
    return parts[0] if len(parts) == 1 else OrthogonalSum(parts)


def holds(operator: SymmetricOperator, subspace: Subspace) -> bool:
    """Whether products with random unit vectors of the subspace vanish to round-off."""
    if subspace.dimension == 0:
        return False
    generator = torch.Generator().manual_seed(subspace.dimension)
    drawn = torch.randn(operator.order, TRIALS + 1, generator=generator, dtype=torch.float64, device="cpu")
    vectors = drawn.to(operator.device, operator.dtype)
    inside = subspace.project(vectors[:, :TRIALS])
    inside = inside / inside.norm(dim=0)
    products = operator.multiply(inside)
    # multiplied twice, so that its size is at most the norm
    image = operator.multiply(vectors[:, TRIALS:])
    # squares of a Hessian of 1e-200 would be zero
    largest = image.abs().amax()
    if largest > 0:
        image = image / largest
        image = operator.multiply(image / image.norm()) / largest
        products = products / largest
    return bool((products.norm(dim=0) <= TOLERANCE * operator.rounding * image.norm()).all())


def network_null_directions(operator: NetworkOperator) -> list[NullDirections]:
    """Null directions of the Hessian or Gauss-Newton matrix of a network, orthogonal to one another.

    Directions that the operator does not annihilate are left out. Kept graphs are not evaluated again.
    """
    # parameters of which the product with random vectors, and the gradient, is exactly zero
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randn(operator.order, 2, generator=generator, dtype=torch.float64, device="cpu")
    zero = (operator.multiply(drawn.to(operator.device, operator.dtype)) == 0).all(1) & (operator.gradient == 0)
    del drawn
    rows, saturated = given_rows(operator), bool(operator.saturated)
    if saturated:
        # parameters without effect in double precision may have some
        zero = torch.zeros_like(zero)
    directions: list[NullDirections] = []
    for placement in operator.placements:
        directions += in_layer(operator, placement, rows.get(placement.name), zero, saturated=saturated)
    outside = ~parameters.covered(operator.placements, operator.order)
    directions += elsewhere(operator, zero, outside.to(operator.device))
    return [group for group in directions if holds(operator, group.subspace)]


def given_rows(operator: NetworkOperator) -> dict[str, list[RowSpace]]:
    """Row spaces of the inputs over all data, by layer and group, where these depend on none of the parameters."""
    candidates = {placement.name: placement for placement in operator.placements}
    blocks: dict[str, list[StreamedBlock]] = {}
    for _, linearization in operator.linearizations():
        evaluation = linearization.evaluation
        if evaluation.flattened is not None:
            # rounding may make rows dependent
            return {}
        for name in evaluation.calls.keys() - evaluation.given:
            candidates.pop(name, None)
        if not evaluation.loss.requires_grad:
            continue
        for name in [name for name in candidates if evaluation.calls.get(name)]:
            site = candidates[name]
            groups = blocks.setdefault(name, [StreamedBlock(site.index.shape[1]) for _ in range(site.geometry.groups)])
            inputs = site.request(evaluation).inputs_by_sample(evaluation.samples)
            for start, stop in inputs.steps(CHUNK):
                rows = inputs.slice(start, stop)[..., site.first :].flatten(0, 1)
                for group, block in enumerate(groups):
                    add_rows(block, rows[:, group], 1.0)
    like = torch.empty(0, dtype=torch.float64, device=operator.device)
    return {name: [row_space(block, like) for block in parts] for name, parts in blocks.items() if name in candidates}


def active_terms(operator: NetworkOperator, placement: parameters.Placement) -> Iterator[Terms]:
    """Inputs of a layer in each batch, with the gradient in its outputs as ``B``: zero where a unit is off."""
    for _, linearization in operator.linearizations():
        evaluation = linearization.evaluation
        if not evaluation.loss.requires_grad or not evaluation.calls.get(placement.name):
            continue
        request = placement.request(evaluation)
        inputs = request.inputs_by_sample(evaluation.samples)
        edges = [call.node for call in request.calls]
        gradients = torch.autograd.grad(evaluation.loss, edges, retain_graph=True, allow_unused=True)
        pairs = zip(request.calls, gradients, strict=True)
        slopes = [torch.zeros_like(call.delta) if g is None else g for call, g in pairs]
        B = request.positions([slope[None] for slope in slopes], inputs.blocks)
        yield Terms(inputs, B, 1.0, placement.first, placement.name)


def in_layer(
    operator: NetworkOperator,
    placement: parameters.Placement,
    inputs: list[RowSpace] | None,
    zero: torch.Tensor,
    *,
    saturated: bool,
) -> list[NullDirections]:
    """Null directions within the parameters of a layer; ``inputs``: its input space, if its inputs are given."""
    index, name = placement.index.to(operator.device), placement.name
    off = zero[index].unflatten(0, (placement.geometry.groups, -1))
    Q_C, Q_A, reasons = aligned(operator, placement, inputs, off)
    product = KroneckerComplement(Q_C, Q_A)
    spaces = []
    if product.dimension:
        space = placed(operator, index, product)
        spaces.append(NullDirections(f"layer {name!r}", "; ".join(reasons), space))
    if not saturated and inputs is not None and [Q.shape[1] for Q in Q_A] == [rows.rank for rows in inputs]:
        alone = single_units(placement.geometry, inputs, Q_C, lambda: active_terms(operator, placement))
        if alone is not None and holds(operator, placed(operator, index, alone)):
            reason = f"{len(alone.parts)} of its units are active on too few samples to see every direction"
            spaces.append(
                NullDirections(f"rarely active units of layer {name!r}", reason, placed(operator, index, alone))
            )
            return spaces
    # the other single parameters that are orthogonal to these
    single = index.flatten()[off.flatten() & (product.diagonal() < CLOSE)]
    if len(single):
        reason = f"{len(single)} more of its parameters have no effect: no sample uses them"
        spaces.append(NullDirections(f"parameters of layer {name!r}", reason, CoordinateSpan(operator.order, single)))
    return spaces


def aligned(
    operator: NetworkOperator, placement: parameters.Placement, inputs: list[RowSpace] | None, off: torch.Tensor
) -> tuple[list[torch.Tensor], list[torch.Tensor], list[str]]:
    """Bases, by group, of the complement in Rᵐ and Rⁿ̂ of null columns and null rows of V, and the reasons."""
    index, geometry = placement.index.to(operator.device), placement.geometry
    groups, per_group, width = off.shape
    eye_C = torch.eye(per_group, dtype=torch.float64, device=operator.device)
    eye_A = torch.eye(width, dtype=torch.float64, device=operator.device)
    Q_C, Q_A, reasons = [eye_C] * groups, [eye_A] * groups, []
    if inputs is not None and any(rows.nullity for rows in inputs):
        bases = [rows.Q for rows in inputs]
        if holds(operator, placed(operator, index, KroneckerComplement(Q_C, bases))):
            Q_A = bases
            reasons.append(f"its inputs span {min(rows.rank for rows in inputs)} of {width} dimensions")
    gradient = operator.gradient[index].to(torch.float64)
    flat = FLAT * float(operator.gradient.norm())
    if groups == 1 and per_group > 1 and float(gradient.sum(0).norm()) <= flat:
        others = without([eye_C], [torch.ones_like(eye_C[:, :1])])
        if holds(operator, placed(operator, index, KroneckerComplement(others, [eye_A]))):
            Q_C = others
            reasons.append("the loss does not change if all its outputs are shifted alike")
    columns, units = off.all(1), off.all(2)
    dead = int(columns.any(0).sum())
    bias = geometry.bias and not placement.first and not bool(columns[:, 0].all())
    # in front of a normalization a bias has no effect, but for rounding
    if bias and float(gradient[:, 0].norm()) <= flat and holds(operator, CoordinateSpan(operator.order, index[:, 0])):
        columns[:, 0] = True
        reasons.append("its bias has no effect")
    if units.any():
        reasons.append(f"{int(units.sum())} of its units have no effect")
    if dead:
        reasons.append(f"{dead} of its inputs have no effect")
    Q_C = without(Q_C, [eye_C[:, mask] for mask in units])
    Q_A = without(Q_A, [eye_A[:, mask] for mask in columns])
    return Q_C, Q_A, reasons


def placed(operator: NetworkOperator, index: torch.Tensor, subspace: Subspace) -> DirectSum:
    """Subspace of the parameters of a layer, at the rows ``index`` (m, n̂) of all parameters."""
    return DirectSum(operator.order, [(index.flatten(), subspace)])


def without(bases: list[torch.Tensor], directions: list[torch.Tensor]) -> list[torch.Tensor]:
    """Orthonormal bases Q (n, r) without the span of ``directions`` (n, d); Q itself if angles do not decide."""
    complements = []
    for Q, D in zip(bases, directions, strict=True):
        if D.shape[1] == 0:
            complements.append(Q)
            continue
        inner = Q.T @ (D / D.norm(dim=0))
        touched = inner.abs().amax(1) > 0
        # bases of unit vectors remain so
        if bool(((inner == 0) | (inner == 1)).all()):
            complements.append(Q[:, ~touched])
            continue
        U, sigma, _ = torch.linalg.svd(inner, full_matrices=True)
        inside = int((sigma > CLOSE).sum())
        vague = bool(((sigma > CLOSE) & (sigma < 1e-3)).any())
        complements.append(Q if vague else Q @ U[:, inside:])
    return complements


def elsewhere(operator: NetworkOperator, zero: torch.Tensor, outside: torch.Tensor) -> list[NullDirections]:
    """Parameters without effect that belong to no layer, single entries or whole tensors."""
    single = (zero & outside).nonzero()[:, 0]
    directions = []
    if len(single):
        reason = f"{len(single)} parameters of other modules have no effect"
        directions.append(NullDirections("parameters of no layer", reason, CoordinateSpan(operator.order, single)))
    size = float(operator.gradient.norm())
    for name, rows in operator.parts.items():
        index = torch.arange(rows.start, rows.stop, device=operator.device)
        index = index[outside[index] & ~zero[index]]
        if len(index) and float(operator.gradient[index].norm()) <= FLAT * size:
            space = CoordinateSpan(operator.order, index)
            if holds(operator, space):
                directions.append(NullDirections(f"parameter {name!r}", "it has no effect, but for rounding", space))
    return directions


def single_units(
    geometry: Geometry, inputs: Sequence[RowSpace], Q_C: Sequence[torch.Tensor], batches: Callable[[], Iterable[Terms]]
) -> DirectSum | None:
    """Directions of single units orthogonal to the inputs on which they are active, but not to all inputs."""
    width, per_group = len(inputs[0].Q), geometry.units // geometry.groups
    # a unit that is null together with others would need directions that involve the others
    certain = (torch.stack([Q[i].square().sum() for Q in Q_C for i in range(per_group)]) > 1 - CLOSE).tolist()
    blocks = {unit: StreamedBlock(width) for unit in candidates(geometry, inputs, batches()) if certain[unit]}
    if not blocks:
        return None
    for terms in batches():
        for unit, block in blocks.items():
            active = (terms.B[:, :, unit] != 0).any(0)
            for start, stop in terms.inputs.steps(KEPT):
                chosen = terms.rows(start, stop)[:, :, geometry.group(unit)][active[start:stop]]
                if len(chosen):
                    add_rows(block, chosen, 1.0)
    parts: list[tuple[slice | torch.Tensor, Span]] = []
    taken = 0
    for unit, block in blocks.items():
        space = inputs[geometry.group(unit)]
        subspace = row_space(block, space.Q)
        if subspace.rank >= space.rank:
            continue
        # the span of all rows without those of the unit
        rest = torch.linalg.qr(space.Q.T @ subspace.Q, mode="complete").Q[:, subspace.rank :]
        taken += 8 * width * rest.shape[1]
        if taken > KEPT:
            break
        parts.append((slice(unit * width, (unit + 1) * width), Span(space.Q @ rest)))
    return DirectSum(geometry.units * width, parts) if parts else None


def candidates(geometry: Geometry, inputs: Sequence[RowSpace], batches: Iterable[Terms]) -> list[int]:
    """Units that are active on few samples or positions, or never together with some feature."""
    like = inputs[0].Q
    active = like.new_zeros(geometry.units)
    together = like.new_zeros(geometry.units, len(like))
    for terms in batches:
        on = (terms.B != 0).any(0).to(like)
        active += on.sum((0, 2))
        for start, stop in terms.inputs.steps(KEPT):
            used = (terms.rows(start, stop) != 0).to(like).permute(2, 0, 1, 3).flatten(1, 2)
            by_group = on[start:stop].unflatten(1, (geometry.groups, -1)).permute(1, 2, 0, 3).flatten(2)
            together += (by_group @ used).flatten(0, 1)
    spaces = [inputs[geometry.group(unit)] for unit in range(geometry.units)]
    few = active < 2 * active.new_tensor([space.rank for space in spaces])
    few |= ((together == 0) & ~torch.stack([space.dead for space in spaces])).any(1)
    return ((active > 0) & few).nonzero()[:, 0].tolist()
