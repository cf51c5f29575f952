"""Comparison of every computed Hessian with double backward through the unmodified model, along one direction."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache, cached_property, partial
from typing import Any

import torch
from torch import nn

from hesscond import causes
from hesscond.capture import captured, curved, second_derivatives
from hesscond.capture.backward import enlarged_rounding, size_of_terms
from hesscond.capture.capturing import Slopes
from hesscond.capture.forward import variables_of
from hesscond.errors import CaptureError, HesscondError, NoDerivativeError
from hesscond.hessians import BlockHessian, HessianOperator, linearization
from hesscond.hessians.coordinates.linear import UnitCoordinates
from hesscond.hessians.network_hessian import NetworkHessian
from hesscond.hessians.parameters import Layout
from hesscond.probing.differences import Culprit, Difference, Differences, functions, worst
from hesscond.problem import graph
from hesscond.problem.evaluation import Batch, Evaluation, LossFunction
from hesscond.problem.precision import Operations, Precision, perturbed
from hesscond.problem.snapshot import Snapshot
from hesscond.problem.untouched import RandomState
from hesscond.spectra.forms import SolverLimits

#: Reason for an operator whose products are not those of the model.
DISAGREES = "the operator and a fresh evaluation of the model disagree"
#: Relative differences that need no explanation, in float64; in ordinary networks rounding is far smaller.
TOLERANCE = 1e-8
#: Relative differences that need no explanation in a precision with round-off eps, in units of eps.
UNITS = 1e3
#: Largest such difference, of operations that round to few digits: the intervals tell what they leave of κ.
COARSE = 0.1
#: Smallest relative size of the terms of a gradient, in either factor, compared with the largest.
LEAST = float(torch.finfo(torch.float64).tiny) ** 0.25
#: Factor by which measured effects of rounding are enlarged.
MARGIN = 256.0
#: A product below this multiple of its change by rounding counts as rounding; number of draws that decide.
ROUNDED, DRAWS = 64.0, 3
#: Round-off of a computed Hessian, relative to products of scales: see `hessians.coordinates.LOST_IN_SQUARE`.
BELOW = 1e-9
#: Entries of a product may be rounding below this share of the largest; a Hessian above the second share is not.
SMALL, FAR = 1e-9, 1e-3


@dataclass(frozen=True)
class Check:
    """Comparison of a computed Hessian with the second derivatives of the model.

    For a random direction v, the product with the computed Hessian is compared with the product by double backward
    through the unmodified model; so are the gradients. Both are scaled so that small features count as much as large
    ones.
    """

    difference: float  # largest relative difference
    #: difference that rounding explains: at least 1e-8 in float64; from 1 on, the model's product is only rounding
    bound: float
    built: float  # vᵀHv of the computed Hessian
    own: float  # vᵀHv by double backward through the model
    slopes: float = 0.0  # difference of the gradients
    unit: int | None = None  # None: the whole layer or network
    #: comparison of double backward with central differences, on the first batch on which the loss depends
    central: Difference | None = None
    #: module (or the loss) whose second derivatives are not those of its gradient, if one was found
    culprit: str = ""
    #: whether the Hessian is numerically zero: no product is larger than the rounding of the model's product
    zero: bool = False
    #: what the product is compared with
    reference: str = "the model's own double backward"

    @property
    def passed(self) -> bool:
        """Whether rounding explains the difference, and double backward is the derivative of the gradient."""
        return self.difference <= self.bound and not self.contradicted

    @property
    def contradicted(self) -> bool:
        """Whether the model's second derivatives are not those of its gradient."""
        return self.central is not None and self.central.agrees is False

    def __str__(self) -> str:
        if self.bound >= 1:
            return f"{self.reference} is round-off here, and tells nothing"
        text = f"{self.difference:.0e} from {self.reference} (bound {self.bound:.0e})"
        return text + (f"; {self.against}" if self.central is not None else "")

    @property
    def against(self) -> str:
        """Comparison with central differences, in words; empty if it was not made."""
        if self.central is None:
            return ""
        if self.central.agrees is None:
            return "central differences of the gradient are round-off or kinks: they tell nothing"
        return f"double backward is {self.central.relative:.0e} from differences of the gradient"


@dataclass
class CheckDirection:
    """Direction in the parameters of one block, with the model's derivatives along it."""

    layout: Layout
    v: torch.Tensor  # (n,) float64
    scales: torch.Tensor  # (n,) units in which products are compared; v is random, divided by them
    unit: int | None  # unit of the block; None: a whole layer or network
    product: torch.Tensor  # (n,) H v, summed over the batches so far with their weights; so is the slope ∇L
    slope: torch.Tensor
    whole: Layout  # layout of the gradient, which is in the parameters of all units
    #: gradient from the capture, summed in the same way; None: not compared
    own_slope: torch.Tensor | None = None
    #: (u,) Σδ² of each unit and (G, n̂) Σĥ² of each input so far: squared factors of the entries of the gradient
    squares: tuple[torch.Tensor, torch.Tensor] | None = None
    #: bound, in the 2-norm, of the rounding in H where its terms are differences of larger ones, as in softmax (p − p²)
    cancellation_error: float = 0.0

    def add_slopes(self, slopes: Slopes, weight: float = 1.0) -> None:
        """Add the gradient of a batch from its capture."""
        gradient = slopes.gradient.flatten()
        units, inputs = weight**2 * slopes.units, slopes.inputs
        if self.own_slope is None or self.squares is None:
            self.own_slope, self.squares = gradient if weight == 1 else weight * gradient, (units, inputs)
            return
        self.own_slope = self.own_slope.add(gradient, alpha=weight)
        self.squares = self.squares[0] + units, self.squares[1] + inputs

    def count(self, weight: float) -> None:
        """Multiply the sums so far by a weight."""
        self.product *= weight
        self.slope *= weight

    @classmethod
    def of(
        cls,
        block: BlockHessian,
        layout: Layout,
        whole: Layout | None = None,
        unit: int | None = None,
        *,
        dtype: torch.dtype | None = None,
    ) -> CheckDirection:
        """Random direction scaled to the block, within the range of ``dtype``."""
        scales = block.scales()
        # a zero block has no scales
        largest = (float(scales.max()) if len(scales) else 0.0) or 1.0
        floor = torch.finfo(dtype or layout.tensors[0].dtype).tiny ** 0.5 * largest
        if not bool((scales > floor).all()):
            scales = torch.where(scales > floor, scales, largest)
        generator = torch.Generator().manual_seed(0)
        v = (
            torch.rand(len(scales), generator=generator, dtype=torch.float64, device="cpu")
            .mul_(2)
            .sub_(1)
            .to(scales.device)
        )
        v.div_(scales).mul_(largest)
        whole = layout if whole is None else whole
        return cls(layout, v, scales, unit, torch.zeros_like(v), v.new_zeros(whole.order), whole)


@dataclass
class ReferenceProducts:
    """Derivatives of the unmodified model along `CheckDirection`s, over one batch or a stream.

    Each batch is evaluated once, at differentiable copies of the parameters; each block takes one derivative more.
    """

    model: nn.Module
    loss_fn: LossFunction
    #: parameters by name: those of the directions, and others for which `reached` is wanted
    parameters: Mapping[str, nn.Parameter]
    dtype: torch.dtype | None
    by_products: bool = False  # whether the Hessians are known by products, which contain the rounding of the loss
    keeps_products: bool = False  # whether the products of the first batch are kept, for `noise` and `perturbed`
    #: whether second derivatives are compared with central differences of the gradient, once for each parameter
    differentiates: bool = True
    like: Snapshot | None = None  # snapshot of the same model whose copies may be used
    precision: Precision | None = None  # precision that the first batch was computed in
    reached: set[str] = field(default_factory=set)  # names of the parameters that the loss depended on so far
    loss: float = math.nan

    def __post_init__(self) -> None:
        self._unique = list({id(p): p for p in self.parameters.values()}.values())
        self._place = {id(p): i for i, p in enumerate(self._unique)}
        self._first: tuple[Batch, RandomState] | None = None
        self._products: dict[int, torch.Tensor] = {}
        self._central: dict[int, Difference] = {}
        self._compared: dict[int, tuple[Batch, RandomState]] = {}
        self._functions: set[str] = set()
        self._wrong: Batch | None = None

    @cached_property
    def _snapshot(self) -> Snapshot:
        """Snapshot of the model, taken when it is first evaluated: a capture before that has one of its own."""
        return Snapshot(self.model, self._unique, self.dtype, self.like)

    @property
    def first(self) -> Batch | None:
        """First batch, once it was read."""
        return None if self._first is None else self._first[0]

    def add(self, batch: Batch, directions: Sequence[CheckDirection], weight: float = 1.0) -> None:
        """Add the derivatives of a batch to the directions."""
        used = self._used(directions)
        random = RandomState.now(self._snapshot.devices)
        counted = None
        if self._first is None:
            self._first = batch, random
            counted = Operations(self.dtype)
        evaluation = self._snapshot.evaluate(self.loss_fn, batch, counted=counted)
        if counted is not None:
            self.precision = counted.precision()
        self.loss = float(evaluation.loss.detach())
        variables = variables_of(evaluation.loss)
        leaves = self._snapshot.leaves
        if self.by_products and self.leaf_dtype == torch.float64:
            self._add_cancellation_error(evaluation, directions, weight)
        self.reached |= {name for name, p in self.parameters.items() if id(leaves[self._place[id(p)]]) in variables}
        first = self._gradient(evaluation, used)
        for direction, product, slope in self._derivatives(first, directions):
            if counted is not None and self.keeps_products:
                self._products[id(direction)] = product
            direction.product.add_(product, alpha=weight)
            direction.slope.add_(slope, alpha=weight)
        new = self._not_compared(evaluation, [i for i in used if id(leaves[i]) in variables])
        if new:
            del evaluation
            self._compare((batch, random), new, first)
            wrong = {i for i in new if i in self._central and self._central[i].agrees is False}
            groups = [sorted(wrong & set(self._indices(direction.whole))) for direction in directions]
            if len(groups) > 1 and wrong:
                # a diagonal block of the Hessian may be right, and only the blocks between layers wrong
                for group in filter(None, groups):
                    self._compare((batch, random), group, None)

    def refuse_another(self, other: float, loss: float | None = None) -> None:
        """Raise a CaptureError if the ``other`` loss of the model is not the last one, or a given one."""
        loss, eps = self.loss if loss is None else loss, torch.finfo(self.dtype or torch.float32).eps
        if not math.isclose(other, loss, rel_tol=max(1e-6, UNITS * eps), abs_tol=1e-300) and math.isfinite(other):
            raise CaptureError(
                f"the model gives another loss every time it is run ({other:.6g}, {loss:.6g}): it keeps a state, or "
                "draws random numbers that torch does not know of: keep their generator as an attribute of the model, "
                "or draw from the global one of torch, numpy or Python"
            )

    def _not_compared(self, evaluation: Evaluation, used: Sequence[int]) -> list[int]:
        """Leaves whose second derivatives are not compared yet; all if the batch has new autograd functions."""
        if not self.differentiates:
            return []
        kinds = functions(evaluation.loss)
        if kinds <= self._functions:
            used = [i for i in used if i not in self._central]
        # a straight-through gradient is deliberately not the derivative of the rounding
        if not used or any(node.name().startswith("FakeQuantize") for node in graph.nodes([evaluation.loss.grad_fn])):
            return []
        self._functions |= kinds
        return [i for i in used if i not in self._central or self._central[i].agrees is not False]

    def _compare(
        self,
        data: tuple[Batch, RandomState],
        chosen: Sequence[int],
        first: dict[int, torch.Tensor] | None,
        forward: bool = True,
    ) -> None:
        """Compare the second derivatives of a batch with differences of its gradient, `forward` ones where they do."""
        batch, random = data
        narrowest = None if self.precision is None else self.precision.narrowest
        snapshot = self._snapshot
        if first is None or self.leaf_dtype != torch.float64:
            snapshot, counted = Snapshot(self.model, self._unique, torch.float64), Operations(torch.float64)
            try:
                with random.again():
                    evaluation = snapshot.evaluate(self.loss_fn, batch, counted=counted)
            except (HesscondError, RuntimeError):
                return
            narrowest, first = counted.precision().narrowest, self._gradient(evaluation, chosen, snapshot)
        leaves = [snapshot.leaves[i] for i in chosen]

        def loss_at(point: Sequence[torch.Tensor]) -> torch.Tensor:
            shifted_snapshot = snapshot.at(dict(zip(chosen, point, strict=True)))
            with random.again():
                return shifted_snapshot.evaluate(self.loss_fn, batch).loss

        differences = Differences(loss_at, leaves, torch.finfo(narrowest or torch.float64).eps)
        with graph.differentiable():
            product = linearization.gradients([first[i] for i in chosen], leaves, differences.v)
        gradient = [first[i].detach() for i in chosen]
        first.clear()
        comparisons = differences.compare(gradient, product, forward)
        if self._wrong is None and any(comparison.agrees is False for comparison in comparisons):
            self._wrong = batch
        self._central |= zip(chosen, comparisons, strict=True)
        self._compared |= dict.fromkeys(chosen, data)

    def _first_again(self) -> Evaluation:
        """Evaluate the first batch again, with the same random numbers."""
        assert self._first is not None
        batch, random = self._first
        with random.again():
            return self._snapshot.evaluate(self.loss_fn, batch)

    def _again(
        self, directions: Sequence[CheckDirection], *, enlarged: bool = False
    ) -> Iterator[tuple[CheckDirection, torch.Tensor, torch.Tensor]]:
        """Return `_derivatives` on the first batch."""
        used = self._used(directions)
        first = self._gradient(self._first_again(), used, enlarged=enlarged)
        return self._derivatives(first, directions, enlarged=enlarged)

    def _add_cancellation_error(
        self, evaluation: Evaluation, directions: Sequence[CheckDirection], weight: float
    ) -> None:
        """Add the rounding of cancelled terms in the loss of a batch to the directions' ``cancellation_error``."""
        if second_derivatives.may_cancel(graph.nodes([evaluation.loss.grad_fn])):
            used = self._used(directions)

            def again() -> list[torch.Tensor]:
                first = self._gradient(evaluation, used)
                return [product for _, product, _ in self._derivatives(first, directions)]

            trials = [perturbed(trial << 20, again) for trial in range(2)]
            for direction, vector, other in zip(directions, *trials, strict=True):
                direction.cancellation_error += weight * ratio(
                    4 * norm(vector - other), norm(direction.v) / len(direction.v) ** 0.5
                )
        for direction in directions:
            leaves = [self._snapshot.leaves[i] for i in self._indices(direction.layout)]
            for parts in curved.without_cancellation(evaluation.loss, leaves, below=curved.CANCELLED):
                size = norm(direction.layout.vector_of(parts).to(torch.float64))
                direction.cancellation_error += 4 * weight * float(torch.finfo(torch.float64).eps) * size**2

    def _gradient(
        self, evaluation: Evaluation, chosen: Sequence[int], snapshot: Snapshot | None = None, *, enlarged: bool = False
    ) -> dict[int, torch.Tensor]:
        """Gradient ∇L with its graph, by the index of the leaf; ``enlarged``: from a pass with `enlarged_rounding`."""
        leaves = (snapshot or self._snapshot).leaves
        if not chosen:
            return {}
        with graph.differentiable(), enlarged_rounding([evaluation.loss.grad_fn] if enlarged else [], 0):
            gradients = linearization.gradients([evaluation.loss], [leaves[i] for i in chosen], None, create_graph=True)
        return dict(zip(chosen, gradients, strict=True))

    def _derivatives(
        self, first: Mapping[int, torch.Tensor], directions: Sequence[CheckDirection], *, enlarged: bool = False
    ) -> Iterator[tuple[CheckDirection, torch.Tensor, torch.Tensor]]:
        """Yield H v and ∇L of each direction on one batch, from the gradient with its graph."""
        leaves = self._snapshot.leaves
        with graph.differentiable():
            for direction in directions:
                indices = self._indices(direction.layout)
                parts = direction.layout.tensors_of(direction.v)
                seeds = [part.to(leaves[i].dtype) for i, part in zip(indices, parts, strict=True)]
                with enlarged_rounding([first[i].grad_fn for i in indices] if enlarged else [], 1):
                    second = linearization.gradients([first[i] for i in indices], [leaves[i] for i in indices], seeds)
                slope = direction.whole.vector_of([first[i].detach() for i in self._indices(direction.whole)])
                yield direction, direction.layout.vector_of(second).to(torch.float64), slope.to(torch.float64)

    def _indices(self, layout: Layout) -> list[int]:
        return [self._place[id(p)] for p in layout.tensors]

    def _used(self, directions: Sequence[CheckDirection]) -> list[int]:
        """Indices of the leaves that the gradient of some directions is taken in."""
        return sorted({i for direction in directions for i in self._indices(direction.whole)})

    def verdict(self, direction: CheckDirection, block: BlockHessian, total: float = 1.0) -> Check:
        """Check of a block over all batches added, in plain and its own coordinates; ``total`` divides the weights."""
        built = block.plain.product(direction.v[:, None])[:, 0]
        product = direction.product if total == 1 else direction.product / total
        scaled, apart = norm(built / direction.scales), norm((built - product) / direction.scales)
        if apart <= BELOW * float(direction.scales @ direction.v.abs()) and bool(built.any()):
            # scales that are much larger than H describe its round-off
            apart = 0.0
        if not apart <= 0.1 * scaled:
            scaled = max(scaled, norm(product / direction.scales))
        slopes = slopes_differ(direction)
        difference = max(ratio(apart, scaled), slopes, in_coordinates(block, direction))
        narrowest = None if self.precision is None else self.precision.narrowest
        eps = max(float(torch.finfo(dtype).eps) for dtype in (self.leaf_dtype, narrowest or self.leaf_dtype))
        bound, zero = max(TOLERANCE, min(UNITS * eps, COARSE)), False
        if not difference <= bound and math.isfinite(difference):
            rounding, natural = self.rounding(direction)
            bound = max(bound, ratio(MARGIN * (rounding + natural), scaled))
            zero = (
                ROUNDED * rounding >= scaled
                and not self.may_hide_curvature([direction])
                and not self._is_nonzero(direction, None)
            )
        forms = (float(built @ direction.v), float(product @ direction.v))
        central = worst(self._central[i] for i in self._indices(direction.layout) if i in self._central)
        wrong = central is not None and central.agrees is False
        culprit = self._culprit if wrong else ""
        return Check(difference, bound, *forms, slopes, direction.unit, central, culprit, zero)

    @cached_property
    def _culprit(self) -> str:
        assert self._wrong is not None
        return Culprit(self.model, self.loss_fn, self._wrong).sentence()

    @property
    def leaf_dtype(self) -> torch.dtype:
        """Dtype of the leaves that the loss is differentiated in."""
        return self._snapshot.leaves[0].dtype if self._snapshot.leaves else torch.float64

    def rounding(self, direction: CheckDirection) -> tuple[float, float]:
        """Two estimates of the rounding in the model's product on the first batch, in the direction's units."""
        leaves, eps = self._snapshot.leaves, float(torch.finfo(self.leaf_dtype).eps)
        evaluation = self._first_again()
        natural = eps * uncancelled(evaluation, leaves, self._indices(direction.layout), direction)
        (terms,) = self.terms([direction])
        return self.perturbed(direction, 4 * eps) + eps * norm(terms / direction.scales), natural

    def terms(self, directions: Sequence[CheckDirection]) -> list[torch.Tensor]:
        """Sizes of the terms (`size_of_terms`) of each direction's product on the first batch."""
        plain = [product for _, product, _ in self._again(directions)]
        changed = self._again(directions, enlarged=True)
        return [size_of_terms(product, before, before) for before, (_, product, _) in zip(plain, changed, strict=True)]

    def _is_nonzero(self, direction: CheckDirection, rows: torch.Tensor | None) -> bool:
        """Whether central differences of the gradient are more than rounding in some rows (None: in any)."""
        masks: list[torch.Tensor] = []
        for i, shape in zip(self._indices(direction.layout), direction.layout.shapes, strict=True):
            difference = self._central.get(i)
            if difference is not None and difference.forward:
                data = self._compared[i]
                self._compare(data, [j for j, pair in self._compared.items() if pair is data], None, forward=False)
                difference = self._central[i]
            # what could not be compared again may be nonzero
            unknown = difference is not None and difference.forward
            none = torch.full(shape, unknown, dtype=torch.bool, device=direction.v.device)
            masks.append(none if difference is None or difference.nonzero is None else difference.nonzero.view(shape))
        nonzero = direction.layout.vector_of(masks)
        return bool((nonzero if rows is None else nonzero[rows]).any())

    def may_hide_curvature(self, directions: Sequence[CheckDirection]) -> bool:
        """Whether saturated functions on the first batch may hide second derivatives below their rounding."""
        loss = self._first_again().loss
        indices = {i for direction in directions for i in self._indices(direction.layout)}
        leaves = [self._snapshot.leaves[i] for i in sorted(indices)]
        lost = second_derivatives.saturates(graph.nodes([loss.grad_fn]))
        return bool(lost) or any(True for _ in curved.without_cancellation(loss, leaves, below=curved.CANCELLED))

    def perturbed(self, direction: CheckDirection, size: float) -> float:
        """Sensitivity of H v on the first batch to relative perturbations up to ``size`` of parameters and v."""
        before = self._products.get(id(direction))
        if before is None:
            ((_, before, _),) = self._again([direction])
        aside = replace(direction, v=direction.v * nudges(direction.v, size, 4))
        with self._nudged(size):
            ((_, product, _),) = self._again([aside])
        return norm((product - before) / direction.scales)

    def noise(self, directions: Sequence[CheckDirection], draws: int = 1) -> list[torch.Tensor]:
        """Largest changes of the entries of each H v in some draws of perturbations of the size of rounding."""
        eps = 4 * float(torch.finfo(self.leaf_dtype).eps)
        before = [self._products[id(direction)] for direction in directions]
        changes = [torch.zeros_like(vector) for vector in before]
        for draw in range(draws):
            nudged_directions = [replace(old, v=old.v * nudges(old.v, eps, 4 + 1000 * draw)) for old in directions]
            with self._nudged(eps, draw):
                for most, vector, (_, product, _) in zip(changes, before, self._again(nudged_directions), strict=True):
                    torch.maximum(most, (product - vector).abs(), out=most)
        if draws > 1:
            for most, terms in zip(changes, self.terms(directions), strict=True):
                torch.maximum(most, eps * terms, out=most)
        return changes

    def zero_tests(
        self, directions: Sequence[CheckDirection], noise: Sequence[torch.Tensor], total: float
    ) -> list[Callable[[torch.Tensor | None], bool | None]]:
        """Tests, one for each direction, of whether the Hessian is zero in some rows of its block (None: in all).

        A test returns None if the product exceeds its rounding ``noise``, and False if it does not but may hide a
        nonzero Hessian.
        """
        products = [direction.product / total for direction in directions]
        point = [
            direction.layout.vector_of([self._snapshot.leaves[i].detach() for i in self._indices(direction.layout)])
            for direction in directions
        ]
        if any(
            doubtful(product, rounding) or not is_far(product, direction.v, at, self.loss, direction.slope / total)
            for direction, product, rounding, at in zip(directions, products, noise, point, strict=True)
        ):
            noise = self.noise(directions, DRAWS)
        hidden = cache(partial(self.may_hide_curvature, directions))

        def is_zero(
            direction: CheckDirection, product: torch.Tensor, noise: torch.Tensor, rows: torch.Tensor | None
        ) -> Any:
            at: Any = slice(None) if rows is None else rows
            # a parameter with large terms must not hide the curvature in another one
            shapes = enumerate(direction.layout.shapes)
            place = direction.layout.vector_of([product.new_full(shape, number) for number, shape in shapes])[at]
            for number in place.unique():
                if norm(product[at][place == number]) > ROUNDED * norm(noise[at][place == number]):
                    return None
            return not hidden() and not self._is_nonzero(direction, rows)

        return [partial(is_zero, *arguments) for arguments in zip(directions, products, noise, strict=True)]

    def uncertainty(self, direction: CheckDirection) -> float:
        """Uncertainty ε from operations below float64: entry (i, j) of H is known to ε d_i d_j, with scales d."""
        if self.precision is None:
            return 0.0
        narrowest = self.precision.narrowest or self.precision.dtype
        if narrowest is torch.float64:
            return 0.0
        length, eps = norm(direction.v * direction.scales) / len(direction.v) ** 0.5, float(torch.finfo(narrowest).eps)
        # a rounded number, as a quantized weight, absorbs a perturbation, and not the rounding of what follows
        return max(eps, ratio(4 * self.perturbed(direction, eps), length))

    @contextmanager
    def _nudged(self, size: float, draw: int = 0) -> Iterator[None]:
        """Context in which every leaf is changed by random relative amounts up to ``size``."""
        before = [leaf.detach().clone() for leaf in self._snapshot.leaves]
        for number, leaf in enumerate(self._snapshot.leaves):
            leaf.data.mul_(nudges(leaf, size, 5 + number + 1000 * draw))
        try:
            yield
        finally:
            for leaf, value in zip(self._snapshot.leaves, before, strict=True):
                leaf.data.copy_(value)


def check_operator(H: HessianOperator) -> tuple[Check, float, Precision | None]:
    """Check of an operator along one direction, its uncertainty, and the precision of the model."""
    reference, (direction,) = reference_of(H, [H], keeps_products=H.dtype != torch.float64)
    uncertainty = max(reference.uncertainty(direction), direction.cancellation_error / H.total_mass)
    return reference.verdict(direction, as_block(H), H.total_mass), uncertainty, reference.precision


def uncertain(precision: Precision | None) -> causes.Cause:
    """Cause of the uncertainty of a Hessian: the precision of the forward pass, or cancellation in the loss."""
    if precision is None or (precision.narrowest or precision.dtype) is torch.float64:
        return causes.DIFFERENCES
    return causes.imprecise(str(precision))


def rounding_of(H: HessianOperator) -> bool | None:
    """Whether the Hessian of an operator is zero by `ReferenceProducts.zero_tests`; None if it clearly is not."""
    v = CheckDirection.of(as_block(H), H.layout, dtype=H.dtype).v.to(H.point)
    if is_far(H @ v, v, H.point, H.loss, H.gradient):
        return None
    reference, directions = reference_of(H, [H], keeps_products=True)
    return reference.zero_tests(directions, reference.noise(directions), H.total_mass)[0](None)


def is_flat(H: HessianOperator) -> bool:
    """Whether the gradient is no larger than the rounding of the loss."""
    return norm(H.gradient) * norm(H.point) <= ROUNDED * float(torch.finfo(H.dtype).eps) * abs(H.loss)


def reference_of(
    H: HessianOperator, parts: Sequence[HessianOperator], *, keeps_products: bool = False
) -> tuple[ReferenceProducts, list[CheckDirection]]:
    """Reference products of an operator's model over its data, and one direction for each of its parts."""
    problem = H.problem
    named = dict(zip(H.names, H.layout.tensors, strict=True))
    given = problem.model, problem.loss_fn, named, problem.dtype
    reference = ReferenceProducts(*given, by_products=True, keeps_products=keeps_products, like=problem.snapshot)
    directions = [CheckDirection.of(as_block(part), part.layout, dtype=part.dtype) for part in parts]
    loss = 0.0
    for drawn, weight in problem.counted():
        with drawn.state.again():
            reference.add(drawn.batch, directions, weight)
        loss += weight * reference.loss
    reference.refuse_another(H.loss, loss / H.total_mass)
    return reference, directions


def as_block(H: HessianOperator) -> NetworkHessian:
    """Block of an operator, without null directions or a preconditioner."""
    return NetworkHessian(H, SolverLimits(memory=H.problem.memory))


def most_curved(capture: captured.LayerCapture) -> int:
    """Unit with the largest curvature, whose product is most informative."""
    curvature = capture.curvature
    if isinstance(curvature, captured.DiagonalS):
        sizes = curvature.root.square().sum(0)
    elif isinstance(curvature, captured.FactoredS):
        sizes = curvature.B.square().sum((0, 1, 3))
    else:
        sizes = curvature.matrices.square().sum((1, 2))
    return capture.units[int(sizes.argmax())]


def refuse_failed(name: str, check: Check, why: str = DISAGREES) -> None:
    """Raise a CaptureError for a check that failed, a NoDerivativeError if second derivatives are wrong."""
    if check.passed:
        return
    if check.contradicted:
        assert check.central is not None
        gap = check.central
        differs = (
            f"vᵀHv is {gap.double:.6g} by double backward and {gap.central:.6g} by central differences of the gradient"
        )
        if math.isclose(gap.double, gap.central, rel_tol=1e-3):
            differs = f"Hv by double backward differs by {gap.relative:.1e} of its norm from central differences of it"
        raise NoDerivativeError(
            f"the second derivatives of the model in layer {name!r} are not those of its gradient: {differs}"
            + (f"; they are wrong in {check.culprit}" if check.culprit else "")
            + ": an intermediate that overflows does this, or an autograd.Function whose backward keeps one, makes no "
            "graph, or is not the derivative of its forward; let its backward compute that from its saved inputs by "
            "operations of torch"
        )
    if check.slopes > check.bound:
        differs = f"the gradients differ by {check.slopes:.1e} of the terms of an entry"
    elif math.isclose(check.built, check.own, rel_tol=1e-3):
        differs = (
            f"the computed Hv and that of the model's own double backward differ by {check.difference:.1e} of its norm"
        )
    else:
        differs = (
            f"vᵀHv is {check.built:.6g} as computed and {check.own:.6g} by the model's own double backward "
            f"(relative difference {check.difference:.1e})"
        )
    raise CaptureError(
        f"the Hessian of layer {name!r} does not agree with the model itself: {differs}, where rounding explains "
        f"{check.bound:.1e}: {why}"
    )


def nudges(like: torch.Tensor, size: float, seed: int) -> torch.Tensor:
    """Random factors for every entry of a tensor, which differ from 1 by at most ``size``."""
    uniform = torch.rand(like.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64, device="cpu")
    return (1 + size * (2 * uniform - 1)).to(like)


def uncancelled(
    evaluation: Evaluation, leaves: Sequence[torch.Tensor], indices: Sequence[int], direction: CheckDirection
) -> float:
    """Size of H v, in the direction's units, if nothing in the loss's curvature cancelled."""
    tensors = [leaves[i] for i in indices]
    vectors = map(direction.layout.vector_of, curved.without_cancellation(evaluation.loss, tensors))
    return sum(norm(w / direction.scales) * norm(w * direction.v) for w in (w.to(torch.float64) for w in vectors))


def doubtful(product: torch.Tensor, noise: torch.Tensor) -> bool:
    """Whether entries of a product may be only rounding, which a single draw may not show."""
    size = product.abs()
    few = torch.maximum(ROUNDED * noise, SMALL * size.max())
    return len(size) <= DRAWS or bool(((size > 0) & (size <= few)).any())


def is_far(product: torch.Tensor, v: torch.Tensor, point: torch.Tensor, loss: float, gradient: torch.Tensor) -> bool:
    """Whether a product is far above the rounding of the loss and the gradient, for parameters of their size."""
    scale = norm(point)
    return norm(product) * scale**2 > FAR * norm(v) * max(abs(loss), norm(gradient) * scale)


def slopes_differ(direction: CheckDirection) -> float:
    """Largest difference of the two gradients, each entry relative to the terms that it is the sum of."""
    if direction.own_slope is None or direction.squares is None:
        return 0.0
    units, inputs = (squares.sqrt() for squares in direction.squares)
    if not (float(units.max()) and float(inputs.max())):
        return ratio(float((direction.slope - direction.own_slope).abs().max()), 0.0)
    # an entry whose terms are zero may differ by underflow
    units, inputs = (sizes.clamp(min=float(sizes.max()) * LEAST) for sizes in (units, inputs))
    by_group = (direction.slope - direction.own_slope).view(len(inputs), -1, inputs.shape[1]).abs_()
    return float(by_group.div_(units.view(len(inputs), -1, 1)).div_(inputs[:, None]).max())


def in_coordinates(block: BlockHessian, direction: CheckDirection) -> float:
    """Relative difference of the block's PᵀHP z and Pᵀ(H(P z)) for a random z; 0 if rounding explains it."""
    P = block.P
    if P is None:
        return 0.0
    units, order = block.units, len(direction.v) // block.units
    change = UnitCoordinates(P, range(units), order, device=direction.v.device)
    generator = torch.Generator().manual_seed(3)
    z = torch.randn(change.shape[1], 1, generator=generator, dtype=torch.float64, device="cpu").to(direction.v.device)
    built = block.product(z)
    composed = change.multiply_adjoint(block.plain.product(change.multiply(z)))
    difference = ratio(norm(built - composed), max(norm(built), norm(composed)))
    if not difference > TOLERANCE:
        return difference
    # centring cancels large terms of H
    carried = P.carried(direction.scales[None], units)[0]
    eps = float(torch.finfo(torch.float64).eps)
    rounding = MARGIN * eps * order**0.5 * norm(carried) * float(carried @ z[:, 0].abs())
    return 0.0 if norm(built - composed) <= rounding else difference


def agrees(block: BlockHessian, direction: CheckDirection) -> bool:
    """Whether the block in its coordinates is PᵀHP."""
    return not in_coordinates(block, direction) > TOLERANCE


def norm(vector: torch.Tensor) -> float:
    """Norm ‖x‖₂, also where the squares would leave the range of doubles."""
    plain = float(vector.norm())
    if 1e-140 < plain < 1e140 or vector.numel() == 0:
        return plain
    largest = float(vector.abs().max())
    return largest * float((vector / largest).norm()) if 0 < largest < math.inf else largest


def ratio(part: float, whole: float) -> float:
    """Quotient part / whole; 0 if both are 0, infinite if only the whole is 0."""
    return part / whole if whole else (0.0 if part == 0 else math.inf)
