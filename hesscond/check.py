"""Every answer against the model itself: what was built, and the model's own double backward, along one direction."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache, cached_property, partial
from typing import Any

import torch
from torch import nn
from torch.nn.utils import parametrize

from hesscond.capture import Batch, Diagonal, Factor, Layer, LayerCapture, LossFunction
from hesscond.capture.backward import enlarged_rounding, size_of_terms
from hesscond.capture.capturing import Slopes
from hesscond.capture.curved import CANCELLED, without_cancellation
from hesscond.capture.evaluation import Evaluation
from hesscond.capture.forward import variables_of
from hesscond.capture.graph import nodes
from hesscond.capture.layers import weight_shape
from hesscond.capture.precision import Operations, Perturbed, Precision
from hesscond.capture.randomness import RandomState
from hesscond.capture.second_derivatives import may_cancel, saturates
from hesscond.capture.snapshot import Snapshot
from hesscond.causes import DIFFERENCES, Cause, imprecise
from hesscond.differences import Culprit, Difference, Differences, functions, worst
from hesscond.errors import CaptureError, HesscondError
from hesscond.hessians import BlockHessian, HessianOperator, NetworkHessian, UnitCoordinates
from hesscond.hessians.linearization import differentiable, gradients
from hesscond.hessians.parameters import Layout, parameters_of
from hesscond.spectra import Effort, Known

#: Relative differences that need no explanation, in float64; rounding is far below in ordinary networks.
TOLERANCE = 1e-8
#: The same in a precision with round-off eps, in units of it.
UNITS = 1e3
#: Terms of a gradient are no smaller than that beside the largest, in either factor.
LEAST = float(torch.finfo(torch.float64).tiny) ** 0.25
#: What rounding is measured to do is taken so many times.
MARGIN = 256.0
#: A product no more than so many times what rounding changes in it is rounding; draws that tell.
ROUNDED, DRAWS = 64.0, 3
#: Relative to products of scales, round-off of what was built: see `hesscond.hessians.coordinates.LOST_IN_SQUARE`.
BELOW = 1e-9
#: Entries of a product that are smaller beside the largest may be rounding; a Hessian larger than that is none.
SMALL, FAR = 1e-9, 1e-3


@dataclass(frozen=True)
class Check:
    """How far an answer is from the model's own second derivatives.

    With a random direction v the product of the Hessian that was built is compared with the one that double backward
    gives through the model as it is written, in the parameters' own tensors; so are the gradients, over all units. Both
    are scaled so that small features count as much as large ones.

    Attributes
    ----------
    difference
        The largest relative difference of the two.
    bound
        What rounding explains of it: 1e-8 in float64, or more where the rounding of the model's own product was
        measured and is larger. From 1 on the model's product is rounding only, and tells nothing.
    built, own
        vᵀHv of the Hessian that was built, and by the model's own double backward.
    slopes
        The part of the difference that is in the gradients.
    unit
        The unit whose Hessian was multiplied; None: all of the layer, or of the network.
    central
        Comparison of the model's own double backward with central differences of its gradient, on the first batch in
        which the loss depends on the parameters; None: it was not made.
    culprit
        The module, or the loss, whose second derivatives are not those of its gradient, if there is one and it was
        found.
    zero
        Whether the products are no more than what rounding makes of the model's own: the Hessian is zero to it.
    """

    difference: float
    bound: float
    built: float
    own: float
    slopes: float = 0.0
    unit: int | None = None
    central: Difference | None = None
    culprit: str = ""
    zero: bool = False

    @property
    def passed(self) -> bool:
        """Whether the difference is explained, and the double backward is the derivative of the gradient."""
        return self.difference <= self.bound and not self.contradicted

    @property
    def contradicted(self) -> bool:
        """Whether the model's second derivatives are not those of its gradient."""
        return self.central is not None and self.central.agrees is False

    def __str__(self) -> str:
        if self.bound >= 1:
            return "the model's own double backward is round-off here, and tells nothing"
        own = f"{self.difference:.0e} from the model's own double backward (bound {self.bound:.0e})"
        return own + (f"; {self.against}" if self.central is not None else "")

    @property
    def against(self) -> str:
        """The comparison with central differences, in words; empty if it was not made."""
        if self.central is None:
            return ""
        if self.central.agrees is None:
            return "central differences of the gradient are round-off or kinks: they tell nothing"
        return f"double backward is {self.central.relative:.0e} from central differences of the gradient"


@dataclass
class Direction:
    """A direction in the parameters of one block, and what the model makes of it.

    Attributes
    ----------
    layout
        How the block's parameters lie in vectors.
    v : (n,) float64
        The direction.
    scales : (n,)
        What products are compared in units of: v is random divided by them.
    unit
        Whose block it is.
    product, slope : (n,)
        H v and ∇L of the batches so far, each times its weight.
    whole
        How the parameters of the gradient lie: those of all units.
    own_slope
        The gradient as the capture has it, likewise; None: there is none to compare.
    squares : (u,), (G, n̂)
        Σδ² of each unit and Σĥ² of each input of the batches so far: what the entries of the gradient are made of.
    lost
        Bound of what rounding does to H, in the 2-norm, where its terms are differences of larger ones: softmax and its
        like compute p − p² to eps of p, whatever is left.
    """

    layout: Layout
    v: torch.Tensor
    scales: torch.Tensor
    unit: int | None
    product: torch.Tensor
    slope: torch.Tensor
    whole: Layout
    own_slope: torch.Tensor | None = None
    squares: tuple[torch.Tensor, torch.Tensor] | None = None
    lost: float = 0.0

    def add_slopes(self, slopes: Slopes, weight: float = 1.0) -> None:
        """Add the gradient of a batch as the capture has it."""
        own = slopes.gradient.flatten()
        units, inputs = weight**2 * slopes.units, slopes.inputs
        if self.own_slope is None or self.squares is None:
            self.own_slope, self.squares = own if weight == 1 else weight * own, (units, inputs)
            return
        self.own_slope = self.own_slope.add(own, alpha=weight)
        self.squares = self.squares[0] + units, self.squares[1] + inputs

    def count(self, weight: float) -> None:
        """Let what was added count that much."""
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
    ) -> Direction:
        """A random one, scaled as the block is, in numbers of ``dtype``: that of the model if None."""
        scales = block.scales()
        # of a block that is zero nothing is known
        largest = (float(scales.max()) if len(scales) else 0.0) or 1.0
        floor = torch.finfo(dtype or layout.tensors[0].dtype).tiny ** 0.5 * largest
        if not bool((scales > floor).all()):
            scales = torch.where(scales > floor, scales, largest)
        generator = torch.Generator().manual_seed(0)
        v = torch.rand(len(scales), generator=generator, dtype=torch.float64).mul_(2).sub_(1).to(scales.device)
        v.div_(scales).mul_(largest)
        whole = layout if whole is None else whole
        return cls(layout, v, scales, unit, torch.zeros_like(v), v.new_zeros(whole.order), whole)


@dataclass
class Witness:
    """The model's own derivatives along `Direction`s, over one batch or a stream, without hooks and assumptions.

    Each batch is evaluated once with all parameters concerned in the place of the model's own; a block takes one
    derivative of its gradient.

    Attributes
    ----------
    model, loss_fn, dtype, lift_casts
        As in `hesscond.probe`.
    by_products
        Whether the Hessians are known by products, which the rounding of the loss is in.
    keeps_products
        Whether those of the first batch are kept, for `noise` and `shaken`.
    parameters
        By name, all that the directions are in, and others of which `reached` is wanted.
    differentiates
        Whether second derivatives are compared with central differences of the gradient, once for each parameter.
    precision
        What the first batch was computed in.
    reached
        Names of those that the loss depended on so far.
    loss
        Of the latest batch.
    """

    model: nn.Module
    loss_fn: LossFunction
    parameters: Mapping[str, nn.Parameter]
    dtype: torch.dtype | None
    lift_casts: bool
    by_products: bool = False
    keeps_products: bool = False
    differentiates: bool = True
    precision: Precision | None = None
    reached: set[str] = field(default_factory=set)
    loss: float = math.nan

    def __post_init__(self) -> None:
        self._unique = list({id(p): p for p in self.parameters.values()}.values())
        self._place = {id(p): i for i, p in enumerate(self._unique)}
        self._snapshot = Snapshot(self.model, self._unique, self.dtype, lift_casts=self.lift_casts)
        self._first: tuple[Batch, RandomState] | None = None
        self._products: dict[int, torch.Tensor] = {}
        self._central: dict[int, Difference] = {}
        self._functions: set[str] = set()
        self._wrong: Batch | None = None

    def add(self, batch: Batch, directions: Sequence[Direction], weight: float = 1.0) -> None:
        """Add the derivatives of a batch to the directions."""
        used = sorted({i for direction in directions for i in self._indices(direction.whole)})
        random = RandomState.now(self._snapshot.gpus)
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
            self._add_lost(evaluation, directions, weight)
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
            self._compare(batch, random, new, first)
            wrong = {i for i in new if i in self._central and self._central[i].agrees is False}
            groups = [sorted(wrong & set(self._indices(direction.whole))) for direction in directions]
            if len(groups) > 1 and wrong:
                # a block of the Hessian may be right, and only those to other layers wrong
                for group in filter(None, groups):
                    self._compare(batch, random, group, None)

    def _not_compared(self, evaluation: Evaluation, used: Sequence[int]) -> list[int]:
        """The leaves of which second derivatives are still to be compared: all, where a batch has other functions."""
        if not self.differentiates:
            return []
        kinds = functions(evaluation.loss)
        if kinds <= self._functions:
            used = [i for i in used if i not in self._central]
        # a straight-through gradient is not the derivative of what is rounded, on purpose
        if not used or any(node.name().startswith("FakeQuantize") for node in nodes([evaluation.loss.grad_fn])):
            return []
        self._functions |= kinds
        return [i for i in used if i not in self._central or self._central[i].agrees is not False]

    def _compare(
        self, batch: Batch, random: RandomState, chosen: Sequence[int], first: dict[int, torch.Tensor] | None
    ) -> None:
        """Compare the second derivatives of a batch with central differences of its gradient ``first``, if it is known.

        In float64 if the model runs in it, whatever it is probed in: wider steps are full of kinks.
        """
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
            moved = snapshot.at(dict(zip(chosen, point, strict=True)))
            with random.again():
                return moved.evaluate(self.loss_fn, batch).loss

        differences = Differences(loss_at, leaves, torch.finfo(narrowest or torch.float64).eps)
        with differentiable():
            product = gradients([first[i] for i in chosen], leaves, differences.v)
        gradient = [first[i].detach() for i in chosen]
        first.clear()
        found = differences.compare(gradient, product)
        if self._wrong is None and any(one.agrees is False for one in found):
            self._wrong = batch
        self._central |= zip(chosen, found, strict=True)

    def _first_again(self) -> Evaluation:
        """The first batch, with the random numbers that it had."""
        assert self._first is not None
        batch, random = self._first
        with random.again():
            return self._snapshot.evaluate(self.loss_fn, batch)

    def _again(
        self, directions: Sequence[Direction], *, enlarged: bool = False
    ) -> Iterator[tuple[Direction, torch.Tensor, torch.Tensor]]:
        """`_derivatives` on the first batch."""
        used = sorted({i for direction in directions for i in self._indices(direction.whole)})
        first = self._gradient(self._first_again(), used, enlarged=enlarged)
        return self._derivatives(first, directions, enlarged=enlarged)

    def _add_lost(self, evaluation: Evaluation, directions: Sequence[Direction], weight: float) -> None:
        """Add what cancels in the loss of a batch to the directions, and what rounding changes of the products."""
        if may_cancel(nodes([evaluation.loss.grad_fn])):
            trials, used = [], sorted({i for direction in directions for i in self._indices(direction.whole)})
            for trial in range(2):
                with Perturbed(trial << 20):
                    first = self._gradient(evaluation, used)
                    trials.append([product for _, product, _ in self._derivatives(first, directions)])
            for direction, one, other in zip(directions, *trials, strict=True):
                direction.lost += weight * ratio(4 * norm(one - other), norm(direction.v) / len(direction.v) ** 0.5)
        for direction in directions:
            own = [self._snapshot.leaves[i] for i in self._indices(direction.layout)]
            for parts in without_cancellation(evaluation.loss, own, below=CANCELLED):
                size = norm(direction.layout.vector_of(parts).to(torch.float64))
                direction.lost += 4 * weight * float(torch.finfo(torch.float64).eps) * size**2

    def _gradient(
        self, evaluation: Evaluation, chosen: Sequence[int], snapshot: Snapshot | None = None, *, enlarged: bool = False
    ) -> dict[int, torch.Tensor]:
        """∇L on its graph, by the index of the leaf; ``enlarged``: by a pass with `enlarged_rounding`."""
        leaves = (snapshot or self._snapshot).leaves
        if not chosen:
            return {}
        with differentiable(), enlarged_rounding([evaluation.loss.grad_fn] if enlarged else [], 0):
            found = gradients([evaluation.loss], [leaves[i] for i in chosen], None, create_graph=True)
        return dict(zip(chosen, found, strict=True))

    def _derivatives(
        self, first: Mapping[int, torch.Tensor], directions: Sequence[Direction], *, enlarged: bool = False
    ) -> Iterator[tuple[Direction, torch.Tensor, torch.Tensor]]:
        """H v and ∇L of each direction on one batch, from the gradient with its graph."""
        leaves = self._snapshot.leaves
        with differentiable():
            for direction in directions:
                own = self._indices(direction.layout)
                parts = direction.layout.tensors_of(direction.v)
                seeds = [part.to(leaves[i].dtype) for i, part in zip(own, parts, strict=True)]
                with enlarged_rounding([first[i].grad_fn for i in own] if enlarged else [], 1):
                    second = gradients([first[i] for i in own], [leaves[i] for i in own], seeds)
                slope = direction.whole.vector_of([first[i].detach() for i in self._indices(direction.whole)])
                yield direction, direction.layout.vector_of(second).to(torch.float64), slope.to(torch.float64)

    def _indices(self, layout: Layout) -> list[int]:
        return [self._place[id(p)] for p in layout.tensors]

    def verdict(self, direction: Direction, block: BlockHessian, total: float = 1.0) -> Check:
        """The check of a block, in plain coordinates and in its own, over all that was added.

        Parameters
        ----------
        direction
            One that was given to `add`.
        block
            What was built.
        total
            What the weights are divided by.
        """
        built = block.plain.product(direction.v[:, None])[:, 0]
        own = direction.product if total == 1 else direction.product / total
        scaled, apart = norm(built / direction.scales), norm((built - own) / direction.scales)
        if apart <= BELOW * float(direction.scales @ direction.v.abs()) and bool(built.any()):
            # scales that are larger than H by far are those of its round-off
            apart = 0.0
        if not apart <= 0.1 * scaled:
            scaled = max(scaled, norm(own / direction.scales))
        slopes = slopes_differ(direction)
        difference = max(ratio(apart, scaled), slopes, in_coordinates(block, direction))
        bound, zero = max(TOLERANCE, UNITS * float(torch.finfo(self.leaf_dtype).eps)), False
        if not difference <= bound and math.isfinite(difference):
            rounding, natural = self.rounding(direction)
            bound = max(bound, ratio(MARGIN * (rounding + natural), scaled))
            zero = (
                ROUNDED * rounding >= scaled and not self.hides([direction]) and not self._is_nonzero(direction, None)
            )
        forms = (float(built @ direction.v), float(own @ direction.v))
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
        """What is differentiated in."""
        return self._snapshot.leaves[0].dtype if self._snapshot.leaves else torch.float64

    def rounding(self, direction: Direction) -> tuple[float, float]:
        """The rounding of the model's own product on the first batch, in the direction's units.

        By the product at parameters that differ in their last digits and by its terms; and by eps times what the loss's
        curvature would be if nothing in it cancelled (softmax in saturation is 1 − 1).
        """
        leaves, eps = self._snapshot.leaves, float(torch.finfo(self.leaf_dtype).eps)
        evaluation = self._first_again()
        natural = eps * uncancelled(evaluation, leaves, self._indices(direction.layout), direction)
        (terms,) = self.terms([direction])
        return self.shaken(direction, 4 * eps) + eps * norm(terms / direction.scales), natural

    def terms(self, directions: Sequence[Direction]) -> list[torch.Tensor]:
        """Of each direction, the sizes of the terms of its product on the first batch: see `size_of_terms`."""
        plain = [product for _, product, _ in self._again(directions)]
        changed = self._again(directions, enlarged=True)
        return [size_of_terms(product, own, own) for own, (_, product, _) in zip(plain, changed, strict=True)]

    def _is_nonzero(self, direction: Direction, rows: torch.Tensor | None) -> bool:
        """Whether central differences of the gradient are more than rounding in some rows (None: in any)."""
        found: list[torch.Tensor] = []
        for i, shape in zip(self._indices(direction.layout), direction.layout.shapes, strict=True):
            one = self._central.get(i)
            none = torch.zeros(shape, dtype=torch.bool, device=direction.v.device)
            found.append(none if one is None or one.nonzero is None else one.nonzero.view(shape))
        seen = direction.layout.vector_of(found)
        return bool((seen if rows is None else seen[rows]).any())

    def hides(self, directions: Sequence[Direction]) -> bool:
        """Whether functions are saturated on the first batch, so that second derivatives may be lost in rounding."""
        loss = self._first_again().loss
        indices = {i for direction in directions for i in self._indices(direction.layout)}
        own = [self._snapshot.leaves[i] for i in sorted(indices)]
        lost = saturates(nodes([loss.grad_fn]))
        return bool(lost) or any(True for _ in without_cancellation(loss, own, below=CANCELLED))

    def shaken(self, direction: Direction, size: float) -> float:
        """How much the product on the first batch changes, in the direction's units, if all it is made of changes.

        Parameters and direction do by random relative amounts up to ``size``: that of the rounding in what computes it.
        """
        before = self._products.get(id(direction))
        if before is None:
            ((_, before, _),) = self._again([direction])
        aside = replace(direction, v=direction.v * nudges(direction.v, size, 4))
        with self._nudged(size):
            ((_, product, _),) = self._again([aside])
        return norm((product - before) / direction.scales)

    def noise(self, directions: Sequence[Direction], draws: int = 1) -> list[torch.Tensor]:
        """Of each direction, how much the entries of its product change if all it is made of changes by rounding.

        The largest of some draws on the first batch, and no smaller beside the product than there; with several the
        terms of the product count too, since rounding may be the same in every draw. The directions are those given to
        `add`, whose products were kept.
        """
        eps = 4 * float(torch.finfo(self.leaf_dtype).eps)
        before = [self._products[id(direction)] for direction in directions]
        found = [torch.zeros_like(own) for own in before]
        for draw in range(draws):
            shaken = [replace(own, v=own.v * nudges(own.v, eps, 4 + 1000 * draw)) for own in directions]
            with self._nudged(eps, draw):
                for most, own, (_, product, _) in zip(found, before, self._again(shaken), strict=True):
                    torch.maximum(most, (product - own).abs(), out=most)
        if draws > 1:
            for most, terms in zip(found, self.terms(directions), strict=True):
                torch.maximum(most, eps * terms, out=most)
        return found

    def rounded(
        self, directions: Sequence[Direction], noise: Sequence[torch.Tensor], total: float
    ) -> list[Callable[[torch.Tensor | None], bool | None]]:
        """Of each direction, a function of some rows of its block (None: of all): whether their Hessian is zero.

        None: it is more than the rounding of its product is by ``noise``. False: it is not, and may be hidden by it.
        """
        products = [direction.product / total for direction in directions]
        point = [
            own.layout.vector_of([self._snapshot.leaves[i].detach() for i in self._indices(own.layout)])
            for own in directions
        ]
        if any(
            doubtful(product, own) or not is_far(product, direction.v, at, self.loss, direction.slope / total)
            for direction, product, own, at in zip(directions, products, noise, point, strict=True)
        ):
            noise = self.noise(directions, DRAWS)
        hidden = cache(partial(self.hides, directions))

        def told(direction: Direction, product: torch.Tensor, noise: torch.Tensor, rows: torch.Tensor | None) -> Any:
            at: Any = slice(None) if rows is None else rows
            # a parameter of large terms must not hide the curvature in another
            shapes = enumerate(direction.layout.shapes)
            place = direction.layout.vector_of([product.new_full(shape, number) for number, shape in shapes])[at]
            for number in place.unique():
                if norm(product[at][place == number]) > ROUNDED * norm(noise[at][place == number]):
                    return None
            return not hidden() and not self._is_nonzero(direction, rows)

        return [partial(told, *own) for own in zip(directions, products, noise, strict=True)]

    def uncertainty(self, direction: Direction) -> float:
        """ε such that H is known to ε d_i d_j, with the scales d of a block: what operations below float64 do.

        0: there are none. An estimate of the Frobenius norm from one direction, times 4.
        """
        if self.precision is None:
            return 0.0
        narrowest = self.precision.narrowest or self.precision.dtype
        if narrowest is torch.float64:
            return 0.0
        length = norm(direction.v * direction.scales) / len(direction.v) ** 0.5
        return ratio(4 * self.shaken(direction, float(torch.finfo(narrowest).eps)), length)

    @contextmanager
    def _nudged(self, size: float, draw: int = 0) -> Iterator[None]:
        """Every leaf changed by random relative amounts of that size."""
        before = [leaf.detach().clone() for leaf in self._snapshot.leaves]
        for number, leaf in enumerate(self._snapshot.leaves):
            leaf.data.mul_(nudges(leaf, size, 5 + number + 1000 * draw))
        try:
            yield
        finally:
            for leaf, value in zip(self._snapshot.leaves, before, strict=True):
                leaf.data.copy_(value)


def check_operator(H: HessianOperator, *, uncertain: bool = True) -> tuple[Check, float, Precision | None]:
    """The check of an operator: its product with one direction, and that of fresh evaluations of its model.

    Parameters
    ----------
    H
        The operator.
    uncertain
        Whether the uncertainty is wanted, which takes two gradients more in float32.
    """
    witness, (direction,) = witnessed(H, [H], keeps_products=uncertain and H.dtype != torch.float64)
    uncertainty = max(witness.uncertainty(direction), direction.lost / H.total_mass) if uncertain else 0.0
    return witness.verdict(direction, as_block(H), H.total_mass), uncertainty, witness.precision


def uncertain(precision: Precision | None) -> Cause:
    """Where the uncertainty of a Hessian comes from: the precision of the forward pass, or what cancels in its loss."""
    if precision is None or (precision.narrowest or precision.dtype) is torch.float64:
        return DIFFERENCES
    return imprecise(str(precision))


def rounding_of(H: HessianOperator) -> bool | None:
    """Whether the Hessian of an operator is zero, as by `Witness.rounded`; None at once where it is far from that."""
    v = Direction.of(as_block(H), H.layout, dtype=H.dtype).v.to(H.point)
    if is_far(H @ v, v, H.point, H.loss, H.gradient):
        return None
    witness, directions = witnessed(H, [H], keeps_products=True)
    return witness.rounded(directions, witness.noise(directions), H.total_mass)[0](None)


def is_flat(H: HessianOperator) -> bool:
    """Whether the gradient is rounding beside the loss."""
    return norm(H.gradient) * norm(H.point) <= ROUNDED * float(torch.finfo(H.dtype).eps) * abs(H.loss)


def witnessed(
    H: HessianOperator, parts: Sequence[HessianOperator], *, keeps_products: bool = False
) -> tuple[Witness, list[Direction]]:
    """What fresh evaluations of the model of an operator make of one direction in each of its parts, over its data."""
    problem = H.problem
    named = dict(zip(H.names, H.layout.tensors, strict=True))
    witness = Witness(problem.model, problem.loss_fn, named, problem.dtype, problem.lift_casts, True, keeps_products)
    directions = [Direction.of(as_block(part), part.layout, dtype=part.dtype) for part in parts]
    for drawn, weight in problem.counted():
        with drawn.state.again():
            witness.add(drawn.batch, directions, weight)
    return witness, directions


def as_block(H: HessianOperator) -> NetworkHessian:
    """An operator as a block of which nothing more is known."""
    return NetworkHessian(H, lambda: ((), Known()), Effort(memory=H.problem.memory))


def most_curved(own: LayerCapture) -> int:
    """The unit with the largest curvature, whose product tells most."""
    curvature = own.curvature
    if isinstance(curvature, Diagonal):
        sizes = curvature.root.square().sum(0)
    elif isinstance(curvature, Factor):
        sizes = curvature.B.square().sum((0, 1, 3))
    else:
        sizes = curvature.matrices.square().sum((1, 2))
    return own.units[int(sizes.argmax())]


class Shift(nn.Module):
    """W + δ, from δ = 0: what is differentiated in δ is so in a weight that is computed from other parameters."""

    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.zeros_like(weight))

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        """The shifted weight."""
        return weight + self.shift


@contextmanager
def weight_as_parameter(model: nn.Module, name: str, layer: Layer) -> Iterator[list[tuple[str, nn.Parameter]]]:
    """The weight and bias of a layer with their names; of a parametrized weight, a shift that is there within."""
    if not parametrize.is_parametrized(layer, "weight"):
        yield parameters_of(model, name, layer)
        return
    steps: nn.ModuleList = layer.parametrizations["weight"]  # type: ignore[index, assignment]
    like = next(steps.parameters())
    shift = Shift(torch.zeros(weight_shape(layer), dtype=like.dtype, device=like.device))
    key = str(len(steps))
    steps.add_module(key, shift)
    try:
        named = [(f"{name}.parametrizations.weight.{key}.shift", shift.shift)]
        bias = layer._parameters.get("bias")
        yield named if bias is None else [*named, (f"{name}.bias", bias)]
    finally:
        del steps._modules[key]


def refuse_failed(name: str, check: Check, why: str) -> None:
    """Raise a CaptureError for a check that failed."""
    if check.passed:
        return
    if check.contradicted:
        assert check.central is not None
        own = check.central
        raise CaptureError(
            f"the second derivatives of the model in layer {name!r} are not those of its gradient: vᵀHv is "
            f"{own.double:.6g} by double backward and {own.central:.6g} by central differences of the gradient"
            + (f"; they are wrong in {check.culprit}" if check.culprit else "")
            + ": an autograd.Function does this whose backward keeps an intermediate, makes no graph, or is not the "
            "derivative of its forward; let its backward compute that from its saved inputs by operations of torch"
        )
    if check.slopes > check.bound:
        differs = f"the gradients differ by {check.slopes:.1e} of the terms of an entry"
    elif math.isclose(check.built, check.own, rel_tol=1e-3):
        differs = (
            f"Hv as it was built and by the model's own double backward differ by {check.difference:.1e} of its norm"
        )
    else:
        differs = (
            f"vᵀHv is {check.built:.6g} as it was built and {check.own:.6g} by the model's own double backward "
            f"(relative difference {check.difference:.1e})"
        )
    raise CaptureError(
        f"the Hessian of layer {name!r} does not agree with the model itself: {differs}, where rounding explains "
        f"{check.bound:.1e}: {why}"
    )


def nudges(like: torch.Tensor, size: float, seed: int) -> torch.Tensor:
    """Random factors next to 1 for every entry of a tensor, which differ from it by ``size`` at most."""
    uniform = torch.rand(like.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return (1 + size * (2 * uniform - 1)).to(like)


def uncancelled(
    evaluation: Evaluation, leaves: Sequence[torch.Tensor], indices: Sequence[int], direction: Direction
) -> float:
    """The size of H v, in the direction's units, if nothing in the loss's curvature cancelled."""
    own = [leaves[i] for i in indices]
    vectors = map(direction.layout.vector_of, without_cancellation(evaluation.loss, own))
    return sum(norm(w / direction.scales) * norm(w * direction.v) for w in (w.to(torch.float64) for w in vectors))


def doubtful(product: torch.Tensor, noise: torch.Tensor) -> bool:
    """Whether entries of a product may be no more than their rounding, of which a draw may show nothing."""
    size = product.abs()
    few = torch.maximum(ROUNDED * noise, SMALL * size.max())
    return len(size) <= DRAWS or bool(((size > 0) & (size <= few)).any())


def is_far(product: torch.Tensor, v: torch.Tensor, point: torch.Tensor, loss: float, gradient: torch.Tensor) -> bool:
    """Whether a product is far from the rounding of the loss, in units of which parameters of their size have it."""
    scale = norm(point)
    return norm(product) * scale**2 > FAR * norm(v) * max(abs(loss), norm(gradient) * scale)


def slopes_differ(direction: Direction) -> float:
    """The largest difference of the two gradients, each entry relative to the terms that it is the sum of."""
    if direction.own_slope is None or direction.squares is None:
        return 0.0
    units, inputs = (squares.sqrt() for squares in direction.squares)
    if not (float(units.max()) and float(inputs.max())):
        return ratio(float((direction.slope - direction.own_slope).abs().max()), 0.0)
    # an entry whose terms are zero may differ by what underflowed
    units, inputs = (sizes.clamp(min=float(sizes.max()) * LEAST) for sizes in (units, inputs))
    by_group = (direction.slope - direction.own_slope).view(len(inputs), -1, inputs.shape[1]).abs_()
    return float(by_group.div_(units.view(len(inputs), -1, 1)).div_(inputs[:, None]).max())


def in_coordinates(block: BlockHessian, direction: Direction) -> float:
    """The relative difference of PᵀHP z as the block has it and Pᵀ(H(P z)) for a random z, less its rounding."""
    P = block.P
    if P is None:
        return 0.0
    units, order = block.units, len(direction.v) // block.units
    change = UnitCoordinates(P, range(units), order, device=direction.v.device)
    generator = torch.Generator().manual_seed(3)
    z = torch.randn(change.shape[1], 1, generator=generator, dtype=torch.float64).to(direction.v.device)
    built = block.product(z)
    composed = change.multiply_adjoint(block.plain.product(change.multiply(z)))
    found = ratio(norm(built - composed), max(norm(built), norm(composed)))
    if not found > TOLERANCE:
        return found
    # centring cancels what is large in H
    carried = P.carried(direction.scales[None], units)[0]
    eps = float(torch.finfo(torch.float64).eps)
    rounding = MARGIN * eps * order**0.5 * norm(carried) * float(carried @ z[:, 0].abs())
    return 0.0 if norm(built - composed) <= rounding else found


def norm(vector: torch.Tensor) -> float:
    """‖x‖₂, also where the squares would leave the range of doubles."""
    plain = float(vector.norm())
    if 1e-140 < plain < 1e140 or vector.numel() == 0:
        return plain
    largest = float(vector.abs().max())
    return largest * float((vector / largest).norm()) if 0 < largest < math.inf else largest


def ratio(part: float, whole: float) -> float:
    """Part / whole; 0 where both are 0, infinite where only the whole is."""
    return part / whole if whole else (0.0 if part == 0 else math.inf)
