"""The Hessian of a whole layer by its products, Σ_j C_j ⊗ ĥ_j ĥ_jᵀ, from what was captured once."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property

import torch
from torch import nn

from hesscond.capture import MEMORY, Batch, Factor, Formed, LayerCapture, LayerInputs, LossFunction, capture
from hesscond.capture.batches import Batches
from hesscond.capture.weighting import BatchWeight, Weights
from hesscond.errors import CaptureError, ConfigError
from hesscond.hessians.kronecker import KroneckerFactors, Terms, eigenbasis_diagonal
from hesscond.hessians.null_layer import layer_null_directions
from hesscond.hessians.null_spaces import NullDirections, combined
from hesscond.operators import (
    ApproximateInverse,
    Dense,
    DiagonalInverse,
    Gram,
    Matrix,
    Subspace,
    Sum,
    SymmetricOperator,
)

#: Bytes of Ĥ and of the curvature that are worked on at a time, so that they stay in the cache between two uses.
PIECE = 2**22


class TermsOperator(SymmetricOperator):
    """Σ_j,r s_rj f_rj f_rjᵀ with f_rj = Σ_p b_rjp ⊗ ĥ_jp, never formed: two products with Ĥ, and small ones with b.

    Parameters
    ----------
    inputs
        Ĥ (J, q, G, n̂).
    curvature
        Of the whole layer.
    """

    def __init__(self, inputs: LayerInputs, curvature: Factor) -> None:
        geometry = inputs.geometry
        super().__init__(geometry.units * geometry.n_params, torch.float64, inputs.device)
        self.inputs = inputs
        # one row for each term of a block, over its units and positions
        self.rows = curvature.B.transpose(0, 1).flatten(2).contiguous()
        self.sign = None if curvature.sign is None else curvature.sign[:, :, 0].T.contiguous()[:, :, None]
        self.psd = curvature.norms is None and (self.sign is None or not bool((self.sign < 0).any()))

    def multiply(self, vectors: torch.Tensor) -> torch.Tensor:
        """A V."""
        geometry, k = self.inputs.geometry, vectors.shape[1]
        groups, n, units = geometry.groups, geometry.n_params, geometry.units // geometry.groups
        W = vectors.reshape(groups, units, n, k).permute(0, 2, 1, 3).reshape(groups, n, units * k)
        result = W.new_zeros(groups, n, W.shape[2])
        for start, stop in self.pieces():
            rows = self.rows[start:stop]
            h = self.inputs.slice(start, stop).permute(2, 0, 1, 3).flatten(1, 2)
            seen = rows @ self.by_block(h @ W, stop - start, k)
            if self.sign is not None:
                seen *= self.sign[start:stop]
            result.baddbmm_(h.mT, self.by_group(rows.mT @ seen))
        return result.view(groups, n, units, k).transpose(1, 2).reshape(self.order, k)

    def pieces(self) -> Iterator[tuple[int, int]]:
        """Ranges of blocks."""
        inputs = self.inputs
        one = self.rows[0].numel() + inputs.positions * inputs.geometry.groups * inputs.geometry.n_params
        size = max(1, PIECE // (8 * one))
        for start in range(0, inputs.blocks, size):
            yield start, min(start + size, inputs.blocks)

    def by_block(self, values: torch.Tensor, blocks: int, k: int) -> torch.Tensor:
        """(G, J q, m/G k) pre-activations as (J, m q, k)."""
        groups, positions, units = len(values), self.inputs.positions, self.inputs.geometry.units
        split = values.view(groups, blocks, positions, units // groups, k)
        return split.permute(1, 0, 3, 2, 4).reshape(blocks, units * positions, k)

    def by_group(self, values: torch.Tensor) -> torch.Tensor:
        """The inverse of `by_block`."""
        blocks, _, k = values.shape
        geometry, positions = self.inputs.geometry, self.inputs.positions
        groups, units = geometry.groups, geometry.units // geometry.groups
        split = values.view(blocks, groups, units, positions, k)
        return split.permute(1, 0, 3, 2, 4).reshape(groups, blocks * positions, units * k)


class LayerOperator(SymmetricOperator):
    """The Hessian of all parameters of a layer, unit by unit as [b_i, w_i], in float64.

    Everything the products need was captured before: they neither run the model nor differentiate.

    Parameters
    ----------
    parts
        Captures of the layer (``whole=True``) on batches, each with what its loss counts in that of all of them.
    memory
        Bytes that may be used for rows Σ_p b_p ⊗ ĥ_p, where multiplying by these is cheaper.

    Attributes
    ----------
    parts
        As given.
    psd
        Whether the captures prove that the matrix is positive semidefinite.
    """

    def __init__(self, parts: Sequence[tuple[LayerCapture, float]], *, memory: int = MEMORY) -> None:
        if not parts:
            raise ConfigError("the data are an empty stream: they need at least one batch")
        self.parts = list(parts)
        geometry = parts[0][0].inputs.geometry
        super().__init__(geometry.units * geometry.n_params, torch.float64, parts[0][0].inputs.device)
        room = memory // len(parts)
        self.sum = Sum([(weight, product_of(captured, room)) for captured, weight in parts])
        self.psd, self.operands = self.sum.psd, (self.sum,)

    @classmethod
    def of(
        cls,
        model: nn.Module,
        loss_fn: LossFunction,
        data: Batch | Iterable[Batch],
        layer: str,
        *,
        dtype: torch.dtype | None = torch.float64,
        memory: float | None = None,
        reduction: str | None = None,
        weight: BatchWeight | None = None,
    ) -> LayerOperator:
        """The operator of a model's layer over a batch or a stream of them, captured one by one.

        Parameters
        ----------
        model, loss_fn, data, dtype, memory, reduction, weight
            As for `hesscond.probe`.
        layer
            Its name.

        Raises
        ------
        ConfigError
            No such layer, or no data.
        CaptureError
            A layer that cannot be captured, or not in the memory.
        """
        budget = MEMORY if memory is None else int(memory)
        parts, taken = [], 0
        batches = Batches(data, [], budget)
        weights = None if is_single(batches) else Weights(model, loss_fn, dtype, reduction, weight)
        for drawn in batches:
            captures = capture(
                model,
                loss_fn,
                drawn.batch,
                [layer],
                whole=True,
                dtype=dtype,
                memory=budget - taken,
                weights=weights,
            )
            mass = 1.0 if captures.mass is None else captures.mass
            if mass == 0:
                continue
            captured = captures[layer]
            taken += bytes_of(captured)
            if taken > budget:
                raise CaptureError(
                    f"layer {layer!r} on {drawn.number + 1} batches takes {taken / 1e9:.3g} GB, more than memory="
                    f"{budget / 1e9:.3g} GB: use HessianOperator(..., layers=[{layer!r}]), which keeps none of it"
                )
            parts.append((captured, mass))
        total = 1.0 if weights is None else weights.total
        return cls([(captured, mass / total) for captured, mass in parts], memory=max(budget - taken, 0))

    def multiply(self, vectors: torch.Tensor) -> torch.Tensor:
        """A V."""
        return self.sum.multiply(vectors)

    @property
    def rounding(self) -> float:
        """That of the sum."""
        return self.sum.rounding

    @cached_property
    def factors(self) -> KroneckerFactors | None:
        """A and C; None where the curvature is not known as a factor."""
        terms = self.terms()
        if terms is None:
            return None
        geometry = self.parts[0][0].inputs.geometry
        factors = KroneckerFactors(geometry, geometry.n_params)
        for own in terms:
            factors.add(own)
        return factors

    def terms(self) -> list[Terms] | None:
        """What each batch contributes."""
        found = []
        for captured, weight in self.parts:
            if not isinstance(captured.curvature, Factor):
                return None
            found.append(Terms(captured.inputs, captured.curvature.B, weight))
        return found

    @cached_property
    def null_directions(self) -> list[NullDirections]:
        """What is known of the null space, with the reasons."""
        return [] if self.factors is None else layer_null_directions(self.factors, self.terms() or [])

    @cached_property
    def _null_space(self) -> Subspace | None:
        return combined(self.null_directions)

    @property
    def null_space(self) -> Subspace | None:
        """All of `null_directions` together."""
        return self._null_space

    def kronecker(self) -> ApproximateInverse:
        """The matching preconditioner: a `KroneckerInverse`, or a diagonal one where there are no factors."""
        if self.factors is None:
            return DiagonalInverse(self.sizes())
        basis = self.factors.basis()
        for terms in self.terms() or []:
            basis.add(terms)
        return basis.inverse(null_space=self.null_space)

    def sizes(self) -> torch.Tensor:
        """(n,) the sizes of the terms of the diagonal, summed up."""
        geometry = self.parts[0][0].inputs.geometry
        own = torch.eye(geometry.units // geometry.groups, dtype=self.dtype, device=self.device)
        features = torch.eye(geometry.n_params, dtype=self.dtype, device=self.device)
        bases = own.expand(geometry.groups, -1, -1), features.expand(geometry.groups, -1, -1)
        total = torch.zeros(self.order, dtype=self.dtype, device=self.device)
        for captured, weight in self.parts:
            if isinstance(captured.curvature, Formed):
                total += weight * captured.curvature.matrices[0].diagonal().abs()
            elif isinstance(captured.curvature, Factor):
                terms = Terms(captured.inputs, captured.curvature.B, weight)
                total += weight * eigenbasis_diagonal(terms, *bases).flatten()
        return total


def product_of(captured: LayerCapture, memory: int) -> SymmetricOperator:
    """The operator of one batch: a matrix, rows f_rj where they are fewer than positions and fit, or their terms."""
    curvature, inputs = captured.curvature, captured.inputs
    if isinstance(curvature, Formed):
        return Dense(curvature.matrices[0])
    if not isinstance(curvature, Factor):
        raise CaptureError(f"layer {captured.name!r} was captured by unit: capture it with whole=True")
    terms, blocks = curvature.B.shape[:2]
    order = inputs.geometry.units * inputs.geometry.n_params
    unsigned = curvature.sign is None and curvature.norms is None
    if unsigned and terms < inputs.positions and 8 * terms * blocks * order <= memory:
        geometry = inputs.geometry
        per_group = geometry.units // geometry.groups
        groups = [range(g * per_group, (g + 1) * per_group) for g in range(geometry.groups)]
        rows = [captured.unit_rows(units, memory // 8).transpose(0, 1).flatten(1) for units in groups]
        return Gram(Matrix(torch.cat(rows, 1)))
    return TermsOperator(inputs, curvature)


def bytes_of(captured: LayerCapture) -> int:
    """What a capture and its operator hold."""
    curvature, inputs = captured.curvature, captured.inputs
    if isinstance(curvature, Formed):
        return 16 * curvature.matrices.numel()
    assert isinstance(curvature, Factor)
    rows = inputs.blocks * inputs.positions * inputs.geometry.groups * inputs.geometry.n_params
    return 16 * curvature.B.numel() + 8 * rows


def is_single(batches: Batches) -> bool:
    """Whether the data are one batch, whose loss is that of the whole."""
    return isinstance(batches.source, list) and len(batches.source) == 1
