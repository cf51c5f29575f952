"""Comparison of second derivatives with differences of the gradient, which are independent of double backward.

Along one random direction v, the forward difference is compared parameter by parameter; where that does not agree,
central differences with several steps decide, kinks excepted (docs/verification.md). Where rounding alone would explain
a difference above the tolerance, a longer step, which has less of it, decides.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from copy import deepcopy
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import combinations
from typing import Any

import torch
from torch import nn
from torch.autograd.function import BackwardCFunction

from hesscond.capture.curved import without_cancellation
from hesscond.errors import HesscondError
from hesscond.hessians.differenced import Held
from hesscond.hessians.linearization import gradients
from hesscond.problem.containers import mapped, tensors_of
from hesscond.problem.evaluation import Batch, LossFunction, call_of, checked_batch, converted
from hesscond.problem.graph import nodes
from hesscond.problem.precision import perturbed
from hesscond.problem.untouched import untouched

#: Relative difference that a correct model may have in float64; torch's operations stay below 1e-7.
AGREES = 1e-6
#: The step, relative to the parameters, is the round-off to this power; further trials multiply it by these factors.
POWER, FACTORS = 0.44, (1.0, 0.1, 10.0, 100.0, 1000.0)
#: Largest share that kinks, or the change between two points, may have in a difference that counts as significant.
SMOOTH, REPEATED = 1e-3, 0.1
#: A difference below this multiple of the rounding of H v is not significant.
NOISE = 1e4
#: Number of entries from which random numbers have 8 bits.
LARGE = 4096
#: Number of entries of a piece of a tensor.
PIECE = 1 << 15
#: Zero or small parameters move by this share of the typical size in their tensor.
LEAST = 0.01

Point = Sequence[torch.Tensor]


@dataclass(frozen=True)
class Difference:
    """Comparison of H v with a difference of the gradient, in one parameter or several."""

    relative: float  # ‖H v − D‖ / max(‖H v‖, ‖D‖), entries in units of the parameters' inverse sizes
    agrees: bool | None  # whether rounding explains the difference; None: it cannot be decided
    double: float  # vᵀHv by double backward and by differences
    central: float
    #: whether a forward difference sufficed, of which ``nonzero`` is not known
    forward: bool = False
    #: mask of the entries that exceed the rounding of central differences, if both agree; None: there are none
    nonzero: torch.Tensor | None = field(default=None, compare=False, repr=False)

    @property
    def is_noise(self) -> bool:
        """Whether both are zero to the rounding of the differences."""
        return self.agrees is None and self.relative == 0


@dataclass
class Along:
    """Derivatives of one parameter along v at one point, scaled by the sizes of its entries."""

    double: torch.Tensor  # H v
    central: torch.Tensor  # (g(w + εv) − g(w − εv)) / 2ε
    forms: tuple[float, float]  # vᵀHv by either
    norms: tuple[float, float]  # ‖·‖₂ of either
    gap: float  # norm of the difference
    bend: float  # norm of (g(w + εv) + g(w − εv) − 2g(w)) / 2ε; infinite if it is not needed

    def repeats(self, other: Along, floor: float) -> bool:
        """Whether another point has nearly the same difference and the same derivative."""
        gap = length((self.double - self.central).sub_(other.double - other.central))
        central = length(self.central - other.central)
        return gap <= REPEATED * self.gap and central <= REPEATED * self.norms[1] + floor


@dataclass
class Directional:
    """Derivatives along v at one point."""

    parameters: list[Along]
    floor: float  # rounding of central differences, in the 2-norm

    def is_explained(self, k: int, tolerance: float) -> bool:
        """Whether rounding explains the difference in parameter k."""
        return self.parameters[k].gap <= tolerance * max(self.parameters[k].norms) + self.floor


class Differences:
    """Differences of the gradient of one loss at a point, computed with round-off ``eps``.

    ``loss_at`` evaluates the loss at another point, with the same random numbers every time.
    """

    def __init__(self, loss_at: Callable[[Point], torch.Tensor], point: Point, eps: float) -> None:
        self.loss_at, self.point, self.eps = loss_at, [p.detach() for p in point], eps
        generator = torch.Generator().manual_seed(7)
        sizes = [float(p.norm()) / p.numel() ** 0.5 if p.numel() else 0.0 for p in self.point]
        other = sorted(size for size in sizes if size)
        typical = other[len(other) // 2] if other else 1.0
        self._least = [LEAST * (size or typical) for size in sizes]
        self.v = [uniform(p, generator) for p in self.point]
        for whole, of, least in zip(self.v, self.point, self._least, strict=True):
            room = torch.empty_like(next(pieces(of))[0])
            for v, p in pieces(whole, of):
                v.mul_(torch.abs(p, out=room[: len(p)]).add_(least))

    @cached_property
    def sizes(self) -> list[torch.Tensor]:
        """Sizes of the entries of each parameter, never zero."""
        return [p.abs().add_(least) for p, least in zip(self.point, self._least, strict=True)]

    def compare(self, gradient: Point, product: Point, forward: bool = True) -> list[Difference]:
        """Return a `Difference` for each parameter, from its gradient and H v; ``forward``: one step may decide."""
        if forward and (agreed := self._forward(gradient, product)):
            return agreed
        step = self.eps**POWER
        # entries without any derivative may be held constant by the model, as the padding row of an embedding
        for v, g, h in zip(self.v, gradient, product, strict=True):
            v.masked_fill_((g == 0).logical_and_(h == 0), 0)
        trials = [self._along(self.point, gradient, product, step, nullcontext)]
        comparisons = [self._judged(k, trials) for k in range(len(self.point))]
        generator = torch.Generator().manual_seed(8)
        for factor in FACTORS:
            if not any(self._open(k, comparison, trials[0]) for k, comparison in enumerate(comparisons)):
                break
            held = Held()
            aside = [10 * factor * step * s * uniform(s, generator) for s in self.sizes]
            point = [p + a for p, a in zip(self.point, aside, strict=True)]
            try:
                with held:
                    leaves = [p.requires_grad_() for p in point]
                    loss = self.loss_at(leaves)
                first = gradients([loss], leaves, None, create_graph=True)
                second = gradients(first, leaves, self.v)
                trials.append(self._along(leaves, [g.detach() for g in first], second, factor * step, held.replaying))
            except (HesscondError, RuntimeError):
                continue
            comparisons = [self._judged(k, trials) for k in range(len(self.point))]
        comparisons = [self._judged(k, trials, last=True) for k in range(len(self.point))]
        if any(comparison.agrees is False for comparison in comparisons):
            noise = self._rounding(product)
            for k, comparison in enumerate(comparisons):
                if comparison.agrees is False and trials[0].parameters[k].gap <= NOISE * noise[k]:
                    comparisons[k] = replace(comparison, agrees=None)
        return comparisons

    def _forward(self, gradient: Point, product: Point) -> list[Difference]:
        """Agreement with the forward difference in all parameters; none if it fails in one."""
        step = self.eps**POWER
        leaves = [torch.add(p, v, alpha=step).requires_grad_() for p, v in zip(self.point, self.v, strict=True)]
        loss = self.loss_at(leaves)
        displaced_gradient = gradients([loss], leaves, None)
        rows: list[torch.Tensor] = []
        for parts in zip(self.v, gradient, product, displaced_gradient, strict=True):
            sums, norms = [], []
            room = parts[0].new_empty(3, len(next(pieces(parts[0]))[0]))
            for v, g, h, m in pieces(*parts):
                # |v| stands for the sizes of the entries, which need not be kept
                double, ahead, gap = three = room[:, : len(v)]
                torch.mul(v, h, out=double)
                torch.sub(m, g, out=ahead).mul_(v).div_(step)
                torch.sub(double, ahead, out=gap)
                sums.append(three[:2].sum(1))
                norms.append(three.norm(dim=1))
            rows.append(torch.cat([torch.stack(sums).sum(0), torch.stack(norms).norm(dim=0)]))
        # one read, for which a device waits
        rows.append(loss.detach().abs().expand(5))
        *table, (energy, *_) = torch.stack([row.to(rows[0]) for row in rows]).tolist()
        floor = 128 * self.eps * (energy / step + max(max(norms) for _, _, *norms, _ in table))
        comparisons = []
        for double, ahead, *norms, gap in table:
            size = max(norms)
            if not (floor < 0.1 * size and gap <= self.tolerance * size):
                return []
            comparisons.append(Difference(gap / size, True, double, ahead, True))
        return comparisons

    @staticmethod
    def _open(k: int, comparison: Difference, first: Directional) -> bool:
        """Whether further steps may decide on parameter k; the longest has the smallest rounding."""
        double, _ = first.parameters[k].norms
        return comparison.agrees is None and (not comparison.is_noise or max(FACTORS) * double > first.floor)

    def _rounding(self, product: Point) -> list[float]:
        """Rounding in H v by double backward for each parameter, such as that of p − p² in a saturated softmax."""
        leaves = [p.clone().requires_grad_() for p in self.point]
        loss = self.loss_at(leaves)
        second = product
        # a solver that compares its own numbers may refuse perturbed ones
        with suppress(AssertionError, ArithmeticError, ValueError):
            second = perturbed(0, lambda: gradients(gradients([loss], leaves, None, create_graph=True), leaves, self.v))
        errors = [length(s * (g - h)) for s, g, h in zip(self.sizes, second, product, strict=True)]
        for parts in without_cancellation(loss, leaves):
            along = sum(length(w * v) for w, v in zip(parts, self.v, strict=True))
            errors = [e + self.eps * length(s * w) * along for e, s, w in zip(errors, self.sizes, parts, strict=True)]
        return errors

    def _along(
        self,
        point: Point,
        gradient: Point,
        product: Point,
        step: float,
        held: Callable[[], AbstractContextManager[Any]],
    ) -> Directional:
        ends, energy = [], 0.0
        for signed in (step, -step):
            pairs = zip(point, self.v, strict=True)
            leaves = [torch.add(p.detach(), v, alpha=signed).requires_grad_() for p, v in pairs]
            with held():
                loss = self.loss_at(leaves)
            energy = max(energy, abs(float(loss.detach())))
            ends.append(list(gradients([loss], leaves, None)))
            del loss, leaves
        plus, minus = ends
        norms = [length(s * h.detach()) for s, h in zip(self.sizes, product, strict=True)]
        # entries of a gradient may themselves be differences of larger terms, of the size of the loss
        energy = max([energy, *(length(s * g.detach()) for s, g in zip(self.sizes, gradient, strict=True))])
        derivatives = Directional([], 64 * self.eps * (energy / step + max(norms, default=0.0)))
        for k, (s, v, g, h) in enumerate(zip(self.sizes, self.v, gradient, product, strict=True)):
            p, m = plus[k].detach(), minus[k].detach()
            # for a large network, two copies would not fit
            plus[k] = minus[k] = p.new_empty(0)
            double, central = s * h.detach(), torch.sub(p, m).div_(2 * step)
            forms = inner(v, h.detach()), inner(v, central)
            central.mul_(s)
            along = Along(double, central, forms, (norms[k], length(central)), length(double - central), math.inf)
            derivatives.parameters.append(along)
            if not derivatives.is_explained(k, self.tolerance):
                along.bend = length(torch.add(p, m).sub_(g.detach(), alpha=2).mul_(s)) / (2 * step)
        return derivatives

    @property
    def tolerance(self) -> float:
        """Relative difference that a correct model may have."""
        return AGREES if self.eps < 1e-12 else self.eps**0.25

    def _judged(self, k: int, trials: Sequence[Directional], last: bool = False) -> Difference:
        """Comparison in parameter k, from all trials together; ``last``: no longer step will come."""
        comparisons, rough, wrong, doubt = [], None, [], math.inf
        for trial in trials:
            along, explained = trial.parameters[k], trial.is_explained(k, self.tolerance)
            gap, size = along.gap, max(along.norms)
            resolved = trial.floor <= 0.1 * size
            comparison = Difference(gap / size if size and (resolved or not explained) else 0.0, None, *along.forms)
            if explained and (resolved or not size) and 2 * trial.floor <= doubt:
                agreed = replace(comparison, agrees=True, nonzero=along.central.abs() > trial.floor if size else None)
                if gap <= self.tolerance * size:
                    return agreed
                # a longer step, with less rounding, may still tell them apart
                rough = agreed
            doubt = doubt if explained else min(doubt, gap)
            comparisons.append(comparison)
            if not explained and along.bend <= SMOOTH * gap + trial.floor:
                wrong.append((trial, comparison))
        for (other, _), (trial, comparison) in combinations(wrong, 2):
            if trial.parameters[k].repeats(other.parameters[k], trial.floor + other.floor):
                return replace(comparison, agrees=False)
        return rough if rough and last else min(comparisons, key=lambda item: item.relative)


@dataclass
class Culprit:
    """Search for the innermost module, or the loss, whose second derivatives are not those of its gradient."""

    model: nn.Module
    loss_fn: LossFunction
    batch: Batch
    _inputs: dict[str, tuple[Any, Any]] = field(default_factory=dict)

    def sentence(self) -> str:
        """Name of the culprit in words; empty if it is not found."""
        try:
            with untouched(self.model, self.loss_fn):
                return self._found()
        except Exception:  # models that cannot be copied, or run in parts
            return ""

    def _found(self) -> str:
        model = deepcopy(self.model).to(torch.float64)
        inputs, target = (converted(part, torch.float64, copy=True) for part in checked_batch(self.batch))
        hooks = [
            module.register_forward_pre_hook(partial(self._note, name), with_kwargs=True)
            for name, module in model.named_modules()
        ]
        args, kwargs = call_of(model, inputs)
        output = model(*args, **kwargs)
        for hook in hooks:
            hook.remove()
        if isinstance(output, torch.Tensor) and self._is_wrong(lambda o: self.loss_fn(o, target), [output]):
            return "the loss" + in_brackets(functions(self.loss_fn(output.detach().requires_grad_(), target)))
        path, module = "", model
        while True:
            inside = [f"{path}.{name}" if path else name for name, _ in module.named_children()]
            wrong = next((name for name in inside if name in self._inputs and self._module_is_wrong(model, name)), None)
            if wrong is None:
                break
            path, module = wrong, model.get_submodule(wrong)
        if not path and not self._module_is_wrong(model, ""):
            return ""
        args, kwargs = self._inputs[path]
        what = f"module {path!r}, a {type(module).__name__}" if path else f"the model, a {type(module).__name__}"
        for name, part in module.named_modules():
            if isinstance(part, nn.Embedding) and part.padding_idx is not None:
                what += (
                    f", whose embedding {name!r} gives the row of padding_idx no gradient, though the loss may use it"
                )
        return what + in_brackets(functions(*tensors_of(module(*args, **kwargs))))

    def _note(self, name: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        self._inputs.setdefault(name, (args, kwargs))

    def _module_is_wrong(self, model: nn.Module, name: str) -> bool:
        module, (args, kwargs) = model.get_submodule(name), self._inputs[name]
        parameters = dict(module.named_parameters())
        given = [t for t in tensors_of((args, kwargs)) if t.is_floating_point()]
        names = list(parameters)

        def output(*values: torch.Tensor) -> torch.Tensor:
            place = dict(zip(map(id, given), values[len(names) :], strict=True))
            new_args, new_kwargs = mapped((args, kwargs), lambda t: place.get(id(t), t))
            parts = torch.func.functional_call(
                module, dict(zip(names, values[: len(names)], strict=True)), new_args, new_kwargs
            )
            generator = torch.Generator().manual_seed(11)
            # the square makes all second derivatives of the module count
            return torch.stack(
                [((t + t * t) * uniform(t, generator)).sum() for t in tensors_of(parts) if t.is_floating_point()]
            ).sum()

        return self._is_wrong(output, [*parameters.values(), *given])

    @staticmethod
    def _is_wrong(function: Callable[..., torch.Tensor], at: Point) -> bool:
        """Whether the second derivatives of a function are not those of its gradient."""

        def loss_at(point: Point) -> torch.Tensor:
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(0)
                return function(*point)

        differences = Differences(loss_at, at, torch.finfo(torch.float64).eps)
        leaves = [p.clone().requires_grad_() for p in differences.point]
        first = gradients([loss_at(leaves)], leaves, None, create_graph=True)
        second = gradients(first, leaves, differences.v)
        return any(outcome.agrees is False for outcome in differences.compare([g.detach() for g in first], second))


def functions(*outputs: torch.Tensor) -> set[str]:
    """Names of the `autograd.Function`s behind some outputs."""
    kinds = (type(node) for node in nodes([output.grad_fn for output in outputs]))
    return {kind.__name__.removesuffix("Backward") for kind in kinds if issubclass(kind, BackwardCFunction)}


def in_brackets(names: set[str]) -> str:
    """Names in parentheses, if there are any."""
    return f" ({', '.join(sorted(names))})" if names else ""


def uniform(like: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Random numbers in (−1, 1), never zero, with the shape, dtype and device of a tensor."""
    if like.numel() >= LARGE:
        # eight numbers of 8 bits for the price of one
        drawn = torch.empty(-(-like.numel() // 8), dtype=torch.int64, device="cpu")
        numbers = drawn.random_(-(2**63), None, generator=generator).view(torch.int8)[: like.numel()].to(like.device)
        values = torch.empty_like(like, memory_format=torch.contiguous_format)
        for piece, number in pieces(values, numbers):
            piece.copy_(number).add_(0.5).div_(128)
        return values
    return torch.rand(like.shape, generator=generator, dtype=torch.float64, device="cpu").mul_(2).sub_(1).to(like)


def pieces(*tensors: torch.Tensor) -> Iterator[tuple[torch.Tensor, ...]]:
    """Yield the same entries of each tensor, as many as stay in the cache of a processor; all at once elsewhere."""
    size = PIECE if tensors[0].device.type == "cpu" else max(tensors[0].numel(), 1)
    return zip(*(tensor.detach().reshape(-1).split(size) for tensor in tensors), strict=True)


def inner(x: torch.Tensor, y: torch.Tensor) -> float:
    """Inner product of two tensors of one shape."""
    return float(x.flatten() @ y.flatten())


def length(x: torch.Tensor) -> float:
    """Norm ‖x‖₂; infinite if an entry is NaN."""
    norm = float(x.norm())
    return math.inf if math.isnan(norm) else norm


def worst(results: Iterable[Difference]) -> Difference | None:
    """Worst comparison of several parameters: one that differs, else an undecided one, else the least agreement."""
    return max(
        results, key=lambda one: (one.agrees is False, not one.is_noise, one.agrees is None, one.relative), default=None
    )
