"""Dimensions of a parameter that number outputs, found in the autograd graph.

A parameter is followed from its leaf through views, elementwise functions and products with other parameters to its
product with activations, keeping track of its dimensions in every tensor: the dimensions that remain number outputs.
From there it is followed through linear operations, so that parameters of the same outputs meet: a bias is added to the
result of its weight.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import prod
from typing import Any

import torch
from torch.autograd.graph import get_gradient_edge

from hesscond.problem.graph import ELEMENTWISE, backward, dimension, nodes, shape_of

#: The parts of one dimension of a tensor, outermost first: dimension of the parameter (None: another), size, stride.
Factors = tuple[tuple[int | None, int, int], ...]
#: Largest number of nodes that a parameter is followed through.
STEPS = 5000

VIEWS = backward("View UnsafeView ReshapeAlias Unsqueeze Alias Clone ToCopy") | backward("Squeeze", *range(5))
#: Nodes that take entries of one dimension or put them among others; in ``GATHERS``, the data choose the entries.
GATHERS = backward("IndexSelect Index IndexAdd ScatterAdd")
PARTS = backward("Slice Select Unbind Split SplitWithSizes Cat Stack") | GATHERS
#: Nodes that are linear, or elementwise up to a normalization, in one tensor of the same shape.
LINEAR = backward("Neg NativeDropout MaskedFill Tril Triu")
SAME = (ELEMENTWISE | backward("Softmax LogSoftmax", 0, 1)) - VIEWS | LINEAR
SAME |= backward("NativeLayerNorm NativeGroupNorm NativeBatchNorm")
REDUCTIONS = ("Sum", "Mean", "Norm", "LinalgVectorNorm", "Var", "Std")
#: Nodes that keep entries separate, wherever they move them.
UNSEEN = VIEWS | SAME | PARTS | backward("T Transpose Permute Expand")
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

    def viewed(self, shape: Sequence[int]) -> Place | None:
        """Place in a tensor with the same entries in the same order; None: unknown."""
        left, found = [factor for factors in self.dims for factor in factors][::-1], []
        for size in shape:
            own: list[tuple[int | None, int, int]] = []
            while size > 1:
                if not left:
                    return None
                d, n, stride = left.pop()
                if n % size and size % n:
                    return None
                outer = min(n, size)
                if outer < n:
                    left.append((d, n // outer, stride))
                own.append((d, outer, stride * (n // outer)))
                size //= outer
            found.append(tuple(own))
        return None if left else self.moved(found)

    def spread(self, shape: Sequence[int]) -> Place | None:
        """Place after broadcasting to a shape; None: unknown."""
        dims = ((),) * (len(shape) - len(self.dims)) + self.dims
        found = [own or (((None, size, 0),) if size > 1 else ()) for own, size in zip(dims, shape, strict=True)]
        fits = all(prod(n for _, n, _ in own) == size for own, size in zip(found, shape, strict=True))
        return self.moved(found) if fits else None

    def part(self, dim: int, start: int | None, step: int, size: int) -> Place | None:
        """Place of ``size`` entries of one dimension, from ``start`` on (None: unknown); None: unknown."""
        if len(self.dims[dim]) > 1:
            return None
        ((d, _, stride),) = self.dims[dim] or ((None, 1, 0),)
        offset = list(self.offset)
        if d is not None:
            before = offset[d]
            offset[d] = None if start is None or before is None else before + start * stride
        own = ((d, size, stride * step),) if size > 1 else ()
        return replace(self, dims=(*self.dims[:dim], own, *self.dims[dim + 1 :]), offset=tuple(offset))


@dataclass
class Use:
    """Use of a parameter: ``units`` are its dimensions that number outputs.

    They are None if there is no product with activations, or if no dimensions number outputs, as ``reason`` explains.
    ``outputs`` holds the places of the parameter, by node and index of the result, where its dimensions are those of
    outputs or it is added.
    """

    units: tuple[int, ...] | None = None
    reason: str = ""
    outputs: dict[Any, list[Place]] = field(default_factory=dict)


class Uses:
    """Uses of the parameters of a loss, ``leaves`` of its graph by name.

    ``others`` are all parameters of the model: a constant that is a view of one of these is no activation.
    """

    def __init__(self, loss: torch.Tensor, leaves: Mapping[str, torch.Tensor], others: Sequence[torch.Tensor]) -> None:
        self._loss, self._leaves = loss, dict(leaves)
        self._storages = {tensor.untyped_storage().data_ptr() for tensor in others}
        self._pure: dict[Any, bool] = {}
        self._found: dict[str, Use] = {}
        self._after: dict[Any, set[Any]] = {}

    def of(self, name: str) -> Use:
        """Use of a parameter."""
        if name not in self._found:
            self._found[name] = self._use(self._leaves[name])
        return self._found[name]

    def order(self, first: str, other: str) -> list[int] | None:
        """Row of the other parameter for each output of the first; None: their outputs are not the same."""
        uses = [self.of(name) for name in (first, other)]
        shapes = [self._leaves[name].shape for name in (first, other)]
        units = [range(len(shape)) if u.units is None else u.units for u, shape in zip(uses, shapes, strict=True)]
        counts = [prod(shape[d] for d in own) for shape, own in zip(shapes, units, strict=True)]
        pairs: set[tuple[int, int]] = set()
        for key in uses[0].outputs.keys() & uses[1].outputs.keys():
            for places in ((a, b) for a in uses[0].outputs[key] for b in uses[1].outputs[key]):
                pairs |= met(places, shapes, units)
        there = dict(pairs)
        if not len(pairs) == len(there) == len({b for _, b in pairs}) == counts[0] == counts[1]:
            return None
        return [there[unit] for unit in range(counts[0])]

    @cached_property
    def _consumers(self) -> dict[Any, list[tuple[Any, int]]]:
        """Nodes that take a result, and the position of the input, by node and index of the result."""
        found: dict[Any, list[tuple[Any, int]]] = {}
        for node in nodes([self._loss.grad_fn]):
            for number, edge in enumerate(node.next_functions):
                found.setdefault(edge, []).append((node, number))
        return found

    def _use(self, leaf: torch.Tensor) -> Use:
        use, lost = Use(), ""
        found: dict[tuple[int, ...], None] = {}
        sized = {d for d, size in enumerate(leaf.shape) if size > 1}
        waiting: list[tuple[Any, Place | None]] = [((get_gradient_edge(leaf).node, 0), Place.of(leaf.shape))]
        seen = set(waiting)
        while waiting and len(seen) < STEPS:
            key, place = waiting.pop()
            if place is not None and place.inner and not place.kept():
                continue
            for consumer, number in self._consumers.get(key, ()):
                kind = consumer.name().partition("Backward")[0]
                if place is None:
                    # the places of the entries are unknown, but there may still be no product
                    if consumer.name() in UNSEEN:
                        waiting += [((consumer, k), None) for k in range(len(consumer._input_metadata))]
                    elif not consumer.name().startswith((*REDUCTIONS, "Add", "Sub")):
                        lost = lost or kind
                    continue
                for result, moved, goes_on in self._through(consumer, number, place):
                    if moved is None:
                        if place.early and consumer.name() in UNSEEN:
                            waiting.append(((consumer, result), None))
                        elif place.early:
                            lost = lost or kind
                        continue
                    # the result of a nonlinear function is an activation
                    active = moved.inner and place.node is None and consumer.name() in SAME - LINEAR
                    if active or (moved.node is not None and place.node is None):
                        left = tuple(sorted(sized - moved.summed))
                        if moved.kept() & moved.summed or (moved.inner and not left):
                            use.reason = "whose rows and columns are both summed over"
                        else:
                            found[left] = None
                    if moved.node is not None or moved.entries or moved.inner or not goes_on or kind in ("Add", "Sub"):
                        use.outputs.setdefault((consumer, result), []).append(moved)
                    step = ((consumer, result), moved)
                    if goes_on and step not in seen:
                        seen.add(step)
                        waiting.append(step)
        if len(found) > 1:
            use.reason = "whose dimensions number outputs in one use and are summed over in another"
        elif found and not use.reason:
            (use.units,) = found
        elif lost and len(sized) > 1 and not use.reason:
            use.reason = f"which goes through {lost}, of which it is not known what it does to rows and columns"
        return use

    def _through(self, node: Any, number: int, place: Place) -> Iterator[tuple[int, Place | None, bool]]:
        """Yield, for the results of a node that takes a tensor, the place and whether it is followed further.

        A place is None if the effect of the node is unknown.
        """
        name, shape, early = node.name(), shape_of(node), place.early
        if name in VIEWS or (name in SAME and (early or name in LINEAR)):
            yield 0, place.viewed(shape), True
        elif name == "TBackward0":
            yield 0, place.moved(place.dims[::-1]), True
        elif name == "TransposeBackward0":
            order = list(range(len(place.dims)))
            a, b = (dimension(d, len(order)) for d in (node._saved_dim0, node._saved_dim1))
            order[a], order[b] = b, a
            yield 0, place.moved([place.dims[d] for d in order]), True
        elif name == "PermuteBackward0":
            yield 0, place.moved([place.dims[dimension(d, len(shape))] for d in node._saved_dims]), True
        elif name == "ExpandBackward0":
            yield 0, place.spread(shape), True
        elif name == "CatBackward0" and early and not self._is_pure(node, int(number == 0), ()):
            # among activations
            return
        elif name in PARTS:
            yield from self._parts(name, node, number, place)
        elif name in ("AddBackward0", "SubBackward0"):
            after = place.spread(shape)
            other = node.next_functions[1 - number][0]
            if early:
                # a sum with a larger tensor is a sum with activations
                yield 0, after, after is not None and after.dims == place.dims
            elif place.entries or other is None or other not in self._dependent(place.node):
                yield 0, after, True
        elif name in ("MulBackward0", "DivBackward0"):
            after = place.spread(shape)
            constant = self._is_pure(node, 1 - number, ("self", "other"))
            if early:
                inside = after is not None and (constant or after.dims == place.dims)
                yield 0, after if after is None or inside else replace(after, entries=True), True
            elif (constant or node.next_functions[1 - number][0] is None) and not (number and name[0] == "D"):
                yield 0, after, True
        elif name in PRODUCTS or name in ("ConvolutionBackward0", "LinearBackward0", "TrilinearBackward0"):
            yield from self._products(name, node, number, place)
        elif name in ("EmbeddingBackward0", "EmbeddingBagBackward0"):
            others = frozenset(range(1, len(place.offset)))
            yield 0, replace(place.moved(()), summed=place.summed | others, node=node), False
        elif name in ("SumBackward1", "MeanBackward1") and not early:
            dims = {dimension(d, len(place.dims)) for d in node._saved_dim}
            gone = place.kept(sorted(dims))
            if place.entries or not gone:
                left = [own for d, own in enumerate(place.dims) if d not in dims]
                after = replace(place.moved(left), summed=place.summed | gone).viewed(shape)
                yield 0, after if after is None or not gone else replace(after, entries=False, node=node), True
        elif early and not name.startswith(REDUCTIONS):
            yield 0, None, False

    def _parts(self, name: str, node: Any, number: int, place: Place) -> Iterator[tuple[int, Place | None, bool]]:
        """Yield the places after a node that takes some entries of a tensor, or puts it into a larger tensor."""
        count = len(node._input_metadata)
        if name == "StackBackward0":
            dim = dimension(node._saved_dim, len(place.dims) + 1)
            size = shape_of(node)[dim]
            own: Factors = ((None, size, 0),) if size > 1 else ()
            yield 0, place.moved([*place.dims[:dim], own, *place.dims[dim:]]), True
            return
        if name == "IndexBackward0":
            indexed = [d for d, index in enumerate(node._saved_indices) if index is not None]
            if len(indexed) != 1:
                yield 0, None, False
                return
            dim = indexed[0]
        else:
            dim = dimension(node._saved_dim, len(place.dims))
        for result in range(count):
            shape = shape_of(node, result)
            start: int | None = None
            step = 1
            size = shape[dim] if dim < len(shape) else 1
            if name == "SliceBackward0":
                length, step = prod(n for _, n, _ in place.dims[dim]), node._saved_step
                start = signed(node._saved_start or 0)
                start = min(start + length if start < 0 else start, length)
            elif name == "SelectBackward0":
                start, size = signed(node._saved_index), 1
                start = start + prod(n for _, n, _ in place.dims[dim]) if start < 0 else start
            elif name == "UnbindBackward0":
                start, size = result, 1
            elif name == "SplitBackward0":
                start = result * node._saved_split_size
            elif name == "SplitWithSizesBackward0":
                start = sum(node._saved_split_sizes[:result])
            elif name == "CatBackward0":
                before = list(node.next_functions[:number])
                if all(parent is not None for parent, _ in before):
                    start = -sum(shape_of(parent, k)[dim] for parent, k in before)
            gathered = name in GATHERS
            if gathered and place.node is not None and place.kept([dim]):
                return
            after = place.part(dim, start, step, 1 if gathered else size)
            if after is not None and gathered:
                fresh = shape[dim : dim + len(shape) - len(place.dims) + 1]
                own_dims = [((None, n, 0),) if n > 1 else () for n in fresh]
                after = after.moved([*after.dims[:dim], *own_dims, *after.dims[dim + 1 :]])
            elif after is not None and name in ("SelectBackward0", "UnbindBackward0"):
                after = after.moved([*after.dims[:dim], *after.dims[dim + 1 :]])
            yield result, after, True

    def _products(self, name: str, node: Any, number: int, place: Place) -> Iterator[tuple[int, Place | None, bool]]:
        """Yield the place after a product with activations, or with another parameter."""
        shape = shape_of(node)
        if name in PRODUCTS:
            first, saved, letters = PRODUCTS[name]
            if number < first:
                yield 0, place.spread(shape), place.node is not None
                return
            own, after = letters[number - first], letters[2]
            constant = self._is_pure(node, first + 1 - (number - first), saved, first)
        elif number == 2 and name != "TrilinearBackward0":
            lone = name == "ConvolutionBackward0"
            yield 0, place.moved([*place.dims, *((),) * (len(shape) - 2) * lone]).spread(shape), False
            return
        elif number != 1 or (name == "ConvolutionBackward0" and node._saved_transposed and node._saved_groups > 1):
            if place.early:
                yield 0, None, False
            return
        else:
            # the first dimension numbers outputs; in a transposed convolution, the second
            at = int(name == "ConvolutionBackward0" and node._saved_transposed)
            own = "".join("o" if d == at else chr(ord("p") + d) for d in range(len(place.dims)))
            after = (
                "xo" + "yzuvw"[: len(shape) - 2] if name == "ConvolutionBackward0" else "xyzuvw"[: len(shape) - 1] + "o"
            )
            constant = False
        gone = place.kept([d for d, letter in enumerate(own) if letter not in after])
        dims = dict(zip(own, place.dims, strict=True))
        result: list[Factors] = [
            dims.get(letter, ((None, size, 0),) if size > 1 else ()) for letter, size in zip(after, shape, strict=True)
        ]
        if not place.early and (gone or place.entries):
            return
        inner = place.inner | (gone if constant else frozenset())
        moved = replace(place.moved(result), summed=place.summed | gone, inner=inner)
        yield 0, replace(moved, node=node) if place.early and not constant else moved, True

    def _is_pure(self, node: Any, number: int, saved: Sequence[str], first: int = 0) -> bool:
        """Whether an input of a node is a function of parameters alone."""
        parent = node.next_functions[number][0] if number < len(node.next_functions) else None
        if parent is None:
            try:
                value = getattr(node, f"_saved_{saved[number - first]}", None) if saved else None
            except RuntimeError:
                return False
            return isinstance(value, torch.Tensor) and value.untyped_storage().data_ptr() in self._storages
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

    def _dependent(self, node: Any) -> set[Any]:
        """Nodes that depend on the result of a node."""
        if node not in self._after:
            found, waiting = {node}, [node]
            while waiting:
                top = waiting.pop()
                for result in range(len(top._input_metadata)):
                    fresh = {consumer for consumer, _ in self._consumers.get((top, result), ())} - found
                    found |= fresh
                    waiting += fresh
            self._after[node] = found - {node}
        return self._after[node]


def signed(value: int) -> int:
    """Signed value of a saved number; negative ones are saved modulo 2**64."""
    return value - 2**64 if value >= 2**63 else value


def met(
    places: tuple[Place, Place], shapes: Sequence[Sequence[int]], units: Sequence[Sequence[int]]
) -> set[tuple[int, int]]:
    """Pairs of row indices of two parameters, in their dimensions ``units``, at the same entries of a tensor.

    There are none if a dimension of the tensor belongs to only one of the parameters.
    """
    factors: list[tuple[int, tuple[tuple[int | None, int], tuple[int | None, int]]]] = []
    for own in zip(places[0].dims, places[1].dims, strict=True):
        a, b = (list(side)[::-1] for side in own)
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
    grid = torch.cartesian_prod(*map(torch.arange, sizes)).view(-1, len(sizes)) if sizes else torch.zeros(1, 0).long()
    inside = torch.ones(len(grid), dtype=torch.bool)
    numbers = []
    for side in (0, 1):
        number = torch.zeros(len(grid), dtype=torch.long)
        for d in units[side]:
            offset = places[side].offset[d]
            if offset is None:
                return set()
            strides = [steps[side][1] if steps[side][0] == d else 0 for _, steps in factors]
            at = offset + grid @ torch.tensor(strides, dtype=torch.long)
            inside &= (at >= 0) & (at < shapes[side][d])
            number = number * shapes[side][d] + at
        numbers.append(number)
    return set(zip(numbers[0][inside].tolist(), numbers[1][inside].tolist(), strict=True))
