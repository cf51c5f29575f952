"""Results of a capture: the rows that a layer sees and the second derivatives of the loss in its pre-activations."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch.autograd.graph import get_gradient_edge

from hesscond import causes
from hesscond.capture import kinds, layers
from hesscond.errors import CaptureError, NotFiniteError
from hesscond.problem import Call
from hesscond.problem.evaluation import is_finite

EPS = float(torch.finfo(torch.float64).eps)

#: Terms are merged if the error is at most this many units of round-off.
MERGED = 16.0

#: Numbers below it have lost digits.
TINY = float(torch.finfo(torch.float64).tiny)

#: Number of float64 numbers compared at a time: 4 MB, which stay in a processor's cache.
CACHED = 2**19

#: Ĥ is kept once formed up to this many bytes; beyond, it is formed again in slices when needed.
KEPT = 2**28


@dataclass(frozen=True)
class LayerInputs:
    """Ĥ of a layer in J blocks of q positions: (J, q, G, n̂), with G the groups of a convolution.

    A block is one sample. If samples influence each other behind the layer, all samples form one block (J = 1). If not
    even the positions of a sample influence each other, a block is one position of each call. The positions of several
    calls of the layer follow one another.
    """

    layer: kinds.Layer
    calls: tuple[tuple[torch.Tensor, torch.Size], ...]  # input of each call and the shape of its output
    blocks: int  # J

    def __getstate__(self) -> dict[str, Any]:
        # the module may have hooks, a parametrization, or a class that no other process has
        calls = tuple((x.detach(), shape) for x, shape in self.calls)
        return vars(self) | {"layer": layers.bare(self.layer), "calls": calls, "geometry": self.geometry}

    @cached_property
    def geometry(self) -> kinds.Geometry:
        """Units, groups and parameters of the layer."""
        return kinds.Geometry.of(self.layer)

    @property
    def device(self) -> torch.device:
        return layers.device_of(self.layer)

    @cached_property
    def positions(self) -> int:
        """Number q of positions of a block."""
        units = self.geometry.units
        return sum(shape.numel() for _, shape in self.calls) // units // self.blocks

    def slice(self, start: int, stop: int) -> torch.Tensor:
        """Blocks ``start`` to ``stop`` of Ĥ, float64, with the column of ones in front if there is a bias."""
        if not self.calls:
            raise CaptureError(
                f"this {self.geometry.kind} is never called: its weight is used directly, its inputs unseen"
            )
        if self._whole is not None:
            return self._whole[start:stop]
        return self._form(start, stop)

    def steps(self, memory: int) -> list[tuple[int, int]]:
        """Ranges of blocks whose Ĥ takes at most ``memory`` bytes each."""
        block_bytes = 8 * self.positions * self.geometry.groups * self.geometry.n_params
        size = self.blocks if self._whole is not None else max(1, min(self.blocks, memory // max(block_bytes, 1)))
        return [(start, min(start + size, self.blocks)) for start in range(0, self.blocks, size)]

    def split(self, parts: int) -> list[LayerInputs]:
        """Split into ``parts`` of equally many samples, for a dense layer with one call and one block per sample."""
        ((x, shape),), size = self.calls, self.blocks // parts
        inputs = [LayerInputs(self.layer, ((chunk, torch.Size([size, *shape[1:]])),), size) for chunk in x.split(size)]
        if self._whole is not None:
            for part, rows in zip(inputs, self._whole.split(size), strict=True):
                vars(part).update(geometry=self.geometry, _whole=rows)
        return inputs

    @cached_property
    def ranks(self) -> dict[int, int]:
        """Ranks of Ĥ by group, as far as they are known."""
        return {}

    @cached_property
    def squared_lengths(self) -> torch.Tensor:
        """Sums of squares Σ_p ĥ_p² (J, G, n̂) over the positions of each block."""
        return torch.cat([self.slice(*step).square().sum(1) for step in self.steps(KEPT)])

    def gradient(self, slopes: torch.Tensor) -> torch.Tensor:
        """Σ_p δ_p ĥ_pᵀ (m, n̂) from slopes δ (J, m, q) of the loss in the pre-activations, float64."""
        units, groups = slopes.shape[1], self.geometry.groups
        total = slopes.new_zeros(groups, units // groups, self.geometry.n_params)
        for start, stop in self.steps(KEPT):
            by_group = slopes[start:stop].unflatten(1, (groups, -1))
            total += torch.einsum("jgip,jpgn->gin", by_group, self.slice(start, stop))
        return total.flatten(0, 1)

    @cached_property
    def lengths(self) -> torch.Tensor:
        """Norms (m, n̂) of the features that each unit sees, 1 for features that are zero."""
        lengths = self.squared_lengths.sum(0).sqrt()
        return lengths.where(lengths > 0, 1.0).repeat_interleave(self.geometry.units // self.geometry.groups, 0)

    @cached_property
    def shares(self) -> torch.Tensor:
        """Sums (J, m) over the features that each unit sees, of the share of their squared length in each block."""
        by_group = self.geometry.units // self.geometry.groups
        lengths = self.squared_lengths.sum(0)
        shares = (self.squared_lengths / lengths.where(lengths > 0, 1.0)).sum(2)
        return shares.repeat_interleave(by_group, 1)

    def sums(self, weights: torch.Tensor) -> torch.Tensor:
        """Sums Σ_k w_ik ĥ_k (J, m, q) with weights (m, n̂) for each unit."""
        by_group = weights.unflatten(0, (self.geometry.groups, -1))
        parts = [torch.einsum("jpgn,gin->jgip", self.slice(*step), by_group) for step in self.steps(KEPT)]
        return torch.cat(parts).flatten(1, 2)

    def largest_share(self, slopes: torch.Tensor) -> torch.Tensor:
        """Largest entry (m,) of Ĥᵀδ in each unit, for δ (J, m, q), relative to the norm of its feature."""
        return (self.gradient(slopes).abs() / self.lengths).amax(1)

    def kept(self) -> LayerInputs:
        """Copy that does not change if the tensors that it was captured from do."""
        if self._whole is not None or not self.calls:
            return self
        return replace(self, calls=tuple((x.clone(), shape) for x, shape in self.calls))

    @cached_property
    def _whole(self) -> torch.Tensor | None:
        if not self.calls:
            return None
        size = 8 * self.blocks * self.positions * self.geometry.groups * self.geometry.n_params
        return self._form(0, self.blocks) if size <= KEPT else None

    def _form(self, start: int, stop: int) -> torch.Tensor:
        parts = []
        for x, shape in self.calls:
            if self.blocks > 1:
                # an input has as many leading entries as the output: ``share`` of them make a block, or one ``split``
                share, split = max(1, len(x) // self.blocks), max(1, self.blocks // len(x))
                chosen = x[start // split * share : -(-stop // split) * share]
                rows = self._rows(chosen, torch.Size([len(chosen), *shape[1:]]))
                rows, skipped = rows.unflatten(0, (-1, share)).flatten(1, 2), start % split
                rows = rows.unflatten(1, (split, -1)).flatten(0, 1)[skipped : skipped + stop - start]
            else:
                rows = self._rows(x, shape).flatten(0, 1)[None]
            parts.append(rows)
        return parts[0] if len(parts) == 1 else torch.cat(parts, 1)

    def _rows(self, x: torch.Tensor, shape: torch.Size) -> torch.Tensor:
        """Rows (L, p, G, n̂) of one call, in newly allocated memory."""
        geometry = self.geometry
        view = kinds.kind_of(self.layer).windows(self.layer, x.to(torch.float64), shape)
        # the positions come first, then the groups, then the weights
        dims = max(geometry.dims, 1)
        positions, weights = view.shape[1 : 1 + dims], view.shape[2 + dims :]
        rows = view.new_empty(len(view), *positions, geometry.groups, geometry.n_params)
        rows[..., geometry.bias :].unflatten(-1, weights).copy_(view)
        if geometry.bias:
            rows[..., 0] = 1
        return rows.reshape(len(view), -1, geometry.groups, geometry.n_params)


@dataclass(frozen=True)
class DiagonalS:
    """Diagonal S_i over all positions: the second derivatives of the loss in one pre-activation each."""

    root: torch.Tensor  # √|S_pp| (J q, u) float64 of each unit
    sign: torch.Tensor | None  # of S_pp (J q, u); None: all of them ≥ 0
    # (J q, u) bounds of the round-off in ``root`` where it is of the size of the entry, 0 elsewhere
    error: torch.Tensor | None = None
    # (J q, u) sizes of the terms of S, if its entries are known only up to round-off of these
    norm: torch.Tensor | None = None


@dataclass(frozen=True)
class FactoredS:
    """Factor of S = Σ_r s_r b_r b_rᵀ in each block, over the positions of all units of the block together.

    With signs (R, J, u), only the blocks of S within a unit are meaningful. ``norms`` are those of the blocks of S if
    it was formed and then decomposed: S and its small eigenvalues are then known up to round-off of that size.
    """

    B: torch.Tensor  # b_r (R, J, u, q) float64
    sign: torch.Tensor | None  # s_r = ±1 (R, J, 1 or u); None: all +1
    norms: torch.Tensor | None = None  # (J, 1 or u); None: every b is accurate to the last digits
    noise: torch.Tensor | None = None  # (J, u) bounds, in the 2-norm, of the round-off in each b

    @cached_property
    def is_noisy(self) -> bool:
        """Whether any b is known up to round-off."""
        return self.noise is not None and bool(self.noise.any())


@dataclass(frozen=True)
class FormedH:
    """Hessians in the parameters, where they are cheaper to differentiate than S."""

    matrices: torch.Tensor  # (u, n̂, n̂) float64, or (1, m n̂, m n̂) for a whole layer
    # (u, n̂) or (1, m n̂): d such that a relative change eps of the summands changes entry (k, l) by eps·d_k·d_l
    spread: torch.Tensor
    terms: int  # number of products that were summed up for an entry


Curvature = DiagonalS | FactoredS | FormedH


@dataclass(frozen=True)
class EntryBounds:
    """Bounds of the errors of a factor's entries: entry k of row r of block j is off by s_rj l_jk at most."""

    sizes: torch.Tensor  # s (R, J)
    lengths: torch.Tensor  # l (J, n̂)

    def entries(self) -> torch.Tensor:
        """All bounds (R J, n̂)."""
        return (self.sizes[..., None] * self.lengths).flatten(0, 1)

    def squared_rows(self) -> torch.Tensor:
        """Sums of squares (R J,) of the bounds along each row."""
        return (self.sizes.square() * self.lengths.square().sum(1)).flatten()


@dataclass(frozen=True)
class LayerCapture:
    """Capture of a layer on a batch: its inputs Ĥ, and the second derivatives S of the loss in its pre-activations."""

    name: str  # in the model
    inputs: LayerInputs
    units: tuple[int, ...]  # output units captured
    curvature: Curvature  # S of each unit, or of all units together
    route: str  # how S was computed
    vanishing: causes.Cause = causes.NOTHING  # why an apparent zero of S may be one that underflows or has no digits
    repeating: bool = False  # whether equal numbers in Ĥ may be different numbers that were rounded

    @cached_property
    def loses_entries(self) -> causes.Cause:
        """Reason why zeros of S^½Ĥ need not be zeros, nor equal numbers equal.

        S is ``vanishing``, or products with its entries underflow, or Ĥ is ``repeating``.
        """
        if self.vanishing or self.repeating or not isinstance(self.curvature, DiagonalS) or not self.inputs.calls:
            return self.vanishing or (causes.REPEATED if self.repeating else causes.NOTHING)
        root = smallest_nonzero(self.curvature.root)
        types = {x.dtype for x, _ in self.inputs.calls}
        # no number of the inputs' type is smaller
        if root * min(torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps for dtype in types) >= TINY:
            return causes.NOTHING
        least = min(smallest_nonzero(self.inputs.slice(*step)) for step in self.inputs.steps(KEPT))
        return causes.UNDERFLOW if root * least < TINY else causes.NOTHING

    def split(self, parts: int) -> list[LayerCapture]:
        """Split into captures of ``parts`` of equally many samples, for a dense layer with a `DiagonalS` S ≥ 0."""
        assert isinstance(self.curvature, DiagonalS)
        roots = self.curvature.root.chunk(parts)
        captures = [
            replace(self, inputs=inputs, curvature=DiagonalS(root, None))
            for inputs, root in zip(self.inputs.split(parts), roots, strict=True)
        ]
        # if no number of the whole is lost, none of a part is
        if not self.loses_entries:
            for part in captures:
                vars(part)["loses_entries"] = causes.NOTHING
        return captures

    @property
    def bias(self) -> bool:
        """Whether the layer has a bias."""
        return self.inputs.geometry.bias

    @cached_property
    def H_hat(self) -> torch.Tensor:
        """Extended activations [1; h] (J q, n̂) float64, a row per sample or position (no column of ones without bias).

        Raises a CaptureError for a grouped convolution, whose units have different inputs.
        """
        if self.inputs.geometry.groups != 1:
            raise CaptureError(f"the units of layer {self.name!r} see different inputs: it has groups")
        return self.inputs.slice(0, self.inputs.blocks).flatten(0, 2)

    @property
    def h(self) -> torch.Tensor:
        """Activations (J q, n) without the column of ones."""
        return self.H_hat[:, 1:] if self.bias else self.H_hat

    def column(self, unit: int) -> int:
        """Position of ``unit`` among the captured ones."""
        return self.units.index(unit)

    def columns(self, units: Sequence[int]) -> list[int] | slice:
        """Positions of ``units`` among the captured ones; a slice, which copies nothing, if they are all of them."""
        return slice(None) if tuple(units) == self.units else [self.column(unit) for unit in units]

    def spread(self, units: Sequence[int]) -> torch.Tensor | None:
        """Vectors d (u, n̂) such that round-off in the blocks of S changes entry (k, l) of a Hessian by eps·d_k·d_l.

        None: there is no such round-off.
        """
        assert isinstance(self.curvature, FactoredS)
        norms = self.curvature.norms
        if norms is None:
            return None
        columns = [min(self.column(unit), norms.shape[1] - 1) for unit in units]
        lengths = self.inputs.squared_lengths[:, self.inputs.geometry.group(units[0])]
        # a list as an index would be copied to the device
        return (torch.stack([norms[:, column] for column in columns], 1).T @ lengths).sqrt()

    def row_rounding(self, units: Sequence[int]) -> list[EntryBounds | None]:
        """Bounds of the round-off in the entries of `unit_rows`, for each unit.

        The error of Σ_p b_p ĥ_p is at most √q·eps·‖b‖‖ĥ‖ (probable growth of a sum's error). None: with one position
        there is no sum, and the entries are accurate to the last digit if b is.
        """
        assert isinstance(self.curvature, FactoredS)
        columns, noise = self.columns(units), self.curvature.noise
        if self.inputs.positions == 1 and not self.curvature.is_noisy:
            return [None] * len(units)
        growth = EPS * max(2 * MERGED, self.inputs.positions**0.5) * (self.inputs.positions > 1)
        sizes = growth * self.curvature.B[:, :, columns].square().sum(3).sqrt()
        if noise is not None:
            sizes = sizes + noise[:, columns]
        lengths = self.inputs.squared_lengths.sqrt().unbind(1)
        groups = map(self.inputs.geometry.group, units)
        return [EntryBounds(size, lengths[group]) for size, group in zip(sizes.unbind(2), groups, strict=True)]

    def narrowed(self, units: Sequence[int]) -> LayerCapture:
        """Capture of some units only, with rank-one terms merged if they differ only by a factor in every block.

        They do so behind a mean over the positions, for example: S then has rank 1 in each block, whatever the number
        of terms.
        """
        assert isinstance(self.curvature, FactoredS)
        columns = self.columns(units)
        B, sign, norms = self.curvature.B[:, :, columns], self.curvature.sign, self.curvature.norms
        if sign is None and norms is None:
            B = merged(B)
        if sign is not None and sign.shape[2] > 1:
            sign = sign[:, :, columns]
        if norms is not None and norms.shape[1] > 1:
            norms = norms[:, columns]
        noise = self.curvature.noise
        noise = None if noise is None else noise[:, columns]
        return replace(self, units=tuple(units), curvature=FactoredS(B, sign, norms, noise))

    def unit_rows(self, units: Sequence[int], memory: int) -> torch.Tensor:
        """Rows F_i (u, R J, n̂) of units with H_i = Σ ± (rows)ᵀ(rows), from a `FactoredS`: Σ_p b_rp ĥ_p for each block.

        All of ``units`` must belong to one group.
        """
        assert isinstance(self.curvature, FactoredS)
        B, columns = self.curvature.B, self.columns(units)
        group = self.inputs.geometry.group(units[0])
        passes, blocks = B.shape[:2]
        rows = B.new_empty(len(units), passes, blocks, self.inputs.geometry.n_params)
        for start, stop in self.inputs.steps(memory):
            h = self.inputs.slice(start, stop)[:, :, group]
            # (j, u, R, q)
            b = B[:, start:stop, columns].permute(1, 2, 0, 3)
            rows[:, :, start:stop] = (b.flatten(1, 2) @ h).unflatten(1, b.shape[1:3]).permute(1, 2, 0, 3)
        return rows.flatten(1, 2)


def smallest_nonzero(x: torch.Tensor) -> float:
    """Smallest nonzero |x|; 1 if all are zero."""
    size = x.abs()
    return float(size.where(size != 0, 1.0).amin()) if size.numel() else 1.0


def merged(B: torch.Tensor) -> torch.Tensor:
    """Merge terms (R, J, u, q) into one (1, J, u, q) if they are multiples of one another in each block and unit."""
    if len(B) == 1 or B.shape[3] == 1:
        return B
    merged_terms = []
    # a few blocks at a time, ending at the first whose terms are not multiples
    for part in B.split(max(1, CACHED * B.shape[1] // B.numel()), 1):
        longest, same = are_multiples(part)
        if not same:
            return B
        merged_terms.append(longest)
    return torch.cat(merged_terms)[None]


def are_multiples(B: torch.Tensor) -> tuple[torch.Tensor, bool]:
    """Longest term (J, u, q) times √(Σ α²), and whether the terms are α times the longest one, up to rounding."""
    squares = torch.einsum("rjuq,rjuq->rju", B, B)
    index = squares.argmax(0)[None, :, :, None].expand(1, *B.shape[1:])
    longest = B.gather(0, index)[0]
    # from one entry each: an inner product over a thousand positions has an error of tens of units of round-off
    pivot = longest.abs().argmax(2, keepdim=True)
    largest = longest.gather(2, pivot)
    entries = B.gather(3, pivot[None].expand(len(B), -1, -1, -1))
    factors = (entries / torch.where(largest == 0, 1.0, largest))[..., 0]
    rest = torch.addcmul(B, factors[..., None], longest, value=-1)
    same = bool((torch.einsum("rjuq,rjuq->rju", rest, rest) <= (MERGED * EPS) ** 2 * squares).all())
    return longest * factors.square().sum(0).sqrt()[..., None], same


COUPLED = ", samples coupled"

#: Reason reported for a layer whose curvature is not finite.
NOT_FINITE = "the curvature of the loss is NaN or infinite"


@dataclass(frozen=True)
class Request:
    """Request for the curvature of one layer, in some units or as one block (``whole``).

    ``parameters`` are the weight and bias if the layer is to be differentiated in them, else None.
    """

    name: str
    layer: kinds.Layer
    calls: list[Call]
    units: tuple[int, ...]
    whole: bool
    parameters: tuple[torch.Tensor, torch.Tensor | None] | None = None

    @cached_property
    def deltas(self) -> list[torch.Tensor]:
        """Perturbation of every call."""
        return [call.delta for call in self.calls]

    @cached_property
    def leaves(self) -> set[Any]:
        """Nodes of the perturbations in the graph."""
        return {get_gradient_edge(delta).node for delta in self.deltas}

    def splits(self, samples: int) -> bool:
        """Whether every call has equally many leading entries for each sample."""
        return all(call.inputs.ndim > 1 and call.delta.shape[0] % samples == 0 for call in self.calls)

    def positions_apart(self) -> int:
        """Number of blocks of one position of each call; 0: the calls differ in their number of positions."""
        counts = {delta.shape.numel() // kinds.Geometry.of(self.layer).units for delta in self.deltas}
        return counts.pop() if len(counts) == 1 and all(call.inputs.ndim > 1 for call in self.calls) else 0

    def inputs(self, blocks: int) -> LayerInputs:
        """Return Ĥ of all calls in blocks: the same object for the same number of blocks, with its cached rows."""
        if blocks not in self._inputs:
            # only one layout of the inputs is kept at a time
            self._inputs.clear()
            calls = tuple((call.inputs, call.delta.shape) for call in self.calls)
            self._inputs[blocks] = LayerInputs(self.layer, calls, blocks)
        return self._inputs[blocks]

    @cached_property
    def _inputs(self) -> dict[int, LayerInputs]:
        return {}

    def inputs_by_sample(self, samples: int) -> LayerInputs:
        """Return Ĥ, with a block for each sample if the layout allows it."""
        return self.inputs(samples if self.splits(samples) else 1)

    def positions(self, values: Sequence[torch.Tensor | None], blocks: int) -> torch.Tensor:
        """Return derivatives (k, *shape) in each call's output as (k, J, m, q) float64; None stands for zeros."""
        count = next((len(v) for v in values if v is not None), 0)
        parts = []
        for value, delta in zip(values, self.deltas, strict=True):
            if value is None:
                value = delta.new_zeros(count, *delta.shape)
            part = layers.by_position(self.layer, value.detach().to(torch.float64), leading=1)
            parts.append(part.reshape(count, blocks, -1, part.shape[-1]))
        joined = parts[0] if len(parts) == 1 else torch.cat(parts, 2)
        return joined.transpose(2, 3)

    def outputs(self, values: torch.Tensor) -> list[torch.Tensor]:
        """Return values (k, J, m, q) in the layout of each call's output: inverse of `positions`."""
        k, blocks = values.shape[:2]
        values = values.transpose(2, 3)
        result, start = [], 0
        for delta in self.deltas:
            laid_out = layers.by_position(self.layer, delta)
            length, positions, units = laid_out.shape
            per_block = length * positions // blocks
            part = values[:, :, start : start + per_block].reshape(k, length, positions, units)
            result.append(layers.from_position(self.layer, part, delta.shape).to(delta.dtype))
            start += per_block
        return result

    def finished(self, curvature: Curvature, route: str, samples: int, blocks: int | None = None) -> LayerCapture:
        """Capture with this curvature; raise a NotFiniteError if it is not finite."""
        tensor = getattr(curvature, {DiagonalS: "root", FactoredS: "B", FormedH: "matrices"}[type(curvature)])
        if not is_finite(tensor):
            raise NotFiniteError(NOT_FINITE)
        if blocks is None:
            blocks = samples if self.splits(samples) else 1
        elif blocks == 1 < samples:
            route += COUPLED
        return LayerCapture(self.name, self.inputs(blocks).kept(), self.units, curvature, route)
