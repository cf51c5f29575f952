"""Curvature of a loss in separators: tensors that all paths from a layer to the loss go through.

With a separator z behind the pre-activations δ of a layer, L = φ(z(δ)), J = ∂z/∂δ and g = ∇φ,

    ∇²_δ L = Jᵀ H J + Σ_k g_k ∇²_δ z_k,        H = ∇²φ.

H is formed once for all layers in front of z, from the loss or from the next separator. The rest needs only the segment
of the graph from δ to z: J v and the second term are the derivatives of q(u, δ) = (∂z/∂δ)ᵀu, at u = g, in u and in δ.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge

from hesscond.capture import backward
from hesscond.capture.captured import Request
from hesscond.capture.kinds import Geometry
from hesscond.problem import graph

#: Least cost of a layer's derivatives, in tensor entries of their passes, for which separators are tried; least gain.
WORTHWHILE, GAIN = 1e8, 1.25

#: Cost of a multiplication within a matrix product, if an entry of a tensor in a backward pass costs 1.
MULTIPLICATION = 1 / 64

#: Nodes that compute nothing.
VIEWS = graph.backward(
    "View UnsafeView ReshapeAlias Expand Transpose Permute T Unbind Split Slice Select Squeeze Unsqueeze Alias",
    *range(5),
)

#: Largest distance of the next separator, in candidates, and number of plans tried if separators could not be formed.
REACH, ATTEMPTS = 16, 3

#: Size of the intermediate results for several units at a time.
TOGETHER = 2**22


@dataclass(frozen=True)
class Variables:
    """Variables in which to differentiate twice, as entries (k, J, w) for J blocks of samples or positions."""

    variables: Sequence[Any]  # tensors or edges of the graph
    numel: int  # J w
    seeds: Callable[[torch.Tensor], Sequence[torch.Tensor]]  # directions in the shapes of the variables, from entries
    # entries for a number of directions and of blocks, from derivatives in the variables (None: zero)
    entries: Callable[[Sequence[torch.Tensor | None], int, int], torch.Tensor]
    splits: Callable[[int], bool]  # whether the entries split into a number of blocks

    @classmethod
    def of_edge(cls, edge: GradientEdge, device: torch.device) -> Variables:
        """Entries of a tensor within the graph, in consecutive blocks."""
        shape = graph.shape_of(edge.node, edge.output_nr)
        numel = shape.numel()

        def entries(derivatives: Sequence[torch.Tensor | None], count: int, blocks: int) -> torch.Tensor:
            derivative = derivatives[0]
            if derivative is None:
                return torch.zeros(count, blocks, numel // blocks, dtype=torch.float64, device=device)
            return derivative.reshape(count, blocks, -1)

        def seeds(values: torch.Tensor) -> list[torch.Tensor]:
            return [values.reshape(len(values), *shape)]

        return cls([edge], numel, seeds, entries, lambda blocks: numel % blocks == 0)

    @classmethod
    def of_request(cls, request: Request) -> Variables:
        """Pre-activations of a layer, ordered unit by unit within a block."""
        units, numel = Geometry.of(request.layer).units, sum(delta.numel() for delta in request.deltas)

        def entries(derivatives: Sequence[torch.Tensor | None], count: int, blocks: int) -> torch.Tensor:
            if all(derivative is None for derivative in derivatives):
                return torch.zeros(count, blocks, numel // blocks, dtype=torch.float64, device=request.deltas[0].device)
            return request.positions(derivatives, blocks).flatten(2)

        def seeds(values: torch.Tensor) -> list[torch.Tensor]:
            return request.outputs(values.unflatten(2, (units, -1)))

        def splits(blocks: int) -> bool:
            return blocks == request.positions_apart() or request.splits(blocks)

        return cls(request.deltas, numel, seeds, entries, splits)


@dataclass(frozen=True)
class ParameterRows:
    """Parameters that are differentiated directly, and the entries of them that belong to each of some units."""

    name: str  # of the block of parameters
    variables: Sequence[torch.Tensor]  # leaves of the graph
    order: int  # number n of entries of all variables
    index: torch.Tensor  # (u, w) entries of each unit among the n
    tensors_of: Callable[[torch.Tensor], Sequence[torch.Tensor]]  # from a vector (n,)
    vector_of: Callable[[Sequence[torch.Tensor]], torch.Tensor]

    @cached_property
    def leaves(self) -> set[Any]:
        """Nodes of the variables in the graph."""
        return {get_gradient_edge(variable).node for variable in self.variables}

    def target(self) -> Variables:
        """Parameters as variables in one block, since all samples share them."""

        def seeds(values: torch.Tensor) -> list[torch.Tensor]:
            return [torch.stack(tensors) for tensors in zip(*map(self.tensors_of, values[:, 0]), strict=True)]

        def entries(derivatives: Sequence[torch.Tensor | None], count: int, blocks: int) -> torch.Tensor:
            parts = [
                variable.new_zeros(count, *variable.shape) if derivative is None else derivative
                for derivative, variable in zip(derivatives, self.variables, strict=True)
            ]
            return torch.stack([self.vector_of(tensors) for tensors in zip(*parts, strict=True)])[:, None]

        return Variables(self.variables, self.order, seeds, entries, lambda blocks: blocks == 1)


#: Variables in front of a separator: the pre-activations of a layer, or parameters.
Requested = Request | ParameterRows


def target_of(target: Requested) -> Variables:
    """Variables in which the second derivatives of a request are taken."""
    return target.target() if isinstance(target, ParameterRows) else Variables.of_request(target)


@dataclass(frozen=True)
class Separator:
    """Curvature of the loss in a tensor z."""

    edge: GradientEdge
    gradient: torch.Tensor  # of the loss in z
    H: torch.Tensor  # (J, s, s) float64, one for each block of consecutive entries of z; between blocks it is zero
    size: torch.Tensor  # (J,) size of the round-off in H, in the 2-norm

    def times(self, images: torch.Tensor) -> torch.Tensor:
        """Return H times ``images`` (k, J', s'), for J' such that its blocks split those of H, or vice versa."""
        blocks, order = self.H.shape[:2]
        vectors = images.reshape(len(images), blocks, order).transpose(0, 1)
        return torch.bmm(vectors, self.H).transpose(0, 1).reshape(images.shape)

    def between(self, J: torch.Tensor, reached: torch.Tensor) -> torch.Tensor:
        """Return J H Jᵀ (w, w) for J (w, J s) that is zero except in the entries ``reached`` (J s,)."""
        total = J.new_zeros(len(J), len(J))
        parts = J.unflatten(1, self.H.shape[:2]).unbind(1)
        for columns, block, mask in zip(parts, self.H, reached.view(self.H.shape[:2]), strict=True):
            index = mask.nonzero()[:, 0]
            if not len(index):
                continue
            first, last = int(index[0]), int(index[-1]) + 1
            if last - first == len(index):
                # consecutive, as behind causal attention: no copy
                part, within = columns[:, first:last], block[first:last, first:last]
            else:
                part, within = columns[:, index], block[index[:, None], index]
            total += part @ within @ part.T
        return total


class Segment:
    """Map from some variables, the target, to a separator z behind them, with its first and second derivatives."""

    def __init__(self, target: Variables, separator: Separator, budget: backward.Budget) -> None:
        self.target, self.separator, self.budget = target, separator, budget
        u = separator.gradient.clone().requires_grad_()
        with backward.lean_convolutions([separator.edge.node]):
            pulled = torch.autograd.grad([separator.edge], target.variables, [u], create_graph=True, allow_unused=True)
        self.twice = backward.Derivatives(pulled, [u, *target.variables])
        self.back = backward.Derivatives([separator.edge], target.variables)
        edges = [v if isinstance(v, GradientEdge) else get_gradient_edge(v) for v in target.variables]
        between = graph.dependent([separator.edge.node], {edge.node for edge in edges})
        self.largest = max(graph.shape_of(node).numel() for node in between)

    def derivatives(self, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return J v (k, J, s) and Σ_k g_k ∇² z_k v (k, J, w) for each v of ``values`` (k, J, w)."""
        count, blocks = values.shape[:2]
        image, *second = self.twice(self.target.seeds(values))
        if image is None:
            image = torch.zeros(count, *self.separator.gradient.shape, dtype=values.dtype, device=values.device)
        return image.reshape(count, blocks, -1), self.target.entries(second, count, blocks)

    def pulled(self, images: torch.Tensor) -> torch.Tensor:
        """Return Jᵀ w (k, J, w) for each w of ``images`` (k, J, s)."""
        count, blocks = images.shape[:2]
        return self.target.entries(self.back([images.reshape(count, *self.separator.gradient.shape)]), count, blocks)

    def keeps_apart(self, blocks: int) -> bool:
        """Whether both derivatives are exactly zero between different blocks."""
        if not self.target.splits(blocks) or self.separator.gradient.numel() % blocks:
            return False
        return not backward.mixes(self.derivatives, self.target.numel, blocks, self.separator.gradient.device)

    def chunks(self, blocks: int, directions: Sequence[int] | range) -> Iterator[tuple[range, torch.Tensor]]:
        """Directions (k, J, w) that are 1 at one entry of every block, a few at a time, with their numbers."""
        width, size = self.target.numel // blocks, self.chunk(len(directions))
        return backward.unit_directions(directions, size, blocks, width, self.separator.gradient.device)

    def along(self, index: torch.Tensor, blocks: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return J v (J, w, s) and ∇² v (u, J, w, w) in each unit, for v that are 1 at the k-th entry of every unit."""
        images, seconds = [], []
        for rows, values in self.chunks(blocks, range(index.shape[1])):
            directions = torch.arange(len(values), device="cpu")
            values.zero_()[directions[:, None], :, index[:, rows.start : rows.stop].T] = 1
            image, second = self.derivatives(values)
            images.append(image)
            seconds.append(second[:, :, index])
        return torch.cat(images).transpose(0, 1), torch.cat(seconds).permute(2, 1, 0, 3)

    def chunk(self, directions: int) -> int:
        """Number of directions to take at a time."""
        return self.budget.cached(directions, 3 * (self.target.numel + self.separator.gradient.numel()), self.largest)


@dataclass(frozen=True)
class Chain:
    """Candidates for the separators of a target, ordered from the loss to the target, which is the last."""

    nodes: list[Any]  # without the target
    numel: list[int]  # number of entries of each tensor
    numbers: list[float]  # number of entries of all tensors in the graph between the loss and each
    # by number of blocks: number of neighbouring pairs, up to each tensor, between which the blocks mix
    mixed: dict[int, list[int]]

    def finest(self, upper: int, lower: int) -> int | None:
        """Largest known number of blocks that stay apart between two of the tensors; None: no number is known."""
        return max((blocks for blocks, count in self.mixed.items() if count[upper] == count[lower]), default=None)

    def only(self, kept: Sequence[int]) -> Chain:
        """Chain of some of the tensors."""
        return Chain(
            [self.nodes[i] for i in kept[:-1]],
            [self.numel[i] for i in kept],
            [self.numbers[i] for i in kept],
            {blocks: [count[i] for i in kept] for blocks, count in self.mixed.items()},
        )


class Separators:
    """Separators in the graph of a loss, chosen and formed where they make derivatives of layers cheaper."""

    def __init__(
        self, loss: torch.Tensor, requests: Sequence[Requested], samples: int, budget: backward.Budget
    ) -> None:
        self.loss, self.samples, self.budget = loss, samples, budget
        self.requests = [r for r in requests if isinstance(r, ParameterRows) or r.parameters is None]
        #: by node of a separator that is planned, the node of the one behind it (None: the loss)
        self.behind: dict[Any, Any] = {}
        #: how many blocks each is planned to have
        self.blocks: dict[Any, int] = {}
        self.formed: dict[Any, Separator | None] = {}
        self._mixes: dict[tuple[Any, Any, int], bool] = {}

    def segment(self, request: Requested, directions: int, per_block: int) -> Segment | None:
        """Return the segment from a layer to its separator; None: a separator does not pay, or cannot be formed."""
        chain = self.worth(request, directions)
        if chain is None:
            return None
        for _ in range(ATTEMPTS):
            if request.name not in self.behind and self.plan(request, chain, directions, per_block) is None:
                return None
            separator = self.separator(self.behind[request.name])
            if separator is not None:
                return Segment(target_of(request), separator, self.budget)
            # a separator that could not be formed is not planned again
            del self.behind[request.name]
        return None

    def worth(self, request: Requested, directions: int) -> Chain | None:
        """Candidates for separators of a layer; None: the layer is cheap without a separator."""
        between = graph.dependent([self.loss.grad_fn], request.leaves) - request.leaves
        if 2.0 * directions * sum(map(numbers_of, between)) < WORTHWHILE:
            return None
        return self.chain(request, target_of(request), self.dominators(request), between)

    def share(self, request: Requested, directions: int, per_block: int) -> float:
        """Cost of a layer with its separator, relative to its cost without; the plan is left unchanged."""
        chain, plans = self.worth(request, directions), (dict(self.behind), dict(self.blocks))
        try:
            cost = None if chain is None else self.plan(request, chain, directions, per_block)
        finally:
            self.behind, self.blocks = plans
        return 1.0 if cost is None else cost

    def release(self, request: Requested) -> None:
        """Forget the separators that no later layer uses."""
        place = self.requests.index(request)
        for node in [node for node in self.formed if self.uses[node][-1] <= place]:
            del self.formed[node], self.behind[node]

    @cached_property
    def uses(self) -> dict[Any, list[int]]:
        """Layers that each node dominates, as places in ``requests``."""
        places: dict[Any, list[int]] = {}
        for place, request in enumerate(self.requests):
            for node in self.dominators(request):
                places.setdefault(node, []).append(place)
        return places

    def sharing(self, node: Any, request: Requested) -> int:
        """Number of blocks of parameters that may still use a separator at a node, at least 1 for the layer itself."""
        place = self.requests.index(request)
        return sum(isinstance(self.requests[p], ParameterRows) for p in self.uses[node] if p >= place) or 1

    def has_room(self, numbers: int) -> bool:
        """Whether there is room for ``numbers`` float64 numbers in addition to the separators that are held."""
        held = sum(separator.H.numel() for separator in self.formed.values() if separator is not None)
        return self.budget.fits(held + numbers)

    # the graph

    @cached_property
    def levels(self) -> list[int]:
        """Numbers of blocks above the number of samples that may stay apart: positions of layers and of tensors."""
        levels = {request.positions_apart() for request in self.requests if isinstance(request, Request)}
        for rows in self.requests:
            shapes = [graph.shape_of(node) for node in self.dominators(rows) if self.may_separate(node)]
            sequences = [shape for shape in shapes if len(shape) == 3 and shape[0] == self.samples]
            levels |= {math.prod(shape[:2]) for shape in sequences if isinstance(rows, ParameterRows)}
        return sorted(level for level in levels if level > self.samples)

    @cached_property
    def nearest(self) -> dict[Any, Any]:
        """Nearest dominator of each node of the graph."""
        leaves = {leaf for request in self.requests for leaf in request.leaves}
        return graph.dominators(self.loss.grad_fn, graph.dependent([self.loss.grad_fn], leaves))

    @cached_property
    def branches(self) -> dict[Any, int]:
        """Number of nodes that each node is the nearest dominator of."""
        counts: dict[Any, int] = {}
        for node in self.nearest.values():
            counts[node] = counts.get(node, 0) + 1
        return counts

    def above(self, node: Any) -> list[Any]:
        """All dominators of a node, from the loss towards it."""
        dominators = []
        while node in self.nearest:
            node = self.nearest[node]
            dominators.append(node)
        return dominators[::-1]

    def dominators(self, request: Requested) -> list[Any]:
        """Common dominators of all leaves of a target, ordered from the loss to the target."""
        first, *others = [self.above(leaf) for leaf in request.leaves]
        return [node for node in first if all(node in other for other in others)]

    def chain(self, request: Requested, target: Variables, path: Sequence[Any], between: set[Any]) -> Chain:
        """Candidates for separators of a layer, from its dominators ``path`` and all nodes between it and the loss."""
        entries = dict.fromkeys(path, 0.0)
        for node in between:
            place = node
            while place not in entries:
                place = self.nearest[place]
            entries[place] += numbers_of(node)
        fit = [node for node in path if self.may_separate(node)]
        numbers, total = [], 0.0
        for node in path:
            if node in fit:
                numbers.append(total)
            total += entries[node]
        targets = [*(Variables.of_edge(GradientEdge(node, 0), self.loss.device) for node in fit), target]
        levels = self.levels
        mixed: dict[int, list[int]] = {}
        for blocks in levels:
            count = [0]
            for number, upper in enumerate(fit):
                key = fit[number + 1] if number + 1 < len(fit) else request.name
                count.append(count[-1] + self.mixes(upper, targets[number + 1], key, blocks))
            mixed[blocks] = count
        chain = Chain(fit, [s.numel for s in targets], [*numbers, total], mixed)
        return chain.only([*self.kept(chain), len(fit)])

    def may_separate(self, node: Any) -> bool:
        """Whether a node gives one float64 tensor of more than one number that splits into samples."""
        if len(node._input_metadata) != 1 or graph.dtype_of(node) != torch.float64:
            return False
        numel = graph.shape_of(node).numel()
        return numel > 1 and numel % self.samples == 0

    def mixes(self, upper: Any, target: Variables, key: Any, blocks: int) -> bool:
        """Whether a derivative of a tensor in one closer to the layers is not exactly zero between different blocks."""
        if (upper, key, blocks) not in self._mixes:
            shape = graph.shape_of(upper)
            back = backward.Derivatives([GradientEdge(upper, 0)], target.variables)

            def pulled(values: torch.Tensor) -> list[torch.Tensor]:
                return [target.entries(back([values.view(1, *shape)]), 1, blocks)]

            fits = shape.numel() % blocks == 0 and target.splits(blocks)
            self._mixes[upper, key, blocks] = not fits or backward.mixes(
                pulled, shape.numel(), blocks, self.loss.device
            )
        return self._mixes[upper, key, blocks]

    def kept(self, chain: Chain) -> list[int]:
        """Indices of the candidates that fit into the memory and do not only lead to an equally good next one."""
        indices = []
        for i, node in enumerate(chain.nodes):
            next_is_as_good = (
                i + 1 < len(chain.nodes)
                and self.branches[node] == 1
                and chain.numel[i] == chain.numel[i + 1]
                and all(count[i] == count[i + 1] for count in chain.mixed.values())
            )
            room = self.has_room(4 * chain.numel[i] ** 2 // self.planned_blocks(chain, i))
            if room and not next_is_as_good:
                indices.append(i)
        return indices

    def planned_blocks(self, chain: Chain, number: int) -> int:
        """Number of diagonal blocks of the curvature in a tensor of the chain, if the loss does not couple them."""
        blocks = chain.finest(0, number)
        return self.samples if blocks is None or chain.numel[number] % blocks else blocks

    # the plan

    def plan(self, request: Requested, chain: Chain, directions: int, per_block: int) -> float | None:
        """Choose the separators for a layer and return its relative cost with them; None: no separator pays."""
        end = len(chain.nodes)
        direct = 2.0 * directions * chain.numbers[end]
        if not end:
            return None
        best: list[tuple[float, int | None]] = []
        for lower in range(end + 1):
            last = lower == end
            if not last and chain.nodes[lower] in self.behind:
                failed = self.formed.get(chain.nodes[lower], True) is None
                best.append((math.inf if failed else 0.0, None))
                continue
            sharing = 1 if last else self.sharing(chain.nodes[lower], request)
            # by two backward passes from the loss
            cost = 2 * chain.numel[lower] / self.planned_blocks(chain, lower) * chain.numbers[lower]
            options: list[tuple[float, int | None]] = [] if last else [(cost / sharing, None)]
            for upper in range(max(0, lower - REACH), lower):
                if last:
                    cost = self.cost(chain, upper, lower, per_block, directions, 2, request)
                else:
                    entries = chain.numel[lower]
                    apart = chain.finest(upper, lower) or entries
                    cost = self.cost(chain, upper, lower, entries // apart, entries // self.samples, 3) / sharing
                options.append((best[upper][0] + cost, upper))
            best.append(min(options, key=lambda option: option[0]))
        cost, place = best[end]
        if cost * GAIN > direct or place is None:
            return None
        self.behind[request.name] = chain.nodes[place]
        while place is not None and chain.nodes[place] not in self.behind:
            behind = best[place][1]
            self.behind[chain.nodes[place]] = None if behind is None else chain.nodes[behind]
            self.blocks[chain.nodes[place]] = self.planned_blocks(chain, place)
            place = behind
        return cost / direct

    def cost(
        self,
        chain: Chain,
        upper: int,
        lower: int,
        per_position: int,
        per_sample: int,
        passes: int,
        request: Requested | None = None,
    ) -> float:
        """Cost of forming the curvature in a tensor of the chain from that in another one."""
        segment = chain.numbers[lower] - chain.numbers[upper]
        blocks, apart = self.planned_blocks(chain, upper), chain.finest(upper, lower)
        multiplications = MULTIPLICATION * chain.numel[upper] ** 2 / blocks
        if apart is not None and apart % blocks == 0:
            return per_position * (2 * segment + multiplications)
        if isinstance(request, ParameterRows):
            # units that reach different parts share a direction
            share, (units, width) = self.reached(chain.nodes[upper], request), request.index.shape
            return width * max(1.0, units * share) * passes * segment + units * width * multiplications * share**2
        if request is not None and not request.whole:
            multiplications *= self.reached(chain.nodes[upper], request) ** 2
        return per_sample * (passes * segment + multiplications)

    def reached(self, node: Any, request: Requested) -> float:
        """Share of a tensor's entries that depend on one unit, estimated from the first unit."""
        edge, target = GradientEdge(node, 0), target_of(request)
        u = torch.ones(graph.shape_of(node), dtype=torch.float64, device=self.loss.device, requires_grad=True)
        pulled = torch.autograd.grad([edge], target.variables, [u], create_graph=True, allow_unused=True)
        blocks = 1 if isinstance(request, ParameterRows) else self.samples
        first = torch.zeros(1, blocks, target.numel // blocks, dtype=torch.float64, device=u.device)
        if isinstance(request, ParameterRows):
            first[:, :, request.index[0]] = 1
        else:
            first.unflatten(2, (Geometry.of(request.layer).units, -1))[:, :, request.units[0]] = 1
        (image,) = backward.Derivatives(pulled, [u])(target.seeds(first))
        return 0.0 if image is None else float((image != 0).to(torch.float64).mean())

    # the curvatures

    def separator(self, node: Any) -> Separator | None:
        """Return a planned separator, formed when first asked for; None: the assumptions of the plan do not hold."""
        if node not in self.formed:
            behind = self.behind[node]
            edge = GradientEdge(node, 0)
            target = Variables.of_edge(edge, self.loss.device)
            if behind is None:
                self.formed[node] = self.from_loss(edge, target, self.blocks[node])
            else:
                upper = self.separator(behind)
                self.formed[node] = upper and self.from_separator(edge, target, upper, self.blocks[node])
        return self.formed[node]

    def from_loss(self, edge: GradientEdge, target: Variables, blocks: int) -> Separator | None:
        """Form a separator by two backward passes from the loss; None: samples are coupled, or it does not fit."""
        (gradient,) = torch.autograd.grad(self.loss, [edge], create_graph=True)
        derivatives = backward.Derivatives([gradient], [edge])

        def product(values: torch.Tensor) -> torch.Tensor:
            return target.entries(derivatives(target.seeds(values)), len(values), values.shape[1])

        apart = (number for number in dict.fromkeys((blocks, self.samples)) if self.is_apart(product, target, number))
        if (count := next(apart, None)) is None:
            return None
        blocks = count
        order = target.numel // blocks
        if not self.has_room(3 * blocks * order**2):
            return None
        largest = max(graph.shape_of(node).numel() for node in graph.dependent([self.loss.grad_fn], {edge.node}))
        size = self.budget.cached(order, 3 * target.numel, largest)
        H = torch.empty(blocks, order, order, dtype=torch.float64, device=self.loss.device)
        for rows, values in backward.unit_directions(range(order), size, blocks, order, self.loss.device):
            H[:, rows.start : rows.stop] = product(values).transpose(0, 1)
        signs = backward.scattered_signs(torch.zeros(1, blocks, order, dtype=torch.float64, device=self.loss.device))
        rounding = product(signs)[0].abs().amax()
        return Separator(edge, gradient.detach(), symmetric(H), torch.maximum(norms(H), rounding))

    def is_apart(self, product: Callable[[torch.Tensor], torch.Tensor], target: Variables, blocks: int) -> bool:
        """Whether the Hessian in a target is exactly zero between different blocks."""
        return not backward.mixes(lambda v: [product(v)], target.numel, blocks, self.loss.device, symmetric=True)

    def from_separator(self, edge: GradientEdge, target: Variables, upper: Separator, blocks: int) -> Separator | None:
        """Form a separator from the one behind it; None: blocks are coupled, or it does not fit."""
        curvature = self.whole(Segment(target, upper, self.budget), min(blocks, len(upper.H)))
        if curvature is None:
            return None
        H, size = curvature
        (gradient,) = torch.autograd.grad([upper.edge], [edge], [upper.gradient], retain_graph=True)
        return Separator(edge, gradient, symmetric(H), torch.maximum(norms(H), size))

    def curvature(self, segment: Segment, request: Request, blocks: int) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Return S (u, J, q, q) of every unit, or (1, J, m q, m q) of the layer, and sizes (u, J) of its round-off."""
        if request.whole:
            whole = self.whole(segment, blocks)
            return None if whole is None or len(whole[0]) != blocks else (symmetric(whole[0])[None], whole[1][None])
        by_unit = list(self.units(segment, request, blocks))
        if not by_unit:
            return None
        return torch.stack([S for S, _ in by_unit]), torch.stack([size for _, size in by_unit])

    def whole(self, segment: Segment, blocks: int) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Return ∇²L (J, w, w) in a target, and the size (J,) of its round-off; None: it cannot be formed."""
        upper, numel = segment.separator, segment.target.numel
        outer = len(upper.H)
        if not self.has_room(3 * numel * (numel // min(outer, blocks))):
            return None
        for apart in [level for level in reversed(self.levels) if level % outer == 0]:
            if segment.keeps_apart(apart):
                return self.positionwise(segment, apart)
        if outer % blocks or not segment.keeps_apart(blocks):
            return None
        order = numel // blocks
        H = torch.empty(blocks, order, order, dtype=torch.float64, device=self.loss.device)
        squares = H.new_zeros(blocks)
        for rows, values in segment.chunks(blocks, range(order)):
            images, second = segment.derivatives(values)
            squares += images.square().sum((0, 2))
            H[:, rows.start : rows.stop] = (segment.pulled(upper.times(images)) + second).transpose(0, 1)
        return H, squares * upper.size.view(blocks, -1).amax(1)

    def positionwise(self, segment: Segment, apart: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return ∇²L in a target where J is block diagonal over positions: one direction serves all positions."""
        upper = segment.separator
        outer, width = len(upper.H), segment.target.numel // apart
        inner = apart // outer
        parts = [segment.derivatives(values) for _, values in segment.chunks(apart, range(width))]
        # (J, P, w, s) and (J, P, w, w)
        J = torch.cat([image for image, _ in parts]).permute(1, 0, 2).unflatten(0, (outer, inner))
        second = torch.cat([product for _, product in parts]).permute(1, 0, 2).unflatten(0, (outer, inner))
        H = torch.empty(outer, inner * width, inner * width, dtype=torch.float64, device=J.device)
        for out, left, at, block in zip(H, J, second, upper.H, strict=True):
            half = (left @ block.view(inner, -1, block.shape[1])).view(inner * width, inner, -1)
            whole = torch.bmm(half.transpose(0, 1), left.mT).transpose(0, 1).reshape(inner, width, inner, width)
            whole.diagonal(dim1=0, dim2=2).add_(at.permute(1, 2, 0))
            out.view(whole.shape).copy_(whole)
        lengths = torch.linalg.matrix_norm(J, ord=2).amax(1)
        return H, lengths.square() * upper.size

    def units(self, segment: Segment, request: Request, blocks: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield S (J, q, q) of every unit and the size (J,) of its round-off; nothing if it cannot be formed."""
        upper, m = segment.separator, Geometry.of(request.layer).units
        outer, apart = len(upper.H), request.positions_apart()
        if apart > 0 and apart % outer == 0 and segment.target.numel == apart * m and segment.keeps_apart(apart):
            if blocks == outer:
                yield from self.positionwise_units(segment, request, apart)
            return
        if outer % blocks == 0 and blocks != apart and segment.keeps_apart(blocks):
            yield from self.samplewise_units(segment, request, blocks)

    def samplewise_units(
        self, segment: Segment, request: Request, blocks: int
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield S of every unit, one direction per position of a sample for all units with disjoint parts of z."""
        upper, m = segment.separator, Geometry.of(request.layer).units
        index = torch.arange(segment.target.numel // blocks, device="cpu").view(m, -1)[list(request.units)]
        curvatures: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        parts: dict[bytes, torch.Tensor] = {}
        for group, reached in disjoint(segment, index, blocks):
            image, second = segment.along(index[group], blocks)
            for unit, S, entries in zip(group, second, reached, strict=True):
                if len(upper.H) == blocks:
                    key = entries.cpu().numpy().tobytes()
                    if key not in parts:
                        if sum(part.numel() for part in parts.values()) > upper.H.numel():
                            parts.clear()
                        indices = entries.nonzero()[:, 0]
                        parts[key] = upper.H if entries.all() else upper.H[:, indices[:, None], indices]
                    J = image[:, :, entries]
                    S = S + J @ parts[key] @ J.mT
                else:
                    J = image.where(entries, 0.0)
                    S = S + upper.times(J.transpose(0, 1)).transpose(0, 1) @ J.mT
                # the square of the 2-norm of J is at most the largest row sum of |J Jᵀ|
                lengths = (J @ J.mT).abs().sum(2).amax(1)
                curvatures[unit] = (S + S.mT) / 2, lengths * upper.size.view(blocks, -1).amax(1)
        yield from (curvatures[unit] for unit in range(len(request.units)))

    def room_for_rows(self, segment: Segment, index: torch.Tensor, matrices: int) -> bool:
        """Whether `rows` fits into the memory together with ``matrices`` further matrices of a unit's order."""
        units, width = index.shape
        return self.has_room(width * (3 * segment.separator.gradient.numel() + (units + max(3, matrices)) * width))

    def rows(self, segment: Segment, index: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, list[int]]:
        """Return ∇²L (u, w, w) in the parameters of every unit, d (u, w), and the number of products summed per entry.

        Round-off in the terms of an entry (k, l) changes it by eps·d_k·d_l, times the growth of errors in sums.
        """
        upper, (units, width) = segment.separator, index.shape
        H, spread = upper.H.new_empty(units, width, width), upper.H.new_empty(units, width)
        terms = [0] * units

        def keep(unit: int, J: torch.Tensor, products: torch.Tensor) -> None:
            # H[unit] already holds the second derivatives
            second = H[unit]
            lengths = J.unflatten(1, (len(upper.H), -1)).square().sum(2) @ upper.size
            spread[unit] = (lengths + torch.maximum(second.amax(), -second.amin())).sqrt()
            terms[unit] = int((J != 0).any(0).sum())
            products += second
            torch.add(products, products.T, out=second).div_(2)

        groups = disjoint(segment, index, 1)
        if len(groups) < units:
            for members, reached in groups:
                images = H.new_empty(width, upper.gradient.numel())
                for at, values in segment.chunks(1, range(width)):
                    rows = slice(at.start, at.stop)
                    values.zero_()[torch.arange(len(values), device="cpu")[:, None], :, index[members][:, rows].T] = 1
                    image, second = segment.derivatives(values)
                    images[rows] = image[:, 0]
                    for unit in members:
                        H[unit, rows] = second[:, 0, index[unit]]
                for unit, entries in zip(members, reached, strict=True):
                    J = images.where(entries, 0.0)
                    keep(unit, J, upper.between(J, entries))
        else:
            # units that share all of z share the passes through H
            together, numel = min(TOGETHER, self.budget.memory // 256), upper.gradient.numel()
            step = max(1, together // (width * numel))
            for start in range(0, units, step):
                chunk = index[start : start + step]
                J, second = H.new_empty(*chunk.shape, numel), H[start : start + len(chunk)]
                places = chunk.repeat_interleave(width, 0)
                for at, values in segment.chunks(1, chunk.flatten().tolist()):
                    image, all_of_it = segment.derivatives(values)
                    J.view(-1, numel)[at.start : at.stop] = image[:, 0]
                    second.view(-1, width)[at.start : at.stop] = all_of_it[:, 0].gather(1, places[at.start : at.stop])
                products = torch.empty_like(second)
                for rows in torch.arange(width, device="cpu").split(max(1, together // (len(chunk) * numel))):
                    part = J[:, rows[0] : rows[-1] + 1]
                    images = upper.times(part.flatten(0, 1)[:, None]).view(part.shape)
                    products[:, rows[0] : rows[-1] + 1] = images @ J.mT
                for unit, rows_of_J, product in zip(range(start, units), J, products, strict=False):
                    keep(unit, rows_of_J, product)
        return H, spread, terms

    def positionwise_units(
        self, segment: Segment, request: Request, apart: int
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield S of every unit where J is block diagonal over positions: one direction per unit."""
        upper = segment.separator
        outer, inner = len(upper.H), apart // len(upper.H)
        s = upper.gradient.numel() // apart
        parts = []
        for rows, values in segment.chunks(apart, request.units):
            image, second = segment.derivatives(values)
            chunk = torch.tensor(request.units[rows.start : rows.stop], device="cpu")
            parts.append((image, second[torch.arange(len(chunk), device="cpu"), :, chunk]))
        # (J, P, u, s) and (u, J P)
        J = torch.cat([image for image, _ in parts]).permute(1, 0, 2).unflatten(0, (outer, inner))
        second = torch.cat([product for _, product in parts])
        count = max(1, TOGETHER // (outer * inner * inner * s))
        H = upper.H.view(outer, inner, s, inner * s)
        for start in range(0, len(request.units), count):
            chunk = J[:, :, start : start + count]
            half = (chunk @ H).unflatten(3, (inner, s))
            S = torch.einsum("jpuqs,jqus->ujpq", half, chunk)
            S.diagonal(dim1=2, dim2=3).add_(second[start : start + count].unflatten(1, (outer, inner)))
            S = (S + S.mT) / 2
            sizes = chunk.square().sum(3).amax(1).T * upper.size
            yield from zip(S, sizes, strict=True)


def disjoint(segment: Segment, index: torch.Tensor, blocks: int) -> list[tuple[list[int], list[torch.Tensor]]]:
    """Groups of units, given by their entries (u, w), that share nothing of z, with masks (s,) of what each reaches."""
    units = range(len(index))
    full_mask = torch.ones(
        segment.separator.gradient.numel() // blocks, dtype=torch.bool, device=segment.separator.gradient.device
    )
    shape = torch.Size((blocks, segment.target.numel // blocks))
    pattern = backward.on_samples(
        torch.ones(blocks, dtype=torch.bool, device=full_mask.device), shape, torch.float64, blocks
    )

    def probed(members: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
        values = torch.zeros(len(members), *shape, dtype=torch.float64, device=full_mask.device)
        for value, entries in zip(values, index[list(members)], strict=True):
            value[:, entries] = pattern[:, entries]
        image, second = segment.derivatives(values)
        return (image != 0).any(1), (second[:, :, index] != 0).any(3).any(1)

    if 2 * probed(units[:1])[0].sum() > len(full_mask):
        return [([unit], [full_mask]) for unit in units]
    size = segment.chunk(len(units))
    parts = [probed(units[start : start + size]) for start in range(0, len(units), size)]
    reached, touched = (torch.cat(masks) for masks in zip(*parts, strict=True))
    groups: list[tuple[list[int], list[torch.Tensor]]] = []
    unions: list[torch.Tensor] = []
    for unit, entries, others in zip(units, reached, touched, strict=True):
        for (group, unit_masks), union in zip(groups, unions, strict=True):
            if not (others[group].any() or touched[group, unit].any() or (entries & union).any()):
                group.append(unit)
                unit_masks.append(entries)
                union |= entries
                break
        else:
            groups.append(([unit], [entries]))
            unions.append(entries.clone())
    return groups


def numbers_of(node: Any) -> int:
    """Number of entries that a node computes; 0 for views."""
    if node.name() in VIEWS:
        return 0
    return sum(math.prod(output.shape) for output in node._input_metadata)


def symmetric(H: torch.Tensor) -> torch.Tensor:
    """Replace each block by its symmetric part, in place."""
    for block in H:
        block.copy_((block + block.T) / 2)
    return H


def norms(H: torch.Tensor) -> torch.Tensor:
    """Bounds (J,) of the 2-norms of symmetric blocks: largest sums of the magnitudes in a row."""
    return H.abs().sum(2).amax(1)
