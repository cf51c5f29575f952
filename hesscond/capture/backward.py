"""Backward passes: many at once, on subsets of the samples, and the sinks that collect them."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from typing import Any

import torch

from hesscond.capture import captured
from hesscond.errors import CaptureError, TooLargeError, readable
from hesscond.operators.operator import in_halves
from hesscond.problem.graph import differentiable, nodes

#: Size of an intermediate result, over all directions taken at once, that stays in a processor's cache; size that is
#: worth being shared by several threads; and least number of directions that outweighs the overhead of operations.
CACHED, SHARED, LEAST = 2**19, 2**22, 4


class Budget:
    """Budget of the memory that captures may take."""

    def __init__(self, memory: int, samples: int, largest: int, device: torch.device) -> None:
        self.memory, self.samples, self.largest, self.device = memory, samples, largest, device
        self.taken = 0

    def take(self, request: captured.Request, numbers: int) -> None:
        """Count float64 numbers that the result will keep; raise a CaptureError if they do not fit."""
        self.refuse(request, numbers)
        self.taken += 8 * numbers

    def refuse(self, request: captured.Request, numbers: int) -> None:
        """Raise a CaptureError if numbers do not fit; a TooLargeError if they alone do not."""
        size = 8 * numbers
        total = self.taken + size
        if total > self.memory:
            fitting = self.samples * self.memory // total
            others = f", {readable(total)} with the layers before it" if self.taken else ""
            raise (TooLargeError if size > self.memory else CaptureError)(
                f"the curvature of layer {request.name!r} takes {readable(size)}{others}, but "
                f"memory={readable(self.memory)}: probe fewer layers or units at a time"
                + (f", take at most {fitting} of the {self.samples} samples," if fitting else "")
                + " or raise memory"
            )

    def fits(self, numbers: int) -> bool:
        """Whether this number of float64 numbers still fits."""
        return self.taken + 8 * numbers <= self.memory

    def chunk(self, passes: int, per_pass: int) -> int:
        """Number of derivatives to take at once, each of which needs ``per_pass`` float64 numbers."""
        bytes_per_pass = 8 * (4 * self.largest + per_pass)
        return max(1, min(passes, self.memory // 4 // bytes_per_pass))

    def cached(self, passes: int, per_pass: int, largest: int) -> int:
        """Number of derivatives to take at once so that intermediates of up to ``largest`` numbers stay in cache."""
        size, held = self.chunk(passes, per_pass), CACHED if torch.get_num_threads() == 1 else SHARED
        return size if self.device.type != "cpu" else min(size, max(LEAST, held // max(largest, 1)))


def slopes(loss: torch.Tensor, variables: Sequence[torch.Tensor]) -> Iterator[torch.Tensor | None]:
    """Gradients of a loss in some variables, with their graph; None: there is none."""
    with differentiable(), lean_convolutions([loss.grad_fn]):
        return iter(torch.autograd.grad(loss, variables, create_graph=True, allow_unused=True))


def batched_gradients(
    outputs: Sequence[Any], inputs: Sequence[torch.Tensor], seeds: Sequence[torch.Tensor], *, vectorized: bool = True
) -> Sequence[torch.Tensor | None]:
    """Gradients (k, *shape) for each of k seeds; one by one where an operation cannot be vectorized."""
    options = {"retain_graph": True, "allow_unused": True}
    used: list[bool] = []

    def one(*directions: torch.Tensor) -> list[torch.Tensor]:
        gradients = torch.autograd.grad(outputs, inputs, directions, **options)
        used[:] = [g is not None for g in gradients]
        return [g for g in gradients if g is not None]

    def together(part: slice) -> Sequence[torch.Tensor | None]:
        # is_grads_batched= loops over derivatives of tanh, and fails at group normalization and where checkpoints draw
        gradients = iter(torch.vmap(one, randomness="same")(*(seed[part] for seed in seeds)))
        return [next(gradients) if is_used else None for is_used in used]

    if vectorized:
        with warnings.catch_warnings():
            # operations without a batching rule are looped over
            warnings.filterwarnings("ignore", message=".*batching rule.*")
            # a pass that fails here is repeated one by one, where an error is raised
            with suppress(RuntimeError):
                halves = in_halves(together, len(seeds[0]))
                return halves[0] if len(halves) == 1 else joined(halves)
    single = [torch.autograd.grad(outputs, inputs, seed, **options) for seed in zip(*seeds, strict=True)]
    return [None if parts[0] is None else torch.stack(parts) for parts in zip(*single, strict=True)]


@contextmanager
def lean_convolutions(ends: Iterable[Any]) -> Iterator[None]:
    """Compute derivatives of convolutions in their inputs, in a backward pass that is recorded, as convolutions too.

    The second derivative of torch's own node computes that in the weight whether it is wanted or not: half of the time.
    """

    def lean(node: Any, grad_inputs: Sequence[torch.Tensor | None], given: Sequence[torch.Tensor | None]) -> Any:
        if (grad_x := grad_inputs[0]) is None or (g := given[0]) is None or not torch.is_grad_enabled():
            return None
        weight, stride, padding, dilation = (
            getattr(node, f"_saved_{name}") for name in ("weight", "stride", "padding", "dilation")
        )
        turned, dims = node._saved_transposed, len(stride)
        sizes = zip(grad_x.shape[-dims:], g.shape[-dims:], weight.shape[-dims:], stride, padding, dilation, strict=True)
        output_padding = [0 if turned else i - (o - 1) * s + 2 * p - e * (k - 1) - 1 for i, o, k, s, p, e in sizes]
        options = (stride, padding, dilation, not turned, output_padding, node._saved_groups)
        return torch.ops.aten.convolution(g, weight, None, *options), *grad_inputs[1:]

    with ExitStack() as hooks:
        for node in nodes(ends):
            if node.name() == "ConvolutionBackward0" and len(node._saved_stride) == node._saved_weight.ndim - 2:
                hooks.enter_context(node.register_hook(partial(lean, node)))
        yield


def joined(halves: Sequence[Sequence[torch.Tensor | None]]) -> list[torch.Tensor | None]:
    """Concatenate gradients of several seeds; None where a gradient is zero."""
    return [None if parts[0] is None else torch.cat(parts) for parts in zip(*halves, strict=True)]


class Derivatives:
    """Derivatives of some tensors of a graph in some variables along many directions.

    The first directions are compared with one that is not vectorized, since operations may have a wrong batching rule.
    """

    #: Fewer are taken one by one at first: comparing one of them with a batched pass would cost more.
    WORTH_COMPARING = 4

    def __init__(self, outputs: Sequence[Any], variables: Sequence[Any]) -> None:
        self.nonconstant = [k for k, o in enumerate(outputs) if o is not None and getattr(o, "requires_grad", True)]
        self.outputs, self.variables = [outputs[k] for k in self.nonconstant], list(variables)
        self.vectorized: bool | None = None

    def __call__(self, seeds: Sequence[torch.Tensor]) -> Sequence[torch.Tensor | None]:
        """Derivatives (k, *shape) in each variable for seeds (k, *shape) of each output; None: zero."""
        seeds = [seeds[k] for k in self.nonconstant]
        if not seeds:
            return [None] * len(self.variables)
        if len(seeds[0]) == 1 or (self.vectorized is None and len(seeds[0]) < self.WORTH_COMPARING):
            return batched_gradients(self.outputs, self.variables, seeds, vectorized=False)
        if self.vectorized is None:
            single = batched_gradients(self.outputs, self.variables, [seed[-1:] for seed in seeds], vectorized=False)
            many = batched_gradients(self.outputs, self.variables, seeds)
            self.vectorized = all(map(agree, single, many))
            if self.vectorized:
                return many
        return batched_gradients(self.outputs, self.variables, seeds, vectorized=self.vectorized)


def agree(single: torch.Tensor | None, many: torch.Tensor | None) -> bool:
    """Whether the last of ``many`` is the ``single`` one, up to rounding."""
    if single is None or many is None:
        return single is many
    return bool((single[-1] - many[-1]).norm() <= 1e-3 * torch.finfo(single.dtype).eps ** 0.5 * single[-1].norm())


def separating_subsets(samples: int, device: torch.device) -> list[torch.Tensor]:
    """Subsets (N,) of the samples, in complementary pairs, such that each two samples are separated by some subset."""
    index = torch.arange(samples, device=device)
    subsets = []
    for bit in range(max(samples - 1, 0).bit_length()):
        chosen = (index >> bit) % 2 == 0
        subsets += [chosen, ~chosen]
    return subsets


def unit_directions(
    directions: Sequence[int], size: int, blocks: int, width: int, device: torch.device
) -> Iterator[tuple[range, torch.Tensor]]:
    """Yield directions (k, J, w) that are 1 at one entry of every block, ``size`` at a time, with their numbers."""
    for start in range(0, len(directions), size):
        rows = range(start, min(start + size, len(directions)))
        values = torch.zeros(len(rows), blocks, width, dtype=torch.float64, device=device)
        values[torch.arange(len(rows), device="cpu"), :, torch.tensor(directions[start : rows.stop], device="cpu")] = 1
        yield rows, values


def scattered_signs(like: torch.Tensor) -> torch.Tensor:
    """Random signs ±1 in the shape of ``like``, the same in every run and without a pattern that sums could follow."""
    generator = torch.Generator().manual_seed(0)
    return (torch.randint(0, 2, like.shape, generator=generator, device="cpu") * 2 - 1).to(like)


def some(matrices: torch.Tensor) -> list[int]:
    """Number of the largest of some matrices (u, …), and of a few others."""
    largest = int(matrices.flatten(1).norm(dim=1).argmax())
    others = torch.linspace(0, len(matrices) - 1, min(COMPARED, len(matrices)), device="cpu").long().tolist()
    return list(dict.fromkeys((largest, *others)))


def on_samples(subset: torch.Tensor, shape: torch.Size, dtype: torch.dtype, samples: int) -> torch.Tensor:
    """Direction that is nonzero on some samples only, with unequal entries so that sums do not cancel."""
    direction = torch.cos(torch.arange(shape.numel(), dtype=dtype, device=subset.device))
    return (direction.reshape(samples, -1) * subset[:, None]).reshape(shape)


def reaches(derivative: torch.Tensor, subset: torch.Tensor, samples: int) -> bool:
    """Whether a derivative, laid out with one or more rows per sample, is not exactly zero on the given samples."""
    return bool(derivative.reshape(samples, -1)[subset].any())


def mixes(
    derivatives: Callable[[torch.Tensor], Iterable[torch.Tensor]],
    numel: int,
    blocks: int,
    device: torch.device,
    *,
    symmetric: bool = False,
) -> bool:
    """Whether derivatives (1, …) along directions (1, J, w) are not exactly zero between different ones of J blocks."""
    for subset in separating_subsets(blocks, device)[:: 2 if symmetric else 1]:
        direction = on_samples(subset, torch.Size((blocks, numel // blocks)), torch.float64, blocks)
        if any(reaches(derivative[0], ~subset, blocks) for derivative in derivatives(direction[None])):
            return True
    return False


#: A sum smaller than this share of its terms, or than this multiple of their round-off, has been cancelled.
CANCELLED, LOST = 2.0**-28, 16.0
#: A difference of two sums below this share of them has lost digits that count.
LEFT = 2.0**-10
#: Number of random draws of the terms of backward passes where these are near their round-off.
PROBES = 3
#: Number of matrices that are compared with products, and share of the largest change along random signs that counts as
#: the size of an entry: bounds of rounding are 16 times the sizes at least, so four times the norm of a row.
COMPARED, SHARE = 8, 0.25
#: Relative perturbations that stand for rounding, large enough to also show cancellation in products of two factors.
ENLARGED = 0.25


@contextmanager
def enlarged_rounding(ends: Iterable[Any], seed: int) -> Iterator[None]:
    """Perturb every number that a node receives in a backward pass at random, by a factor of up to 1 ± `ENLARGED`.

    The change in the results is of the size of the terms that they are sums of (`size_of_terms`): it does not cancel
    where the terms do, at whatever depth of the graph. In a graph so deep that the changes would grow like a power,
    the perturbations are smaller.
    """
    generators: dict[torch.device, torch.Generator] = {}
    places = list(nodes(ends))
    most = min(ENLARGED, (3 / max(len(places), 1)) ** 0.5)

    def change(gradients: Sequence[torch.Tensor | None]) -> tuple[torch.Tensor | None, ...]:
        return tuple(g if g is None or g.layout is not torch.strided else changed(g) for g in gradients)

    def changed(g: torch.Tensor) -> torch.Tensor:
        if g.device not in generators:
            generators[g.device] = torch.Generator(g.device).manual_seed(seed)
        size = torch.empty(g.shape, dtype=torch.float32, device=g.device)
        size.uniform_(1 - most, 1 + most, generator=generators[g.device])
        return g * size.to(g.real.dtype if g.is_complex() else g.dtype)

    with ExitStack() as hooks:
        for node in places:
            hooks.enter_context(node.register_prehook(change))
        yield


def sizes_of_terms(
    derivative: Callable[[], Sequence[torch.Tensor]], ends: Sequence[Any], draws: int
) -> list[torch.Tensor]:
    """Sizes of the terms of a derivative through the graph from ``ends``: root sum of squares over some draws."""
    plain, sizes = derivative(), []
    for seed in range(draws):
        with enlarged_rounding(ends, seed):
            sizes.append(list(map(size_of_terms, derivative(), plain, plain)))
    return [root_sum_squares(torch.stack(parts)) for parts in zip(*sizes, strict=True)]


def size_of_terms(changed: torch.Tensor | None, plain: torch.Tensor | None, like: torch.Tensor) -> torch.Tensor:
    """Size of the terms that each entry of ``plain`` is the sum of, float64 in the shape of ``like``.

    ``changed`` is the same derivative under `enlarged_rounding`; None: zero.
    """
    perturbed, other = (like.new_zeros(like.shape) if g is None else g.reshape(like.shape) for g in (changed, plain))
    apart = (perturbed - other).detach().to(torch.float64) * (3**0.5 / ENLARGED)
    return torch.hypot(apart, other.detach().to(torch.float64))


class DiagonalSink:
    """Sum S_jj = Σ_r s_r b_rj² of units with one position per sample, over backward passes."""

    def __init__(self, request: captured.Request, blocks: int) -> None:
        self.units = list(request.units)
        device = request.deltas[0].device
        self.root = torch.zeros(blocks, len(self.units), dtype=torch.float64, device=device)
        self.negative: torch.Tensor | None = None

    def add(self, rows: slice, values: torch.Tensor, signs: torch.Tensor | None) -> None:
        """Add backward passes (k, J, m, 1) with signs (k, J)."""
        values = of_units(values, self.units)[..., 0]
        if signs is None:
            self.root = torch.hypot(self.root, root_sum_squares(values))
            return
        kept = [torch.where(mask[:, :, None], values, 0.0) for mask in (signs > 0, signs < 0)]
        self.root = torch.hypot(self.root, root_sum_squares(kept[0]))
        below = root_sum_squares(kept[1])
        self.negative = below if self.negative is None else torch.hypot(self.negative, below)

    def result(self, noise: torch.Tensor, limit: float) -> captured.DiagonalS:
        """Root √|S| and signs of S; with terms of both signs, S is the difference of the two sums.

        ``noise`` (J, m, 1) bounds the round-off in a backward pass; it matters for units where √|S| is at most
        ``limit`` times as large.
        """
        lost = self.near(noise, limit).any(0)
        known = of_units(noise[None], self.units)[0, :, :, 0] * lost if lost.any() else None
        if self.negative is None or not self.negative.any():
            return captured.DiagonalS(self.root, None, known)
        S = (self.root - self.negative) * (self.root + self.negative)
        terms = self.root.square() + self.negative.square()
        cancelled = S.abs() <= LEFT * terms
        if cancelled.any():
            error = LOST * torch.finfo(S.dtype).eps * terms
            error = error / torch.maximum(S.abs(), error).sqrt().clamp_min(captured.TINY) * cancelled
            known = error if known is None else torch.hypot(known, error)
        return captured.DiagonalS(S.abs().sqrt(), S.sign(), known)

    def near(self, noise: torch.Tensor, limit: float) -> torch.Tensor:
        """Boolean mask (J, u) of entries where the root of S is nonzero and at most ``limit`` times its ``noise``."""
        size = self.root if self.negative is None else torch.hypot(self.root, self.negative)
        return (size > 0) & (size <= limit * of_units(noise[None], self.units)[0, :, :, 0])


class FactorSink:
    """Collection of backward passes as the rows of a factor."""

    def __init__(self, request: captured.Request, blocks: int, passes: int, signs: torch.Tensor | None) -> None:
        self.units = list(request.units)
        positions, device = request.inputs(blocks).positions, request.deltas[0].device
        self.B = torch.zeros(passes, blocks, len(self.units), positions, dtype=torch.float64, device=device)
        self.signs = signs

    def add(self, rows: slice, values: torch.Tensor, signs: torch.Tensor | None) -> None:
        """Add backward passes (k, J, m, q)."""
        self.B[rows] = of_units(values, self.units)

    def result(self, noise: torch.Tensor, limit: float) -> captured.FactoredS:
        """Factor of all passes; ``noise`` (J, m, q) and ``limit`` as for `DiagonalSink`, but summed over positions."""
        bounds = of_units(noise[None], self.units)[0].square().sum(2).sqrt()
        if self.B.shape[3] == 1 or limit == LOST:
            bounds = bounds * self.near(noise, limit).any(0)
        return captured.FactoredS(self.B, None if self.signs is None else self.signs[:, :, None], noise=bounds)

    def near(self, noise: torch.Tensor, limit: float) -> torch.Tensor:
        """Boolean mask (J, u) like that of a `DiagonalSink`, for all positions of a block together."""
        bounds = of_units(noise[None], self.units)[0].square().sum(2).sqrt()
        size = root_sum_squares(self.B.permute(0, 3, 1, 2).flatten(0, 1))
        return (size > 0) & (size <= limit * bounds)


def of_units(values: torch.Tensor, units: list[int]) -> torch.Tensor:
    """Values (k, J, m, q) of some units (k, J, u, q), without a copy if they are all in order."""
    return values if units == list(range(values.shape[2])) else values[:, :, units]


def root_sum_squares(values: torch.Tensor) -> torch.Tensor:
    """√Σ v² over the first dimension, with squares that neither vanish above 1e-270 nor overflow."""
    # not vector_norm, which is twenty times slower along this dimension
    norms = (values * 2.0**400).square_().sum(0).sqrt_() * 2.0**-400
    if math.isfinite(norms.sum()):
        return norms
    return (values * 2.0**-400).square_().sum(0).sqrt_() * 2.0**400
