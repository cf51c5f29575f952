"""Hessians by central differences of the gradient, with bounds of their errors, where double backward has none."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch.autograd import Function
from torch.overrides import TorchFunctionMode

from hesscond.errors import CaptureError
from hesscond.hessians.linearization import Linearization, Tensors, gradients
from hesscond.hessians.network_operator import HessianOperator
from hesscond.operators.operator import ROUNDING
from hesscond.problem.containers import mapped, tensors_of
from hesscond.problem.evaluation import is_finite
from hesscond.problem.precision import Operations, Precision
from hesscond.problem.problem import Drawn, WatchedEvaluation

EPS = float(torch.finfo(torch.float64).eps)
#: First step, relative to the sizes of the parameters; each further one is shorter by the factor; number of steps.
FIRST, SHORTER, STEPS = 2.0**-5, 4.0, 9
#: Error in units of the rounding of the last step at which shorter steps are of no use.
NEAR = 4.0
#: Factor by which estimated errors are enlarged; share of the Hessian that they may have; both times rounding count.
SAFETY, COARSE, ROUNDED = 4.0, 0.03, 100.0
#: Largest number of gradients along one direction, and usual number.
GRADIENTS = 8

Loss = Callable[[dict[int, torch.Tensor]], torch.Tensor]


def extrapolated(
    sample: Callable[[float], tuple[torch.Tensor, torch.Tensor, float]],
) -> tuple[torch.Tensor, float, float]:
    """Limit of a central difference as its step h tends to 0; a bound of its error in the 2-norm; rounding in that.

    ``sample`` returns the difference, whose expansion has even powers of h; half of the difference of the one-sided
    ones, whose expansion has odd powers, so that its limit is 0 unless there is a kink; and the rounding of both.

    Source: Ridders, Advances in Engineering Software 4 (1982).
    """
    best, error, rounding = torch.empty(0, device="cpu"), float("inf"), 0.0
    before: list[tuple[torch.Tensor, torch.Tensor]] = []
    for number in range(STEPS):
        *both, floor = sample(FIRST / SHORTER**number)
        row = [(both[0], both[1])]
        for k, (even, odd) in enumerate(before):
            finer, kink = row[k]
            row.append(
                (
                    finer + (finer - even) / (SHORTER ** (2 * k + 2) - 1),
                    kink + (kink - odd) / (SHORTER ** (2 * k + 1) - 1),
                )
            )
            apart = max(float((row[-1][0] - other).norm()) for other in (finer, even))
            bound = apart + float(row[-1][1].norm()) + floor
            if bound <= error:
                best, error, rounding = row[-1][0], bound, floor
        before = row
        if error <= NEAR * floor:
            break
    return best, error, rounding


class DifferencedLinearization(Linearization):
    """∇² of the loss of a batch, by central differences of its gradient."""

    def __init__(self, evaluation: WatchedEvaluation, leaves: Tensors, loss_at: Loss) -> None:
        self._loss_at = loss_at
        super().__init__(evaluation, leaves)
        sizes = [float(leaf.detach().norm()) / max(1, leaf.numel()) ** 0.5 for leaf in self.leaves]
        typical = sorted(size for size in sizes if size)
        least = typical[len(typical) // 2] if typical else 1.0
        #: sizes of the entries of the leaves, at least the root mean square in their tensor
        self.sizes = [p.detach().abs().clamp_min(size or least) for p, size in zip(self.leaves, sizes, strict=True)]

    def _prepare(self, evaluation: WatchedEvaluation) -> Tensors:
        return gradients([evaluation.loss], self.leaves, None)

    def ends(self) -> Iterator[Any]:
        return iter(())

    def along(
        self, seeds: Tensors, among: Sequence[int], vector_of: Callable[[Tensors], torch.Tensor]
    ) -> tuple[torch.Tensor, float, float]:
        """Product with a direction, as a vector, a bound of its error in the 2-norm, and the rounding in that."""
        relative = max(float((seed.abs() / self.sizes[i]).amax()) for i, seed in zip(among, seeds, strict=True))
        center = vector_of([self.gradient[i] for i in among])
        if relative == 0:
            return torch.zeros_like(center), 0.0, 0.0
        length = float(center.norm())

        def sample(step: float) -> tuple[torch.Tensor, torch.Tensor, float]:
            plus, minus = (vector_of(self._gradient(seeds, among, way * step / relative)) for way in (1, -1))
            even, odd = (plus - minus) / (2 * step), (plus + minus - 2 * center) / (2 * step)
            return even, odd, EPS / step * (length + float(even.norm()))

        limit, error, rounding = extrapolated(sample)
        return relative * limit, relative * error, relative * rounding

    def curvature(self, seeds: Tensors, among: Sequence[int]) -> tuple[float, float]:
        """Second derivative of the loss along a direction, by differences of it alone, and a bound of its error."""
        relative = max(float((seed.abs() / self.sizes[i]).amax()) for i, seed in zip(among, seeds, strict=True))

        def sample(step: float) -> tuple[torch.Tensor, torch.Tensor, float]:
            plus, minus = (float(self._moved(seeds, among, way * step / relative)[1].detach()) for way in (1, -1))
            difference = self.gradient[0].new_tensor((plus - 2 * self.loss + minus) / step**2)
            return difference, torch.zeros_like(difference), 4 * EPS * abs(self.loss) / step**2

        limit, error, _ = extrapolated(sample)
        return relative**2 * float(limit), relative**2 * error

    def _moved(self, seeds: Tensors, among: Sequence[int], step: float) -> tuple[Tensors, torch.Tensor]:
        """Leaves moved by a step along a direction, and the loss there."""
        moved = {
            i: torch.add(self.leaves[i].detach(), seed, alpha=step).requires_grad_()
            for i, seed in zip(among, seeds, strict=True)
        }
        return list(moved.values()), self._loss_at(moved)

    def _gradient(self, seeds: Tensors, among: Sequence[int], step: float) -> Tensors:
        moved, loss = self._moved(seeds, among, step)
        gradient = [g.detach() for g in gradients([loss], moved, None)]
        if not all(map(is_finite, gradient)):
            raise CaptureError("the gradient is NaN or infinite nearby")
        return gradient

    def product(self, seeds: Tensors, among: Sequence[int] | None = None) -> Tensors:
        chosen = range(len(self.leaves)) if among is None else among
        vector, _, _ = self.along(seeds, chosen, lambda tensors: torch.cat([t.reshape(-1) for t in tensors]))
        parts = vector.split([seed.numel() for seed in seeds])
        return [part.view_as(seed) for part, seed in zip(parts, seeds, strict=True)]


class DifferencedOperator(HessianOperator):
    """Hessian of the loss of a data set by central differences of its gradient; arguments and attributes of its base.

    Up to nine steps are extrapolated for each column, about 8 gradients. ``error`` bounds the difference from the
    Hessian in the 2-norm: that of the extrapolation, of rounding and of what H lacks of symmetry.
    """

    route = "differences of the gradient"
    precision: Precision  # of the forward pass

    def _linearized(self, evaluation: WatchedEvaluation, drawn: Drawn) -> Linearization:
        problem, held, counted = self.problem, Held(), Operations(self.problem.dtype)
        with drawn.state.again(), held:
            problem.snapshot.evaluate(problem.loss_fn, drawn.batch, counted=counted)
        self.precision = counted.precision()

        def loss_at(moved: dict[int, torch.Tensor]) -> torch.Tensor:
            with drawn.state.again(), held.replaying():
                return problem.snapshot.at(moved).evaluate(problem.loss_fn, drawn.batch).loss

        return DifferencedLinearization(evaluation, problem.snapshot.leaves, loss_at)

    @property
    def sizes(self) -> torch.Tensor:
        """(n,) sizes of the parameters, which steps are relative to."""
        first = self._weighted()[0][1]
        return self.layout.vector_of([first.sizes[i] for i in self._chosen])

    @property
    def _chosen(self) -> Sequence[int]:
        return range(len(self.problem.snapshot.leaves)) if self._among is None else self._among

    def _try(self, linearization: Linearization) -> None:
        pass

    def _weighted(self) -> list[tuple[float, DifferencedLinearization]]:
        """Linearizations with their shares in the loss."""
        terms = [(self.weights[number] / self.total_mass, matrix) for number, matrix in self.linearizations()]
        return [(share, matrix) for share, matrix in terms if isinstance(matrix, DifferencedLinearization)]

    @cached_property
    def _formed(self) -> tuple[torch.Tensor, float]:
        """H and its error."""
        H, errors = (
            torch.empty(self.shape, dtype=self.dtype, device=self.device),
            torch.zeros(2, self.order, dtype=torch.float64, device="cpu"),
        )
        parts = self._weighted()
        for column in range(self.order):
            unit = torch.zeros_like(self.point)
            unit[column] = 1
            seeds = self.layout.tensors_of(unit)
            estimates = [(share, matrix.along(seeds, self._chosen, self.layout.vector_of)) for share, matrix in parts]
            H[:, column] = torch.stack([share * product for share, (product, _, _) in estimates]).sum(0)
            for k in (0, 1):
                errors[k, column] = sum(abs(share) * estimate[1 + k] for share, estimate in estimates)
        error, rounding = (SAFETY * float(row.norm()) for row in errors)
        error = max(error, SAFETY * float((H - H.T).norm()) / 2)
        if error > max(COARSE * float(H.norm()), ROUNDED * rounding):
            raise CaptureError(
                f"they do not settle, but differ by {error / float(H.norm()):.0e} of the Hessian from step to step: "
                "there is a kink, a jump or noise in the gradient, as with ReLU, a rounded number or a solver that "
                "stops at a tolerance: use smooth functions, a smaller tolerance, or other data"
            )
        return (H + H.T) / 2, error

    @property
    def error(self) -> float:
        return self._formed[1]

    @cached_property
    def rounding(self) -> float:
        return max(ROUNDING * EPS, self.error / (float(self._formed[0].norm()) or 1.0))

    def to_dense(self) -> torch.Tensor:
        return self._formed[0].clone()

    def multiply(self, vectors: torch.Tensor) -> torch.Tensor:
        return self._formed[0] @ vectors if "_formed" in vars(self) else super().multiply(vectors)

    def curvature(self, v: torch.Tensor) -> tuple[float, float]:
        """VᵀHv by differences of the loss alone, which share nothing with its gradient, and a bound of the error."""
        seeds = self.layout.tensors_of(v)
        estimates = [(share, matrix.curvature(seeds, self._chosen)) for share, matrix in self._weighted()]
        return sum(s * value for s, (value, _) in estimates), sum(abs(s) * error for s, (_, error) in estimates)


class Held(TorchFunctionMode):
    """Mode that records the values without a derivative that a model makes of others, and replays them later.

    Those are what it detaches, reads as numbers, or computes under ``no_grad``, but not in the body of an
    `autograd.Function`, whose derivative is to be checked.
    """

    def __init__(self) -> None:
        super().__init__()
        self._values: list[Any] = []
        self._place: int | None = None
        self._hooked = False

    def replaying(self) -> AbstractContextManager[Any]:
        """Return the context in which recorded values replace the computed ones, unless hooks may have replaced these.

        As the hook of a deep equilibrium model does: its fixed point, found under ``no_grad``, has a derivative.
        """
        self._place = 0
        return nullcontext() if self._hooked else self

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._hooked |= func is torch.Tensor.register_hook
        differentiable = any(tensor.requires_grad for tensor in tensors_of((tuple(args), kwargs)))
        output = func(*args, **(kwargs or {}))
        if not is_constant(output, differentiable) or inside_function():
            return output
        if self._place is None:
            self._values.append(mapped(output, lambda t: t.detach().clone()))
            return output
        if self._place >= len(self._values):
            raise RuntimeError("the model takes another path")
        value = self._values[self._place]
        self._place += 1
        if args and output is args[0]:
            output.copy_(value)
            return output
        return mapped(value, torch.clone)


def is_constant(output: Any, differentiable: bool) -> bool:
    """Whether values have no derivative, in arguments that are ``differentiable``, or under ``no_grad``."""
    # not the nodes of the graph, which have tensors too
    tensors = list(tensors_of(output)) if isinstance(output, (torch.Tensor, tuple, list, dict)) else []
    if not torch.is_grad_enabled():
        return bool(tensors)
    floating = all(tensor.is_floating_point() and not tensor.requires_grad for tensor in tensors)
    return differentiable and (floating if tensors else isinstance(output, (float, complex, str, list, np.ndarray)))


def inside_function() -> bool:
    """Whether Python runs the body of an `autograd.Function` or of a custom operator."""
    frame = sys._getframe(2)
    while frame is not None:
        if frame.f_code is Function.apply.__func__.__code__ or "torch/_library/" in frame.f_code.co_filename:  # type: ignore[attr-defined]
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return False
