"""The smallest nonzero eigenvalue of a layer's Hessian by its products, and how many of these other solvers need.

All solvers multiply by the same operator and share the same preconditioner; what is counted and timed is each one's
use of them. scipy's are given what ours has to find out: a tolerance that fits the eigenvalue, and the null space.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from measuring import TimeUp, milliseconds, table, time_limit
from peers import features_and_factors
from scipy.sparse.linalg import LinearOperator as ScipyOperator
from scipy.sparse.linalg import cg, eigsh, lobpcg, minres
from torch import nn
from workloads import Problem

from hesscond.hessians import HessianOperator, network_null_directions
from hesscond.hessians.network_inverse import network_inverse
from hesscond.hessians.null_directions import combined
from hesscond.operators import ApproximateInverse, Deflated, Subspace, SymmetricOperator
from hesscond.spectra.lanczos import lanczos
from hesscond.spectra.smallest import smallest_nonzero

#: Relative error of the eigenvalue that is asked for.
ACCURACY = 1e-8
#: Residuals at which lobpcg is told to stop, relative to the eigenvalue.
TOLERANCES = (1e-1, 1e-2, 1e-3, 1e-4, 1e-5)
#: Bytes of products of features that are formed at a time for the truth.
PIECE = 2.5e8


@dataclass(frozen=True)
class LayerSize:
    """A dense layer with ReLU behind it and a linear head, and its data.

    Attributes
    ----------
    inputs, units, classes, samples
        Sizes; the layer has (inputs + 1) · units parameters.
    decades
        The scales of the inputs' principal directions fall from 1 to 10^−decades.
    copies
        Features that repeat another: ``units`` null directions each.
    cap
        Products that a solver may take.
    """

    inputs: int
    units: int
    samples: int
    decades: float
    classes: int = 10
    copies: int = 0
    cap: int = 1500

    @property
    def order(self) -> int:
        """Parameters of the layer."""
        return (self.inputs + 1) * self.units

    @property
    def null(self) -> int:
        """Null directions that are planted."""
        return self.copies * self.units


FULL_RANK = LayerSize(100, 50, 20_000, 2.0)
PLANTED = LayerSize(125, 40, 20_000, 2.0, copies=1)
WIDE = LayerSize(500, 200, 40_000, 1.7)
SMALL_FULL_RANK = LayerSize(24, 16, 1_500, 1.0, classes=5, cap=100)
SMALL_PLANTED = LayerSize(24, 16, 1_500, 1.0, classes=5, copies=1, cap=100)


def layer_problem(size: LayerSize) -> Problem:
    """The network and normally distributed inputs with graded scales along random directions, float64."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(size.inputs, size.units), nn.ReLU(), nn.Linear(size.units, size.classes)).double()
    nn.init.kaiming_normal_(model[0].weight, nonlinearity="relu")
    generator = torch.Generator().manual_seed(1)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    nn.init.zeros_(model[0].bias)
    model[2].weight.data = normal(size.classes, size.units) / size.units**0.5
    different = size.inputs - size.copies
    scales = torch.logspace(0, -size.decades, different, dtype=torch.float64)
    inputs = (normal(size.samples, different) * scales) @ torch.linalg.qr(normal(different, different)).Q
    inputs = torch.cat([inputs, inputs[:, : size.copies]], 1)
    targets = torch.randint(0, size.classes, (size.samples,), generator=generator)
    return Problem(model, nn.CrossEntropyLoss(), (inputs, targets))


def dense_hessian(problem: Problem) -> np.ndarray:
    """Σ_j C_j ⊗ ĥ_j ĥ_jᵀ of the first layer, from the Jacobian of the output alone."""
    H_hat, B = features_and_factors(problem, "0")
    (samples, units, _), n = B.shape, H_hat.shape[1]
    H = torch.zeros(units, n, units, n, dtype=torch.float64)
    step = max(1, int(PIECE / (8 * units * n)))
    for start in range(0, samples, step):
        h, b = H_hat[start : start + step], B[start : start + step]
        for u in range(units):
            weights = (b[:, : u + 1] * b[:, u : u + 1]).sum(2)
            products = (weights[:, :, None] * h[:, None, :]).flatten(1)
            H[u, :, : u + 1] += (h.T @ products).view(n, u + 1, n)
    for u in range(units):
        H[:u, :, u] = H[u, :, :u].permute(1, 2, 0)
    return H.reshape(units * n, units * n).numpy()


class Counted(SymmetricOperator):
    """An operator whose products are counted and timed, and refused beyond a number of them."""

    def __init__(self, A: SymmetricOperator, cap: int) -> None:
        super().__init__(A.order, A.dtype, A.device)
        self.A, self.psd, self.cap = A, A.psd, cap
        self.products, self.seconds = 0, 0.0

    def multiply(self, vectors: torch.Tensor) -> torch.Tensor:
        """A V."""
        if self.products >= self.cap:
            raise TooManyError
        start = time.perf_counter()
        result = self.A.multiply(vectors)
        self.seconds += time.perf_counter() - start
        self.products += vectors.shape[1]
        return result

    @property
    def rounding(self) -> float:
        """That of A."""
        return self.A.rounding

    @property
    def null_space(self) -> Subspace | None:
        """That of A."""
        return self.A.null_space


class TooManyError(Exception):
    """More products than allowed."""


@dataclass
class Solved:
    """What a solver took and found.

    Attributes
    ----------
    says
        What came of it, if not an eigenvalue.
    inside
        Whether the truth lies in the interval it gave, if it gave one.
    """

    solver: str
    value: float | None = None
    products: int = 0
    seconds: float = 0.0
    outside: float = 0.0
    inside: bool | None = None
    says: str = ""

    def error(self, truth: float) -> float | None:
        """Its relative error."""
        return None if self.value is None else abs(self.value - truth) / abs(truth)


@dataclass
class Layer:
    """One layer, its operator and its preconditioner.

    Attributes
    ----------
    capturing, preparing
        Seconds that it took to make the operator, and the preconditioner.
    """

    size: LayerSize

    def __post_init__(self) -> None:
        self.problem = layer_problem(self.size)
        start = time.perf_counter()
        problem = self.problem
        H = HessianOperator(problem.model, problem.loss_fn, problem.batch, layers=["0"])
        self.capturing = time.perf_counter() - start
        start = time.perf_counter()
        null_space = combined(network_null_directions(H))
        self.operator = H if null_space is None else Deflated(H, null_space)
        self.inverse: ApproximateInverse = network_inverse(H, null_space=null_space)
        self.preparing = time.perf_counter() - start

    @cached_property
    def eigenvalues(self) -> np.ndarray:
        """All of them, ascending, of the dense Hessian."""
        return np.linalg.eigvalsh(dense_hessian(self.problem))

    @cached_property
    def norm(self) -> float:
        """The largest eigenvalue."""
        return float(lanczos(self.operator, 1, "top").eigenvalues[0])

    def rounding_of_truth(self) -> float:
        """What an eigenvalue of the dense Hessian may be off, relative to the smallest nonzero one."""
        return float(4 * np.finfo(float).eps * self.eigenvalues[-1] / self.eigenvalues[self.size.null])


Attempt = Callable[[Counted], Solved]


def solve(layer: Layer, solver: str, attempt: Attempt, limit: float) -> Solved:
    """One solver on the layer, counted and timed, within the cap and the time limit."""
    A = Counted(layer.operator, layer.size.cap)
    start = time.perf_counter()
    try:
        with time_limit(limit), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found = attempt(A)
    except TooManyError:
        found = Solved(solver, says=f"no answer in {A.cap:,} products")
    except TimeUp:
        found = Solved(solver, says=f"no answer in {limit:.0f} s")
    except Exception as error:
        found = Solved(solver, says=f"FAILED: {type(error).__name__}: {error}"[:60])
    found.solver, found.products, found.seconds = solver, A.products, time.perf_counter() - start
    found.outside = (found.seconds - A.seconds) / found.seconds
    return found


def ours(layer: Layer, truth: float | None) -> Attempt:
    """`smallest_nonzero` with its default tolerance and the null space that the operator knows by itself."""

    def attempt(A: Counted) -> Solved:
        found = smallest_nonzero(A, 1, inverse=layer.inverse)
        low, high = float(found.lower[0]), float(found.upper[0])
        slack = 0.0 if truth is None else layer.rounding_of_truth() * truth
        inside = None if truth is None else low - slack <= truth <= high + slack
        says = "converged" if found.converged else f"not converged: {found.message}"
        says += f", {found.null} null directions found" if found.null else ""
        return Solved("", float(found.eigenvalues[0]), inside=inside, says=says)

    return attempt


def scipy_lobpcg(layer: Layer, tolerance: float) -> Attempt:
    """Scipy's lobpcg with the preconditioner and, where there is one, an exact basis of the null space."""

    def attempt(A: Counted) -> Solved:
        start = np.random.default_rng(0).standard_normal((A.order, 1))
        null = null_basis(layer)
        values, _ = lobpcg(
            A.to_scipy(),
            start,
            M=preconditioner(layer),
            Y=null,
            tol=tolerance,
            largest=False,
            maxiter=A.cap,
        )
        return Solved("", float(values[0]))

    return attempt


def shift_inverted(layer: Layer, linear_solver: Callable[..., Any], *, preconditioned: bool) -> Attempt:
    """Scipy's eigsh about zero, each of its steps a linear system for an iterative solver."""

    def attempt(A: Counted) -> Solved:
        operator = A.to_scipy()
        M = preconditioner(layer) if preconditioned else None
        Q = null_basis(layer)

        def inverse(vector: np.ndarray) -> np.ndarray:
            right = vector if Q is None else vector - Q @ (Q.T @ vector)
            solution, _ = linear_solver(operator, right, rtol=1e-10, maxiter=A.cap, M=M)
            return solution if Q is None else solution - Q @ (Q.T @ solution)

        OPinv = ScipyOperator(operator.shape, matvec=inverse, dtype=np.float64)
        start = np.random.default_rng(0).standard_normal(A.order)
        # of the inverse, the null space projected out: its largest eigenvalue is wanted
        values = eigsh(OPinv, k=1, which="LA", tol=1e-9, v0=start, return_eigenvectors=False)
        return Solved("", 1 / float(values[0]))

    return attempt


def preconditioner(layer: Layer) -> ScipyOperator:
    """The layer's Kronecker inverse for scipy."""

    def solved(vectors: np.ndarray) -> np.ndarray:
        block = torch.from_numpy(np.ascontiguousarray(vectors)).view(layer.size.order, -1)
        return layer.inverse.solve(block).numpy().reshape(vectors.shape)

    order = layer.size.order
    return ScipyOperator((order, order), matvec=solved, matmat=solved, dtype=np.float64)


def null_basis(layer: Layer) -> np.ndarray | None:
    """Orthonormal columns that span the planted null space: e_a − e_b for every unit, where feature b repeats a."""
    size = layer.size
    if not size.null:
        return None
    columns = np.zeros((size.units, size.inputs + 1, size.units, size.copies))
    for copy in range(size.copies):
        for unit in range(size.units):
            columns[unit, 1 + copy, unit, copy] = 0.5**0.5
            columns[unit, 1 + size.inputs - size.copies + copy, unit, copy] = -(0.5**0.5)
    return columns.reshape(size.order, size.null)


def compare_bottoms(layer: Layer, *, limit: float) -> tuple[list[Solved], float]:
    """All solvers; the truth."""
    truth = float(layer.eigenvalues[layer.size.null])
    found = [
        solve(layer, "hesscond", ours(layer, truth), limit),
        loosest_lobpcg(layer, truth, limit),
        solve(layer, "scipy eigsh about 0, CG", shift_inverted(layer, cg, preconditioned=False), limit),
        solve(layer, "scipy eigsh about 0, MINRES", shift_inverted(layer, minres, preconditioned=False), limit),
        solve(layer, "the same, CG with the preconditioner", shift_inverted(layer, cg, preconditioned=True), limit),
    ]
    return found, truth


def loosest_lobpcg(layer: Layer, truth: float, limit: float) -> Solved:
    """Lobpcg at the loosest tolerance at which it is truly as exact as asked for; at the last one if at none."""
    for share in TOLERANCES:
        name = f"scipy lobpcg, tol {share:.0e} λ"
        found = solve(layer, name, scipy_lobpcg(layer, share * truth), limit)
        error = found.error(truth)
        if error is None or error <= max(ACCURACY, layer.rounding_of_truth()):
            break
    return found


def compare_wide(layer: Layer, *, limit: float) -> tuple[list[Solved], float]:
    """A layer too large for a dense Hessian: ours, and lobpcg, tighter, whose answer counts as the truth."""
    first = solve(layer, "hesscond", ours(layer, None), limit)
    scale = first.value if first.value is not None else layer.norm * 1e-6
    second = solve(layer, "scipy lobpcg, tol 1e-04 λ", scipy_lobpcg(layer, 1e-4 * scale), limit)
    return [first, second], second.value if second.value is not None else float("nan")


def bottom_table(found: list[Solved], truth: float) -> str:
    """Products, times, and how true the answers are."""
    lines = []
    for one in found:
        error = one.error(truth)
        said = "" if error is None else f"{error:.0e} off"
        if one.inside is not None:
            said += ", truth inside the interval" if one.inside else ", TRUTH OUTSIDE THE INTERVAL"
        said = "; ".join(part for part in (said, one.says) if part)
        lines.append([one.solver, f"{one.products:,}", milliseconds(one.seconds), f"{100 * one.outside:.0f} %", said])
    return table(("solver", "products", "ms", "not products", "answer"), lines, left=(0, 4))
