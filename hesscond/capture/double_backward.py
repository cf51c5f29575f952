"""Curvature S, or the Hessian itself, by two backward passes, where the tail is curved or the loss unknown."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import torch

from hesscond.capture import backward, curved, layers, second_derivatives, separators, weight_products
from hesscond.capture.captured import (
    EPS,
    NOT_FINITE,
    TINY,
    Curvature,
    DiagonalS,
    FactoredS,
    FormedH,
    LayerCapture,
    LayerInputs,
    Request,
)
from hesscond.capture.kinds import Geometry
from hesscond.capture.progress import ProgressRecord
from hesscond.capture.tangents import Tangents
from hesscond.errors import NoDerivativeError, NotFiniteError
from hesscond.operators.threads import one_thread, side_by_side, threads_for
from hesscond.problem import graph
from hesscond.problem.evaluation import is_finite
from hesscond.problem.precision import perturbed

DOUBLE_ROUTE = "double backward"
TANGENT_ROUTE = "forward derivatives in the parameters"
PARAMETER_ROUTE = "double backward in the parameters"
WEIGHT_ROUTE = "double backward in the parameters, used in several ways"

#: In a layer with fewer second derivatives than this, the sizes of terms are drawn several times.
FEW = 64
#: Unit of the round-off by which two computations of a product may differ.
ROUNDING = 64 * float(torch.finfo(torch.float64).eps)

#: Directions of a trial of `Tangents`, for each of one of double backward.
FEWER = 4
#: Second derivatives with a larger relative rounding error than this count as unknown.
BLURRED = 0.05
#: Number of evaluations with perturbed numbers, and bound of rounding in units of the largest change in them.
TRIALS, LARGER = 3, 16.0


@dataclass(frozen=True)
class CurvaturePlan:
    """Route to the curvature of a layer, with the number of directions it takes."""

    blocks: int
    positions: int
    in_parameters: bool
    directions: int


def numbers(request: Request, blocks: int, positions: int) -> tuple[int, int]:
    """Float64 numbers that the factors of S take, and those of the Hessian in the parameters."""
    geometry, units = Geometry.of(request.layer), len(request.units)
    n, order = geometry.n_params, geometry.n_params * (geometry.units if request.whole else 1)
    in_parameters = blocks * positions * geometry.groups * n + (1 if request.whole else units) * order**2
    return 3 * blocks * positions**2 * (units**2 if request.whole else units), in_parameters


def least_numbers(request: Request, samples: int) -> int:
    """Numbers that the curvature of a whole layer takes at least, whatever blocks do not influence each other."""
    blocks = max(request.positions_apart(), samples if request.splits(samples) else 1)
    return min(numbers(request, blocks, request.inputs(blocks).positions))


class SecondDerivatives:
    """Second derivatives of a loss in the variables that the requests perturb."""

    def __init__(
        self,
        loss: torch.Tensor,
        requests: Sequence[Request],
        samples: int,
        budget: backward.Budget,
        proved_apart: Callable[[Request], bool],
        progress: ProgressRecord,
    ) -> None:
        self.loss, self.requests, self.samples, self.budget = loss, requests, samples, budget
        self.proved_apart, self.progress = proved_apart, progress
        self.separators = separators.Separators(loss, requests, samples, budget)
        self.variables = {request.name: variables(request) for request in requests}
        #: sizes of the entries of S without cancellation, in the shapes of the variables of each layer
        all_variables = [variable for tensors in self.variables.values() for variable in tensors]
        uncancelled = [torch.zeros_like(variable, dtype=torch.float64) for variable in all_variables]
        for parts in curved.without_cancellation(loss, all_variables, below=curved.CANCELLED):
            uncancelled = [size + 4 * part.to(size).square() for size, part in zip(uncancelled, parts, strict=True)]
        each = iter(uncancelled)
        self.uncancelled = {name: [next(each) for _ in tensors] for name, tensors in self.variables.items()}
        #: rounding errors of the second derivatives in each variable, by layer, where they were measured
        self.errors: dict[str, list[torch.Tensor]] = {}
        #: sizes (m,) that rounding of the Hessian of each unit's parameters shows, by layer, where it was measured
        self.shown: dict[str, torch.Tensor] = {}
        #: layers where rounding dominates some second derivatives, or may hide all of them
        self.blurred: set[str] = set()
        self.hidden: set[str] = set()
        began = time.perf_counter()
        first = backward.slopes(loss, all_variables)
        #: time of a gradient: a second derivative takes about as long, in a batch less
        self.seconds = time.perf_counter() - began
        gradients = {name: [next(first) for _ in tensors] for name, tensors in self.variables.items()}
        graph.refuse_dead_ends(g.grad_fn for slopes in gradients.values() for g in slopes if g is not None)
        self.along = {name: backward.Derivatives(slopes, self.variables[name]) for name, slopes in gradients.items()}
        graph.refuse_wrong_derivatives([loss.grad_fn])
        #: activations in a single kernel hide their rounding from `Perturbed`, whose bounds then hold only as norms
        self.hides = any(node.name() in second_derivatives.BENT for node in graph.nodes([loss.grad_fn]))
        #: whether the rounding of a sample shows in its own terms: no kernel subtracts within
        self.arithmetic = all(
            node.name() in second_derivatives.ARITHMETIC or second_derivatives.is_linear(node)
            for node in graph.nodes([loss.grad_fn])
        )
        if second_derivatives.may_cancel(graph.nodes([loss.grad_fn])):
            self.perturb(loss)

    def perturb(self, loss: torch.Tensor) -> None:
        """Measure the effect of rounding on products with S and with H of each layer, along one direction each."""
        all_variables = [variable for tensors in self.variables.values() for variable in tensors]
        requests = {request.name: request for request in self.requests}
        seeds = {
            name: [
                torch.stack([scattered(v), w.to(v)])
                for v, w in zip(tensors, self.in_features(requests[name]), strict=True)
            ]
            for name, tensors in self.variables.items()
        }
        exact: dict[str, Sequence[torch.Tensor | None]] = {}
        for request in self.requests:
            # found again, and noted, when the layer is captured
            with suppress(NoDerivativeError):
                exact[request.name] = self.derivatives(request, seeds[request.name]) or ()

        def differences() -> dict[str, list[torch.Tensor | None]]:
            first, by_layer = backward.slopes(loss, all_variables), {}
            for name, tensors in self.variables.items():
                other = backward.Derivatives([next(first) for _ in tensors], tensors)
                if name in exact:
                    # a shorter one, if it is zero, stands for zeros
                    pairs = zip(exact[name], other(seeds[name]), strict=False)
                    by_layer[name] = [None if x is None or y is None else y - x for x, y in pairs]
            return by_layer

        for trial in range(TRIALS):
            for name, changes in perturbed(trial << 20, differences).items():
                zeros = [torch.zeros_like(v)[None] for v in self.variables[name]]
                for k, change in enumerate(changes):
                    if change is not None:
                        known = self.errors.setdefault(name, zeros)
                        known[k] = torch.maximum(known[k], change[:1].abs())
                if name in self.errors:
                    in_rows = self.shown_by(requests[name], [None if c is None else c[1:] for c in changes])
                    self.shown[name] = torch.maximum(self.shown.get(name, in_rows), in_rows)
        softmaxes = [node for node in graph.nodes([loss.grad_fn]) if node.name() in second_derivatives.SOFTMAXES]
        alone = torch.tensor(any(bool((node._saved_result == 1).any()) for node in softmaxes), device=loss.device)
        for name, errors in self.errors.items():
            known = self.uncancelled[name]
            for k, (derivatives, error) in enumerate(zip(exact[name], errors, strict=True)):
                x = None if derivatives is None else derivatives[:1]
                sizes = error[0].to(torch.float64) / torch.finfo(error.dtype).eps
                known[k] = torch.maximum(known[k], sizes)
                # a single score, as behind a causal mask, has no derivative, and softmax tells where one is lost
                if x is not None and ((error > BLURRED * x.abs()) & ((x != 0) | ~alone)).any():
                    self.blurred.add(name)

    def in_features(self, request: Request) -> list[torch.Tensor]:
        """Direction Σ_k ±ĥ_k/‖ĥ_k‖ in each unit, in the shapes of a layer's variables: no feature hides another."""
        if request.parameters is not None:
            return list(map(scattered, self.variables[request.name]))
        return [part[0] for part in request.outputs(equilibrated(request.inputs_by_sample(self.samples))[None])]

    def shown_by(self, request: Request, changes: Sequence[torch.Tensor | None]) -> torch.Tensor:
        """Sizes (m,) of S in each unit, of which the rounding would change a product along `in_features` as much."""
        if request.parameters is None:
            inputs = request.inputs_by_sample(self.samples)
            return inputs.largest_share(request.positions(changes, inputs.blocks)[0]) * (backward.SHARE / EPS)
        zeros = map(torch.zeros_like, variables(request))
        parts = [zero[None] if change is None else change for zero, change in zip(zeros, changes, strict=True)]
        return layers.parameter_rows(request.layer, parts)[0].abs().amax(1).to(torch.float64) * (backward.SHARE / EPS)

    def product(self, request: Request, values: torch.Tensor) -> torch.Tensor:
        """Return S times each of ``values`` (k, J, m, q)."""
        product = self.derivatives(request, request.outputs(values))
        return torch.zeros_like(values) if product is None else request.positions(product, values.shape[1])

    def derivatives(self, request: Request, seeds: Sequence[torch.Tensor]) -> Sequence[torch.Tensor | None] | None:
        """Return second derivatives in all variables of a layer along k directions; None: all are zero."""
        if not self.along[request.name].nonconstant:
            return None
        with graph.differentiable(f"the second derivatives behind layer {request.name!r} are not in torch"):
            return self.along[request.name](seeds)

    def is_apart(self, request: Request, blocks: int) -> bool:
        """Whether blocks, samples or positions, do not influence each other: proved, or S exactly zero between them."""
        if blocks == self.samples:
            if self.proved_apart(request):
                return True
            if not request.splits(blocks):
                return False
        units, positions = Geometry.of(request.layer).units, request.inputs(blocks).positions

        def product(values: torch.Tensor) -> list[torch.Tensor]:
            image = self.product(request, values.view(1, blocks, units, positions))
            if not is_finite(image):
                raise NotFiniteError(NOT_FINITE)
            return [image]

        numel = blocks * units * positions
        return not backward.mixes(product, numel, blocks, request.deltas[0].device, symmetric=True)

    def planned(self, request: Request) -> CurvaturePlan:
        """Plan S, or the Hessian in the parameters where that takes fewer derivatives or S does not fit."""
        geometry = Geometry.of(request.layer)
        n, units = geometry.n_params, geometry.units if request.whole else len(request.units)
        if request.parameters is not None:
            return CurvaturePlan(1, 0, True, len(request.units) * n)
        blocks, finest = self.samples if request.splits(self.samples) else 1, request.positions_apart()
        positions = request.inputs(blocks).positions
        if finest > blocks and self.is_apart(request, finest):
            blocks, positions = finest, request.inputs(finest).positions
        elif positions < n and not self.is_apart(request, self.samples):
            blocks, positions = 1, positions * blocks
        if positions >= n or not self.has_room(request, blocks, positions):
            return CurvaturePlan(blocks, positions, True, len(request.units) * n)
        return CurvaturePlan(blocks, positions, False, units * positions)

    def report_plan(self, request: Request, plan: CurvaturePlan, batched: bool) -> None:
        """Report the expected cost of a plan, from the time of one derivative or a few, and what a separator saves."""
        count = backward.Derivatives.WORTH_COMPARING if batched else 1
        tangents = Tangents.of(self.loss, request, self.budget) if plan.in_parameters else None
        steps, began = float(plan.directions), time.perf_counter()
        if tangents is not None:
            n, unit = plan.directions // len(request.units), request.units[0]
            count = min(FEWER * count, n)
            with one_thread():
                tangents.hessian(self.unit_seeds(request, unit, slice(count)), unit)
            count *= min(len(request.units), self.side_by_side(tangents, n))
        else:
            seeds = [torch.ones_like(tensor).expand(count, *tensor.shape) for tensor in self.variables[request.name]]
            self.derivatives(request, seeds)
            # the first batch is compared with a single derivative
            count += batched
        each = (time.perf_counter() - began) / count
        if not plan.in_parameters and plan.blocks in (self.samples, request.positions_apart()):
            steps *= self.separators.share(request, plan.directions, plan.directions // plan.positions)
        if (products := weight_products.WeightProducts.of(self.loss, request, self.samples)) is not None:
            steps *= products.share(len(request.units))
        self.progress.plan(request.name, steps, each)

    def capture(self, request: Request, plan: CurvaturePlan) -> LayerCapture:
        """Capture the curvature of a layer by the route of its plan."""
        blocks, positions = plan.blocks, plan.positions
        if request.parameters is not None:
            return request.finished(self.in_weights(request), WEIGHT_ROUTE, self.samples)
        if plan.in_parameters:
            if (forward := self.by_tangents(request)) is not None:
                return request.finished(forward, TANGENT_ROUTE, self.samples)
            return request.finished(self.in_parameters(request, blocks), PARAMETER_ROUTE, self.samples)
        curvature = self.behind_separator(request, blocks, positions)
        if curvature is not None:
            return request.finished(curvature, DOUBLE_ROUTE, self.samples, blocks)
        if request.whole:
            curvature = self.whole_factor(request, blocks, positions)
        elif positions == 1:
            curvature = self.diagonal(request, blocks)
        else:
            curvature = self.unit_factors(request, blocks, positions)
        return request.finished(curvature, DOUBLE_ROUTE, self.samples, blocks)

    def has_room(self, request: Request, blocks: int, positions: int) -> bool:
        """Whether the factors of S fit into the memory, or the Hessian in the parameters does not fit either."""
        if positions == 1 and not request.whole:
            return True
        in_S, in_parameters = numbers(request, blocks, positions)
        return self.budget.fits(in_S) or not self.budget.fits(in_parameters)

    def at_once(self, request: Request, blocks: int, count: int, positions: int) -> int:
        """Number of the ``count`` directions to take at a time."""
        numbers = 2 * blocks * Geometry.of(request.layer).units * positions
        return self.budget.cached(count, numbers, self.budget.largest)

    def directions(self, request: Request, blocks: int, count: int, positions: int) -> Iterator[tuple[slice, Any]]:
        """Yield zero tensors (k, J, m, q) for ``count`` directions, a few at a time."""
        units = Geometry.of(request.layer).units
        like = request.deltas[0]
        size = self.at_once(request, blocks, count, positions)
        for start in range(0, count, size):
            rows = slice(start, min(start + size, count))
            shape = (rows.stop - start, blocks, units, positions)
            yield rows, torch.zeros(shape, dtype=torch.float64, device=like.device)
            self.progress.advance(request.name, len(range(count)[rows]))

    def sizes(self, request: Request, largest: torch.Tensor, blocks: int, positions: int) -> torch.Tensor:
        """Sizes (J, u) of the terms that an entry of S is the sum of, or (J, 1) for the whole layer.

        ``largest`` are the largest entries of S, (J, u) or (J, 1), or for all blocks together (1, u) or (1, 1).
        """
        geometry, eps = Geometry.of(request.layer), torch.finfo(self.variables[request.name][0].dtype).eps
        lost = positions * self.by_block(request, self.uncancelled[request.name], blocks)
        everywhere = list(map(torch.ones_like, self.variables[request.name]))
        sizes, most = self.by_block(request, self.terms(request, everywhere), blocks), largest.amax(0)
        if request.whole:
            sizes, lost = sizes.amax(1, keepdim=True), geometry.units * lost.amax(1, keepdim=True)
        else:
            sizes, lost = sizes[:, request.units], lost[:, request.units]
            for k in ((most > 0) & (most <= backward.CANCELLED * sizes.amax(0))).nonzero()[:, 0].tolist():
                unit = request.units[k]
                mask = largest.new_zeros(1, blocks, geometry.units, positions)
                mask[:, :, unit] = 1
                alone = self.terms(request, self.spread_out(request, mask))
                sizes[:, k] = self.by_block(request, alone, blocks)[:, unit]
        if bool(((most > 0) & (most <= backward.LOST * EPS * lost.amax(0))).any()):
            self.hidden.add(request.name)
        # in units of the eps of float64, and enlarged where a draw may underestimate them
        sizes = torch.where(largest <= backward.LOST**2 * eps * sizes, sizes * (backward.LOST * eps / EPS), sizes)
        sizes = torch.maximum(sizes, lost)
        if not self.arithmetic:
            sizes = torch.maximum(sizes.amax(0), most).expand_as(sizes)
        if request.name not in self.shown:
            return sizes
        shown = self.shown[request.name]
        shown = shown.amax()[None] if request.whole else shown[list(request.units)]
        return self.smaller(request, sizes, torch.maximum(shown, most * (eps / EPS)), blocks)

    def smaller(self, request: Request, sizes: torch.Tensor, shown: torch.Tensor, blocks: int) -> torch.Tensor:
        """``sizes`` (J, u), or ``shown`` (J, u) or (1, u) in the units where these bound the rounding of H by less."""
        if request.parameters is not None:
            return torch.minimum(sizes, shown)
        shares = request.inputs(blocks).shares
        shares = shares.sum(1, keepdim=True) if request.whole else shares[:, request.units]
        return torch.where((shown * shares).sum(0) < (sizes * shares).sum(0), shown, sizes)

    def terms(self, request: Request, masks: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Sizes of the terms of the second derivatives along random signs, in the shapes of a layer's variables."""
        seeds, changed = [(mask * backward.scattered_signs(mask))[None] for mask in masks], self.changed[request.name]
        plain, tensors, squares = self.along[request.name](seeds), self.variables[request.name], []
        # in a single draw an entry may change little by chance, and with it a sample
        few = self.arithmetic or sum(mask.numel() for mask in masks) < FEW
        for draw in range(backward.PROBES if few else 1):
            with backward.enlarged_rounding([g.grad_fn for g in changed.outputs], 1 + draw):
                squares.append(list(map(backward.size_of_terms, changed(seeds), plain, tensors)))
        return [backward.root_sum_squares(torch.stack(parts)) for parts in zip(*squares, strict=True)]

    @cached_property
    def changed(self) -> dict[str, backward.Derivatives]:
        """Second derivatives as in ``along``, of slopes from a backward pass with `enlarged_rounding`."""
        all_variables = [variable for tensors in self.variables.values() for variable in tensors]
        with backward.enlarged_rounding([self.loss.grad_fn], 0):
            first = backward.slopes(self.loss, all_variables)
        return {name: backward.Derivatives([next(first) for _ in args], args) for name, args in self.variables.items()}

    def by_block(self, request: Request, parts: Sequence[torch.Tensor], blocks: int) -> torch.Tensor:
        """Largest entry of each block and unit (J, m), from tensors in the shapes of a layer's variables."""
        if request.parameters is None:
            return request.positions([part[None] for part in parts], blocks)[0].amax(2)
        sizes = layers.unit_weights(request.layer, parts[0][None]).amax(2)
        return torch.maximum(sizes, parts[1]) if len(parts) > 1 else sizes

    def spread_out(self, request: Request, mask: torch.Tensor) -> list[torch.Tensor]:
        """Return ``mask`` (1, J, m, q) in the shapes of a layer's variables."""
        if request.parameters is None:
            return [part[0] for part in request.outputs(mask)]
        return [part[0] for part in layers.parameter_tensors(request.layer, mask[:, 0])]

    def diagonal(self, request: Request, blocks: int) -> DiagonalS:
        """Return S_jj of units with one position per sample: one direction per unit, all samples at once."""
        units = torch.tensor(request.units, device="cpu")
        self.budget.take(request, 2 * blocks * len(units))
        S = torch.cat([S_i[:, 0] for S_i in self.unit_matrices(request, blocks, 1)], 1)
        if request.name in self.errors and not self.hides:
            errors = request.positions(self.errors[request.name], blocks)[0, :, units, 0]
            bounds = LARGER * errors + ROUNDING * S.abs()
            if (bounds <= S.abs() / 2).all():
                root = S.abs().sqrt()
                return DiagonalS(root, S.sign() if (S < 0).any() else None, bounds / root.where(root > 0, 1.0))
        return diagonal_of(S, self.sizes(request, S.abs(), blocks, 1))

    def unit_factors(self, request: Request, blocks: int, positions: int) -> FactoredS:
        """Return signed factors of S_i (J, q, q) of every unit, from its eigendecomposition."""
        count = len(request.units)
        self.budget.take(request, 3 * positions * blocks * count * positions)
        matrices = self.unit_matrices(request, blocks, positions)
        factor = joint_factor(matrices, (positions, blocks, count), request.deltas[0].device)
        return self.with_sizes(request, factor, blocks, positions)

    def unit_matrices(self, request: Request, blocks: int, positions: int) -> Iterator[torch.Tensor]:
        """Yield S_i (J, q, q) of every unit, from as many directions at a time as make up a chunk."""
        count = len(request.units)
        step = max(1, self.at_once(request, blocks, count * positions, positions) // positions)
        for start in range(0, count, step):
            units = torch.tensor(request.units[start : start + step], device="cpu").repeat_interleave(positions)
            places = torch.arange(len(units), device="cpu") % positions
            S = torch.zeros(len(units), blocks, positions, dtype=torch.float64, device=request.deltas[0].device)
            for rows, values in self.directions(request, blocks, len(units), positions):
                index = torch.arange(len(values), device="cpu")
                values[index, :, units[rows], places[rows]] = 1
                S[rows] = self.product(request, values)[index, :, units[rows]]
            yield from (S_i.transpose(0, 1) for S_i in S.split(positions))

    def with_sizes(self, request: Request, factor: FactoredS, blocks: int, positions: int) -> FactoredS:
        """Return a factor with ``norms`` that cover the round-off of the sums in S."""
        assert factor.norms is not None
        largest = factor.B.square().sum(0).amax(2)
        sizes = self.sizes(request, largest.amax(1, keepdim=True) if request.whole else largest, blocks, positions)
        return replace(factor, norms=torch.maximum(factor.norms, sizes))

    def whole_factor(self, request: Request, blocks: int, positions: int) -> FactoredS:
        """Return the signed factor of S (J, m q, m q) over all units together."""
        units = Geometry.of(request.layer).units
        order = units * positions
        self.budget.take(request, 3 * blocks * order * order)
        S = torch.zeros(order, blocks, order, dtype=torch.float64, device=request.deltas[0].device)
        for rows, values in self.directions(request, blocks, order, positions):
            values.view(len(values), blocks, order)[
                torch.arange(len(values), device="cpu"), :, torch.arange(rows.start, rows.stop, device="cpu")
            ] = 1
            S[rows] = self.product(request, values).flatten(2)
        return self.with_sizes(request, layer_factor(S.transpose(0, 1), units), blocks, positions)

    def behind_separator(self, request: Request, blocks: int, positions: int) -> Curvature | None:
        """Return S from the curvature in a tensor behind the layer, checked by a product; None: not available."""
        if blocks not in (self.samples, request.positions_apart()):
            return None
        units = Geometry.of(request.layer).units
        entries = units if request.whole else len(request.units)
        curvature = None
        try:
            # without separators it fails too, and the error is raised there
            with suppress(NoDerivativeError), graph.differentiable():
                segment = self.separators.segment(request, entries * positions, entries)
                curvature = None if segment is None else self.separators.curvature(segment, request, blocks)
        finally:
            self.separators.release(request)
        if curvature is None or (sizes := self.confirmed(request, *curvature, blocks)) is None:
            return None
        S = curvature[0]
        if request.whole:
            self.budget.take(request, 3 * S.numel())
            return self.with_sizes(request, layer_factor(S[0], units, sizes[:, 0]), blocks, positions)
        if positions > 1:
            self.budget.take(request, 3 * S.numel())
            factor = joint_factor(iter(S), (positions, blocks, entries), S.device, sizes)
            return self.with_sizes(request, factor, blocks, positions)
        self.budget.take(request, 2 * S.numel())
        S = S[:, :, 0, 0].T
        return diagonal_of(S, torch.maximum(self.sizes(request, S.abs(), blocks, positions), sizes))

    def confirmed(self, request: Request, S: torch.Tensor, sizes: torch.Tensor, blocks: int) -> torch.Tensor | None:
        """Sizes (J, u) of the round-off in S (u, J, q, q), or in that of the layer, reduced to what products show.

        None: direct products of some units differ from those with S by more than rounding.
        """
        inputs, shown = request.inputs(blocks), 0.0
        along = equilibrated(inputs)
        for row in backward.some(S):
            unit = slice(None) if request.whole else slice(request.units[row], request.units[row] + 1)
            values, apart = torch.zeros_like(along), torch.zeros_like(along)
            values[:, unit] = v = along[:, unit]
            product = self.product(request, values[None])[0, :, unit]
            expected = torch.einsum("jpq,jq->jp", S[row], v.flatten(1)).view_as(v)
            apart[:, unit] = product - expected
            rounding = ROUNDING * (sizes[row] * v.flatten(1).norm(dim=1)).norm()
            if not backward.agree(product[None], expected[None]) and float(apart.norm()) > rounding:
                return None
            in_rows = float(inputs.largest_share(apart).amax()) * (backward.SHARE / EPS)
            shown = max(shown, in_rows / max(float(sizes[row].amax()), TINY))
        return self.smaller(request, sizes.T, shown * sizes.amax(1), blocks)

    def in_parameters(self, request: Request, blocks: int) -> FormedH:
        """Return Hessians Ĥᵀ(SĤ), one direction per parameter; rounding, bounded by `spread`, limits their κ."""
        inputs, geometry = request.inputs(blocks), Geometry.of(request.layer)
        n, positions = geometry.n_params, inputs.positions
        order = n * geometry.units if request.whole else n
        count = 1 if request.whole else len(request.units)
        self.budget.take(request, inputs.blocks * positions * geometry.groups * n + count * order * order)
        H_hat = inputs.slice(0, blocks)
        matrices = H_hat.new_zeros(count, order, order)
        lengths = inputs.squared_lengths.sqrt()
        largest = H_hat.new_zeros(blocks, len(request.units))
        for column, unit in enumerate(request.units):
            group = geometry.group(unit)
            entries = slice(unit * n, (unit + 1) * n) if request.whole else slice(0, n)
            for rows, values in self.directions(request, blocks, n, positions):
                values[:, :, unit] = H_hat[:, :, group, rows].permute(2, 0, 1)
                product = self.product(request, values)
                steepest = product[:, :, unit].norm(dim=2) / lengths[:, group, rows].T.clamp_min(TINY)
                largest[:, column] = torch.maximum(largest[:, column], steepest.amax(0))
                row = slice(entries.start + rows.start, entries.start + rows.stop)
                if request.whole:
                    by_group = product.unflatten(2, (geometry.groups, -1))
                    contracted = torch.einsum("kjgip,jpgn->kgin", by_group, H_hat)
                    matrices[0, row] = contracted.flatten(1)
                else:
                    matrices[column, row] = torch.einsum("kjp,jpn->kn", product[:, :, unit], H_hat[:, :, group])
        scales = largest.amax(1, keepdim=True) if request.whole else largest
        sizes = torch.maximum(largest, self.sizes(request, scales, blocks, positions))
        squares = inputs.squared_lengths[:, [geometry.group(unit) for unit in request.units]]
        spread = torch.einsum("ju,jun->un", sizes, squares).sqrt().view(count, order)
        return FormedH(separators.symmetric(matrices), spread, blocks * positions)

    def unit_seeds(self, request: Request, unit: int, rows: slice = slice(None)) -> list[torch.Tensor]:
        """Directions along the parameters of a unit as `Tangents` takes them."""
        geometry, shape = Geometry.of(request.layer), request.deltas[0].shape
        along = request.inputs(1).slice(0, 1)[0, :, geometry.group(unit), rows].T
        # the units of a linear layer are the last dimension
        if len(request.deltas) == 1 and (geometry.dims or len(shape) == 2):
            return [along.reshape(len(along), shape[0], 1, *shape[2:])]
        values = along.new_zeros(len(along), 1, geometry.units, along.shape[1])
        values[:, 0, unit] = along
        return request.outputs(values)

    def side_by_side(self, tangents: Tangents, directions: int) -> int:
        """Number of units that are measured at a time, one thread each: a unit takes many small steps."""
        return min(threads_for(self.loss.device), self.budget.memory // tangents.bytes(directions))

    def by_tangents(self, request: Request) -> FormedH | None:
        """Return Hessians by derivatives that go forward; None: not available, or a product differs."""
        tangents = Tangents.of(self.loss, request, self.budget)
        if tangents is None:
            return None
        H_hat, geometry = request.inputs(1).slice(0, 1)[0], Geometry.of(request.layer)
        n, positions = geometry.n_params, len(H_hat)
        H, spread = H_hat.new_empty(len(request.units), n, n), H_hat.new_empty(len(request.units), n)
        threads = self.side_by_side(tangents, n)
        for start in range(0, len(request.units), threads):
            units = request.units[start : start + threads]
            formed = side_by_side(lambda unit: tangents.hessian(self.unit_seeds(request, unit), unit), units, threads)
            for column, (hessian, d) in enumerate(formed, start):
                H[column], spread[column] = hessian, d
                self.progress.advance(request.name, n)
        v, column = backward.scattered_signs(H[0, 0]), int(H.flatten(1).norm(dim=1).argmax())
        unit = request.units[column]
        rows = H_hat[:, geometry.group(unit)]
        values = H.new_zeros(1, 1, geometry.units, positions)
        values[0, 0, unit] = rows @ v
        product, expected = self.product(request, values)[0, 0, unit] @ rows, H[column] @ v
        near = (product - expected).norm() <= ROUNDING * spread[column].norm() * (spread[column] @ v.abs())
        if not near and not backward.agree(product[None], expected[None]):
            return None
        lengths = torch.stack([H_hat[:, geometry.group(unit)].norm(dim=0) for unit in request.units])
        largest = (H.diagonal(dim1=1, dim2=2).abs() / lengths.square().clamp_min(TINY)).amax(1)
        sizes = torch.maximum(largest, self.sizes(request, largest[None], 1, positions)[0])
        return FormedH(H, torch.maximum(spread, lengths * sizes.sqrt()[:, None]), positions)

    def in_weights(self, request: Request) -> FormedH:
        """Return Hessians in the weight and bias themselves, for a layer that is used in several ways."""
        n, units = Geometry.of(request.layer).n_params, Geometry.of(request.layer).units
        count, order = (1, n * units) if request.whole else (len(request.units), n)
        self.budget.take(request, count * order * order)
        matrices, largest = self.by_products(request) or self.one_by_one(request, count, order)
        sizes = torch.maximum(largest, self.sizes(request, largest[None], 1, n)[0])
        spread = sizes.sqrt()[:, None].expand(count, order)
        return FormedH(
            separators.symmetric(matrices), spread, max(1, sum(call.delta.numel() for call in request.calls))
        )

    def one_by_one(self, request: Request, count: int, order: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Hessians (u, n̂, n̂), or that of the layer, by a direction for each parameter, and their largest entries."""
        n, units = Geometry.of(request.layer).n_params, Geometry.of(request.layer).units
        like = self.variables[request.name][0]
        matrices = torch.zeros(count, order, order, dtype=torch.float64, device=like.device)
        directions = len(request.units) * n
        size = self.budget.cached(directions, 2 * n * units, self.budget.largest)
        for start in range(0, directions, size):
            index = torch.arange(start, min(start + size, directions), device=like.device)
            number, parameter = index // n, index % n
            unit = torch.tensor(request.units, device=like.device)[number]
            seeds = torch.zeros(len(index), units, n, dtype=like.dtype, device=like.device)
            seeds[torch.arange(len(index), device="cpu"), unit, parameter] = 1
            products = self.in_rows(request, seeds)
            if request.whole:
                matrices[0, index] = products.flatten(1)
            else:
                matrices[number, parameter] = products[torch.arange(len(index), device="cpu"), unit]
            self.progress.advance(request.name, len(index))
        return matrices, torch.maximum(matrices.amax((1, 2)), -matrices.amin((1, 2)))

    def in_rows(self, request: Request, seeds: torch.Tensor) -> torch.Tensor:
        """Products (k, m, n̂) with the Hessian in the parameters of a layer, float64, for ``seeds`` (k, m, n̂)."""
        tensors = layers.parameter_tensors(request.layer, seeds)
        products = self.derivatives(request, tensors) or [None] * len(tensors)
        parts = [torch.zeros_like(seed) if f is None else f for f, seed in zip(products, tensors, strict=True)]
        return layers.parameter_rows(request.layer, parts).to(torch.float64)

    def by_products(self, request: Request) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Return the Hessians of `WeightProducts`; None: not available, or a product differs."""
        products = weight_products.WeightProducts.of(self.loss, request, self.samples)
        if products is None:
            return None
        hessians = products.hessians(request.units, self.budget, partial(self.progress.advance, request.name))
        near = hessians is not None and weight_products.confirmed(*hessians, request, partial(self.in_rows, request))
        return hessians if near else None


def signed_roots(S: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Rows b_r (q, J, q) and signs (q, J) with S_j = Σ_r s_r b_r b_rᵀ for symmetric S (J, q, q), and norms (J,)."""
    if not is_finite(S):
        raise NotFiniteError(NOT_FINITE)
    values, vectors = torch.linalg.eigh((S + S.mT) / 2)
    rows = (vectors * values.abs().sqrt()[:, None, :]).permute(2, 0, 1)
    return rows, torch.where(values < 0, -1.0, 1.0).T.to(rows), values.abs().amax(1)


def diagonal_of(S: torch.Tensor, norm: torch.Tensor) -> DiagonalS:
    """Return S (J, u) as roots and signs, known up to round-off of the sizes ``norm`` (J, u) or of its entries."""
    return DiagonalS(S.abs().sqrt(), S.sign() if (S < 0).any() else None, norm=torch.maximum(norm, S.abs()))


def joint_factor(
    matrices: Iterator[torch.Tensor],
    shape: tuple[int, int, int],
    device: torch.device,
    sizes: torch.Tensor | None = None,
) -> FactoredS:
    """Factors of the S_i (J, q, q) of every unit, shape (q, J, u), known up to round-off of ``sizes`` (J, u)."""
    B = torch.zeros(*shape, shape[0], dtype=torch.float64, device=device)
    signs = torch.ones(shape, dtype=torch.float64, device=device)
    norms = torch.zeros(shape[1:], dtype=torch.float64, device=device)
    for column, S in enumerate(matrices):
        B[:, :, column], signs[:, :, column], norms[:, column] = signed_roots(S)
    return FactoredS(B, signs if (signs < 0).any() else None, norms if sizes is None else torch.maximum(norms, sizes))


def layer_factor(S: torch.Tensor, units: int, sizes: torch.Tensor | None = None) -> FactoredS:
    """Factor of S (J, m q, m q) of all units together, known up to round-off of ``sizes`` (J,)."""
    B, signs, norms = signed_roots(S)
    norms = norms if sizes is None else torch.maximum(norms, sizes)
    return FactoredS(B.unflatten(2, (units, -1)), signs[:, :, None] if (signs < 0).any() else None, norms[:, None])


def scattered(like: torch.Tensor) -> torch.Tensor:
    """Numbers of random sign from 0.5 to 1.5, not ±1, whose sums may be zero: softmax does not see shifts."""
    sizes = torch.linspace(0.5, 1.5, like.numel(), device="cpu").to(like)
    return backward.scattered_signs(like) * sizes.view_as(like)


def equilibrated(inputs: LayerInputs) -> torch.Tensor:
    """Sums Σ_k ±c_k ĥ_k/‖ĥ_k‖ (J, m, q) in each unit, with 0.5 ≤ c_k ≤ 1.5."""
    return inputs.sums(scattered(inputs.lengths) / inputs.lengths)


def variables(request: Request) -> list[torch.Tensor]:
    """Variables that the loss is differentiated in for a layer: its perturbations, or its weight and bias."""
    return request.deltas if request.parameters is None else [p for p in request.parameters if p is not None]
