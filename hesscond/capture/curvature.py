"""S of every layer by the cheapest exact route, from one forward pass."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import cached_property, partial
from typing import Any

import torch
from torch.nn.modules.batchnorm import _BatchNorm

from hesscond import causes
from hesscond.capture import backward, second_derivatives
from hesscond.capture.captured import DiagonalS, LayerCapture, Request
from hesscond.capture.curved import CurvedNode, curved_nodes
from hesscond.capture.double_backward import CurvaturePlan, SecondDerivatives, least_numbers
from hesscond.capture.forward import ForwardPass
from hesscond.capture.kinds import Geometry
from hesscond.capture.layers import by_position
from hesscond.capture.progress import ProgressRecord, Stopped
from hesscond.errors import CaptureError, NoDerivativeError, NotFiniteError, TooLargeError
from hesscond.problem import graph

OUTPUT_ROUTE = "loss curvature of the output"
FACTOR_ROUTE = "loss factor through a piecewise linear tail"

#: Round-off of a backward pass in units of eps times the terms that it sums up.
ROUNDING = 16.0

#: Autograd nodes that change only the shape.
RESHAPES = {"ViewBackward0", "UnsafeViewBackward0", "ReshapeAliasBackward0"}

#: Largest number of rank-one terms of the loss per sample that are always carried back.
MANY = 4096

Sink = backward.DiagonalSink | backward.FactorSink
#: Backward pass of each node of the loss, by the node.
Derivatives = dict[Any, Callable[[], Sequence[torch.Tensor]]]


class Differentiator:
    """Second derivatives of one loss in the perturbations of layers; ``failed`` layers have none that are finite."""

    def __init__(
        self, forward: ForwardPass, requests: Sequence[Request], memory: int, progress: ProgressRecord
    ) -> None:
        self.loss, self.samples, self.progress = forward.loss, forward.samples, progress
        self.requests = requests
        self.failed: dict[str, CaptureError] = {}
        self.curved = curved_nodes(self.loss)
        self.start = [] if self.curved is None else [node.edge.node for node in self.curved]
        self.consumers = graph.consumers([self.loss.grad_fn])
        largest = max((graph.shape_of(node).numel() for node in self.consumers), default=1)
        self.budget = backward.Budget(memory, self.samples, largest, self.loss.device)

    def capture(self) -> dict[str, LayerCapture]:
        """Capture every requested layer except the `failed`; after a stop, only the layers that were complete."""
        captured: dict[str, LayerCapture] = {}
        linear: list[Request] = []
        curved: list[Request] = []
        for request in self.requests:
            direct = None if request.whole or request.parameters else self.direct(request)
            if request.parameters is not None:
                curved.append(request)
            elif direct is not None and is_diagonal(direct, request):
                with self.noting(request):
                    captured[request.name] = request.finished(from_entries(direct, request), OUTPUT_ROUTE, self.samples)
            elif self.is_linear_from(request) and not self.is_outnumbered(request):
                linear.append(request)
            else:
                curved.append(request)
        for blocks, group in self.in_blocks(linear).items():
            captured |= self.by_factor(group, blocks)
        if captured and second_derivatives.underflows(graph.nodes([self.loss.grad_fn])):
            captured = {name: replace(capture, vanishing=causes.UNDERFLOW) for name, capture in captured.items()}
        for request in curved:
            if request.whole and request.parameters is None:
                with self.noting(request):
                    self.budget.refuse(request, least_numbers(request, self.samples))
        curved = self.sampled([request for request in curved if request.name not in self.failed])
        return captured | self.by_second_derivatives(curved) if curved else captured

    def by_second_derivatives(self, requests: Sequence[Request]) -> dict[str, LayerCapture]:
        """Capture layers by differentiating twice; those that are complete when a stop is requested."""
        captured: dict[str, LayerCapture] = {}
        vanishing = second_derivatives.saturates(graph.nodes([self.loss.grad_fn]))
        with suppress(Stopped):
            twice, plans = self.planned(requests)
            for request in twice.requests:
                if request.name in plans:
                    with self.noting(request):
                        capture = twice.capture(request, plans[request.name])
                        unclear = request.name in twice.blurred | twice.hidden
                        lost = vanishing or (causes.DIFFERENCES if unclear else causes.NOTHING)
                        captured[request.name] = replace(capture, vanishing=lost)
                    self.progress.finish(request.name)
        return captured

    @contextmanager
    def noting(self, request: Request) -> Iterator[None]:
        """Context in which a layer without finite second derivatives, or a whole too large, is a `failed` one."""
        try:
            yield
        except (NotFiniteError, NoDerivativeError, TooLargeError) as error:
            if isinstance(error, TooLargeError) and not request.whole:
                raise
            # its frames would keep the graph
            self.failed[request.name] = error.with_traceback(None)

    def planned(self, requests: Sequence[Request]) -> tuple[SecondDerivatives, dict[str, CurvaturePlan]]:
        """Second derivatives and a plan for every layer, or for a sample of its units where all would take too long."""
        progress, plans = self.progress, {}
        twice = SecondDerivatives(self.loss, requests, self.samples, self.budget, self.proved_apart, progress)
        for request in requests:
            with self.noting(request):
                plans[request.name] = twice.planned(request)
        about = twice.seconds * sum(plan.directions for plan in plans.values())
        announced, long = progress.callback is not None and about >= progress.least, about > progress.limit
        # few derivatives at first: those of a batch take less, but enough to be missed
        for batched in (False,) * (announced or long) + (True,) * long:
            if batched and progress.left <= progress.limit:
                break
            for request in requests:
                if request.name in plans:
                    with self.noting(request):
                        twice.report_plan(request, plans[request.name], batched)
        if progress.left > progress.limit and not plans.keys() <= progress.sample.keys():
            progress.take_sample({request.name: request.units for request in requests if request.name in plans})
            return self.planned(self.sampled(requests))
        if announced:
            progress.begin()
        return twice, plans

    def sampled(self, requests: Sequence[Request]) -> list[Request]:
        """Requests for those units of the layers that are in the sample, if there is one."""
        chosen = [replace(request, units=self.progress.sample.get(request.name, request.units)) for request in requests]
        return [request for request in chosen if request.units]

    # properties of the graph

    def direct(self, request: Request) -> CurvedNode | None:
        """Curved node whose input is the layer's output in another shape, if nothing else uses that output."""
        if self.curved is None or len(request.calls) != 1:
            return None
        (call,) = request.calls
        for curved in self.curved:
            node = curved.edge.node
            while node is not call.node and node.name() in RESHAPES and self.consumers[node] == 1:
                node = node.next_functions[0][0]  # type: ignore[assignment]
            if node is call.node and self.consumers[node] == 1:
                return curved
        return None

    def is_linear_from(self, request: Request) -> bool:
        """Whether the tail of this layer is piecewise linear, whatever the layers before it are."""
        if self.curved is None:
            return False
        return self.tail_is_linear or graph.is_piecewise_linear(self.start, graph.dependent(self.start, request.leaves))

    def is_tied(self, model: torch.nn.Module) -> bool:
        """Whether the model in evaluation mode, its batch normalizations linear, needs no second derivatives."""
        count = sum(isinstance(m, _BatchNorm) and m.training and m.running_mean is not None for m in model.modules())
        batch = {node for node in self.consumers if node.name() in graph.BATCH_NORM and node._saved_training}
        # more nodes: functional calls or instance normalizations, which use batch statistics in evaluation mode too
        usual = len(batch) <= count and not any(r.parameters or self.is_outnumbered(r) for r in self.requests)
        return usual and self.curved is not None and graph.is_piecewise_linear(self.start, known=batch)

    def is_outnumbered(self, request: Request) -> bool:
        """Whether the loss has far more rank-one terms than the layer has outputs, as with a large vocabulary."""
        terms = sum(node.passes(1) for node in self.curved or [])
        return terms > MANY * self.samples and terms > sum(delta.numel() for delta in request.deltas)

    @cached_property
    def tail_is_linear(self) -> bool:
        """Whether the tail is piecewise linear for every layer."""
        return graph.is_piecewise_linear(self.start)

    def proved_apart(self, request: Request) -> bool:
        """Whether the graph proves that samples do not influence each other behind this layer."""
        if self.samples == 1:
            return request.splits(1)
        if not request.splits(self.samples) or not self.loss_is_apart(self.samples):
            return False
        return self.all_apart or graph.keeps_rows(self.start, self.samples, graph.dependent(self.start, request.leaves))

    def loss_is_apart(self, blocks: int) -> bool:
        """Whether the curvature of the loss couples no two blocks (samples or positions)."""
        return self.curved is not None and all(node.splits(blocks) for node in self.curved)

    @cached_property
    def all_apart(self) -> bool:
        """Whether the graph proves for all layers at once that samples do not influence each other."""
        return graph.keeps_rows(self.start, self.samples)

    def in_blocks(self, requests: Sequence[Request]) -> dict[int, list[Request]]:
        """Layers with a piecewise linear tail, by the number of blocks that do not influence each other behind them."""
        groups: dict[int, list[Request]] = {}
        rest = list(requests)
        for blocks in sorted({request.positions_apart() for request in rest} - {0, self.samples}):
            fitting = [r for r in rest if r.positions_apart() == blocks and blocks > self.samples]
            groups[blocks] = self.independent(fitting, blocks)
            rest = [request for request in rest if request not in groups[blocks]]
        proved = [request for request in rest if self.proved_apart(request)]
        others = [request for request in rest if request not in proved and request.splits(self.samples)]
        tested = self.independent(others, self.samples)
        # one sample is a block in any layout
        groups.setdefault(self.samples, []).extend(proved + tested)
        groups.setdefault(1, []).extend([r for r in rest if r not in proved and r not in tested])
        return {blocks: group for blocks, group in groups.items() if group}

    def independent(self, requests: Sequence[Request], blocks: int) -> list[Request]:
        """Layers whose blocks (samples or positions) do not influence each other where the loss is curved."""
        if not requests or not self.curved or not self.loss_is_apart(blocks):
            return []
        deltas = [delta for request in requests for delta in request.deltas]
        apart = set(range(len(requests)))
        for subset in backward.separating_subsets(blocks, self.loss.device):
            if not apart:
                break
            seeds = [backward.on_samples(subset, node.shape, node.dtype, blocks) for node in self.curved]
            gradients = iter(
                torch.autograd.grad(
                    [node.edge for node in self.curved], deltas, seeds, retain_graph=True, allow_unused=True
                )
            )
            for number, request in enumerate(requests):
                by_call = [g if g is None else g[None] for g in (next(gradients) for _ in request.calls)]
                if any(g is not None for g in by_call) and backward.reaches(
                    request.positions(by_call, blocks)[0], ~subset, blocks
                ):
                    apart.discard(number)
        return [request for number, request in enumerate(requests) if number in apart]

    # the route through a piecewise linear tail

    def sink(self, request: Request, blocks: int, passes: int, signs: torch.Tensor | None) -> Sink:
        """Sink for the backward passes of a layer, whose memory is taken."""
        positions = request.inputs(blocks).positions
        if positions == 1 and not request.whole:
            self.budget.take(request, blocks * len(request.units))
            return backward.DiagonalSink(request, blocks)
        self.budget.take(request, passes * blocks * len(request.units) * positions)
        return backward.FactorSink(request, blocks, passes, signs)

    def by_factor(self, requests: Sequence[Request], blocks: int) -> dict[str, LayerCapture]:
        """Capture S = Σ_r s_r b_r b_rᵀ, with b_r a row of the loss Hessian's factor carried back through the tail."""
        assert self.curved is not None
        # a loss without curvature has one term of zeros
        passes = max(1, sum(node.passes(blocks) for node in self.curved))
        signs = joined_signs([node.signs(blocks) for node in self.curved], [n.passes(blocks) for n in self.curved])
        sinks = []
        for request in requests:
            with self.noting(request):
                sinks.append(self.sink(request, blocks, passes, signs))
        requests = [request for request in requests if request.name not in self.failed]
        if not requests:
            return {}
        derivatives = self.carried_back(requests, sinks, blocks, signs)
        rounding = ROUNDING * max([torch.finfo(torch.float64).eps, *(torch.finfo(n.dtype).eps for n in self.curved)])
        noise_of = partial(self.noise_of, requests, blocks, derivatives, rounding)
        limit, noise = max(backward.LOST, backward.CANCELLED / rounding), noise_of(1)
        # a single draw may underestimate the round-off, but not by this factor
        if any(
            bool(sink.near(own, limit / backward.CANCELLED**0.5).any()) for sink, own in zip(sinks, noise, strict=True)
        ):
            noise = noise_of(backward.PROBES)
        captures = {}
        for request, sink, bound in zip(requests, sinks, noise, strict=True):
            with self.noting(request):
                captures[request.name] = request.finished(sink.result(bound, limit), FACTOR_ROUTE, self.samples, blocks)
        return captures

    def carried_back(
        self, requests: Sequence[Request], sinks: Sequence[Sink], blocks: int, signs: torch.Tensor | None
    ) -> Derivatives:
        """Carry the factor of the loss Hessian back into the sinks; one backward pass for each node of the loss."""
        deltas = [delta for request in requests for delta in request.deltas]
        passes = [node.passes(blocks) for node in self.curved or ()]
        size, done = self.budget.chunk(max(1, sum(passes)), sum(delta.numel() for delta in deltas)), 0
        derivatives: Derivatives = {}
        for node, last in zip(self.curved or (), passes, strict=True):
            seed = torch.zeros(node.shape, dtype=torch.float64, device=self.loss.device)
            for start in range(0, last, size):
                seeds = node.factor(start, min(start + size, last), blocks)
                gradients = iter(backward.batched_gradients([node.edge], deltas, [seeds.to(node.dtype)]))
                for request, sink in zip(requests, sinks, strict=True):
                    by_call = [next(gradients) for _ in request.calls]
                    if any(gradient is not None for gradient in by_call):
                        rows = slice(done, done + len(seeds))
                        sink.add(rows, request.positions(by_call, blocks), None if signs is None else signs[rows])
                done += len(seeds)
                seed = torch.hypot(seed, backward.root_sum_squares(seeds))
            seed = (seed * backward.scattered_signs(seed)).to(node.dtype)
            derivatives[node.edge.node] = partial(
                torch.autograd.grad, [node.edge], deltas, [seed], retain_graph=True, materialize_grads=True
            )
        return derivatives

    def noise_of(
        self, requests: Sequence[Request], blocks: int, derivatives: Derivatives, rounding: float, draws: int
    ) -> list[torch.Tensor]:
        """Round-off (J, m, q) of the terms of backward passes, for each request, also if their sums cancel."""
        units = [Geometry.of(request.layer).units for request in requests]
        noise = [torch.zeros(blocks, m, 1, dtype=torch.float64, device=self.loss.device) for m in units]
        for end, derivative in derivatives.items():
            terms = iter(backward.sizes_of_terms(derivative, [end], draws))
            for number, request in enumerate(requests):
                by_call = [next(terms)[None] for _ in request.calls]
                noise[number] = noise[number] + rounding * request.positions(by_call, blocks)[0]
        return noise


def from_entries(curved: CurvedNode, request: Request) -> DiagonalS:
    """Return the diagonal S of an output layer, from the loss alone."""
    units = list(request.units)

    def chosen(entries: torch.Tensor) -> torch.Tensor:
        laid_out = by_position(request.layer, entries.reshape(request.deltas[0].shape))
        return laid_out.flatten(0, 1)[:, units]

    signs = curved.entry_signs()
    return DiagonalS(chosen(curved.entry_roots()), None if signs is None else chosen(signs))


def is_diagonal(curved: CurvedNode, request: Request) -> bool:
    """Whether the loss has no mixed second derivatives within a unit of this output layer."""
    if curved.class_dim is None:
        return True
    shape, dims = request.deltas[0].shape, Geometry.of(request.layer).dims
    # where the classes are the units, also after a reshape of all dimensions before the features
    same = curved.shape == shape if dims else curved.shape[-1] == shape[-1]
    return same and curved.class_dim == len(curved.shape) - 1 - dims


def joined_signs(signs: Sequence[torch.Tensor | None], passes: Sequence[int]) -> torch.Tensor | None:
    """Signs (R, J) of several nodes, concatenated; None if all are +1."""
    present = next((s for s in signs if s is not None), None)
    if present is None:
        return None
    return torch.cat(
        [present.new_ones(r, present.shape[1]) if s is None else s for s, r in zip(signs, passes, strict=True)]
    )
