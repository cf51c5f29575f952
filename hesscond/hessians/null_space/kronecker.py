r"""Kronecker approximations of layer Hessians, H ≈ C ⊗ A, and the block-diagonal inverse of a network that they make.

A = mean ĥĥᵀ, and C is the curvature summed over the data (Martens and Grosse, ICML 2015; Grosse and Martens, ICML 2016,
for convolutions), estimated from random rank-one terms of the Gauss-Newton matrix, one backward pass for each: positive
semidefinite whatever the network. The diagonal in the eigenbasis is that of George et al., NeurIPS 2018.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from hesscond.capture import Geometry, LayerInputs, curved
from hesscond.hessians import parameters
from hesscond.hessians.factored import FactoredHessian
from hesscond.hessians.network_operator import NetworkOperator
from hesscond.hessians.streaming import StreamedBlock
from hesscond.operators import ApproximateInverse, DiagonalInverse, SymmetricOperator, subspace
from hesscond.problem.problem import WatchedEvaluation
from hesscond.spectra import condition

#: Bytes of Ĥ that are formed at a time.
CHUNK = 2**26

#: Share of each eigenvalue of M that a shift leaves: see `KroneckerInverse`.
KEPT = 0.1

#: Least ratio of the eigenvalues of an inverse's matrix to the largest.
FLOOR = 1e-14

#: Least ratio of the diagonal in the eigenbasis to the eigenvalue of C ⊗ A.
LEAST = 1e-2

#: Number of blocks times signed sums that gives the diagonal in the eigenbasis to about 5 %.
DRAWS = 1024


@dataclass(frozen=True)
class Terms:
    """Contribution of a batch to a layer: Ĥ, and rows b with Σ_j,r (Σ_p b_rjp ⊗ ĥ_jp)(…)ᵀ ≈ H, without signs."""

    inputs: LayerInputs  # Ĥ (J, q, G, n̂)
    #: (R, J, m, q) float64: factor of the curvature, or random combinations of its terms with that mean of BᵀB
    B: torch.Tensor
    weight: float
    first: int = 0  # first column of Ĥ that belongs to a parameter: 1 if the bias does not
    name: str = ""

    def rows(self, start: int, stop: int) -> torch.Tensor:
        """Ĥ of some blocks, (J, q, G, n̂)."""
        return self.inputs.slice(start, stop)[..., self.first :]


class KroneckerFactors:
    """Triangular factors of A (n̂, n̂) and C (m/G, m/G) of each group of a layer; they tell null from small."""

    def __init__(self, geometry: Geometry, width: int) -> None:
        self.groups = geometry.groups
        self._A = [StreamedBlock(width) for _ in range(self.groups)]
        self._C = [StreamedBlock(geometry.units // self.groups) for _ in range(self.groups)]
        self._like = torch.empty(0, dtype=torch.float64, device="cpu")
        self.rows = 0

    def add(self, terms: Terms) -> None:
        """Add a batch."""
        inputs, B = terms.inputs, terms.B
        self.rows += inputs.blocks * inputs.positions
        for start, stop in inputs.steps(CHUNK):
            H_hat = terms.rows(start, stop).flatten(0, 1)
            for group, block in enumerate(self._A):
                add_rows(block, H_hat[:, group], 1.0)
        by_group = B.unflatten(2, (self.groups, -1)).permute(2, 0, 1, 4, 3).flatten(1, 3)
        for block, b in zip(self._C, by_group, strict=True):
            add_rows(block, b, terms.weight)
        self._like = B[:0]

    def eigenvectors(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Eigenvectors Q_C (G, m/G, r_C) and Q_A (G, n̂, r_A) of C ⊗ A, and its eigenvalues (G, r_C, r_A)."""
        both = (self._C, self._A)
        eigen_C, eigen_A = ([row_space(block, self._like).eigenvectors() for block in blocks] for blocks in both)
        C, A = (subspace.stacked([values[None] for values, _ in pairs])[:, 0] for pairs in (eigen_C, eigen_A))
        Q_C, Q_A = (subspace.stacked([Q for _, Q in pairs]) for pairs in (eigen_C, eigen_A))
        return Q_C, Q_A, C[:, :, None] * A[:, None, :] / self.rows


def eigenbasis_diagonal(terms: Terms, Q_C: torch.Tensor, Q_A: torch.Tensor) -> torch.Tensor:
    """(G, r_C, r_A) of Σ_j,r (Σ_p (Q_Cᵀ b_rjp) (Q_Aᵀ ĥ_jp)ᵀ)²: the diagonal of the batch's H in the basis Q_C ⊗ Q_A."""
    inputs, groups = terms.inputs, Q_C.shape[0]
    result = Q_C.new_zeros(groups, Q_C.shape[2], Q_A.shape[2])
    B, draws = terms.B, max(1, DRAWS // inputs.blocks)
    if inputs.positions > 1 and len(B) > draws:
        # sums of the R terms with random signs, whose squares have the right mean
        generator = torch.Generator().manual_seed(0)
        signs = torch.randint(0, 2, (draws, *B.shape[:2]), generator=generator, device="cpu").to(B) * 2 - 1
        B = torch.einsum("drj,rjmq->djmq", signs, B) / draws**0.5
    for start, stop in inputs.steps(CHUNK):
        h = terms.rows(start, stop).permute(2, 0, 1, 3) @ Q_A[:, None]
        b = B[:, start:stop].unflatten(2, (groups, -1))
        if inputs.positions == 1:
            squares = (b[..., 0].permute(2, 0, 1, 3) @ Q_C[:, None]).square_().sum(1)
            result += squares.mT @ h[:, :, 0].square()
            continue
        for draw in b:
            # (G, J, m, q) → (G, J, r_C, r_A)
            result += (Q_C.mT[:, None] @ draw.transpose(0, 1) @ h).square_().sum(1)
    return result


class KroneckerInverse(ApproximateInverse):
    """Inverse of M = (Q_C ⊗ Q_A) diag(values) (Q_C ⊗ Q_A)ᵀ ⪰ 0 of each group, by four small products a vector.

    Q_C (G, m/G, r_C) and Q_A (G, n̂, r_A) have orthonormal columns, ``values`` is (G, r_C, r_A). M − shift has the
    eigenvalues max(λ − shift, λ/10): λ is wrong by some per cent, and the sign of λ − shift means nothing near the
    shift.
    """

    def __init__(self, Q_C: torch.Tensor, Q_A: torch.Tensor, values: torch.Tensor) -> None:
        self.Q_C, self.Q_A, self.order = Q_C, Q_A, len(Q_C) * Q_C.shape[1] * Q_A.shape[1]
        largest = float(values.max()) if values.numel() else 0.0
        self.values = values.clamp_min(FLOOR * largest if largest > 0 else 1.0)

    def solve(self, vectors: torch.Tensor, shift: float = 0.0) -> torch.Tensor:
        Q_C, Q_A, values = self.Q_C.to(vectors), self.Q_A.to(vectors), self.values.to(vectors)
        V = subspace.as_blocks(vectors, Q_C.shape[1], Q_A.shape[1])
        inner = Q_C.mT @ (V @ Q_A)
        inner /= torch.maximum(values - shift, KEPT * values)
        return subspace.as_vectors(Q_C @ (inner @ Q_A.mT))


#: Rows that are brought to triangular form at a time, or eight times their length if that is more.
ROWS = 4096


@dataclass(frozen=True)
class RowSpace:
    """Row space of a matrix X (·, n)."""

    Q: torch.Tensor  # (n, r) float64 orthonormal basis; all of Rⁿ's unit vectors if nothing is known to be null
    R: torch.Tensor  # (k, n) float64 triangular factor: RᵀR = XᵀX
    dead: torch.Tensor  # (n,) bool columns of zeros

    @property
    def rank(self) -> int:
        """Dimension of the complement of the known null space."""
        return self.Q.shape[1]

    @property
    def nullity(self) -> int:
        """Dimension of the known null space."""
        return len(self.Q) - self.rank

    def eigenvectors(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Eigenvalues (r,) of XᵀX, descending, and eigenvectors (n, r), in the row space."""
        _, sigma, Vh = torch.linalg.svd(self.R @ self.Q, full_matrices=False)
        values = sigma.new_zeros(self.rank)
        values[: len(sigma)] = sigma.square()
        if len(sigma) < self.rank:
            Vh = torch.linalg.svd(self.R @ self.Q, full_matrices=True).Vh
        return values, self.Q @ Vh.T


def add_rows(block: StreamedBlock, rows: torch.Tensor, weight: float) -> None:
    """Add rows (·, n) to a triangular factor in pieces, three times as fast as at once."""
    for piece in rows.split(max(ROWS, 8 * rows.shape[1])):
        block.add(FactoredHessian(piece, None, None), weight)


def row_space(block: StreamedBlock, like: torch.Tensor) -> RowSpace:
    """Row space of the rows added to ``block``, on the device of ``like``.

    Where the rank is not certain by the singular values of the factor, its columns scaled to one length, only columns
    of zeros are null.
    """
    hessian = block.hessian()
    R, error = hessian.rows, hessian.row_error  # type: ignore[attr-defined]
    n = R.shape[1]
    lengths = R.square().sum(0).sqrt()
    dead = lengths == 0
    live = (~dead).nonzero()[:, 0]
    if len(live) == 0:
        return RowSpace(R.new_zeros(n, 0), R, dead)
    scaled = R[:, live] / lengths[live]
    _, sigma, Vh = torch.linalg.svd(scaled, full_matrices=False)
    carried = 0.0 if error is None else float((error[live] / lengths[live]).square().sum().sqrt())
    values = condition.Values.normwise(sigma.cpu().numpy(), tuple(scaled.shape), carried, power=2, solver="SVD")
    kappa = condition.conclude(values, order=len(live), limit=len(live), scale=0)
    rank = kappa.rank if kappa.resolved else None
    Q = R.new_zeros(n, len(live) if rank is None else rank)
    if rank is None or rank == len(live):
        Q[live, torch.arange(len(live), device=R.device)] = 1
    else:
        # the row space of R is that of the scaled one with its entries scaled back
        Q[live] = torch.linalg.qr(Vh[:rank].T * lengths[live, None]).Q
    return RowSpace(Q.to(like), R.to(like), dead.to(like.device))


#: Least number of random terms times samples from a batch, and largest number of terms.
SAMPLES, MOST = 1024, 16

#: Products that the sizes of the other parameters are estimated from.
PRODUCTS = 4


@dataclass(eq=False)
class BlockInverse(ApproximateInverse):
    """Block-diagonal inverse; zero outside the blocks and on the null space."""

    order: int
    blocks: Sequence[tuple[torch.Tensor, ApproximateInverse]]
    null_space: subspace.Subspace | None = None

    def solve(self, vectors: torch.Tensor, shift: float = 0.0) -> torch.Tensor:
        if self.null_space is not None:
            vectors = self.null_space.remove(vectors)
        result = torch.zeros_like(vectors)
        for rows, inverse in self.blocks:
            result[rows] = inverse.solve(vectors[rows], shift)
        return result if self.null_space is None else self.null_space.remove(result)


def network_inverse(operator: NetworkOperator, *, null_space: subspace.Subspace | None = None) -> BlockInverse:
    """Approximate inverse of a network: Kronecker products of layers, and a diagonal of the other parameters."""
    layers = {placement.name: placement for placement in operator.placements}

    def terms() -> Iterator[Terms]:
        generator = torch.Generator().manual_seed(0)
        for number, linearization in operator.linearizations():
            yield from sampled_terms(linearization.evaluation, layers, operator.weights[number], generator)

    factors: dict[str, KroneckerFactors] = {}
    blocks: list[tuple[torch.Tensor, ApproximateInverse]] = []
    # no layers: weights are computed from other parameters, or parameters belong to other modules
    if layers:
        for term in terms():
            placement = layers[term.name]
            factors.setdefault(term.name, KroneckerFactors(placement.geometry, placement.index.shape[1])).add(term)
        bases = {name: factor.eigenvectors() for name, factor in factors.items()}
        diagonals = {name: torch.zeros_like(products) for name, (_, _, products) in bases.items()}
        for term in terms():
            diagonals[term.name] += term.weight * eigenbasis_diagonal(term, *bases[term.name][:2])
        for name, (Q_C, Q_A, products) in bases.items():
            # the sums over other samples were not zero
            values = torch.maximum(diagonals[name], LEAST * products) / operator.total_mass
            index = layers[name].index.flatten().to(operator.device)
            blocks.append((index, KroneckerInverse(Q_C, Q_A, values)))
    rest = (~parameters.covered([layers[name] for name in factors], operator.order)).nonzero()[:, 0]
    rest = rest.to(operator.device)
    if len(rest):
        sizes = row_sizes(operator, rest)
        # rows of zeros are null
        live = sizes > 0
        if live.any():
            blocks.append((rest[live], DiagonalInverse(sizes[live])))
    return BlockInverse(operator.order, blocks, null_space)


def sampled_terms(
    evaluation: WatchedEvaluation, layers: Mapping[str, parameters.Placement], weight: float, generator: torch.Generator
) -> Iterator[Terms]:
    """Random rank-one terms of each layer: Jᵀb of random b with the curvature of the loss for their mean of bbᵀ."""
    requests = [placement.request(evaluation) for name, placement in layers.items() if evaluation.calls.get(name)]
    if not requests or not evaluation.loss.requires_grad:
        return
    edges = [call.node for request in requests for call in request.calls]
    terms: list[list[torch.Tensor]] = [[] for _ in requests]
    for outputs, seeds in random_seeds(evaluation, generator):
        gradients = iter(torch.autograd.grad(outputs, edges, seeds, retain_graph=True, allow_unused=True))
        for request, rows in zip(requests, terms, strict=True):
            parts = [next(gradients) for _ in request.calls]
            if any(part is not None for part in parts):
                blocks = evaluation.samples if request.splits(evaluation.samples) else 1
                rows.append(request.positions([None if part is None else part[None] for part in parts], blocks))
    for request, rows in zip(requests, terms, strict=True):
        if rows:
            B = torch.cat(rows) / len(rows) ** 0.5
            inputs = request.inputs(B.shape[1])
            yield Terms(inputs, B, weight, layers[request.name].first, request.name)


def random_seeds(
    evaluation: WatchedEvaluation, generator: torch.Generator
) -> Iterator[tuple[list[Any], list[torch.Tensor]]]:
    """Inputs of the curved nodes of a loss with random b in each; where these are not known, the loss itself."""
    nodes = curved.curved_nodes(evaluation.loss)
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
