"""Hessians in the parameters of a unit by derivatives that go forward only, where batch statistics couple all samples.

Let T be the derivatives of a tensor x along k directions. If every node between the layer and a tensor z is piecewise
linear or a function f of one tensor x,

    H = T_zᵀ ∇²φ T_z + Σ_f T_xᵀ ∇²(g·f)(x) T_x

with φ the loss as a function of z, and g its slopes in f(x). Batch normalization f has three products for each channel
beside the covariance of T_x, so that no pass goes back.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge

from hesscond.capture import backward
from hesscond.capture.captured import Request
from hesscond.problem.graph import BATCH_NORM, ELEMENTWISE, dependent, inputs_of, is_linear_node, shape_of

#: Numbers of the columns that a convolution of a part of the images takes at a time: they stay in a processor's cache.
CACHED = 2**17
#: Copies of the derivatives of the largest tensor that are held at a time, at most.
COPIES = 4
#: Directions that are taken at a time where torch differentiates.
PART = 16

Edge = tuple[Any, int]


class Tangents:
    """Forward derivatives of a loss in the pre-activations of a layer behind which batch statistics couple samples."""

    def __init__(self, loss: torch.Tensor, request: Request) -> None:
        between = dependent([loss.grad_fn], request.leaves)
        self.deltas = request.deltas
        self.leaves = [(get_gradient_edge(delta).node, 0) for delta in request.deltas]
        #: nodes of the tail, which is differentiated twice, and before it, in the order of computation
        self.order, tail = [], set[Any]()
        for node in computed(loss.grad_fn, between):
            if node in request.leaves:
                continue
            if any(p in tail for p, _ in node.next_functions) or not is_known(node, between):
                tail.add(node)
            else:
                self.order.append(node)
        self.cut = {edge for node in tail for edge in node.next_functions if edge[0] in between - tail}
        self.curved = [node for node in self.order if not is_linear(node, between)]
        self.between, self.loss = between, loss
        self.largest = max((shape_of(node).numel() for node in self.order), default=1)

    @classmethod
    def of(cls, loss: torch.Tensor, request: Request, budget: backward.Budget) -> Tangents | None:
        """Return the derivatives, if the graph is known, in float64, and they fit into the memory."""
        if request.whole or request.parameters is not None or request.deltas[0].dtype != torch.float64:
            return None
        tangents, n = cls(loss, request), request.inputs(1).geometry.n_params
        fits = budget.fits(tangents.bytes(n) // 8)
        coupled = any(node.name() in BATCH_NORM for node in tangents.curved)
        return tangents if coupled and fits and len(tangents.cut) <= 1 else None

    def bytes(self, directions: int) -> int:
        """Bytes that the derivatives along some directions take."""
        return 8 * directions * (COPIES * self.largest + sum(map(torch.Tensor.numel, self.deltas)))

    def hessian(self, seeds: Sequence[torch.Tensor], channel: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return H (k, k) for k directions (k, *shape) in each call of the layer, and d (k,), see `FormedH`.

        A convolution's directions may be given in one ``channel`` alone, outside of which they are zero.
        """
        edges = [GradientEdge(node, 0) for node in self.curved]
        slopes = torch.autograd.grad(self.loss, edges, retain_graph=True, materialize_grads=True) if edges else ()
        uses = Counter([*self.cut, *(edge for node in self.order for edge in set(node.next_functions))])
        live: dict[Edge, torch.Tensor] = dict(zip(self.leaves, map(torch.Tensor.contiguous, seeds), strict=True))
        run = TangentPass(live, uses, dict(zip(self.curved, slopes, strict=True)), channel)
        for node in self.order:
            if live_edges := [edge for edge in dict.fromkeys(node.next_functions) if edge in live]:
                run.through(node, live_edges)
        for edge in self.cut & live.keys():
            z = GradientEdge(*edge)
            (g,) = torch.autograd.grad(self.loss, [z], create_graph=True)
            T = run.taken(edge)
            run.add(T, *in_parts(backward.Derivatives([g], [z]), [T]), entrywise=False)
        return (run.H + run.H.mT) / 2, run.squares.sqrt()


class TangentPass:
    """Derivatives along k directions on their way forward, and the parts of H that the nodes have added.

    ``live`` are those at edges, ``left`` how many nodes will take them, ``slopes`` those of the loss in the results of
    curved nodes. The nonzero entries of a convolution's directions are in one ``channel``, up to the next convolution.
    """

    def __init__(
        self, live: dict[Edge, torch.Tensor], left: Counter[Edge], slopes: Mapping[Any, torch.Tensor], channel: int
    ) -> None:
        self.live, self.left, self.slopes, self.channel = live, left, slopes, channel
        (first, *_) = live.values()
        self.H = first.new_zeros(len(first), len(first))
        self.squares = self.H.new_zeros(len(first))
        self.spare: list[torch.Tensor] = []

    def through(self, node: Any, edges: Sequence[Edge]) -> None:
        """Carry the derivatives at ``edges`` through a node."""
        name, narrow = node.name(), self.live[edges[0]].shape[1:] != shape_of(*edges[0])
        chosen = slice(self.channel, self.channel + 1) if narrow else slice(None)
        if name in BATCH_NORM and node in self.slopes:
            self.live[node, 0] = T = self.taken(edges[0], False)
            H, sizes = normalize(node, self.slopes[node], T, chosen)
            self.H += H
            self.squares += sizes
        elif name == "ReluBackward0":
            self.live[node, 0] = T = self.taken(edges[0], False)
            kept = ((node._saved_result[:, chosen] if narrow else node._saved_result) > 0).to(T.dtype)
            for t in T:
                t.mul_(kept)
        elif name == "AddBackward0" and node._saved_alpha == 1 and {shape_of(*e) for e in edges} == {shape_of(node)}:
            self.live[node, 0] = self.summed(node, edges)
        elif name == "ConvolutionBackward0" and edges == [node.next_functions[0]]:
            grouped = node._saved_groups > 1
            T = self.taken(edges[0], grouped)
            self.live[node, 0] = convolved(node, T, slice(None) if grouped else chosen, self.empty)
            self.spare.append(T)
        else:
            given = {edge: self.taken(edge) for edge in edges}
            *images, product = differentiated(node, given, self.slopes.get(node))
            self.live |= {(node, number): image for number, image in enumerate(images) if image is not None}
            self.add(given[edges[0]], product, entrywise=True)

    def summed(self, node: Any, edges: Sequence[Edge]) -> torch.Tensor:
        """Derivatives of a sum, to which a tensor may be added twice."""
        times = [float(node.next_functions.count(edge)) for edge in edges]
        T = self.taken(edges[0], len(edges) > 1).mul_(times[0])
        for edge, count in zip(edges[1:], times[1:], strict=True):
            T.add_(other := self.taken(edge), alpha=count)
            self.spare.append(other)
        return T

    def add(self, T: torch.Tensor, product: torch.Tensor | None, *, entrywise: bool) -> None:
        """Add TᵀCT from the products CT with the curvature C of a node, which is diagonal if ``entrywise``."""
        if product is None:
            return
        T, product = T.flatten(1), product.flatten(1)
        self.H += T @ product.T
        self.squares += (T * product).abs().sum(1) if entrywise else T.norm(dim=1) * product.norm(dim=1)

    def empty(self, *shape: int) -> torch.Tensor:
        """Memory of derivatives that are no longer needed, or fresh one."""
        for number, buffer in enumerate(self.spare):
            if buffer.numel() == math.prod(shape):
                return self.spare.pop(number).view(shape)
        return self.H.new_empty(shape)

    def taken(self, edge: Edge, whole: bool = True) -> torch.Tensor:
        """Derivatives at an edge, in all channels if ``whole``, which may be overwritten."""
        self.left[edge] -= 1
        T = self.live[edge] if self.left[edge] else self.live.pop(edge)
        if whole and T.shape[1:] != shape_of(*edge):
            wide = T.new_zeros(len(T), *shape_of(*edge))
            wide[:, :, self.channel] = T[:, :, 0]
            return wide
        return self.empty(*T.shape).copy_(T) if self.left[edge] else T


def differentiated(node: Any, given: dict[Edge, torch.Tensor], g: torch.Tensor | None) -> Sequence[torch.Tensor | None]:
    """Derivatives of the results of a node along those of its inputs, and ∇²(g·f) times those of the only input of f.

    Without slopes g, the node is linear. All are derivatives of its backward pass.
    """
    (edge, T), *_ = given.items()
    u = [T.new_zeros(meta.shape) for meta in node._input_metadata] if g is None else [g.detach()]
    with torch.enable_grad():
        pulled = node(*[cotangent.requires_grad_() for cotangent in u])
        pulled = pulled if isinstance(pulled, tuple) else (pulled,)
        # the engine, not the node, sums over dimensions that were expanded
        pairs = [
            (pulled[i].sum_to_size(shape_of(*edge)), given[edge])
            for i, edge in enumerate(node.next_functions)
            if edge in given
        ]
    outputs, seeds = zip(*pairs, strict=True)
    images = in_parts(backward.Derivatives(outputs, u if g is None else [*u, GradientEdge(*edge)]), seeds)
    # what is passed on must not share memory with what may be overwritten
    return [None if image is None else image.clone() for image in (images if g is not None else [*images, None])]


def in_parts(derivatives: backward.Derivatives, seeds: Sequence[torch.Tensor]) -> list[torch.Tensor | None]:
    """Derivatives along many directions, a few at a time."""
    return backward.joined([derivatives(part) for part in zip(*(seed.split(PART) for seed in seeds), strict=True)])


def normalize(node: Any, g: torch.Tensor, T: torch.Tensor, chosen: slice) -> tuple[torch.Tensor, torch.Tensor]:
    """Derivatives of a batch normalization, written over those (k, N, C, …) of its input, with its part of H and d².

    Those of channels that are not ``chosen`` are zero, and left out.

    With c = x − mean, r = 1/√(var + ε), slopes G = γ g and P = Σ G c, the loss is P r in each channel, and along T
    P' = Σ G T and var' = 2 mean(c T), where T is centred: H = P' r' + r' P' + P (¾ r⁵ var' var' − r³ mean(T T)).
    """
    # positions as the last dimension
    x, g = (v.detach()[..., None].flatten(2)[:, chosen] for v in (node._saved_input, g.view_as(node._saved_input)))
    M = x.numel() // x.shape[1]
    c = x - x.mean((0, 2), keepdim=True)
    r = (c.square().mean((0, 2)) + node._saved_eps).rsqrt()
    gamma = torch.ones_like(r) if node._saved_weight is None else node._saved_weight.detach()[chosen]
    G = g * gamma[:, None]
    G = G - G.mean((0, 2), keepdim=True)
    T = T.view(len(T), *c.shape)
    slopes, variances, squares = T.new_empty(3, len(T), len(r))
    for t, *sums in zip(T, slopes, variances, squares, strict=True):
        # one direction stays in the cache
        sums[2].copy_((t * t).sum(2).sum(0))
        t -= t.sum(2).sum(0)[:, None] / M
        for out, other in zip(sums, (G, c), strict=False):
            out.copy_((t * other).sum(2).sum(0))
    variances *= 2 / M
    P, roots = (G * c).sum((0, 2)), -0.5 * r**3 * variances
    cross = slopes @ roots.T
    H = cross + cross.T + (variances * (0.75 * P * r**5)) @ variances.T
    weight = -P * r**3 / M
    products, half = torch.zeros_like(H), len(H) // 2
    for part in T.unbind(1):
        rows = part.flatten(1)
        weighted = (part * weight[:, None]).flatten(1)
        products[:half] += weighted[:half] @ rows.T
        products[half:, half:] += weighted[half:] @ rows[half:].T
    products[half:, :half] = products[:half, half:].T
    H += products
    scale, along = gamma * r, variances * (0.5 * r**2)
    for t, coefficients in zip(T, along, strict=True):
        t.addcmul_(c, coefficients[:, None], value=-1).mul_(scale[:, None])
    bound = 6 * G.square().sum((0, 2)).sqrt() * c.square().sum((0, 2)).sqrt() * r**3 / M
    return H, squares @ bound


def convolved(node: Any, T: torch.Tensor, chosen: slice, empty: Callable[..., torch.Tensor]) -> torch.Tensor:
    """Derivatives of a convolution, whose bias has none, of a part of the images at a time."""
    weight, images = node._saved_weight.detach(), T.flatten(0, 1)
    weight = weight[chosen] if node._saved_transposed else weight[:, chosen]
    options = [
        getattr(node, f"_saved_{name}")
        for name in ("stride", "padding", "dilation", "transposed", "output_padding", "groups")
    ]
    shape = shape_of(node)
    outputs = empty(len(images), *shape[1:])
    columns = weight[0].numel() * max(shape[2:].numel(), T.shape[3:].numel())
    size = max(1, CACHED // columns) if T.device.type == "cpu" else len(images)
    for out, part in zip(outputs.split(size), images.split(size), strict=True):
        out.copy_(torch.ops.aten.convolution(part, weight, None, *options))
    return outputs.view(len(T), *shape)


def computed(end: Any, within: set[Any]) -> list[Any]:
    """Nodes ``within`` from which an end is computed, each behind its inputs."""
    ordered: dict[Any, None] = {}
    stack = [(end, False)]
    while stack:
        node, inputs_done = stack.pop()
        if inputs_done:
            ordered[node] = None
        elif node not in ordered:
            stack.append((node, True))
            stack.extend((parent, False) for parent, _ in node.next_functions if parent in within)
    return list(ordered)


def is_linear(node: Any, within: set[Any]) -> bool:
    """Whether a node is piecewise linear in the inputs ``within``."""
    return is_linear_node(node.name(), node, inputs_of(node, within))


def is_known(node: Any, within: set[Any]) -> bool:
    """Whether derivatives go forward through a node."""
    first, *others = [parent is not None for parent, _ in inputs_of(node, within)]
    if node.name() in BATCH_NORM:
        return first and not any(others) and hasattr(node, "_saved_eps")
    return is_linear(node, within) or (node.name() in ELEMENTWISE and first and not any(others))
