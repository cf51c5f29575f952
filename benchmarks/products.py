"""Products with Hessians and Gauss-Newton matrices as rows to time, in gradients of the same loss. Needs torch only."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from cases import Data, Problem, Row, step_row
from torch.func import functional_call, grad, jvp
from torch.nn.attention import SDPBackend, sdpa_kernel

from hesscond.hessians.network_operator import GGNOperator, HessianOperator
from hesscond.spectra.lanczos import lanczos

#: Columns of a product with a block.
BLOCK = 8
#: Sizes of a stream's batches, relative to the single one's.
RAGGED = (1.0, 1.0, 1.0, 0.6, 0.25)


def direction(problem: Problem) -> torch.Tensor:
    """A vector (n,) in the precision and on the device of the model."""
    parameters = list(problem.model.parameters())
    order = sum(parameter.numel() for parameter in parameters)
    drawn = torch.randn(order, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    return drawn.to(parameters[0])


def gradient_row(problem: Problem, data: Data | None = None) -> Row:
    """Forward and backward passes over the batch or the data, weighted by samples: the unit of other times."""
    parameters, data = list(problem.model.parameters()), data or [problem.batch]
    total = sum(len(inputs) for inputs, _ in data)

    def gradient() -> None:
        for inputs, targets in data:
            loss = problem.loss_fn(problem.model(inputs), targets)
            torch.autograd.grad(loss * (len(inputs) / total), parameters)

    return Row("gradient", gradient)


def product_rows(problem: Problem) -> list[Row]:
    """Products for a single batch and for a ragged stream: ours, those of torch.func and of curvlinops."""
    model, loss_fn, batch = problem.model, problem.loss_fn, problem.batch
    vector, counts = direction(problem), [max(1, round(share * len(batch[0]))) for share in RAGGED]
    stream = [(batch[0][:count], batch[1][:count]) for count in counts]
    H, G = (kind(model, loss_fn, batch, dtype=vector.dtype) for kind in (HessianOperator, GGNOperator))
    kept = HessianOperator(model, loss_fn, stream, dtype=vector.dtype)
    # room for the copy of the parameters and for no graph but the one that is needed in any case
    room = vector.numel() * vector.element_size() + 1
    rebuilt = HessianOperator(model, loss_fn, stream, dtype=vector.dtype, memory=room)
    return [
        gradient_row(problem),
        Row("hesscond, Hessian", lambda: H @ vector),
        Row("hesscond, Gauss-Newton", lambda: G @ vector),
        Row("torch.func, jvp of grad", jvp_of_gradient(problem, vector)),
        Row("curvlinops, Hessian", curvlinops_product(problem, [batch], vector)),
        gradient_row(problem, stream),
        Row(f"hesscond, {len(RAGGED)} ragged batches, all graphs kept", lambda: kept @ vector),
        Row("hesscond, the same, 1 kept", lambda: rebuilt @ vector),
        Row("curvlinops, the same", curvlinops_product(problem, stream, vector)),
    ]


def whole_network_rows(problem: Problem) -> list[Row]:
    """An SGD step, a gradient, products in float32 and float64, and the largest eigenvalue of a float32 model."""
    model, loss_fn, batch = problem.model, problem.loss_fn, problem.batch
    vector = direction(problem)
    H, G = (kind(model, loss_fn, batch, dtype=vector.dtype) for kind in (HessianOperator, GGNOperator))
    double, block = HessianOperator(model, loss_fn, batch), vector[:, None].repeat(1, BLOCK)
    return [
        step_row(problem),
        gradient_row(problem),
        Row("Hessian product", lambda: H @ vector),
        Row(f"Hessian product with {BLOCK} vectors", lambda: H @ block),
        Row("Gauss-Newton product", lambda: G @ vector),
        Row("Hessian product in float64", lambda: double @ vector),
        Row("λ_max, tol 1e-3", lambda: lanczos(H, 1, "top", tol=1e-3, dtype=torch.float64)),
    ]


def jvp_of_gradient(problem: Problem, vector: torch.Tensor) -> Callable[[], torch.Tensor]:
    """Forward over reverse mode, all anew each time."""
    point = {name: parameter.detach() for name, parameter in problem.model.named_parameters()}
    parts = vector.split([parameter.numel() for parameter in point.values()])
    tangent = {name: part.view_as(point[name]) for name, part in zip(point, parts, strict=True)}
    inputs, targets = problem.batch

    def loss(parameters: dict[str, torch.Tensor]) -> torch.Tensor:
        return problem.loss_fn(functional_call(problem.model, parameters, (inputs,)), targets)

    def product() -> torch.Tensor:
        # the other backends have no forward mode
        with sdpa_kernel(SDPBackend.MATH):
            _, products = jvp(grad(loss), (point,), (tangent,))
        return torch.cat([products[name].reshape(-1) for name in point])

    return product


def curvlinops_product(problem: Problem, data: Data, vector: torch.Tensor) -> Callable[[], torch.Tensor]:
    """The product of curvlinops, its operator made in the first call."""

    @cache
    def operator() -> Any:
        from curvlinops import HessianLinearOperator

        return HessianLinearOperator(problem.model, problem.loss_fn, list(problem.model.parameters()), data)

    def product() -> torch.Tensor:
        with sdpa_kernel(SDPBackend.MATH):
            return operator() @ vector

    return product
