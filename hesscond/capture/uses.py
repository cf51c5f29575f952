"""Dimensions of a parameter that number outputs, found in the autograd graph.

A parameter is followed from its leaf through views, elementwise functions and products with other parameters to its
product with activations, keeping track of its dimensions in every tensor: the dimensions that remain number outputs.
From there it is followed through linear operations, so that parameters of the same outputs meet: a bias is added to the
result of its weight.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod
from typing import Any

import torch
from torch.autograd.graph import get_gradient_edge

from hesscond.problem.graph import ELEMENTWISE, backward, dimension, shape_of, users

#: The parts of one dimension of a tensor, outermost first: dimension of the parameter (None: another), size, stride.
Factors = tuple[tuple[int | None, int, int], ...]
#: Largest number of nodes that a parameter is followed through.
STEPS = 5000

VIEWS = backward("View UnsafeView ReshapeAlias Unsqueeze Alias Clone ToCopy") | backward("Squeeze", *range(5))
#: Nodes that take entries of one dimension, chosen by the data, or put them among others.
GATHERS = backward("IndexSelect Index IndexAdd ScatterAdd")
#: Nodes that are linear, or elementwise up to a normalization, in one tensor of the same shape.
LINEAR = backward("Neg NativeDropout MaskedFill Tril Triu")
SAME = (ELEMENTWISE | backward("Softmax LogSoftmax", 0, 1)) - VIEWS | LINEAR
SAME |= backward("NativeLayerNorm NativeGroupNorm NativeBatchNorm")
REDUCTIONS = ("Sum", "Mean", "Norm", "LinalgVectorNorm", "Var", "Std")
#: Nodes that keep entries separate, wherever they move them.
UNSEEN = VIEWS | SAME | GATHERS | backward("T Transpose Permute Expand Slice Select Unbind Split")
UNSEEN |= backward("SplitWithSizes Cat Stack")
#: Products: position of the first factor among the inputs, names under which both factors are saved, and dimensions of
#: both and of the result, which lacks the contracted ones.
PRODUCTS = {
    "MmBackward0": (0, ("self", "mat2"), ("nk", "km", "nm")),
    "AddmmBackward0": (1, ("mat1", "mat2"), ("nk", "km", "nm")),
    "BmmBackward0": (0, ("self", "mat2"), ("bnk", "bkm", "bnm")),
    "BaddbmmBackward0": (1, ("batch1", "batch2"), ("bnk", "bkm", "bnm")),
    "MvBackward0": (0, ("self", "vec"), ("nk", "k", "n")),
    "AddmvBackward0": (1, ("mat", "vec"), ("nk", "k", "n")),
    "DotBackward0": (0, ("self", "tensor"), ("k", "k", "")),
}


@dataclass(frozen=True)
class Place:
    """Places of the entries of a parameter in a tensor: the factors of each of its dimensions.

    ``offset`` is added to the indices in each dimension of the parameter (None: unknown). ``summed`` are the dimensions
    that products have summed over, ``inner`` those summed over in products with other parameters, and ``node`` is the
    product with activations, once there is one.
    """

    dims: tuple[Factors, ...]
    offset: tuple[int | None, ...]
    summed: frozenset[int] = frozenset()
    inner: frozenset[int] = frozenset()
    node: Any = None
    #: Whether the parameter was multiplied with activations entry by entry.
    entries: bool = False

    @classmethod
    def of(cls, shape: Sequence[int]) -> Place:
        return cls(tuple(((d, size, 1),) if size > 1 else () for d, size in enumerate(shape)), (0,) * len(shape))

    @property
    def early(self) -> bool:
        """Whether there was no product with activations yet."""
        return self.node is None and not self.entries

    def kept(self, dims: Sequence[int] | None = None) -> set[int]:
        """Dimensions of the parameter that occur in some dimensions of the tensor (None: in any)."""
        chosen = range(len(self.dims)) if dims is None else dims
        return {d for dim in chosen for d, _, _ in self.dims[dim] if d is not None}

    def moved(self, dims: Sequence[Factors]) -> Place:
        return replace(self, dims=tuple(dims))

    def size(self, dim: int) -> int:
        """Length of a dimension of the tensor."""
        return prod(n for _, n, _ in self.dims[dim])

    def with_dims(self, dim: int, count: int, sizes: Sequence[int]) -> Place:
        """Place with ``count`` dimensions from ``dim`` on replaced by others that do not belong to the parameter."""
        return self.moved([*self.dims[:dim], *map(other, sizes), *self.dims[dim + count :]])

    def viewed(self, shape: Sequence[int]) -> Place | None:
        """Place in a tensor with the same entries in the same order; None: unknown."""
        left, dims = [factor for factors in self.dims for factor in factors][::-1], []
        for size in shape:
            parts: list[tuple[int | None, int, int]] = []
            while size > 1:
                if not left:
                    return None
                d, n, stride = left.pop()
                if n % size and size % n:
                    return None
                outer = min(n, size)
                if outer < n:
                    left.append((d, n // outer, stride))
                parts.append((d, outer, stride * (n // outer)))
                size //= outer
            dims.append(tuple(parts))
        return None if left else self.moved(dims)

    def spread(self, shape: Sequence[int]) -> Place | None:
        """Place after broadcasting to a shape; None: unknown."""
        dims = ((),) * (len(shape) - len(self.dims)) + self.dims
        broadcast = [factors or other(size) for factors, size in zip(dims, shape, strict=True)]
        fits = all(prod(n for _, n, _ in factors) == size for factors, size in zip(broadcast, shape, strict=True))
        return self.moved(broadcast) if fits else None

    def part(self, dim: int, start: int | None, step: int, size: int) -> Place | None:
        """Place of ``size`` entries of one dimension, from ``start`` on (None: unknown); None: unknown."""
        if len(self.dims[dim]) > 1:
            return None
        ((d, _, stride),) = self.dims[dim] or ((None, 1, 0),)
        offset = list(self.offset)
        if d is not None:
            before = offset[d]
            offset[d] = None if start is None or before is None else before + start * stride
        factors = ((d, size, stride * step),) if size > 1 else ()
        return replace(self, dims=(*self.dims[:dim], factors, *self.dims[dim + 1 :]), offset=tuple(offset))


#: Result of a node, the place in it, and whether it is followed further.
Places = Iterator[tuple[int, Place | None, bool]]
#: Function of the uses, a node, the number of its input that has a place, and the place.
Rule = Callable[["Uses", Any, int, Place], Places]


@dataclass(frozen=True)
class Use:
    """Use of a parameter: ``units`` are its dimensions that number outputs.

    They are None if there is no product with activations, or if no dimensions number outputs, as ``reason`` explains.
    ``outputs`` holds the places of the parameter, by node and index of the result, where its dimensions are those of
    outputs or it is added.
    """

    units: tuple[int, ...] | None
    reason: str
    outputs: Mapping[Any, list[Place]]


class Trail:
    """Record of the places of a parameter behind nodes, from which its `Use` is concluded."""

    def __init__(self, shape: Sequence[int]) -> None:
        self.sized = {d for d, size in enumerate(shape) if size > 1}
        self.outputs: dict[Any, list[Place]] = {}
        #: dimensions that number outputs in each product with activations
        self.units: dict[tuple[int, ...], None] = {}
        self.reason = self.lost = ""

    def lose(self, node: Any) -> None:
        """Record that a node's effect on the places of the entries is unknown."""
        self.lost = self.lost or operation(node)

    def without_place(self, node: Any) -> list[tuple[Any, None]]:
        """Results of a node to follow though the places of the entries are unknown: there may still be no product."""
        if node.name() in UNSEEN:
            return [((node, k), None) for k in range(len(node._input_metadata))]
        if not node.name().startswith((*REDUCTIONS, "Add", "Sub")):
            self.lose(node)
        return []

    def note(self, node: Any, result: int, before: Place, after: Place, goes_on: bool) -> None:
        """Record the places in front of a node and behind it."""
        # the result of a nonlinear function is an activation
        active = after.inner and before.node is None and node.name() in SAME - LINEAR
        if active or (after.node is not None and before.node is None):
            left = tuple(sorted(self.sized - after.summed))
            if after.kept() & after.summed or (after.inner and not left):
                self.reason = "whose rows and columns are both summed over"
            else:
                self.units[left] = None
        multiplied = after.node is not None or after.entries or after.inner
        if multiplied or not goes_on or operation(node) in ("Add", "Sub"):
            self.outputs.setdefault((node, result), []).append(after)

    def use(self) -> Use:
        """Use of the parameter."""
        units, reason = None, self.reason
        if len(self.units) > 1:
            reason = "whose dimensions number outputs in one use and are summed over in another"
        elif self.units and not reason:
            (units,) = self.units
        elif self.lost and len(self.sized) > 1 and not reason:
            reason = f"which goes through {self.lost}, of which it is not known what it does to rows and columns"
        return Use(units, reason, self.outputs)


class Uses:
    """Uses of the parameters of a loss, ``leaves`` of its graph by name."""

    def __init__(self, loss: torch.Tensor, leaves: Mapping[str, torch.Tensor], others: Sequence[torch.Tensor]) -> None:
        self._loss, self._leaves = loss, dict(leaves)
        self._storages = {tensor.untyped_storage().data_ptr() for tensor in others}
        self._pure: dict[Any, bool] = {}
        self._uses: dict[str, Use] = {}
        self._after: dict[Any, set[Any]] = {}

    def of(self, name: str) -> Use:
        """Use of a parameter."""
        if name in self._uses:
            return self._uses[name]
        leaf = self._leaves[name]
        trail = Trail(leaf.shape)
        waiting: list[tuple[Any, Place | None]] = [((get_gradient_edge(leaf).node, 0), Place.of(leaf.shape))]
        seen = set(waiting)
        while waiting and len(seen) < STEPS:
            key, place = waiting.pop()
            if place is not None and place.inner and not place.kept():
                continue
            for consumer, number in self._consumers.get(key, ()):
                if place is None:
                    waiting += trail.without_place(consumer)
                    continue
                for result, after, goes_on in RULES.get(consumer.name(), unknown)(self, consumer, number, place):
                    step = ((consumer, result), after)
                    if after is not None:
                        trail.note(consumer, result, place, after, goes_on)
                    elif place.early and consumer.name() in UNSEEN:
                        waiting.append(step)
                    elif place.early:
                        trail.lose(consumer)
                    if after is not None and goes_on and step not in seen:
                        seen.add(step)
                        waiting.append(step)
        use = self._uses[name] = trail.use()
        return use

    def order(self, first: str, other: str) -> list[int] | None:
        """Row of the other parameter for each output of the first; None: their outputs are not the same."""
        uses = [self.of(name) for name in (first, other)]
        shapes = [self._leaves[name].shape for name in (first, other)]
        units = [range(len(shape)) if u.units is None else u.units for u, shape in zip(uses, shapes, strict=True)]
        counts = [prod(shape[d] for d in dims) for shape, dims in zip(shapes, units, strict=True)]
        pairs: set[tuple[int, int]] = set()
        for key in uses[0].outputs.keys() & uses[1].outputs.keys():
            for places in ((a, b) for a in uses[0].outputs[key] for b in uses[1].outputs[key]):
                pairs |= met(places, shapes, units)
        rows = dict(pairs)
        if not len(pairs) == len(rows) == len({b for _, b in pairs}) == counts[0] == counts[1]:
            return None
        return [rows[unit] for unit in range(counts[0])]

    @cached_property
    def _consumers(self) -> dict[Any, list[tuple[Any, int]]]:
        return users([self._loss.grad_fn])

    def is_pure(self, node: Any, number: int, saved: Sequence[str], first: int = 0) -> bool:
        """Whether an input of a node is a function of parameters alone."""
        parent = node.next_functions[number][0] if number < len(node.next_functions) else None
        if parent is None:
            try:
                value = getattr(node, f"_saved_{saved[number - first]}", None) if saved else None
            except RuntimeError:
                return False
            if not isinstance(value, torch.Tensor) or value.layout != torch.strided:
                return False
            return value.untyped_storage().data_ptr() in self._storages
        waiting = [parent]
        while waiting:
            top = waiting[-1]
            if top in self._pure:
                waiting.pop()
            elif (variable := getattr(top, "variable", None)) is not None:
                self._pure[top] = variable.untyped_storage().data_ptr() in self._storages
            elif top.name().startswith(("Embedding", "Index", "Gather")) or any(
                edge is None for edge, _ in top.next_functions
            ):
                self._pure[top] = False
            elif unknown := [edge for edge, _ in top.next_functions if edge not in self._pure]:
                waiting += unknown
            else:
                self._pure[top] = all(self._pure[edge] for edge, _ in top.next_functions)
        return self._pure[parent]

    def dependent(self, node: Any) -> set[Any]:
        """Nodes that depend on the result of a node."""
        if node not in self._after:
            nodes, waiting = {node}, [node]
            while waiting:
                top = waiting.pop()
                for result in range(len(top._input_metadata)):
                    fresh = {consumer for consumer, _ in self._consumers.get((top, result), ())} - nodes
                    nodes |= fresh
                    waiting += fresh
            self._after[node] = nodes - {node}
        return self._after[node]


# rules: for a node that takes a tensor as input ``number``, they yield the place in each result and whether it is
# followed further; None instead of a place: the effect of the node is unknown


def unknown(uses: Uses, node: Any, number: int, place: Place) -> Places:
    """Place after a node without a rule."""
    if place.early and not node.name().startswith(REDUCTIONS):
        yield 0, None, False


def always(after: Callable[[Any, Place], Place | None]) -> Rule:
    """Rule of a node with a single result, which is followed further."""

    def rule(uses: Uses, node: Any, number: int, place: Place) -> Places:
        yield 0, after(node, place), True

    return rule


def curved(uses: Uses, node: Any, number: int, place: Place) -> Places:
    """Place after a function of every entry, whose result is no longer linear in the parameter."""
    if place.early:
        yield 0, place.viewed(shape_of(node)), True


def swapped(node: Any, place: Place) -> Place:
    """Place after two dimensions were exchanged."""
    dims = list(place.dims)
    a, b = (dimension(d, len(dims)) for d in (node._saved_dim0, node._saved_dim1))
    dims[a], dims[b] = dims[b], dims[a]
    return place.moved(dims)


def permuted(node: Any, place: Place) -> Place:
    """Place after a permutation of the dimensions."""
    return place.moved([place.dims[dimension(d, len(place.dims))] for d in node._saved_dims])


def stacked(node: Any, place: Place) -> Place:
    """Place in one entry of a new dimension."""
    dim = dimension(node._saved_dim, len(place.dims) + 1)
    return place.with_dims(dim, 0, [shape_of(node)[dim]])


def cut(uses: Uses, node: Any, number: int, place: Place) -> Places:
    """Places in consecutive or strided parts of one dimension."""
    dim, name = dimension(node._saved_dim, len(place.dims)), operation(node)
    for result in range(len(node._input_metadata)):
        step = 1
        if name == "Slice":
            length, step = place.size(dim), node._saved_step
            start = signed(node._saved_start or 0)
            start = min(start + length if start < 0 else start, length)
        else:
            start = result * node._saved_split_size if name == "Split" else sum(node._saved_split_sizes[:result])
        yield result, place.part(dim, start, step, shape_of(node, result)[dim]), True


def selected(uses: Uses, node: Any, number: int, place: Place) -> Places:
    """Places in single entries of one dimension, which goes."""
    dim = dimension(node._saved_dim, len(place.dims))
    for result in range(len(node._input_metadata)):
        start = signed(node._saved_index) if operation(node) == "Select" else result
        after = place.part(dim, start + place.size(dim) if start < 0 else start, 1, 1)
        yield result, after and after.with_dims(dim, 1, []), True


def concatenated(uses: Uses, node: Any, number: int, place: Place) -> Places:
    """Place among other tensors; not followed among activations."""
    if place.early and not uses.is_pure(node, int(number == 0), ()):
        return
    dim, before = dimension(node._saved_dim, len(place.dims)), node.next_functions[:number]
    known = all(parent is not None for parent, _ in before)
    start = -sum(shape_of(parent, k)[dim] for parent, k in before) if known else None
    yield 0, place.part(dim, start, 1, shape_of(node)[dim]), True


def gathered(uses: Uses, node: Any, number: int, place: Place) -> Places:
    """Place after entries of one dimension were chosen by the data."""
    if operation(node) == "Index":
        indexed = [d for d, index in enumerate(node._saved_indices) if index is not None]
        if len(indexed) != 1:
            yield 0, None, False
            return
        dim = indexed[0]
    else:
        dim = dimension(node._saved_dim, len(place.dims))
    if place.node is None or not place.kept([dim]):
        after, shape = place.part(dim, None, 1, 1), shape_of(node)
        yield 0, after and after.with_dims(dim, 1, shape[dim : dim + len(shape) - len(place.dims) + 1]), True


def added(uses: Uses, node: Any, number: int, place: Place) -> Places:
    """Place in a sum or difference; followed among parameters, or where both sides do not depend on one product."""
    after = place.spread(shape_of(node))
    other = node.next_functions[1 - number][0]
    if place.early:
        # a sum with a larger tensor is a sum with activations
        yield 0, after, after is not None and after.dims == place.dims
    elif place.entries or other is None or other not in uses.dependent(place.node):
        yield 0, after, True


def multiplied(uses: Uses, node: Any, number: int, place: Place) -> Places:
    """Place in a product or quotient, entry by entry."""
    after = place.spread(shape_of(node))
    constant = uses.is_pure(node, 1 - number, ("self", "other"))
    if place.early:
        inside = after is not None and (constant or after.dims == place.dims)
        yield 0, after if after is None or inside else replace(after, entries=True), True
    elif (constant or node.next_functions[1 - number][0] is None) and not (number and operation(node) == "Div"):
        yield 0, after, True


def looked_up(uses: Uses, node: Any, number: int, place: Place) -> Places:
    """Place after a lookup of rows, which are the outputs."""
    others = frozenset(range(1, len(place.offset)))
    yield 0, replace(place.moved(()), summed=place.summed | others, node=node), False


def summed(uses: Uses, node: Any, number: int, place: Place) -> Places:
    """Place after a sum or mean over some dimensions, behind activations."""
    if place.early:
        return
    dims = {dimension(d, len(place.dims)) for d in node._saved_dim}
    gone = place.kept(sorted(dims))
    if place.entries or not gone:
        left = [factors for d, factors in enumerate(place.dims) if d not in dims]
        after = replace(place.moved(left), summed=place.summed | gone).viewed(shape_of(node))
        yield 0, after if after is None or not gone else replace(after, entries=False, node=node), True


def matrix_product(uses: Uses, node: Any, number: int, place: Place) -> Places:
    """Place in a product of matrices or vectors, or in what is added to one."""
    first, saved, letters = PRODUCTS[node.name()]
    if number < first:
        yield 0, place.spread(shape_of(node)), place.node is not None
        return
    constant = uses.is_pure(node, first + 1 - (number - first), saved, first)
    yield from contracted(node, place, letters[number - first], letters[2], constant=constant)


def linear(uses: Uses, node: Any, number: int, place: Place) -> Places:
    """Place in a linear or bilinear layer, as its weight or bias."""
    shape = shape_of(node)
    if number == 2 and operation(node) == "Linear":
        yield 0, place.spread(shape), False
    elif number == 1:
        yield from contracted(node, place, "opqrst"[: len(place.dims)], "xyzuvw"[: len(shape) - 1] + "o")
    elif place.early:
        yield 0, None, False


def convolution(uses: Uses, node: Any, number: int, place: Place) -> Places:
    """Place in a convolution, as its weight or bias; unknown in a transposed one with groups."""
    shape = shape_of(node)
    if number == 2:
        yield 0, place.moved([*place.dims, *((),) * (len(shape) - 2)]).spread(shape), False
    elif number == 1 and not (node._saved_transposed and node._saved_groups > 1):
        # the first dimension numbers outputs; in a transposed convolution, the second
        letters = "poqrst" if node._saved_transposed else "opqrst"
        yield from contracted(node, place, letters[: len(place.dims)], "xo" + "yzuvw"[: len(shape) - 2])
    elif place.early:
        yield 0, None, False


def contracted(node: Any, place: Place, before: str, after: str, *, constant: bool = False) -> Places:
    """Place after a product with activations, or a parameter (``constant``), from the letters of the dimensions."""
    gone = place.kept([d for d, letter in enumerate(before) if letter not in after])
    dims = dict(zip(before, place.dims, strict=True))
    result = [dims.get(letter, other(size)) for letter, size in zip(after, shape_of(node), strict=True)]
    if not place.early and (gone or place.entries):
        return
    inner = place.inner | (gone if constant else frozenset())
    output_place = replace(place.moved(result), summed=place.summed | gone, inner=inner)
    yield 0, replace(output_place, node=node) if place.early and not constant else output_place, True


#: Rules by the name of the node.
RULES: dict[str, Rule] = {
    **dict.fromkeys(SAME - LINEAR, curved),
    **dict.fromkeys(VIEWS | LINEAR, always(lambda node, place: place.viewed(shape_of(node)))),
    **dict.fromkeys(PRODUCTS, matrix_product),
    **dict.fromkeys(GATHERS, gathered),
    **dict.fromkeys(backward("Slice Split SplitWithSizes"), cut),
    **dict.fromkeys(backward("Select Unbind"), selected),
    **dict.fromkeys(backward("Add Sub"), added),
    **dict.fromkeys(backward("Mul Div"), multiplied),
    **dict.fromkeys(backward("Embedding EmbeddingBag"), looked_up),
    **dict.fromkeys(backward("Sum Mean", 1), summed),
    **dict.fromkeys(backward("Linear Trilinear"), linear),
    "TBackward0": always(lambda node, place: place.moved(place.dims[::-1])),
    "TransposeBackward0": always(swapped),
    "PermuteBackward0": always(permuted),
    "ExpandBackward0": always(lambda node, place: place.spread(shape_of(node))),
    "CatBackward0": concatenated,
    "StackBackward0": always(stacked),
    "ConvolutionBackward0": convolution,
}


def operation(node: Any) -> str:
    """Name of a node without its suffix, such as ``Add``."""
    name: str = node.name().partition("Backward")[0]
    return name


def other(size: int) -> Factors:
    """Factors of a dimension that does not belong to the parameter."""
    return ((None, size, 0),) if size > 1 else ()


def signed(value: int) -> int:
    """Signed value of a saved number; negative ones are saved modulo 2**64."""
    return value - 2**64 if value >= 2**63 else value


def met(
    places: tuple[Place, Place], shapes: Sequence[Sequence[int]], units: Sequence[Sequence[int]]
) -> set[tuple[int, int]]:
    """Pairs of row indices of two parameters, in their dimensions ``units``, at the same entries of a tensor."""
    factors: list[tuple[int, tuple[tuple[int | None, int], tuple[int | None, int]]]] = []
    for pair in zip(places[0].dims, places[1].dims, strict=True):
        a, b = (list(side)[::-1] for side in pair)
        while a and b:
            (d, n, s), (e, m, t) = a.pop(), b.pop()
            outer = min(n, m)
            if n % outer or m % outer:
                return set()
            a += [(d, n // outer, s)] if outer < n else []
            b += [(e, m // outer, t)] if outer < m else []
            if (d is None) != (e is None):
                return set()
            if d is not None:
                factors.append((outer, ((d, s * (n // outer)), (e, t * (m // outer)))))
    sizes = [size for size, _ in factors]
    grid = (
        torch.cartesian_prod(*(torch.arange(size, device="cpu") for size in sizes)).view(-1, len(sizes))
        if sizes
        else torch.zeros(1, 0, device="cpu").long()
    )
    inside = torch.ones(len(grid), dtype=torch.bool, device="cpu")
    numbers = []
    for side in (0, 1):
        number = torch.zeros(len(grid), dtype=torch.long, device="cpu")
        for d in units[side]:
            offset = places[side].offset[d]
            if offset is None:
                return set()
            strides = [steps[side][1] if steps[side][0] == d else 0 for _, steps in factors]
            at = offset + grid @ torch.tensor(strides, dtype=torch.long, device="cpu")
            inside &= (at >= 0) & (at < shapes[side][d])
            number = number * shapes[side][d] + at
        numbers.append(number)
    return set(zip(numbers[0][inside].tolist(), numbers[1][inside].tolist(), strict=True))
