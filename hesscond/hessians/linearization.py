"""Products with second derivatives of one evaluated loss, with the graph of the first derivatives kept.

A linearization holds the graph of a first derivative, so that each product costs one pass through it. A Hessian
product is the derivative of vᵀ∇L (Pearlmutter, Neural Computation 6 (1994)). A Gauss-Newton product Jᵀ(H_L(J v)) is due
to Schraudolph (Neural Computation 14 (2002)); J v is here the derivative of uᵀJ v in u, two reverse passes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

import torch

from hesscond.capture import backward, forward
from hesscond.capture.curved import curved_nodes
from hesscond.errors import CaptureError, NotFiniteError
from hesscond.problem import containers, graph
from hesscond.problem.evaluation import LossFunction, in_precision, is_finite, scalar
from hesscond.problem.problem import WatchedEvaluation

Tensors = Sequence[torch.Tensor]


class Linearization(ABC):
    """Symmetric matrix of second derivatives of the loss of one batch in some leaves."""

    psd = False  # whether the graph proves that the matrix is positive semidefinite

    def __init__(self, evaluation: WatchedEvaluation, leaves: Tensors) -> None:
        self.leaves = list(leaves)
        self.loss = float(evaluation.loss.detach())
        self.depends = evaluation.loss.requires_grad
        if self.loss != self.loss or abs(self.loss) == float("inf"):
            raise NotFiniteError(f"the loss of a batch is {self.loss}: its derivatives are not defined")
        with graph.differentiable():
            self.gradient = [g.detach() for g in self._prepare(evaluation)]
        if not all(map(is_finite, self.gradient)):
            raise NotFiniteError("the gradient of the loss of a batch has NaN or infinite entries")
        self.evaluation = replace(evaluation, output=None, target=None)

    @abstractmethod
    def _prepare(self, evaluation: WatchedEvaluation) -> Tensors:
        """Prepare the graphs for the products, and return the gradient."""

    @abstractmethod
    def product(self, seeds: Tensors, among: Sequence[int] | None = None) -> Tensors:
        """Product with ``seeds``, in the shapes of the leaves, with the rows and columns ``among`` them only."""

    def products(self, seeds: Tensors, among: Sequence[int] | None = None) -> Tensors:
        """Products with k directions (k, *shape), equal to `product` up to rounding."""
        each = [self.product(direction, among) for direction in zip(*seeds, strict=True)]
        return [torch.stack(parts) for parts in zip(*each, strict=True)]

    @cached_property
    def largest(self) -> int:
        """Size of the largest tensor that the loss is computed from."""
        return max((graph.shape_of(node).numel() for node in graph.nodes([self.evaluation.loss.grad_fn])), default=1)

    @abstractmethod
    def ends(self) -> Iterator[Any]:
        """Nodes from which the whole retained graph is reached."""

    def bytes(self) -> int:
        """Bytes that the retained graphs hold, without the leaves."""
        storages = [call.inputs.untyped_storage() for calls in self.evaluation.calls.values() for call in calls]
        sizes = {storage.data_ptr(): storage.nbytes() for storage in storages}
        for node in graph.nodes([*self.ends(), self.evaluation.loss.grad_fn]):
            for name in dir(node):
                if not name.startswith("_saved_") and name != "saved_tensors":
                    continue
                for tensor in containers.tensors_of(getattr(node, name)):
                    parts = [part for part in containers.stored(tensor) if not part._is_zerotensor()]
                    storages = [part.untyped_storage() for part in parts]
                    sizes |= {storage.data_ptr(): storage.nbytes() for storage in storages}
        for leaf in self.leaves:
            sizes.pop(leaf.untyped_storage().data_ptr(), None)
        return sum(sizes.values())


class HessianLinearization(Linearization):
    """∇² of the loss."""

    def _prepare(self, evaluation: WatchedEvaluation) -> Tensors:
        graph.refuse_wrong_derivatives([evaluation.loss.grad_fn])
        # the loss is convex, and everything between the leaves and it piecewise linear
        self.psd = self.depends and is_convex(evaluation.loss)
        gradient = gradients([evaluation.loss], self.leaves, None, create_graph=True)
        # the graph of what is constant or absent is not needed
        self._slopes = [g if g.requires_grad else None for g in gradient]
        self._together: dict[tuple[int, ...], backward.Derivatives] = {}
        return gradient

    def product(self, seeds: Tensors, among: Sequence[int] | None = None) -> Tensors:
        chosen = range(len(self.leaves)) if among is None else among
        leaves = [self.leaves[i] for i in chosen]
        curved = [(g, seed) for i, seed in zip(chosen, seeds, strict=True) if (g := self._slopes[i]) is not None]
        if not curved:
            return [torch.zeros_like(leaf) for leaf in leaves]
        with graph.differentiable():
            return gradients([g for g, _ in curved], leaves, [seed for _, seed in curved])

    def products(self, seeds: Tensors, among: Sequence[int] | None = None) -> Tensors:
        chosen = tuple(range(len(self.leaves)) if among is None else among)
        leaves = [self.leaves[i] for i in chosen]
        if chosen not in self._together:
            self._together[chosen] = backward.Derivatives([self._slopes[i] for i in chosen], leaves)
        with graph.differentiable():
            images = self._together[chosen](seeds)
        count = len(seeds[0])
        return [leaf.new_zeros(count, *leaf.shape) if g is None else g for g, leaf in zip(images, leaves, strict=True)]

    def ends(self) -> Iterator[Any]:
        return (g.grad_fn for g in self._slopes if g is not None)


class GGNLinearization(Linearization):
    """Jᵀ H_L J, with J the Jacobian of the model's outputs o and H_L = ∇²_o of the loss."""

    def __init__(
        self, evaluation: WatchedEvaluation, leaves: Tensors, loss_fn: LossFunction, dtype: torch.dtype | None
    ) -> None:
        self._loss_fn = in_precision(loss_fn, dtype)
        super().__init__(evaluation, leaves)

    def _prepare(self, evaluation: WatchedEvaluation) -> Tensors:
        self._outputs = [*{id(o): o for o in containers.tensors_of(evaluation.output) if o.requires_grad}.values()]
        if not self._outputs and self.depends:
            raise CaptureError(
                f"the output of the model, {type(evaluation.output).__name__}, has no tensors in tuples, lists or "
                "dicts: the Gauss-Newton matrix is not defined without them"
            )
        self._points = [o.detach().requires_grad_() for o in self._outputs]
        replaced = {id(o): point for o, point in zip(self._outputs, self._points, strict=True)}
        # a clone: the loss may work in place
        output = containers.mapped(
            evaluation.output, lambda o: replaced[id(o)].clone() if id(o) in replaced else o.detach()
        )
        with torch.enable_grad():
            loss = scalar(self._loss_fn(output, evaluation.target))
        if forward.variables_of(loss) - set(map(id, self._points)):
            raise CaptureError(
                "the loss uses a parameter of the model itself, so that it is no function of the outputs alone and has "
                "no Gauss-Newton matrix: leave terms in the parameters, as weight decay, out of it"
            )
        # J is of first derivatives only
        graph.refuse_wrong_derivatives([loss.grad_fn])
        self.psd = loss.requires_grad and is_convex(loss)
        self._slopes = gradients([loss], self._points, None, create_graph=True)
        self._dummies = [torch.zeros_like(o, requires_grad=True) for o in self._outputs]
        self._pulled = gradients(self._outputs, self.leaves, self._dummies, create_graph=True)
        return gradients(self._outputs, self.leaves, [slope.detach() for slope in self._slopes])

    def product(self, seeds: Tensors, among: Sequence[int] | None = None) -> Tensors:
        chosen = range(len(self.leaves)) if among is None else among
        with graph.differentiable():
            pushed = gradients([self._pulled[i] for i in chosen], self._dummies, seeds)
            curved = gradients(self._slopes, self._points, pushed)
            return gradients(self._outputs, [self.leaves[i] for i in chosen], curved)

    def ends(self) -> Iterator[Any]:
        """Nodes of the outputs, of Jᵀu and of the slopes of the loss."""
        return (t.grad_fn for t in (*self._outputs, *self._pulled, *self._slopes))


def gradients(outputs: Tensors, inputs: Tensors, seeds: Tensors | None, *, create_graph: bool = False) -> Tensors:
    """Σ_k ∂o_k/∂inputs · seed_k, zero where there is no dependence; the graph is retained."""
    live = [k for k, output in enumerate(outputs) if output.requires_grad]
    if not live:
        return [torch.zeros_like(i) for i in inputs]
    ends = [outputs[k].grad_fn for k in live] if create_graph else []
    with backward.lean_convolutions(ends):
        return torch.autograd.grad(
            [outputs[k] for k in live],
            inputs,
            None if seeds is None else [seeds[k] for k in live],
            retain_graph=True,
            create_graph=create_graph,
            allow_unused=True,
            materialize_grads=True,
        )


def is_convex(loss: torch.Tensor) -> bool:
    """Whether the graph proves that the loss is convex where it is smooth, in all leaves of its graph together."""
    curved = curved_nodes(loss)
    if curved is None or not graph.is_piecewise_linear([node.edge.node for node in curved]):
        return False
    return all(node.signs(1) is None for node in curved)
