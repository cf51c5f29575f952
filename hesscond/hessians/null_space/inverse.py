"""Approximate inverse for whole networks: block-diagonal over layers, each block a Kronecker product.

The curvature of a layer is estimated from random rank-one terms of the Gauss-Newton matrix, one backward pass for
each: good enough for a preconditioner, and positive semidefinite whatever the network.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from hesscond.capture.curved import curved_nodes
from hesscond.hessians.network_operator import NetworkOperator
from hesscond.hessians.null_space.kronecker import KroneckerBasis, KroneckerFactors, Terms
from hesscond.hessians.parameters import Placement, covered
from hesscond.operators import ApproximateInverse, DiagonalInverse, Subspace, SymmetricOperator
from hesscond.problem.problem import WatchedEvaluation

#: Least number of random terms times samples from a batch, and largest number of terms.
SAMPLES, MOST = 1024, 16

#: Products that the sizes of the other parameters are estimated from.
PRODUCTS = 4


class BlockInverse(ApproximateInverse):
    """Block-diagonal inverse; zero outside the blocks and on the null space."""

    def __init__(
        self,
        order: int,
        blocks: Sequence[tuple[torch.Tensor, ApproximateInverse]],
        *,
        null_space: Subspace | None = None,
    ) -> None:
        self.order, self.blocks, self.null_space = order, list(blocks), null_space

    def solve(self, vectors: torch.Tensor, shift: float = 0.0) -> torch.Tensor:
        if self.null_space is not None:
            vectors = self.null_space.remove(vectors)
        result = torch.zeros_like(vectors)
        for rows, inverse in self.blocks:
            result[rows] = inverse.solve(vectors[rows], shift)
        return result if self.null_space is None else self.null_space.remove(result)


def network_inverse(operator: NetworkOperator, *, null_space: Subspace | None = None) -> BlockInverse:
    """Approximate inverse of a network: Kronecker products of layers, and a diagonal of the other parameters."""
    layers = {placement.name: placement for placement in operator.placements}

    def terms() -> Iterator[Terms]:
        generator = torch.Generator().manual_seed(0)
        for number, linearization in operator.linearizations():
            yield from sampled_terms(linearization.evaluation, layers, operator.weights[number], generator)

    factors: dict[str, KroneckerFactors] = {}
    bases: dict[str, KroneckerBasis] = {}
    # no layers: weights are computed from other parameters, or parameters belong to other modules
    if layers:
        for own in terms():
            placement = layers[own.name]
            factors.setdefault(own.name, KroneckerFactors(placement.geometry, placement.index.shape[1])).add(own)
        bases = {name: own.basis() for name, own in factors.items()}
        for own in terms():
            bases[own.name].add(own)
    blocks: list[tuple[torch.Tensor, ApproximateInverse]] = [
        (layers[name].index.flatten().to(operator.device), basis.inverse(operator.total_mass))
        for name, basis in bases.items()
    ]
    rest = (~covered([layers[name] for name in bases], operator.order)).nonzero()[:, 0].to(operator.device)
    if len(rest):
        sizes = row_sizes(operator, rest)
        # rows of zeros are null
        live = sizes > 0
        if live.any():
            blocks.append((rest[live], DiagonalInverse(sizes[live])))
    return BlockInverse(operator.order, blocks, null_space=null_space)


def sampled_terms(
    evaluation: WatchedEvaluation, layers: Mapping[str, Placement], weight: float, generator: torch.Generator
) -> Iterator[Terms]:
    """Random rank-one terms of each layer: Jᵀb of random b with the curvature of the loss for their mean of bbᵀ."""
    requests = [own.request(evaluation) for name, own in layers.items() if evaluation.calls.get(name)]
    if not requests or not evaluation.loss.requires_grad:
        return
    edges = [call.node for request in requests for call in request.calls]
    found: list[list[torch.Tensor]] = [[] for _ in requests]
    for outputs, seeds in random_seeds(evaluation, generator):
        gradients = iter(torch.autograd.grad(outputs, edges, seeds, retain_graph=True, allow_unused=True))
        for request, own in zip(requests, found, strict=True):
            parts = [next(gradients) for _ in request.calls]
            if any(part is not None for part in parts):
                blocks = evaluation.samples if request.splits(evaluation.samples) else 1
                own.append(request.positions([None if part is None else part[None] for part in parts], blocks))
    for request, own in zip(requests, found, strict=True):
        if own:
            B = torch.cat(own) / len(own) ** 0.5
            inputs = request.inputs(B.shape[1])
            yield Terms(inputs, B, weight, layers[request.name].first, request.name)


def random_seeds(
    evaluation: WatchedEvaluation, generator: torch.Generator
) -> Iterator[tuple[list[Any], list[torch.Tensor]]]:
    """Inputs of the curved nodes of a loss with random b in each; where these are not known, the loss itself."""
    nodes = curved_nodes(evaluation.loss)
    if not nodes:
        # the gradients of the samples, whose moment is the Fisher matrix if the loss is minus a log-likelihood
        yield [evaluation.loss], [evaluation.loss.new_tensor(evaluation.samples**0.5)]
        return
    for _ in range(max(1, min(MOST, -(-SAMPLES // evaluation.samples)))):
        yield [node.edge for node in nodes], [node.sample(generator).to(node.dtype) for node in nodes]


def row_sizes(operator: SymmetricOperator, rows: torch.Tensor) -> torch.Tensor:
    """Estimates of the norms of the rows of a diagonal block of A: E (A z)_i² = Σ_j A_ij² for random signs z."""
    generator = torch.Generator().manual_seed(0)
    signs = torch.randint(0, 2, (len(rows), PRODUCTS), generator=generator, device="cpu") * 2.0 - 1
    vectors = torch.zeros(operator.order, PRODUCTS, dtype=operator.dtype, device=operator.device)
    vectors[rows] = signs.to(vectors)
    return operator.multiply(vectors)[rows].square().mean(1).sqrt()
