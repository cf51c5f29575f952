"""One product with a Hessian or a Gauss-Newton matrix next to one gradient of the same loss, by several tools."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from measuring import Outcome, milliseconds, table
from networks import convolutional_network, perceptron, transformer
from torch.func import functional_call, grad, jvp
from torch.nn.attention import SDPBackend, sdpa_kernel
from workloads import Problem, Row, step_row

from hesscond.hessians.network_operator import GGNOperator, HessianOperator
from hesscond.spectra.lanczos import lanczos

Data = list[tuple[torch.Tensor, torch.Tensor]]
NETWORKS = {"MLP": perceptron, "CNN": convolutional_network, "transformer": transformer}
DTYPES = (torch.float32, torch.float64)
#: Columns of a product with a block.
BLOCK = 8
#: Sizes of a stream's batches, relative to the single one's.
RAGGED = (1.0, 1.0, 1.0, 0.6, 0.25)
#: What a product may take, in gradients.
TARGET = 3.0


def described(problem: Problem) -> str:
    """Its parameters and batch, in words."""
    parameters = sum(parameter.numel() for parameter in problem.model.parameters())
    return f"{parameters:,} parameters, batch of {' × '.join(map(str, problem.batch[0].shape))}"


def product_rows(problem: Problem) -> list[Row]:
    """Products for a single batch whose graph is kept: ours, those of curvlinops, and a plain one."""
    model, loss_fn, batch = problem.model, problem.loss_fn, problem.batch
    vector = direction(problem)
    H, G = (kind(model, loss_fn, batch, dtype=vector.dtype) for kind in (HessianOperator, GGNOperator))
    block = vector[:, None].repeat(1, BLOCK)
    rows = [
        gradient_row(problem, [batch]),
        row("making", "hesscond: the operator", lambda: HessianOperator(model, loss_fn, batch, dtype=vector.dtype)),
        row("hessian", "hesscond: Hessian", lambda: H @ vector),
        row("block", f"hesscond: Hessian, {BLOCK} vectors", lambda: H @ block),
        row("ggn", "hesscond: Gauss-Newton", lambda: G @ vector),
    ]  # fmt: skip
    if vector.dtype != torch.float64:
        double, v = HessianOperator(model, loss_fn, batch), vector.double()
        rows.append(row("double", "hesscond: Hessian, in float64", lambda: double @ v))
    return [
        *rows,
        row("jvp", "torch.func: jvp of grad", jvp_of_gradient(problem, vector)),
        row("curvlinops-hessian", "curvlinops: Hessian", curvlinops_product(problem, [batch], vector, "Hessian")),
        row("curvlinops-ggn", "curvlinops: Gauss-Newton", curvlinops_product(problem, [batch], vector, "GGN")),
    ]


def stream_rows(problem: Problem) -> list[Row]:
    """Products for batches of several sizes, the graphs kept or all but one built anew each time."""
    vector, data = direction(problem), ragged(problem.batch)
    kept = HessianOperator(problem.model, problem.loss_fn, data, dtype=vector.dtype)
    # room for the copy of the parameters and for no graph but the one that is needed in any case
    room = vector.numel() * vector.element_size() + 1
    rebuilt = HessianOperator(problem.model, problem.loss_fn, data, dtype=vector.dtype, memory=room)
    what = "hesscond: {} of {} graphs kept"
    return [
        gradient_row(problem, data),
        row("kept", what.format(*kept.retained), lambda: kept @ vector),
        row("rebuilt", what.format(*rebuilt.retained), lambda: rebuilt @ vector),
        row("curvlinops-stream", "curvlinops", curvlinops_product(problem, data, vector, "Hessian")),
    ]  # fmt: skip


def whole_network_rows(problem: Problem) -> list[Row]:
    """An SGD step, a gradient, products in float32 and float64, and the largest eigenvalue of a float32 model."""
    model, loss_fn, batch = problem.model, problem.loss_fn, problem.batch
    vector = direction(problem)
    H, G = (kind(model, loss_fn, batch, dtype=vector.dtype) for kind in (HessianOperator, GGNOperator))
    double, block = HessianOperator(model, loss_fn, batch), vector[:, None].repeat(1, BLOCK)
    return [
        step_row(problem),
        gradient_row(problem, [batch]),
        row("network-product", "Hessian product", lambda: H @ vector),
        row("network-block", f"Hessian product with {BLOCK} vectors", lambda: H @ block),
        row("network-ggn", "Gauss-Newton product", lambda: G @ vector),
        row("network-double", "Hessian product in float64", lambda: double @ vector),
        row("network-top", "λ_max, tol 1e-3", lambda: lanczos(H, 1, "top", tol=1e-3, dtype=torch.float64)),
    ]


def products_a_second(outcomes: Sequence[Outcome]) -> str:
    """The rates of `whole_network_rows`, in words; empty if these are other rows or failed."""
    rows = {outcome.key: outcome for outcome in outcomes if outcome.error is None}
    found = []
    for key, vectors in (("network-product", 1), ("network-block", BLOCK), ("network-ggn", 1), ("network-double", 1)):
        if key in rows and "gradient" in rows and (seconds := rows[key].median):
            ratio = (in_gradients(rows[key], rows["gradient"]) or float("nan")) / vectors
            found.append(f"{rows[key].what}: {vectors / seconds:.4g} a second, {ratio:.2f} gradients each")
    return "; ".join(found)


def row(key: str, what: str, call: Callable[[], Any]) -> Row:
    """A row of the tables."""

    def run() -> tuple[()]:
        call()
        return ()

    return Row(key, what, run)


def direction(problem: Problem) -> torch.Tensor:
    """A vector (n,) in the precision and on the device of the model."""
    parameters = list(problem.model.parameters())
    order = sum(parameter.numel() for parameter in parameters)
    drawn = torch.randn(order, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    return drawn.to(parameters[0])


def ragged(batch: tuple[torch.Tensor, torch.Tensor]) -> Data:
    """A stream of the first samples of a batch, as many as `RAGGED` says."""
    counts = [max(1, round(share * len(batch[0]))) for share in RAGGED]
    return [(batch[0][:count], batch[1][:count]) for count in counts]


def gradient_row(problem: Problem, data: Data) -> Row:
    """Forward and backward passes over the data, weighted by samples: the unit of all other times."""
    parameters = list(problem.model.parameters())
    total = sum(len(inputs) for inputs, _ in data)

    def gradient() -> None:
        for inputs, targets in data:
            loss = problem.loss_fn(problem.model(inputs), targets)
            torch.autograd.grad(loss * (len(inputs) / total), parameters)

    return row("gradient", "gradient", gradient)


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
            _, found = jvp(grad(loss), (point,), (tangent,))
        return torch.cat([found[name].reshape(-1) for name in point])

    return product


def curvlinops_product(problem: Problem, data: Data, vector: torch.Tensor, kind: str) -> Callable[[], torch.Tensor]:
    """The product of curvlinops, its operator made in the first call."""

    @cache
    def operator() -> Any:
        import curvlinops

        parameters = list(problem.model.parameters())
        return getattr(curvlinops, f"{kind}LinearOperator")(problem.model, problem.loss_fn, parameters, data)

    def product() -> torch.Tensor:
        with sdpa_kernel(SDPBackend.MATH):
            return operator() @ vector

    return product


def disagreement(problem: Problem) -> float:
    """The largest difference of our product from torch.func's, relative to its norm: the rows compute the same."""
    vector = direction(problem)
    expected = jvp_of_gradient(problem, vector)()
    found = HessianOperator(problem.model, problem.loss_fn, problem.batch, dtype=vector.dtype) @ vector
    return float((found - expected).norm() / expected.norm())


def product_table(outcomes: dict[torch.dtype, Sequence[Outcome]]) -> str:
    """Times per precision, in gradients of the same precision too; a block's per vector."""
    labels = {outcome.key: outcome.what for rows in outcomes.values() for outcome in rows}
    lines = []
    for key, what in labels.items():
        line = [what + (", each" if key == "block" else "")]
        for rows in outcomes.values():
            line += product_cells(key, {outcome.key: outcome for outcome in rows})
        lines.append(line)
    names = [str(dtype).removeprefix("torch.") for dtype in outcomes]
    headings = ["", *(text for name in names for text in (f"{name}, ms", "gradients"))]
    return table(headings, lines, left=(0,))


def product_cells(key: str, rows: dict[str, Outcome]) -> list[str]:
    """The two cells of a row and a precision."""
    if key not in rows:
        return ["", ""]
    outcome, vectors = rows[key], BLOCK if key == "block" else 1
    if outcome.error is not None or outcome.median is None:
        return [why_not(outcome), "–"]
    ratio = in_gradients(outcome, rows["gradient"])
    return [milliseconds(outcome.median / vectors), "–" if ratio is None else f"{ratio / vectors:.2f}"]


def in_gradients(outcome: Outcome, gradient: Outcome) -> float | None:
    """Median over the turns of a row's time in gradients of the same turn, so that slow moments count alike."""
    pairs = list(zip(outcome.times, gradient.times, strict=False))
    if pairs:
        return statistics.median(seconds / unit for seconds, unit in pairs)
    return outcome.first / gradient.median if outcome.first and gradient.median else None


def why_not(outcome: Outcome) -> str:
    """What a table says of a row without a time."""
    reason = (outcome.error or "not run").strip().splitlines()[-1]
    return "not installed" if reason.startswith(("ModuleNotFoundError", "ImportError")) else f"FAILED: {reason}"[:40]
