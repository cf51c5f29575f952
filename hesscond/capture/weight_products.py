"""Hessians of the units of a dense layer whose weight is used several times, as where a model takes derivatives.

Forward passes multiply rows h of samples with Wᵀ, backward passes rows g with W. Let Φ(ε) be the loss as a function of
terms ε added to the results z of these products, and λ = ∇Φ, block diagonal over samples in their derivatives. Weight
w_ij moves ε by h_j in entry i of a z = hWᵀ, and by g_i in entry j of a z = gW, so that

    ∂L/∂w_ij = Σ λ_i h_j + Σ g_i λ_j

over samples and products. Derivatives of λ, h and g in the ε, one direction for each unit or input of a product and all
samples together, give the Hessians of all units: fewer directions than the weights of all units.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.nn.functional import pad

from hesscond.capture import backward, kinds
from hesscond.capture.captured import Request
from hesscond.problem import graph

#: Unit of the round-off by which two computations of a product may differ.
ROUNDING = 64 * float(torch.finfo(torch.float64).eps)
#: Cost of derivatives of the slope in a result, and of a factor, if one of the slope in the weight costs 1; least gain.
SECOND, FIRST, GAIN = 0.5, 0.25, 1.25
#: Names of the factors, and the position of the first among the inputs.
FACTORS = {"MmBackward0": (0, ("self", "mat2")), "AddmmBackward0": (1, ("mat1", "mat2"))}

#: Tensor or edge of the graph.
Node = torch.Tensor | GradientEdge


@dataclass(frozen=True)
class Product:
    """Product of the rows of all samples with Wᵀ (``forward``) or W."""

    edge: GradientEdge
    forward: bool
    columns: bool  # whether samples are columns of the result and of the other factor
    rows: torch.Tensor  # (N, n̂) rows [1; h] or [0; h], without the column in front if there is no bias, or (N, m) g
    factor: GradientEdge | None  # that of h or g; None: a constant

    def turned(self, values: torch.Tensor) -> torch.Tensor:
        """Rows of samples as they are in the graph, and vice versa."""
        return values.mT if self.columns else values


class WeightProducts:
    """Products of samples with the weight of a dense layer, if the loss depends on weight and bias by nothing else."""

    def __init__(self, loss: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, samples: int) -> None:
        self.loss, self.weight, self.bias, self.samples = loss, weight, bias, samples
        self.products = self._products_of_weight()
        self.edges = [product.edge for product in self.products]

    @classmethod
    def of(cls, loss: torch.Tensor, request: Request, samples: int) -> WeightProducts | None:
        """Products of the weight of a layer, if they give the Hessians of its units at a lower cost."""
        if request.whole or request.parameters is None or kinds.is_turned(request.layer):
            return None
        products = cls(loss, *request.parameters, samples)
        return products if products.share(len(request.units)) < 1 else None

    def share(self, units: int) -> float:
        """Cost of the Hessians of some units, relative to a derivative for each of their parameters; 1: no gain."""
        forward, inputs = sum(product.forward for product in self.products), self.weight.shape[1]
        back, direct = len(self.products) - forward, units * (inputs + (self.bias is not None))
        cost = SECOND * (units * forward + inputs * back) + FIRST * (inputs * forward + units * back)
        return cost / direct if self.products and GAIN * cost < direct else 1.0

    def _products_of_weight(self) -> list[Product]:
        """Products of the weight; none: it is used in another way."""
        uses = graph.users([self.loss.grad_fn])
        added = () if self.bias is None else uses.get((get_gradient_edge(self.bias).node, 0), ())
        biased = {node for node, _ in added}
        products: dict[Any, Product] = {}
        waiting = [((get_gradient_edge(self.weight).node, 0), False)]
        while waiting:
            edge, turned = waiting.pop()
            for node, number in uses.get(edge, ()):
                if node.name() in ("TBackward0", "TransposeBackward0"):
                    waiting.append(((node, 0), not turned))
                    continue
                product = self._product(node, number, turned, node in biased)
                if product is None or node in products:
                    return []
                products[node] = product
        # in the order of the forward pass
        ordered = sorted(products.values(), key=lambda product: product.edge.node._sequence_nr())
        return ordered if biased <= products.keys() else []

    def _product(self, node: Any, number: int, turned: bool, biased: bool) -> Product | None:
        """Product at a node with the weight as an input; None: samples are not its rows, or it is something else."""
        first, names = FACTORS.get(node.name(), (0, ()))
        place, columns = number - first, number == first
        if not names or place < 0 or (first and not node._saved_alpha == node._saved_beta == 1):
            return None
        rows = getattr(node, f"_saved_{names[1 - place]}").detach()
        rows, forward = rows.mT if columns else rows, turned != columns
        if len(rows) != self.samples or rows.dtype != torch.float64 or (biased and (not forward or columns)):
            return None
        if forward and self.bias is not None:
            rows = torch.cat([rows.new_full((len(rows), 1), float(biased)), rows], 1)
        factor, at = node.next_functions[first + 1 - place]
        return Product(GradientEdge(node, 0), forward, columns, rows, factor and GradientEdge(factor, at))

    def hessians(
        self, units: Sequence[int], budget: backward.Budget, advance: Callable[[float], None]
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Return H (u, n̂, n̂) of some units and the largest term (u,) in each; None: samples are not apart."""
        slopes = torch.autograd.grad(self.loss, self.edges, create_graph=True, allow_unused=True)
        pairs = [(product, slope) for product, slope in zip(self.products, slopes, strict=True) if slope is not None]
        factors = [(product, product.factor) for product, _ in pairs if product.factor is not None]
        if self._mixes(pairs, half=True) or self._mixes(factors, half=False):
            return None
        chosen, inputs = torch.tensor(units, device=self.loss.device), range(self.weight.shape[1])
        bias = int(self.bias is not None)
        H = self.weight.new_zeros(len(units), bias + len(inputs), bias + len(inputs))
        largest = H.new_zeros(len(units))

        def add(output: Node, product: Product, left: torch.Tensor, by_unit: bool, others: Sequence[Product]) -> None:
            """Add derivatives along the entries of a slope or factor, times ``left`` (N, n̂) or (N, u), in some ε."""
            for span, derivatives in self._along(output, product, units if by_unit else inputs, others, budget):
                of, rows = chosen[span] if by_unit else chosen, slice(span.start + bias, span.stop + bias)
                at = (span, slice(None)) if by_unit else (slice(None), rows)
                for other, g in zip(others, derivatives, strict=True):
                    if g is not None:
                        # both orders of differentiation: twice the symmetric part
                        times = 1 if output is not product.factor and other is product else 2
                        part = times * terms(other, g, left, of, by_unit, bias)
                        H[at] += part
                        largest[at[0]] = torch.maximum(largest[at[0]], part.abs().amax((1, 2)))
                advance((SECOND if output is not product.factor else FIRST) * (span.stop - span.start))

        for place, (product, slope) in enumerate(pairs):
            left = product.rows if product.forward else product.rows[:, chosen]
            # a pass back to later products ends there
            add(slope, product, left, product.forward, [other for other, _ in pairs[place:]])
            if product.factor is not None:
                slope_rows = product.turned(slope.detach())
                left = slope_rows[:, chosen] if product.forward else pad(slope_rows, (bias, 0))
                add(product.factor, product, left, not product.forward, self.products)
        return (H + H.mT) / 2, largest

    def _along(
        self, output: Node, product: Product, entries: Sequence[int], others: Sequence[Product], budget: backward.Budget
    ) -> Iterator[tuple[slice, list[torch.Tensor | None]]]:
        """Yield derivatives (k, N, ·) of a slope or factor in some ε, along k of its entries in all samples."""
        edges = [other.edge for other in others]
        derivatives, sizes = derivatives_of([output], edges), [shape_at(edge).numel() for edge in edges]
        size = budget.cached(len(entries), 2 * sum(sizes), max(sizes))
        for start in range(0, len(entries), size):
            span = slice(start, min(start + size, len(entries)))
            seeds = self.weight.new_zeros(span.stop - start, *shape_at(output))
            places = torch.tensor(entries[span], device="cpu")
            product.turned(seeds)[torch.arange(len(seeds), device="cpu"), :, places] = 1
            yield span, rows_of(derivatives([seeds]), others)

    def _mixes(self, outputs: Sequence[tuple[Product, Node]], *, half: bool) -> bool:
        """Whether derivatives of slopes or factors in the ε are not exactly zero between different samples."""
        subsets = backward.separating_subsets(self.samples, self.loss.device)[:: 2 if half else 1]
        if not outputs or not subsets:
            return False
        widths = [shape_at(output).numel() // self.samples for _, output in outputs]
        shape = torch.Size((self.samples, sum(widths)))
        seeds = torch.stack([backward.on_samples(subset, shape, torch.float64, self.samples) for subset in subsets])
        parts = [product.turned(part) for (product, _), part in zip(outputs, seeds.split(widths, 2), strict=True)]
        derivatives = derivatives_of([output for _, output in outputs], [product.edge for product in self.products])
        rows = rows_of(derivatives(parts), self.products)
        return any(bool(g[~torch.stack(subsets)].any()) for g in rows if g is not None)


def derivatives_of(outputs: Sequence[Node], edges: Sequence[GradientEdge]) -> backward.Derivatives:
    """Derivatives in batches from the first on: a wrong batching rule shows when the result is `confirmed`."""
    derivatives = backward.Derivatives(outputs, edges)
    derivatives.vectorized = True
    return derivatives


def rows_of(derivatives: Sequence[torch.Tensor | None], products: Sequence[Product]) -> list[torch.Tensor | None]:
    """Derivatives in the ε of some products with samples as rows; None: zero."""
    return [None if g is None else product.turned(g) for g, product in zip(derivatives, products, strict=True)]


def terms(
    product: Product, g: torch.Tensor, left: torch.Tensor, units: torch.Tensor, by_unit: bool, bias: int
) -> torch.Tensor:
    """Terms of derivatives g (k, N, ·) in the ε of a product: (k, n̂, n̂) of k units, or (u, k, n̂) of k rows of each."""
    if by_unit and product.forward:
        diagonal = g[torch.arange(len(g), device="cpu"), :, units]
        return (left * diagonal[:, :, None]).mT @ product.rows
    if by_unit:
        return pad((left * product.rows[:, units].T[:, :, None]).mT @ g, (bias, 0))
    if product.forward:
        return (left * g[:, :, units]).permute(2, 0, 1) @ product.rows
    return pad(torch.einsum("si,ksl->ikl", left * product.rows[:, units], g), (bias, 0))


def confirmed(
    H: torch.Tensor, largest: torch.Tensor, request: Request, product: Callable[[torch.Tensor], torch.Tensor]
) -> bool:
    """Whether a product with the Hessian (k, m, n̂) of the layer agrees with the largest H up to rounding."""
    unit = int(H.flatten(1).norm(dim=1).argmax())
    v, row = backward.scattered_signs(H[unit, 0]), request.units[unit]
    seeds = H.new_zeros(1, kinds.Geometry.of(request.layer).units, len(v))
    seeds[0, row] = v
    actual, expected = product(seeds)[0, row], H[unit] @ v
    near = (actual - expected).norm() <= ROUNDING * len(v) * largest[unit]
    return bool(near) or backward.agree(actual[None], expected[None])


def shape_at(output: Node) -> torch.Size:
    """Shape of a tensor, or of the one at an edge."""
    return graph.shape_of(output.node, output.output_nr) if isinstance(output, GradientEdge) else output.shape
