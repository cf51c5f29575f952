"""Curved nodes of a loss in its autograd graph, with the curvature as a factor formed without subtraction.

Most losses are a linear function of the outputs u_k of a few curved nodes (log-softmax, squares, logistic losses, …),
each of which has one differentiable input z_k. If z_k is piecewise linear in the pre-activations a of a layer, with
Jacobian J_k, then

    ∇²_a loss = Σ_k J_kᵀ S_k J_k,        S_k = Σ_e g_ke ∇² u_ke(z_k),        g_k = ∂loss/∂u_k,

and S_k is known in closed form. Everything the loss does between its curved nodes and its value (weights, masks,
smoothing, reductions, sums of several losses) is in g_k, and everything done to the outputs before (reshapes,
selections) in J_k, so that neither needs separate code.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch.autograd.graph import GradientEdge

from hesscond.capture.second_derivatives import SATURATING, SECOND_DERIVATIVES, SYMMETRIC, saved, square_root
from hesscond.problem import graph

# logarithms below it are cut there, since -inf - -inf would turn a class that is masked out into NaN
LOG_FLOOR = -1e300


#: A curvature that is a difference has lost digits if it is below this share of the two terms.
CANCELLED = 1e-2
#: Number of random sign vectors to average over: with a single one, the few samples of a batch may cancel.
DRAWS = 8


@dataclass(frozen=True, eq=False)
class CurvedNode(ABC):
    """Hessian S of a loss in the input z of one curved node, block diagonal over blocks of z along dim 0.

    Each block of S is Σ_r s_r b_r b_rᵀ, with R rank-one terms, signs s_r = ±1 and rows b_r formed without subtraction.
    ``blocks`` is the number of samples, or of positions, whose entries are then consecutive in z, or 1. ``edge`` is
    that of z: ``outputs=[edge]`` of `torch.autograd.grad` differentiates z.
    """

    edge: GradientEdge

    @property
    @abstractmethod
    def cancels(self) -> float:
        """Largest factor of a difference p − p² in S as autograd forms it; 0: there is none."""

    @property
    def shape(self) -> torch.Size:
        return graph.shape_of(self.edge.node, self.edge.output_nr)

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of z, in which gradients with respect to it have to be given."""
        return graph.dtype_of(self.edge.node, self.edge.output_nr)

    @property
    def class_dim(self) -> int | None:
        """Dimension of z along which S couples entries; None: it couples none."""
        return None

    def block_size(self, blocks: int) -> int:
        """Number of entries of z in each of the blocks."""
        shape = tuple(self.shape)
        leading = leading_dimensions(shape, blocks)
        if leading is None:
            raise ValueError(f"the first dimension of {shape} does not split into {blocks} equal blocks")
        if self.class_dim is not None and self.class_dim < leading:
            raise ValueError(f"the loss couples the entries of {shape} along the first dimension: use one block")
        return math.prod(shape) // blocks

    def splits(self, blocks: int) -> bool:
        """Whether S is known to couple no entries of different blocks."""
        leading = leading_dimensions(self.shape, blocks)
        return leading is not None and (self.class_dim is None or self.class_dim >= leading)

    @abstractmethod
    def passes(self, blocks: int) -> int:
        """Number R of rank-one terms in each block."""

    @abstractmethod
    def factor(self, start: int, stop: int, blocks: int) -> torch.Tensor:
        """Rows start ≤ r < stop (stop − start, *shape) float64, each with the b_r of every block at its place in z."""

    @abstractmethod
    def signs(self, blocks: int) -> torch.Tensor | None:
        """Signs s_r = ±1 (R, blocks) float64; None: all are +1."""

    @abstractmethod
    def entry_roots(self) -> torch.Tensor:
        """Roots √|S_ee| (*shape) float64, to full relative accuracy."""

    @abstractmethod
    def sample(self, generator: torch.Generator) -> torch.Tensor:
        """Random b (*shape) float64 with mean bbᵀ = |S|."""

    @abstractmethod
    def entry_signs(self) -> torch.Tensor | None:
        """Signs ±1 of S_ee (*shape) float64; None: all are +1."""


@dataclass(frozen=True, eq=False)
class SoftmaxNode(CurvedNode):
    """Curved node with S = w (diag(p) − p pᵀ) for each of many distributions p = softmax(z) along one dimension of z.

    Each block of z holds L distributions over c classes, and R = L (c − 1).
    """

    dim: int  # dimension of the classes in z
    log_p: torch.Tensor  # (…, c) float64, with the classes as the last dimension
    weight: torch.Tensor  # w (…) float64: for log-softmax −Σ_k g_k over the classes, for logsumexp g

    @property
    def cancels(self) -> float:
        return float(self.weight.abs().max())

    @property
    def class_dim(self) -> int:
        return self.dim

    @cached_property
    def log_tail(self) -> torch.Tensor:
        """Logarithms log Σ_{l≥k} p_l (…, c)."""
        return torch.flip(torch.logcumsumexp(torch.flip(self.log_p, [-1]), -1), [-1])

    def passes(self, blocks: int) -> int:
        classes = self.log_p.shape[-1]
        return self.block_size(blocks) // classes * (classes - 1)

    def factor(self, start: int, stop: int, blocks: int) -> torch.Tensor:
        """Rows (stop − start, *shape): row l (c − 1) + k is √|w| times column k of distribution l's Cholesky factor."""
        classes = self.log_p.shape[-1]
        split = (blocks, self.block_size(blocks) // classes, classes)
        log_p, tail = self.log_p.reshape(split), self.log_tail.reshape(split)
        root = self.weight.abs().sqrt().reshape(split[:2])
        r = torch.arange(start, stop, device=root.device)
        which, column = r // (classes - 1), r % (classes - 1)
        columns = stick_breaking_columns(log_p[:, which], tail[:, which], column) * root[:, which, None]
        if split[1] == 1:
            B = columns.transpose(0, 1)
        else:
            B = root.new_zeros(len(r), *split)
            B[torch.arange(len(r), device=root.device), :, which] = columns.transpose(0, 1)
        return B.reshape(len(r), *self.log_p.shape).movedim(-1, self.dim + 1)

    def signs(self, blocks: int) -> torch.Tensor | None:
        rows = self.passes(blocks)
        sign = plus_or_minus(self.weight)
        if sign is None:
            return None
        return sign[..., None].expand(*sign.shape, self.log_p.shape[-1] - 1).reshape(blocks, rows).T

    def entry_roots(self) -> torch.Tensor:
        """Roots √(|w| p_k (1 − p_k)) (*shape), with 1 − p_k from the other classes where p_k is above 1/2."""
        top = self.log_p.argmax(-1, keepdim=True)
        others = self.log_p.scatter(-1, top, -math.inf).logsumexp(-1, keepdim=True)
        p = self.log_p.exp()
        log_rest = torch.where(p <= 0.5, torch.log1p(-p), others)
        root = (0.5 * (self.log_p + log_rest)).exp_() * self.weight.abs().sqrt()[..., None]
        return root.movedim(-1, self.dim)

    def sample(self, generator: torch.Generator) -> torch.Tensor:
        """Random b (*shape), in which the model draws the class, as in K-FAC."""
        roots, p = self.weight.abs().sqrt(), self.log_p.exp()
        drawn = (p.cumsum(-1) < uniform(roots, generator)[..., None]).sum(-1).clamp(max=p.shape[-1] - 1)
        b = p.neg().scatter_add(-1, drawn[..., None], torch.ones_like(p[..., :1]))
        return (b * roots[..., None]).movedim(-1, self.dim)

    def entry_signs(self) -> torch.Tensor | None:
        sign = plus_or_minus(self.weight)
        return None if sign is None else sign[..., None].expand(self.log_p.shape).movedim(-1, self.dim)


@dataclass(frozen=True, eq=False)
class ElementwiseNode(CurvedNode):
    """Curved node with S = diag(d), d = g f''(z), for an elementwise function f; R is the size of a block."""

    signed_root: torch.Tensor  # sign(d) √|d| (*shape) float64
    factor_of_differences: float = 0.0  # value of `cancels`

    @property
    def cancels(self) -> float:
        return self.factor_of_differences

    def passes(self, blocks: int) -> int:
        return self.block_size(blocks)

    def factor(self, start: int, stop: int, blocks: int) -> torch.Tensor:
        """Rows (stop − start, *shape): row r is √|d_r| at entry r of every block."""
        root = self.signed_root.abs().reshape(blocks, self.block_size(blocks))
        B = root.new_zeros(stop - start, *root.shape)
        for out, r in zip(B, range(start, stop), strict=True):
            out[:, r] = root[:, r]
        return B.reshape(len(B), *self.signed_root.shape)

    def signs(self, blocks: int) -> torch.Tensor | None:
        size = self.block_size(blocks)
        sign = plus_or_minus(self.signed_root)
        return None if sign is None else sign.reshape(blocks, size).T

    def entry_roots(self) -> torch.Tensor:
        return self.signed_root.abs()

    def sample(self, generator: torch.Generator) -> torch.Tensor:
        roots = self.entry_roots()
        return torch.where(uniform(roots, generator) < 0.5, -roots, roots)

    def entry_signs(self) -> torch.Tensor | None:
        return plus_or_minus(self.signed_root)


def stick_breaking_columns(log_p: torch.Tensor, tail: torch.Tensor, r: torch.Tensor) -> torch.Tensor:
    """Columns r (k,), r < c − 1, of the lower triangular L with L Lᵀ = diag(p) − p pᵀ, for k distributions: (…, k, c).

    With tail sums s_k = Σ_{l≥k} p_l, L is √(p_r s_{r+1}/s_r) on the diagonal and −p_i √(p_r/(s_r s_{r+1})) below it. It
    is computed from the logarithms ``log_p`` of p and ``tail`` of s, both (…, k, c), so that p of 1e-600 still counts.
    """
    index = r[:, None].expand(*log_p.shape[:-1], 1)
    p_r, s_r, s_next = log_p.gather(-1, index), tail.gather(-1, index), tail.gather(-1, index + 1)
    classes = torch.arange(log_p.shape[-1], device=log_p.device)
    below = -(log_p + 0.5 * (p_r - s_r - s_next)).exp()
    columns = torch.where(classes > r[:, None], below, 0.0)
    return columns.scatter(-1, index, (0.5 * (p_r + s_next - s_r)).exp())


def leading_dimensions(shape: Sequence[int], blocks: int) -> int | None:
    """Number of leading dimensions that split into ``blocks`` equal parts of consecutive entries; None: none do."""
    if blocks < 1:
        return None
    count = 1
    for number, length in enumerate(shape):
        if count % blocks == 0:
            return number
        if blocks % count:
            return None
        count *= length
    return len(shape) if count and count % blocks == 0 else None


@torch.no_grad()
def curved_nodes(loss: torch.Tensor) -> list[CurvedNode] | None:
    """Outermost curved nodes of a scalar loss that is piecewise linear in their outputs; None if that is not known.

    The caller has to check that each z_k is piecewise linear in the variables: a node may be curved in the output of
    another one. At kinks of the loss S_k is what second derivatives by autograd would give.
    """
    if loss.numel() != 1:
        raise ValueError(f"the loss must be a scalar, and has shape {tuple(loss.shape)}")
    inside, _ = outermost(loss, set())
    # A tensor that also enters linearly, as o in logsumexp(o) − o[y], is checked by the caller: the walk may end there.
    # Curved nodes that this hides are below the input of one that is found, which is then not piecewise linear.
    curved, known = outermost(loss, {(edge.node, edge.output_nr) for edge in inside.values()})
    if not known:
        return None
    if not curved:
        return []
    outputs = [GradientEdge(node, 0) for node in curved]
    gradients = torch.autograd.grad(loss, outputs, retain_graph=True, allow_unused=True)
    curvatures = []
    for (node, edge), g in zip(curved.items(), gradients, strict=True):
        curvature = None if g is None else curvature_of(node, edge, g)
        if curvature is None:
            return None
        curvatures.append(curvature)
    return curvatures


def without_cancellation(
    loss: torch.Tensor, variables: Sequence[torch.Tensor], below: float = math.inf
) -> Iterator[list[torch.Tensor]]:
    """Random vectors w with E[Σ wwᵀ] = H if nothing in the loss's curvature cancelled, in the shapes of the variables.

    One list of tensors is yielded for each curved node of the scalar loss, or `DRAWS` with a finite ``below``: then
    only for nodes whose curvature is everywhere less than ``below`` times the terms that cancel in it.
    """
    curved = curved_nodes(loss) if loss.requires_grad else None
    if not curved:
        return
    slopes = torch.autograd.grad(loss, [node.edge for node in curved], retain_graph=True, allow_unused=True)
    generator = torch.Generator().manual_seed(2)
    for node, g in zip(curved, slopes, strict=True):
        if not math.prod(node.shape):
            continue
        # everything in the units of the loss, which may be any
        edge, entries, weight = node.edge, node.entry_roots().square(), node.cancels
        terms = entries.clamp_min(weight)
        if g is not None and edge.node.name() == "SigmoidBackward0":
            source, number = edge.node.next_functions[0]
            assert source is not None
            p = saved(edge.node, "result")
            slope = p - p.square()
            entries, weight = g.abs() * slope + entries * slope**2, float(g.abs().max())
            edge, terms = GradientEdge(source, number), torch.full_like(entries, weight)
        if below < math.inf and float(entries.max()) >= below * weight:
            continue
        draws = 1 if below == math.inf else DRAWS
        for _ in range(draws):
            signs = torch.randint(0, 2, tuple(node.shape), generator=generator, device="cpu").mul_(2).sub_(1)
            seeds = ((terms / draws).sqrt() * signs.to(terms)).to(node.dtype)
            gradients = torch.autograd.grad([edge], variables, [seeds], retain_graph=True, allow_unused=True)
            yield [torch.zeros_like(tensor) if g is None else g for tensor, g in zip(variables, gradients, strict=True)]


def outermost(loss: torch.Tensor, ends: set[tuple[Any, int]]) -> tuple[dict[Any, GradientEdge], bool]:
    """Curved nodes reached through linear nodes, with the edges of their inputs, and whether every branch is known."""
    curved: dict[Any, GradientEdge] = {}
    known = True
    seen: set[Any] = set()
    stack: list[tuple[Any, int]] = [(loss.grad_fn, 0)]
    while stack:
        node, number = stack.pop()
        if node is None or node in seen or (node, number) in ends:
            continue
        seen.add(node)
        edge = input_edge(node)
        if edge is not None:
            curved[node] = edge
        elif node.name() in LINEAR_IN_LOSSES or graph.is_linear_node(node.name(), node, list(node.next_functions)):
            stack.extend(node.next_functions)
        else:
            known = False
    return curved, known


#: Nodes of losses that are linear in all their differentiable inputs together, or piecewise linear.
LINEAR_IN_LOSSES = graph.backward("NllLoss NllLoss2D Rsub MaskedSelect Take Trace Nansum ScatterAdd IndexAdd Sort Topk")
LINEAR_IN_LOSSES |= graph.backward("Add Sub Rsub Mul Div MaskedFill", 1)
#: Products, which are squares if both factors are the same.
PRODUCTS = {"MulBackward0", "DotBackward0"}
SOFTMAX = {"LogSoftmaxBackward0", "LogsumexpBackward0"}
MEAN = 1  # torch's code for this reduction


def input_edge(node: Any) -> GradientEdge | None:
    """Edge of the only input in which a node is curved; None: it is not known to be curved in one input alone."""
    name, inputs = node.name(), node.next_functions
    if name in PRODUCTS:
        both = all(parent is not None for parent, _ in inputs)
        return GradientEdge(*inputs[0]) if both and same_jacobian(*inputs) else None
    if is_log_of_softmax(node):
        return GradientEdge(*inputs[0][0].next_functions[0])
    differentiable = [i for i, (parent, _) in enumerate(inputs) if parent is not None]
    if name in SOFTMAX or (name in SECOND_DERIVATIVES and (name in SYMMETRIC or differentiable == [0])):
        return GradientEdge(*inputs[differentiable[0]]) if len(differentiable) == 1 else None
    return None


def is_log_of_softmax(node: Any) -> bool:
    """Whether a node is log(softmax(z)), written as two functions."""
    if node.name() != "LogBackward0":
        return False
    parent = node.next_functions[0][0]
    return parent is not None and parent.name() == "SoftmaxBackward0"


def same_jacobian(left: tuple[Any, int], right: tuple[Any, int]) -> bool:
    """Whether two factors differ by constants at most: the same edge, or sums of the same ones with constants."""
    if left == right:
        return True
    first, second = left[0], right[0]
    return (
        first is not None
        and second is not None
        and first.name() == second.name()
        and first.name() in graph.backward("Add Sub Rsub", 0, 1)
        and getattr(first, "_saved_alpha", 1) == getattr(second, "_saved_alpha", 1)
        and graph.shape_of(*left) == graph.shape_of(*right)
        and all(map(same_jacobian, first.next_functions, second.next_functions))
    )


def curvature_of(node: Any, edge: GradientEdge, g: torch.Tensor) -> CurvedNode | None:
    """Curvature S at a node with input ``edge``, from the gradient ``g`` of the loss in its output; None: not known."""
    shape = graph.shape_of(edge.node, edge.output_nr)
    if not graph.dtype_of(edge.node, edge.output_nr).is_floating_point:
        return None
    if node.name() in SOFTMAX or is_log_of_softmax(node):
        return softmax_curvature(node, edge, g, len(shape)) if shape else None
    weight = g.to(torch.float64)
    if getattr(node, "_saved_reduction", 0) == MEAN:
        weight = weight / math.prod(shape)
    rule = SECOND_DERIVATIVES.get(node.name())
    signed_root = square_root(2 * weight) if rule is None else square_root(weight) * rule(node)
    if torch.broadcast_shapes(signed_root.shape, shape) != shape:
        return None  # entries of z count more than once, since the target or the weights are larger
    cancels = float(weight.abs().max()) if node.name() in SATURATING else 0.0
    return ElementwiseNode(edge, signed_root.expand(shape).contiguous(), cancels)


def softmax_curvature(node: Any, edge: GradientEdge, g: torch.Tensor, ndim: int) -> SoftmaxNode | None:
    """Curvature S of log-softmax, logsumexp, or log(softmax); None: not known."""
    if node.name() == "LogsumexpBackward0":
        if len(node._saved_dim) != 1:
            return None
        dim = graph.dimension(node._saved_dim[0], ndim)
        weight = (g.squeeze(dim) if node._saved_keepdim else g).to(torch.float64)
        return SoftmaxNode(edge, dim, normalized(saved(node, "self").movedim(dim, -1)), weight)
    if node.name() == "LogBackward0":
        source, log_p = node.next_functions[0][0], saved(node, "self").log()
    else:
        source, log_p = node, saved(node, "result")
    dim = graph.dimension(source._saved_dim, ndim)
    by_class = g.movedim(dim, -1).to(torch.float64)
    weight = -by_class.sum(-1)
    # differences of log-probabilities are linear in z: the rounding error left in their sum is no curvature
    rounding = by_class.shape[-1] * torch.finfo(g.dtype).eps * by_class.abs().sum(-1)
    weight = weight.masked_fill(weight.abs() <= rounding, 0.0)
    return SoftmaxNode(edge, dim, normalized(log_p.movedim(dim, -1)), weight)


def normalized(log_p: torch.Tensor) -> torch.Tensor:
    """Log-probabilities (…, c) float64 from log-probabilities up to rounding or a constant for each row."""
    shifted = log_p - log_p.amax(-1, keepdim=True)
    return (shifted - shifted.logsumexp(-1, keepdim=True)).clamp_min(LOG_FLOOR)


def uniform(like: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Random numbers between 0 and 1, drawn on the CPU."""
    return torch.rand(like.shape, generator=generator, dtype=torch.float64, device="cpu").to(like.device)


def plus_or_minus(x: torch.Tensor) -> torch.Tensor | None:
    """Signs of ``x`` as ±1, a zero counting as +1; None: all +1."""
    negative = x < 0
    return torch.where(negative, -1.0, 1.0).to(torch.float64) if negative.any() else None
